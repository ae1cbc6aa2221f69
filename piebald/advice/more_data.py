"""The effect of more rows and more clients: the recommendation is trained with half and a quarter of them.

All runs have the settings that were chosen, with twice or four times the epochs, so that a part of the rows has as many
steps as all of them: otherwise more rows would be praised for more training.  The quarter is part of the half.  They
are scored on the same validation rows of the same clients as the runs with everything, under the first two seeds of
those as far as the budget goes, so that differences are paired row by row.  What doubling once more would do is not
known: where the second half has gained little, more of the same may gain little, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from piebald.advice.race import ALONE, Runner
from piebald.advice.tuning.space import Budget, Cost, has_setting, setting_of, with_settings
from piebald.advice.tuning.trial_runs import PartOfRows, TrialRuns, cost_of
from piebald.core.errors import SettingError
from piebald.core.randomness import generator
from piebald.data.clients.view import ClientsView
from piebald.methods.recipe import Recipe
from piebald.report.crossed_effects import ERROR_RATE
from piebald.report.paired import Difference, Scores
from piebald.report.verdict import compared

SHARE = 0.1  # of the budget that is kept for this: two of twenty runs, and what the race leaves over
PARTS = {0.5: "half", 0.25: "a quarter"}  # in this order, as far as the budget goes
_FEWEST_CLIENTS = 2  # that are left
_SEEDS = 2
_KINDS = ("rows", "clients")


@dataclass(frozen=True)
class More:
    """The effect of the second half of the rows or of the clients, and of the doubling before it.

    Attributes:
        what: "rows" or "clients".
        gain: with all of them against half of them, None where it was not tried.
        why: it was not tried, empty where it was.
        clients: the number of clients that both are scored on.
        before: with half of them against a quarter, None where that was not tried.
        points: the mean on those clients that all runs have, by the share of the rows or clients, the smallest first.
    """

    what: str
    gain: Difference | None = None
    why: str = ""
    clients: int = 0
    before: Difference | None = None
    points: Mapping[float, float] = field(default_factory=dict)


def more_data(
    chosen: Runner, runs: TrialRuns, folder: Path, budget: Budget, spent: Cost, say: Callable[[str], None]
) -> tuple[list[More], Cost]:
    """Train the recommendation with a part of the rows and with a part of the clients, as far as the budget goes.

    Args:
        chosen: the recommendation.
        runs: the settings by which it was trained.
        folder: of the search.
        budget, spent: of the whole search.
        say: takes a line for each event.

    Returns:
        The effects, and their cost.
    """
    cost = Cost()
    folders: dict[tuple[str, float], dict[int, Path]] = {(kind, share): {} for share in PARTS for kind in _KINDS}
    reasons: dict[str, str] = {}
    seeds = [seed for seed in chosen.last.seeds if seed in chosen.folders][:_SEEDS]
    # halves before quarters and every seed, rows and clients in turn: if the budget ends, both have their half
    for share, seed, kind in itertools.product(PARTS, seeds, _KINDS):
        room = budget.has_room(spent + cost, runs.rungs[-1])
        reason, place, run_cost = _with_part(kind, share, seed, chosen, runs, folder, room)
        say(f"{chosen.label} with {PARTS[share]} of the {kind}, seed {seed}: {reason or 'trained'}")
        cost += run_cost
        if place is None:
            reasons.setdefault(kind, reason)
        else:
            folders[kind, share][seed] = place
    scores: dict[str, dict[float, Scores]] = {kind: {} for kind in _KINDS}
    for (kind, share), of_seeds in folders.items():
        table = _read(kind, share, of_seeds, runs) if of_seeds else None
        if table is not None:
            scores[kind][share] = table
    everything = runs.read({seed: chosen.folders[seed] for seed in seeds})
    return [_effect_of_more(kind, scores[kind], reasons.get(kind, ""), everything) for kind in _KINDS], cost


def _clients_in(kind: str, share: float, runs: TrialRuns) -> list[int]:
    """The numbers of the clients in a part: all in a part of the rows."""
    numbers = list(range(len(runs.choosing)))
    if kind == "rows":
        return numbers
    order = generator("half of the clients").permutation(len(numbers))
    # rounded up, and a prefix of the same order: the quarter is part of the half
    return sorted(order[: -int(-len(numbers) * share // 1)].tolist())


def _part(kind: str, share: float, runs: TrialRuns) -> TrialRuns:
    """The settings of runs with a part of the rows or of the clients."""
    in_part = _clients_in(kind, share, runs)
    clients = PartOfRows(runs.choosing, share) if kind == "rows" else ClientsView(runs.choosing, in_part)
    return replace(runs, choosing=clients)  # type: ignore[arg-type]  # as far as a run needs them


def _read(kind: str, share: float, folders: Mapping[int, Path], runs: TrialRuns) -> Scores | None:
    """The scores of runs with a part, by the clients' names in the whole federation."""
    table = _part(kind, share, runs).read(folders)
    if table is None:
        return None
    inside, names = table.clients, [runs.names[number] for number in _clients_in(kind, share, runs)]
    whole = dict(zip(inside, names, strict=True))  # by which the parts are paired with the runs of all clients
    rows = {(seed, whole[name]): values for (seed, name), values in table.rows.items()}
    return replace(table, clients=names, rows=rows)


