"""Plugins: what may be imported by whom, and that what fails is one sentence."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import piebald
from piebald import data, models, partition, recipes
from piebald.contracts.component import Component
from piebald.core import references
from piebald.core.errors import SettingError
from piebald.core.references import USERS, Outside
from piebald.data.clients.sites import Sites
from piebald.experiments.file import ExperimentSettings
from piebald.methods.catalog import registry as named
from piebald.report.callbacks import trackers_of
from piebald.settings import plugins

LAB = '''
"""A user's module."""
import numpy as np
import torch
from torch import nn
from piebald import data, partition, recipes
from piebald.report.callbacks import Callback, Tracker
from piebald.data.partition.data_change import DataChange
from piebald.data.partition.partition import Sizes
from piebald.methods.training.augmentation import Augmentation
from piebald.methods.training.optimizers import Optimizer
from piebald.methods.aggregation.linear import Linear
from piebald.methods.catalog.registry import recipe
from piebald.methods.training import Sgd

class Lessened(Linear):
    def weight(self, update, staleness=0):
        return update.examples / 2

@recipe("nobody 2026", Sgd)
def {name}_lessened(cohort=1.0, **training):
    """FedAvg at half the weight."""
    return recipes.fedavg(cohort, **training).with_(aggregation=Lessened())

def plain(lr=0.1):
    return recipes.fedavg(lr=lr)

ready = recipes.fedavg(lr=0.3)

def wrong():
    return 3

class Net(nn.Linear):
    def __init__(self, input_shape, outputs, scale=1.0):
        super().__init__(input_shape[-1], outputs)
        self.scale = scale

def flat(input_shape, outputs, seed):
    assert isinstance(seed, int)
    return nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(input_shape).numel(), outputs))

