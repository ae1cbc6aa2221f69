"""Client state on Ray's state actors: the same as in one process, also where actors are killed."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import piebald
from piebald.contracts import Task
from piebald.core.errors import RuntimeFault
from piebald.data.partition import FastSlow
from piebald.runtimes.ray import state_actors
from piebald.runtimes.ray.actors import RayWorkerPool
from piebald.runtimes.ray.connection import RayConnection
from piebald.runtimes.ray.state_actors import StateActor, StateActorRing, StateActors
from piebald.runtimes.workers.state_store import ClientStateStore
from piebald.storage.store import RunStore

from .conftest import TWO, assert_same, carry_out, federation, fitting, method, on_ray
from .test_resume import assert_identical

FLEET = FastSlow(fast=1.0, slow_factor=2.5, share_slow=0.4)
LATE = method("hdafl").with_(scheduling={"kind": "asynchronous", "cohort": 3})  # results wait while others arrive

# ------------------------------------------------------------------------------------------------------ without a Ray


class Gone(Exception):
    """What a caller meets whose actor is dead."""


class FakeRay:
    """State actors in this process that die on command, in place of Ray and of a connection."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self.calls, self.deadly = 0, set[int]()
        self.alive: list[Any] = []
        self.resting: list[Any] = []
        self.nodes = lambda: list(nodes)
        self.chance = random.Random(5)

    def start_on(self, node: str, kind: type) -> Any:
        if self.resting:
            return self.resting.pop()
        self.alive.append(_Handle(self, kind()))
        return self.alive[-1]

    def rest_on(self, node: str, actor: Any) -> None:
        self.stop(actor)

    def stop(self, actor: Any) -> None:
        self.alive = [one for one in self.alive if one is not actor]

    def answer(self, reference: Any) -> tuple[bool, Any]:
        return not isinstance(reference, Gone), reference

    def put(self, value: Any) -> Any:
        return value

    def get(self, references: Sequence[Any]) -> list[Any]:
        for one in references:
            if isinstance(one, Gone):
                raise one
        return list(references)

    def call(self, handle: Any, name: str, arguments: Sequence[Any]) -> Any:
        self.calls += 1
        if self.calls in self.deadly and self.alive:
            self.alive.remove(self.chance.choice(self.alive))
        lost = handle not in self.alive or any(isinstance(one, Gone) for one in arguments)
        return Gone() if lost else getattr(handle.actor, name)(*arguments)


class _Handle:
    def __init__(self, fake_ray: FakeRay, actor: StateActor) -> None:
        self.fake_ray, self.actor = fake_ray, actor

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self.fake_ray.call(self, name, arguments))


def some_work() -> Any:
    layout = SimpleNamespace(shared=6, size=10)
    made = SimpleNamespace(
        layout=layout, initial_state=lambda: {"control": torch.zeros(layout.shared)}, initial=torch.arange(10.0)
    )
    made.of = lambda client: made
    return made


def train(state_store: ClientStateStore, tasks: Sequence[Task]) -> None:
    """Each client's state grows by its task's number: on state actors as an actor that trains would do it."""
    if not isinstance(state_store, StateActors):
        for one in tasks:
            state_store.hold(one, {name: tensor + one.id for name, tensor in state_store.recall(one).items()})
        return
    told = [dict(enumerate(state_store.recall(one).values())) for one in tasks]
    ring = StateActorRing(state_store.ready().state_actors)
    clients = {~one.id: one.client for one in tasks}
    while True:
        try:
            seen = [ring.fill_in(tensors) for tensors in told]
            entries = {
                ~one.id: {"control": torch.as_tensor(first) + one.id, "private": torch.as_tensor(second) + one.id}
                for one, (first, second) in zip(tasks, (each.values() for each in seen), strict=True)
            }
            ring.ray.get(ring.write(entries, clients))
            return
        except Gone:
            state_store.repair()
            ring = StateActorRing(state_store.ring.state_actors)


