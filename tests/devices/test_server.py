"""The server on the device: where it is, that nothing stays there, and that runs go on from what it has saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import piebald
from piebald.core.cohort_matrix import weighted_mean
from piebald.data.partition import Trace
from piebald.methods.aggregation import Median
from piebald.methods.clustering import distfl
from piebald.methods.recipe import Recipe
from piebald.runs import execution
from piebald.runtimes.simulation import simulator
from piebald.server.loop import ServerLoop
from piebald.storage.store import RunStore
from tests.contract.conftest import HERE, federation, fitting, method, network, plain_network
from tests.devices.there import assert_as_on_the_cpu, carry_out, equal_clients, fitted, there

WITH_THE_ENGINE = (
    "fedavg", "fedavgm", "fedadam", "fedyogi", "fedprox", "scaffold", "ditto", "feddyn", "hdafl", "moon", "fedproto",
    "apfl",
)  # fmt: skip
COMPARED = ("fednova", "cfl", "distfl", "ifca", "fedamp", "hierfavg", "sync_dvw", "qfedavg", "afl", "term")
ROBUST: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in ("median", "geometric_median", "norm_clipping", "irls", "gra", "credit", "foolsgold")},
    **{kind: {"attackers": 0.2} for kind in ("trimmed_mean", "krum", "multi_krum", "bulyan")},
}
ON_THE_HOST = ("fedbuff", "async_fedavg", "async_dvw")


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[ServerLoop]:
    """The servers of the runs of a test."""
    made: list[ServerLoop] = []

    class Noted(ServerLoop):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(execution, "ServerLoop", Noted)
    return made


def places(server: ServerLoop) -> set[str]:
    """The kinds of devices on which a server has tensors that it keeps."""
    tensors: list[torch.Tensor] = []
    for cluster in server.cluster_models.clusters.values():
        tensors += [cluster.model, *cluster.optimizer_state.values(), *cluster.server_vectors.values()]
    return {one.device.type for one in tensors}


def full_but(names: tuple[str, ...], *quick: str) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.full) for name in names]


@pytest.mark.full
@pytest.mark.parametrize("name", full_but(WITH_THE_ENGINE, "fedavg", "fedadam", "scaffold"))
def test_the_server_is_with_the_engine_where_it_needs_only_sums(name: str, servers: list[ServerLoop]) -> None:
    assert_server_with_the_engine(method(name), servers)


@pytest.mark.full
@pytest.mark.parametrize("name", full_but(COMPARED, "cfl", "distfl", "sync_dvw"))
def test_the_server_is_with_the_engine_where_it_compares_updates(name: str, servers: list[ServerLoop]) -> None:
    assert_server_with_the_engine(method(name), servers)


@pytest.mark.full
@pytest.mark.parametrize("kind", full_but(tuple(ROBUST), "krum", "foolsgold"))
def test_a_robust_rule_compares_updates_where_the_engine_is(kind: str, servers: list[ServerLoop]) -> None:
    recipe = method("fedavg").with_(aggregation={"kind": kind, **ROBUST[kind]})
    assert_server_with_the_engine(recipe, servers)


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(method("fedavg").with_(aggregation="fltrust"), id="fltrust"),
        pytest.param(method("distfl", normal="server_rows"), id="distfl"),
        pytest.param(method("distfl", normal="vote"), id="a vote", marks=pytest.mark.full),
    ],
)
def test_rows_of_the_server_judge_updates_where_the_engine_is(recipe: Recipe, servers: list[ServerLoop]) -> None:
    assert_server_with_the_engine(recipe, servers, equal_clients(5, server_rows=np.arange(9)))


def assert_server_with_the_engine(recipe: Recipe, servers: list[ServerLoop], clients: Any = None) -> None:
    """And a run ends as on the CPU."""
    expected = carry_out(recipe, clients=clients, engine="sequential")
    with there() as device:
        found = carry_out(recipe, device, clients, engine="sequential")
        assert places(servers[-1]) == {device.type}
    assert places(servers[0]) == {"cpu"}
    assert_as_on_the_cpu(found, expected)
    assert {model.device.type for model in found.cluster_models.values()} == {"cpu"}


class OnTheHost(Median):
    """A rule of a user that computes with numpy."""

    def merge(self, matrix: torch.Tensor, cohort: Any) -> tuple[torch.Tensor, torch.Tensor]:
        average = torch.from_numpy(np.median(matrix.numpy(), axis=0))
        return average, torch.full((len(matrix),), 1 / len(matrix), dtype=torch.float64)


class WhereverItIs(Median):
    """A rule of a user that says of itself that it takes tensors of a GPU."""

    on_device: ClassVar[bool] = True


class Inherited(WhereverItIs):
    """One that says nothing."""


@pytest.mark.full
@pytest.mark.parametrize(("rule", "with_engine"), [(WhereverItIs, True), (Inherited, False)])
def test_a_rule_compares_updates_on_the_device_if_its_own_class_says_so(
    rule: type[Median], with_engine: bool, servers: list[ServerLoop]
) -> None:
    recipe = method("fedavg").with_(aggregation=rule())
    expected = carry_out(recipe, engine="sequential")
    with there() as device:
        found = carry_out(recipe, device, engine="sequential")
        assert places(servers[-1]) == {device.type if with_engine else "cpu"}
    assert_as_on_the_cpu(found, expected)


OTHERWISE: dict[str, tuple[Recipe, dict[str, Any]]] = {
    **{name: (method(name), {}) for name in ON_THE_HOST},
    "a user's median": (method("fedavg").with_(aggregation=OnTheHost()), {}),
    "noise": (method("fedbn").with_(transforms=[{"kind": "gaussian", "clip": 0.1, "where": "client"}]), {}),
    "limited weights": (method("fedavg"), {"max_weight": 0.5}),
    "kept models": (method("fedavg").with_(server_optimizer="cached_average"), {}),
    "unlike models": (method("fedmd"), {"model": {"site 1": plain_network, "*": network}}),
    "a choice among models": (method("fedavg"), {"keep": "best_for_each"}),
}


@pytest.mark.full
@pytest.mark.parametrize("case", full_but(tuple(OTHERWISE), "fedbuff", "a user's median", "limited weights"))
def test_the_server_stays_on_the_host_where_it_needs_more(case: str, servers: list[ServerLoop]) -> None:
    recipe, more = OTHERWISE[case]

    def end(device: Any) -> piebald.Run:
        where = piebald.Simulator(**HERE).model_copy(update={"device": str(device)})
        return piebald.run(recipe, federation(), **{"model": fitting(recipe), **more}, rounds=2, seed=1, runtime=where)

    expected = end("cpu")
    with there() as device:
        found = end(device)
    assert places(servers[0]) == places(servers[1]) == {"cpu"}
    assert_as_on_the_cpu(found, expected)


def test_a_gpu_adds_updates_at_once_and_a_cpu_by_blocks_that_its_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply, widths = torch.mv, list[int]()
    monkeypatch.setattr(
        torch, "mv", lambda block, *more, **out: widths.append(len(block)) or multiply(block, *more, **out)
    )
    updates = [{"model": torch.ones(500_000)} for _ in range(2)]
    weighted_mean(updates, "model", [1.0, 3.0], 4.0)
    assert sum(widths) == 500_000
    assert max(widths) == 2**18 / 2
    widths.clear()
    with there() as device:
        there_too = [{"model": torch.ones(500_000, device=device)} for _ in range(2)]
        assert weighted_mean(there_too, "model", [1.0, 3.0], 4.0).cpu().eq(1).all()
    assert widths == [500_000]


@pytest.mark.full
@pytest.mark.parametrize(("clients", "place"), [(8.1, "device"), (7.9, "cpu")])
def test_a_cohort_is_compared_on_the_host_where_the_device_has_no_room_for_it(
    clients: float, place: str, servers: list[ServerLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room is eight times the updates of all clients."""
    recipe = method("cfl", cohort=1.0)
    bytes_each = sum(4 * tensor.numel() for tensor in fitted(recipe, "sequential")(0).state_dict().values())
    monkeypatch.setattr(execution, "free_memory", lambda device: int(clients * len(federation()) * bytes_each))
    with there() as device:
        carry_out(recipe, device, engine="sequential")
        assert places(servers[0]) == {device.type if place == "device" else "cpu"}