def huber(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none").clamp(max=2)

def right(outputs, targets):
    return (outputs.argmax(1) == targets).float()

def rows():
    return data.digits()

class Parity(partition.Partition):
    def deal(self, data, rows):
        return rows % 2, ["even", "odd"]

class Halves(Sizes):
    def counts(self, clients, rows, rng):
        return np.full(clients, rows // 2 // clients, dtype=np.int64)

class Darker(DataChange):
    def inputs(self, x, client):
        return x / 2

class Slow(partition.Homogeneous):
    seconds_per_step: float = 2.0

class Silent(Tracker):
    def callback(self):
        return Callback()

class Plain(Optimizer):
    pass

class Shifted(Augmentation):
    pass

def turned(x, y, rng):
    return x.flip(-1), y

def falling(version):
    return 1 / (1 + version)

def clamped(outputs, targets, most=2.0):
    return nn.functional.cross_entropy(outputs, targets, reduction="none").clamp(max=most)

class Corner(nn.Module):
    def forward(self, x):
        return x[..., :4, :4].flatten(1)

def fails():
    raise RuntimeError("no\\nsuch rows")

def exits():
    raise SystemExit(3)
'''


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that is listed by its file; everything is as it was afterwards."""
    name = f"lab_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(LAB.replace("{name}", name))
    monkeypatch.setattr(references, "_files", {})
    recipes.names()  # imports all: those imported later would be forgotten afterwards
    monkeypatch.setattr(named, "_made", dict(named._made))
    references.list_file(tmp_path / f"{name}.py")
    yield name
    for module in [module for module in sys.modules if module.startswith("lab_")]:
        del sys.modules[module]
    for kinds in Component.registry.values():
        for kind in [kind for kind, made in kinds.items() if made.__module__.startswith("lab_")]:
            del kinds[kind]


def test_a_component_is_named_by_its_kind_or_by_its_module(lab: str) -> None:
    by_module = recipes.fedavg().with_(aggregation=f"{lab}:Lessened")
    assert by_module.aggregation.kind == "lessened"
    assert recipes.fedavg().with_(aggregation={"kind": f"{lab}:Lessened"}) == by_module
    assert recipes.fedavg().with_(aggregation="lessened") == by_module
    assert recipes.rebuild(by_module.model_dump()) == by_module


def test_every_part_of_a_component_takes_a_name(lab: str) -> None:
    """As a kind alone, as the kind of a table, and as a function where functions are taken."""
    for sizes in (f"{lab}:Halves", {"kind": f"{lab}:Halves"}):
        split = partition.Iid(clients=2, limit=40, sizes=USERS.mark(sizes), changes=USERS.mark([f"{lab}:Darker"]))
        assert (split.sizes.kind, split.changes[0].kind) == ("halves", "darker")
        assert split.split(data.digits()).size(0, "train") + split.split(data.digits()).size(0, "test") == 10
    assert piebald.Simulator(fleet=USERS.mark(f"{lab}:Slow")).fleet.device(0).seconds_per_step == 2.0
    silent = trackers_of(USERS.mark([f"{lab}:Silent", {"kind": f"{lab}:Silent"}]))
    assert [type(one).__name__ for one in silent] == ["Silent"] * 2
    made = recipes.fedavg(
        optimizer=f"{lab}:Plain", lr_schedule=f"{lab}:falling", augmentation=[f"{lab}:turned", f"{lab}:Shifted"]
    ).training.table()
    assert made["optimizer"]["kind"] == "plain"
    assert made["lr_schedule"] == {"kind": "function", "function": f"{lab}:falling"}
    assert [one["kind"] for one in made["augmentation"]] == ["function", "shifted"]
    clients = partition.Iid(clients=2, limit=40).split(data.digits())
    assert models.embedded(clients, f"{lab}:Corner").rows(0, "train").x.shape[1:] == (16,)
    with pytest.raises(SettingError, match=r":Net fails: TypeError: .* missing 2 required"):
        models.embedded(clients, f"{lab}:Net")
    objective = plugins.objective_named(
        torch.zeros(2, dtype=torch.int64), USERS.mark({"name": f"{lab}:clamped", "most": 0.5}), None
    )
    assert objective.loss(torch.tensor([[9.0, 0.0]]), torch.tensor([1])).item() == 0.5
    assert plugins.modules_of(objective.loss) == {lab}


def test_only_names_of_kinds_are_looked_up() -> None:
    """Before, any text with a colon in a list was taken for a plugin: classes, clients, layers."""
    table = {"kind": "sites", "clients": ["a:b"], "inputs": [3], "classes": ["grade: low", "os:system"]}
    assert plugins.read(table, USERS) == table
    del table["kind"]
    assert Sites(**table).clients_elsewhere().names == ["a:b"]


@pytest.mark.parametrize(
    "table",
    [
        {"partition": {"kind": "{lab}:Parity"}},
        {"partition": {"kind": "iid", "clients": 2, "sizes": {"kind": "{lab}:Halves"}}},
        {"partition": {"kind": "iid", "clients": 2, "changes": ["{lab}:Darker"]}},
        {"data": {"name": "{lab}:rows"}},
        {"data": {"source": "{lab}.py:rows"}},
        {"recipe": {"name": "{lab}:plain"}},
        {"fleet": {"kind": "{lab}:Slow"}},
        {"trackers": ["{lab}:Silent"]},
        {"extractor": "{lab}:Corner"},
        {"plugins": ["{lab}"]},
    ],
    ids=lambda table: "-".join([*table, *str(table).split("'")[3:4]]),
)
def test_a_run_keeps_the_modules_that_it_needs(lab: str, tmp_path: Path, table: dict[str, object]) -> None:
    """Before, only those of the recipe's components, the model, the loss and the metrics were kept."""
    whole = {
        "rounds": 1,
        "measure": "none",
        "data": {"name": "digits"},
        "partition": {"kind": "iid", "clients": 2, "limit": 40},
        "model": {"name": "logistic"},
        "recipe": {"name": "fedavg"},
    }
    more = json.loads(json.dumps(table).replace("{lab}", lab))
    settings = ExperimentSettings.of_table(whole | more, "the test", USERS)
    plan = settings.plan()
    (recipe,) = plan.recipes.values()
    kept = {"settings": settings.table(), "trackers": settings.trackers, "runtime": plan.runtime}
    run = piebald.run(recipe, plan.clients, plan.model, rounds=1, evaluate_every=0, **kept)
    assert run.meta["plugins"] == [[lab, plugins.version(lab)]]


@pytest.mark.parametrize("form", ["{lab}:{lab}_lessened", "{lab}_lessened"])
def test_a_registered_recipe(lab: str, form: str) -> None:
    USERS.use([lab])
    made = recipes.make(form.format(lab=lab), lr=0.25)
    assert (made.name, made.fields, made.paper) == (f"{lab}_lessened", {"lr": 0.25}, "nobody 2026")
    assert made.aggregation.kind == "lessened"
    with pytest.raises(SettingError, match=r"there is no setting of recipe .* called 'rate'"):
        recipes.make(form.format(lab=lab), rate=0.25)


def test_a_function_that_returns_a_recipe_and_a_recipe(lab: str) -> None:
    made = recipes.make(f"{lab}:plain", lr=0.25)
    assert made.training == recipes.fedavg(lr=0.25).training
    assert (made.name, made.fields) == (f"{lab}:plain", {"lr": 0.25})
    assert 'name = "' + lab + ':plain"' in recipes.toml(made)
    assert recipes.make(f"{lab}:ready").training == recipes.fedavg(lr=0.3).training
    with pytest.raises(SettingError, match="must return a Recipe, got int"):
        recipes.make(f"{lab}:wrong")


def test_two_recipes_of_one_name_are_refused() -> None:
    def fedavg() -> piebald.Recipe:
        return recipes.fedavg()

    with pytest.raises(
        SettingError, match=r"recipe 'fedavg' is already defined in piebald\.methods\.recipes\.fedavg: rename"
    ):
        named.recipe("nobody", type(recipes.fedavg().training))(fedavg)


def test_a_model_gets_what_its_signature_names(lab: str) -> None:
    one, same, other = (models.build_model(f"{lab}:Net", (3,), 2, seed, scale=2.0) for seed in (5, 5, 6))
    assert torch.equal(one.weight, same.weight)  # type: ignore[arg-type]
    assert not torch.equal(one.weight, other.weight)  # type: ignore[arg-type]
    assert one.scale == 2.0
    assert models.build_model(f"{lab}:flat", (1, 8, 8), 10)[1].out_features == 10
    with pytest.raises(SettingError, match=r"there is no setting of model .*:Net' called 'depth'"):
        models.build_model(f"{lab}:Net", (3,), 2, depth=3)
    with pytest.raises(SettingError, match=r"must make a torch\.nn\.Module, got int"):
        models.build_model(f"{lab}:wrong", (3,), 2)


@pytest.mark.full
def test_losses_and_metrics(lab: str, tmp_path: Path) -> None:
    """They are found again when the run is resumed, since the run folder keeps their names."""
    clients = partition.Iid(clients=3, limit=90).split(data.load(f"{lab}:rows"))
    model = models.build_model(f"{lab}:flat", (1, 8, 8), 10)
    run = piebald.run(
        "fedavg", clients, model, rounds=1, out=tmp_path / "run", loss=f"{lab}:huber", metrics=["auc", f"{lab}:right"]
    )
    assert {"auc", "right"} <= {row["metric"] for row in run.scores}
    assert run.meta["objective"] == f"{lab}:huber"
    assert [module for module, _ in run.meta["plugins"]] == [lab]
    with pytest.raises(SettingError, match=f"the plugin '{lab}' is not allowed here: allow it with --plugin"):
        piebald.resume(tmp_path / "run", clients, model)
    assert piebald.resume(tmp_path / "run", clients, model, plugins=[lab]).scores == run.scores
    given = {"recipe": recipes.fedavg(), "loss": f"{lab}:huber", "metrics": ["auc", f"{lab}:right"]}
    assert piebald.resume(tmp_path / "run", clients, model, **given).scores == run.scores


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("{lab}:Nett", "there is no model in .* called 'Nett': did you mean 'Net'?"),
        ("{lab}:_hidden", "there is no model in .* called '_hidden'"),
        ("{lab}:", "must be a name or 'module:name'"),
        (":Net", "must be a name or 'module:name'"),
        ("nowhere_at_all:Net", "there is no module 'nowhere_at_all': install its package"),
        ("os:system", "'os' is a module of Python itself"),
        ("subprocess:Popen", "'subprocess' is a module of Python itself"),
        ("../evil:Net", "a plugin is named like 'mylab'"),
        ("/tmp/evil.py:Net", "there is no file /tmp/evil.py"),
        ("../evil.py:Net", "there is no file ../evil.py"),
        ("gone.py:Net", "there is no file gone.py"),
    ],
)
def test_what_cannot_be_found_is_one_sentence(lab: str, reference: str, message: str) -> None:
    with pytest.raises(SettingError, match=message) as raised:
        models.build_model(reference.format(lab=lab), (3,), 2)
    assert "\n" not in str(raised.value)


def test_what_fails_is_one_sentence(lab: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, message in (("fails", "fails: RuntimeError: no such rows$"), ("exits", "fails: SystemExit: 3$")):
        with pytest.raises(SettingError, match=message):
            data.load(f"{lab}:{name}")
    for text, message in (
        ("import lab_nothing", "ModuleNotFoundError"),
        ("1 +", "SyntaxError"),
        ("exit(2)", "SystemExit"),
    ):
        (tmp_path / "lab_broken.py").write_text(text)
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SettingError, match=f"lab_broken.*cannot be imported: {message}"):
            USERS.use(["lab_broken.py"])
        with pytest.raises(SettingError, match=f"lab_broken.*cannot be imported: {message}"):
            USERS.find("lab_broken.py:Net", "model")


def test_tables_from_elsewhere_import_nothing(lab: str, tmp_path: Path) -> None:
    """`rebuild` reads run folders and terms of servers: a reference in place of a kind is an unknown kind there."""
    marker = tmp_path / "was_here"
    (tmp_path / "lab_evil.py").write_text(f"open({str(marker)!r}, 'w').close()")
    table = recipes.fedavg().model_dump()
    for axis in ("training", "aggregation"):
        with pytest.raises(SettingError, match=f"there is no {axis} 'lab_evil:Net'"):
            recipes.rebuild({**table, axis: {"kind": "lab_evil:Net"}})
    assert not marker.exists()


def test_another_version_is_said(lab: str, tmp_path: Path) -> None:
    USERS.use([lab])
    here = plugins.version(lab)
    assert here.startswith("sha256:")
    author = Outside([lab, "lab_gone"], "list it")
    assert plugins.use_recorded([(lab, here)], "the run", author) == []
    assert plugins.use_recorded([(lab, "0.9")], "the run", author) == [
        f"the run has {lab} 0.9, this machine has {here}"
    ]
    assert plugins.version("numpy") == __import__("numpy").__version__
    with pytest.raises(SettingError, match=r"the run needs the plugin lab_gone 1\.0: there is no module 'lab_gone'"):
        plugins.use_recorded([("lab_gone", "1.0")], "the run", author)


def test_entry_points_are_discovered(lab: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        module = lab

    monkeypatch.setattr(references.Users, "_discovered", False)
    monkeypatch.setattr(references.metadata, "entry_points", lambda group: [Entry()] * (group == "piebald.components"))
    assert recipes.make(f"{lab}_lessened").aggregation.kind == "lessened"


def test_plugins_are_a_list_of_names() -> None:
    for wrong in ("mylab", [3]):
        with pytest.raises(SettingError, match="plugins must be a list of modules"):
            USERS.use(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("deep", ["list", "table", "itself"])
def test_what_is_nested_without_end_is_refused_in_one_sentence(deep: str) -> None:
    given: Any = []
    if deep == "itself":
        given.append(given)
    for _ in range(5000 if deep != "itself" else 0):
        given = [given] if deep == "list" else {"kind": "server_sgd", "inner": given}
    for axis in ("server_optimizer", "training", "transforms"):
        with pytest.raises(SettingError):
            recipes.fedavg().with_(**{axis: given})
