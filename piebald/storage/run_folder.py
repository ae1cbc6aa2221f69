"""The folder of a run beside its store: whether it may be used, the types of its description, and chosen models."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor
from typing_extensions import TypedDict

from piebald.core.errors import RunFolderError, shown
from piebald.core.files import read_json
from piebald.storage import tensor_files
from piebald.storage.lock import refuse_links
from piebald.storage.schema import DATABASE

START = "start.safetensors"  # what a run took over, see `lineage`
FITTED = "temperatures.json"  # of models, and thresholds of classes, where they were asked for
TOKENIZER = "tokenizer.json"  # of a run that reads text, as the Hugging Face Hub calls it
UNFINISHED = DATABASE + ".part"
_LEFTOVERS = {"run.lock", START, START + ".part", UNFINISHED, UNFINISHED + "-wal", UNFINISHED + "-shm"}


def missing(folder: Path) -> list[Path]:
    """The folders that making this one would make, the innermost first."""
    return [place for place in (folder, *folder.parents) if not place.exists()]


def remove_again(folder: Path, made: Sequence[Path]) -> None:
    """Remove what a run that could not be started has left, so that the same command can be tried again."""
    with suppress(OSError):  # what cannot be removed is taken for leftovers the next time
        for name in sorted(_LEFTOVERS | {DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm"}):
            (folder / name).unlink(missing_ok=True)
        for new_folder in made:
            new_folder.rmdir()


def refuse_occupied(folder: Path) -> None:
    """Refuse a folder for a new run that holds anything but what a killed start has left."""
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"{folder} is a file: choose a folder for the run")
    if (folder / DATABASE).exists():
        raise RunFolderError(
            f"{folder} already holds a run: continue it with `piebald resume {folder}` or choose another folder"
        )
    if folder.is_dir() and {path.name for path in folder.iterdir()} - _LEFTOVERS:
        raise RunFolderError(f"{folder} is not empty and holds no run: choose another folder")


def existing(folder: Path) -> Path:
    """The folder, if it holds a run."""
    if not folder.exists():
        raise RunFolderError(f"there is no run folder at {folder}: check the path")
    if not folder.is_dir():
        raise RunFolderError(f"{folder} is a file, not a run folder: name the folder that holds it")
    if not (folder / DATABASE).exists() and not (folder / DATABASE).is_symlink():
        raise RunFolderError(f"{folder} is not a run folder: it has no {DATABASE}")
    refuse_links(folder, written=False)
    return folder


CHOICE_AXIS = "keep"  # of the notes


def recorded_choices(notes: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """The recorded choices by client, from the notes of a run, see `choice.record`."""
    by_client = {int(row["name"].removeprefix("client-")): row["value"] for row in notes if row["axis"] == CHOICE_AXIS}
    return dict(sorted(by_client.items()))


def write_chosen_model(folder: Path, client: int, model: Tensor) -> None:
    """Write the model [p] that a client has chosen, complete or not at all."""
    tensor_files.write(folder, _name(client), {"model": model})


def read_chosen_model(folder: Path, client: int) -> Tensor:
    """The model [p] that a client has chosen.

    Raises:
        RunFolderError: the file is missing or damaged.
    """
    return tensor_files.pick(folder, _name(client))["model"]


def read_fitted(folder: Path, version: int, model: str) -> float | None:
    """Return a number that was fitted to a model of a run, as a temperature or a threshold, None where there is none.

    Args:
        folder: the run folder.
        version: the server step of the models.
        model: the name of the model, with that of the number where it is no temperature.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        stored = read_json(folder / FITTED)
        if stored["version"] == version:
            return float(stored["models"][model])
    return None


def write_fitted(folder: Path, version: int, model: str, number: float) -> None:
    """Keep a number that was fitted to a model, if the folder can be written; those of other versions are dropped."""
    stored: Any = {}
    with suppress(OSError, ValueError):
        stored = read_json(folder / FITTED)
    same = isinstance(stored, dict) and stored.get("version") == version and isinstance(stored.get("models"), dict)
    content = {"version": version, "models": {**(stored["models"] if same else {}), model: number}}
    with suppress(OSError):
        tensor_files.write_bytes(folder, FITTED, json.dumps(content, indent=1).encode())


def _name(client: int) -> str:
    return f"chosen-{client}.safetensors"


class RunMeta(TypedDict, total=False):
    """The description of a run, as far as results are shown by it; none of this has to be there.

    All settings come along, which `RunSettings.of_folder` checks where a run goes on.
    """

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]

    id: str
    created: str
    finished: str
    status: str
    piebald: str
    torch: str
    python: str
    machine: dict[str, Any]
    recipe: dict[str, Any]
    paper: str | None
    label: str | None
    seed: int | None
    rounds: int | None
    evaluate: list[Any]
    keep: str | dict[str, Any]
    best: int | None
    split: dict[str, Any] | None
    division: str
    newcomers: list[dict[str, Any]] | None
    loss: str | dict[str, Any] | None
    objective: str | None
    metric: str
    metrics: list[str | dict[str, Any]] | None
    threshold: str | None
    higher_is_better: bool
    model: str
    layout: list[list[Any]]
    parameters: int
    shared: int
    clients: int
    classes: list[str] | None
    plugins: list[list[str | None]] | None
    privacy: list[dict[str, Any]] | None
    runtime: dict[str, Any]
    settings: dict[str, Any] | None
    units: dict[str, str]
    lineage: dict[str, Any] | None


_CHECK = TypeAdapter(RunMeta)


def check_meta(meta: Mapping[str, Any], folder: str) -> None:
    """Refuse values of another type than a run writes.

    Raises:
        RunFolderError: with the first such value.
    """
    try:
        _CHECK.validate_python(dict(meta))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"][:1]))
        raise RunFolderError(
            f"{folder} is damaged: the value of {name} in its table meta is {shown(first['input'])}, and no run "
            "writes that"
        ) from None
