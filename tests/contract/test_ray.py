"""Recipes on Ray, over two nodes: the simulator's numbers, also where actors, nodes and the driver are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import piebald
from piebald.cli import main
from piebald.core.errors import RuntimeFault, SettingError
from piebald.data.partition import FastSlow
from piebald.privacy.secure_aggregation import server_side
from piebald.runtimes.ray import actors
from piebald.runtimes.ray.actors import RayWorkerPool
from piebald.runtimes.ray.connection import RayConnection
from piebald.storage.store import RunStore

from .conftest import (
    STORE,
    assert_same,
    carry_out,
    federation,
    method,
    network,
    on_ray,
    plain_network,
    vector,
)
from .test_resume import assert_identical

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]


# What travels to actors and stays there: nothing, state, private layers, clusters, queries, models of their own; with
# and without rounds.  How a trainer steps is the engine's, which is the same there.
CARRIED = (
    "fedavg", "scaffold", "lg_fedavg", "distfl", "ifca", "async_fedavg", "fedmd", "flexlora",
)  # fmt: skip
CARRIED_ALIKE = (
    "ditto", "dp_sgd", "adaptive_dvw", "fedbuff",
    "silobn", "local", "apfl", "fedala", "fedamp", "fedphp", "cfl", "hierfavg", "qfedavg", "sync_dvw", "heterofl",
    "fedproto", "fedprox", "feddyn", "fedlc", "feddecorr", "fedsam", "moon", "fedrep", "fedbabu", "fedrod", "pfedme",
    "per_fedavg", "fine_tuned", "fedasync",
)  # fmt: skip


@pytest.mark.parametrize("name", [*CARRIED, *(pytest.param(name, marks=pytest.mark.long) for name in CARRIED_ALIKE)])
def test_equals_the_simulator(cluster: Any, name: str) -> None:
    assert_same(carry_out(method(name)), on_ray(method(name)))


@pytest.mark.long
@pytest.mark.parametrize("state", ["kept", "averaged"])
def test_the_state_of_optimizers_is_that_of_the_simulator(cluster: Any, state: str) -> None:
    recipe = method("hdafl", optimizer="adamw", optimizer_state=state)
    assert_same(carry_out(recipe), on_ray(recipe))


def test_many_at_once_on_a_virtual_clock(cluster: Any) -> None:
    """With what clients keep of their packed updates, beside their private layers."""
    fleet = FastSlow(fast=1.0, slow_factor=2.5, share_slow=0.4)
    packing = {"kind": "top_k", "share": 0.2}
    recipe = method("hdafl").with_(scheduling={"kind": "asynchronous", "cohort": 3}, transforms=[packing])
    expected = carry_out(recipe, model=plain_network, rounds=6, simulator={"fleet": fleet})
    ray = {"engine": "batched", "stack": 2, "fleet": fleet}
    assert_same(expected, on_ray(recipe, model=plain_network, rounds=6, ray=ray))


def test_no_member_of_a_secure_aggregation_is_on_a_node(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes train only: all keys, shares and masks are made in the process that is the server as well."""
    made, kinds = list[str](), list[list[str]]()
    for name in ("replied", "masked"):
        real = getattr(server_side, name)
        monkeypatch.setattr(server_side, name, lambda *given, real=real: made.append(real.__name__) or real(*given))
    recipe = method("fedavg").with_(transforms=["secure_aggregation"])
    for run in (carry_out, on_ray):
        made.clear()
        found = run(recipe)
        assert [row["arrived"] for row in found.rounds] == [4, 4, 4]
        kinds.append(sorted(made))
    assert kinds[0] == kinds[1]
    assert made.count("masked") == 12


def test_rows_that_are_loaded_on_the_node(cluster: Any) -> None:
    pool = federation()

    def load(client: int) -> Any:
        return {split: pool.rows(client, split) for split in ("train", "test")}

    clients = piebald.LazyClients(5, load, classes=list("abcd"))
    assert_same(carry_out(method("hdafl"), clients), on_ray(method("hdafl"), clients))


@pytest.mark.long
def test_what_is_left_open_is_measured_on_a_node(cluster: Any) -> None:
    run = on_ray(method("fedavg"), ray={"engine": "auto", "workers": None})
    assert run.meta["runtime"]["workers"] == 2
    assert run.meta["runtime"]["engine"] != "auto"
    assert_same(carry_out(method("fedavg")), run)


# ------------------------------------------------------------------------------------------------------------- killing


def bad_loss(calls: int, what: Callable[[], None]) -> Callable[..., torch.Tensor]:
    """A loss that does something else, too, in an actor that has computed it so many times."""
    here, made = os.getpid(), [0]

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        made[0] += os.getpid() != here
        if made[0] >= calls:
            what()
        return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")

    return loss