def story(state_store: ClientStateStore) -> list[dict[str, Tensor]]:
    """Checkpoints of a run in which results arrive late, in disorder, and sometimes do not count."""
    chance, waiting, told = random.Random(3), [], []
    state_store.restore({"client_state/3/control": torch.ones(6), "client_state/3/private": torch.ones(4)})
    early = Task(1000, 4, 0, {})
    state_store.hold(early, {"control": torch.ones(6), "private": torch.ones(4)})
    for step in range(12):
        asked = [Task(10 * step + place, chance.randrange(7), step, {}) for place in range(4)]
        train(state_store, asked)
        waiting += asked
        chance.shuffle(waiting)
        for one in waiting[:3]:
            state_store.settle(one, kept=chance.random() < 0.7)
        del waiting[:3]
        if step % 3 == 2:
            held = state_store.held([*waiting, early])
            flat = {f"{id}/{name}": tensor for id, own in held.items() for name, tensor in own.items()}
            told.append(state_store.changed() | flat)
    state_store.close()
    return told


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeRay]:
    def make(nodes: Sequence[str] = ("a", "b", "c"), deadly: Sequence[int] = ()) -> FakeRay:
        made = FakeRay(nodes)
        made.deadly = set(deadly)
        monkeypatch.setattr(state_actors, "imported", lambda: made)
        return made

    return make


def on_actors(fake_ray: FakeRay, budget: int = 1 << 20) -> StateActors:
    return StateActors(some_work(), budget, lambda: fake_ray)  # type: ignore[arg-type, return-value]


def assert_same_checkpoints(expected: Sequence[dict[str, Tensor]], told: Sequence[dict[str, Tensor]]) -> None:
    for one, two in zip(expected, told, strict=True):
        assert one.keys() == two.keys()
        assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_actors_keep_what_one_process_would(fake_ray: Callable[..., FakeRay], count: int) -> None:
    assert_same_checkpoints(
        story(ClientStateStore(some_work(), 1 << 20)), story(on_actors(fake_ray([str(node) for node in range(count)])))
    )


@pytest.mark.parametrize("budget", [0, 100])
def test_an_actor_without_room_writes_to_its_disk(fake_ray: Callable[..., FakeRay], budget: int) -> None:
    made = fake_ray()
    state_store = on_actors(made, budget)
    train(state_store, [Task(id, id, 0, {}) for id in range(9)])
    assert all(one.actor.store._far for one in made.alive)
    assert_same_checkpoints(story(ClientStateStore(some_work(), 1 << 20)), story(on_actors(fake_ray(), budget)))


@pytest.mark.parametrize("count", [1, 3, 4])
def test_any_actor_may_die_at_any_call(fake_ray: Callable[..., FakeRay], count: int) -> None:
    """Deaths far enough from one another to fill the new actor, at each call in turn."""
    nodes = [str(node) for node in range(count)]
    expected = story(ClientStateStore(some_work(), 1 << 20))
    quiet = fake_ray(nodes)
    story(on_actors(quiet))
    for first in range(1, quiet.calls, 3):
        assert_same_checkpoints(expected, story(on_actors(fake_ray(nodes, range(first, 10 * quiet.calls, 60)))))


@pytest.mark.full
@pytest.mark.parametrize("count", [2, 3, 5])
def test_two_that_die_close_together_end_the_run_or_change_nothing(
    fake_ray: Callable[..., FakeRay], count: int
) -> None:
    """Also where the second dies while the first one's successor is filled from it."""
    nodes, ended = [str(node) for node in range(count)], 0
    expected = story(ClientStateStore(some_work(), 1 << 20))
    for first in range(60, 100):
        for apart in (1, 2, 3, 5, 8, 13):
            made = fake_ray(nodes, [first, first + apart])
            made.chance = random.Random(first)
            try:
                told = story(on_actors(made))
            except RuntimeFault:
                ended += 1
            else:
                assert_same_checkpoints(expected, told)
    assert ended


def test_two_neighbours_at_once_end_the_run_with_one_sentence(fake_ray: Callable[..., FakeRay]) -> None:
    made = fake_ray(["a", "b"])
    state_store = on_actors(made)
    train(state_store, [Task(0, 0, 0, {})])
    made.alive.clear()
    with pytest.raises(RuntimeFault, match=r"died at once: continue from the last checkpoint with `piebald resume`"):
        state_store.ready()


