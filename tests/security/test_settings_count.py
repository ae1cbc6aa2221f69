"""No setting is ignored in silence: what a recipe records is what trains, whichever of its components are replaced.

Before, `recipe = { name = "fedavg", lr = 5.0, training = { kind = "proximal" } }` trained with 0.05 and recorded 5.0.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from piebald import recipes
from piebald.contracts.component import Component
from piebald.core.errors import SettingError
from piebald.experiments.file import ExperimentSettings
from piebald.methods.recipe import Recipe
from piebald.methods.recipe_settings import CHOICES, holds
from piebald.methods.training import Proximal, Sgd

NAMES = recipes.names()
AXES = [axis for axis in Recipe.axes if axis != "transforms"]
OTHER_THAN_DEFAULT: dict[str, Any] = {
    "adapt_batch": 7,
    "adaptive_layers": ("a", "b"),
    "aggregation": "gradient_norm",
    "augmentation": ["horizontal_flip"],
    "average": "changes",
    "batches": "exact",
    "checkpointing": ["a"],
    "classes": 7,
    "digest_batch": 7,
    "digest_lr": 0.02,
    "distance": "l2",
    "features": 7,
    "find": "gap",
    "function": "hinge",
    "groups": [{"clients": [1], "vc_loss": 1.0, "vc_tomb": 1}],
    "head": "a",
    "inference": "prototypes",
    "ranks": (3, 1),
    "rows": 7,
    "hessian": "differences",
    "lr_schedule": {"kind": "step_decay", "every": 3},
    "normal": "vote",
    "outputs": (3,),
    "optimizer": "adamw",
    "option": "I",
    "optimizer_state": "averaged",
    "parameter_groups": [{"layers": "*.bias", "weight_decay": 0.0}],
    "step_schedule": "cosine",
    "precision": "bfloat16",
    "private": ("a", "b"),
    "score": "accuracy",
    "shared": ("a", "b"),
    "tune": "shared",
    "max_staleness": 7,
    "weights": "equal",
    "widths": (1.0, 0.25),
    "evaluators": 7,
    "clip": 7.0,
    "clients": {"north": {"lr": 0.5}},
    "steps": 7,
    "step_limit": 1,
}


def another(setting: str, default: Any) -> Any:
    """A value of a setting that nothing has by default."""
    if setting in OTHER_THAN_DEFAULT:
        return OTHER_THAN_DEFAULT[setting]
    if isinstance(default, bool):
        return not default
    return default + 3 if isinstance(default, int) else default * 0.37 + 0.01


def made_with_one(name: str) -> Iterator[tuple[str, Recipe]]:
    """The recipe with each of its settings changed in turn."""
    fields = next(entry["fields"] for entry in recipes.listing() if entry["name"] == name)
    for setting, about in fields.items():
        try:
            yield setting, recipes.make(name, **{setting: another(setting, about["default"])})
        except SettingError:
            continue  # it needs another setting beside it


def is_true(recipe: Recipe) -> bool:
    """Whether every recorded setting is held by a component."""
    settings = {name: value for name, value in recipe.fields.items() if name not in CHOICES}
    return all(any(holds(one, name, value) for one in recipe.components) for name, value in settings.items())


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_what_is_recorded_is_what_trains_whatever_is_replaced(name: str) -> None:
    tried = refused = 0
    for setting, recipe in made_with_one(name):
        assert is_true(recipe), setting
        for axis in AXES:
            for kind, component in Component.registry[axis].items():
                if not component.__module__.startswith("piebald."):
                    continue
                tried += 1
                try:
                    replaced = recipe.with_(**{axis: kind})
                except SettingError:
                    refused += 1
                else:
                    held = holds(getattr(recipe, axis), setting, recipe.fields[setting])
                    assert is_true(replaced), (setting, axis, kind)
                    assert not held or holds(getattr(replaced, axis), setting, replaced.fields[setting]), (
                        setting,
                        axis,
                        kind,
                    )
    assert tried > refused > 0


def test_a_setting_is_handed_down_to_the_component_that_replaces_its_own() -> None:
    for given in ("proximal", {"kind": "proximal", "mu": 0.1}, Proximal(mu=0.1)):
        made = recipes.fedavg(lr=5.0, batch=3).with_(training=given)
        assert (made.training.lr, made.training.batch, made.fields["lr"]) == (5.0, 3, 5.0)


def test_a_value_of_its_own_counts_and_is_recorded() -> None:
    made = recipes.fedavg(lr=5.0).with_(training=Sgd(lr=0.2))
    assert (made.training.lr, made.fields) == (0.2, {"lr": 0.2})
    document = tomllib.loads(recipes.toml(made))["recipe"]
    assert document["lr"] == 0.2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: recipes.fedprox(mu=1.0).with_(training="sgd"), ("mu = 1.0", "fedprox", "'sgd'")),
        (lambda: recipes.hdafl(private="classifier").with_(sharing="full"), ("private", "hdafl", "'full'")),
        (lambda: recipes.hdafl(aggregation="gradient_norm").with_(aggregation="median"), ("aggregation", "'median'")),
        (lambda: recipes.fedadam(server_lr=0.5).with_(server_optimizer="mixing"), ("server_lr", "'mixing'")),
        (lambda: recipes.cgau(private="0", shared_matrix=True), ("private", "cgau")),
    ],
)
def test_a_setting_without_a_place_is_refused(make: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(SettingError, match="would have no effect") as caught:
        make()
    assert all(word in str(caught.value) for word in words)


FILE = """
[data]
name = "digits"
[partition]
kind = "iid"
clients = 3
[model]
name = "mlp"
[recipe]
name = "fedavg"
"""


def planned(tmp_path: Path, more: str, start: str = "") -> dict[str, Recipe]:
    file = tmp_path / "experiment.toml"
    file.write_text(start + FILE + more)
    return dict(ExperimentSettings.load(file).plan().recipes)


def test_a_file_hands_down_too(tmp_path: Path) -> None:
    made = planned(tmp_path, 'lr = 5.0\ntraining = { kind = "proximal" }\n')["fedavg"]
    assert (made.training.kind, made.training.lr, made.fields["lr"]) == ("proximal", 5.0, 5.0)


def test_a_file_that_says_two_things_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"lr is 5\.0 in recipe 'fedavg' and lr is 0\.1 in its training"):
        planned(tmp_path, 'lr = 5.0\ntraining = { kind = "proximal", lr = 0.1 }\n')


def test_a_grid_is_handed_down_too(tmp_path: Path) -> None:
    made = planned(tmp_path, 'training = { kind = "proximal" }\n', start='grid."recipe.lr" = [1.0, 2.0]\n')
    assert [one.training.lr for one in made.values()] == [1.0, 2.0]
    with pytest.raises(SettingError, match="give it once"):
        planned(tmp_path, 'training = { kind = "proximal", lr = 1.0 }\n', start='grid."recipe.lr" = [1.0, 2.0]\n')


def test_one_seed_in_a_list_is_the_seed_and_two_words_about_seeds_are_refused(tmp_path: Path) -> None:
    """Before, `piebald run` ignored `seeds = [7]` and trained with seed 0."""
    file = tmp_path / "experiment.toml"
    file.write_text("seeds = [7]\n" + FILE)
    assert ExperimentSettings.load(file).first_seed == 7
    settings = ExperimentSettings.load(file)
    assert ExperimentSettings.of_table(settings.table(), "a run folder").first_seed == 7
    file.write_text("seed = 3\nseeds = [7]\n" + FILE)
    with pytest.raises(SettingError, match="seed and seeds"):
        ExperimentSettings.load(file)
