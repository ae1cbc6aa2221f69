"""How often a device is asked for something, and how often the host waits for it: for each engine and workload."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from piebald.contracts import SumRequest
from piebald.data.partition import Lists, PooledClients
from piebald.engines.engine_choice import make_engine
from piebald.engines.stack import ClientStack, RunningSum, StackResult
from piebald.methods.aggregation.linear import EqualWeighted, ExampleWeighted, GradientNormWeighted, Linear
from piebald.methods.client_work import ClientWork
from piebald.models import build_model
from piebald.runtimes.workers.pool import serve_all
from tests.contract.conftest import method
from tests.devices.launches import Alive, Launches
from tests.devices.there import ENGINES, NAME, carry_out, there
from tests.devices.waits import Waits

ENDS = 25  # launches of a client besides its steps, at most
WAITS = 2  # of a cohort, at most, whatever its size


def mlp(_: int = 0) -> nn.Module:
    return build_model("mlp", (1, 8, 8), 10, 0)


def cnn(_: int = 0) -> nn.Module:
    return build_model("small_cnn", (1, 28, 28), 10, 0)


def wide(_: int = 0) -> nn.Module:
    """More numbers than fit into a block of a processor's cache."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8_000), nn.ReLU(), nn.Linear(8_000, 10))


WORKLOADS: dict[str, Any] = {"mlp": (mlp, 8), "cnn": (cnn, 28), "wide": (wide, 8)}


def clients_with(side: int, count: int = 8, rows: int = 20) -> PooledClients:
    draw = torch.Generator().manual_seed(0)
    x, y = (
        torch.rand(count * rows, 1, side, side, generator=draw),
        torch.randint(0, 10, (count * rows,), generator=draw),
    )
    lists = Lists(np.arange(count * rows), np.arange(0, count * rows + 1, rows))
    return PooledClients(x, y, {"train": lists, "test": lists}, classes=[*"abcdefghij"])  # type: ignore[arg-type]


def work_of(workload: str, name: str = "fedavg", epochs: int = 1) -> tuple[ClientWork, PooledClients]:
    make, side = WORKLOADS[workload]
    clients = clients_with(side)
    recipe = method(name, cohort=1, batch=10, epochs=epochs)
    return carry_out(recipe, clients=clients, model=make).work, clients


def served(
    engine: str,
    given: tuple[ClientWork, PooledClients],
    count: int,
    stack: int,
    weight: Linear | None = None,
    limit: float = float("inf"),
    spoilt: int | None = None,
) -> tuple[list[StackResult], RunningSum, Launches, Waits]:
    """Serve a cohort on the device, after one that is not counted; a spoilt client starts from what are no numbers."""
    work, clients = given
    with there() as device:
        made, models = make_engine(engine, work, clients, device, False), [work.initial] * count
        if spoilt is not None:
            models[spoilt] = torch.full_like(work.initial, torch.nan)
        state = work.initial_state()
        stacks = []
        for lo in range(0, count, stack):
            chosen = list(range(lo, min(lo + stack, count)))
            one = [0] * len(chosen)
            vectors = {name: [vector] * len(chosen) for name, vector in work.server_vectors().items()}
            states = {name: [tensor] * len(chosen) for name, tensor in state.items()}
            stacks.append(ClientStack(chosen, one, one, one, models[lo : lo + stack], vectors, states))
        request = SumRequest(weight or ExampleWeighted(), limit)
        list(serve_all(made, stacks, request, RunningSum()))
        total = RunningSum()
        with Waits() as waits, Launches() as launches:
            results = list(serve_all(made, stacks, request, total))
        sums = {name: part.cpu() for name, part in total.vectors.items()}
    total.vectors = sums
    return results, total, launches, waits


@pytest.mark.parametrize("workload", ["mlp", "wide", pytest.param("cnn", marks=pytest.mark.full)])
def test_a_client_costs_few_launches_besides_its_steps(workload: str) -> None:
    """However long its vector is: from cohorts of two and four clients, and from twice as many steps."""
    once, twice = work_of(workload), work_of(workload, epochs=2)
    two, four = (served("sequential", once, count, 1)[2].count for count in (2, 4))
    more = served("sequential", twice, 4, 1)[2].count
    assert (four - two) / 2 - (more - four) / 4 <= ENDS


