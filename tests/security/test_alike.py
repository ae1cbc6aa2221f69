"""Members of a masked sum are alike: terms that say something of single clients are refused, whoever they favour.

Each attack is a run whose terms are the same for all sites, by a server that follows the protocol.  Before, the opened
sum was the update of the one client that the terms left a contribution, with a cosine of 1.0.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas
import pytest
import torch
from pydantic import BaseModel

import piebald
from piebald import recipes
from piebald.contracts import ClientSecrets, Task, Update
from piebald.contracts.component import Component
from piebald.core.errors import SettingError
from piebald.experiments.recipes import ExperimentFields
from piebald.federation.credentials import provisioning
from piebald.federation.credentials.provisioning import Credentials
from piebald.federation.hub.run_terms import RunTerms, terms
from piebald.federation.site.site_process import SiteSettings, SiteWork
from piebald.inference.queries.trees import MaskedTreeSumsQuery
from piebald.methods.recipe import Recipe
from piebald.methods.training.client_settings import ClientSettings
from piebald.methods.transforms import Transform
from piebald.privacy import SecureAggregation
from piebald.privacy.secure_aggregation.masks import CLIENT_FIELDS
from tests.fakes import classified, seeded, simulate
from tests.federation.conftest import SITES, provisioned, settings

from .server_entry import prepared

MASKED = {"name": "fedavg", "transforms": [{"kind": "secure_aggregation", "least": 3, "threshold": 1.0}]}
STRICT = {"secure_aggregation": {"least": 3, "threshold": 1.0}, "queries": [], "accept": ["fedavg"]}
OTHERS = ["site-1", "site-3"]
TINY = 1e-30

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return provisioning.read(provisioned(tmp_path_factory.mktemp("alike")) / "site-2")


@pytest.fixture(scope="module")
def masked_terms() -> dict[str, Any]:
    plan, _ = prepared(json.dumps(MASKED))
    experiment = settings(MASKED, model={"name": "mlp", "hidden": [4]}).table()
    return json.loads(terms(plan.work, experiment, SITES, SITES, plan.clients.classes))  # type: ignore[no-any-return]


def of_others(table: dict[str, Any]) -> Change:
    return lambda terms: terms["training"].__setitem__("clients", dict.fromkeys(OTHERS, table))


def before_the_masks(table: dict[str, Any]) -> Change:
    return lambda terms: terms["transforms"].insert(0, table)


def in_masks(**fields: Any) -> Change:
    return lambda terms: terms["transforms"][-1].update(fields)


def in_experiment(section: str, value: Any) -> Change:
    return lambda terms: terms["experiment"].__setitem__(section, value)


def other_model(name: str) -> Change:
    """Another model for all sites but one: narrower, or with frozen layers."""

    def change(terms: dict[str, Any]) -> None:
        own = {field: terms[field] for field in ("private", "begins", "layout", "frozen", "weights", "lacks")}
        terms["own_models"] = [{**own, "frozen": name}]
        terms["numbers"] = [0, None, 0]

    return change


SHARES = {"site-1": 1e-9, "site-2": 1.0, "site-3": 1e-9}
ATTACKS: dict[str, Change] = {
    "learning rate": of_others({"lr": TINY}),
    "learning rate of the victim": lambda terms: terms["training"].update(lr=TINY, clients={"site-2": {"lr": 0.1}}),
    "learning rate by pattern": lambda terms: terms["training"].update(lr=TINY, clients={"*-2": {"lr": 0.1}}),
    "one step": of_others({"steps": 1}),
    "epochs": lambda terms: terms["training"].update(clients={"site-2": {"epochs": 900}}),
    "batch": of_others({"batch": 10**6}),
    "cleaning of others": in_experiment(
        "prepare", {"by_site": {site: {"unit": {"x": {"factor": 1e-9}}} for site in ("site-1", "site-3")}}
    ),
    "sign flip": before_the_masks({"kind": "sign_flip", "scale": 1e-9, "clients": [0, 2]}),
    "sign flip of a victim": before_the_masks({"kind": "sign_flip", "scale": 1e9, "clients": [1]}),
    "model replacement": before_the_masks({"kind": "model_replacement", "scale": 1e-9, "clients": [0, 2]}),
    "random updates": before_the_masks({"kind": "random_update", "clients": [0, 2]}),
    "shares": in_masks(aggregation={"kind": "fixed_shares", "shares": SHARES, "by_number": [*SHARES.values()]}),
    "shares by number": in_masks(aggregation={"kind": "fixed_shares", "shares": {"*": 1.0}, "by_number": [0, 1.0, 0]}),
    "held out": in_experiment("split", {"hold_out": OTHERS}),
    "tested only": in_experiment("split", {"test_only": OTHERS}),
    "one held out after the other": in_experiment("split", {"hold_out": "each"}),
    "a model of their own": in_experiment("model", {"name": "mlp", "clients": {"site-1": {"name": "mlp"}}}),
    "frozen layers of their own": other_model("0" * 64),
    "inputs that they lack": in_experiment(
        "partition", {"kind": "sites", "clients": SITES, "lacks": {"site-1": ["x"]}}
    ),
    "flipped labels": in_experiment("partition", {"kind": "iid", "changes": [{"kind": "flip_to", "clients": [0, 2]}]}),
    "numbers of their own": in_experiment(
        "prepare", {"agreed": {"columns": [], "harmonised": {"site-1": {"age": [0.0, 0.0]}}}}
    ),
    "settings of the experiment": in_experiment("clients", {"site-1": {"lr": TINY}}),
    "thresholds of their own": lambda terms: terms.update(
        training={"kind": "adaptive_frequency", "groups": [{"clients": [0, 2], "vc_loss": 99.0, "vc_tomb": 0}]}
    ),
    "widths": lambda terms: terms.update(training={"kind": "nested_widths", "widths": [0.01, 1.0, 0.01]}),
    "ranks": lambda terms: terms.update(training={"kind": "adapter_ranks", "ranks": [1, 64, 1]}),
}  # fmt: skip


@pytest.mark.parametrize("case", ATTACKS)
def test_a_site_refuses_terms_in_which_members_are_not_alike(
    case: str, site: Credentials, masked_terms: dict[str, Any], tmp_path: Path
) -> None:
    values = copy.deepcopy(masked_terms)
    ATTACKS[case](values)
    work = SiteWork(site, SiteSettings.model_validate({"policy": STRICT}), tmp_path)
    with pytest.raises(SettingError, match=r"contributions that are alike, and .*, or drop secure_aggregation"):
        work(values)


@pytest.mark.parametrize("name", ClientSettings.model_fields)
def test_every_setting_that_a_client_may_have_of_its_own_is_refused(
    name: str, site: Credentials, masked_terms: dict[str, Any], tmp_path: Path
) -> None:
    values = copy.deepcopy(masked_terms)
    of_others({name: 1})(values)
    work = SiteWork(site, SiteSettings.model_validate({"policy": STRICT}), tmp_path)
    with pytest.raises(SettingError, match="says something of single clients"):
        work(values)


@pytest.mark.parametrize(
    ("before", "scheduling", "reason"),
    [([{"kind": "top_k", "share": 0.5}], "synchronous", "sends other numbers"), ([], "asynchronous", "synchronous")],
    ids=["what a compressor has not sent yet", "a version of its own"],
)
def test_what_a_member_remembers_of_earlier_rounds_is_no_part_of_a_sum(
    before: list[Any], scheduling: str, reason: str
) -> None:
    """Else terms that name nobody could leave one member a contribution by when it was asked before."""
    with pytest.raises(SettingError, match=reason):
        recipes.fedavg().with_(scheduling=scheduling, transforms=[*before, "secure_aggregation"])


def test_a_site_takes_part_where_all_are_alike(site: Credentials, masked_terms: dict[str, Any], tmp_path: Path) -> None:
    work = SiteWork(site, SiteSettings.model_validate({"policy": STRICT}), tmp_path)(masked_terms)
    assert SiteSettings.model_validate({"policy": STRICT}).policy.reject_reason(work.work) is None


def test_weights_that_follow_from_training_are_refused_at_the_site(
    site: Credentials, masked_terms: dict[str, Any], tmp_path: Path
) -> None:
    values = copy.deepcopy(masked_terms)
    values["transforms"][-1]["aggregation"] = {"kind": "gradient_norm_weighted"}
    site_settings = SiteSettings.model_validate({"policy": STRICT})
    reason = site_settings.policy.reject_reason(SiteWork(site, site_settings, tmp_path)(values).work)
    assert "weighs by more than rows" in str(reason)


# ----------------------------------------------------------------------------------------- recipes and simulated runs


def masked(**components: Any) -> Recipe:
    more = components.pop("transforms", [])
    return recipes.fedavg(lr=0.1).with_(**components, transforms=[*more, "secure_aggregation"])


OF_CLIENTS = {
    (axis, kind)
    for axis in Recipe.axes
    for kind, component in Component.registry[axis].items()
    if {"widths", "ranks", *CLIENT_FIELDS} & component.model_fields.keys()
}


@pytest.mark.parametrize(("axis", "kind"), sorted(OF_CLIENTS))
def test_no_component_with_settings_of_single_clients_stands_beside_masks(axis: str, kind: str) -> None:
    component = Component.registry[axis][kind]
    of_clients: dict[str, Any] = {"clients": (0,), "shares": {"*": 1.0}, "ranks": (4, 2), "widths": (1.0, 0.5)}
    if axis == "training":
        of_clients["clients"] = {"a": {"lr": TINY}}
    table = {"kind": kind, **{name: value for name, value in of_clients.items() if name in component.model_fields}}
    needed = {"proximal": {"mu": 0.1}, "dp_sgd": {"clip": 1.0, "noise": 1.0}, "with_moments": {"layers": ["*"]}}
    table |= needed.get(kind, {})  # what has no default
    with pytest.raises(
        SettingError, match=r"drop (it|secure_aggregation)|give all clients the whole|all clients, which"
    ):
        masked(**{axis: [table] if axis == "transforms" else table})


def test_a_simulated_run_in_which_clients_have_models_or_inputs_of_their_own_is_refused() -> None:
    def network() -> torch.nn.Module:
        return seeded(lambda: torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)))

    clients = classified(20, 20, 20)
    models = {clients.names[0]: network(), "*": network()}
    private = recipes.fedavg().with_(
        sharing={"kind": "all_except", "private_layers": ["0.*"]}, transforms=["secure_aggregation"]
    )
    with pytest.raises(SettingError, match="have models, inputs or settings of their own"):
        simulate(private, clients, models, rounds=1)


# --------------------------------------------------------------------------------------------- nothing can be forgotten

# Settings with several values that are the same for all clients.
SAME_FOR_ALL = frozenset(
    [
        "about",
        "absent",
        "knots",
        "range",
        "steps",
        "adaptive_layers",
        "aggregation",
        "augmentation",
        "betas",
        "bounds",
        "budget",
        "categories",
        "checkpointing",
        "choice",
        "class_weights",
        "classes",
        "classes_each",
        "codes",
        "columns",
        "deviation",
        "edges",
        "ends",
        "experiment",
        "families",
        "features",
        "forms",
        "gaps",
        "grid",
        "group",
        "held",
        "inputs",
        "k",
        "keep",
        "keys",
        "lam",
        "layers",
        "layout",
        "left_out",
        "levels",
        "loss",
        "map",
        "mean",
        "metrics",
        "of_all",
        "others",
        "outputs",
        "own_query",
        "packing",
        "pairs",
        "parameter_groups",
        "parse",
        "passes",
        "plugins",
        "private",
        "private_layers",
        "quantiles",
        "question",
        "questions",
        "recipes",
        "scale",
        "seeds",
        "shape",
        "shared_layers",
        "sites",
        "source",
        "space",
        "splits",
        "start",
        "stop",
        "tables",
        "target",
        "target_bounds",
        "tasks",
        "tokens",
        "trackers",
        "training",
        "transforms",
        "trees",
        "unit",
        "unseen",
        "values",
        "vectors",
    ]
)
# Those of single clients that are refused by what they do, which the tests above show: models of their own, clusters of
# clients, and tables with `clients` in them.
BY_EFFECT = frozenset({"client_settings", "groups", "numbers", "own_models", "ranks", "regions", "widths"})


def fields_of(model: type[BaseModel], seen: set[type[BaseModel]]) -> Iterator[str]:
    """Names of settings with several values, here and in tables inside."""
    if model in seen:
        return
    seen.add(model)
    for name, field in model.model_fields.items():
        if any(word in str(field.annotation).lower() for word in ("tuple", "list", "dict", "mapping", "sequence")):
            yield name
        for inner in models_in(field.annotation):
            yield from fields_of(inner, seen)


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from models_in(inner)


def test_every_setting_is_known_to_be_of_single_clients_or_the_same_for_all() -> None:
    """A new one must be named here, or in `CLIENT_FIELDS`, by which it is refused beside masks."""
    axes = [*Recipe.axes, "augmentation", "lr_schedule", "optimizer", "step_schedule", "query", "change", "partition"]
    registered = [component for axis in axes for component in Component.registry[axis].values()]
    own = [component for component in registered if component.__module__.startswith("piebald.")]
    seen: set[type[BaseModel]] = set()
    names = {name for model in [*own, ExperimentFields, RunTerms] for name in fields_of(model, seen)}
    assert names == SAME_FOR_ALL | BY_EFFECT | CLIENT_FIELDS
    assert not SAME_FOR_ALL & CLIENT_FIELDS


# ------------------------------------------------------------------------------------ what code sees, and what is drawn


class ForOne(Transform):
    """A site's plugin that leaves nothing of the updates of all clients but the first."""

    axis = "transforms"

    def on_client(self, vectors: Any, keys: Any, clients: Any) -> Any:
        first = torch.tensor([client == 0 for client in clients])
        return {**vectors, "model": vectors["model"] * first.unsqueeze(1)}