def test_actors_that_always_die_are_given_up(fake_ray: Callable[..., FakeRay]) -> None:
    with pytest.raises(RuntimeFault, match="died 5 times in a row"):
        on_actors(fake_ray(["a"], range(1, 1000))).ready()


def test_actors_that_died_while_they_were_idle(fake_ray: Callable[..., FakeRay]) -> None:
    """A run takes up dead ones, with tasks at hand or a checkpoint to restore, and starts others."""
    expected = story(ClientStateStore(some_work(), 1 << 20))
    for nodes in (["a"], ["a", "b", "c"]):
        made = fake_ray(nodes)
        made.resting = [_Handle(made, StateActor()) for _ in range(4)]
        assert_same_checkpoints(expected, story(on_actors(made)))
        made.resting = [_Handle(made, StateActor()) for _ in range(4)]
        train(on_actors(made), [Task(0, 0, 0, {})])


def test_a_trainer_that_drops_its_state_is_an_error(fake_ray: Callable[..., FakeRay]) -> None:
    state_store = on_actors(fake_ray())
    state_store.restore({"client_state/3/control": torch.ones(6)})
    with pytest.raises(RuntimeFault, match="left without 'private' in its state"):
        train(state_store, [Task(0, 3, 0, {})])


def test_copies_lie_on_different_nodes(fake_ray: Callable[..., FakeRay]) -> None:
    for count in (2, 3, 4):
        state_store = on_actors(fake_ray([str(node) for node in range(count)]))
        state_store.ready()
        assert sorted(state_store._nodes.values()) == [str(node) for node in range(count)]


# ----------------------------------------------------------------------------------------------------------- on a Ray


def state_actor_processes() -> list[int]:
    """The state actors of this machine, by the name that Ray gives their processes."""
    found = []
    for place in sorted(Path("/proc").glob("[0-9]*/cmdline")):
        try:
            if place.read_bytes().startswith(b"ray::StateActor"):
                found.append(int(place.parent.name))
        except OSError:  # it has just ended
            continue
    return found


