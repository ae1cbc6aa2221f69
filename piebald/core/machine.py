"""The machine: its devices, and what of it decides the bits of a run besides its settings."""

from __future__ import annotations

import gc
import os
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from piebald.core.errors import DeviceLost

HOST = torch.device("cpu")
WITHOUT_FLOAT64 = {"mps"}  # kinds of devices
PINNED = {"cuda"}  # kinds of devices that read and write pinned memory by themselves, while the host goes on
# What CUDA says where it refuses everything that the process asks of it afterwards.
_FATAL = (
    "misaligned address", "illegal memory access", "device-side assert", "illegal instruction", "illegal address",
    "invalid program counter", "unspecified launch failure", "hardware stack error", "uncorrectable ECC",
    "launch timed out", "device lost",
)  # fmt: skip
_COLLECT_AFTER = 2.0  # seconds of `existing_objects_frozen`: a full collection of garbage takes a tenth of a second
_seconds_frozen = 0.0
objects_are_frozen = False  # inside of `existing_objects_frozen`; counting them again would walk through all of them


def machine() -> dict[str, str | int]:
    """The processor, the vector instructions that torch uses on it, and torch's threads, for a run's folder."""
    return {
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def count_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cache_folder() -> Path | None:
    """The user's folder for what can be made or downloaded again: the variable PIEBALD_CACHE, or the system's place.

    Returns:
        The folder, which need not exist; None where the user has no home.
    """
    if folder := os.environ.get("PIEBALD_CACHE"):
        return Path(folder)
    home = Path("~").expanduser()
    if not home.is_absolute():
        return None
    if platform.system() == "Windows":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "piebald" / "piebald" / "Cache"
    if platform.system() == "Darwin":
        return home / "Library" / "Caches" / "piebald"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "piebald"


def device_named(name: str) -> str:
    """The device that a setting names; "auto" is the first of a GPU, Apple's GPU and the CPU that is here.

    Raises:
        ValueError: there is no such device, or not on this machine.
    """
    # GPUs are counted and not asked whether they work: CUDA would begin in this process, which could then not fork
    # workers that use them
    kind, _, number = name.partition(":")
    if name == "auto":
        return "cuda" if torch.cuda.device_count() else "mps" if torch.backends.mps.is_available() else "cpu"
    if kind not in ("cpu", "cuda", "mps") or (number and not (kind == "cuda" and number.isdecimal())):
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda', 'cuda:N' or 'mps', got {name!r}")
    if kind == "cuda" and not torch.cuda.device_count():
        raise ValueError(f"device is {name!r} but torch finds no GPU here: use device = 'cpu' or 'auto'")
    if number and int(number) >= torch.cuda.device_count():
        raise ValueError(f"device is {name!r} but GPUs are numbered from 0 and there are {torch.cuda.device_count()}")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ValueError("device is 'mps' but torch finds no GPU of Apple's here: use device = 'cpu' or 'auto'")
    return name


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device.

    A GPU is sent it through pinned memory, from which it reads by itself: a copy from ordinary memory would make the
    host wait until the GPU has done all that it was asked before.
    """
    if tensor.device.type != "cpu" or device.type not in PINNED:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Named tensors on the host, which waits once for those of a GPU: it writes all of them into pinned memory."""
    on_device = [tensor for tensor in tensors.values() if tensor.device.type in PINNED and tensor.numel()]
    copies = {name: tensor.to("cpu", non_blocking=tensor.device.type in PINNED) for name, tensor in tensors.items()}
    for last in on_device[-1:]:
        last.flatten()[:1].tolist()  # the copies were asked for before
    return copies


def raise_if_lost(error: BaseException, device: torch.device | None = None) -> None:
    """Raise `DeviceLost` where an error says that a GPU refuses whatever this process asks of it from now on.

    Args:
        error: that was raised.
        device: if given and no CPU, it is asked to compute something, since not every error says what it has done.
    """
    if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError):
        return
    message = " ".join(str(error).split("\n")[0].split())
    if any(words in message for words in _FATAL) or (device is not None and not _computes(device)):
        device_name = "the GPU" if device is None else f"device {str(device)!r}"
        raise DeviceLost(
            f"{device_name} has failed and computes nothing more for this process ({message[:200]}): completed steps "
            "are safe, continue with `piebald resume` in a new process; a label or a token beyond the model's classes "
            "does this too, and CUDA_LAUNCH_BLOCKING=1 tells where"
        ) from error


