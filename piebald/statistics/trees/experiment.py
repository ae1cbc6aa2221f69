"""Boosted trees of a table or of an experiment file, on this machine or at the sites of a federation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from piebald.contracts import Clients, Query, Split
from piebald.core.errors import SettingError, check_names
from piebald.data.clients.client_tables import is_table
from piebald.experiments.file import ExperimentSettings
from piebald.methods.recipe import Recipe
from piebald.methods.transforms.base import MaskingTransform
from piebald.privacy import SecureAggregation
from piebald.settings.toml_document import Document
from piebald.statistics.experiment import QuestionExperiment, open_sites
from piebald.statistics.preparation_at_sites import agreed_at_sites
from piebald.statistics.trees.boost import trees
from piebald.statistics.trees.boosted_trees import BoostedTrees
from piebald.statistics.trees.folder import Done
from piebald.statistics.trees.settings import Objective, TreeSettings
from piebald.statistics.trees.site_clients import stated_questions, trees_at_sites


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
