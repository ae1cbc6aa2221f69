"""The data of each party: rows of its own features, positions of co-occurring rows, and test rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from piebald.core.arguments import checked_class
from piebald.core.errors import SettingError, unknown
from piebald.core.randomness import generator
from piebald.data import DataSet
from piebald.data.clients.row_identity import UNKNOWN, Digests
from piebald.data.partition.vertical_split import Vertical, feature_names
from piebald.data.sets.named import named
from piebald.vertical.party_preparation import PartyPreparation
from piebald.vertical.protocol import Role
from piebald.vertical.transfer_settings import TransferData, TransferSettings

CREDIT = ("LIMIT_BAL", "SEX", "EDUCATION", "MARRIAGE", "AGE")
Ints = NDArray[np.int64]


@checked_class
@dataclass(frozen=True, eq=False)
class PartyHolding:
    """The data of one party.

    Attributes:
        x: features [n, f], float64.
        y: labels, -1 or 1 [n]; None at the target.
        overlap: positions in `x` of the co-occurring rows, in the same order at both parties.
        features: names of the features.
        test: features of held-out rows; of all the target's rows if no labels are known.
        test_y: labels of the held-out rows, used only to score the result and never part of the protocol.  Empty if
            none are known.
        keys: digest of the co-occurring rows' keys, which must be the same at both parties; "" if rows have no keys.
        records: digests of the rows as they were read, none where nothing identifies them.
        place: the folder that the rows lie in, None where they have none.
        preparation: how a table's columns become `x`, None where inputs are taken as they are.
    """

    x: Tensor
    y: Tensor | None
    overlap: Ints
    features: tuple[str, ...]
    test: Tensor
    test_y: Tensor
    keys: str = ""
    records: Digests = field(default_factory=UNKNOWN.copy)
    place: Path | None = None
    preparation: PartyPreparation | None = None

    @property
    def alone(self) -> Ints:
        """Positions in `x` of the rows that are not co-occurring."""
        return np.setdiff1d(np.arange(len(self.x)), self.overlap)

    def check(self, role: Role, settings: TransferSettings) -> None:
        """Refuse batches larger than this party's data, and labels other than -1 and 1."""
        if len(self.alone) < settings.batch:
            raise SettingError(
                f"batch must be at most {len(self.alone)}, the number of the {role}'s rows that are not co-occurring "
                f"(those have batches of their own), got {settings.batch}"
            )
        if len(self.overlap) < settings.overlap_batch:
            raise SettingError(
                f"overlap_batch must be at most the {len(self.overlap)} co-occurring rows, got {settings.overlap_batch}"
            )
        if not bool(torch.isfinite(self.x).all()):
            raise SettingError(f"the {role}'s inputs must be finite numbers: fill in or leave out what is none")
        if (self.y is None) != (role == "target"):
            raise SettingError(f"the source must have labels and the target none, got them the other way at the {role}")
        if self.y is not None and not bool(torch.isin(self.y, torch.tensor([-1.0, 1.0])).all()):
            raise SettingError("labels must be -1 or 1")


def division(data: DataSet) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the source's features and those of both parties, for data sets whose features have a natural division.

    credit: the source knows the person, bills and payments; the target the person and the repayment history.
    census: the source knows age, sex, race, origin and the household; the target age, sex and race, and work.
    Other tables: every other feature, nothing in common.
    """
    names = feature_names(data)
    if data.name == "credit":
        return (*CREDIT, *(name for name in names if "AMT" in name)), CREDIT
    if data.name == "census":
        both = tuple(name for name in names if name == "age" or name.startswith(("sex=", "race=")))
        home = ("marital-status=", "relationship=", "native-country=", "education=")
        household = tuple(name for name in names if name.startswith(home) or name in ("fnlwgt", "education-num"))
        return (*both, *household), both
    return tuple(names[::2]), ()


def load(settings: TransferData, seed: int) -> dict[Role, PartyHolding]:
    """Load a data set and divide it between both parties, for experiments and demonstrations."""
    data = named(settings.name)
    if data.inputs.dim() != 2 or data.classes is None or len(data.classes) != 2:
        raise SettingError(f"data.name must be a table with two classes, like credit or census, got {settings.name!r}")
    return divide(data, settings, seed)


def divide(data: DataSet, settings: TransferData, seed: int) -> dict[Role, PartyHolding]:
    """Divide any table with two classes between both parties; the second class is the positive one."""
    names = feature_names(data)
    of_source, both = division(data)
    of_source, both = settings.source or of_source, settings.common if settings.common is not None else both
    for name in (*of_source, *both):
        if name not in names:
            raise unknown(f"feature of {data.name} called", name, names)
    train, test = train_test_rows(data, settings.test, seed)
    if len(train) < settings.overlap:
        raise SettingError(f"data.overlap must be at most the {len(train)} training rows, got {settings.overlap}")
    features = tuple(dict.fromkeys((*of_source, *both)))
    split = Vertical(overlap=settings.overlap, features=features, active_share=settings.source_share, seed=seed)
    parties = split.split(data, train)
    columns: dict[Role, list[int]] = {
        "source": [names.index(name) for name in names if name in features],
        "target": [names.index(name) for name in names if name not in features or name in both],
    }
    ids: dict[Role, Ints] = {"source": parties.active.ids, "target": parties.passive.ids}
    # -1 and 1, as the Taylor loss has them
    signs = 2.0 * data.targets.double() - 1
    return {
        role: PartyHolding(
            x=data.inputs[ids[role]][:, columns[role]].double(),
            y=signs[ids[role]] if role == "source" else None,
            overlap=np.searchsorted(ids[role], parties.overlap),
            features=tuple(names[place] for place in columns[role]),
            test=data.inputs[test][:, columns[role]].double(),
            test_y=signs[test],
        )
        for role in ids
    }


def train_test_rows(data: DataSet, share: float, seed: int) -> tuple[Ints, Ints]:
    """Return row numbers for training and for testing: the published split, or a share drawn by the seed."""
    if data.train is not None and data.test is not None:
        return data.train, data.test
    order = generator(seed, "transfer", "test").permutation(len(data))
    cut = round(len(data) * share)
    return np.sort(order[cut:]), np.sort(order[:cut])
