"""Recipes: made from a name and fields, written as tables, rebuilt from them, refused where components conflict."""

from __future__ import annotations

import inspect
import json
import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piebald import recipes
from piebald.contracts.component import build
from piebald.core.errors import SettingError
from piebald.methods.aggregation import ExampleWeighted
from piebald.methods.clustering import SingleCluster
from piebald.methods.recipe import Recipe
from piebald.methods.scheduling import Asynchronous, Synchronous
from piebald.methods.server_optimizer import ServerSgd
from piebald.methods.sharing import Full
from piebald.methods.training import Exponential, Sgd
from piebald.methods.transforms import Gaussian
from piebald.settings.toml_document import dumps
from tests.fakes import ByParity, FakeMasking, FirstUpdate, few

positive = st.floats(1e-4, 10)
fraction = st.floats(0, 0.99)
counts = st.integers(1, 50)
patterns = st.one_of(st.sampled_from(["classifier", "0", "*.bias"]), st.tuples(st.just("classifier"), st.just("0")))
schedules = st.one_of(
    st.just({"kind": "constant"}),
    st.fixed_dictionaries({"kind": st.just("exponential"), "rate": st.floats(0.1, 1)}),
    st.fixed_dictionaries({"kind": st.just("step_decay"), "every": counts}),
    st.builds(Exponential, rate=st.floats(0.1, 1)),
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "cohort": st.one_of(counts, st.floats(0.01, 1.0)),
    "lr": positive,
    "lr_schedule": schedules,
    "step_schedule": st.sampled_from([{"kind": "constant"}, "cosine", {"kind": "linear", "warmup": 0.5}]),
    "optimizer": st.sampled_from(["sgd", "adamw", {"kind": "adam", "betas": [0.8, 0.99]}, {"kind": "rmsprop"}]),
    "optimizer_state": st.sampled_from(["fresh", "kept", "averaged"]),
    "parameter_groups": st.sampled_from([[], [{"layers": "*.bias", "weight_decay": 0.0}]]),
    "epochs": counts,
    "steps": st.one_of(st.none(), counts),
    "batch": counts,
    "momentum": fraction,
    "keep_momentum": st.booleans(),
    "weight_decay": fraction,
    "clip": st.one_of(st.none(), positive),
    "mu": positive,
    "lam": positive,
    "personal_epochs": counts,
    "tune_epochs": counts,
    "server_lr": positive,
    "beta": fraction,
    "beta1": fraction,
    "beta2": fraction,
    "tau": positive,
    "private": patterns,
    "shared": patterns,
    "shared_matrix": st.booleans(),
    "probes": st.integers(2, 500),
    "channels": st.floats(0.01, 1.0),
    "find": st.sampled_from(["silhouette", "gap"]),
    "normal": st.sampled_from(["largest", "vote", "server_rows"]),
    "noise": positive,
    "every": counts,
    "k": counts,
    "warm": st.integers(0, 3),
    "eps1": positive,
    "eps2": positive,
    "gamma_max": st.floats(0, 1),
    "aggregation": st.sampled_from(["examples", "gradient_norm"]),
    "alpha": st.floats(0.01, 1.0),
    "function": st.sampled_from(["constant", "polynomial", "hinge"]),
    "a": positive,
    "b": positive,
    "max_staleness": st.one_of(st.none(), counts),
    "buffer_size": counts,
    "score": st.sampled_from(["micro_f1", "accuracy", "macro_f1", "geometric_mean", "matthews"]),
    "evaluators": st.one_of(st.none(), counts),
    "q": st.floats(0.0, 5.0),
    "t": st.floats(-2.0, 5.0),
    "lambda_lr": st.floats(0.0, 1.0),
    "above_chance": st.booleans(),
    "power": positive,
    "cycles": counts,
    "vc_loss": fraction,
    "groups": st.lists(st.builds(lambda loss: {"clients": [3], "vc_loss": loss, "vc_tomb": 1}, fraction), max_size=1),
    "vc_tomb": counts,
    "limit_staleness": st.booleans(),
}
OWN = {("dp_sgd", "clip"): positive}  # without a clip there is no guarantee
LISTED = {row["name"]: row for row in recipes.listing()}