@pytest.mark.parametrize("engine", ["vmapped", "sequential"])
@pytest.mark.parametrize("name", ["fedavg", pytest.param("scaffold", marks=pytest.mark.full)])
def test_the_host_waits_as_often_for_any_cohort(engine: str, name: str) -> None:
    """Whether its clients train in one stack or in many."""
    given = work_of("mlp", name)
    for count, stack in ((2, 1), (8, 1), (8, 4), (8, 8)):
        waits = served(engine, given, count, stack)[3].seen
        assert 1 <= waits.total() <= WAITS, dict(waits)


@pytest.mark.full
def test_steps_send_nothing() -> None:
    """The places of rows are sent once a client."""
    once, twice = (served("sequential", work_of("mlp", epochs=epochs), 4, 1)[3] for epochs in (1, 3))
    assert once.sent == twice.sent > 0


@pytest.mark.skipif(NAME != "pretended", reason="looks into the pretended device")
@pytest.mark.parametrize("workload", ["wide", pytest.param("cnn", marks=pytest.mark.full)])
def test_clients_one_after_another_take_the_memory_of_one(workload: str) -> None:
    """Neither gradients' graphs nor models are kept from one to the next."""
    work, clients = work_of(workload)
    most = {}
    for count in (2, 8):
        with there() as device:
            engine = make_engine("sequential", work, clients, device, False)
            stacks = [ClientStack([i], [0], [0], [0], [work.initial], {}, {}) for i in range(count)]
            with Alive() as alive:
                list(serve_all(engine, stacks, SumRequest(ExampleWeighted(), float("inf")), RunningSum()))
        most[count] = alive.most
    numbers = 64 * 8  # the few numbers of each client that wait for the host
    assert most[2] <= most[8] <= most[2] + 6 * numbers
    assert most[8] < 12 * 4 * work.layout.size + 2**20  # `engine_choice._VECTORS`, and the rows


@pytest.mark.full
@pytest.mark.parametrize("weight", [ExampleWeighted(), EqualWeighted(), GradientNormWeighted()])
@pytest.mark.parametrize("engine", ENGINES)
def test_what_cannot_count_is_left_out_as_on_the_cpu(weight: Linear, engine: str) -> None:
    """Numbers that are none, and steps that are too long or exactly as long as allowed; also all of them."""
    given = work_of("mlp")
    work, clients = given
    cpu = make_engine(engine, work, clients, torch.device("cpu"), False)

    def expected(limit: float, spoilt: int | None) -> tuple[list[StackResult], RunningSum]:
        models = [work.initial] * 4
        if spoilt is not None:
            models[spoilt] = torch.full_like(work.initial, torch.nan)
        stacks = [ClientStack([i, i + 1], [0] * 2, [0] * 2, [0] * 2, models[i : i + 2], {}, {}) for i in (0, 2)]
        total = RunningSum()
        return list(serve_all(cpu, stacks, SumRequest(weight, limit), total)), total

    plain, _ = expected(float("inf"), None)
    norms = sorted(norm for result in plain for norm in result.norms)
    norms = norms if NAME == "pretended" else [1.001 * norm for norm in norms]  # which rounds otherwise
    for limit, spoilt in ((float("inf"), None), (float("inf"), 1), (norms[1], None), (norms[0] / 2, None)):
        results, total, *_ = served(engine, given, 4, 2, weight, limit, spoilt)
        wanted, sums = expected(limit, spoilt)
        for one, other in zip(results, wanted, strict=True):
            assert one.failures == other.failures
            assert (one.steps, one.examples, one.nbytes) == (other.steps, other.examples, other.nbytes)
            np.testing.assert_allclose(one.norms, other.norms, rtol=1e-5)
            np.testing.assert_allclose(one.metrics["loss"], other.metrics["loss"], rtol=1e-5)
        assert total.weight == pytest.approx(sums.weight)
        for name, part in sums.vectors.items():
            near = 1e-7 if NAME == "pretended" else 1e-6  # a GPU adds in another order
            torch.testing.assert_close(total.vectors[name], part, rtol=10 * near, atol=near)
        assert all(bool(part.isfinite().all()) for part in total.vectors.values())
