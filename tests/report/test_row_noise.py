"""Differences for the clients at hand: the noise of their rows, and no other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import piebald
from piebald import models, partition
from piebald.advice.odd_sites import detectable_difference
from piebald.core.objective import METRICS
from piebald.engines.scoring import pseudo_values, value_of
from piebald.report.paired import RowMoments, Scores, difference
from piebald.report.row_noise import row_difference
from piebald.report.verdict import ScoreVerdict

Floats = np.ndarray


def table(values: Any, held: int | list[int], **options: Any) -> Scores:
    """Accuracies [seeds, clients] on so many rows of each client."""
    values = np.asarray(values, float)
    sizes = [held] * values.shape[1] if isinstance(held, int) else held
    return Scores(values, [f"c{client}" for client in range(values.shape[1])], sizes=sizes, counted=True, **options)


def of_rows(by_client: list[Floats]) -> Scores:
    """Scores of one seed, from the single rows of each client."""
    rows = {(0, f"c{client}"): right for client, right in enumerate(by_client)}
    return table([[right.mean() for right in by_client]], [len(right) for right in by_client], rows=rows)


def pair(rng: np.random.Generator, sizes: list[int], disagree: float, gain: float) -> tuple[Scores, Scores]:
    """Two methods that disagree on a share of rows, of which the first is right on `gain` more than the second."""
    ours, theirs = [], []
    for size in sizes:
        draw, both = rng.random(size), (rng.random(size) < 0.8).astype(float)
        first, second = draw < (disagree + gain) / 2, (draw >= (disagree + gain) / 2) & (draw < disagree)
        ours.append(np.where(first, 1.0, np.where(second, 0.0, both)))
        theirs.append(np.where(first, 0.0, np.where(second, 1.0, both)))
    return of_rows(ours), of_rows(theirs)


@pytest.mark.full
@pytest.mark.parametrize(
    ("clients", "rows", "disagree"), [(2, 200, 0.1), (10, 20, 0.1), (10, 100, 0.3), (3, 300, 0.005)]
)
def test_what_the_look_promises_is_found_four_times_in_five(clients: int, rows: int, disagree: float) -> None:
    """And nothing is found where there is nothing, and intervals hold the truth, also for shares near 1."""
    smallest = detectable_difference([rows] * clients, disagree)
    assert smallest is not None
    rng, runs, found, wrong, held = np.random.default_rng(0), 400, 0, 0, 0
    for _ in range(runs):
        gap = row_difference(*pair(rng, [rows] * clients, max(disagree, smallest), smallest))
        none = row_difference(*pair(rng, [rows] * clients, max(disagree, smallest), 0.0))
        assert gap is not None
        assert none is not None
        found, wrong = found + (gap.p < 0.05), wrong + (none.p < 0.05)
        held += gap.low <= smallest <= gap.high
    assert found / runs >= 0.8 - 2 * (0.8 * 0.2 / runs) ** 0.5
    assert wrong / runs <= 0.05 + 2 * (0.05 * 0.95 / runs) ** 0.5
    assert 0.93 - 0.01 <= held / runs <= 0.98


def test_of_one_client_it_is_the_test_of_mcnemar() -> None:
    """z = (b - c) / sqrt(b + c - (b - c)^2 / n), with one more row of disagreement, and Student's t with n - 1."""
    b, c, n = 14, 5, 80
    ours = np.array([1.0] * b + [0.0] * c + [1.0] * (n - b - c))
    theirs = np.array([0.0] * b + [1.0] * c + [1.0] * (n - b - c))
    gap = row_difference(of_rows([ours]), of_rows([theirs]))
    assert gap is not None
    variance = (b + c - (b - c) ** 2 / n) / (n - 1) / n + 1 / n**2
    assert (gap.mean, gap.error, gap.noise) == (pytest.approx((b - c) / n), pytest.approx(variance**0.5), "rows")


def test_a_client_of_two_rows_decides_nothing() -> None:
    """Three sites are better alone on many rows, and one has two rows that are right by luck."""
    rng = np.random.default_rng(1)
    sizes = [100, 100, 100, 2]
    right = [(rng.random(size) < 0.6).astype(float) for size in sizes[:3]]
    ours, alone = of_rows([*right, np.ones(2)]), of_rows([*right, np.zeros(2)])
    gap = row_difference(ours, alone)
    assert gap is not None
    assert gap.mean == pytest.approx(0.1 / 3.1)  # a tenth of a vote of 3.1, and not a quarter
    assert gap.p > 0.05
    assert ours.mean - alone.mean == pytest.approx(gap.mean)


