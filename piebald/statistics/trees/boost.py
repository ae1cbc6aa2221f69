"""Boosted trees over clients whose rows are on this machine: `piebald.trees`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from piebald.contracts import Split
from piebald.core.arguments import PathLike, Seed, Share, checked
from piebald.data.partition.split_settings import SplitSettings
from piebald.data.preparation.settings import PrepareSettings
from piebald.statistics.trees.boosted_trees import BoostedTrees, Scores
from piebald.statistics.trees.encoding import TreeData, TreeRows, tree_data
from piebald.statistics.trees.folder import each_round, fingerprint, open_folder
from piebald.statistics.trees.growth import xgboost
from piebald.statistics.trees.local_clients import LocalSums, LocalTreeClients, alone
from piebald.statistics.trees.rounds import Boosted, Boosting, Rounds, SummedBoosting
from piebald.statistics.trees.settings import Objective, TreeSettings
from piebald.statistics.trees.targets import SCORES


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
    split: SplitSettings | Mapping[str, Any] | str | None = None,
    prepare: PrepareSettings | Mapping[str, Any] | None = None,
    evaluate_split: Split = "test",
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
        objective: "binary", "multiclass" or "regression"; by default what the target is to `clients_from`:
            classes, or amounts.
        client: the column that names the client of each row.
        features: names of the inputs of `Clients`.
        validation, test: shares of each client's rows that are held out, of tables; 0 and 0.2 by default.
        split: how rows of a table are divided, in place of these, see `clients_from`.

        prepare: how columns of tables are read, see `PrepareSettings`; trees need no scale, and gaps stay gaps.

    Args: Training
        **settings: those of `TreeSettings`, like rounds=100, max_depth=4, learning_rate=0.1, patience=10.
        seed: of the division of rows and of subsampling.
        out: a folder for the model; a call that was interrupted goes on from its last round when it is repeated.
        done: called with the state after each round.

    Args: Evaluation
        evaluate_split: the rows that trees are scored on, at each client.
        compare: also score trees that each client grows alone, and those of all rows in one place.

    Returns:
        The trees, with their scores at each client.

    Raises:
        SettingError: an argument is wrong, rows do not fit together, or xgboost is missing.
        RunFolderError: `out` has something else, or cannot be written.

    Examples:
        >>> import pandas as pd
        >>> import piebald
        >>> doses = [float(dose) for dose in range(40)]
        >>> table = pd.DataFrame({"clinic": ["A", "B"] * 20, "dose": doses, "ill": [0] * 20 + [1] * 20})
        >>> model = piebald.trees(table, client="clinic", target="ill", rounds=2, max_depth=1, compare=False)
        >>> model.rounds, len(model.boosted.forest), model.metric
        (2, 4, 'auc')
    """
    chosen = TreeSettings(**settings)
    xgboost()
    data = tree_data(
        clients, client=client, target=target, columns=columns, features=features, objective=objective,
        validation=validation, test=test, seed=seed, missing=chosen.missing,
        split=None if split is None else SplitSettings.of(split), prepare=prepare,
    )  # fmt: skip
    description = {
        "settings": chosen.table(), "objective": data.target.objective, "columns": data.encoding.columns,
        "classes": list(data.classes), "seed": seed, "rows": fingerprint(data.clients),
    }  # fmt: skip
    with open_folder(None if out is None else Path(out), description) as folder:
        local = LocalTreeClients(data.clients, data.target, chosen, seed)
        boosting: Rounds
        if chosen.form == "histogram":
            sums = LocalSums(data.clients, data.target, chosen, seed)
            boosting = SummedBoosting(sums, data.target, chosen, seed, each_round(folder, done))
        else:
            boosting = Boosting(local, data.target, chosen, each_round(folder, done))
        columns_and_depth = len(data.encoding.columns), chosen.max_depth
        state = None if folder is None else folder.read(*columns_and_depth, data.target.groups)
        boosted = boosting.run(state or boosting.started())
        comparison = _compared(data, chosen, seed, evaluate_split) if compare else {}
        grown = BoostedTrees(
            boosted, data.encoding, data.target, data.name, data.classes, [rows.name for rows in data.clients],
            [len(rows.y["train"]) for rows in data.clients], local.scores(boosted, evaluate_split), **comparison,
            dropped=data.dropped,
        )  # fmt: skip
        if folder is not None:
            folder.finish(grown)
        return grown


def _compared(data: TreeData, settings: TreeSettings, seed: int, split: Split) -> dict[str, list[Scores]]:
    """Return scores at each client of the trees that it grows alone, and of those of all rows in one place."""

    def scores(boosted: Boosted | None, rows: TreeRows) -> Scores:
        if boosted is None:
            return dict.fromkeys(SCORES[data.target.objective], math.nan)
        return LocalTreeClients([rows], data.target, settings, 0).scores(boosted, split)[0]

    whole = data.clients[0].pooled(data.clients[1:])
    pooled = alone(whole, data.target, settings, seed)
    return {
        "alone": [scores(alone(rows, data.target, settings, seed), rows) for rows in data.clients],
        "pooled": [scores(pooled, rows) for rows in data.clients],
    }
