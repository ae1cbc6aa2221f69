"""What others publish, with its conditions and where it stands.  Nothing here was measured by this benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shared.stored import table


@dataclass(frozen=True)
class Published:
    """One published row.

    Attributes:
        study, network, method: the row of this benchmark that it stands beside.
        values: per cent, for each client a list over its authors' seeds; one list under "" where only a mean over
            clients, or the common test rows, is published.
        source: where it stands.
        conditions: what was trained, and how it differs from here.
        alike: whether rows, model and training are the same, so that a verdict can be given.
    """

    study: str
    network: str
    method: str
    values: dict[str, list[float]]
    source: str
    conditions: str
    alike: bool


PUBLISHED = [Published(**row) for row in table(Path(__file__).with_name("published.toml"))["rows"]]
