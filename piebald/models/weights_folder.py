"""Folders of published weights in the Hugging Face format: a config.json and safetensors.

Weights are mapped from their files and not read: the processes of a machine share one copy of what they do not change.
Nothing is unpickled, and no code that lies beside the weights is imported.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from piebald.core.arguments import DEEPEST
from piebald.core.errors import SettingError, import_extra, shown
from piebald.core.files import read_json, regular

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MISSING = "transformers and peft are missing"
_FILES = ["config.json", "*.safetensors", INDEX]  # what is fetched, and nothing else
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# in names of what is repeated, of which transformers makes a Python object each before any limit can stop it
_DEEP = re.compile(r"layer(?!.*(size|dim|norm))|depth|num_labels|id2label|experts|num_(stages|blocks|queries)")
_MOST_LAYERS, _LARGEST = 10_000, 1 << 32
_DIGITS, _LONGEST_NUMBER = re.compile(r"\s*\+?\d+(\.\d*)?(e\+?\d+)?\s*", re.IGNORECASE), 20


@dataclass(frozen=True, slots=True)
class WeightsFolder:
    """A folder with weights.

    Attributes:
        path: where it is.
        name: of the model on the Hub, or of the folder.
        revision: the commit on the Hub that it holds; None for a folder of the user's.
    """

    path: Path
    name: str
    revision: str | None = None

    @property
    def described(self) -> str:
        """Name and revision in a message."""
        return self.name if self.revision is None else f"{self.name} of revision {self.revision}"


def find(weights: str | Path, revision: str | None = None) -> WeightsFolder:
    """The folder of some weights; those of the Hub are downloaded unless they are in its cache.

    Args:
        weights: a folder, or the name of a model on the Hub.
        revision: branch, tag or commit on the Hub.

    Raises:
        SettingError: there is no such folder, or the weights cannot be fetched.
    """
    # folders first: a folder of the user's may have a name like a model on the Hub
    if Path(weights).is_dir():
        if revision is not None:
            raise SettingError(f"a folder has no revision but {weights} is one, got {revision!r}: leave it out")
        return WeightsFolder(Path(weights), Path(weights).resolve().name)
    name = str(weights)
    # a `Path` means a folder: a typo in it must not become a download
    if isinstance(weights, Path) or not _HUB_NAME.fullmatch(name):
        raise SettingError(
            f"weights must be a folder or the name of a model on the Hugging Face Hub, and there is no folder {name}"
        )
    # the cache first, so that a run works without a network and needs no request to the Hub
    folder = cached(name, revision)
    return folder if folder is not None else _fetched(name, revision)


def cached(name: str, revision: str | None = None) -> WeightsFolder | None:
    """The weights of a model on the Hub that are in this machine's cache already, or None."""
    if not _HUB_NAME.fullmatch(name):
        return None
    hub = _hub()
    try:
        path = Path(hub.snapshot_download(name, revision=revision, local_files_only=True, allow_patterns=_FILES))
    except (OSError, ValueError):  # not there, or no name that the Hub gives
        return None
    # a download that was cut off leaves a folder without weights; its name is the commit
    return WeightsFolder(path, name, path.name) if _weight_files(path) else None


def _fetched(name: str, revision: str | None) -> WeightsFolder:
    try:
        path = Path(_hub().snapshot_download(name, revision=revision, allow_patterns=_FILES))
    except Exception as error:  # of the network, the Hub or the disk: each library below raises its own
        message = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        at = "" if revision is None else f" of revision {revision}"
        raise SettingError(
            f"there is no folder {name!r}, and the weights {name!r}{at} cannot be fetched from the Hugging Face Hub "
            f"({message[:200]}): give a folder that holds them"
        ) from None
    return WeightsFolder(path, name, path.name)