def drawn(p: Floats, q: Floats, rows: int) -> tuple[Scores, Scores]:
    """Accuracies of two methods on the same rows of each client, both right on as many rows together as can be."""
    row = np.random.default_rng(0).random((1, len(p), rows))
    return tuple(table((row < right[None, :, None]).mean(2), rows) for right in (p, q))  # type: ignore[return-value]


def test_clients_that_gain_differently_do_not_hide_a_gain() -> None:
    """Two clients of ten gain 30 points, the others nothing: that is a gain of these clients, not of others."""
    own, together = np.full(10, 0.6), np.array([0.9, 0.9, *[0.6] * 8])
    ours, alone = drawn(together, own, 200)
    across = difference(ours, alone)
    here = row_difference(ours, alone)
    assert across is not None
    assert here is not None
    assert here.mean == pytest.approx(across.mean)
    assert here.p < 0.01 < 0.05 < across.p


@pytest.mark.parametrize("rows", [8, 60])
def test_equal_methods_are_called_different_in_at_most_one_case_of_twenty(rows: int) -> None:
    """Independent rows are the worst case: two methods that are right on the same rows differ less."""
    rng = np.random.default_rng(3)
    level = rng.uniform(0.5, 1.0, size=6)
    wrong = 0
    for draw in range(600):
        both = [table(np.random.default_rng([draw, k]).binomial(rows, level)[None] / rows, rows) for k in range(2)]
        found = row_difference(*both)
        wrong += found is not None and found.p < 0.05
    assert wrong <= 42  # 30 are expected; 42 is two standard errors more


def test_seeds_that_disagree_prove_nothing() -> None:
    zero = np.full((3, 2), 0.7)
    apart = zero + np.array([[0.1], [-0.06], [0.02]])
    three = row_difference(table(apart, 10_000), table(zero, 10_000))
    assert three is not None
    assert three.p > 0.5
    rows = (0.7 * 0.3 + 0.72 * 0.28) / 10_000 / 2  # of the mean of two clients
    assert three.error == pytest.approx((rows + np.var([0.1, -0.06, 0.02], ddof=1) / 3) ** 0.5)
    two = row_difference(table(apart[:2], 10_000), table(zero[:2], 10_000))
    assert two is not None
    assert two.p == 1.0
    one = row_difference(table(apart[:1], 10_000), table(zero[:1], 10_000))
    assert one is not None
    assert one.p < 1e-6


def test_what_rows_and_seeds_do_together_counts_once() -> None:
    """Seeds whose models differ on rows by chance alone say no less than one: their means differ by these rows only."""
    rng, count, errors = np.random.default_rng(7), 60, []
    for seeds in (1, 4):
        total = 0.0
        for _ in range(40):
            ours, theirs = [[pair(rng, [count] * 4, 0.3, 0.1)[side] for _ in range(seeds)] for side in (0, 1)]
            tables = [
                table(np.concatenate([one.values for one in scores]), count, rows={
                    (seed, name): right for seed, one in enumerate(scores) for (_, name), right in one.rows.items()})
                for scores in (ours, theirs)
            ]  # fmt: skip
            gap = row_difference(*tables)
            assert gap is not None
            total += (gap.error or 0.0) ** 2
        errors.append(total)
    assert errors[1] < errors[0] / 4 * 1.35  # a fourth, and what a variance of four means is above zero by chance


def test_seeds_on_the_same_rows_are_averaged_before_rows_vary() -> None:
    """Two seeds that repeat each other say no more about rows than one."""
    ours, theirs = pair(np.random.default_rng(5), [60, 60], 0.3, 0.1)
    twice = [
        table(np.repeat(scores.values, 2, 0), 60, rows={(seed, name): rows for seed in (0, 1)
              for (_, name), rows in scores.rows.items()})
        for scores in (ours, theirs)
    ]  # fmt: skip
    once, again = row_difference(ours, theirs), row_difference(*twice)
    assert once is not None
    assert again is not None
    assert again.error == pytest.approx(once.error)


