"""The simulator: its virtual clock against times by hand, clients' state, and errors that name the client."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piebald
from piebald import recipes
from piebald.contracts import Device, TrainOutput
from piebald.core.errors import RuntimeFault, SettingError
from piebald.core.metrics import cross_entropy
from piebald.data.partition import Devices, FastSlow, Homogeneous, PooledClients
from piebald.methods.training import Sgd
from piebald.report.tables import History
from piebald.runtimes.simulation.simulation import Simulation
from piebald.runtimes.workers.serialization import PARTS, Arena
from tests.fakes import classified, federation, seeded, simulate

ROOT = Path(__file__).parents[2]


class Listed(Devices):
    """A device for each client, by its seconds a step."""

    seconds: tuple[float, ...] = ()

    def device(self, client: int) -> Device:
        return self._device(self.seconds[client])


SIZES = (5, 2, 9)  # with batches of 2: 3, 1 and 5 steps
STEPS = (3, 1, 5)
MODEL = seeded(lambda: nn.Linear(4, 2))  # 10 numbers, 40 bytes
ASYNCHRONOUS = {"kind": "asynchronous", "cohort": 1.0}


def timed(recipe: Any, fleet: Any, *, sizes: tuple[int, ...] = SIZES, model: Any = MODEL, **options: Any) -> Any:
    return simulate(recipe, classified(*sizes), model, simulator={"fleet": fleet}, **options)


# ---------------------------------------------------------------------------------------------------------------- clock


@pytest.mark.parametrize("engine", ["sequential", "vmapped"])
def test_result_times_by_hand(engine: str) -> None:
    """Latency, 40 bytes down, the steps, latency, 40 bytes up; the next round begins when the slowest is there."""
    fleet = Listed(seconds=(1.0, 2.0, 0.5), down=20.0, up=8.0, latency=0.25)
    spent = [0.25 + 40 / 20 + steps * each + 0.25 + 40 / 8 for steps, each in zip(STEPS, fleet.seconds, strict=True)]
    recipe = recipes.fedavg(batch=2)
    run = simulate(recipe, classified(*SIZES), MODEL, simulator={"fleet": fleet, "engine": engine}, rounds=3)
    for number, step in enumerate(run.rounds):
        began = number * max(spent)
        rows = [row for row in run.results if row["version"] == step["version"]]
        assert [(row["sent"], row["time"]) for row in rows] == [
            (pytest.approx(began), pytest.approx(began + own)) for own in spent
        ]
        assert step["time"] == pytest.approx(began + max(spent))


def test_asynchronous_clients_keep_their_own_time() -> None:
    fleet = Listed(seconds=(1.0, 2.03, 0.51), latency=0.25)  # never two at one instant
    spent = [0.5 + steps * each for steps, each in zip(STEPS, fleet.seconds, strict=True)]  # 3.5, 2.53, 3.05
    run = timed(recipes.fedavg(batch=2).with_(scheduling=ASYNCHRONOUS), fleet, rounds=20)
    for client, own in enumerate(spent):
        times = [row["time"] for row in run.results if row["client"] == client]
        assert times == pytest.approx([own * (count + 1) for count in range(len(times))])
    rows = sorted(run.results, key=lambda row: row["version"])
    assert [row["time"] for row in rows] == sorted(row["time"] for row in rows)
    version_at = {0.0: 0}
    for row in rows:
        assert row["sent_version"] == version_at[row["sent"]]
        assert row["staleness"] == row["version"] - 1 - row["sent_version"]
        version_at[row["time"]] = row["version"]


def test_private_numbers_take_time_at_the_first_contact_only() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))  # 15 shared numbers, 8 private ones
    run = timed(recipes.hdafl(batch=2), Homogeneous(down=10.0, up=20.0), model=model, rounds=2)
    first, second = (15 + 8) * 4 / 10 + 15 * 4 / 20, 15 * 4 / 10 + 15 * 4 / 20
    assert [row["time"] for row in run.results] == pytest.approx([first] * 3 + [first + second] * 3)


@pytest.mark.parametrize("scheduling", [{"kind": "synchronous"}, ASYNCHRONOUS], ids=lambda one: one["kind"])
def test_measuring_takes_no_time_and_changes_nothing(scheduling: dict[str, Any]) -> None:
    fleet = FastSlow(fast=1.0, slow_factor=2.0, latency=0.5, down=100.0)
    recipe = recipes.ditto(batch=2).with_(scheduling=scheduling)
    runs = [timed(recipe, fleet, rounds=6, evaluate_every=every) for every in (0, 1, 4)]
    assert len({tuple((row["client"], row["sent"], row["time"]) for row in run.results) for run in runs}) == 1
    assert all(torch.equal(run.model().weight, runs[0].model().weight) for run in runs)
    assert not runs[0].scores
    assert {row["version"] for row in runs[2].scores} == {0, 4, 6}


class Hurried(Sgd):
    """Training that might end a step earlier than it does, as far as a simulator can tell before."""

    def min_steps(self, examples: int) -> int:
        return max(1, super().min_steps(examples) - 1)


def test_queries_find_the_state_of_trainings_that_ended_before_whatever_is_computed_together() -> None:
    """Before, queries were begun with trainings that waited, so that stacks decided which state they found."""
    fleet = Homogeneous(seconds_per_step=1.0)  # clients have 1 to 3 steps, so that several are often done at once
    sharing = {"kind": "all_except", "private_layers": "1"}
    recipe = recipes.fedavg().with_(training=Hurried(batch=2), scheduling=ASYNCHRONOUS | {"cohort": 3}, sharing=sharing)
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    runs = [
        simulate(recipe, classified(4, 6, 2, 4, 6, 2), model, simulator={"fleet": fleet, "stack": stack}, rounds=12)
        for stack in (1, 3)
    ]
    assert len(runs[0].scores) == len(runs[1].scores) > 6 * 12
    assert runs[0].scores == runs[1].scores


def test_a_slow_device_takes_its_factor() -> None:
    fleet = FastSlow(fast=1.0, slow_factor=3.0, share_slow=0.5)
    run = timed(recipes.fedavg(batch=2).with_(scheduling=ASYNCHRONOUS), fleet, sizes=(4, 4, 4, 4), rounds=60)
    counts = [sum(row["client"] == client for row in run.results) for client in range(4)]
    for client in range(4):
        ends = [row["time"] for row in run.results if row["client"] == client]
        assert ends[0] == (6.0 if fleet.is_slow(client) else 2.0)
    slow = [counts[client] for client in range(4) if fleet.is_slow(client)]
    fast = [counts[client] for client in range(4) if not fleet.is_slow(client)]
    assert len(slow) == len(fast) == 2
    assert all(abs(f - 3 * s) <= 3 for f in fast for s in slow)


def test_clients_are_asked_within_their_intervals_only() -> None:
    """A task under way ends when its device goes off."""
    on = ((2.0, 4.0), (10.0, 11.0), (30.0, 99.0))
    run = timed(recipes.fedavg(batch=9), Homogeneous(seconds_per_step=1.5, on=on), rounds=5)
    # 2 and 3.5 in the first interval, 10 in the second, 30 and 31.5 in the third; a step from 3.5 or 10 is too late
    assert sorted({row["sent"] for row in run.results}) == [2.0, 3.5, 10.0, 30.0, 31.5]
    assert [row["time"] for row in run.rounds] == [3.5, 4.0, 11.0, 31.5, 33.0]
    assert [row["arrived"] > 0 for row in run.rounds] == [True, False, False, True, True]


def test_the_error_when_no_device_comes_on_again() -> None:
    with pytest.raises(RuntimeFault, match="no client can be asked and none is under way"):
        timed(recipes.fedavg(batch=9), Homogeneous(seconds_per_step=1.0, on=((0.0, 1.5),)), rounds=9)


# ------------------------------------------------------------------------------------------------------------- drop-out


def test_all_are_lost(tmp_path: Path) -> None:
    with pytest.raises(RuntimeFault, match="in 3 rounds no update counted"):
        timed(
            recipes.fedavg(batch=2),
            Homogeneous(dropout=1.0, down=20.0, latency=0.5),
            rounds=3,
            out=tmp_path / "run",
        )
    run = History(tmp_path / "run")
    assert run.meta["status"] == "failed"
    assert all((row["status"], row["reason"]) == ("lost", "lost") for row in run.results)
    assert all((row["bytes_down"], row["bytes_up"]) == (40, 0) for row in run.results)
    assert [row["time"] for row in run.rounds] == pytest.approx([2.5, 5.0, 7.5])
    assert {(row["version"], row["client"]) for row in run.scores} == {(v, c) for v in range(4) for c in range(3)}


@pytest.mark.full
def test_lost_tasks_have_the_right_share_and_depend_on_client_and_round_only() -> None:
    """400 tasks at 0.3: 120 are lost, give or take 5 standard deviations of 9.2; the same for every recipe."""
    fleet = Homogeneous(dropout=0.3)
    lost = []
    for method in ("fedavg", "scaffold"):
        run = timed(recipes.make(method, batch=2), fleet, sizes=(2,) * 40, rounds=10, evaluate_every=0)
        lost.append({(row["version"], row["client"]) for row in run.results if row["status"] == "lost"})
    assert lost[0] == lost[1]
    assert abs(len(lost[0]) - 120) < 5 * 9.2
    assert len({client for _, client in lost[0]}) > 30
    other = timed(recipes.fedavg(batch=2), fleet, sizes=(2,) * 40, rounds=10, evaluate_every=0, seed=1)
    assert {(row["version"], row["client"]) for row in other.results if row["status"] == "lost"} != lost[0]


# --------------------------------------------------------------------------------------------------------- client state


@pytest.mark.parametrize("method", ["ditto", "hdafl", "scaffold"])
def test_client_state_on_disk_is_the_same(method: str) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    runs = [
        simulate(recipes.make(method, cohort=3, batch=4), classified(5, 7, 4, 6), model, rounds=5, simulator=where)
        for where in ({"memory": 0}, {"memory": 200}, {})
    ]
    assert runs[0].scores == runs[1].scores == runs[2].scores
    assert torch.equal(runs[0].model()[0].weight, runs[2].model()[0].weight)


POPULATION = """
import json
import numpy as np, torch
import piebald
from piebald import recipes

