"""Paired comparisons: what the intervals cover, what ties do, and what missing values leave."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import stdtrit
from scipy.stats import skew

from piebald.core.errors import SettingError
from piebald.report.crossed_effects import CrossedEffects
from piebald.report.paired import (
    Scores,
    difference,
    level,
    probability_within,
    ranking,
)
from piebald.report.verdict import leads, not_clearly_behind


def scores(values, **options):
    values = np.asarray(values, dtype=float)
    return Scores(values, [f"site {client}" for client in range(values.shape[1])], **options)


def crossed(random, seeds, clients, of_seed, of_client, rest):
    """A table of mean 0 in which seeds, clients and cells differ by normal effects of these sizes."""
    return (
        of_seed * random.standard_normal((seeds, 1))
        + of_client * random.standard_normal((1, clients))
        + rest * random.standard_normal((seeds, clients))
    )


# three seeds, five clients is the smallest case in use; seeds alone is where a bootstrap fails
@pytest.mark.parametrize(
    ("seeds", "clients", "effects", "missing"),
    [
        (3, 5, (0.0, 1.0, 0.3), 0.0),
        (3, 20, (1.0, 0.0, 0.0), 0.0),
        (3, 20, (1.0, 1.0, 1.0), 0.2),
        (5, 9, (0.3, 1.0, 1.0), 0.2),
        (10, 4, (0.1, 0.1, 1.0), 0.0),
    ],
)
def test_intervals_hold_for_other_clients_and_seeds(seeds, clients, effects, missing):
    random = np.random.default_rng(7)
    hit, runs = 0, 400
    for _ in range(runs):
        table = crossed(random, seeds, clients, *effects)
        table[random.random(table.shape) < missing] = np.nan
        found = difference(scores(table + 0.5), scores(np.full(table.shape, 0.5)))
        assert found.kind == "interval"
        hit += found.low <= 0 <= found.high
    assert hit / runs >= 0.95 - 3 * (0.95 * 0.05 / runs) ** 0.5  # within three standard errors of the simulation


@pytest.mark.parametrize(("effects", "least"), [("normal", 0.93), ("exponential", 0.93), ("lognormal", 0.84)])
@pytest.mark.parametrize("clients", [2, 4, 10])
def test_intervals_hold_where_few_clients_gain_much_more_than_the_others(clients, effects, least):
    """Of lognormal effects they cannot: `paired` says so."""
    random, held, runs = np.random.default_rng(5), 0, 400
    for _ in range(runs):
        drawn = {
            "normal": lambda: random.standard_normal(clients),
            "exponential": lambda: random.exponential(size=clients) - 1,
            "lognormal": lambda: random.lognormal(size=clients) - np.exp(0.5),
        }[effects]()
        table = drawn + crossed(random, 3, clients, 0.2, 0.0, 0.3)
        gap = difference(scores(table + 0.5), scores(np.full(table.shape, 0.5)))
        held += gap.low <= 0 <= gap.high
        assert (gap.p < 0.05) == (not gap.low <= 0 <= gap.high)
    assert least <= held / runs <= 0.99


@pytest.mark.parametrize("share", [0.95, 0.99, 0.999])
@pytest.mark.parametrize("clients", [2, 10])
@pytest.mark.parametrize("alike", [True, False])
def test_intervals_hold_where_nearly_all_rows_are_right(share, clients, alike):
    """Where clients show no spread at all, an interval of theirs has no width: the truth was in 22 % of them."""
    random, held, runs = np.random.default_rng(6), 0, 300
    for _ in range(runs):
        truth = np.full(clients, share) if alike else random.beta(20 * share, 20 * (1 - share), clients)
        values = np.tile(random.binomial(50, truth) / 50, (3, 1))
        ends = level(scores(values, sizes=[50] * clients, counted=True), bounds=(0, 1))
        held += ends.low <= share <= ends.high
    assert held / runs >= (0.93 if alike else 0.9)


def test_intervals_of_accuracies_hold_and_stay_inside():
    random = np.random.default_rng(8)
    hit, runs = 0, 300
    for _ in range(runs):
        hardness = 3.5 + crossed(random, 3, 8, 0.3, 0.8, 0.2)
        values = random.binomial(40, 1 / (1 + np.exp(-hardness))) / 40  # 40 test rows a client, near 100 %
        found = level(scores(values), bounds=(0, 1))
        assert 0 <= found.low <= found.mean <= found.high <= 1
        hit += found.low <= _TRUE_MEAN <= found.high
    assert hit / runs >= 0.9  # the logit is an approximation, of a skewed distribution


# the mean of 1 / (1 + exp(-z)), z normal around 3.5 with the standard deviation of the effects above
_POINTS = np.random.default_rng(9).normal(3.5, (0.3**2 + 0.8**2 + 0.2**2) ** 0.5, 200_000)
_TRUE_MEAN = float((1 / (1 + np.exp(-_POINTS))).mean())


@pytest.mark.parametrize("methods", [2, pytest.param(6, marks=pytest.mark.full)])
def test_ties_have_no_winner_and_the_best_is_kept(methods):
    random = np.random.default_rng(10)
    runs, winners, lost, found = 120, 0, 0, 0
    for _ in range(runs):
        shared = crossed(random, 3, 6, 0.2, 1.0, 0.0)  # what is hard for all
        tied = {f"m{i}": scores(shared + crossed(random, 3, 6, 0.1, 0.3, 0.3)) for i in range(methods)}
        winners += len(not_clearly_behind(tied)) == 1
        apart = not_clearly_behind({**tied, "best": scores(shared + 0.4 + crossed(random, 3, 6, 0.1, 0.3, 0.3))})
        lost += "best" not in apart
        clear = not_clearly_behind({**tied, "best": scores(shared + 4 + crossed(random, 3, 6, 0.1, 0.3, 0.3))})
        found += clear == ["best"]
    assert winners / runs <= 0.05 + 2 * (0.05 * 0.95 / runs) ** 0.5
    assert lost / runs <= 0.05
    assert found / runs > 0.9


@pytest.mark.full
def test_the_probability_is_as_often_true_as_it_says():
    random = np.random.default_rng(11)
    stated, true = [], []
    for _ in range(160):
        means = random.normal(0, 0.02, 4)
        tried = {f"m{i}": scores(mean + crossed(random, 3, 10, 0.01, 0.03, 0.03)) for i, mean in enumerate(means)}
        chosen = ranking(tried)[0]
        stated.append(probability_within(tried, chosen, 0.01))
        true.append(means[int(chosen[1:])] >= means.max() - 0.01)
    stated, true = np.array(stated), np.array(true)
    assert stated.min() < 0.7 < 0.95 < stated.max()  # it has something to say
    for half in (stated >= np.median(stated), stated < np.median(stated)):
        assert stated[half].mean() <= true[half].mean() + 0.07  # not more confident than right
        assert stated[half].mean() >= true[half].mean() - 0.2


# ----------------------------------------------------------------------------------------------------- exact properties


@pytest.mark.parametrize("effects", [(1.0, 1.0, 0.3), (0.0, 1.0, 1.0), (1.0, 0.0, 1.0), (0.0, 0.0, 1.0)])
@pytest.mark.parametrize("seed", range(3))
def test_of_a_whole_table_the_error_is_that_of_the_analysis_of_variance(effects, seed):
    """The mean squares of seeds and of clients, less that of the rest, which both contain: but not less than either."""
    seeds, clients = 3, 6
    table = crossed(np.random.default_rng(seed), seeds, clients, *effects)
    by_seed, by_client = table.mean(1, keepdims=True), table.mean(0, keepdims=True)
    of_seeds = clients * by_seed.var(ddof=1)
    of_clients = seeds * by_client.var(ddof=1)
    of_rest = ((table - by_seed - by_client + table.mean()) ** 2).sum() / ((seeds - 1) * (clients - 1))
    variance = max(of_seeds, of_clients, of_seeds + of_clients - of_rest)
    satterthwaite = variance**2 / (
        of_seeds**2 / (seeds - 1) + of_clients**2 / (clients - 1) + of_rest**2 / ((seeds - 1) * (clients - 1))
    )
    found = difference(scores(table), scores(np.zeros(table.shape)))
    assert found.error == pytest.approx((variance / table.size) ** 0.5)
    half = stdtrit(max(satterthwaite, seeds - 1), 0.975) * found.error
    # an end is further away where some clients gain much more than the others
    assert min(found.mean - found.low, found.high - found.mean) == pytest.approx(half)


@pytest.mark.parametrize("methods", [2, 3, 5])
def test_a_p_value_counts_every_comparison_of_two_methods(methods):
    random = np.random.default_rng(4)
    tried = {f"m{place}": scores(crossed(random, 3, 6, 0.1, 0.2, 0.1) - 0.3 * place) for place in range(methods)}
    best, *others = ranking(tried)
    alone = {label: difference(tried[best], tried[label]).p for label in others}
    assert any(p < 1 / methods for p in alone.values())
    for label, p in alone.items():
        assert leads(tried)[label].p == pytest.approx(min(1, p * methods * (methods - 1) / 2))


def test_equal_scores_have_no_winner():
    values = np.random.default_rng(1).random((4, 7))
    same = {"a": scores(values), "b": scores(values), "c": scores(values)}
    assert not_clearly_behind(same) == ["a", "b", "c"]
    found = difference(same["a"], same["b"])
    assert (found.mean, found.low, found.high, found.p) == (0, 0, 0, 1)
    assert probability_within(same, "c", 0) == 1


def test_what_is_hard_for_both_drops_out():
    random = np.random.default_rng(2)
    a, b = random.random((3, 9)), random.random((3, 9))
    hard = 100 * crossed(random, 3, 9, 1, 1, 1)
    plain, shifted = difference(scores(a), scores(b)), difference(scores(a + hard), scores(b + hard))
    assert (shifted.low, shifted.high) == pytest.approx((plain.low, plain.high), rel=1e-9)
    back = difference(scores(b), scores(a))
    assert (back.low, back.high, back.p) == pytest.approx((-plain.high, -plain.low, plain.p))


def test_clients_are_matched_by_name_and_seeds_by_number():
    values = np.random.default_rng(3).random((3, 4))
    a = Scores(values, ["w", "x", "y", "z"], seeds=[1, 2, 3])
    b = Scores(values[::-1, ::-1] - 0.25, ["z", "y", "x", "w"], seeds=[3, 2, 1])
    assert difference(a, b).mean == pytest.approx(0.25)
    other = Scores(values[:2, :2], ["x", "v"], seeds=[2, 9])
    assert (difference(a, other).seeds, difference(a, other).clients) == (1, 1)
    strange = Scores(values, ["s", "t", "u", "v"])
    assert difference(a, strange) is None
    assert set(not_clearly_behind({"a": a, "strange": strange})) == {"a", "strange"}
    with pytest.raises(SettingError, match="shares no client and seed"):
        probability_within({"a": a, "strange": strange}, "a", 0.01)


def test_few_seeds_have_a_range_and_must_agree():
    a, b = [[0.5, 0.6, 0.7], [0.7, 0.8, 0.9]], [[0.4, 0.5, 0.6], [0.4, 0.5, 0.6]]
    found = difference(scores(a), scores(b))
    assert found.kind == "range"
    assert (found.mean, found.low, found.high) == pytest.approx((0.2, 0.1, 0.3))
    one = difference(scores(a[:1]), scores(b[:1]))
    assert (one.kind, one.seeds, one.low, one.high) == ("range", 1, one.mean, one.mean)
    clients = 0.02 * np.arange(12)
    up, down = clients + 0.3, clients - 0.02
    assert difference(scores([up, up + 0.1]), scores(np.zeros((2, 12)))).p < 0.01
    assert difference(scores([up, down - 0.15]), scores(np.zeros((2, 12)))).p == 1  # the seeds disagree


def test_one_client_and_one_seed_tell_nothing():
    both = {"a": scores([[0.9]]), "b": scores([[0.1]])}
    assert not_clearly_behind(both) == ["a", "b"]
    assert probability_within(both, "a", 0.01) is None
    assert difference(both["a"], both["b"]).error is None
    three = {"a": scores([[0.9], [0.91], [0.92]]), "b": scores([[0.1], [0.12], [0.11]])}
    assert not_clearly_behind(three) == ["a"]


def test_the_same_difference_at_few_clients_is_not_certain():
    two = {"a": scores([[0.6, 0.8]]), "b": scores([[0.5, 0.7]])}  # no spread at all, of two clients
    assert not_clearly_behind(two) == ["a", "b"]
    many = {"a": scores([[0.6] * 10]), "b": scores([[0.5] * 10])}
    assert not_clearly_behind(many) == ["a"]


def test_clients_that_never_trained_are_left_out_unless_asked_for():
    values = [[0.9, 0.8, 0.1], [0.9, 0.8, 0.1], [0.9, 0.8, 0.1]]
    found = scores(values, trained=[True, True, False])
    assert (level(found).mean, level(found).clients) == (pytest.approx(0.85), 2)
    assert (level(found, untrained=True).mean, level(found, untrained=True).clients) == (pytest.approx(0.6), 3)
    nobody = scores(values, trained=[False] * 3)
    assert level(nobody) is None
    assert ranking({"nobody": nobody, "some": found}) == ["some"]


def test_missing_cells_weigh_seeds_equally():
    missing = float("nan")
    found = level(scores([[0.2, missing, missing], [0.6, 0.8, 1.0], [0.7, missing, 0.9]]))
    assert found.mean == pytest.approx((0.2 + 0.8 + 0.8) / 3)
    assert level(scores([[missing, missing]])) is None


def test_a_seed_without_values_counts_nothing():
    values = np.random.default_rng(6).random((3, 4))
    found, plain = level(scores(np.vstack([values, np.full((1, 4), np.nan)]))), level(scores(values))
    assert (found.mean, found.low, found.high) == pytest.approx((plain.mean, plain.low, plain.high))
    assert (found.seeds, found.clients) == (3, 4)


def test_with_two_seeds_the_probability_is_that_over_clients():
    """For these seeds: however far apart they are, it is that of their mean."""
    random = np.random.default_rng(7)
    tables = {"a": random.random((2, 8)), "b": random.random((2, 8)) + np.array([[0.4], [-0.4]])}
    both = {label: scores(table) for label, table in tables.items()}
    mean = {label: scores(table.mean(0, keepdims=True)) for label, table in tables.items()}
    assert 0 < probability_within(mean, "b", 0.05) < 1
    assert probability_within(both, "b", 0.05) == pytest.approx(probability_within(mean, "b", 0.05))


def test_smaller_is_better_is_the_mirror_image():
    random = np.random.default_rng(5)
    tables = {name: random.random((4, 6)) + shift for name, shift in (("a", 0), ("b", 0.3), ("c", 2))}
    plain = {name: scores(table) for name, table in tables.items()}
    mirror = {name: scores(-table) for name, table in tables.items()}
    assert ranking(plain, False) == ranking(mirror) == ["a", "b", "c"]
    assert leads(plain, False)["c"].p == pytest.approx(leads(mirror)["c"].p)
    assert probability_within(plain, "b", 0.1, False) == probability_within(mirror, "b", 0.1)


def test_wrong_scores_are_refused():
    for wrong, message in (
        ({"values": [0.1, 0.2], "clients": ["a", "b"]}, "shape"),
        ({"values": [[0.1, float("inf")]], "clients": ["a", "b"]}, "infinite"),
        ({"values": [[0.1, 0.2]], "clients": ["a", "a"]}, "once"),
        ({"values": [["x", "y"]], "clients": ["a", "b"]}, "must be numbers"),
        ({"values": [[0.1, 0.2]], "clients": ["a", "b"], "trained": [True]}, "trained"),
    ):
        with pytest.raises(SettingError, match=message):
            Scores(**wrong)
    with pytest.raises(SettingError, match="from 0 to 1"):
        level(scores([[0.5, 1.2]]), bounds=(0, 1))
    with pytest.raises(SettingError, match="did you mean 'alone'"):
        probability_within({"alone": scores([[0.5, 0.2]])}, "alnoe", 0.01)


@pytest.mark.parametrize("gains", [[0.0, 0.0, 0.1, 0.9], [0.3, 0.1, -0.8, 0.2, 0.1, 0.0]])
def test_an_interval_reaches_further_where_few_clients_gain_more_by_the_edgeworth_term(gains: list[float]) -> None:
    """Three equal seeds, so that only clients vary: skewness and quantiles by scipy."""
    count = len(gains)
    effects = CrossedEffects.of(np.tile(gains, (3, 1))[None], np.ones(count))
    assert effects.error[0] == pytest.approx(np.std(gains, ddof=1) / count**0.5)
    quantile = min(stdtrit(count - 1, 0.975), 3)
    expected = 2 * skew(gains) * (1 + 2 * quantile**2) / (6 * count**0.5)
    assert effects.stretch()[0] == pytest.approx(expected)
