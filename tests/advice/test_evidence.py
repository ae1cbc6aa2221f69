"""Whether federating pays: by test rows where they were opened, otherwise by methods that other clients chose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from piebald.advice.evidence import Checked, PlainAlone, losers, whether_it_pays
from piebald.report.paired import Scores

NAMES = [f"c{client}" for client in range(6)]


ROWS: dict[str, Any] = {"sizes": [400] * 6, "counted": True}


def runner(label: str, *points: float, **rows: Any) -> Any:
    """A method with these scores on validation rows."""
    return SimpleNamespace(label=label, last=Scores([points], NAMES, **(rows or ROWS)))


def runs(higher: bool = True) -> Any:
    """How methods were scored."""
    return SimpleNamespace(names=NAMES, higher_is_better=higher, metric="accuracy" if higher else "mae")


LOCAL = runner("local", *[0.7] * 6)
BETTER = runner("ditto", *[0.9] * 6)


def opened(ours: float, alone: float) -> list[Checked]:
    return [
        Checked(label, Scores([[value] * 6], NAMES, **ROWS), {}) for label, value in (("ditto", ours), ("local", alone))
    ]


@pytest.mark.parametrize(("ours", "said"), [(0.8, "yes"), (0.71, "cannot be told"), (0.5, "no")])
def test_test_rows_have_the_last_word(ours: float, said: str) -> None:
    """Whatever validation rows say: the method was chosen by them."""
    found = whether_it_pays([LOCAL, BETTER], LOCAL, BETTER, opened(ours, 0.7), runs())
    assert (found.pays, found.rows, found.noise) == (said, "test", "rows")


def test_validation_rows_decide_where_the_recommendation_is_to_train_alone() -> None:
    assert whether_it_pays([LOCAL, BETTER], LOCAL, LOCAL, opened(0.1, 0.7), runs()).rows == "validation"
    worse = runner("fedavg", *[0.5] * 6)
    assert whether_it_pays([LOCAL, worse], LOCAL, LOCAL, [], runs()).pays == "no"
    assert whether_it_pays([LOCAL], LOCAL, LOCAL, [], runs()).pays == "cannot be told"
    assert whether_it_pays([BETTER], None, BETTER, [], runs()).pays == "cannot be told"


@pytest.mark.parametrize(("rows", "said"), [(400, "cannot be told"), (40_000, "no")])
def test_federating_does_not_pay_where_less_than_a_point_is_to_be_gained(rows: int, said: str) -> None:
    """So much is known only with many rows; where the recommendation shares something, a gain is not called none."""
    known = {"sizes": [rows] * 6, "counted": True}
    alone, joined = runner("local", *[0.95] * 6, **known), runner("ditto", *[0.951] * 6, **known)
    assert whether_it_pays([alone, joined], alone, alone, [], runs()).pays == said
    assert whether_it_pays([alone, joined], alone, joined, [], runs()).pays == "cannot be told"


def test_the_luckiest_of_many_methods_does_not_pay() -> None:
    """Each method is far ahead at one client, by luck: no other client would have chosen it."""
    lucky = [runner(f"m{k}", *np.where(np.arange(6) == k, 0.9, 0.66)) for k in range(6)]
    best = lucky[0]
    assert best.last.values.mean() == pytest.approx(LOCAL.last.values.mean())
    found = whether_it_pays([LOCAL, *lucky], LOCAL, best, [], runs())
    assert found.gain is not None
    assert found.gain < 0
    assert found.pays != "yes"


def test_the_luckiest_of_many_plain_models_is_no_measure() -> None:
    """Each is far ahead at one client, by luck: that client has what the others would choose."""
    lucky = {f"m{k}": Scores([np.where(np.arange(6) == k, 0.98, 0.66)], NAMES, **ROWS) for k in range(6)}
    joined = runner("ditto", *[0.72] * 6)
    assert lucky["m0"].mean > LOCAL.last.mean
    found = whether_it_pays([LOCAL, joined], LOCAL, joined, [], runs(), PlainAlone("m0", lucky, None))
    assert found.gain == pytest.approx(0.72 - 0.66)


def test_other_metrics_and_rows_elsewhere_are_judged_between_clients() -> None:
    """An error is better if it is smaller; where rows cannot be counted, the clients are what there is."""
    rng = np.random.default_rng(0)
    alone = runner("local", *(2.0 + rng.normal(0, 0.1, 6)), sizes=[400] * 6)
    joined = runner("fedavg", *(1.0 + rng.normal(0, 0.1, 6)), sizes=[400] * 6)
    found = whether_it_pays([alone, joined], alone, joined, [], runs(higher=False))
    assert (found.pays, found.noise) == ("yes", "clients")
    assert found.gain is not None
    assert found.gain > 0
    bare = [runner("local", *[0.7] * 6, counted=True), runner("ditto", *[0.9] * 6, counted=True)]
    assert whether_it_pays(bare, bare[0], bare[1], [], runs()).noise == "clients"


def test_a_client_without_validation_rows_is_no_loser_and_hides_none() -> None:
    """Nor does numpy warn of the mean of nothing, which a user would see in the middle of the answer."""
    ours = runner("ditto", 0.2, np.nan, *[0.9] * 4)
    alone = runner("local", 0.9, np.nan, *[0.7] * 4)
    found = losers(ours, alone, [alone, ours], True)
    assert [(one.client, one.instead, one.score) for one in found] == [("c0", "local", 0.9)]
    assert losers(runner("ditto", *[0.2] * 6, counted=True), LOCAL, [LOCAL], True) == []  # nobody knows the noise