asked = set()
def load(client):
    asked.add(client)
    draw = np.random.default_rng(client)
    return draw.normal(size=(10, 20)).astype(np.float32), draw.integers(0, 2, 10)

clients = piebald.LazyClients(1_000_000, load)
model = torch.nn.Sequential(torch.nn.Linear(20, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
run = piebald.run(
    recipes.hdafl(cohort=100), clients, model, rounds=2, evaluate_clients=50, evaluate_every=9,
    runtime=piebald.Simulator(engine="sequential", workers=0),
)
took = {row["client"] for row in run.results}
scored = {row["client"] for row in run.scores if row["client"] is not None}
# `getrusage` would count what the process that forked this one held
peak = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([len(run.results), len(took), len(scored), sorted(asked - took - scored), peak]))
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_million_clients_of_which_a_hundred_take_part() -> None:
    """Only those that took part or were scored are loaded (and the first, to see what rows look like)."""
    code = [sys.executable, "-c", POPULATION]
    done = subprocess.run(code, cwd=ROOT, capture_output=True, text=True, check=True)
    results, took, scored, others, peak = json.loads(done.stdout)
    assert (results, scored) == (200, 50)
    assert 190 < took <= 200
    assert set(others) <= {0}
    assert peak < 4 << 30


# --------------------------------------------------------------------------------------------------------------- errors

POISON = 1e6  # every number of a row that the model fails on
HERE = os.getpid()


def poisoned(client: int, *sizes: int) -> PooledClients:
    """Clients of these sizes; every row of one of them is marked."""
    pairs = []
    clean = classified(*sizes)
    for number in range(len(sizes)):
        rows = clean.rows(number, "train")
        y = rows.y.clone()
        pairs.append((rows.x, torch.full_like(y, 2) if number == client else y))
    names = [f"site {number}" for number in range(len(sizes))]
    made = federation(*pairs, classes=["no", "yes", "trouble"])
    made.names = names
    return made


def stumbling(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of two classes, which fails on a third."""
    if bool((targets == 2).any()):
        raise ZeroDivisionError("no such class")
    return cross_entropy(outputs, targets)


WHERE = [{"engine": "sequential"}, {"engine": "sequential", "stack": 3}, {"engine": "sequential", "workers": 2}]


def failures(run: piebald.Run) -> list[tuple[str, str, str]]:
    return [(row["name"], row["kind"], row["reason"]) for row in run.failures if row["client"] >= 0]


@pytest.mark.parametrize("simulator", WHERE, ids=str)
def test_a_loss_that_fails_leaves_out_the_client(simulator: dict[str, Any]) -> None:
    """The others train as they would without it."""
    options: dict[str, Any] = {"loss": stumbling, "evaluate_every": 0, "simulator": simulator, "rounds": 1}
    run = simulate("fedavg", poisoned(2, 5, 6, 7, 8), seeded(lambda: nn.Linear(4, 2)), **options)
    assert failures(run) == [("site 2", "train", "ZeroDivisionError at the client: no such class")]
    assert sorted(row["client"] for row in run.results if row["status"] == "ok") == [0, 1, 3]


@pytest.mark.parametrize("simulator", WHERE, ids=str)
def test_a_metric_that_fails_leaves_a_client_unscored(simulator: dict[str, Any]) -> None:
    def metric(outputs: Tensor, targets: Tensor) -> Tensor:
        return stumbling(outputs, targets)

    model = nn.Linear(4, 3)
    run = simulate("fedavg", poisoned(2, 5, 6, 7, 8), model, metrics={"own": metric}, simulator=simulator)
    assert failures(run)[0] == ("site 2", "evaluate", "ZeroDivisionError at the client: no such class")
    assert run.unscored == ["site 2"]


def test_a_model_that_fails_leaves_out_the_client() -> None:
    class Fussy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if bool((x > POISON / 2).any()):
                raise ValueError("that is too much")
            return super().forward(x)

    clients = classified(5, 6, 7)
    clients.x[-1] = POISON  # the last row is client 2's
    run = simulate("fedavg", clients, Fussy(4, 2), evaluate_every=0)
    assert failures(run) == [("client 2", "train", "ValueError at the client: that is too much")]


def test_a_model_that_cannot_take_the_rows_is_refused_first() -> None:
    with pytest.raises(SettingError, match=r"the model fails on an input of shape \[4\]"):
        simulate("fedavg", classified(5, 6), nn.Linear(3, 2))
    with pytest.raises(SettingError, match=r"the model cannot be trained on these rows \(inputs float32 \[4, 4\]"):
        simulate("fedavg", classified(5, 6), nn.Linear(4, 2), loss="multilabel")


@pytest.mark.parametrize("engine", ["sequential", "batched", "vmapped"])
def test_a_loss_that_fails_on_the_first_clients_rows_leaves_it_out(engine: str) -> None:
    """Although the first client's rows are those that a model is tried on."""
    options: dict[str, Any] = {"evaluate_every": 0, "simulator": {"engine": engine, "stack": 3}}
    run = simulate("fedavg", poisoned(0, 5, 6, 7), nn.Linear(4, 2), loss=stumbling, **options)
    assert failures(run) == [("site 0", "train", "ZeroDivisionError at the client: no such class")]


def test_a_model_that_fails_on_the_first_clients_rows_leaves_it_out() -> None:
    class Fussy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if bool((x > POISON / 2).any()):
                raise ValueError("that is too much")
            return super().forward(x)

    clients = classified(5, 6, 7)
    clients.x[:5] = POISON
    run = simulate("fedavg", clients, Fussy(4, 2), evaluate_every=0)
    assert failures(run) == [("client 0", "train", "ValueError at the client: that is too much")]
    clients.x[:] = POISON
    with pytest.raises(SettingError, match=r"the model fails on an input of shape \[4\]: ValueError: that is too much"):
        simulate("fedavg", clients, Fussy(4, 2), evaluate_every=0)


def test_a_mask_that_is_not_finite_is_refused_first() -> None:
    """It would be in the vector, and infinity minus infinity is refused as an update, of every client."""
    model = nn.Linear(4, 2)
    model.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
    with pytest.raises(SettingError, match="starts with numbers in 'mask' that are not finite"):
        simulate("fedavg", classified(5, 6), model)


def killing(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy that kills the worker process."""
    if os.getpid() != HERE:
        os.kill(os.getpid(), signal.SIGKILL)
    return cross_entropy(outputs, targets)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="workers are forked")
def test_a_worker_that_is_killed_names_resume() -> None:
    with pytest.raises(RuntimeFault) as caught:
        simulate("fedavg", classified(5, 6, 7), nn.Linear(4, 2), loss=killing, simulator={"workers": 2})
    assert re.match(r"a worker process died \(exit code -9.*continue with `piebald resume`", str(caught.value))


@pytest.mark.parametrize("stack", [1, 3])
@pytest.mark.parametrize("scheduling", [{"kind": "synchronous"}, ASYNCHRONOUS], ids=lambda one: one["kind"])
def test_a_client_that_diverges_is_left_out_of_each_step_and_asked_again(
    scheduling: dict[str, Any], stack: int
) -> None:
    """Also where updates are summed early: nothing of it is in the sum."""
    clients = classified(5, 6, 7)
    clients.x[5:11] *= 1e25  # client 1
    recipe = recipes.fedavg(batch=2, epochs=3).with_(scheduling=scheduling)
    run = simulate(recipe, clients, MODEL, rounds=6, simulator={"stack": stack})
    left_out = [row for row in run.results if row["status"] == "lost"]
    assert {(row["client"], row["reason"]) for row in left_out} == {(1, "not finite")}
    assert len(left_out) == [row["client"] for row in run.results].count(1) > 1
    assert bool(torch.isfinite(run.model().weight).all())


def test_the_longest_step_can_be_set() -> None:
    """Client 1's rows are a hundred times as large, so its steps are too: far, but within what the default allows."""
    clients = classified(5, 6, 7)
    clients.x[5:11] *= 1e2
    left_out = {}
    for longest in (1.0, 1e6):
        run = simulate(recipes.fedavg(batch=2), clients, MODEL, rounds=2, longest_step=longest)
        left_out[longest] = [(row["version"], row["client"]) for row in run.results if row["status"] == "lost"]
    assert left_out == {1.0: [(1, 1), (2, 1)], 1e6: []}


class Gauge(Sgd):
    """Sends one more number, which is not finite for the client with six rows."""

    def server_vectors(self, shared: int) -> dict[str, Tensor]:
        return {"gauge": torch.zeros(1)}

    def update_server_vectors(self, vectors: Any, means: Any, context: Any) -> dict[str, Tensor]:
        return dict(means)

    def uploads(self) -> tuple[str, ...]:
        return ("gauge",)

    def train(self, inputs: Any, context: Any) -> TrainOutput:
        gauge = torch.where(inputs.examples == 6, torch.nan, inputs.examples)
        return self.output(self.run_sgd(inputs, context), vectors={"gauge": gauge})


@pytest.mark.parametrize("stack", [1, 3])
@pytest.mark.parametrize("scheduling", [{"kind": "synchronous"}, ASYNCHRONOUS], ids=lambda one: one["kind"])
def test_other_vectors_are_checked_where_updates_are_summed_early(scheduling: dict[str, Any], stack: int) -> None:
    recipe = recipes.fedavg().with_(training=Gauge(), scheduling=scheduling)
    run = simulate(recipe, classified(5, 6, 7), MODEL, rounds=4, simulator={"stack": stack})
    assert {(row["client"], row["reason"]) for row in run.results if row["status"] == "lost"} == {
        (1, "gauge is not finite")
    }
    assert bool(torch.isfinite(run.model().weight).all())


def test_errors_of_the_package_pass_through_unchanged() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if bool((targets == 2).any()):
            raise SettingError("that will not do")
        return cross_entropy(outputs, targets)

    with pytest.raises(SettingError, match=r"^that will not do$"):
        simulate("fedavg", poisoned(1, 5, 6), nn.Linear(4, 2), loss=loss, evaluate_every=0)


# ------------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"engine": "leen"}, "engine must be"),
        ({"stack": 0}, "stack must be at least 1"),
        ({"workers": -1}, "workers must be at least 0"),
        ({"memory": -5}, "memory must be at least 0"),
        ({"device": "gpu"}, "device must be 'auto', 'cpu', 'cuda', 'cuda:N' or 'mps', got 'gpu'"),
        ({"device": "cuda:x"}, "device must be 'auto', 'cpu', 'cuda', 'cuda:N' or 'mps', got 'cuda:x'"),
        ({"device": "meta"}, "device must be 'auto', 'cpu', 'cuda', 'cuda:N' or 'mps', got 'meta'"),
        ({"fleet": {"kind": "homogenous"}}, "there is no fleet 'homogenous': did you mean 'homogeneous'?"),
        ({"flet": None}, "did you mean 'fleet'?"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError) as caught:
        piebald.Simulator(**fields)
    assert message in str(caught.value)


def test_a_device_is_found_or_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def here(gpus: int, apple: bool) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: apple)

    for (gpus, apple), wanted in {(0, False): "cpu", (0, True): "mps", (2, True): "cuda"}.items():
        here(gpus, apple)
        assert piebald.Simulator(device="auto").device == wanted
    here(2, False)
    assert piebald.Simulator(device="cuda:1").device == "cuda:1"
    with pytest.raises(SettingError, match="GPUs are numbered from 0 and there are 2"):
        piebald.Simulator(device="cuda:2")
    assert piebald.Simulator(device="cuda", workers=2).workers == 2
    here(0, True)
    with pytest.raises(SettingError, match="workers are for the CPU and, where processes fork, for NVIDIA's GPUs"):
        piebald.Simulator(device="mps", workers=2)
    here(0, False)
    for name in ("cuda", "cuda:0", "mps"):
        with pytest.raises(SettingError, match=f"device is '{name}' but torch finds no GPU"):
            piebald.Simulator(device=name)


def test_the_sum_of_a_round_is_not_kept_during_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is twice as large as the model.  An engine that trains many at once keeps no gradient of one model either."""
    sums: dict[int, weakref.ref[Tensor]] = {}
    collecting, engines = Simulation._collect, list[Any]()

    def collect(self: Simulation, number: int) -> None:
        events = self._begun[number][0]
        training = events[0].task.query is None
        assert not training or not [version for version, one in sums.items() if one() is not None]
        collecting(self, number)
        if training:
            sums[events[0].task.version] = weakref.ref(events[0].update.partial_sum.vectors["model"])
            engines.append(self._workers().engine)

    monkeypatch.setattr(Simulation, "_collect", collect)
    simulate("fedavg", classified(5, 6, 7), MODEL, rounds=3, simulator={"engine": "batched", "stack": 3})
    assert sorted(sums) == [0, 1, 2]
    assert "_gradient" not in vars(engines[-1])


@pytest.mark.parametrize("workers", [0, 2])
def test_stacks_that_are_begun_while_results_are_taken_are_the_same_after_a_resume(
    workers: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Which clients are trained together depends on the tasks alone: not on the workers, nor on where a run stopped."""
    ahead, begin = list[int](), Simulation._begin_full_stacks

    def watched(self: Simulation) -> None:
        before = len(self._begun)
        begin(self)
        ahead.append(len(self._begun) - before)

    monkeypatch.setattr(Simulation, "_begin_full_stacks", watched)
    batched = {"engine": "batched", "stack": 3, "workers": workers}
    options: dict[str, Any] = {"simulator": batched, "evaluate_every": 0}
    recipe = piebald.recipes.fedavg(cohort=7, lr=0.1).with_(scheduling={"kind": "asynchronous", "cohort": 7})
    clients = classified(*range(5, 14))
    whole = simulate(recipe, clients, MODEL, rounds=12, **options)
    assert sum(ahead) > 1
    simulate(recipe, clients, MODEL, rounds=5, out=tmp_path / "run", **options)
    continued = piebald.resume(tmp_path / "run", clients, MODEL, rounds=12)
    for one, other in zip(whole.model().parameters(), continued.model().parameters(), strict=True):
        assert torch.equal(one, other)


def test_tensors_beyond_a_part_of_shared_memory_are_in_files_until_the_next_message() -> None:
    arena = Arena(PARTS * 256)
    sent = [torch.arange(40.0), torch.arange(600).view(2, 300), torch.ones(3, 1).expand(3, 50)]
    arena.clear(1)
    places = [arena.put(tensor) for tensor in sent]
    assert arena.put(sent[1]) == places[1]  # once
    assert [isinstance(place[0], str) for place in places] == [False, True, True]
    assert all(torch.equal(arena.get(place), tensor) for place, tensor in zip(places, sent, strict=True))
    arena.clear(0)
    assert Path(places[1][0]).exists()  # the other part's message is still read
    arena.clear(1)
    assert not Path(places[1][0]).exists()


def test_queries_with_many_models_fit_into_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piebald.runtimes.simulation.simulation.MIN_ARENA", 1)
    clients = federation(*((rows.x, rows.y) for rows in (classified(9).rows(0, "train"),) * 6), classes=["a", "b"])
    clients = PooledClients(
        clients.x,
        clients.y,
        {"train": clients.lists("train"), "validation": clients.lists("train")},
        classes=["a", "b"],
    )
    models = [
        simulate("sync_dvw", clients, MODEL, rounds=2, simulator={"engine": "sequential", "workers": workers}).model()
        for workers in (0, 2)
    ]
    assert torch.equal(models[0].weight, models[1].weight)
