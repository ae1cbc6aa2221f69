"""Killed at any point and resumed, a run ends with the same numbers, bit for bit, as an undisturbed one."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import piebald
from piebald.core.errors import RunFolderError, SettingError
from piebald.methods.recipe import Recipe
from piebald.runtimes.simulation.simulation import Simulation
from piebald.server.result_checks import MaskedRounds
from piebald.storage.store import RunStore

from .conftest import (
    HERE,
    TABLE,
    VARIANTS,
    carry_out,
    federation,
    fitting,
    in_turn,
    method,
    network,
    plain_network,
    vector,
)

FORK = multiprocessing.get_context("fork")


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _at_call(number: int, method_name: str, owner: type, after: bool) -> None:
    """Make a method die at its n-th call, before or after doing its work."""
    real, calls = getattr(owner, method_name), [0]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == number and not after:
            _die()
        result = real(*args, **kwargs)
        if calls[0] == number and after:
            _die()
        return result

    setattr(owner, method_name, wrapped)


# Where to die: (method, its owner, the call, after it?)
POINTS: dict[str, tuple[str, type, int, bool]] = {
    "before the first server step": ("commit", RunStore, 1, False),
    "in the middle of training": ("_collect", Simulation, 4, False),
    "trained but not stepped": ("commit", RunStore, 3, False),
    "just stepped": ("commit", RunStore, 2, True),
    "while scores are written": ("scores", RunStore, 3, False),
    "after the last server step": ("commit", RunStore, 4, True),
}


def every_point(points: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrize by points to die at, of which only "just stepped" is tried in the quick tier."""
    marked = [point if point == "just stepped" else pytest.param(point, marks=pytest.mark.full) for point in points]
    return pytest.mark.parametrize("point", marked)


def killed(folder: Path, recipe: Recipe, point: tuple[str, type, int, bool], **options: Any) -> None:
    """Run in a child that is killed at some point."""

    def child() -> None:
        name, owner, number, after = point
        _at_call(number, name, owner, after)
        carry_out(recipe, out=folder, rounds=4, **options)

    process = FORK.Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def assert_identical(one: piebald.Run, two: piebald.Run) -> None:
    """The same bits: global model, every client's memory, every number in the tables but wall time."""
    assert torch.equal(vector(one), vector(two))
    for client in range(5):
        mine, theirs = one._store.client_state(client), two._store.client_state(client)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    first, second = one._store.last_checkpoint(), two._store.last_checkpoint()
    assert first is not None
    assert second is not None
    assert first[1].tensors.keys() == second[1].tensors.keys()
    assert all(torch.equal(tensor, second[1].tensors[name]) for name, tensor in first[1].tensors.items())
    assert one.scores == two.scores
    assert one.results == two.results
    assert [_timeless(row) for row in one.rounds] == [_timeless(row) for row in two.rounds]


def _timeless(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "wall"}


def check(
    tmp_path: Path, recipe: Recipe, point: tuple[str, type, int, bool], model: Any = None, **options: Any
) -> None:
    model = model or fitting(recipe)
    killed(tmp_path / "killed", recipe, point, model=model, **options)
    resumed = piebald.resume(tmp_path / "killed", federation(), model)
    undisturbed = carry_out(recipe, out=tmp_path / "whole", rounds=4, model=model, **options)
    assert_identical(undisturbed, resumed)
    assert resumed.meta["status"] == "finished"