def _hub() -> Any:
    return import_extra("huggingface_hub", "hf", MISSING)


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration in a folder.

    Raises:
        SettingError: it has none, or the network needs code of its own or quantized weights.
    """
    path = folder / "config.json"
    try:
        values = read_json(path)
    except FileNotFoundError:
        # a frequent mistake, since peft writes no config.json
        hint = "it holds an adapter: give the folder of the model that it belongs to"
        hint = hint if (folder / "adapter_config.json").is_file() else "give one with a config.json and safetensors"
        raise SettingError(f"{folder} holds no model: {hint}") from None
    except (OSError, ValueError) as error:  # also not UTF-8
        raise SettingError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise SettingError(f"{path} is no configuration of a model: it must name its model_type, like 'distilbert'")
    configuration: dict[str, Any] = _without_code(folder, values)
    return configuration


def _without_code(folder: Path, values: Any, depth: int = 0) -> Any:
    """A configuration, and those of the networks that it is made of, without what could fetch or run code."""
    # a hostile file could nest as deeply as Python's stack allows
    if depth > DEEPEST:
        raise SettingError(f"{folder / 'config.json'} is nested too deeply for a configuration: choose another model")
    if isinstance(values, list):
        return [_without_code(folder, value, depth + 1) for value in values]
    if not isinstance(values, dict):
        return values
    for name, value in values.items():
        most = _MOST_LAYERS if _DEEP.search(name) else _LARGEST
        if any(_size(number) > most for number in (value if isinstance(value, list) else [value])):
            raise SettingError(
                f"{folder / 'config.json'} has {name} = {shown(value)}, which no network has: replace it"
            )
    # these name Python files beside the weights, which transformers would import
    if "auto_map" in values:
        raise SettingError(f"the model in {folder} needs code of its own, which is never run: choose another model")
    if "quantization_config" in values:
        raise SettingError(f"the weights in {folder} are quantized: choose the model in its full precision")
    harmless = {name: value for name, value in values.items() if not _chooses_code(name, value)}
    return {name: _without_code(folder, value, depth + 1) for name, value in harmless.items()}


def _size(value: Any) -> float:
    """Return the number that a setting is, also as text, and 0 for other values."""
    if isinstance(value, str) and _DIGITS.fullmatch(value):
        return float(value) if len(value) <= _LONGEST_NUMBER else math.inf
    # some settings are infinite, which sizes nothing
    return value if isinstance(value, int | float) and value != math.inf else 0


def _chooses_code(name: str, value: Any) -> bool:
    """Return whether a setting chooses the code that computes; a name on the Hub would fetch that code.

    Sizes of convolutions are called kernels as well, and are numbers.
    """
    plain = value if isinstance(value, list) else [value]
    # a flag such as `use_kernels = true` is an int in Python, and loads kernels
    sizes = all(isinstance(number, int) and not isinstance(number, bool) for number in plain)
    return "_implementation" in name or ("kernel" in name and not sizes)


def weight_bytes(folder: Path) -> int:
    """The bytes of a folder's weights."""
    return sum(regular(file) for file in _weight_files(folder))


def mapped_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder by name, mapped from its files: they take memory where they are used or changed.

    Raises:
        SettingError: it has no safetensors, or they are damaged.
    """
    files = _weight_files(folder)
    if not files:
        # looked for only to explain: unpickling runs whatever code a file holds
        pickled = next(iter(sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.ckpt")])), None)
        if pickled is not None:
            raise SettingError(
                f"{folder} has pickled weights ({pickled.name}), which are never read since that would run what they "
                f"hold: save the model with transformers, which writes {WHOLE}"
            )
        raise SettingError(f"{folder} has no weights: it must hold {WHOLE}")
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= _mapped(file)
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    """The files with a folder's weights: one, or the parts that an index lists; none where there are none."""
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    index = folder / INDEX
    if not index.is_file():
        return []
    try:
        parts = set(read_json(index)["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise SettingError(f"{index} cannot be read as an index of weights: fetch the folder again") from None
    for part in parts:
        # a name with a separator could lead out of the folder
        if not isinstance(part, str) or Path(part).name != part or not (folder / part).is_file():
            raise SettingError(f"{index} names {shown(part)}, which is no file in its folder: fetch the folder again")
    # sorted, since a set has no order that repeats
    return [folder / part for part in sorted(parts)]


def _mapped(file: Path) -> dict[str, Tensor]:
    try:
        # a pipe or a device in place of a file would block or never end
        regular(file)
        with safe_open(str(file), framework="pt") as tensors:  # which maps the file into memory, privately
            return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 - it cannot be iterated
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        message = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise SettingError(f"{file} cannot be read as safetensors: {message[:200]}") from None
