"""No headline claims what the scores do not show, whatever the scores are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from piebald.report.page.wording import BEHIND, NOT_BEHIND, count
from piebald.report.paired import Scores, level, ranking
from piebald.report.verdict import ScoreVerdict, not_clearly_behind


def drawn(seed: int) -> dict[str, Scores]:
    """Scores of some methods: few seeds, few clients, gaps, clients that never trained, perfect scores and ties."""
    rng = np.random.default_rng(seed)
    shape = int(rng.integers(1, 5)), int(rng.integers(1, 7))  # seeds, clients
    clients = [f"site {number}" for number in range(shape[1])]
    found = {}
    for label in ("Local", "FedAvg", "Ditto", "HDAFL", "IFCA")[: int(rng.integers(1, 6))]:
        values = rng.choice([rng.random(shape), np.ones(shape), np.full(shape, 0.5), np.round(rng.random(shape), 1)])
        values = np.where(rng.random(shape) < rng.choice([0.0, 0.3]), np.nan, values)
        trained = rng.random(shape[1]) >= rng.choice([0.0, 0.3])
        found[label] = Scores(values, clients, range(shape[0]), trained)
    return found


def verdict_on(scores: dict[str, Scores], higher: bool = True, **options: Any) -> ScoreVerdict:
    verdict = ScoreVerdict.of(scores, "accuracy", higher, **options)
    assert verdict is not None
    return verdict


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.full) for first in (100, 200))])
def test_headlines_hold_for_any_scores(first: int) -> None:
    winners = 0
    for seed in range(first, first + 100):
        scores = drawn(seed)
        ranked = ranking(scores)
        near = not_clearly_behind(scores)
        assert near == [label for label in ranked if label in near]  # the best first
        if not ranked:
            assert ScoreVerdict.of(scores, "accuracy", True) is None
            continue
        verdict = verdict_on(scores)
        text = verdict.sentence()
        assert (verdict.near, verdict.leader) == (near, ranked[0])
        assert text.startswith(f"{ranked[0]} {'leads' if len(ranked) > 1 else 'ends'} at")
        beside = len(ranked) - len(verdict.incomparable)
        assert (BEHIND in text) == (beside > 1 and not verdict.too_few)
        assert (NOT_BEHIND in text) == (len(near) - len(verdict.incomparable) > 1 and not verdict.too_few)
        assert ("no client and seed with it" in text) == bool(verdict.incomparable)
        winners += len(near) == 1 < len(ranked)
        for label in ranked:
            found = level(scores[label], bounds=(0.0, 1.0))
            assert found is not None
            assert 0 <= found.low <= found.mean + 1e-12
            assert found.mean - 1e-12 <= found.high <= 1
        check_other_views(scores, near)
    assert winners  # some of these scores do have one


def check_other_views(scores: dict[str, Scores], near: list[str]) -> None:
    """The same scores in another order, upside down and twice: the same headline, and no winner over a copy."""
    assert sorted(not_clearly_behind(dict(reversed(scores.items())))) == sorted(near) or same_means(scores)
    errors = {
        label: Scores(1 - one.values, one.clients, one.seeds, one.trained) for label, one in scores.items()
    }  # error rates
    assert sorted(not_clearly_behind(errors, False)) == sorted(near) or same_means(scores)
    if near:
        assert {near[0], "copy"} <= {*not_clearly_behind({**scores, "copy": scores[near[0]]})}


def same_means(scores: dict[str, Scores]) -> bool:
    """Whether two methods are equally good, so that which of them is the best is a matter of order."""
    means = [one.mean for label in scores if (one := level(scores[label])) is not None]
    return len({round(mean, 9) for mean in means}) < len(means)


def shares(value: float, clients: int = 8, rows: int = 200) -> Scores:
    """The same share of right rows at every client."""
    return Scores([[value] * clients], range(clients), sizes=[rows] * clients, counted=True)


@pytest.mark.parametrize(
    ("values", "naive", "sent", "words"),
    [
        ({"ditto": 0.75}, None, {}, "ditto ends at 75.0% accuracy"),
        ({"ditto": 0.875, "local": 0.75}, 0.5, {},
         "ditto is 12.5 points (9.4 to 15.6) better than training alone and 37.5 points (34.1 to 40.9) better than "
         "always the most frequent class (50.0%) for these runs; it leads at 87.5% accuracy; local is "
         f"{BEHIND}"),
        ({"ditto": 0.8, "local": 0.79}, 0.5, {"ditto": 1e6, "local": 0.0},
         "No method is clearly better than training alone; ditto is 30.0 points (26.4 to 33.6) better than always the "
         f"most frequent class (50.0%) for these runs; it leads at 80.0% accuracy; local is {NOT_BEHIND}, and "
         "local sends nothing"),
        ({"a, b": 0.8, "fedavg": 0.79, "ifca": 0.4}, None, {},
         f"a, b leads at 80.0% accuracy; fedavg is {NOT_BEHIND}"),
        ({"local": 0.8, "fedavg": 0.76}, 0.8, {},
         "No method is clearly better than training alone or always the most frequent class (80.0%); worse than that: "
         f"fedavg (76.0%); local leads at 80.0% accuracy; fedavg is {BEHIND}"),
    ],
)  # fmt: skip
def test_the_sentence_says_what_is_gained_then_who_leads_then_who_is_not_clearly_behind(
    values: dict[str, float], naive: float | None, sent: dict[str, float], words: str
) -> None:
    scores = {label: shares(value) for label, value in values.items()}
    plain = None if naive is None else {"the most frequent class": shares(naive)}
    assert verdict_on(scores, alone="local", naive=plain, sent=sent).sentence() == words


def test_who_is_clearly_behind_another_than_the_leader_is_clearly_behind() -> None:
    """fedavg is clearly above local, and a noisy leader above neither: local would both differ and be level."""
    base, noise = np.full((3, 10), 0.5), np.random.default_rng(0).normal(0, 0.3, (3, 10))
    scores = {"local": base, "fedavg": base + 0.02, "hdafl": base + 0.04 + noise - noise.mean()}
    tables = {label: Scores(values, range(10)) for label, values in scores.items()}
    assert not_clearly_behind({label: tables[label] for label in ("local", "fedavg")}) == ["fedavg"]
    verdict = verdict_on(tables)
    lead = verdict.leads["local"]
    assert lead is not None
    assert lead.p > 0.05
    assert (verdict.near, verdict.behind) == (["hdafl", "fedavg"], ["local"])


def test_of_few_clients_without_known_rows_nothing_is_said() -> None:
    """Methods at 0.83 and 0.60 on four hospitals whose rows are not known."""
    scores = {"local": Scores([[0.8, 0.9, 0.9, 0.7]], "abcd"), "fedavg": Scores([[0.6, 0.5, 0.9, 0.4]], "abcd")}
    words = verdict_on(scores, alone="local").sentence()
    assert words == "local leads at 82.5% accuracy; 4 clients are too few to say who is behind it"


@pytest.mark.parametrize(
    ("other", "words"),
    [([0.6, np.nan, np.nan], "1 client is too few"), ([0.6, 0.5, np.nan], "2 clients are too few")],
)
def test_clients_are_counted_that_both_methods_have(other: list[float], words: str) -> None:
    scores = {"local": Scores([[0.8, 0.9, 0.9]], "abc"), "fedavg": Scores([other], "abc")}
    assert (
        verdict_on(scores).sentence()
        == f"local leads at {100 * 2.6 / 3:.1f}% accuracy; {words} to say who is behind it"
    )


def test_a_gain_by_a_smaller_metric_has_a_positive_size_and_interval() -> None:
    sentences = [
        verdict_on({"ditto": shares(1 - value), "local": shares(value)}, higher, alone="local").sentence()
        for value, higher in ((0.25, True), (0.75, False))
    ]
    half = 1.96 * (2 * 0.75 * 0.25 / 1600) ** 0.5  # of two shares of 1,600 rows
    ends = f"{50 - 100 * half:.1f} to {50 + 100 * half:.1f}"
    gain = f"ditto is 50.0 points ({ends}) better than training alone for these runs"
    assert [sentence.partition(";")[0] for sentence in sentences] == [gain, gain]


def test_an_area_below_one_half_is_not_passed_over() -> None:
    scores = {"local": Scores([[0.3, 0.34, 0.31]], "abc"), "fedavg": Scores([[0.4, 0.45, 0.41]], "abc")}
    verdict = ScoreVerdict.of(scores, "auc", True, "local", {"the most frequent class": Scores([[0.5] * 3], "abc")})
    assert verdict is not None
    assert verdict.sentence().startswith(
        "No method is clearly better than always the most frequent class (0.5); worse than that: fedavg (0.42) and "
        "local (0.317)"
    )
    assert not verdict.beats_naive


def test_means_of_counts_have_no_more_digits_than_they_say() -> None:
    assert [count(number) for number in (8.66, 20.0, 99.96, 14_373.3)] == ["8.7", "20", "100", "14,373"]


def test_a_method_without_a_score_where_others_do_badly_does_not_lead_by_that() -> None:
    """At the easy client all are alike; only Ditto, which failed at the hard one, has the higher mean."""
    scores = {
        "local": Scores([[0.9, 0.4]], ["easy", "hard"], sizes=[100, 100], counted=True),
        "fedavg": Scores([[0.92, 0.5]], ["easy", "hard"], sizes=[100, 100], counted=True),
        "ditto": Scores([[0.9, np.nan]], ["easy", "hard"], sizes=[100, 100], counted=True),
    }
    assert ranking(scores) == ["fedavg", "local", "ditto"]
    assert verdict_on(scores, alone="local").leader == "fedavg"
    assert ranking({label: scores[label] for label in ("ditto", "local")}) == ["ditto", "local"]  # a tie keeps order


def test_a_method_that_failed_everywhere_is_named() -> None:
    verdict = verdict_on({"local": shares(0.6), "fedavg": shares(np.nan)}, alone="local", tried=["fedavg", "ditto"])
    assert verdict.sentence() == "local ends at 60.0% accuracy; fedavg and ditto have no score"
    assert verdict.plain()["unscored"] == ["fedavg", "ditto"]


def test_methods_that_share_no_client_are_not_said_to_be_alike() -> None:
    scores = {"local": Scores([[0.5]], ["south"]), "fedavg": Scores([[0.9]], ["north"])}
    verdict = verdict_on(scores, alone="local")
    assert verdict.sentence() == "fedavg leads at 90.0% accuracy; local shares no client and seed with it"
    assert (verdict.plain()["not_clearly_behind"], verdict.plain()["clearly_behind"]) == ([], [])


def single_rows(sizes: list[int], right: bool) -> Scores:
    names = [f"site {number}" for number in range(len(sizes))]
    rows = {(0, name): np.full(size, float(right)) for name, size in zip(names, sizes, strict=True)}
    return Scores([[float(right)] * len(sizes)], names, sizes=sizes, rows=rows, counted=True)


def test_two_rows_prove_nothing_and_no_interval_of_a_gain_goes_beyond_all_rows() -> None:
    """Of two rows that disagree a coin has both on one side every other time; of eight hardly ever."""
    few = verdict_on({"local": single_rows([1, 1], False), "fedavg": single_rows([1, 1], True)}, alone="local")
    assert few.sentence().startswith("No method is clearly better than training alone; fedavg leads at 100.0% accuracy")
    eight = verdict_on(
        {"local": single_rows([1, 2, 3, 2], False), "fedavg": single_rows([1, 2, 3, 2], True)}, alone="local"
    )
    assert eight.over_alone is not None
    assert eight.over_alone.high == 1.0
    assert " to 100.0) better than training alone" in eight.sentence()