@pytest.mark.full
@in_turn(4)
def test_every_recipe(name: str, tmp_path: Path) -> None:
    """Killed where its server has just stepped, or in the middle of training: half of the recipes either way."""
    point = ("just stepped", "in the middle of training")[list(TABLE).index(name) // 4 % 2]
    check(tmp_path, method(name), POINTS[point])


@pytest.mark.full
@every_point(POINTS)
@pytest.mark.parametrize("base", ["hdafl", "scaffold"])
def test_every_point(base: str, point: str, tmp_path: Path) -> None:
    check(tmp_path, method(base), POINTS[point])


@pytest.mark.full
@pytest.mark.parametrize("variant", VARIANTS)
def test_kept_momentum_and_schedules(variant: str, tmp_path: Path) -> None:
    check(tmp_path, method("hdafl", **VARIANTS[variant]), POINTS["trained but not stepped"])


@pytest.mark.full
@pytest.mark.parametrize(
    "simulator", [{"engine": "vmapped", "stack": 3}, {"engine": "sequential", "workers": 2}], ids=str
)
def test_engines(simulator: dict[str, Any], tmp_path: Path) -> None:
    check(tmp_path, method("hdafl"), POINTS["just stepped"], plain_network, simulator=simulator)


def test_sparse_checkpoints_repeat_what_came_after_the_last(tmp_path: Path) -> None:
    check(tmp_path, method("hdafl"), ("commit", RunStore, 4, False), checkpoint_every=2)


def test_asynchronous_with_outstanding_tasks(tmp_path: Path) -> None:
    """Devices of different speed, private heads: what is outstanding is in the checkpoint, with its results if it has
    any."""
    fleet = piebald.data.partition.FastSlow(fast=1.0, slow_factor=3.0, share_slow=0.4)
    recipe = method("hdafl").with_(scheduling={"kind": "asynchronous", "cohort": 3})
    check(tmp_path, recipe, POINTS["just stepped"], simulator={"fleet": fleet})


SCHEDULES = {
    "private heads, validation weighting, adaptive": method("adaptive_dvw").with_(
        sharing={"kind": "all_except", "private_layers": "classifier"}
    ),
    "buffered, a client twice at one version": method("fedbuff", buffer_size=3, cohort=5),
    "a deadline that half of them miss": method("fedavg").with_(scheduling={"kind": "deadline", "seconds": 4.0}),
    "over-selection": method("fedavg").with_(scheduling={"kind": "synchronous", "cohort": 2, "over_selection": 2.0}),
    "clusters, whose normal one clients vote for": method("distfl", normal="vote"),
    "validation weighting, mixing by staleness": method("fedasync").with_(
        aggregation={"kind": "staleness_weighted", "base": {"kind": "dvw"}}
    ),
}


@pytest.mark.full
@every_point(["just stepped", "in the middle of training"])
@pytest.mark.parametrize("case", SCHEDULES)
def test_schedulers_without_rounds(case: str, point: str, tmp_path: Path) -> None:
    """Slow and fast devices that answer queries beside their training: all of it goes on where it was."""
    fleet = piebald.data.partition.FastSlow(fast=1.0, slow_factor=3.0, share_slow=0.4, down=2000.0, latency=0.1)
    check(tmp_path, SCHEDULES[case], POINTS[point], simulator={"fleet": fleet})


MASKED = {
    "all wait": method("fedavg").with_(transforms=[{"kind": "secure_aggregation"}]),
    "late ones, private heads, neighbours": method("hdafl").with_(
        scheduling={"kind": "synchronous", "cohort": 3, "over_selection": 1.6},
        transforms=[{"kind": "secure_aggregation", "neighbours": 2}],
    ),
}
KEY_ROUNDS = {
    "keys advertised": ("_reply", Simulation, 6, True),
    "shares sent": ("_reply", Simulation, 8, False),
    "survivors confirmed": ("_reply", Simulation, 14, True),
    "the sum opened": ("_reply", Simulation, 19, False),
    "masked": ("_deliver", Simulation, 40, True),
    "unmasked": ("unmask", MaskedRounds, 2, True),
    "just stepped": POINTS["just stepped"],
}


@pytest.mark.full
@every_point(KEY_ROUNDS)
@pytest.mark.parametrize("case", MASKED)
def test_secure_aggregation(case: str, point: str, tmp_path: Path) -> None:
    """In the middle of the rounds around a sum, too: a resumed run agrees on that round's keys anew."""
    fleet = piebald.data.partition.FastSlow(fast=1.0, slow_factor=3.0, share_slow=0.4, down=2000.0, latency=0.1)
    check(tmp_path, MASKED[case], KEY_ROUNDS[point], simulator={"fleet": fleet})


def test_a_finished_run_is_handed_back(tmp_path: Path) -> None:
    run = carry_out(method("hdafl"), out=tmp_path / "run")
    again = piebald.resume(tmp_path / "run", federation(), network)
    assert torch.equal(vector(run), vector(again))
    assert len(again.rounds) == 3


CONTINUED: dict[str, tuple[Recipe, dict[str, Any]]] = {
    "private heads": (method("hdafl"), {}),
    "control variates": (method("scaffold"), {}),
    "momentum at the server, a schedule": (method("fedavgm", lr_schedule={"kind": "cosine", "rounds": 5}), {}),
    "no rounds, slow devices": (method("fedbuff", buffer_size=2, cohort=5), {"fleet": True}),
    "the best version is kept": (method("fedavg"), {"keep": "best"}),
}


@pytest.mark.full
@pytest.mark.parametrize("case", CONTINUED)
def test_more_rounds_are_those_of_a_longer_run(case: str, tmp_path: Path) -> None:
    recipe, more = CONTINUED[case]
    fleet = piebald.data.partition.FastSlow(fast=1.0, slow_factor=3.0, share_slow=0.4)
    options: dict[str, Any] = {"simulator": {"fleet": fleet} if "fleet" in more else {}, "evaluate_every": 2}
    options |= {"keep": "best"} if "keep" in more else {}
    carry_out(recipe, out=tmp_path / "run", rounds=2, **options)
    continued = piebald.resume(tmp_path / "run", federation(), fitting(recipe), rounds=5)
    assert_identical(carry_out(recipe, out=tmp_path / "whole", rounds=5, **options), continued)
    assert continued.meta["rounds"] == 5
    assert piebald.resume(tmp_path / "run", federation(), fitting(recipe), rounds=5).best == continued.best


def test_a_run_cannot_have_fewer_rounds(tmp_path: Path) -> None:
    carry_out(method("fedavg"), out=tmp_path / "run", rounds=2)
    with pytest.raises(SettingError, match=r"rounds must be at least those of .*, which has 2 rounds, got 1"):
        piebald.resume(tmp_path / "run", federation(), network, rounds=1)


def test_ctrl_c_leaves_a_run_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = Simulation._collect
    calls = []

    def interrupted(self: Simulation, number: int) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        real(self, number)

    monkeypatch.setattr(Simulation, "_collect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        carry_out(method("hdafl"), out=tmp_path / "stopped", rounds=4)
    with RunStore.open_read_only(tmp_path / "stopped") as store:
        assert store.meta["status"] == "stopped"
    resumed = piebald.resume(tmp_path / "stopped", federation(), network)
    assert_identical(carry_out(method("hdafl"), out=tmp_path / "whole", rounds=4), resumed)


def test_what_cannot_be_resumed_says_so(tmp_path: Path) -> None:
    carry_out(method("hdafl"), out=tmp_path / "run")
    with pytest.raises(SettingError, match="started from Python"):
        piebald.resume(tmp_path / "run")
    with pytest.raises(SettingError, match="model does not fit the run"):
        piebald.resume(
            tmp_path / "run", federation(), torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 4))
        )
    with pytest.raises(SettingError, match="loss does not fit the run"):
        piebald.resume(tmp_path / "run", federation(), network, loss=lambda outputs, targets: outputs.sum(1))
    with pytest.raises(RunFolderError):
        piebald.resume(tmp_path / "nothing", federation(), network)


