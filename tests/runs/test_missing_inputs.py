"""Clients that lack an input which the model takes as optional."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import piebald
from piebald import recipes
from piebald.core.errors import SettingError
from tests.fakes import seeded, simulate

ROWS = {"a": 10, "b": 16, "c": 12}


def hospital(name: str, *inputs: str) -> tuple[dict[str, Any], Any]:
    draw = np.random.default_rng(len(name) + ROWS[name])
    y = np.arange(ROWS[name]) % 2
    forms = {"table": (3,), "scan": (1, 4, 4), "sound": (5,)}
    rows = {part: draw.normal(size=(len(y), *forms[part])).astype(np.float32) for part in forms}
    return {part: rows[part] for part in inputs}, y


class Net(nn.Module):
    """Three inputs, two of which it can do without; batch norm on the way of one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scan = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.BatchNorm1d(4))
        self.sound, self.head = nn.Linear(5, 2), nn.Linear(9, 2)

    def forward(self, table: Tensor, scan: Tensor | None = None, sound: Tensor | None = None) -> Tensor:
        rows = len(table)
        seen = torch.zeros(rows, 4) if scan is None else self.scan(scan)
        heard = torch.zeros(rows, 2) if sound is None else self.sound(sound)
        outputs: Tensor = self.head(torch.cat([table, seen, heard], 1))
        return outputs


def clients(**inputs: tuple[str, ...]) -> dict[str, Any]:
    pairs = {name: hospital(name, *names) for name, names in inputs.items()}
    return {name: {"train": pair, "test": pair} for name, pair in pairs.items()}


ALL = ("table", "scan", "sound")
SOME = clients(a=ALL, b=("table", "sound"), c=ALL)


def model() -> nn.Module:
    return seeded(Net)


def tensors(run: piebald.Run) -> dict[str, Tensor]:
    return run.work.layout.views(run.start())


ENGINES: list[dict[str, Any]] = [
    {"engine": "sequential", "stack": 3},
    {"engine": "batched", "stack": 3},
    {"engine": "vmapped", "stack": 3},
    {"engine": "reference"},
    {"engine": "sequential", "workers": 2},
]


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_a_client_has_no_say_for_what_only_its_missing_input_reaches(engine: dict[str, Any]) -> None:
    """The scan's layers, running statistics included, are the mean of those that have scans; the head is of all."""
    recipe = recipes.fedavg(lr=0.2, batch=5, weight_decay=0.1, momentum=0.5)
    both = tensors(simulate(recipe, SOME, model(), rounds=1, simulator=engine))
    ends = {}
    for name, pair in SOME.items():
        run = simulate(recipe, {name: pair}, model(), rounds=1) if name != "b" else None
        ends[name] = None if run is None else tensors(run)
    for name, tensor in both.items():
        if name.startswith("scan"):
            mean = (10 * ends["a"][name] + 12 * ends["c"][name]) / 22
            torch.testing.assert_close(tensor, mean, rtol=1e-4, atol=1e-5)
    start = tensors(simulate(recipe, SOME, model(), rounds=1, evaluate_every=0))["head.weight"]
    without = simulate(recipe, {name: SOME[name] for name in ("a", "c")}, model(), rounds=1)
    assert not torch.allclose(both["head.weight"], tensors(without)["head.weight"], atol=1e-4)
    torch.testing.assert_close(both["head.weight"], start, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["fedadam", "fedavgm", "fedbuff", "qfedavg", "ditto", "fedprox", "fedbn"])
def test_a_step_of_those_without_an_input_leaves_its_layers_alone(name: str) -> None:
    """Only client b takes part in the first round: nobody has a say for the scan's layers."""
    recipe = recipes.make(name, lr=0.2)
    try:
        run = simulate(recipe, clients(a=ALL, b=("table", "sound")), model(), rounds=3)
    except SettingError as error:  # of methods that take updates as wholes
        assert "takes every update as a change of the whole one" in str(error)  # noqa: PT017
        return
    assert all(row["status"] == "ok" for row in run.results)
    assert run.unscored == []


def test_where_nobody_has_the_input_its_layers_stay_as_they_are() -> None:
    recipe = recipes.fedavg(cohort=1, lr=0.2)
    start = {name: view.clone() for name, view in tensors(simulate(recipe, SOME, model(), rounds=1)).items()}
    run = simulate(recipe, SOME, model(), rounds=6, seed=3)
    moved = {row["version"]: row["client"] for row in run.results}
    assert 1 in moved.values()
    alone = clients(b=("table", "sound"), a=ALL)
    alone["a"] = {"train": SOME["a"]["train"], "test": SOME["a"]["test"]}
    first = model()
    views = dict(first.named_parameters())
    seed = next(
        seed for seed in range(20) if simulate(recipe, SOME, model(), rounds=1, seed=seed).results[0]["client"] == 1
    )
    end = tensors(simulate(recipe, SOME, model(), rounds=1, seed=seed))
    for name, tensor in end.items():
        if name in views and name.startswith("scan"):
            assert torch.equal(tensor, views[name].detach())
        elif name in views:
            assert not torch.equal(tensor, views[name].detach())
    assert torch.equal(end["scan.2.running_mean"], torch.zeros(4))
    assert torch.equal(end["scan.2.running_var"], torch.ones(4))
    assert start.keys() == end.keys()


