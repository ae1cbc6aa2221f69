"""Everything that runs at clients computes on a GPU what it computes on the CPU, and seldom makes the host wait.

`make test` runs these tests on a pretended GPU, `make test-gpu` on a real one.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager

import piebald
from piebald import recipes
from piebald.contracts import ClientContext, TrainInput, TrainOutput
from piebald.engines import compilation
from piebald.engines.batched import _BatchedRun
from piebald.engines.device_copies import moved_together
from piebald.engines.engine_choice import stack_limit
from piebald.engines.model_traits import Traits
from piebald.methods.clustering.distfl import Distfl
from piebald.methods.recipe import Recipe
from piebald.methods.training import Sgd
from piebald.runtimes.ray.connection import actors_that_fit
from tests.contract.conftest import DISTINCT, VARIANTS, federation, method, vector
from tests.devices.there import ENGINES, assert_as_on_the_cpu, carry_out, equal_clients, there
from tests.devices.waits import Waits


def full(*parameters: object) -> Any:
    """Parameters of the full tier."""
    return pytest.param(*parameters, marks=pytest.mark.full)


def long(*parameters: object) -> Any:
    """Parameters of the long tier."""
    return pytest.param(*parameters, marks=pytest.mark.long)


# Each is on one of the engines; two on the engine that is most unlike the others for them, and one that asks queries.
# The rest of a recipe is the server's: `test_server`.
QUICK = [("fedavg", "sequential"), ("ditto", "batched")]
CASES = [(name, ENGINES[place % 3]) for place, name in enumerate(DISTINCT)]
SLOW = ("fedala", "vmapped")  # searches its weights on the pretended device for half a minute
CASES += [("fedavg", "vmapped"), ("scaffold", "batched"), ("sync_dvw", "sequential")]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "engine"),
    [*QUICK, *(full(*case) for case in dict.fromkeys(CASES) if case not in (*QUICK, SLOW)), long(*SLOW)],
)
def test_a_recipe_computes_there_what_it_computes_on_the_cpu(name: str, engine: str) -> None:
    expected = carry_out(method(name), engine=engine, stack=3)
    with there() as device:
        assert_as_on_the_cpu(carry_out(method(name), device, engine=engine, stack=3), expected)


@pytest.mark.parametrize("name", ["fedavg", "fedbn"])
def test_the_batched_engine_forms_its_batches_here(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And multiplies factors where rows do not mix, so that the tests of devices are about that as well."""
    begun: list[int] = []
    begin = _BatchedRun.begin
    monkeypatch.setattr(
        _BatchedRun, "begin", lambda run, *rows: begun.append(len(run.module.factored)) or begin(run, *rows)
    )
    carry_out(method(name), engine="batched", stack=3)
    assert begun
    assert any(begun) or name != "fedavg"


COMPOSED = {
    "noise at the client": method("fedbn").with_(transforms=[{"kind": "gaussian", "clip": 0.1, "where": "client"}]),
    "masked sums": method("scaffold").with_(transforms=[{"kind": "secure_aggregation"}]),
    "an attack": method("fedavg").with_(transforms=[{"kind": "random_update", "clients": [1], "sigma": 0.1}]),
    "a robust mean": method("fedavg").with_(aggregation="median"),
    "kept optimizer state": method("fedavg", **VARIANTS["adamw, kept"]),
    "a schedule in several versions": method("async_fedavg", **VARIANTS["lr_schedule"]),
}


@pytest.mark.full
@pytest.mark.parametrize("case", COMPOSED)
def test_transforms_aggregators_and_optimizers_do_so_too(case: str) -> None:
    engine = ENGINES[list(COMPOSED).index(case) % 3]
    expected = carry_out(COMPOSED[case], engine=engine, stack=3)
    apart = 1e-4 if case == "kept optimizer state" else 0.0  # the CPU has fused kernels for AdamW
    with there() as device:
        assert_as_on_the_cpu(carry_out(COMPOSED[case], device, engine=engine, stack=3), expected, apart)