def test_clients_may_depend_on_the_seed(tmp_path: Path) -> None:
    def dealt(seed: int) -> Any:
        return federation((0, 1, 2, 3, 4) if seed == 0 else (4, 3, 2, 1, 0))

    options: dict[str, Any] = {"rounds": 1, "runtime": piebald.Simulator(**HERE)}
    both = piebald.compare([method("fedavg")], dealt, network, seeds=(0, 1), out=tmp_path, **options)
    assert [run.clients[0]["name"] for run in both.runs] == ["site 0", "site 4"]


def test_compare_refuses_what_was_run_otherwise(tmp_path: Path) -> None:
    options: dict[str, Any] = {"out": tmp_path, "runtime": piebald.Simulator(**HERE)}
    piebald.compare({"A": method("fedavg")}, federation(), network, rounds=1, **options)
    for recipe, rounds, what in ((method("hdafl"), 1, "recipe"), (method("fedavg"), 2, "rounds")):
        with pytest.raises(SettingError, match=f"holds a run with another {what}"):
            piebald.compare({"A": recipe}, federation(), network, rounds=rounds, **options)


@pytest.mark.full
def test_compare_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    methods = {"A": method("fedavg"), "B": method("hdafl")}
    options: dict[str, Any] = {
        "rounds": 2,
        "seeds": (0, 1),
        "out": tmp_path,
        "runtime": piebald.Simulator(**HERE),
    }
    whole = piebald.compare(methods, federation(), network, **options)
    import shutil

    shutil.rmtree(tmp_path / "B" / "seed-1")
    again = piebald.compare(methods, federation(), network, **options)
    assert [run.accuracy for run in again.runs] == [run.accuracy for run in whole.runs]
