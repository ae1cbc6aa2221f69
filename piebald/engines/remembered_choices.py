"""Engine choices that are remembered between runs, so that a run like an earlier one begins without measuring.

Each choice is a small file in the user's cache folder, named by a digest of what decides which engine is fast: the
model and its rows, the kind of training, the machine, and the versions of torch and Piebald.  A file can only say which
of the choices that would be measured is taken.  Whether an engine computes this model correctly is tried anew in each
run, and a file that is not as `remember` writes it is not there.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from piebald.contracts import SgdConfig
from piebald.core.errors import SettingError
from piebald.core.machine import cache_folder, count_cores, machine
from piebald.core.private_files import write_private
from piebald.core.reading.files import opened
from piebald.methods.client_work import ClientWork
from piebald.version import __version__

SWITCH = "PIEBALD_ENGINE_CACHE"
_DAYS = 30  # after so many, engines are measured again
_MOST = 500  # files; the oldest ones are deleted
_LONGEST = 1000  # bytes of a file


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The settings that are measured where they are left open.

    Attributes:
        engine: name of the engine.
        stack: clients that it trains at once.
        seconds_per_step: of one client.
    """

    engine: str
    stack: int
    seconds_per_step: float


def is_on() -> bool:
    """Return whether choices are remembered: the environment variable PIEBALD_ENGINE_CACHE, "on" by default.

    Raises:
        SettingError: the variable is neither "on" nor "off".
    """
    switch = os.environ.get(SWITCH) or "on"
    if switch not in ("on", "off"):
        raise SettingError(f"the environment variable {SWITCH} must be 'on' or 'off', got {switch!r}")
    return switch == "on"


def key_of(
    work: ClientWork,
    trial: SgdConfig,
    rows: Sequence[int | None],
    device: torch.device,
    bfloat16: bool,
    recorded: bool = True,
) -> str:
    """A digest of what decides which engine is fast.

    Args:
        work: the model and the components that work at clients.
        trial: the training that is measured.
        rows: how many training rows the clients have on which it is measured; None where that is not known.
        device: where engines compute.
        bfloat16: whether passes are under autocast.
        recorded: whether steps are recorded, where the device can.
    """
    counts = [count for count in rows if count is not None]
    decides = {
        "versions": [__version__, torch.__version__],
        "machine": [machine(), count_cores()],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "passes": [bfloat16, recorded],
        "model": [[type(module).__module__, type(module).__qualname__] for module in work.model.modules()],
        "structure": repr(work.model),
        "layout": [[slot.name, list(slot.shape)] for slot in work.layout.slots],
        "rows": [repr(work.shape), list(work.outputs), work.objective.name],
        "clients": [len(rows), round(math.log2(1 + sum(counts) / len(counts)), 0) if counts else None],
        "training": [
            trial.batch,
            trial.momentum > 0,
            type(trial.rule).__qualname__,
            len(trial.groups),
            type(trial.step).__qualname__,
        ],
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def recall(key: str, engines: Collection[str], stacks: Collection[int]) -> EngineChoice | None:
    """The choice that was remembered under a key, or None.

    Args:
        key: see `key_of`.
        engines, stacks: what may be chosen.
    """
    path = _path(key)
    try:
        if path is None or not path.is_file() or not -1 < (time.time() - path.stat().st_mtime) / 86_400 < _DAYS:
            return None
        with opened(path) as file:
            choice = EngineChoice(**json.loads(file.read(_LONGEST)))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    engine, stack, seconds = choice.engine, choice.stack, choice.seconds_per_step
    usable = (
        isinstance(engine, str) and engine in engines
        and type(stack) is int and stack in stacks
        and type(seconds) is float and 0 < seconds < math.inf
    )  # fmt: skip
    return choice if usable else None


def remember(key: str, choice: EngineChoice) -> None:
    """Keep a choice for later runs; where that is not possible, they measure."""
    path = _path(key)
    if path is None:
        return
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, json.dumps(asdict(choice)), lasting=False)
        files = sorted(path.parent.glob("*.json"), key=lambda path_of_choice: path_of_choice.stat().st_mtime)
        for old in files[:-_MOST]:
            old.unlink()


def _path(key: str) -> Path | None:
    folder = cache_folder() if is_on() else None
    return None if folder is None else folder / "engines" / f"{key}.json"
