"""Boosted trees of a table or of an experiment file, here or at the sites of a federation."""

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
from piebald.statistics.boosting.settings import Objective, TreeSettings
from piebald.statistics.question_run import AskedExperiment, asked
from piebald.statistics.trees.boost import Done, trees
from piebald.statistics.trees.boosted_trees import BoostedTrees
from piebald.statistics.trees.trees_at_sites import stated_questions, trees_at_sites


def trees_of_table(file: Path, flags: Sequence[str], **options: Any) -> BoostedTrees:
    """Boosted trees of a table.

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
    given = document.values
    for name in given:
        if name not in ("trees", "seed"):
            raise SettingError(f"--set of a table is of trees or the seed, like trees.max_depth=4, got {name!r}")
    settings = given.get("trees", {})
    if not isinstance(settings, dict):
        raise SettingError(f"--set trees must be a table of settings, got {settings!r}")
    check_names("setting of trees", settings, TreeSettings.model_fields)
    return trees(str(file), seed=given.get("seed", 0), **options, **settings)


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
    """Boosted trees of the clients of an experiment file, on this machine; arguments are those of `trees`.

    Where the file's source is a table with a client column, it is read as it is, with gaps and text.

    Raises:
        SettingError: an argument is wrong, or the recipe of the file hides what trees would tell.
    """
    settings = AskedExperiment.load(file, flags)
    own = cast("TreeSettings", settings.section("trees"))
    check_unprotected(settings.built_recipes().values(), own)
    data, fields = settings.data, {name: value for name, value in own.table().items() if name != "kind"}
    whose = client or data.client
    more: dict[str, Any] = {"columns": columns, "objective": objective, "validation": validation, "test": test}
    more |= {"split": split, "compare": compare, "out": out, "done": done, "seed": settings.first_seed, **fields}
    if data.source is not None and whose is not None and is_table(data.source):
        goal = target or data.target
        wanted = [*data.features] if columns is None and data.features is not None else columns
        kind = "regression" if data.regression and objective is None else objective
        return trees(data.source, client=whose, target=goal, **{**more, "columns": wanted, "objective": kind})
    if client is not None or target is not None:
        raise SettingError("--client and --target name columns of a table, and this experiment's rows are in none: "
                           "leave them out")  # fmt: skip
    return trees(settings.source_clients(), features=data.features, **more)


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
    """Boosted trees of the sites of a federation.

    Sites take part as they would in a run of the experiment, under its terms and their policies.

    Args:
        file: the experiment file, which needs no recipe.
        flags: settings on top of it.
        credentials: the server's; None starts a federation of processes on this machine.
        split, compare, out, done: as of `trees`.

    Raises:
        SettingError: a setting is wrong, no site answers, or the recipe of the file hides what trees would tell.
    """
    own = cast("TreeSettings", AskedExperiment.load(file, flags).section("trees"))
    masks = (SecureAggregation(bits=64),) if own.secure else ()

    def questions(settings: ExperimentSettings, clients: Clients) -> list[Query]:
        return stated_questions(clients, own, settings.first_seed)

    with asked(file, flags, credentials, "trees", masks, questions) as opened:
        check_unprotected(opened.recipes, own)
        return trees_at_sites(
            opened.runtime, opened.spec, opened.clients, own,
            seed=opened.settings.first_seed, split=split, features=opened.settings.data.features, compare=compare,
            out=out, done=done,
        )  # fmt: skip


def check_unprotected(recipes: Iterable[Recipe], settings: TreeSettings) -> None:
    """Refuse recipes that hide rows or updates: no noise covers trees, and only sums can be told under masks.

    Raises:
        SettingError: a recipe has a component that protects.
    """
    for recipe in recipes:
        hiding = next((one.kind for one in (recipe.training, *recipe.transforms) if one.protects
                       and not (settings.secure and isinstance(one, MaskingTransform))), None)  # fmt: skip
        if hiding is not None:
            raise SettingError(
                f"trees cannot be hidden by {hiding!r}: their thresholds are numbers of rows, so they are for clients "
                "who may see each other's trees; take another file, or the recipe without it"
            )