def test_clients_may_lack_different_inputs_and_each_is_judged_without() -> None:
    several = clients(a=ALL, b=("table",), c=("table", "scan"))
    run = simulate(recipes.fedavg(lr=0.2), several, model(), rounds=2, simulator={"engine": "batched", "stack": 3})
    assert sorted(run.per_client) == [0, 1, 2]
    held = run.model("b")
    x = torch.from_numpy(several["b"]["test"][0]["table"])
    right = (held(table=x).argmax(1).numpy() == several["b"]["test"][1]).mean()
    assert run.per_client[1] == pytest.approx(right)
    assert run.common is not None  # of the rows of those that lack nothing


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_nobody_need_have_all_inputs_if_each_has_an_owner(engine: dict[str, Any]) -> None:
    """Layers of an input are those of the one who has it, and what is common is the mean of both."""
    halves = clients(a=("table", "scan"), b=("table", "sound"))
    recipe = recipes.fedavg(lr=0.2, batch=4)
    both = tensors(simulate(recipe, halves, model(), rounds=1, simulator=engine))
    a, b = (tensors(simulate(recipe, {name: halves[name]}, model(), rounds=1)) for name in "ab")
    for name, tensor in both.items():
        owner = a.get(name) if name.startswith("scan") else b.get(name)
        if name.startswith(("scan", "sound")):
            assert owner is not None
            torch.testing.assert_close(tensor, owner, rtol=1e-4, atol=1e-5)
        else:
            torch.testing.assert_close(tensor, (10 * a[name] + 16 * b[name]) / 26, rtol=1e-4, atol=1e-5)


def test_a_run_is_resumed_to_the_bit(tmp_path: Path) -> None:
    recipe = recipes.fedavg(lr=0.2, cohort=2)
    whole = simulate(recipe, SOME, model(), rounds=4)
    simulate(recipe, SOME, model(), rounds=2, out=tmp_path / "run").close()
    assert torch.equal(piebald.resume(tmp_path / "run", SOME, model(), rounds=4).start(), whole.start())


class Filled(Net):
    """A network that takes zeros for a missing scan, so that its layers run without one."""

    def forward(self, table: Tensor, scan: Tensor | None = None, sound: Tensor | None = None) -> Tensor:
        return super().forward(table, torch.zeros(len(table), 1, 4, 4) if scan is None else scan, sound)


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_parameters_that_are_named_for_an_input_are_those_of_who_has_it(engine: dict[str, Any]) -> None:
    """A gradient reaches them without the input, too, and batch norm runs."""
    recipe = recipes.fedavg(lr=0.2, batch=5)
    named = recipe.with_(sharing={"kind": "full", "inputs": {"scan": "scan"}})
    start = {name: view.clone() for name, view in tensors(simulate(recipe, SOME, seeded(Filled), rounds=1)).items()}
    ends = {name: tensors(simulate(recipe, {name: SOME[name]}, seeded(Filled), rounds=1)) for name in ("a", "c")}
    found = tensors(simulate(named, SOME, seeded(Filled), rounds=1, simulator=engine))
    for name, tensor in found.items():
        if name.startswith("scan"):
            mean = (10 * ends["a"][name] + 12 * ends["c"][name]) / 22
            torch.testing.assert_close(tensor, mean, rtol=1e-4, atol=1e-5)
            if name != "scan.1.bias":  # before batch norm, whose mean takes it away
                assert not torch.allclose(start[name], mean, rtol=1e-3, atol=1e-4), name
        else:
            torch.testing.assert_close(tensor, start[name], rtol=1e-4, atol=1e-5)


def test_who_lacks_the_input_still_gets_what_others_learn_for_it() -> None:
    named = recipes.fedavg(lr=0.2).with_(sharing={"kind": "full", "inputs": {"scan": ("scan.1.*", "scan.2.*")}})
    run = simulate(named, SOME, seeded(Filled), rounds=2)
    held = run.model("b").eval()
    assert torch.equal(dict(held.named_parameters())["scan.1.weight"], tensors(run)["scan.1.weight"])
    rebuilt = recipes.rebuild(named.model_dump())
    assert rebuilt.sharing.inputs == {"scan": ("scan.1.*", "scan.2.*")}
    with pytest.raises(SettingError, match="inputs of sharing must name inputs, which are table, scan, sound, got 'sc"):
        simulate(named.with_(sharing={"kind": "full", "inputs": {"scam": "scan"}}), SOME, model(), rounds=1)
    with pytest.raises(SettingError, match="there is no layer or role of this model called 'scam"):
        simulate(named.with_(sharing={"kind": "full", "inputs": {"scan": "scam.*"}}), SOME, model(), rounds=1)


class Needy(Net):
    """A network that cannot do without scans."""

    def forward(self, table: Tensor, scan: Tensor, sound: Tensor | None = None) -> Tensor:
        return super().forward(table, scan, sound)


@pytest.mark.parametrize(
    ("given", "make", "recipe", "message"),
    [
        (SOME, Needy, "fedavg", "client 'b' lacks scan, and the model cannot do without"),
        (clients(a=("table", "scan"), b=("table", "sound")), Needy, "fedavg", "client 'b' lacks scan, and the model"),
        (
            SOME,
            Net,
            "scaffold",
            "some clients lack an input: that gives clients unlike parts of the model but scaffold",
        ),
        (SOME, Net, "cfl", "some clients lack an input"),
    ],
)
def test_what_cannot_be_is_said_before_training(given: Any, make: Any, recipe: str, message: str) -> None:
    with pytest.raises(SettingError) as caught:
        simulate(recipe, given, seeded(make), rounds=1)
    assert message in str(caught.value)


def test_parts_of_one_client_have_the_same_inputs() -> None:
    mixed = {"a": SOME["a"], "b": {"train": hospital("b", *ALL), "test": hospital("b", "table")}}
    with pytest.raises(SettingError, match="lacks other inputs than the client's other rows"):
        piebald.clients_from(mixed)
