"""The program of a loader (`tests.processes`): imports packages, then forks a process for each program asked for."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import runpy
import signal
import socket
import struct
import sys
import time
import types
from pathlib import Path
from typing import Any

import cryptography.x509
import numpy
import pandas
import pydantic
import torch
import typer

LOADED = (cryptography, numpy, pandas, pydantic, torch, typer)
_NUMBER = struct.Struct("!I")


def next_program(connection: socket.socket) -> dict[str, Any]:
    """Fork for what is asked, and return in the process that was forked.  The loader ends with its test process."""
    while True:
        head, files, _, _ = socket.recv_fds(connection, _NUMBER.size, 3)
        if not head:
            os._exit(0)
        asked = json.loads(connection.recv(_NUMBER.unpack(head)[0], socket.MSG_WAITALL))
        answer, told = os.pipe()
        if (between := os.fork()) == 0:
            parent = os.getpid()
            if (pid := os.fork()) != 0:
                os.write(told, _NUMBER.pack(pid))
                os._exit(0)
            while os.getppid() == parent:  # a program may ask who its parent is
                time.sleep(0.001)
            connection.close()
            os.close(answer)
            os.close(told)
            for place, file in enumerate(files):
                os.dup2(file, place)
            for file in files:
                os.close(file)
            return asked
        os.waitpid(between, 0)  # from now on the program is a child of the test process
        connection.sendall(os.read(answer, _NUMBER.size))
        for file in (answer, told, *files):
            os.close(file)


def begin(program: dict[str, Any]) -> None:
    """What Python does before it runs a program: variables, folder, session, standard streams and path."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where tests run in the background of a shell
    os.environ.clear()
    os.environ.update(program["variables"])
    os.chdir(program["folder"])
    if program["session"]:
        os.setsid()
    at_once = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False, encoding=sys.stdout.encoding)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, encoding=sys.stderr.encoding, errors=sys.stderr.errors)  # noqa: SIM115
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty(), write_through=at_once)
    sys.stderr.reconfigure(line_buffering=True, write_through=at_once)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    faulthandler.enable(2)  # what all threads do where one of them ends the process
    asked = program["words"]
    first = {"-m": os.getcwd(), "-c": ""}.get(asked[0], str(Path(asked[0]).resolve().parent))
    sys.orig_argv = [sys.executable, *asked]
    sys.argv = [asked[0], *asked[1:]] if asked[0] not in ("-m", "-c") else [asked[0], *asked[2:]]
    further = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [first, *(os.path.abspath(one) for one in further if one), *sys.path[1:]]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests and their programs
    gc.freeze()  # what is loaded is shared by all that are forked
    asked = next_program(socket.socket(fileno=int(sys.argv[1])))
    begin(asked)
    how, *words = asked["words"]
    if how == "-m":
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[0], "<string>", "exec"), main.__dict__)
    else:
        runpy.run_path(how, run_name="__main__")
