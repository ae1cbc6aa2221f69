"""What a run folder keeps of `keep = "best_for_each"`: the choice of each client, and models that nobody shares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from piebald.storage import tensor_files

AXIS = "keep"  # of the notes


def noted(notes: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """The recorded choices by client, from the notes of a run, see `choice.record`."""
    found = {int(row["name"].removeprefix("client-")): row["value"] for row in notes if row["axis"] == AXIS}
    return dict(sorted(found.items()))


def write_model(folder: Path, client: int, model: Tensor) -> None:
    """Write the model [p] that a client has chosen, complete or not at all."""
    tensor_files.write(folder, _name(client), {"model": model})


def read_model(folder: Path, client: int) -> Tensor:
    """The model [p] that a client has chosen.

    Raises:
        RunFolderError: the file is missing or damaged.
    """
    return tensor_files.pick(folder, _name(client))["model"]


def _name(client: int) -> str:
    return f"chosen-{client}.safetensors"
