"""The published attacks on masks, on five site processes with the strictest policy that trains: nobody takes part.

The server is this process; it follows the protocol, and says of single clients what it likes.  Before, each of these
runs opened the update, or the answer, of the one site that was left a contribution.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from piebald.contracts.component import build
from piebald.core.errors import PiebaldError
from piebald.experiments.file import ExperimentSettings
from piebald.federation.hub.run_terms import RunTerms
from piebald.inference import experiment
from piebald.inference.columns import statistics_request
from piebald.inference.experiment import statistics_of_sites
from piebald.privacy.secure_aggregation import transform
from piebald.privacy.secure_aggregation.server_side import SecureRound
from piebald.runs import prepare

from ..federation.conftest import Sites, carry_out, provisioned, settings

NAMES = [f"site-{number}" for number in range(1, 6)]
POLICY = """[policy]
secure_aggregation = { least = 5, threshold = 1.0 }
queries = []
accept = ["fedavg"]
"""
FIVE = {"kind": "iid", "clients": 5, "limit": 300}
MASKS = {"kind": "secure_aggregation", "least": 5, "threshold": 1.0, "bits": 64}
CLIENTS, VICTIM = "01234", "2"
SHARES = {name: 1.0 if name == VICTIM else 1e-9 for name in CLIENTS}
# without `wait_for`, the server waits for all sites, and gives up when all of them have refused
WAITING: dict[str, Any] = {"patience": 600.0, "silence": 300.0}


pytestmark = pytest.mark.full


class Five(Sites):
    """Site processes with a policy."""

    def __init__(self, folder: Path, policy: str) -> None:
        super().__init__(provisioned(folder, NAMES))
        for name in NAMES:
            (self.folder / name / "site.toml").write_text(policy)
            self.start(name)


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Five]:
    five = Five(tmp_path_factory.mktemp("strict"), POLICY)
    yield five
    five.close()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Sums that a server opened which leaves the checks of its own package out."""
    for module in (transform, prepare):
        monkeypatch.setattr(module, "unlike_reason", lambda *_: None)
    monkeypatch.setattr(transform, "follows_rows", lambda _: True)
    monkeypatch.setattr(RunTerms, "unlike_reason", lambda _: None)
    sums, total = list[object](), SecureRound.total

    def kept(agreed: SecureRound, *arguments: Any) -> Any:
        sums.append(total(agreed, *arguments))
        return sums[-1]

    monkeypatch.setattr(SecureRound, "total", kept)
    return sums


def described(*transforms: dict[str, Any], aggregation: Any = None, **more: Any) -> ExperimentSettings:
    recipe = {"name": "fedavg", "transforms": [*transforms, MASKS]}
    recipe |= {} if aggregation is None else {"aggregation": aggregation}
    small = {"rounds": 1, "partition": FIVE, "model": {"name": "mlp", "hidden": [16]}, "evaluate": {"every": 0}}
    return settings({**recipe, **more.pop("recipe", {})}, **small, **more)


def all_refuse(setting: str) -> AbstractContextManager[object]:
    """A server that gives up since all sites say that members would not be alike by this setting."""
    reason = f"5 of 5 sites do not take part, .*contributions that are alike, and {re.escape(setting)} says"
    return pytest.raises(PiebaldError, match=reason)


# by the setting that says something of single clients
ATTACKS = {
    "training.clients": described(recipe={"lr": 1e-30}, clients={VICTIM: {"lr": 0.1}}),
    "transforms[0].clients": described({"kind": "sign_flip", "scale": 1e-9, "clients": [0, 1, 3, 4]}),
    "transforms[0].aggregation.by_number": described(aggregation={"kind": "fixed_shares", "shares": SHARES}),
    "split.hold_out": described(split={"hold_out": [name for name in CLIENTS if name != VICTIM]}),
}


def test_an_honest_run_opens_its_sum(strict: Five, opened: list[object]) -> None:
    """A control: these sites train, and the server of this test opens what they send."""
    carry_out(described(), credentials=str(strict.folder / "server"), **WAITING)
    assert len(opened) == 1
    assert not isinstance(opened[0], str)


@pytest.mark.parametrize("setting", ATTACKS)
def test_no_site_takes_part_in_a_published_attack(setting: str, strict: Five, opened: list[object]) -> None:
    with all_refuse(setting):
        carry_out(ATTACKS[setting], credentials=str(strict.folder / "server"), **WAITING)
    assert all(isinstance(total, str) for total in opened)


@pytest.mark.long
def test_no_site_answers_a_question_about_sums_while_others_are_held_out(
    tmp_path: Path, opened: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the total was the answer of one site, with an error of 3e-6, and all of them took part."""
    monkeypatch.setattr(experiment, "SecureAggregation", lambda bits: build("transforms", {**MASKS, "bits": bits}))
    five = Five(tmp_path, POLICY.replace("queries = []", 'queries = ["masked_sums"]\nleast_rows = 1'))
    file, flags = tmp_path / "asked.toml", [f"runtime.{name}={value}" for name, value in WAITING.items()]
    question: dict[str, Any] = {"bounds": {f"x{place}": (0.0, 1.0) for place in range(64)}, "secure": True}
    try:
        file.write_text(described().text())
        honest = statistics_of_sites(file, flags, five.folder / "server", statistics_request(**question))
        assert honest.numbers["x20"].present > 0
        opened.clear()
        file.write_text(ATTACKS["split.hold_out"].text())
        with all_refuse("split.hold_out"):
            statistics_of_sites(file, flags, five.folder / "server", statistics_request(**question))
        assert all(isinstance(total, str) for total in opened)
    finally:
        five.close()
