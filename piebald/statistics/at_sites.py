"""Statistics of the sites of a federation, which an experiment file describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from piebald.contracts import Clients, Query, Split
from piebald.core.errors import SettingError
from piebald.experiments.file import ExperimentSettings
from piebald.privacy import SecureAggregation
from piebald.statistics.columns_asked import wanted_of_numbers
from piebald.statistics.exact_at_sites import stated_questions, statistics_at_sites
from piebald.statistics.hidden_at_sites import hidden_at_sites, hidden_question
from piebald.statistics.pooled_statistics import FederatedStatistics
from piebald.statistics.question_run import asked


def ask(
    file: Path,
    flags: Sequence[str],
    credentials: Path | None,
    *,
    quantiles: Sequence[float] = (),
    bins: int | None = None,
    bounds: Mapping[str, Sequence[float]] | None = None,
    categories: Mapping[str, Sequence[str]] | None = None,
    tables: Sequence[Sequence[str]] = (),
    by_client: bool = False,
    split: Split = "train",
    secure: bool = False,
    epsilon: float | None = None,
    delta: float | None = None,
) -> FederatedStatistics:
    """Ask the sites of a federation for statistics of their rows.

    Sites take part as they would in a run of the experiment, under its terms and their policies; nothing is trained.

    Args:
        file: the experiment file, which needs no recipe.
        flags: settings on top of it.
        credentials: the server's; None starts a federation of processes on this machine.
        quantiles, bins, bounds, categories, tables, by_client, split, secure, epsilon, delta: as of
            `piebald.statistics`; each site adds noise to its own sums, and its own ledger counts the question.
            Categories and tables are told with noise or under masks alone.

    Raises:
        SettingError: a setting is wrong, or no site answers.
    """
    wanted = wanted_of_numbers(quantiles, bins, bounds or {}, by_client, categories, tables)
    if delta is not None and epsilon is None:
        raise SettingError("delta belongs to noise: give epsilon, too, or leave it out")
    if (categories or tables) and not secure and epsilon is None:
        raise SettingError("sites count categories with noise or under masks: give epsilon, or secure")
    masks = (SecureAggregation(bits=64),) if secure else ()

    def questions(settings: ExperimentSettings, clients: Clients) -> list[Query]:
        features = settings.data.features
        if secure or epsilon is not None:
            return [hidden_question(clients, wanted, features, split, secure, epsilon, delta)[0]]
        return stated_questions(clients, wanted, features, split)

    with asked(file, flags, credentials, "statistics", masks, questions) as opened:
        features = opened.settings.data.features
        if secure or epsilon is not None:
            return hidden_at_sites(
                opened.runtime, opened.spec, opened.clients, wanted, epsilon=epsilon, delta=delta, split=split,
                features=features,
            )  # fmt: skip
        return statistics_at_sites(opened.runtime, opened.spec, opened.clients, wanted, split=split, features=features)
