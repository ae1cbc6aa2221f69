"""Updates that arrive and do not count: the cache goes back to exactly nothing, and a run that stands still says so."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import piebald
from piebald import recipes
from piebald.contracts import Task, Update
from piebald.core.tensor_store import TensorStore
from piebald.data.partition import Lists, PooledClients
from piebald.methods.scheduling import Asynchronous, Buffered, Deadline, Synchronous
from piebald.methods.server_optimizer import CachedAverage, ServerSgd
from piebald.server.cluster_state import ModelCache
from tests.fakes import FakeRuntime, few, make_server, update
from tests.methods.test_metis import recipe


def cache(size: int = 3) -> ModelCache:
    return ModelCache(size, TensorStore())


def test_a_cache_whose_weights_have_all_become_0_is_exactly_empty() -> None:
    """Before, 2e-17 of weight was left over from 0.1 + 0.2 + 0.7 and the "model" was rounding divided by it."""
    made, out = cache(), torch.full((3,), 7.0)
    for client, weight in enumerate((0.1, 0.2, 0.7)):
        made.swap(client, weight, torch.tensor([1 / 3, 1e8, -0.1]) * (client + 1), out)
    before = out.clone()
    for client in (1, 0, 2):
        made.swap(client, 0.0, torch.full((3,), 5.0), out if client == 2 else None)
    assert made.whole == 0.0
    assert made.sums.tolist() == [0.0, 0.0, 0.0]
    assert out.equal(before)  # nothing was written
    made.swap(0, 0.25, torch.full((3,), 0.1), out)
    assert out.tolist() == torch.full((3,), 0.1).tolist()  # the only model that counts, to the last bit


@few
@example([(0, 1e9), (1, 1e-12), (0, 0.0)])
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 1e-12, 1e-3, 1.0, 1e9])), min_size=1, max_size=40))
def test_what_is_gone_leaves_nothing_behind(swaps: list[tuple[int, float]]) -> None:
    """However much larger the weights were before.  Before, a weight of 1e-12 beside one of 1e9 was lost for ever."""
    made, out, last = cache(1), torch.zeros(1), dict[int, tuple[float, float]]()
    for number, (client, weight) in enumerate(swaps):
        value = float(torch.tensor(1 + number / 7))
        made.swap(client, weight, torch.full((1,), value), out)
        last[client] = weight, value
    whole = sum(weight for weight, _ in last.values())
    if whole:
        assert out.item() == pytest.approx(sum(weight * value for weight, value in last.values()) / whole, rel=1e-6)
    else:
        assert made.whole == 0.0


def test_a_cache_that_was_restored_goes_on_to_the_same_bits() -> None:
    first, out = cache(), torch.empty(3)
    for client, weight in ((2, 1e9), (0, 0.1), (1, 0.3)):
        first.swap(client, weight, torch.rand(3), out)
    second = ModelCache(3, first.store)
    second.restore(*first.state())
    ends = []
    for one in (first, second):
        model = torch.empty(3)
        one.swap(2, 0.0, torch.rand(3), model)  # falls so far that the sums are formed anew
        ends.append(model)
        one.swap(2, 0.0, torch.rand(3))
    assert ends[0].equal(ends[1])


MODES: dict[str, dict[str, Any]] = {
    "sync": {"scheduling": Synchronous(), "server_optimizer": ServerSgd()},
    "deadline": {"scheduling": Deadline(seconds=50.0), "server_optimizer": ServerSgd()},
    "async": {"scheduling": Asynchronous(), "server_optimizer": ServerSgd()},
    "buffered": {"scheduling": Buffered(buffer_size=3), "server_optimizer": ServerSgd()},
    "cached": {"scheduling": Asynchronous(), "server_optimizer": CachedAverage()},
    "cached rounds": {"scheduling": Synchronous(), "server_optimizer": CachedAverage()},
}


def run_with(weight: float, mode: str, rounds: int = 30) -> tuple[Any, list[Any]]:
    def answer(task: Task) -> Update:
        return update(1.0, 1.0, 1.0, examples=int(weight))

    runtime = FakeRuntime(3, answer, delay=lambda a: [1.0, 2.0, 5.0][a.client])
    server, recorder = make_server(
        recipe(aggregation={"kind": "example_weighted"}, **MODES[mode]), runtime, rounds=rounds
    )
    server.run()
    return server, [note for note in recorder.notes if note["name"] == "stalled"]


@pytest.mark.parametrize("mode", MODES)
def test_a_run_in_which_no_update_counts_says_so_once(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """Before, nothing was said in any mode."""
    with caplog.at_level(logging.WARNING, "piebald"):
        server, notes = run_with(0, mode)
    assert len(notes) == 1
    assert notes[0]["value"] in caplog.text
    assert "no update has counted in the last" in notes[0]["value"]
    assert caplog.text.count("no update has counted") == 1
    assert server.cluster_models.main.model.tolist() == [0.0] * 3


@pytest.mark.parametrize("mode", MODES)
def test_a_run_whose_updates_count_is_quiet(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "piebald"):
        _, notes = run_with(1, mode)
    assert not notes
    assert not caplog.text


def test_rounds_in_which_every_task_fails_are_told_too(caplog: pytest.LogCaptureFixture) -> None:
    """Two rounds count, then every task fails."""
    runtime = FakeRuntime(2, lambda task: update(1.0, 1.0, 1.0) if task.version < 2 else None, delay=lambda _: 1.0)
    server, recorder = make_server(recipe(scheduling=Synchronous()), runtime, rounds=9)
    with caplog.at_level(logging.WARNING, "piebald"):
        server.run()
    notes = [note["value"] for note in recorder.notes if note["name"] == "stalled"]
    assert len(notes) == 1
    assert "in the last 3 server steps (every task failed)" in notes[0]


def test_a_resumed_run_counts_on_and_does_not_repeat_itself() -> None:
    server, notes = run_with(0, "sync", rounds=2)
    assert not notes
    runtime = FakeRuntime(3, lambda task: update(1.0, 1.0, 1.0, examples=0))
    again, recorder = make_server(
        recipe(aggregation={"kind": "example_weighted"}, scheduling=Synchronous()), runtime, rounds=9
    )
    again.restore(server.state())
    again.run()
    assert len([note for note in recorder.notes if note["name"] == "stalled"]) == 1
    assert "in the last 3 server steps" in next(note["value"] for note in recorder.notes if note["name"] == "stalled")


def one_class_each() -> PooledClients:
    """Three clients that train on a class of their own each, and validate on all three."""
    draw = np.random.default_rng(0)
    y = np.concatenate([np.repeat(np.arange(3), 20), np.arange(18) % 3])
    x = draw.normal(size=(78, 3)).astype(np.float32)
    lists = {
        "train": Lists(np.arange(60), np.arange(0, 61, 20)),
        "validation": Lists(60 + np.arange(18), np.arange(0, 19, 6)),
    }
    return PooledClients(torch.from_numpy(x), torch.from_numpy(y), lists, classes=list("abc"))


@pytest.mark.parametrize("made", ["sync_dvw", "async_dvw"])
def test_geometric_means_of_clients_that_miss_a_class_are_told(made: str, caplog: pytest.LogCaptureFixture) -> None:
    """A model of one class has recall 0 on the others, so its geometric mean is 0 and the global model stays."""
    with caplog.at_level(logging.WARNING, "piebald"):
        run = piebald.run(
            recipes.make(made, score="geometric_mean", lr=5.0, epochs=20), one_class_each(), nn.Linear(3, 3), rounds=12,
            evaluate_every=0, runtime=piebald.Simulator(engine="sequential", workers=0),
        )  # fmt: skip
    assert all(row["raw_weight"] == 0 for row in run.results if row["kind"] == "train")
    assert [note["name"] for note in run.notes] == ["stalled"]
    assert "no update has counted" in caplog.text