def deadly(mark: Path) -> Callable[..., torch.Tensor]:
    """A loss that kills the first actor that has computed it a dozen times, unless the mark is there already."""

    def kill_once() -> None:
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return bad_loss(12, kill_once)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Actors that are started from now on."""
    made: list[Any] = []
    real = RayConnection.start

    def start(self: RayConnection, kind: type) -> Any:
        made.append(real(self, kind))
        return made[-1]

    monkeypatch.setattr(RayConnection, "start", start)
    return made


@pytest.mark.parametrize(
    "rule", [*(pytest.param(one, marks=pytest.mark.long) for one in ("hdafl", "ifca", "scaffold")), "fedavg"]
)
def test_an_actor_killed_in_mid_round_loses_nothing(cluster: Any, rule: str, tmp_path: Path, started: Any) -> None:
    """Sums (fedavg, scaffold), private parameters (hdafl), single updates (ifca): the same bits."""
    mark = tmp_path / "killed"
    disturbed = on_ray(method(rule), loss=deadly(mark), out=tmp_path / "one")
    assert mark.exists()
    assert started
    whole = on_ray(method(rule), loss=deadly(mark), out=tmp_path / "two")
    assert_identical(whole, disturbed)


@pytest.mark.long
def test_work_that_kills_every_actor_is_given_up(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "_DEATHS", 2)
    die = bad_loss(12, lambda: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RuntimeFault, match="died 2 times over the same"):
        on_ray(method("fedavg", epochs=20), loss=die)


DRIVER = """
import os, signal, sys
import piebald
from piebald.storage.store import RunStore
from tests.contract.conftest import federation, method, network

real, calls = RunStore.commit, [0]

def commit(*arguments):
    real(*arguments)
    calls[0] += 1
    if calls[0] == 2:
        os.kill(os.getpid(), signal.SIGKILL)

RunStore.commit = commit
where = piebald.Ray(address=sys.argv[1], engine="sequential", workers=2)
piebald.run(method("hdafl"), federation(), network, runtime=where, rounds=3, seed=1, out=sys.argv[2])
"""


@pytest.mark.long
def test_a_killed_driver_is_resumed(cluster: Any, tmp_path: Path) -> None:
    """A driver of its own, which gives an address; its actors end with it, and the run goes on here."""
    RayConnection(None, 1, None, 0.0).take(0)  # makes room
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", DRIVER, cluster.address, str(tmp_path / "killed")]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, cwd=ROOT, timeout=300)
    assert done.returncode == -signal.SIGKILL
    with RunStore.open_read_only(tmp_path / "killed") as store:
        assert store.version == 2
    resumed = piebald.resume(tmp_path / "killed", federation(), network)
    whole = on_ray(method("hdafl"), out=tmp_path / "whole")
    assert torch.equal(vector(whole), vector(resumed))
    assert whole.scores == resumed.scores


TERMINATED = """
import os, signal, sys
from piebald.cli import main
from piebald.storage.store import RunStore

real, calls = RunStore.commit, [0]

def commit(*arguments):
    real(*arguments)
    calls[0] += 1
    if calls[0] == 2:
        os.kill(os.getpid(), signal.SIGTERM)

