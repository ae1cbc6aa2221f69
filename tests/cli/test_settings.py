"""The objects that an experiment file builds, and writing settings as TOML."""

from __future__ import annotations

import pytest

from piebald.core.arguments import plain
from piebald.core.errors import SettingError
from piebald.experiments.file import ExperimentSettings
from piebald.settings.toml_document import Document


def changed(good, *lines):
    good.write_text("\n".join(lines) + "\n" + good.read_text())
    return ExperimentSettings.load(good)


def without_recipe(good, text):
    good.write_text(good.read_text().partition("[recipe]")[0] + text)
    return ExperimentSettings.load(good)


def test_a_file_builds_recipe_clients_model_and_runtime(good):
    plan = ExperimentSettings.load(good).plan()
    assert plan.recipes["fedavg"].training.lr == 0.1
    assert len(plan.clients) == 10
    assert plan.model(0).classifier.out_features == 10
    assert plan.runtime.kind == "simulator"


def test_the_model_depends_on_its_seed_alone(good):
    model = ExperimentSettings.load(good).plan().model
    assert model(1).classifier.weight.equal(model(1).classifier.weight)
    assert not model(1).classifier.weight.equal(model(2).classifier.weight)


def test_the_built_in_experiment_works():
    assert list(ExperimentSettings.load(None).plan().recipes) == ["hdafl"]


def test_written_settings_read_the_same(good):
    settings = changed(good, "fleet = { kind = 'fast_slow' }", "evaluate.every = 2", "runtime.kind = 'simulator'")
    assert ExperimentSettings.of(Document(settings.text(), "again")).table() == settings.table()
    assert ExperimentSettings.of_table(settings.table(), "again").table() == settings.table()


def test_an_axis_table_replaces_a_component(good):
    settings = without_recipe(good, '[recipe]\nname = "hdafl"\nscheduling = { kind = "asynchronous", cohort = 3 }\n')
    recipe = settings.plan().recipes["hdafl"]
    assert (recipe.scheduling.kind, recipe.scheduling.cohort) == ("asynchronous", 3)
    assert recipe.sharing.kind == "all_except"


def test_a_setting_with_the_name_of_an_axis_is_the_recipes_own(good):
    text = '[recipe]\nname = "hdafl"\naggregation = '
    assert (
        without_recipe(good, text + '"gradient_norm"').plan().recipes["hdafl"].aggregation.kind
        == "gradient_norm_weighted"
    )


def test_a_table_with_the_name_of_an_axis_is_the_axis(good):
    settings = without_recipe(good, '[recipe]\nname = "hdafl"\n[recipe.aggregation]\nkind = "example_weighted"\n')
    assert settings.plan().recipes["hdafl"].aggregation.kind == "example_weighted"


def test_a_grid_makes_every_combination(good):
    recipes = changed(good, 'grid = { "recipe.lr" = [0.1, 0.2], recipe.epochs = [1, 2] }').plan().recipes
    assert list(recipes) == [
        "fedavg lr=0.1 epochs=1",
        "fedavg lr=0.1 epochs=2",
        "fedavg lr=0.2 epochs=1",
        "fedavg lr=0.2 epochs=2",
    ]
    assert recipes["fedavg lr=0.2 epochs=1"].training.lr == 0.2


def test_several_recipes_go_by_their_labels(good):
    settings = without_recipe(
        good, '[[recipes]]\nname = "fedavg"\n[[recipes]]\nname = "fedavg"\nlabel = "b"\nlr = 1.0\n'
    )
    assert settings.compares
    assert {label: recipe.training.lr for label, recipe in settings.plan().recipes.items()} == {
        "fedavg": 0.05,
        "b": 1.0,
    }


def test_a_fleet_belongs_to_the_runtime(good):
    plan = changed(good, "fleet = { kind = 'homogeneous', seconds_per_step = 0.5 }").plan()
    assert plan.runtime.fleet.device(0).seconds_per_step == 0.5


def test_flags_go_on_top_of_the_file(good):
    settings = ExperimentSettings.load(good, ["rounds=7", "partition.alpha=9.0"], out="there", runtime="simulator")
    assert (settings.rounds, settings.partition.model_dump()["alpha"], settings.out) == (7, 9.0, "there")


def test_fields_of_a_runtime_without_a_kind_are_the_simulators():
    assert ExperimentSettings.load(None, ["runtime.engine=sequential"]).plan().runtime.engine == "sequential"


def test_a_flag_for_the_runtime_replaces_its_section(good):
    settings = ExperimentSettings.load(good, ["runtime.kind=ray", "runtime.address=auto"], runtime="simulator")
    assert settings.runtime.model_dump() == {"kind": "simulator"}


def test_an_error_of_a_run_gets_its_line(good):
    settings = ExperimentSettings.load(good)
    assert str(settings.located(SettingError("lr is odd"))) == f"{good}:17: recipe.lr is odd"
    assert str(settings.located(SettingError("the moon is full"))) == "the moon is full"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("Input should be greater than or equal to 1", "must be at least 1"),
        ("lr must be greater than 0, got -1", "lr must be above 0, got -1"),
        ("x must be less than 1, got 2", "x must be below 1, got 2"),
        ("epochs must be a integer, got 1.5", "epochs must be a whole number, got 1.5"),
        ("Input should be a valid integer, unable to parse string as an integer", "must be a whole number"),
        ("cohort.int must be a integer, got 'a'", "cohort must be a whole number, got 'a'"),
        ("Input should be a valid boolean", "must be true or false"),
    ],
)
def test_pydantics_wording_is_replaced(theirs, ours):
    assert plain(theirs) == ours