def at_call(patch: pytest.MonkeyPatch, owner: type, name: str, number: int, what: Callable[[], None]) -> list[int]:
    """Do something before a method's call of this number; returns the count of calls."""
    real, calls = getattr(owner, name), [0]

    def wrapped(*arguments: Any, **more: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            what()
        return real(*arguments, **more)

    patch.setattr(owner, name, wrapped)
    return calls


def kill(count: int) -> Callable[[], None]:
    def what() -> None:
        found = state_actor_processes()
        assert len(found) >= count
        for process in found[:count]:
            os.kill(process, signal.SIGKILL)

    return what


OPTIONS: dict[str, Any] = {"rounds": 8, "seed": 1, "checkpoint_every": 1, "evaluate_every": 4}


def late(out: Path | None = None) -> piebald.Run:
    return on_ray(LATE, out=out, ray={"fleet": FLEET}, **OPTIONS)


@pytest.fixture(scope="module")
def whole(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> piebald.Run:
    """What comes of it undisturbed."""
    return late(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def three(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were a third node, so that not every actor has everything."""
    real = RayConnection.nodes
    monkeypatch.setattr(RayConnection, "nodes", lambda self: [*real(self), real(self)[0]])


INTERRUPTIONS = {
    "a chunk is sent": (RayWorkerPool, "_send", 8),
    "a result counts": (StateActors, "settle", 5),
    "a checkpoint reads what changed": (StateActors, "_fetched", 3),
    "actors write": (RayWorkerPool, "_serve_chunks", 6),
}


@pytest.mark.long
@pytest.mark.parametrize("interruption", INTERRUPTIONS)
def test_an_actor_killed_in_mid_run_loses_nothing(
    three: None, whole: piebald.Run, interruption: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, number = INTERRUPTIONS[interruption]
    with monkeypatch.context() as patch:
        calls = at_call(patch, owner, name, number, kill(1))
        disturbed = late(tmp_path / "disturbed")
    assert calls[0] > number
    assert_identical(whole, disturbed)


@pytest.mark.long
def test_all_killed_and_resumed(whole: piebald.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        at_call(patch, RayWorkerPool, "_serve_chunks", 8, lambda: kill(len(state_actor_processes()))())
        with pytest.raises(RuntimeFault, match="piebald resume"):
            late(tmp_path / "killed")
    resumed = piebald.resume(tmp_path / "killed", federation(), fitting(LATE))
    assert_identical(whole, resumed)


@pytest.mark.long
@pytest.mark.parametrize("there", ["simulator", "ray"])
def test_a_run_goes_on_where_the_other_runtime_stopped(
    whole: piebald.Run, there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With results under way that are not yet in the client state."""

    def stop() -> None:
        raise KeyboardInterrupt

    runtimes = {"ray": piebald.Ray(**TWO, fleet=FLEET), "simulator": piebald.Simulator(**TWO, fleet=FLEET)}
    with monkeypatch.context() as patch:
        at_call(patch, RunStore, "commit", 5, stop)
        with pytest.raises(KeyboardInterrupt):
            piebald.run(LATE, federation(), fitting(LATE), runtime=runtimes.pop(there), out=tmp_path / "run", **OPTIONS)
    with RunStore.open(tmp_path / "run") as store:
        store.set_meta(runtime=runtimes.popitem()[1].table())
    assert_same(whole, piebald.resume(tmp_path / "run", federation(), fitting(LATE)))


@pytest.mark.long
def test_a_tiny_budget_changes_nothing(cluster: Any) -> None:
    assert_same(carry_out(method("ditto")), on_ray(method("ditto"), ray={"memory": 0}))


def traffic(patch: pytest.MonkeyPatch, recipe: Any) -> tuple[int, int]:
    """Bytes of arrays that went to and from actors after the first contact with everybody."""
    seen = {"down": 0, "up": 0}
    real = RayWorkerPool._serve_chunks

    def carry_out(self: RayWorkerPool, chunks: Any, sum_request: Any) -> Any:
        answers = real(self, chunks, sum_request)
        own = [array for chunk in chunks for array in [*chunk.own.values(), *chunk.shared] if hasattr(array, "nbytes")]
        seen["down"] += sum(array.nbytes for array in own)
        seen["up"] += sum(array.nbytes for answer in answers for array in answer["arrays"].values())
        totals.append((seen["down"], seen["up"]))
        return answers

    totals: list[tuple[int, int]] = []
    patch.setattr(RayWorkerPool, "_serve_chunks", carry_out)
    on_ray(recipe, rounds=6, evaluate_every=0)
    first, last = totals[0], totals[-1]
    return last[0] - first[0], last[1] - first[1]


@pytest.mark.long
def test_no_client_state_passes_through_the_driver(cluster: Any) -> None:
    """Ditto's personal models are as long as the model, and pass as little through the driver as nothing at all."""
    with pytest.MonkeyPatch.context() as patch:
        plain = traffic(patch, method("fedavg", cohort=5))
    with pytest.MonkeyPatch.context() as patch:
        assert traffic(patch, method("ditto", cohort=5)) == plain


@pytest.mark.long
def test_without_client_state_no_state_actor_is_started(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs before may have left some that rest."""
    calls = at_call(monkeypatch, RayConnection, "start_on", 1, lambda: None)
    on_ray(method("fedavg"))
    assert calls[0] == 0
    on_ray(method("ditto"))
    assert calls[0] == 2


@pytest.mark.long
def test_a_run_goes_on_from_a_finished_one_with_the_state_of_its_clients(cluster: Any, tmp_path: Path) -> None:
    """The next checkpoint holds that of all clients, also of those that were not asked since."""
    recipe = method("hdafl")
    carry_out(recipe, out=tmp_path / "before").close()
    more: dict[str, Any] = {"start_from": tmp_path / "before", "rounds": 1, "checkpoint_every": 1}
    expected, made = (run(recipe, out=tmp_path / run.__name__, **more) for run in (carry_out, on_ray))
    assert_same(expected, made)
    states = [run._store.checkpoint_of(1).tensors for run in (expected, made)]
    assert {name for name in states[0] if name.startswith("client_state/")} == {
        name for name in states[1] if name.startswith("client_state/")
    }
