"""Boosted trees over clients: the function behind `piebald.trees` and the command of that name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from piebald.contracts import Split
from piebald.core.arguments import PathLike, Seed, Share, checked
from piebald.statistics.boosting.clients import HereClients, TreeRows, alone
from piebald.statistics.boosting.growth import xgboost
from piebald.statistics.boosting.rounds import Boosted, Boosting, Rounds
from piebald.statistics.boosting.settings import Objective, TreeSettings
from piebald.statistics.boosting.summed_rounds import SummedBoosting
from piebald.statistics.boosting.targets import SCORES
from piebald.statistics.trees.boosted_trees import BoostedTrees, Scores
from piebald.statistics.trees.encoding import TreeData, tree_data
from piebald.statistics.trees.folder import TreeFolder, fingerprint, kept_in
from piebald.statistics.trees.summed import SummedHere

Done = Callable[[Boosted], None]


@checked
def trees(
    clients: Any,
    *,
    target: str | None = None,
    columns: Sequence[str] | None = None,
    objective: Objective | None = None,
    client: str | None = None,
    features: Sequence[str] | None = None,
    validation: Share | None = None,
    test: Share | None = None,
    split: Split = "test",
    compare: bool = True,
    seed: Seed = 0,
    out: PathLike | None = None,
    done: Callable[[Boosted], None] | None = None,
    **settings: Any,
) -> BoostedTrees:
    """Grow gradient-boosted trees on the rows of all clients, which stay where they are.

    In each round every client grows a tree on its own rows, from the model so far, with xgboost; the trees of a round
    count together as one forest, in which each has the weight of its client.  Under form="histogram", a round is one
    tree from sums over all clients, which leave them under masks with secure=True.

    Args: Rows
        clients: as of `statistics`: a table with a column `client`, a table for each client, or `Clients`.  Gaps are
            allowed, and a column of text becomes a column for each of its categories.
        target: the column to predict; "target" by default, as `Clients` have it.
        columns: the columns to predict it from, all others by default.
        objective: "binary", "multiclass" or "regression"; by default what the target is: classes where it is text or
            the numbers 0 and 1, else a regression.
        client: the column that names the client of each row.
        features: names of the inputs of `Clients`.
        validation, test: shares of each client's rows that are held out, of tables; 0 and 0.2 by default.

    Args: Training
        **settings: those of `TreeSettings`, like rounds=100, max_depth=4, learning_rate=0.1, patience=10.
        seed: of the division of rows and of subsampling.
        out: a folder for the model; a call that was interrupted goes on from its last round when it is repeated.
        done: is called with the state after each round.

    Args: Evaluation
        split: the rows that trees are scored on, at each client.
        compare: also score trees that each client grows alone, and those of all rows in one place.

    Returns:
        The trees, with their scores at each client.

    Raises:
        SettingError: an argument is wrong, rows do not fit together, or xgboost is missing.
        RunFolderError: `out` has something else, or cannot be written.
    """
    chosen = TreeSettings(**settings)
    xgboost()
    data = tree_data(
        clients, client=client, target=target, columns=columns, features=features, objective=objective,
        validation=validation, test=test, seed=seed, missing=chosen.missing,
    )  # fmt: skip
    about = {
        "settings": chosen.table(), "objective": data.target.objective, "columns": data.encoding.columns,
        "classes": list(data.classes), "seed": seed, "rows": fingerprint(data.clients),
    }  # fmt: skip
    with kept_in(None if out is None else Path(out), about) as folder:
        here = HereClients(data.clients, data.target, chosen, seed)
        boosting = _boosting(here, data, chosen, seed, told(folder, done))
        state = (
            None if folder is None else folder.read(len(data.encoding.columns), chosen.max_depth, data.target.groups)
        )
        boosted = boosting.run(state or boosting.started())
        others = _others(data, chosen, seed, split) if compare else {}
        found = BoostedTrees(
            boosted, data.encoding, data.target, data.name, data.classes, [one.name for one in data.clients],
            [len(one.y["train"]) for one in data.clients], here.scores(boosted, split), **others, dropped=data.dropped,
        )  # fmt: skip
        if folder is not None:
            folder.finish(found)
        return found


def _boosting(
    here: HereClients, data: TreeData, settings: TreeSettings, seed: int, done: Callable[[Boosted], None]
) -> Rounds:
    """The rounds of a form."""
    if settings.form != "histogram":
        return Boosting(here, data.target, settings, done)
    summed = SummedHere(data.clients, data.target, settings, seed)
    return SummedBoosting(summed, data.target, settings, seed, done)


def told(folder: TreeFolder | None, done: Done | None) -> Done:
    """What happens after each round."""

    def both(state: Boosted) -> None:
        if folder is not None:
            folder.write(state)
        if done is not None:
            done(state)

    return both


def _others(data: TreeData, settings: TreeSettings, seed: int, split: Split) -> dict[str, list[Scores]]:
    """Scores at each client of its own trees, and of those of all rows in one place."""
    whole = data.clients[0].pooled(data.clients[1:])
    pooled = alone(whole, data.target, settings, seed)
    own = [_scored(alone(one, data.target, settings, seed), one, data, settings, split) for one in data.clients]
    return {"alone": own, "pooled": [_scored(pooled, one, data, settings, split) for one in data.clients]}


def _scored(boosted: Boosted | None, rows: TreeRows, data: TreeData, settings: TreeSettings, split: Split) -> Scores:
    if boosted is None:
        return dict.fromkeys(SCORES[data.target.objective], math.nan)
    return HereClients([rows], data.target, settings, 0).scores(boosted, split)[0]
