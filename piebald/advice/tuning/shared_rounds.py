"""Rounds that several recipes share: FedAvg and its fine-tuned kin train the same global model, and differ in scores.

    <folder of a search>/shared-rounds/<digest>/seed-<seed>/<rounds>/     a run after so many rounds, to copy

The search trains them once: the run of another recipe begins with a copy of what is kept after a number of rounds, and
only scores it.  Its models and scores are those of a run that was trained by itself, to the bit; only the score before
the first round is missing.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from piebald.methods.catalog import recipes
from piebald.methods.recipe import Recipe
from piebald.methods.training.fine_tune import FineTune
from piebald.methods.training.sgd import Sgd
from piebald.report.tables import History
from piebald.runs.prepare import recorded_recipe
from piebald.storage.run_folder import FITTED
from piebald.storage.store import RunStore

FOLDER = "shared-rounds"
_OF_RECIPE = ("recipe", "paper", "label")  # all else of a run's description is the same where rounds are shared
_OF_RUN = ("id", "created")
_OF_SCORES = shutil.ignore_patterns(FITTED, "run.lock")  # what was fitted to the models of the recipe that trained them


def is_like_fedavg(recipe: Recipe) -> bool:
    """Return whether a recipe is FedAvg, or FedAvg whose clients fine-tune what they have at the end."""
    plain = recipes.make("fedavg")
    others = [axis for axis in Recipe.axes if axis not in ("training", "transforms")]
    # the classes themselves: of a subclass nobody knows what its updates follow from
    same = all(type(getattr(recipe, axis)) is type(getattr(plain, axis)) for axis in others)
    return same and not recipe.transforms and type(recipe.training) in (Sgd, FineTune)


def digest(recipe: Recipe, meta: Mapping[str, Any]) -> str:
    """Return what runs of recipes like FedAvg have in common that share all their rounds.

    Args:
        recipe: one of them.
        meta: the description of a run of it.
    """
    components = recipe.model_dump(include=set(Recipe.axes))
    training = {name: value for name, value in components["training"].items() if name not in ("kind", "tune_epochs")}
    described = {name: value for name, value in meta.items() if name not in _OF_RECIPE}
    text = json.dumps([{**components, "training": training}, described], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def keep(folder: Path, copy: Path) -> None:
    """Keep a run as it is, complete or not at all."""
    partial = copy.with_name(f"{copy.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(folder, partial, ignore=_OF_SCORES)
    partial.rename(copy)


def begin_with(copy: Path, folder: Path, recipe: Recipe, label: str) -> None:
    """Make the run in a folder one that has trained as many rounds as a kept one, which has yet to be scored.

    Args:
        copy: the kept run.
        folder: of the run; its own earlier scores stay.
        recipe, label: of the run.
    """
    partial = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(copy, partial, ignore=_OF_SCORES)
    meta, scores = {**recorded_recipe(recipe), "label": label}, dict[str, list[dict[str, Any]]]()
    if folder.exists():
        with RunStore.open_read_only(folder) as earlier:
            meta |= {name: earlier.meta[name] for name in _OF_RUN}
            scores = earlier.all_scores()
    with RunStore.open(partial) as store:
        store.become(meta, scores)
    # a search that is killed between the two begins this run anew
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def reached(folder: Path) -> int:
    """The rounds of a run that has ended; 0 where there is none, or where it was interrupted."""
    if not folder.exists():
        return 0
    with History(folder) as history:
        return int(history.meta["rounds"]) if history.meta["status"] == "finished" else 0
