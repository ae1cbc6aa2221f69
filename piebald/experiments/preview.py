"""The preview of `piebald data show`: a partitioned data set, its devices, and the heterogeneity of clients."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piebald.contracts import Clients, Fleet
from piebald.contracts.component import build
from piebald.core import pytree
from piebald.core.arguments import checked, checked_class
from piebald.core.errors import SettingError, unknown
from piebald.core.references import USERS
from piebald.data.clients.data_source import DataSource
from piebald.settings.plugins import read

if TYPE_CHECKING:
    from piebald.data.measures.heterogeneity import Heterogeneity
    from piebald.data.partition import Partition
    from piebald.data.sets.dataset import DataSet


# The prefixes of "fleet.slow_factor" and "model.lr"; other settings belong to the partition.
PREFIXES = ("fleet", "model")


@checked_class
@dataclass(frozen=True, slots=True)
class DataPreview:
    """Measures of the federation and its clients, and the pictures that were drawn.

    Attributes:
        partition: the settings of the partition.
        fleet: the settings of the fleet, or None.
        federation: the value of each measure.
        units: the unit of each measure.
        clients: one row for each client.
        files: the paths of the pictures.
    """

    partition: dict[str, Any]
    fleet: dict[str, Any] | None
    federation: dict[str, float]
    units: dict[str, str]
    clients: list[dict[str, Any]]
    files: list[str]


@checked
def show(
    source: DataSource,
    partition: str | None,
    settings: Mapping[str, Any],
    *,
    fleet: str | None = None,
    model: str | None = None,
    out: Path | None = None,
) -> DataPreview:
    """Partition a data set and measure the clients.

    Args:
        source: the data set, or a source of rows.
        partition: the kind of partition; None where the source has clients, or names the column of the client.
        settings: settings by name; those of the fleet begin with "fleet.", those of the model's training with "model.".
        fleet: the kind of fleet, or None for no devices.
        model: a model to train for one epoch on each client, to measure weight divergence.
        out: a folder for pictures.

    Raises:
        SettingError: a name or a setting is wrong.
    """
    from piebald.data.measures import pictures
    from piebald.data.measures.heterogeneity import UNITS, embedding
    from piebald.data.partition import Devices, collect, measure

    partition_settings, settings_by_prefix = _divided(settings)
    for word, kind in (("fleet", fleet), ("model", model)):
        if settings_by_prefix[word] and kind is None:
            raise SettingError(f"{word}.{next(iter(settings_by_prefix[word]))} needs a {word}: add --{word} KIND")
    dealt_by = _partition(source, partition, partition_settings)
    devices = None if fleet is None else build("fleet", read({"kind": fleet} | settings_by_prefix["fleet"], USERS))
    assert devices is None or isinstance(devices, Devices)  # for the type checker
    rows_here = source.load()
    clients = _clients(rows_here, dealt_by, source)
    seconds = None if devices is None else [devices.device(number).seconds_per_step for number in range(len(clients))]
    embed = embedding(clients)
    measured = measure(collect(clients, embed=embed), seconds)
    if model is not None:
        measured = _diverged(measured, clients, model, settings_by_prefix["model"])
    drawn = [] if out is None else pictures.draw(clients, out, embed=embed, fleet=devices)
    rows = [{"client": clients.names[number], **row} for number, row in enumerate(measured.table())]
    if devices is not None:
        rows = [row | _device(devices, number) for number, row in enumerate(rows)]
    federation = measured.federation
    units = {measured: UNITS[measured] for measured in federation}
    return DataPreview(
        {} if dealt_by is None else dealt_by.table(),
        None if devices is None else devices.table(),
        federation,
        units,
        rows,
        list(map(str, drawn)),
    )


def _partition(source: DataSource, kind: str | None, settings: Mapping[str, Any]) -> Partition | None:
    from piebald.data.partition import Partition

    if kind is None and source.client is not None:
        kind, settings = "by_owner", {"owner": source.client, **settings}
    if kind is None:
        return None
    built = build("partition", read({"kind": kind, **settings}, USERS))
    if not isinstance(built, Partition):
        raise SettingError(f"partition {kind!r} has its rows elsewhere, so there is nothing to show")
    return built


def _clients(rows: DataSet | Clients, partition: Partition | None, source: DataSource) -> Clients:
    from piebald.data.partition.by_owner import by_only_owner
    from piebald.data.sets.dataset import DataSet

    if not isinstance(rows, DataSet):
        if partition is not None:
            raise SettingError(f"{source.source} has clients already: leave --partition out")
        return rows
    partition = partition or by_only_owner(rows)
    if partition is None:
        raise SettingError("the rows have no clients yet: add --partition KIND, or --client COLUMN for a table")
    return partition.split(rows)


def _divided(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The partition's settings, and those of the fleet and the model."""
    partition_settings: dict[str, Any] = {}
    settings_by_prefix: dict[str, dict[str, Any]] = {prefix: {} for prefix in PREFIXES}
    for key, value in settings.items():
        word, dot, rest = key.partition(".")
        if dot and word in settings_by_prefix:
            settings_by_prefix[word][rest] = value
        else:
            partition_settings[key] = value
    return partition_settings, settings_by_prefix


def _device(fleet: Fleet, client: int) -> dict[str, Any]:
    """The columns of a device in its client's row; infinite limits are None."""
    device = fleet.device(client)
    limits = {"down": device.down, "up": device.up}
    return {name: None if value == float("inf") else value for name, value in limits.items()} | {
        "dropout": device.dropout
    }


def _diverged(measured: Heterogeneity, clients: Clients, model: str, settings: dict[str, Any]) -> Heterogeneity:
    from piebald.data.measures.heterogeneity import diverge
    from piebald.models import build_model

    names = ("lr", "batch", "seed")
    for setting in settings:
        if setting not in names:
            raise unknown("setting of the model's training called", setting, names)
    rows = clients.rows(0, "train")
    outputs = len(clients.classes) if clients.classes is not None else int(pytree.leaves(rows[:1].y)[0].numel())
    network = build_model(model, pytree.form(rows.x), outputs, seed=settings.get("seed", 0))
    divergence = diverge(clients, network, **settings)
    return dataclasses.replace(measured, divergence=divergence.clients, pooled_divergence=divergence.pooled)


@checked
def columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns of a table of clients that are not empty."""
    return [name for name in (rows[0] if rows else ()) if any(row[name] is not None for row in rows)]
