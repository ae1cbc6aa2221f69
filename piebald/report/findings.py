"""Findings of a comparison in sentences, the same on the page and in the figures.

Each client is asked by itself, under the noise of its own test rows and of the seeds (`report.row_noise`).  The largest
of many differences is large by luck alone, so p values are multiplied by the number of differences that were looked at
(Bonferroni).  Where that noise is not known the largest difference is named, and nothing is claimed about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from piebald.core.metrics import CRITERIA, LEAST, is_pooled
from piebald.report.comparison import Comparison
from piebald.report.crossed_effects import ERROR_RATE
from piebald.report.page.wording import MetricFormat, count, is_significant, megabytes, names, plural, standing
from piebald.report.paired import FULL_VOTE, Scores, difference, ranking
from piebald.report.row_noise import answer_names, imbalance, row_difference
from piebald.report.tables import History, mean
from piebald.report.verdict import not_clearly_behind


@dataclass(frozen=True, slots=True)
class Gap:
    """The difference between two methods at one client: the mean over their common seeds.

    Attributes:
        client: its name.
        label, base: the two methods.
        size: the first one's metric minus the other's.
        p: two-sided, not adjusted for other gaps; None where chance is not known.
    """

    client: str
    label: str
    base: str
    size: float
    p: float | None


def client_gaps(comparison: Comparison) -> list[Gap]:
    """The differences at each client: of every method to training alone, or of every two where none trains alone.

    Clients that never trained with a method have no score of it here.
    """
    ranked, base = comparison.ranking(), _alone(comparison)
    # against training alone where it was run: the question of a client is whether to take part
    pairs: Iterable[tuple[str, str]] = combinations(ranked, 2)
    if base is not None:
        pairs = [(label, base) for label in ranked if label != base]
    gaps = []
    for label, rival in pairs:
        ours, theirs = comparison.scores[label], comparison.scores[rival]
        for client in [name for name in ours.clients if name in theirs.clients]:
            pair = ours.of_client(client), theirs.of_client(client)
            # only the noise of rows is known of one client
            measured, tested = difference(*pair), row_difference(*pair)
            if measured is not None:
                gaps.append(Gap(client, label, rival, measured.mean, None if tested is None else tested.p))
    return gaps


def headline(comparison: Comparison, gaps: Sequence[Gap]) -> str:
    """Return the headline: the number of clients at which methods differ beyond chance, and the largest difference."""
    shown = MetricFormat(comparison.metric)
    if not gaps:
        return f"Final {shown.name} of each client"
    if not any(gap.size for gap in gaps):
        return "All methods score the same at every client"
    tested = [gap for gap in gaps if gap.p is not None]
    # Bonferroni over all differences that could have become the headline
    clear = [gap for gap in tested if gap.p is not None and gap.p * len(tested) < ERROR_RATE]
    # a large difference that chance explains must not be the headline where there is a clear one
    most = max(clear or gaps, key=lambda gap: abs(gap.size))
    side = "above" if most.size > 0 else "below"
    place = f"{most.client}, where {most.label} is {shown.size(abs(most.size))}{shown.points} {side} {most.base}"
    if not tested:
        return f"Methods differ most at {place}"
    clients, of = len({gap.client for gap in clear}), len({gap.client for gap in tested})
    if _alone(comparison) is None:
        subject = f"At {clients} of {of} clients methods" if clients else "At no client do methods"
        return f"{subject} differ clearly; they differ most at {place}"
    who = f"{clients} of {of} clients {'gains or loses' if clients == 1 else 'gain or lose'}"
    return f"{who if clients else 'No client gains or loses'} beyond chance; methods differ most at {place}"


def noise(gaps: Sequence[Gap]) -> str:
    """Return a sentence for the caption: the noise that the headline takes for chance."""
    tested = sum(gap.p is not None for gap in gaps)
    if tested:
        return (
            " Chance is that of each client's own rows and, from three seeds on, of seeds: p < "
            f"{ERROR_RATE} after multiplying by {tested:,} differences."
        )
    return " How far chance moves the score of a single client is not known." if gaps else ""


def _alone(comparison: Comparison) -> str | None:
    """The label whose clients train alone, None if there is none with scores."""
    base = comparison.made_by("local")
    return base if base in comparison.ranking() else None


MEASURES = {"updates": "used updates", "steps": "local steps", "rows": "rows in updates"}
UNEQUAL = 1.1  # the largest ratio that passes as equal


def notes(comparison: Comparison) -> list[str]:
    """Sentences without which the verdict would be misread: what it holds for, imbalance, and who has few rows."""
    sentences = [
        comparison.verdict.meaning() if comparison.verdict else "",
        without_rows(comparison),
        without_answer_of_all(comparison),
        partly_scored(comparison),
        imbalance(comparison.runs),
        at_thresholds(comparison),
        unequal(comparison),
    ]
    table = next(iter(comparison.scores.values()), None)
    votes = {} if table is None else dict(zip(table.clients, table.votes, strict=True))
    # one without rows has no vote, nor a score
    if (few := [name for name, vote in votes.items() if 0 < vote < 1]) and len(set(votes.values())) > 1:
        verb = "counts" if len(few) == 1 else "count"
        sentences.append(f"With fewer than {FULL_VOTE} judged rows, {names(few)} {verb} in proportion to them.")
    return [sentence for sentence in sentences if sentence]


def partly_scored(comparison: Comparison) -> str:
    """A sentence on methods without a score at clients where others have one; empty if all have the same clients."""
    clients = {
        label: {run.names[client] for run in runs for client in run.per_client}
        for label, runs in comparison.by_label.items()
        if label in comparison.scores
    }
    everyone = set[str]().union(*clients.values())
    lacking = {label: sorted(everyone - scored) for label, scored in clients.items() if everyone - scored}
    listed = "; ".join(f"{label} has no score at {names(missing)}" for label, missing in lacking.items())
    return f"{listed}: methods are ranked and compared by the clients that they share." if listed else ""


def without_rows(comparison: Comparison) -> str:
    """A sentence on clients without the standard error that a comparison for other rows needs; empty without such."""
    leads = comparison.verdict.leads.values() if comparison.verdict else ()
    if all(lead is None or lead.noise == "rows" for lead in list(leads)[1:]):
        return ""
    lacking = dict[str, None]()
    for table in comparison.scores.values():
        for index, seed in enumerate(table.seeds):
            scored = [name for name, value in zip(table.clients, table.values[index], strict=True) if value == value]
            with_error = table.rows.keys() | table.errors.keys()
            lacking |= dict.fromkeys(name for name in scored if not table.counted and (seed, name) not in with_error)
        lacking |= dict.fromkeys(table.clients if table.counted and not len(table.sizes) else ())
    if not lacking:
        return ""
    have = "has" if len(lacking) == 1 else "have"
    return (
        f"What other rows of these clients would change is not known of {MetricFormat(comparison.metric).name}: "
        f"{names(sorted(lacking))} {have} no standard error of it, as it takes more rows, or the site tells none."
    )


def without_answer_of_all(comparison: Comparison) -> str:
    """A sentence where sites tell too little for the constant answer of all clients; empty where it is there."""
    *_, of_all = answer_names(comparison.runs[0])
    here = any(table.rows for table in comparison.naive.values())
    if here or not comparison.naive or of_all in comparison.naive or len(answer_names(comparison.runs[0])) < 2:
        return ""
    return (
        f"Always {of_all} is not compared: what sites tell of their training rows ('training_totals') does not give it."
    )


def at_thresholds(comparison: Comparison) -> str:
    """The scores at thresholds that validation rows chose, beside those at a half; empty without thresholds."""
    stated = next((str(run.meta["threshold"]) for run in comparison.runs if run.threshold_scores), "")
    criterion, whose = stated.removeprefix("pooled "), "all clients'" if is_pooled(stated) else "each client's"
    metric = criterion.partition("=")[0].strip()
    clauses, without = [], dict[str, None]()
    for label, runs in comparison.by_label.items() if criterion else ():
        scores_of_clients = [scores for run in runs for scores in run.threshold_scores.values()]
        parts = []
        for name in [metric] if metric in CRITERIA else LEAST:
            shown = MetricFormat(name)
            at, half = (
                mean([scores[column] for scores in scores_of_clients if column in scores])
                for column in (name, f"{name} at 0.5")
            )
            parts.append(f"{shown.value(at)} {shown.name} ({shown.value(half)} at a half)")
        clauses += [f"{label} has {' and '.join(parts)}"] if scores_of_clients else []
        scored = [run.names[client] for run in runs for client in run.per_client]
        without |= dict.fromkeys(name for name in scored if not any(name in run.threshold_scores for run in runs))
    if not clauses:
        return ""
    lacking = f"; none at {names(list(without))}, which lack validation rows of both classes" if without else ""
    return f"At the threshold for {criterion} on {whose} validation rows, {'; '.join(clauses)}{lacking}."


def progress(comparison: Comparison) -> str:
    """The rounds after which the best label reaches the final value of FedAvg, or else of the second best."""
    shown, ranked = MetricFormat(comparison.metric), comparison.ranking()
    fedavg = comparison.made_by("fedavg")
    if len(ranked) > 1:
        rival = fedavg if fedavg in ranked[1:] else ranked[1]
        end = comparison.over_seeds(rival, "mean")
        row = next((row for row in comparison.to_target(end.mean) if row["label"] == ranked[0]), None) if end else None
        # a mean over the runs that reached it would hide those that did not
        if end and row and row["reached"] == row["runs"]:
            rounds = plural(row["rounds"], "round")
            return f"{ranked[0]} reaches the final value of {rival}, {shown.value(end.mean)}, after {rounds}"
    return f"{shown.name.capitalize()} over the run"


def worst_tenth(comparison: Comparison) -> str:
    """The label with the best worst tenth of clients, and those that are not clearly behind it."""
    shown = MetricFormat(comparison.metric)
    tails = {label: tail for label in comparison.ranking() if (tail := _tails(comparison.finals[label]))}
    if len(tails) < 2:
        return f"Distribution of {shown.name} over clients"
    order = ranking(tails, comparison.higher_is_better)
    near = not_clearly_behind(tails, comparison.higher_is_better)
    if len(near) > 1:
        return f"Worst tenth of clients: {near[0]} leads, {standing(near[1:], clearly=False)}"
    ends = [shown.value(float(tails[label].values.mean())) for label in (order[0], order[-1])]
    return f"The worst tenth of clients does best with {order[0]}: {ends[0]}, compared with {ends[1]} with {order[-1]}"


def _tails(finals: list[dict[str, Any]]) -> Scores | None:
    """The mean of the worst tenth in each run: one number for each seed."""
    tails = {final["seed"]: final["worst_decile"] for final in finals if final["worst_decile"] is not None}
    seeds = [seed for seed in tails if seed is not None] or list(range(len(tails)))
    return Scores(np.array(list(tails.values()), float)[:, None], ["worst tenth"], seeds) if tails else None


def gains(comparison: Comparison, base: str) -> str:
    """The share of clients for which the best label is better than the base."""
    best = next((label for label in comparison.ranking() if label != base and comparison.per_client(label, base)), None)
    if best is None:
        return f"Clients that gain and lose compared with {base}"
    share = gaining(comparison, best, base)[0]
    row = next((row for row in comparison.paired(base) if row["label"] == best), None)
    if row is None or not is_significant(row):
        return f"{best} is not clearly better than {base}; {share:.0%} of clients score better with {best}"
    return f"{best} is better than {base} for {share:.0%} of clients"


def gaining(comparison: Comparison, label: str, base: str) -> tuple[float, float]:
    """The shares of clients that gain and that lose compared with the base."""
    sign = 1 if comparison.higher_is_better else -1
    differences = comparison.per_client(label, base)
    better = sum(sign * difference > 0 for difference in differences)
    worse = sum(sign * difference < 0 for difference in differences)
    return better / len(differences), worse / len(differences)


def cheapest(comparison: Comparison, target: float) -> str:
    """The label that reaches the target with the least traffic."""
    shown = MetricFormat(comparison.metric)
    # training alone reaches any target for free
    alone = comparison.made_by("local")  # its traffic is not comparable
    reached = [row for row in comparison.to_target(target) if row["reached"] == row["runs"] and row["mb"]]
    rows = [row for row in reached if row["label"] != alone]
    if len(rows) < 2:
        return f"Cost of reaching {shown.value(target)}"
    rows.sort(key=lambda row: row["mb"])
    return (
        f"{rows[0]['label']} reaches {shown.value(target)} with {megabytes(rows[0]['mb'])} MB; "
        f"{rows[-1]['label']} needs {megabytes(rows[-1]['mb'])} MB"
    )


def work(history: History) -> dict[str, float]:
    """Updates that were used, their local steps and their rows, up to the version that the run ended with."""
    used = [row for row in history.results if row["kind"] == "train" and row["status"] == "ok"]
    # steps after the best version are not in the model that is judged
    used = [row for row in used if history.best is None or row["version"] <= history.best]
    sums = {name: sum(row[column] or 0 for row in used) for name, column in (("steps", "steps"), ("rows", "examples"))}
    return {"updates": float(len(used)), **{name: float(value) for name, value in sums.items()}}


def work_by_label(comparison: Comparison) -> dict[str, dict[str, float | None]]:
    """The work behind each label: means over its runs; None where the run folders do not say."""
    work_of: dict[str, dict[str, float | None]] = {}
    for label, runs in comparison.by_label.items():
        done = [work(history) for history in runs]
        # 0 comes from folders that do not count this work
        work_of[label] = {name: mean([counts[name] for counts in done]) or None for name in MEASURES}
    return work_of


def unequal(comparison: Comparison) -> str:
    """A sentence where work differs by more than a tenth between methods; empty where it does not."""
    done = work_by_label(comparison)
    for name, description in MEASURES.items():
        amounts = {label: value for label, counts in done.items() if (value := counts[name]) is not None}
        if len(amounts) < 2:
            continue
        order = sorted(amounts, key=lambda label: amounts[label])
        least, most = amounts[order[0]], amounts[order[-1]]
        # the first measure that differs is told: later ones follow from it
        if most > UNEQUAL * least:
            fewest = [label for label in order if amounts[label] <= UNEQUAL * least]
            return (
                f"The methods did unequal work: {count(least)} {description} with {names(fewest, 3)}, {count(most)} "
                f"with {order[-1]}; differences may be those of work."
            )
    return ""