def test_code_at_clients_is_told_no_number_of_a_client_under_masks() -> None:
    def step(*transforms: Any) -> torch.Tensor:
        recipe = recipes.fedavg(lr=0.5).with_(aggregation="equal_weighted", transforms=list(transforms))
        model = seeded(lambda: torch.nn.Linear(4, 2))
        run = simulate(recipe, classified(20, 20, 20), model, rounds=1)
        return run.cluster_models[0]

    torch.testing.assert_close(step(ForOne(), "secure_aggregation"), step(), atol=1e-5, rtol=0)
    assert not torch.allclose(step(ForOne()), step(), atol=1e-3)


@pytest.mark.parametrize("hides", [True, False])
def test_a_question_under_masks_is_told_no_client(hides: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site's own kind of question could answer at one member alone, and zero at all others."""
    numbers, names = set[int](), set[str]()
    answer, rows_of = MaskedTreeSumsQuery.answer, MaskedTreeSumsQuery._split_rows

    def answered(self: MaskedTreeSumsQuery, inputs: Any, *arguments: Any) -> Any:
        numbers.update(inputs.clients)
        return answer(self, inputs, *arguments)

    def split_rows(self: MaskedTreeSumsQuery, rows: Any, name: str) -> Any:
        names.add(name)
        return rows_of(self, rows, name)

    monkeypatch.setattr(MaskedTreeSumsQuery, "answer", answered)
    monkeypatch.setattr(MaskedTreeSumsQuery, "_split_rows", split_rows)
    table = pandas.DataFrame({"x": np.arange(60.0), "y": np.arange(60) % 2, "who": np.array(list("abc") * 20)})
    piebald.trees(table, client="who", target="y", form="histogram", rounds=1, secure=hides, compare=False)
    assert (len(numbers), len(names)) == ((1, 1) if hides else (3, 3))


@pytest.mark.parametrize("engine", ["sequential", "vmapped"])
@pytest.mark.parametrize("chance", ["dropout", "augmentation"])
def test_what_is_drawn_in_steps_is_the_same_for_all_members(
    engine: str, chance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A seed with which dropout leaves nothing of all members but one could be looked for."""
    sent: list[torch.Tensor] = []
    real = SecureAggregation.mask

    def mask(self: SecureAggregation, update: Update, task: Task, secrets: ClientSecrets) -> Update:
        sent.append(update.vectors["model"])
        return real(self, update, task, secrets)

    monkeypatch.setattr(SecureAggregation, "mask", mask)
    rows = (torch.ones(1, 64).numpy(), [1])
    clients = piebald.clients_from({name: rows for name in "abcd"}, test=0.0, classes=["no", "yes"])
    noise = [{"kind": "gaussian_noise", "deviation": 1.0}] if chance == "augmentation" else []
    recipe = recipes.fedavg(lr=0.5, augmentation=noise).with_(transforms=["secure_aggregation"])
    layers = [torch.nn.Dropout(0.5)] if chance == "dropout" else []
    model = seeded(lambda: torch.nn.Sequential(*layers, torch.nn.Linear(64, 2)))
    simulate(recipe, clients, model, rounds=1, simulator={"engine": engine}, evaluate_every=0)
    assert len(sent) == 4
    assert len({row.numpy().tobytes() for row in sent}) == 1
    inputs = sent[0][:64]  # of the first output's weights, all of which are moved alike where nothing is drawn
    assert len({round(float(value), 4) for value in inputs}) > 1