def _computes(device: torch.device) -> bool:
    """Return whether a device still computes."""
    if device.type == "cpu":
        return True
    try:
        return bool((torch.ones(1, device=device) + 1).item() == 2)
    # a device without room for one more number still computes
    except torch.OutOfMemoryError:
        return True
    except RuntimeError:
        return False


@contextmanager
def naming_lost(device: torch.device | None = None) -> Iterator[None]:
    """Turn an error after which the device is lost into `DeviceLost` (`raise_if_lost`)."""
    try:
        yield
    except RuntimeError as error:
        raise_if_lost(error, device)
        raise


def float64_device(device: torch.device) -> torch.device:
    """Return the device for float64 numbers: the same one, or the host for Apple's GPUs, which have no float64."""
    return torch.device("cpu") if device.type in WITHOUT_FLOAT64 else device


def set_up_gpu(tf32: bool, repeats: bool) -> None:
    """Set how NVIDIA's GPUs compute in this process from now on, and in those that it forks.

    Args:
        tf32: whether they round the inputs of products and convolutions to 10 bits.
        repeats: whether cuDNN takes algorithms that repeat themselves, and chooses them without measuring.
    """
    if repeats:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    precision = "tf32" if tf32 else "ieee"
    backends: Any = torch.backends
    for backend in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn):
        backend.fp32_precision = precision


@contextmanager
def one_thread(wanted: bool = True) -> Iterator[None]:
    """Compute with one thread, if wanted; the user's setting is restored afterwards."""
    before = torch.get_num_threads()
    if wanted:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def existing_objects_frozen() -> Iterator[None]:
    """Keep Python's garbage collector from looking at what exists already, until the end of the context.

    A full collection looks at all objects, of which torch and Piebald alone have 200,000.  Rounds with thousands of
    results set it off again and again, and in a forked worker it also copies the memory of all objects that it looks
    at.  Garbage among what existed is collected afterwards, once such contexts have taken some seconds.  Where somebody
    has frozen objects before (`gc.freeze`), nothing happens.
    """
    global _seconds_frozen, objects_are_frozen
    if objects_are_frozen or gc.get_freeze_count():
        yield
        return
    began, objects_are_frozen = time.monotonic(), True
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        objects_are_frozen = False
        _seconds_frozen += time.monotonic() - began
        # what was frozen was not collected meanwhile: many short contexts in a row must not pile up garbage
        if _seconds_frozen > _COLLECT_AFTER:
            _seconds_frozen = 0.0
            gc.collect()


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on an NVIDIA GPU; None of other devices, whose memory is shared with everything else."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def free_cached(device: torch.device) -> None:
    """Give back what torch keeps of a GPU's memory for later, as after memory ran out."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _processor() -> str:
    """The name of the processor, as well as the system tells it."""
    described = Path("/proc/cpuinfo")
    lines = described.read_text(errors="replace").splitlines() if described.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def differences(recorded: dict[str, object]) -> list[str]:
    """Return what differs from a run folder's record of `machine` and torch's version, as "torch 2.1, now 2.2"."""
    now: dict[str, object] = {"torch": torch.__version__, **machine()}
    del now["threads"]  # simulated clients are computed with one
    before = {"torch": recorded.get("torch"), **_table(recorded.get("machine"))}
    return [
        f"{name} {before[name]}, now {value}" for name, value in now.items() if before.get(name) not in (None, value)
    ]


def _table(value: object) -> dict[str, object]:
    return dict(value) if isinstance(value, dict) else {}