def accepted(name: str, fields: dict[str, Any]) -> bool:
    """Whether a recipe takes these fields together; SCAFFOLD refuses momentum, for instance, and so does Adam."""
    try:
        recipes.make(name, **fields)
    except SettingError:
        return False
    return True


def values(name: str, field: str) -> st.SearchStrategy[Any]:
    """Values of a field: those of the table, or for the field of a new method its default."""
    if (name, field) in OWN:
        return OWN[name, field]
    return FIELDS.get(field, st.just(LISTED[name]["fields"][field]["default"]))


@st.composite
def made(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A recipe's name and some of its fields with values that are allowed."""
    name = draw(st.sampled_from(recipes.names()))
    chosen = draw(st.sets(st.sampled_from(sorted(LISTED[name]["fields"]))))
    drawn = {field: draw(values(name, field)) for field in sorted(chosen)}
    fields: dict[str, Any] = {}
    for field, value in drawn.items():
        if accepted(name, fields | {field: value}):
            fields[field] = value
    return name, fields


def plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


@pytest.mark.full
@settings(few, max_examples=100)
@given(made())
def test_printed_and_rebuilt(drawn: tuple[str, dict[str, Any]]) -> None:
    name, fields = drawn
    recipe = recipes.make(name, **fields)
    table = plain(recipe.model_dump())
    again = recipes.rebuild(table)
    assert plain(again.model_dump()) == table
    for axis in Recipe.axes:
        assert getattr(again, axis) == getattr(recipe, axis)
    assert (again.name, again.paper) == (name, LISTED[name]["paper"])
    assert tomllib.loads(dumps({axis: table[axis] for axis in Recipe.axes})) == {a: table[a] for a in Recipe.axes}


@settings(few, max_examples=50)
@given(made())
def test_name_and_fields_are_enough(drawn: tuple[str, dict[str, Any]]) -> None:
    """Also after JSON, which has no tuples and no components."""
    name, fields = drawn
    recipe = recipes.make(name, **fields)
    again = recipes.make(name, **plain(dict(recipe.fields)))
    for axis in Recipe.axes:
        assert getattr(again, axis) == getattr(recipe, axis)
    parsed = tomllib.loads(recipes.toml(recipe))["recipe"]
    assert parsed.pop("name") == name
    from_toml = recipes.make(name, **parsed)
    for axis in Recipe.axes:
        assert getattr(from_toml, axis) == getattr(recipe, axis)


@settings(few, max_examples=50)
@given(made())
def test_fields_reach_their_component(drawn: tuple[str, dict[str, Any]]) -> None:
    name, fields = drawn
    recipe = recipes.make(name, **fields)
    for field in ("lr", "epochs", "steps", "batch", "mu", "lam", "tune_epochs", "personal_epochs", "keep_momentum"):
        if field in fields:
            assert getattr(recipe.training, field) == fields[field]
    for field, own in (("server_lr", "lr"), ("beta", "beta"), ("beta1", "beta1"), ("beta2", "beta2"), ("tau", "tau")):
        if field in fields:  # some trainers have a beta or tau of their own
            owners = (recipe.server_optimizer, recipe.training)
            assert fields[field] in [one.table()[own] for one in owners if own in one.table()]
    if "cohort" in fields:
        assert getattr(recipe.scheduling, "cohort", None) == fields["cohort"]


@pytest.mark.parametrize("name", recipes.names())
def test_every_listed_field_has_a_default_that_can_be_given(name: str) -> None:
    row = LISTED[name]
    assert row["paper"]
    assert row["summary"].endswith(".")
    defaults = {field: about["default"] for field, about in row["fields"].items()}
    assert plain(defaults) == defaults
    given_all, given_none = recipes.make(name, **defaults), recipes.make(name)
    for axis in Recipe.axes:
        assert getattr(given_all, axis) == getattr(given_none, axis)


@pytest.mark.parametrize("name", recipes.names())
def test_the_first_positional_argument_is_the_cohort(name: str) -> None:
    function = getattr(recipes, name)
    assert next(iter(inspect.signature(function).parameters)) == "cohort"
    recipe = function(7)
    assert getattr(recipe.scheduling, "cohort", None) == 7
    assert recipe.fields == {"cohort": 7}
    assert (recipe.name, recipe.paper) == (name, LISTED[name]["paper"])


def test_positional_arguments_in_order() -> None:
    recipe = recipes.fedadam(3, 0.5, 0.1, lr=0.2)
    assert (recipe.server_optimizer.lr, recipe.server_optimizer.beta1, recipe.training.lr) == (0.5, 0.1, 0.2)
    with pytest.raises(SettingError, match="fedavg takes cohort without a name, got 2"):
        recipes.fedavg(10, 0.1)
    with pytest.raises(TypeError, match="cohort"):
        recipes.fedavg(10, cohort=5)


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "a name": ("fedavrg", {}, "there is no recipe 'fedavrg': did you mean 'fedavg'?"),
    "a name unlike any": ("xxxxxxx", {}, "choose one of: adaptive_dvw, afl, apfl"),
    "a field": ("fedavg", {"leaning_rate": 1}, "no setting of recipe 'fedavg' called 'leaning_rate'"),
    "a near field": ("fedavg", {"epoch": 1}, "did you mean 'epochs'?"),
    "another's field": ("fedavg", {"mu": 1}, "no setting of recipe 'fedavg' called 'mu'"),
    "a weighting": ("hdafl", {"aggregation": "gradient-norm"}, "did you mean 'gradient_norm'?"),
    "a rate": ("fedavg", {"lr": 0}, "training 'sgd': lr must be above 0, got 0"),
    "a rate beyond bounds": ("fedavg", {"lr": float("inf")}, "lr must be a finite number, got inf"),
    "a word for a number": ("fedavg", {"lr": "fast"}, "training 'sgd': lr must be a number"),
    "a cohort": ("fedavg", {"cohort": 2.5}, "cohort must be a number of clients"),
    "a word for a cohort": ("fedavg", {"cohort": "all"}, "cohort must be"),
    "patterns": ("hdafl", {"private": 5}, "private must be text or a list"),
    "a schedule": (
        "fedavg", {"lr_schedule": {"kind": "cosin"}}, "there is no lr_schedule 'cosin': did you mean 'cosine'?",
    ),
    "a schedule's field": (
        "fedavg", {"lr_schedule": {"kind": "exponential", "rat": 0.5}}, "lr_schedule 'exponential' called 'rat'",
    ),
    "a schedule's missing field": ("fedavg", {"lr_schedule": {"kind": "exponential"}}, "needs a value for rate"),
    "a kind alone": ("fedavg", {"lr_schedule": "cosine"}, "lr_schedule 'cosine' needs a value for rounds"),
    "no table": ("fedavg", {"lr_schedule": 3}, "lr_schedule must be a table with a kind"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_names_and_values_in_one_sentence(case: str) -> None:
    name, fields, message = WRONG[case]
    with pytest.raises(SettingError) as caught:
        recipes.make(name, **fields)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def base(**changed: Any) -> Recipe:
    components: dict[str, Any] = {
        "training": Sgd(),
        "sharing": Full(),
        "scheduling": Synchronous(),
        "clustering": SingleCluster(),
        "aggregation": ExampleWeighted(),
        "server_optimizer": ServerSgd(),
    }
    return Recipe(**components | changed)


CONFLICTS: dict[str, tuple[dict[str, Any], str]] = {
    "secure aggregation and Krum": (
        {"transforms": (FakeMasking(),), "aggregation": FirstUpdate()},
        "fake_masking shows the server only sums but first_update needs individual updates: "
        "choose another aggregation, or drop",
    ),
    "secure aggregation and clusters": (
        {"transforms": [{"kind": "fake_masking"}], "clustering": {"kind": "by_parity"}},
        "but by_parity needs individual updates: choose another clustering, or drop fake_masking",
    ),
    "noise on the model and a control variate without noise": (
        {"training": {"kind": "scaffold"}, "transforms": [{"kind": "gaussian", "clip": 1.0, "noise": 0.0}]},
        "gaussian protects only the model but scaffold also sends 'control': choose another training, or drop gaussian",
    ),
}


@pytest.mark.parametrize("case", CONFLICTS)
def test_what_cannot_go_together_is_refused_when_it_is_made(case: str) -> None:
    components, message = CONFLICTS[case]
    with pytest.raises(SettingError) as caught:
        base(**components)
    assert message in str(caught.value)
    axis, component = next(iter(components.items()))
    for fits in (base(**{axis: component}), base(**dict(list(components.items())[1:]))):
        with pytest.raises(SettingError):
            fits.with_(**components)


@pytest.mark.parametrize(
    ("components", "individual"),
    [
        ({}, False),
        ({"aggregation": FirstUpdate()}, True),
        ({"clustering": ByParity()}, True),
        ({"scheduling": Asynchronous()}, True),
        ({"transforms": (Gaussian(clip=1.0, where="client"), FakeMasking())}, False),
    ],
    ids=str,
)
def test_who_needs_individual_updates(components: dict[str, Any], individual: bool) -> None:
    assert base(**components).requires_individual_updates == individual


@pytest.mark.parametrize(
    ("declared", "needed"),
    [
        ({}, True),
        ({"compares_changes": False}, False),
        ({"requires_individual_updates": False}, False),  # where updates come one by one for another reason
    ],
    ids=str,
)
@pytest.mark.parametrize("scheduling", [Synchronous(), Asynchronous()], ids=lambda one: one.kind)
def test_changes_are_laid_side_by_side_for_a_clustering_that_compares_them(
    declared: dict[str, bool], needed: bool, scheduling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in declared.items():
        monkeypatch.setattr(ByParity, name, value)
    assert base(clustering=ByParity(), scheduling=scheduling).needs_matrix == needed
    assert base(clustering=ByParity(), scheduling=scheduling, aggregation=FirstUpdate()).needs_matrix


def test_replacing_a_component() -> None:
    recipe = recipes.fedavg(lr=0.3)
    other = recipe.with_(scheduling={"kind": "asynchronous", "cohort": 4})
    assert (other.scheduling, other.training) == (Asynchronous(cohort=4), recipe.training)
    assert recipe.scheduling == Synchronous()
    with pytest.raises(SettingError, match="no axis 'schedulin': did you mean 'scheduling'"):
        recipe.with_(schedulin=Asynchronous())
    with pytest.raises(SettingError, match="training must be a component of training"):
        recipe.with_(training=Full())


def test_components_are_frozen_and_equal_by_value() -> None:
    assert Sgd(lr=0.1) == Sgd(lr=0.1) != Sgd(lr=0.2)
    assert build("training", Sgd(lr=0.1).table()) == Sgd(lr=0.1)
    for value, field in ((Sgd(), "lr"), (recipes.fedavg(), "training")):
        with pytest.raises(Exception, match="frozen"):
            setattr(value, field, None)


@pytest.mark.parametrize("table", [{}, {"kind": 3}, 3, None, ["sgd"]], ids=str)
def test_a_component_needs_a_table_with_a_kind(table: Any) -> None:
    with pytest.raises(SettingError, match="training must be a table with a kind"):
        build("training", table)


def test_a_recipe_needs_all_its_components() -> None:
    with pytest.raises(SettingError, match="recipe needs a value for training"):
        Recipe()
    with pytest.raises(SettingError, match="no setting of recipe called 'agregation': did you mean 'aggregation'"):
        base(agregation=ExampleWeighted())


def test_fedasync_has_the_settings_that_metis_compares_with() -> None:
    """Stripelis, Ambite 2020, section VI: polynomial staleness, mixing hyperparameter 0.5, regularization 0.005."""
    made = recipes.fedasync()
    table = made.model_dump()
    assert table["server_optimizer"] == {"kind": "mixing", "alpha": 0.5}
    assert (table["aggregation"]["function"], table["aggregation"]["a"]) == ("polynomial", 0.5)
    assert table["training"]["mu"] == 0.005