def waits(recipe: Recipe, count: int, engine: str, stack: int = 8) -> Counter[str]:
    """What a run waits for with so many clients, all of them in one stack by default."""
    with there() as device, Waits() as seen:
        carry_out(recipe, device, equal_clients(count), engine=engine, stack=stack)
    return seen.seen


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("fedavg", "sequential"),
        ("fedavg", "batched"),
        ("scaffold", "batched"),
        long("dp_sgd", "vmapped"),
        *(long(name, "sequential") for name in ("ditto", "dp_sgd")),
    ],
)
def test_the_host_waits_as_often_for_eight_clients_as_for_four(name: str, engine: str) -> None:
    recipe = method(name, cohort=1.0)
    few = waits(recipe, 4, engine)
    assert few == waits(recipe, 8, engine)
    assert few["to the host"]  # the updates: else nothing was counted


@pytest.mark.full
@pytest.mark.parametrize(("name", "engine"), [("distfl", "vmapped"), long("sync_dvw", "sequential")])
def test_the_host_waits_for_lengths_alone_where_updates_are_compared_on_the_device(name: str, engine: str) -> None:
    """Of each update twice a round, of all numbers and of the trained ones; of the model of each cluster once."""
    recipe = method(name, cohort=1.0)
    if isinstance(recipe.clustering, Distfl):  # whose synthesis looks at how far it is, at each of its steps
        changed = {"steps": 1, "fit": 0.0, "find": "linked", "threshold": 1e9}
        recipe = recipe.with_(clustering=recipe.clustering.model_copy(update=changed))
    few, many = waits(recipe, 4, engine), waits(recipe, 8, engine)
    assert many - few == Counter({"item": 2 * 2 * 4})
    assert waits(recipe, 8, engine, stack=2) == many


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "engine"), [("scaffold", "batched"), long("apfl", "vmapped"), long("pfedme", "sequential")]
)
def test_the_host_waits_as_often_for_twice_as_many_steps(name: str, engine: str) -> None:
    once, twice = (waits(method(name, cohort=1.0, epochs=epochs), 4, engine) for epochs in (1, 2))
    assert once == twice


class Impatient(Sgd):
    """Looks at a number of each client: what components must not do."""

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        end = self.run_sgd(inputs, context)
        assert all(float(row[0]) == float(row[0]) for row in end.model)
        return self.output(end)


@pytest.mark.full
def test_a_trainer_that_looks_at_each_client_is_found() -> None:
    recipe = recipes.fedavg().with_(training=Impatient(lr=0.1, batch=10))
    few, more = (waits(recipe, count, "vmapped") for count in (4, 8))
    assert more["item"] > few["item"]


class Homesick(Sgd):
    """Adds a vector of the host to those of the device."""

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        end = self.run_sgd(inputs, context)
        return self.output(end).__class__(end.model + torch.zeros(end.model.shape[1]), end.steps)


@pytest.mark.long
def test_a_trainer_that_mixes_host_and_device_is_found() -> None:
    recipe = recipes.fedavg().with_(training=Homesick(lr=0.1, batch=10))
    carry_out(recipe)  # on the CPU nobody notices
    with there() as device, pytest.raises(piebald.core.errors.RuntimeFault, match="device"):
        carry_out(recipe, device)


@pytest.mark.full
def test_what_a_cohort_is_sent_is_copied_once() -> None:
    """Twice as many stacks send their rows' places twice as often, and the model as often as before."""
    sent = {}
    for stack in (2, 8):
        with there() as device, Waits() as seen:
            carry_out(method("fedavg", cohort=1.0), device, equal_clients(8), engine="vmapped", stack=stack)
        sent[stack] = seen.models_sent
    assert sent[2] == sent[8] > 0


def test_a_model_that_draws_its_own_numbers_repeats_there() -> None:
    class Noisy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x + (0.1 * torch.randn_like(x) if self.training else 0))

    def once(device: Any) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = Noisy()
        where = piebald.Simulator(engine="sequential", workers=0).model_copy(update={"device": device})
        return piebald.run(method("fedavg"), federation(), model, rounds=1, seed=1, runtime=where).rounds[-1]["loss"]

    with there() as device:
        assert once(str(device)) == once(str(device))


