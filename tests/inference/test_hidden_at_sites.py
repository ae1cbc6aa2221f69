"""AskedSites tell sums that hide single rows: with noise that a ledger counts, under masks, or both."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from piebald import recipes
from piebald.contracts import SUM, Task
from piebald.core.errors import PiebaldError, SettingError
from piebald.federation.site.site_rows import SiteClient
from piebald.inference.columns import STEP, ClientColumns, SumPlan, statistics_request
from piebald.inference.pooled_statistics import FederatedStatistics
from piebald.inference.queries.columns import MaskedSumsQuery, NoisySumsQuery, StatisticsQuery
from piebald.inference.simulated import AskedSites
from piebald.inference.statistics_at_sites import statistics_at_sites
from piebald.privacy import SecureAggregation
from piebald.privacy.ledger import FILE, RowLedger, noise_for
from piebald.runs.prepare import PreparedRun

from .sites import InProcess, Policy, coded_plan, plan

BUDGET = {"epsilon": 3.0, "delta": 1e-6}
NOISY = Policy(queries=["noisy_sums"], budget=BUDGET)  # type: ignore[arg-type]
MASKED = Policy(queries=["masked_sums"], least_rows=1)
LIMITS: dict[str, Any] = {"x0": (-8.0, 8.0), "x1": (-8.0, 8.0)}
PLAN = plan()
SECURE = plan(recipes.fedavg().with_(transforms=SecureAggregation(bits=64)))
POOLED = np.concatenate([PLAN.clients.rows(k, "train").x.double().numpy() for k in range(3)])  # type: ignore[union-attr]
LABELS = torch.cat([PLAN.clients.rows(k, "train").y for k in range(3)])  # type: ignore[misc]


def hidden(of: PreparedRun, epsilon: float | None) -> dict[str, Any]:
    """How a request hides rows."""
    return {"secure": of.work.masking is not None, "epsilon": epsilon, "delta": None if epsilon is None else 1e-6}


def told(
    runtime: InProcess, of: PreparedRun, epsilon: float | None = 1.0, bins: int | None = 16, limits: Any = None
) -> FederatedStatistics:
    wanted = statistics_request(
        (0.5,) if bins else (), bins, LIMITS if limits is None else limits, **hidden(of, epsilon)
    )  # fmt: skip
    return statistics_at_sites(runtime, of.work, of.clients, wanted, say=lambda line: None)  # type: ignore[arg-type]


def test_sums_under_masks_are_those_of_the_pooled_rows(tmp_path: Path) -> None:
    runtime = InProcess(SECURE, [MASKED] * 3, folder=tmp_path)
    found = told(runtime, SECURE, epsilon=None)
    assert (found.mode, found.noise, found.rows, found.privacy) == ("secure", 0.0, None, None)
    inside = np.clip(POOLED, -8, 8)
    for place, name in enumerate(("x0", "x1")):
        one = found.numbers[name]
        assert (one.present, one.missing) == (len(POOLED), 0)
        assert one.mean == pytest.approx(inside[:, place].mean(), abs=16 * STEP)
        assert one.variance == pytest.approx(inside[:, place].var(ddof=1), abs=1e-6)
        assert list(one.counts) == np.histogram(inside[:, place], 16, (-8, 8))[0].tolist()
    assert list(found.texts["target"].counts.values()) == torch.bincount(LABELS).tolist()


def test_nothing_that_leaves_a_site_is_its_own_sum(tmp_path: Path) -> None:
    """The same bytes are searched for in what leaves without masks, where they are."""
    query = MaskedSumsQuery(bounds=tuple(LIMITS.values()), bins=4, classes=3)
    masked = InProcess(SECURE, [MASKED] * 3, folder=tmp_path)
    total = AskedSites(masked, SECURE.work).sums(query, SECURE.work.masking)[1]  # type: ignore[arg-type]
    own = [masked._sites[k].serve(Task(0, k, 0, {"model": SECURE.work.initial}, query), None)[0] for k in range(3)]
    sums = [one.vectors[SUM].numpy() for one in own if one is not None]
    assert np.array_equal(np.stack(sums).sum(0), total)
    left = b"".join(masked.bodies)
    assert all(one.tobytes() not in left for one in sums)
    assert all(one[:2].tobytes() not in left for one in sums)


def test_a_site_that_goes_away_takes_its_sums_with_it_and_too_few_tell_nothing(tmp_path: Path) -> None:
    runtime = InProcess(SECURE, [MASKED] * 3, folder=tmp_path)
    runtime.away = {1}
    with pytest.raises(PiebaldError, match=r"no secure aggregation: .* site 2 says: gone"):
        told(runtime, SECURE, epsilon=None)
    assert told(InProcess(SECURE, [MASKED] * 3, folder=tmp_path / "b"), SECURE, epsilon=None).clients == ["a", "b", "c"]


def ledger(of: Any, folder: Path) -> RowLedger:
    """The ledger of the first site."""
    return SiteClient(of.work, of.clients, 0).ledger(folder)


def test_noise_is_as_large_as_it_is_said_to_be_and_new_for_each_question(tmp_path: Path) -> None:
    noise = noise_for(1.0, 1e-6)
    query = NoisySumsQuery(bounds=tuple(LIMITS.values()), bins=500, classes=3, noise=noise)
    runtime = InProcess(PLAN, [NOISY] * 3, folder=tmp_path)
    first, second, again = (AskedSites(runtime, PLAN.work).sums(query, None, version=n)[1] * STEP for n in (0, 1, 0))
    assert np.array_equal(first, again)  # the same question, to which the same was told
    deviation = noise * query.plan.exchange_influence * math.sqrt(2 * 3)  # of the difference of two sums of three
    apart = first - second
    assert apart.std() == pytest.approx(deviation, rel=6 / math.sqrt(2 * len(apart)))  # six of its own deviations
    found = told(InProcess(PLAN, [NOISY] * 3, folder=tmp_path / "b"), PLAN)
    influence = SumPlan(LIMITS, 16, {"t": ("0",)}, ()).exchange_influence
    assert found.noise == pytest.approx(noise * influence * math.sqrt(3))
    assert found.privacy is not None
    assert found.privacy.epsilon_pld == pytest.approx(1.0, rel=1e-3)
    assert "in place of another" in found.privacy.meaning


CODES = {"x0": ("0", "1", "2"), "x2": ("0", "1")}
PAIRS = (("x0", "target"), ("x2", "x0"))


def counted(runtime: InProcess, of: PreparedRun, epsilon: float | None, **wanted: Any) -> FederatedStatistics:
    """Counts of the codes, alone and in pairs, beside the column of numbers."""
    wanted = {"categories": CODES, "tables": PAIRS, **wanted}
    asked = statistics_request((), wanted.pop("bins", 4), {"x1": (-8.0, 8.0)}, **wanted, **hidden(of, epsilon))
    return statistics_at_sites(runtime, of.work, of.clients, asked, say=lambda line: None)  # type: ignore[arg-type]


def test_tables_under_masks_are_those_of_the_pooled_rows(tmp_path: Path) -> None:
    of = coded_plan(recipes.fedavg().with_(transforms=SecureAggregation(bits=64)))
    found = counted(InProcess(of, [MASKED] * 3, folder=tmp_path), of, None)
    held = [of.clients.rows(k, "train") for k in range(3)]  # type: ignore[union-attr]
    x, y = torch.cat([one.x for one in held]).numpy(), torch.cat([one.y for one in held]).numpy()  # type: ignore[misc]
    for pair, (one, other) in {PAIRS[0]: (x[:, 0], y), PAIRS[1]: (x[:, 2], x[:, 0])}.items():
        table = found.tables[pair]
        expected = [[int(((one == a) & (other == b)).sum()) for b in range(3)] for a in range(len(table))]
        assert [list(row.values()) for row in table.values()] == expected
    assert list(found.texts["x2"].counts.values()) == [int((x[:, 2] == code).sum()) for code in (0, 1)]
    assert found.numbers.keys() == {"x1"}
    assert found.numbers["x1"].mean == pytest.approx(np.clip(x[:, 1], -8, 8).mean(), abs=1e-6)


def test_noise_on_tables_has_the_stated_scale_and_the_budget_ends(tmp_path: Path) -> None:
    of, noise = coded_plan(), noise_for(1.0, 1e-6)
    many = tuple(map(str, range(60)))
    query = NoisySumsQuery(
        bounds=(None, (-8, 8), None), classes=3, codes=((0, many), (2, many)), tables=((0, 2), (2, 3)), noise=noise
    )
    influence = math.sqrt(4 + 2 * (3 + 2))  # one number; two codes, a class and two tables change by two counts each
    assert query.plan.exchange_influence == pytest.approx(influence)
    runtime = InProcess(of, [NOISY] * 3, folder=tmp_path)
    first, second = (AskedSites(runtime, of.work).sums(query, None, version=n)[1] * STEP for n in range(2))
    tables = (first - second)[-60 * 60 - 60 * 3 :]
    deviation = noise * influence * math.sqrt(2 * 3)  # of the difference of two sums of three
    assert tables.std() == pytest.approx(deviation, rel=6 / math.sqrt(2 * len(tables)))
    for bins in range(1, 21):  # after two questions
        with contextlib.suppress(SettingError):
            counted(runtime, of, 1.0, bins=bins)
    with pytest.raises(SettingError, match="the ledger allows 3"):
        counted(runtime, of, 1.0, bins=21)
    kept = ledger(of, tmp_path / "0")
    assert 3 <= kept.counts["noisy_sums"] <= 9
    assert kept.spent(1e-6) <= 3.0
    found = counted(InProcess(of, [NOISY] * 3, folder=tmp_path / "b"), of, 1.0)
    own = math.sqrt(4 + 2 + 2 * (3 + 2))  # with a histogram
    assert found.noise == pytest.approx(noise * own * math.sqrt(3))
    apart = [cell for table in found.tables.values() for row in table.values() for cell in row.values()]
    assert len(apart) == 3 * 3 + 2 * 3
    assert any(cell != round(cell) for cell in apart)


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ({"tables": [("x0", "x1")]}, "epsilon needs categories of column 'x1'"),
        ({"tables": [("x0", "age")]}, "there is no column 'age'"),
        ({"tables": [("x0", "x0")]}, "tables must be pairs of different columns"),
        ({"categories": {"x0": ("0", "0")}}, "categories of 'x0' must be different names"),
        ({"categories": {**CODES, "age": ("0",)}}, "no column of numbers to give categories of, 'age'"),
        ({"categories": {**CODES, "target": ("0",)}}, "no column of numbers to give categories of, 'target'"),
    ],
)
def test_tables_of_columns_without_categories_are_refused(
    wanted: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    of = coded_plan()
    with pytest.raises(SettingError, match=sentence):
        counted(InProcess(of, [NOISY] * 3, folder=tmp_path), of, 1.0, **wanted)
    assert not list(tmp_path.glob(f"*/{FILE}"))


def test_under_masks_each_site_adds_its_noise(tmp_path: Path) -> None:
    both = Policy(queries=["noisy_sums"], budget=BUDGET)  # type: ignore[arg-type]
    found = told(InProcess(SECURE, [both] * 3, folder=tmp_path), SECURE, epsilon=1.0)
    assert found.mode == "secure and private"
    off = [abs(one.present - len(POOLED)) for one in found.numbers.values()]
    assert all(0 < one < 8 * found.noise for one in off)


def test_no_exchange_of_a_row_changes_the_sums_by_more_than_is_said() -> None:
    """All pairs of rows at the ends of the bounds, between them, outside, missing and infinite."""
    kinds = (-9.0, -8.0, -7.6, -1.0, 0.0, 0.3, 8.0, np.nan, np.inf, -np.inf)
    found = []
    for bins, pairs in ((0, ()), (5, ()), (0, (("c", "d"),))):
        made = SumPlan({"x": (-8.0, 8.0)}, bins, {"c": ("0", "1"), "d": ("0", "1")}, pairs)
        rows = [
            made.vector(
                ClientColumns(
                    "", 1, {"x": np.array([x])}, {"c": np.array([c], dtype=object), "d": np.array([d], dtype=object)}
                )
            )
            for x in kinds
            for c in ("0", "1", "7", None)
            for d in ("0", "1", None)
        ]
        longest = max(np.linalg.norm((one - other) * STEP) for one, other in itertools.combinations(rows, 2))
        found.append(longest / made.exchange_influence)
    assert max(found) <= 1 + 1e-9
    assert min(found[0], found[2]) > 0.99  # and it is not said to be larger than it is


# --------------------------------------------------------------------------------------------------------- attacks


def test_a_server_that_asks_a_thousand_times_spends_the_budget_and_no_more(tmp_path: Path) -> None:
    """Restarts of the site and another policy do not bring the budget back."""
    query = NoisySumsQuery(bounds=tuple(LIMITS.values()), classes=3, noise=noise_for(1.0, 1e-6))
    answers = 0
    for restart in range(10):
        runtime = InProcess(PLAN, [NOISY], folder=tmp_path)
        asking = AskedSites(runtime, PLAN.work)
        for number in range(100 if restart == 9 else 1):
            with contextlib.suppress(SettingError):
                answers += len(asking.sums(query, None, version=100 * restart + number)[0])
    with pytest.raises(SettingError, match="the ledger allows 3"):
        asking.sums(query, None, version=1000)
    kept = ledger(PLAN, tmp_path / "0")
    assert answers == kept.counts["noisy_sums"]
    assert 3 <= answers <= 9  # noise of one adds up as a root, so it is more than three questions
    assert kept.spent(1e-6) <= 3.0
    less = Policy(queries=["noisy_sums"], budget={"epsilon": 1.0, "delta": 1e-6})  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="the ledger allows 1"):
        AskedSites(InProcess(PLAN, [less], folder=tmp_path), PLAN.work).sums(query, None, version=1000)


def test_a_ledger_that_cannot_be_read_answers_nothing_and_names_no_path(tmp_path: Path) -> None:
    runtime = InProcess(PLAN, [NOISY], folder=tmp_path)
    (tmp_path / "0" / FILE).write_text("nonsense")
    with pytest.raises(SettingError, match="this site's ledger cannot be read") as error:
        told(runtime, PLAN)
    assert str(tmp_path) not in str(error.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"noise": 0.0},
        {"noise": float("inf")},
        {"noise": -1.0},
        {"bounds": ((0.0, 5e-324),)},
        {"bounds": ((1.0, 1.0),)},
        {"bounds": ((float("-inf"), 1.0),)},
        {"bounds": ((-1.7e308, 1.7e308),)},
        {"bins": -1},
        {"bins": 100_000},
        {"codes": ((2, ("0",)),)},
        {"codes": ((-1, ("0",)),)},
        {"codes": ((0, ("0",)), (0, ("0",)))},
        {"codes": ((0, ()),)},
        {"codes": ((0, ("1", "1")),)},
        {"codes": ((0, ("1",)),), "tables": ((0, 1),)},
        {"codes": ((0, ("1",)),), "tables": ((0, 0),)},
        {"tables": ((0, 1),), "classes": 3},
    ],
)
def test_questions_without_noise_or_bounds_cannot_be_made(wrong: dict[str, Any]) -> None:
    """A site builds a question from what came, so what cannot be built is not answered."""
    with pytest.raises(SettingError):
        NoisySumsQuery(**{"bounds": ((0.0, 1.0),), "noise": 1.0, **wrong})


def test_extreme_bounds_leave_no_row_more_influence() -> None:
    for low, high in [(0.0, 2e-300), (-8e307, 8e307), (1.0, 1.0 + 2**-52), (-5e-300, 5e-300)]:
        made = SumPlan({"x": (low, high)}, 3, {}, ())
        column = np.array([low, high, 0.0, 1e308, -1e308, 5e-324, np.nan, np.inf])
        rows = [made.vector(ClientColumns("", 1, {"x": one}, {})) for one in column.reshape(-1, 1)]
        assert max(np.linalg.norm(one * STEP) for one in rows) <= made.influence + 1e-9


def test_a_question_about_other_columns_or_far_too_much_is_not_answered(tmp_path: Path) -> None:
    query = NoisySumsQuery(bounds=((0, 1),), noise=9.0)
    with pytest.raises(SettingError, match="whose log says more"):
        AskedSites(InProcess(PLAN, [NOISY], folder=tmp_path), PLAN.work).sums(query, None)
    with pytest.raises(SettingError, match="sums are at most 1,048,576 numbers, got 2,001,000"):
        NoisySumsQuery(bounds=((0, 1),) * 200, bins=10_000, noise=9.0)


@pytest.mark.parametrize(
    ("policy", "secure", "epsilon", "why"),
    [
        (Policy(), False, 1.0, "only if its policy names it"),
        (Policy(queries=["statistics"], least_rows=1), False, 1.0, "does not answer 'noisy_sums'"),
        (Policy(queries=["noisy_sums"], least_rows=1), False, 1.0, "no budget for noisy answers"),
        (Policy(queries=["noisy_sums"], budget=BUDGET, splits=["test"]), False, 1.0, "its train rows"),  # type: ignore[arg-type]
        (Policy(queries=["noisy_sums"], budget=BUDGET, least_rows=31), False, 1.0, "fewer than the 31 rows"),  # type: ignore[arg-type]
        (Policy(queries=["noisy_sums"], budget=BUDGET, secure_aggregation=3), False, 1.0, "only inside secure"),  # type: ignore[arg-type]
        (Policy(queries=["noisy_sums"], budget=BUDGET), True, None, "does not answer 'masked_sums'"),  # type: ignore[arg-type]
        (Policy(queries=["masked_sums"], least_rows=2), True, None, "cannot know that a sum is about"),
    ],
)
def test_a_policy_decides(tmp_path: Path, policy: Policy, secure: bool, epsilon: float | None, why: str) -> None:
    of = SECURE if secure else PLAN
    with pytest.raises(PiebaldError, match=why):
        told(InProcess(of, [policy] * 3, folder=tmp_path), of, epsilon=epsilon)
    assert not list(tmp_path.glob(f"*/{FILE}"))  # what is refused spends nothing


def test_masks_are_those_of_the_run(tmp_path: Path) -> None:
    """A server that has not told of masks in the terms gets no answer that should be under them."""
    query = MaskedSumsQuery(bounds=tuple(LIMITS.values()), classes=3)
    with pytest.raises(SettingError, match="this run masks nothing"):
        AskedSites(InProcess(PLAN, [MASKED] * 3, folder=tmp_path), PLAN.work).sums(query, None)
    short = plan(recipes.fedavg().with_(transforms=SecureAggregation()))
    with pytest.raises(PiebaldError, match="set bits = 64"):
        told(InProcess(short, [MASKED] * 3, folder=tmp_path / "b"), short, epsilon=None)


def test_a_noisy_site_tells_nothing_else(tmp_path: Path) -> None:
    """No moments, no numbers of rows beside the sums."""
    runtime = InProcess(PLAN, [NOISY], folder=tmp_path)
    query = NoisySumsQuery(bounds=tuple(LIMITS.values()), classes=3, noise=5.0)
    asked = Task(0, 0, 0, {"model": PLAN.work.initial}, query)
    update, _, _ = runtime._sites[0].serve(asked, None)
    assert update is not None
    assert (update.vectors.keys(), update.examples, update.steps, dict(update.metrics)) == ({SUM}, 0, 0, {})
    exact = Task(1, 0, 0, {"model": PLAN.work.initial}, StatisticsQuery())
    assert runtime._sites[0].serve(exact, None)[1] == "this site does not answer 'statistics'"


def test_hostile_sums_do_not_count(tmp_path: Path) -> None:
    def changed(value: torch.Tensor) -> Any:
        return lambda update: dataclasses.replace(update, vectors={SUM: value})

    for value in (torch.full((16,), 1 << 62) + 1, torch.full((16,), -(1 << 63)), torch.zeros(3, dtype=torch.int64)):
        runtime = InProcess(PLAN, [NOISY] * 3, changed(value), folder=tmp_path / str(value[0].item()))
        assert told(runtime, PLAN, bins=None).clients == ["b", "c"]
