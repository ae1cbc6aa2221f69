"""Processes of Python for tests, without loading PyTorch anew for each.

A *loader* process imports packages of others once.  For each program it forks twice, so that what it forks becomes a
child of the test process (prctl(2), PR_SET_CHILD_SUBREAPER): a real process, which `wait`, signals and kills treat as
any other.  Piebald itself is imported there, by the program, and never by a loader.  Where lines are counted, or where
the system is not Linux, Python is started as usual.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LOADER = Path(__file__).with_name("process_loader.py")
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_NUMBER = struct.Struct("!I")
_READ_AT_START = ("PYTHON", "LC_", "LANG", "OMP_", "MKL_", "OPENBLAS_", "TORCH_", "LD_", "MALLOC_")
_lock = threading.Lock()
_loaders: dict[tuple[int, str], _Loader] = {}  # by process, since a forked one must not share a connection


def command(*words: object) -> list[str]:
    """The words of a command of Piebald."""
    return [sys.executable, "-m", "piebald.cli", *map(str, words)]


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen` for programs in Python, `[sys.executable, ...]`: a module, a file, or code."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any,
                       env: Any, startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int,
                       c2pread: int, c2pwrite: int, errread: int, errwrite: int, *others: Any) -> None:  # fmt: skip
        words = [os.fsdecode(word) for word in args]
        variables = dict(os.environ if env is None else env)
        if preexec_fn or pass_fds or shell or executable or not _forks(words, variables):
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *others,
            )  # fmt: skip
            return
        files = [usual if given == -1 else given for usual, given in enumerate((p2cread, c2pwrite, errwrite))]
        program = {"words": words[1:], "folder": os.path.abspath(cwd or "."), "variables": variables}
        with _lock:
            self.pid = _loader(variables).fork(program | {"session": bool(others[-2])}, files)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def run(
    words: Sequence[object], *, timeout: float | None = None, check: bool = False, capture_output: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:  # fmt: skip
    """`subprocess.run` with `Popen`."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen([*map(str, words)], **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


class _Loader:
    """A process that has imported packages and forks programs."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.connection, other = socket.socketpair()
        with other:
            self.process = subprocess.Popen(
                [sys.executable, LOADER, str(other.fileno())], pass_fds=[other.fileno()], env=variables,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def fork(self, program: Mapping[str, Any], files: Sequence[int]) -> int:
        """Start a program with three open files, and return its process."""
        asked = json.dumps(program).encode()
        control = ctypes.CDLL(None).prctl
        control(_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(self.connection, [_NUMBER.pack(len(asked))], files)
            self.connection.sendall(asked)
            return int(_NUMBER.unpack(self.connection.recv(_NUMBER.size, socket.MSG_WAITALL))[0])
        finally:
            control(_SUBREAPER, 0, 0, 0, 0)

    def close(self) -> None:
        self.connection.close()
        self.process.wait()


def _forks(words: Sequence[str], variables: Mapping[str, str]) -> bool:
    counts_lines = any(name.startswith("COV") for name in variables)
    return sys.platform == "linux" and not counts_lines and words[0] == sys.executable and len(words) > 1


def _loader(variables: Mapping[str, str]) -> _Loader:
    """The loader whose Python, libraries and locale were started with the same variables."""
    read = {name: value for name, value in variables.items() if name.startswith(_READ_AT_START)}
    read.pop("PYTHONPATH", None)  # followed by the program
    key = (os.getpid(), json.dumps(read, sort_keys=True))
    if key not in _loaders:
        _loaders[key] = _Loader({name: value for name, value in variables.items() if name != "PYTHONPATH"})
        atexit.register(_loaders[key].close)
    return _loaders[key]