def _with_as_many_steps(recipe: Recipe, share: float) -> Recipe:
    """A recipe whose clients make as many steps with a share of their rows, as far as epochs say how many."""
    # a number of steps says already how many there are
    if has_setting(recipe, "steps") and setting_of(recipe, "steps") is not None:
        return recipe
    names = [name for name in type(recipe.training).model_fields if name.endswith("epochs")]
    values = {name: setting_of(recipe, name) for name in names if has_setting(recipe, name)}
    epochs = {name: round(value / share) for name, value in values.items() if isinstance(value, int) and value}
    return with_settings(recipe, epochs) if epochs else recipe


def _with_part(
    kind: str, share: float, seed: int, chosen: Runner, runs: TrialRuns, folder: Path, room: bool
) -> tuple[str, Path | None, Cost]:
    """Return the reason why there is no run with a part, its folder where there is one, and its cost."""
    if kind == "clients":
        if chosen.entrant.recipe.name == ALONE:
            return "every client trains alone", None, Cost()
        if len(_clients_in(kind, share, runs)) < _FEWEST_CLIENTS:
            return f"there are {len(runs.choosing)} clients", None, Cost()
    rounds = chosen.stopped or runs.rungs[-1]
    path = folder / "more-data" / kind / f"{share:g}" / f"seed-{seed}"
    # what an interrupted search has begun is finished: its cost was already spent
    if not room and not path.exists():
        return "the budget was used up", None, Cost()
    recipe = _with_as_many_steps(chosen.recipe, share) if kind == "rows" else chosen.recipe
    try:
        run = _part(kind, share, runs).train(recipe, path, chosen.label, seed, rounds)
    # fewer rows may be too few for a recipe; that is an answer and no error of the search
    except SettingError as error:
        return str(error), None, Cost()
    cost = cost_of([run])
    run.close()
    return "", path, cost


def _effect_of_more(kind: str, by_share: Mapping[float, Scores], reason: str, everything: Scores | None) -> More:
    """Return the effect of doubling a part of the rows or clients."""
    half, quarter = (by_share.get(share) for share in PARTS)
    if half is None or everything is None:
        return More(kind, why=reason or "no client has scores of both")
    gain = compared(everything, half)
    before = None if quarter is None else compared(half, quarter)
    tables = {**by_share, 1.0: everything}
    # on the clients of the smallest part, so that all points are about the same clients
    points = {share: _mean(tables[share], (quarter or half).clients) for share in sorted(tables)}
    return More(kind, gain, "" if gain else "no client has scores of both", len(half.clients), before, points)


def _mean(scores: Scores, clients: Sequence[str]) -> float:
    """The mean over some clients with the first seed."""
    return float(np.nanmean(scores.values[0, [list(scores.clients).index(name) for name in clients]]))


def sentences(
    effects: Sequence[More], label: str, amount: Callable[[Difference], str], outlook_of: Callable[[More], str]
) -> list[str]:
    """Return the effects in words, one sentence each.

    Args:
        effects: from `more_data`.
        label: of the recommendation.
        amount: says a gain in words.
        outlook_of: says what the last doubling says about the next one.
    """
    lines = []
    for part in effects:
        if part.gain is None:
            lines.append(f"What more {part.what} would change was not tried: {part.why}.")
            continue
        opening = {
            "rows": f"With all training rows in place of half of them, and as many steps, {label} gains",
            "clients": f"With all clients in place of half of them, the {part.clients} that are in both gain",
        }[part.what]
        lines.append(f"{opening} {amount(part.gain)}: {outlook_of(part)}.")
        if part.before is not None:
            lines.append(f"From a quarter to half of the {part.what} it gained {amount(part.before)}.")
    return lines


def outlook(what: str, gain: Difference, higher: bool, near: float) -> str:
    """Return what the last step of a learning curve says about the next one, where it is beyond noise (p < 0.05).

    Args:
        what: "more rounds", for example.
        gain: of the last step.
        higher: whether a larger value of the metric is better.
        near: what counts as little.
    """
    if gain.error is None:
        return f"what {what} would change cannot be told"
    if gain.p < ERROR_RATE:
        return f"{what} {'may' if (gain.mean > 0) == higher else 'did not'} help"
    return f"{what} would change little" if gain.error <= near else f"what {what} would change is within noise"