@pytest.mark.full
def test_distfl_evaluates_models_on_the_device_that_the_server_is_not_on(
    servers: list[ServerLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And keeps its probes on the host, from where the next step begins, and a run that goes on."""
    monkeypatch.setattr(execution, "free_memory", lambda device: 0)
    seen: list[set[str]] = []
    synthesise = distfl.synthesise

    def watched(module: Any, targets: Any, start: Any, *settings: Any) -> Any:
        seen.append({start.device.type, *(parameter.device.type for parameter in module.parameters())})
        return synthesise(module, targets, start, *settings)

    monkeypatch.setattr(distfl, "synthesise", watched)
    with there() as device:
        carry_out(method("distfl"), device, engine="sequential")
        assert seen == [{device.type}] * 2  # steps
        kept = servers[0].cluster_models.kept
        assert [state["probes"].device.type for state in kept.values() if "probes" in state] == ["cpu"]
    assert places(servers[0]) == {"cpu"}


@pytest.mark.full
def test_a_long_model_lies_in_a_file_and_not_on_the_device(servers: list[ServerLoop]) -> None:
    with there() as device:
        carry_out(method("fedavg"), device, map_above=0)
    assert places(servers[0]) == {"cpu"}


@pytest.mark.parametrize("name", ["fedadam", pytest.param("scaffold", marks=pytest.mark.full)])
def test_a_run_goes_on_from_what_the_server_on_the_device_has_saved(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From tensors that were copied without waiting, and were there when they were written."""
    monkeypatch.setattr(simulator, "device_named", lambda device: device)

    def begun(device: Any, rounds: int) -> dict[str, Any]:
        where = piebald.Simulator(**HERE, device=str(device))
        return {"rounds": rounds, "seed": 1, "runtime": where, "checkpoint_every": 1}

    recipe, model, clients = method(name), fitting(method(name)), equal_clients(4)
    expected = piebald.run(recipe, clients, model, **begun("cpu", 4))
    with there() as device:
        piebald.run(recipe, clients, model, out=tmp_path / "run", **begun(device, 2))
        with RunStore.open_read_only(tmp_path / "run") as store:
            last = store.last_checkpoint()
        assert last is not None
        assert all(bool(one.isfinite().all()) for one in last[1].tensors.values())
        found = piebald.resume(tmp_path / "run", clients, model, rounds=4)
    assert_as_on_the_cpu(found, expected)


@pytest.mark.parametrize("name", ["fedadam", pytest.param("scaffold", marks=pytest.mark.full)])
def test_updates_that_are_not_summed_after_all_are_brought_to_the_server(
    name: str, servers: list[ServerLoop], tmp_path: Path
) -> None:
    """As where a client may go away meanwhile, so that it must not be in a sum already."""
    times = tmp_path / "times.csv"
    times.write_text("seconds_per_step,on\n0.1,0-100000\n0.1,\n0.1,\n0.1,\n")
    recipe, clients = method(name, cohort=1.0), equal_clients(4)

    def end(device: Any) -> piebald.Run:
        where = piebald.Simulator(**HERE, fleet=Trace(file=str(times))).model_copy(update={"device": str(device)})
        return piebald.run(recipe, clients, fitting(recipe), rounds=3, seed=1, runtime=where)

    expected = end("cpu")
    with there() as device:
        found = end(device)
        assert places(servers[-1]) == {device.type}
    assert_as_on_the_cpu(found, expected)
