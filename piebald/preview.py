"""What `piebald data show` shows: a data set dealt to clients, their devices, and how unlike they all are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piebald.errors import SettingError

if TYPE_CHECKING:
    from piebald.contracts import Clients, Fleet
    from piebald.data.dataset import DataSet
    from piebald.partition.heterogeneity import Heterogeneity

OTHERS = ("fleet", "model")  # settings "fleet.slow_factor" and "model.lr"; all others are the partition's


@dataclass(frozen=True, slots=True)
class DataPreview:
    """Numbers for the federation and its clients, and the pictures that were drawn.

    Attributes:
        partition: its settings.  fleet: those of the fleet, or None.
        federation: a number for each measure.  units: what they are.
        clients: a row for each client.
        files: the pictures.
    """

    partition: dict[str, Any]
    fleet: dict[str, Any] | None
    federation: dict[str, float]
    units: dict[str, str]
    clients: list[dict[str, Any]]
    files: list[str]


def show(
    name: str,
    partition: str,
    settings: Mapping[str, Any],
    *,
    fleet: str | None = None,
    model: str | None = None,
    out: Path | None = None,
) -> DataPreview:
    """Deal a data set to clients and measure them.

    Args:
        name: the data set.
        partition: the kind of partition.
        settings: by name; those of the fleet begin with "fleet.", those of the model's training with "model.".
        fleet: the kind of fleet, None for no devices.
        model: a network to train on each client for one epoch, for the weight divergence.
        out: a folder for pictures.

    Raises:
        SettingError: anything that does not fit.
    """
    from piebald import data as actor
    from piebald.component import build
    from piebald.partition import Devices, Partition, collect, measure, pictures
    from piebald.partition.heterogeneity import UNITS
    from piebald.partition.survey import embedding

    own, of = _divided(settings)
    for word, kind in (("fleet", fleet), ("model", model)):
        if of[word] and kind is None:
            raise SettingError(f"{word}.{next(iter(of[word]))} needs a {word}: add --{word} KIND")
    made = build("partition", {"kind": partition} | own)
    devices = None if fleet is None else build("fleet", {"kind": fleet} | of["fleet"])
    assert isinstance(made, Partition)  # for the type checker; these axes have nothing else
    assert devices is None or isinstance(devices, Devices)
    dataset = actor.load(name)
    clients = made.split(dataset)
    seconds = None if devices is None else [devices.device(number).seconds_per_step for number in range(len(clients))]
    embed = embedding(clients)
    seen = measure(collect(clients, embed=embed), seconds)
    if model is not None:
        seen = _diverged(seen, clients, dataset, model, of["model"])
    drawn = [] if out is None else pictures.draw(clients, out, embed=embed, fleet=devices)
    rows = [{"client": clients.names[number], **row} for number, row in enumerate(seen.table())]
    if devices is not None:
        rows = [row | _device(devices, number) for number, row in enumerate(rows)]
    federation = seen.federation
    units = {measured: UNITS[measured] for measured in federation}
    return DataPreview(
        made.table(), None if devices is None else devices.table(), federation, units, rows, list(map(str, drawn))
    )


def _divided(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The partition's settings, and those of the others by what they are of."""
    own: dict[str, Any] = {}
    of: dict[str, dict[str, Any]] = {other: {} for other in OTHERS}
    for key, value in settings.items():
        word, dot, rest = key.partition(".")
        if dot and word in of:
            of[word][rest] = value
        else:
            own[key] = value
    return own, of


def _device(fleet: Fleet, client: int) -> dict[str, Any]:
    """What a device adds to its client's row; limits that it does not have are left empty."""
    device = fleet.device(client)
    limits = {"down": device.down, "up": device.up}
    return {name: None if value == float("inf") else value for name, value in limits.items()} | {
        "dropout": device.dropout
    }


def _diverged(
    seen: Heterogeneity, clients: Clients, dataset: DataSet, model: str, settings: dict[str, Any]
) -> Heterogeneity:
    from piebald.errors import unknown
    from piebald.models import build_model
    from piebald.weight_divergence import diverge

    known = ("lr", "batch", "seed")
    for setting in settings:
        if setting not in known:
            raise unknown("setting of the model's training called", setting, known)
    outputs = len(dataset.classes) if dataset.classes is not None else int(dataset.y[:1].numel())
    network = build_model(model, dataset.input_shape, outputs, seed=settings.get("seed", 0))
    apart = diverge(clients, network, **settings)
    return dataclasses.replace(seen, divergence=apart.clients, pooled_divergence=apart.pooled)


def columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns of a table of clients in which there is something."""
    return [name for name in rows[0] if any(row[name] is not None for row in rows)]