RunStore.commit = commit
sys.exit(main(["run", sys.argv[1], "--out", sys.argv[2], "--quiet"]))
"""
FILE = """\
rounds = 4
checkpoint_every = 1
measure = "none"
partition = {{ kind = "iid", clients = 4, limit = 200 }}
model = {{ name = "mlp", hidden = [8] }}
recipe = {{ name = "scaffold", lr = 0.05, cohort = 2 }}
runtime = {{ engine = "sequential"{more} }}
evaluate = {{ every = 2 }}
"""


@pytest.mark.long
def test_sigterm_stops_the_driver_and_its_actors_and_the_run_goes_on(cluster: Any, tmp_path: Path) -> None:
    """Ray has a handler of its own for the signal, which must not take the place of ours."""
    import ray

    RayConnection(None, 1, None, 0.0).take(0)  # makes room
    (tmp_path / "ray.toml").write_text(FILE.format(more=f', kind = "ray", workers = 2, address = "{cluster.address}"'))
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", TERMINATED, str(tmp_path / "ray.toml"), str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 130, done.stderr
    assert "continue with: piebald resume" in done.stderr
    assert "Traceback" not in done.stderr
    until = time.monotonic() + 60
    while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:  # its actors are gone
        assert time.monotonic() < until
        time.sleep(0.1)
    resumed = piebald.resume(tmp_path / "run")
    assert resumed.final["rounds"] == 4
    (tmp_path / "here.toml").write_text(FILE.format(more=", workers = 0, stack = 1"))
    assert main(["run", str(tmp_path / "here.toml"), "--out", str(tmp_path / "whole"), "--quiet"]) == 0
    assert torch.equal(vector(piebald.resume(tmp_path / "whole")), vector(resumed))


@pytest.mark.long
def test_ctrl_c_leaves_a_run_that_goes_on(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = RayConnection.first, [0]

    def interrupted(self: RayConnection, *answers: Any) -> Any:
        calls[0] += 1
        if calls[0] == 9:
            raise KeyboardInterrupt
        return real(self, *answers)

    monkeypatch.setattr(RayConnection, "first", interrupted)
    with pytest.raises(KeyboardInterrupt):
        on_ray(method("hdafl"), out=tmp_path / "stopped")
    resumed = piebald.resume(tmp_path / "stopped", federation(), network)
    assert_identical(on_ray(method("hdafl"), out=tmp_path / "whole"), resumed)


# -------------------------------------------------------------------------------------------------------------- errors


def test_an_error_of_the_users_code_names_the_client(cluster: Any) -> None:
    def fail() -> None:
        raise ValueError("no such luck")

    with pytest.raises(
        RuntimeFault, match=r"failed on \d of \d clients in round .*ValueError at the client: no such luck$"
    ):
        on_ray(method("fedavg"), loss=bad_loss(12, fail))


def test_code_that_a_node_does_not_have_is_an_error(cluster: Any) -> None:
    class Absent:
        def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")

        def __reduce__(self) -> Any:
            return __import__, ("nonsense",)

    with pytest.raises(RuntimeFault, match="No module named 'nonsense'; Piebald, and your own modules, must be"):
        on_ray(method("fedavg"), loss=Absent())


def test_an_address_where_nobody_is() -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")
    code = (
        "import piebald; from piebald import data, models, partition; "
        "clients, model = partition.Iid(clients=2).split(data.digits()), models.build_model('mlp', (1, 8, 8), 10); "
        "piebald.run('fedavg', clients, model, runtime=piebald.Ray(address='127.0.0.1:1'))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert "SettingError: no Ray cluster answers at '127.0.0.1:1'" in done.stderr


def test_without_ray_the_error_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SettingError, match=r"pip install '\.\[ray\]'"):
        on_ray(method("fedavg"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"address": "ray://10.0.0.7:10001"}, "that of the cluster itself"),
        ({"device": "cuda:1"}, "must be 'cpu' or 'cuda'"),
        ({"workers": 0}, "workers must be at least 1"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        piebald.Ray(**settings)


@pytest.mark.long
def test_a_node_that_goes_away_loses_nothing(
    cluster: Any, started: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the two nodes is killed while both serve; the tests that come afterwards find two again."""
    whole = on_ray(method("hdafl"), out=tmp_path / "whole")
    real, calls = RayWorkerPool._send, [0]

    def send(self: RayWorkerPool, *arguments: Any) -> None:
        real(self, *arguments)
        calls[0] += 1
        if calls[0] == 6:
            cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=False)

    monkeypatch.setattr(RayWorkerPool, "_send", send)
    before = len(started)
    try:
        assert_identical(whole, on_ray(method("hdafl"), out=tmp_path / "disturbed"))
    finally:
        cluster.add_node(num_cpus=1, object_store_memory=STORE)
        cluster.wait_for_nodes()
    assert len(started) > before


@pytest.mark.long
def test_four_nodes_serve_and_one_of_them_goes_away(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four actors, each on the only core of a node, and client state in memory of all nodes."""
    real_serve, real_send, served = RayWorkerPool._serve_chunks, RayWorkerPool._send, list[Any]()

    def serve(self: RayWorkerPool, *arguments: Any) -> Any:
        while self._starting and len(added) == 2:  # so that all of them serve from the first round on
            self._handle_started(self.connection.first([], [*self._starting]))
        return real_serve(self, *arguments)

    def send(self: RayWorkerPool, actor: Any, *arguments: Any) -> None:
        served.append(actor)
        real_send(self, actor, *arguments)
        if disturbed and len(served) == 6:
            cluster.remove_node(added.pop(), allow_graceful=False)

    monkeypatch.setattr(RayWorkerPool, "_serve_chunks", serve)
    added = [cluster.add_node(num_cpus=1, object_store_memory=STORE) for _ in range(2)]
    disturbed = False
    try:
        cluster.wait_for_nodes()
        monkeypatch.setattr(RayWorkerPool, "_send", send)
        whole = on_ray(method("ditto"), ray={"workers": 4}, out=tmp_path / "whole")
        assert len({actor._actor_id for actor in served}) == 4
        assert_same(carry_out(method("ditto")), whole)
        served.clear()
        disturbed = True
        assert_identical(whole, on_ray(method("ditto"), ray={"workers": 4}, out=tmp_path / "disturbed"))
        assert len(added) == 1
    finally:
        for node in added:
            cluster.remove_node(node)