def test_rows_that_each_seed_draws_anew_are_not_paired_with_those_of_another() -> None:
    """Draws of one table have rows in common, so that two seeds do not halve the noise: equal methods stay equal."""
    rng, called = np.random.default_rng(3), {False: 0, True: 0}
    for _ in range(400):
        pool = rng.normal(size=90)  # differences of single rows, of which the mean is 0 elsewhere
        draws = [rng.permutation(pool)[:45] for _ in range(4)]
        for redrawn in called:
            ours, theirs = (
                Scores([[draw.mean() * on] for draw in draws], ["table"], sizes=[45], redrawn=redrawn,
                       rows={(seed, "table"): on * draw for seed, draw in enumerate(draws)})
                for on in (1, 0)
            )  # fmt: skip
            gap = row_difference(ours, theirs)
            called[redrawn] += gap is not None and gap.p < 0.05
    assert called[True] <= 0.05 * 400
    assert called[False] > 0.05 * 400  # as if the draws had nothing in common


def test_a_client_without_rows_or_scores_does_not_count() -> None:
    ours, alone = table([[0.9, 0.5, np.nan]], [50, 0, 50]), table([[0.5, 0.9, 0.1]], [50, 0, 50])
    found = row_difference(ours, alone)
    assert found is not None
    assert found.clients == 1
    assert found.mean == pytest.approx(0.4)
    assert row_difference(table([[0.9]], [0]), table([[0.5]], [0])) is None
    assert row_difference(Scores([[0.9]], ["a"]), Scores([[0.5]], ["a"])) is None
    perfect = row_difference(table([[1.0]], 5), table([[1.0]], 5))
    assert perfect is not None
    assert perfect.error == pytest.approx(0.2)


def cell(name: str, outputs: Floats, targets: Floats) -> tuple[float, Floats]:
    """A metric of a client's rows, and the values of rows that say how it varies."""
    pair = torch.as_tensor(outputs), torch.as_tensor(targets)
    return float(value_of(METRICS[name], *pair)), pseudo_values(METRICS[name], *pair).numpy()


def of_cells(cells: list[tuple[float, Floats]], held: int) -> Scores:
    rows = {(0, f"c{client}"): rows for client, (_, rows) in enumerate(cells)}
    return replace(table([[value for value, _ in cells]], held, rows=rows), counted=False)


def test_the_noise_of_areas_under_curves_is_that_of_delong() -> None:
    """Variances of the components of each positive and each negative row (DeLong, DeLong and Clarke-Pearson 1988)."""
    rng = np.random.default_rng(2)
    y = np.arange(30) % 3 == 0
    shared = rng.normal(size=30)
    logits = [separation * y + shared + rng.normal(size=30) for separation in (2.0, 1.0)]
    gap = row_difference(*(of_cells([cell("auc", z, y.astype(float))], 30) for z in logits))
    assert gap is not None
    wins = [(z[y][:, None] > z[~y]).astype(float) for z in logits]
    lead = wins[0] - wins[1]
    assert gap.mean == pytest.approx(lead.mean())
    variance = np.var(lead.mean(1), ddof=1) / y.sum() + np.var(lead.mean(0), ddof=1) / (~y).sum()
    assert gap.error == pytest.approx(variance**0.5, rel=0.06)


@pytest.mark.full
@pytest.mark.parametrize("name", ["rmse", "balanced_accuracy"])
def test_intervals_of_metrics_of_all_rows_hold_the_truth(name: str) -> None:
    """Three clients of 45 rows, more than there are groups in a jackknife, on which two models err together."""
    rng, draws, held = np.random.default_rng(4), 40, 0

    def outputs(count: int) -> tuple[Floats, list[Floats]]:
        y = rng.normal(size=count)
        y = y if name == "rmse" else (y > 0.5).astype(float)
        shared = rng.normal(size=count)
        return y, [size * (y - 0.3) + 0.5 * shared + 0.6 * rng.normal(size=count) for size in (1.2, 0.9)]

    y, pair_of = outputs(100_000)
    ours, theirs = (value_of(METRICS[name], *map(torch.as_tensor, (z, y))) for z in pair_of)
    truth = float(ours - theirs)
    for _ in range(draws):
        drawn_clients = [outputs(45) for _ in range(3)]
        gap = row_difference(*(of_cells([cell(name, z[k], y) for y, z in drawn_clients], 45) for k in range(2)))
        assert gap is not None
        held += gap.low <= truth <= gap.high
    assert held >= 0.95 * draws - 2 * (0.95 * 0.05 * draws) ** 0.5


def test_a_metric_that_needs_a_row_says_nothing_of_its_noise() -> None:
    """Without the one positive row there is no area under the curve."""
    assert np.isnan(cell("auc", np.arange(5.0), np.array([0.0, 0.0, 1.0, 0.0, 0.0]))[1]).all()


