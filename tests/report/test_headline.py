"""No headline claims what the scores do not show, whatever the scores are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from piebald.report.page.wording import count, rule
from piebald.report.paired import Scores, cannot_be_told_apart, level, ranking


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


def said(scores: dict[str, Scores], higher: bool = True) -> tuple[list[str], str]:
    tied = cannot_be_told_apart(scores, higher)
    ranked = ranking(scores, higher)
    return tied, rule(tied, len(ranked), "88%", dict.fromkeys(ranked, 0.0)) if tied else ""


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.full) for first in (100, 200))])
def test_headlines_hold_for_any_scores(first: int) -> None:
    winners = 0
    for seed in range(first, first + 100):
        scores = drawn(seed)
        ranked = ranking(scores)
        tied, text = said(scores)
        assert tied == [label for label in ranked if label in tied]  # the best first
        assert bool(tied) == bool(ranked)
        assert ("ends best of" in text) == (len(tied) == 1 < len(ranked))
        winners += "ends best of" in text
        if len(tied) <= 4:
            assert all(label in text for label in tied)
        for label in ranked:
            found = level(scores[label], bounds=(0.0, 1.0))
            assert found is not None
            assert 0 <= found.low <= found.mean + 1e-12
            assert found.mean - 1e-12 <= found.high <= 1
        check_other_views(scores, tied)
    assert winners  # some of these scores do have one


def check_other_views(scores: dict[str, Scores], tied: list[str]) -> None:
    """The same scores in another order, upside down and twice: the same headline, and no winner over a copy."""
    assert sorted(cannot_be_told_apart(dict(reversed(scores.items())))) == sorted(tied) or same_means(scores)
    errors = {
        label: Scores(1 - one.values, one.clients, one.seeds, one.trained) for label, one in scores.items()
    }  # error rates
    assert sorted(cannot_be_told_apart(errors, False)) == sorted(tied) or same_means(scores)
    if tied:
        twice: dict[str, Any] = {**scores, "copy": scores[tied[0]]}
        again, text = said(twice)
        assert {tied[0], "copy"} <= {*again}
        assert "ends best of" not in text


def same_means(scores: dict[str, Scores]) -> bool:
    """Whether two methods are equally good, so that which of them is the best is a matter of order."""
    means = [one.mean for label in scores if (one := level(scores[label])) is not None]
    return len({round(mean, 9) for mean in means}) < len(means)


def test_a_label_with_a_comma_is_quoted_among_others() -> None:
    sent = {"FedAvg, fine-tuned": 2e6, "HDAFL": 1e6}
    assert rule(list(sent), 3, "88%", sent) == (
        '"FedAvg, fine-tuned" and HDAFL are best and cannot be told apart; HDAFL sends least, 1 MB'
    )
    assert rule(["FedAvg, fine-tuned"], 2, "88%", sent) == "FedAvg, fine-tuned ends best of 2, at 88%"


def test_means_of_counts_have_no_more_digits_than_they_say() -> None:
    assert [count(number) for number in (8.66, 20.0, 99.96, 14_373.3)] == ["8.7", "20", "100", "14,373"]