@pytest.mark.full
def test_the_fastest_engine_is_measured_there() -> None:
    with there() as device:
        found = carry_out(method("fedavg"), device, engine="auto", stack=None)
    assert found.meta["runtime"]["engine"] in ENGINES
    assert found.meta["runtime"]["workers"] == 0


def test_a_stack_is_as_large_as_the_memory_of_a_gpu_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    work = carry_out(method("fedavg")).work
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (48 * work.layout.size * 7, 0))
    assert stack_limit(work, torch.device("cuda")) == 7  # 12 numbers of 4 bytes for each parameter
    assert stack_limit(work, torch.device("cpu")) == stack_limit(work) > 7


def test_the_settings_say_which_devices_there_are() -> None:
    for name in ("gpu", "cuda:x", "cpu:0"):
        with pytest.raises(ValueError, match="device must be 'auto', 'cpu', 'cuda', 'cuda:N' or 'mps'"):
            piebald.Simulator(device=name)
    with pytest.raises(ValueError, match="tf32 is for NVIDIA's GPUs"):
        piebald.Simulator(tf32=True)


def test_shares_of_gpus_are_refused_in_one_sentence_where_ray_could_not_give_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match=r"gpus must be at most 1"):
        piebald.Ray(device="cuda", gpus=1.5)
    with pytest.raises(ValueError, match="set device = 'cuda' too"):
        piebald.Ray(gpus=0.5)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="engine 'reference' is for the CPU"):
        piebald.Simulator(device="cuda", engine="reference")


def test_an_actor_is_counted_only_where_a_whole_share_of_one_gpu_is_left() -> None:
    nodes = [{"CPU": 16.0, "GPU": 2.0}, {"CPU": 3.0, "GPU": 4.0}, {"CPU": 8.0}]
    assert actors_that_fit(nodes, 1.0) == 2 + 3
    assert actors_that_fit(nodes, 0.4) == 4 + 3  # two on each GPU, not five on two
    assert actors_that_fit(nodes, 1 / 3) == 6 + 3
    assert actors_that_fit(nodes, 0.0) == 16 + 3 + 8


def group_norm_net(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.ReLU(), nn.Linear(8, 4))


@pytest.mark.long
def test_compiled_passes_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the backend that captures passes and their gradients, and leaves out the compiler."""
    captured: list[Any] = []

    def recorded(graph: Any, inputs: Any) -> Any:
        captured.append(graph)
        return aot_eager(graph, inputs)

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=recorded))
    for engine in compilation.ENGINES:
        expected = carry_out(method("fedavg"), model=group_norm_net, engine=engine, stack=3)
        before = len(captured)
        found = carry_out(method("fedavg"), model=group_norm_net, engine=engine, stack=3, compiled=True)
        assert len(captured) > before
        torch.testing.assert_close(vector(found), vector(expected))


def test_what_cannot_be_compiled_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="compiled is for the engines 'sequential' and 'vmapped', got 'batched'"):
        piebald.Simulator(engine="batched", compiled=True)
    with pytest.raises(piebald.core.errors.SettingError, match="compiled = true is for models without dropout"):
        carry_out(method("fedavg"), compiled=True)
    asked: dict[str, Any] = {}
    monkeypatch.setattr(torch, "compile", lambda function, **options: asked.update(options) or function)
    quiet = Traits(mixes=False, dropout=False, random=False, each=True)
    compilation.compiled(nn.Identity(), quiet, torch.device("cuda"))
    assert asked == {"mode": "reduce-overhead"}  # which is what records CUDA graphs


def test_what_is_sent_to_a_gpu_goes_through_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """From which it reads by itself: the host does not wait."""
    done: list[Any] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: done.append("pinned") or self)
    monkeypatch.setattr(Tensor, "to", lambda self, *where, **how: done.append((*where, how)) or self)
    gpu = torch.device("cuda:1")
    moved_together([np.arange(3), np.arange(2)], gpu)
    assert done == ["pinned", (gpu, {"non_blocking": True})]  # once for both