@pytest.mark.full
def test_methods_are_compared_on_rows_by_any_metric() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 3)).astype("float32")
    clients = partition.clients_from({name: (x, (x[:, 0] > 0).astype(int)) for name in "ab"}, test=0.5)
    model = models.build_model("logistic", (3,), 2)
    compared = piebald.compare(["local", "fedavg"], clients, model, rounds=1, metrics=["auc"])
    assert compared.verdict is not None
    assert {lead.noise for lead in compared.verdict.leads.values() if lead} == {"rows"}
    assert compared.naive["the most frequent class"].values.tolist() == [[0.5, 0.5]]


@pytest.mark.full
@pytest.mark.parametrize("methods", [1, 4])
@pytest.mark.parametrize("rows", [10, 60])
def test_guesses_are_not_called_better_than_answers_that_need_no_model(methods: int, rows: int) -> None:
    """Each of the two answers must be beaten, so they count as one comparison, and the leader is one of several."""
    rng, runs, called = np.random.default_rng(11), 300, 0
    for _ in range(runs):
        labels = [rng.random(rows) < rng.uniform(0.4, 0.6) for _ in range(6)]
        guesses = [of_rows([1.0 * ((rng.random(rows) < 0.5) == y) for y in labels]) for _ in range(methods)]
        own = of_rows([1.0 * ((rng.random() < 0.5) == y) for y in labels])
        plain = {"the most frequent class": own, "all clients' most frequent class": of_rows([1.0 * y for y in labels])}
        scores = {f"method {number}": guess for number, guess in enumerate(guesses)}
        verdict = ScoreVerdict.of(scores, "accuracy", True, naive=plain)
        assert verdict is not None
        called += verdict.beats_naive is True
    assert called / runs <= 0.05 + 2 * (0.05 * 0.95 / runs) ** 0.5


def told(scores: Scores, pairs: str = "all") -> Scores:
    """The same scores as a site tells them: moments in place of rows."""
    numbers = {cell: place for place, cell in enumerate(MEMORY)}
    moments = {}
    for (seed, name), rows in scores.rows.items():
        own = next(n for n, cell in enumerate(MEMORY) if cell[1:] == (seed, name) and MEMORY[cell] is rows)
        covariances = {
            numbers[cell]: float(np.cov(rows, other)[0, 1]) / len(rows)
            for cell, other in MEMORY.items()
            if cell[2] == name and (pairs == "all" or (pairs == "same seed" and cell[1] == seed))
        }
        moments[seed, name] = RowMoments(own, len(rows), float(rows.var(ddof=1)) / len(rows), covariances)
    return replace(scores, rows={}, moments=moments)


MEMORY: dict[tuple[int, int, str], Floats] = {}


@pytest.mark.parametrize("seeds", [1, 3])
def test_covariances_say_what_single_rows_do(seeds: int) -> None:
    rng, names = np.random.default_rng(6), ["c0", "c1"]
    MEMORY.clear()
    tables = []
    for method in range(2):
        rows = {}
        for seed in range(seeds):
            for client, (name, size) in enumerate(zip(names, (40, 8), strict=True)):
                right = np.random.default_rng([client, 9]).random(size) < 0.6 + 0.1 * method
                flipped = rng.random(size) < 0.2
                rows[seed, name] = MEMORY[method, seed, name] = np.where(flipped, ~right, right).astype(float)
        values = [[rows[seed, name].mean() for name in names] for seed in range(seeds)]
        tables.append(table(values, [40, 8], rows=rows))
    known = row_difference(*tables)
    whole = row_difference(*map(told, tables))
    assert known is not None
    assert whole is not None
    assert [whole.mean, whole.low, whole.p] == pytest.approx([known.mean, known.low, known.p])
    same_seed = row_difference(*(told(scores, "same seed") for scores in tables))
    assert same_seed is not None
    assert same_seed.error >= whole.error - 1e-12 if seeds > 1 else same_seed.error == pytest.approx(whole.error)
    # of runs that know nothing of each other, shares say how much may be left open
    apart = row_difference(*(told(scores, "none") for scores in tables))
    blind = row_difference(*(replace(scores, rows={}) for scores in tables))
    assert apart is not None
    assert blind is not None
    assert (apart.error, apart.p) == (blind.error, blind.p)
    assert apart.error > whole.error
