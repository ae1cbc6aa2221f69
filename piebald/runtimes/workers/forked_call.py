"""A function that is called in a process of its own, so that this one does not begin to use a GPU."""

from __future__ import annotations

import json
import multiprocessing
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from piebald.core.errors import PiebaldError, RuntimeFault, SettingError


def check_forkable(device: str) -> None:
    """Refuse to fork workers from a process that uses a GPU already: they could not.

    Raises:
        SettingError: it does.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise SettingError(
            f"workers with device = {device!r} are forked from this process, which has used a GPU already, so that "
            "they could not: start the run in a new process, set workers = 0, or take runtime = 'ray' with gpus = 0.5"
        )


def in_fork(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Call a function in a forked process and return its result, which is plain JSON.

    Raises:
        SettingError: the function raised it.
        RuntimeFault: it raised another error, or its process died.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(function, theirs), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, see `forked.ForkedWorkers`
        process.start()
    theirs.close()
    try:
        answer: dict[str, Any] = json.loads(ours.recv_bytes())
    except EOFError:
        process.join()
        raise RuntimeFault(f"the process that tries the engines died (exit code {process.exitcode})") from None
    finally:
        ours.close()
    process.join()
    if "error" in answer:
        raise (SettingError if answer["setting"] else RuntimeFault)(answer["error"])
    result: dict[str, Any] = answer["made"]
    return result


def _call(function: Callable[[], dict[str, Any]], pipe: Connection) -> None:
    torch.set_num_threads(1)  # before anything else: the others that torch would wait for were not forked
    answer: dict[str, Any]
    try:
        answer = {"made": function()}
    except Exception as error:  # whatever the user's own code may raise
        reason = str(error) if isinstance(error, PiebaldError) else f"{type(error).__name__}: {error}"
        answer = {"error": reason, "setting": isinstance(error, SettingError)}
    pipe.send_bytes(json.dumps(answer).encode())
