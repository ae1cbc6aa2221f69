"""A newcomer's rows from a file or a folder, read in the same way as the run's own data."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from piebald import data, models
from piebald.contracts import Clients
from piebald.errors import SettingError
from piebald.partition import clients_from
from piebald.partition.client_tables import is_table, read_table


def from_file(
    path: Path, target: str | None, meta: Mapping[str, Any], validation: float = 0.2, test: float = 0.2
) -> Clients:
    """A newcomer's rows as a client, read in the same way as the data of the run that `meta` describes.

    Args:
        path: an .npz file with arrays x and y, a .csv, .tsv or .parquet table, or a folder of images or WAV
            recordings with one folder for each class.
        target: the column of a table to predict; all other columns are inputs, in the order of the file.
        meta: the description of the run.
        validation, test: the shares of validation and test rows.

    Raises:
        SettingError: the file cannot be read, or has unexpected content.
    """
    settings = meta.get("settings") or {}
    source: Any
    columns: dict[str, Any] = {}
    if path.is_dir():
        source = _folder(path, settings)
    elif is_table(path):
        if target is None:
            raise SettingError(f"{path} is a table: name the column to predict with --target COLUMN")
        source, columns = read_table(path).assign(**{_WHO: "newcomer"}), {"client": _WHO, "target": target}
    elif path.suffix == ".npz":
        source = {"newcomer": _arrays(path)}
    else:
        raise SettingError(f"the newcomer's rows must be an .npz, .csv or .parquet file or a folder, got {str(path)!r}")
    made = clients_from(source, **columns, test=test, validation=validation, classes=meta.get("classes"))
    if settings.get("extractor") is None:
        return made
    return models.embedded(made, settings["extractor"])


_WHO = "whose row it is"


def _arrays(path: Path) -> tuple[Any, Any]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            if not {"x", "y"} <= set(stored.files):
                raise SettingError(f"{path} must hold arrays x and y, got {', '.join(stored.files) or 'none'}")
            return stored["x"], stored["y"]
    except SettingError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise SettingError(f"{path} cannot be read as npz: {error}") from None


def _folder(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Images or recordings in the size of the run's data set."""
    name = (settings.get("data") or {}).get("name")
    if name is None:
        raise SettingError(f"{path} is a folder, but the run was started from Python: load it there and call adapt")
    shape = data.load(name).input_shape
    if len(shape) == 3 and shape[1] == shape[2]:
        found = data.image_folder(path, side=shape[1])
        x = found.x[:] if shape[0] == 3 else found.x[:].float().mean(1, keepdim=True).round().to(torch.uint8)
    elif len(shape) == 2 and shape[0] == 1:
        found = data.audio_folder(path, seconds=shape[1] / 16_000)
        x = found.x[:]
    else:
        raise SettingError(
            f"{path} is a folder, but the run's inputs {list(shape)} are neither square images nor recordings"
        )
    return {"newcomer": (x, np.array(found.classes)[found.y.numpy()])}
