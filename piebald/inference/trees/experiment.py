"""Boosted trees of a table or of an experiment file, on this machine or at the sites of a federation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from piebald.contracts import Clients, Query, Rows, Split
from piebald.core.arguments import PathLike, Seed, Share, checked
from piebald.core.errors import SettingError, check_names
from piebald.data.clients.client_tables import is_table
from piebald.data.partition.split_settings import SplitSettings
from piebald.data.preparation.settings import PrepareSettings
from piebald.experiments.file import ExperimentSettings
from piebald.inference.experiment import QuestionExperiment, agreed_at_sites, open_sites
from piebald.inference.simulated import TableClients, simulated
from piebald.inference.trees.boosted_trees import BoostedTrees, Scores
from piebald.inference.trees.client_rows import SplitRows, alone, xgboost
from piebald.inference.trees.encoding import TreeData, tree_data
from piebald.inference.trees.folder import Done, fingerprint
from piebald.inference.trees.rounds import Boosted
from piebald.inference.trees.settings import SCORES, Objective, TreeSettings
from piebald.inference.trees.site_clients import grown_trees, stated_questions, trees_at_sites
from piebald.methods.recipe import Recipe
from piebald.methods.transforms.base import MaskingTransform
from piebald.privacy import SecureAggregation
from piebald.settings.toml_document import Document


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
    # a missing package is told before rows are read and split
    xgboost()
    data = tree_data(
        clients, client=client, target=target, columns=columns, features=features, objective=objective,
        validation=validation, test=test, seed=seed, missing=chosen.missing,
        split=None if split is None else SplitSettings.of(split), prepare=prepare,
    )  # fmt: skip
    held = TableClients(
        [rows.name for rows in data.clients], data.encoding.columns,
        [{split: Rows(torch.from_numpy(x), torch.from_numpy(rows.y[split])) for split, x in rows.x.items()}
         for rows in data.clients], {}, data.classes or None,
    )  # fmt: skip
    # rows are a digest, so that the folder has no copy of them
    about = {"rows": fingerprint(data.clients)}
    with simulated(held, [SecureAggregation(bits=64)] * chosen.secure) as (runtime, work):
        return grown_trees(
            runtime, work, held, chosen, data, about, seed=seed, split=evaluate_split, compare=compare,
            out=None if out is None else Path(out), done=done,
            pooled=lambda: _pooled(data, chosen, seed, evaluate_split),
        )  # fmt: skip


def _pooled(data: TreeData, settings: TreeSettings, seed: int, split: Split) -> list[Scores]:
    """Return scores at each client of the trees of all rows in one place."""
    model = alone(data.clients[0].pooled(data.clients[1:]), data.target, settings, seed)
    if model is None:
        return [dict.fromkeys(SCORES[data.target.objective], math.nan)] * len(data.clients)
    return [SplitRows(rows.x[split], rows.y[split], data.target, settings).scores(model) for rows in data.clients]


def trees_of_table(file: Path, flags: Sequence[str], **options: Any) -> BoostedTrees:
    """Grow boosted trees of a table.

    Args:
        file: the table.
        flags: settings like "trees.max_depth=4" and "seed=3".
        options: as of `trees`.

    Raises:
        SettingError: an argument is wrong.
    """
    document = Document("", str(file))
    for flag in flags:
        document.set(flag)
    values = document.values
    for name in values:
        if name not in ("trees", "seed", "split"):
            raise SettingError(
                f"--set of a table must be about trees, the split or the seed, like trees.max_depth=4, got {name!r}"
            )
    settings = values.get("trees", {})
    if not isinstance(settings, dict):
        raise SettingError(f"--set trees must be a table of settings, got {settings!r}")
    check_names("setting of trees", settings, TreeSettings.model_fields)
    # the flag names the split that is scored, and the file's table says how rows are divided
    options["evaluate_split"] = options.pop("split")
    return trees(str(file), seed=values.get("seed", 0), split=values.get("split"), **options, **settings)


def trees_of_experiment(
    file: Path,
    flags: Sequence[str],
    *,
    client: str | None = None,
    target: str | None = None,
    columns: Sequence[str] | None = None,
    objective: Objective | None = None,
    validation: float | None = None,
    test: float | None = None,
    split: Split = "test",
    compare: bool = True,
    out: Path | None = None,
    done: Done | None = None,
) -> BoostedTrees:
    """Grow boosted trees of the clients of an experiment file, on this machine; arguments are those of `trees`.

    Where the file's source is a table with a client column, it is read as it is, with gaps and text.

    Raises:
        SettingError: an argument is wrong, or the recipe of the file hides what trees would show.
    """
    settings = QuestionExperiment.load(file, flags)
    boosting = cast("TreeSettings", settings.section("trees"))
    check_unprotected(settings.built_recipes().values(), boosting)
    data, fields = settings.data, {name: value for name, value in boosting.table().items() if name != "kind"}
    client_column = client or data.client
    options: dict[str, Any] = {"validation": validation, "test": test, "evaluate_split": split, "compare": compare}
    options |= {"out": out, "done": done, "seed": settings.first_seed, **fields}
    if data.source is not None and client_column is not None and is_table(data.source):
        # flags of the command line win over the file
        if columns is None and data.features is not None:
            columns = [*data.features]
        if objective is None and data.regression:
            objective = "regression"
        return trees(
            data.source, client=client_column, target=target or data.target, columns=columns, objective=objective,
            split=settings.split, prepare=settings.wanted, **options,
        )  # fmt: skip
    if client is not None or target is not None:
        raise SettingError("--client and --target name columns of a table, and this experiment's rows are in none: "
                           "leave them out")  # fmt: skip
    options["prepare"] = settings.wanted
    return trees(settings.source_clients(), features=data.features, columns=columns, objective=objective, **options)


def trees_of_sites(
    file: Path,
    flags: Sequence[str],
    credentials: Path | None,
    *,
    split: Split = "test",
    compare: bool = True,
    out: Path | None = None,
    done: Done | None = None,
) -> BoostedTrees:
    """Grow boosted trees of the sites of a federation.

    Sites take part as they would in a run of the experiment, under its terms and their policies.

    Args:
        file: the experiment file, which needs no recipe.
        flags: settings on top of it.
        credentials: the server's; None starts a federation of processes on this machine.
        split, compare, out, done: as of `trees`.

    Raises:
        SettingError: a setting is wrong, no site answers, or the recipe of the file hides what trees would show.
    """
    boosting = cast("TreeSettings", QuestionExperiment.load(file, flags).section("trees"))
    masks = (SecureAggregation(bits=64),) if boosting.secure else ()

    def questions(settings: ExperimentSettings, clients: Clients) -> list[Query]:
        return stated_questions(clients, boosting, settings.first_seed)

    with open_sites(file, flags, credentials, "trees", masks, questions, agreed_at_sites) as sites:
        check_unprotected(sites.recipes, boosting)
        return trees_at_sites(
            sites.runtime, sites.work, sites.clients, boosting, seed=sites.settings.first_seed, split=split,
            features=sites.settings.data.features, compare=compare, out=out, done=done,
        )  # fmt: skip


def check_unprotected(recipes: Iterable[Recipe], settings: TreeSettings) -> None:
    """Refuse recipes that hide rows or updates: no noise covers trees, and only sums can be sent under masks.

    Raises:
        SettingError: a recipe has a component that protects.
    """
    for recipe in recipes:
        for component in (recipe.training, *recipe.transforms):
            if component.protects and not (settings.secure and isinstance(component, MaskingTransform)):
                raise SettingError(
                    f"trees cannot be hidden by {component.kind!r}: their thresholds are numbers of rows, so they are "
                    "for clients who may see each other's trees; take another file, or the recipe without it"
                )
