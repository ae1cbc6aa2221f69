"""Six awkward clients among nine others: what one cannot do stops nobody, and is told alike by every runtime."""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import piebald
from piebald import recipes
from piebald.contracts import Clients, Result, Task
from piebald.core.errors import RuntimeFault
from piebald.data.partition import Lists, PooledClients
from piebald.federation.link.wire_format import Refused
from piebald.federation.site.policy import Policy
from piebald.federation.site.site_rows import SiteClient
from piebald.federation.site.task_runner import TaskRunner
from piebald.methods.client_work import ClientWork
from piebald.methods.recipe import Recipe
from piebald.report.comparison import Comparison
from piebald.report.page.report_page import render
from piebald.runtimes.base import RuntimeSettings
from tests.fakes import seeded
from tests.federation.in_process import InProcessSites

from .conftest import on_ray

POISON = 50.0
OTHERS = 9
# train and test rows of the awkward ones; names say what is wrong with them
AWKWARD = {
    "one row": (1, 6),
    "no test rows": (12, 0),
    "one class": (12, 6),
    "stumbles in training": (12, 6),
    "stumbles in tests": (12, 6),
    "overflows": (12, 6),
}


class Fussy(nn.Module):
    """A network with batch norm that refuses some inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        if bool((x[:, 3] == POISON).any()):
            raise ValueError("that is too much")
        outputs: Tensor = self.net(x)
        return outputs


def clients() -> PooledClients:
    draw = np.random.default_rng(3)
    sizes = {f"clinic {number}": (10, 6) for number in range(OTHERS)} | AWKWARD
    x, y, parts = [], [], {"train": [], "test": []}
    row = 0
    for name, counts in sizes.items():
        for split, count in zip(("train", "test"), counts, strict=True):
            labels = np.arange(count) % 2
            inputs = (draw.normal(size=(count, 4)) + labels[:, None]).astype(np.float32)
            if (name, split) in {("stumbles in training", "train"), ("stumbles in tests", "test")}:
                inputs[-1, 3] = POISON
            if (name, split) == ("overflows", "train"):
                inputs[:] *= 1e30
            if (name, split) == ("one class", "test"):
                labels = labels * 0
            x.append(inputs)
            y.append(labels)
            parts[split].append(np.arange(row, row + count))
            row += count
    lists = {s: Lists(np.concatenate(p), np.cumsum([0, *map(len, p)])) for s, p in parts.items()}
    common = np.concatenate(parts["test"][:OTHERS])
    pool = torch.from_numpy(np.concatenate(x)), torch.from_numpy(np.concatenate(y))
    return PooledClients(*pool, lists, names=list(sizes), classes=["no", "yes"], common=common)  # type: ignore[arg-type]


class SitesOf(InProcessSites):
    """Sites of this process, one after another, since they share a model: what goes to them and comes back is bytes."""

    def __init__(self, work: ClientWork, clients: Clients) -> None:
        numbers = range(len(clients))
        self.work, self._done = work, list[Result]()
        self._threads, policy = ThreadPoolExecutor(1), Policy(least_rows=1)  # they have few rows
        self.runners = [TaskRunner(SiteClient(work, clients, client), policy, "cpu") for client in numbers]
        self.states = [None for _ in numbers]

    def _serve(self, task: Task) -> Result:
        try:
            return super()._serve(task)
        except Refused as error:  # as `server_messages` does
            return Result(task, None, 0.0, 0.0, failure=str(error), refused=True)


class Sites(RuntimeSettings):
    """The runtime of such sites."""

    kind: ClassVar[str] = "awkward_sites"
    simulates: ClassVar[bool] = False

    def open(self, work: ClientWork, clients: Clients) -> SitesOf:
        return SitesOf(work, clients)


RECIPE = recipes.fedavg(lr=0.1, batch=5, epochs=1)
OPTIONS: dict[str, Any] = {"rounds": 3, "metrics": ["auc", "accuracy"], "per_class": False}


def outcome(run: piebald.Run) -> dict[str, Any]:
    """What a run says about its clients, without the words in which a site hides what it must not tell."""
    return {
        "failed": {(row["name"], row["kind"], tuple(row["rounds"])) for row in run.failures if row["client"] >= 0},
        "unscored": sorted(run.unscored),
        "untrained": sorted({run.names[number] for number in range(OTHERS + 6)} - {run.names[c] for c in run.trained}),
        "scores": {
            name: round(run.per_client[number], 3) for number, name in run.names.items() if number in run.per_client
        },
    }


def carried_out(runtime: Any, recipe: Recipe = RECIPE, **options: Any) -> piebald.Run:
    return piebald.run(recipe, clients(), seeded(Fussy), runtime=runtime, **OPTIONS | options)


@pytest.fixture(scope="module")
def expected() -> Mapping[str, Any]:
    run = carried_out(piebald.Simulator(engine="sequential", stack=1, workers=0))
    assert run.final["status"] == "finished"
    return outcome(run)


def test_what_each_cannot_do_is_told_with_its_name_and_the_round(expected: Mapping[str, Any]) -> None:
    assert {row for row in expected["failed"] if row[1] == "train"} == {
        ("one row", "train", (1, 2, 3)),
        ("stumbles in training", "train", (1, 2, 3)),
        ("overflows", "train", (1, 2, 3)),  # whose update is not finite in any of them
    }
    assert {row for row in expected["failed"] if row[1] == "evaluate"} == {
        ("one class", "evaluate", (0, 1, 2, 3)),
        ("stumbles in tests", "evaluate", (0, 1, 2, 3)),
    }
    assert expected["unscored"] == ["no test rows", "one class", "stumbles in tests"]
    assert expected["untrained"] == ["one row", "overflows", "stumbles in training"]
    assert len(expected["scores"]) == OTHERS + 3


RUNTIMES = {
    "stacked": piebald.Simulator(engine="sequential", stack=4, workers=0),
    "batched": piebald.Simulator(engine="batched", stack=5, workers=0),
    "vmapped": piebald.Simulator(engine="vmapped", stack=5, workers=0),
    "workers": piebald.Simulator(engine="sequential", stack=2, workers=2),
    "sites": Sites(),
}


@pytest.mark.full
@pytest.mark.parametrize("name", RUNTIMES)
def test_every_runtime_has_the_same_outcome(name: str, expected: Mapping[str, Any]) -> None:
    assert outcome(carried_out(RUNTIMES[name])) == expected


@pytest.mark.long
def test_ray_has_the_same_outcome(cluster: Any, expected: Mapping[str, Any]) -> None:
    run = on_ray(RECIPE, clients=clients(), model=seeded(Fussy), seed=0, **OPTIONS)
    assert outcome(run) == expected


@pytest.mark.long
def test_a_run_that_is_resumed_tells_the_same(expected: Mapping[str, Any], tmp_path: Path) -> None:
    simulator = piebald.Simulator(engine="sequential", stack=1, workers=0)
    carried_out(simulator, rounds=1, out=tmp_path / "run", checkpoint_every=1).close()
    resumed = piebald.resume(tmp_path / "run", clients(), seeded(Fussy), rounds=3)
    assert outcome(resumed) == expected
    printed = resumed.facts()
    assert printed["why_untrained"]["one row"].startswith("cannot train on a batch of one row with batch norm")
    assert printed["why_untrained"]["stumbles in training"].startswith("ValueError at the client: that is too much")
    assert printed["why_unscored"] == {
        "no test rows": "no test rows",
        "one class": "auc has no value on its test rows (round 3)",
        "stumbles in tests": "ValueError at the client: that is too much (round 3)",
    }


@pytest.mark.full
def test_what_is_known_before_training_is_said_before_training(caplog: pytest.LogCaptureFixture) -> None:
    carried_out(piebald.Simulator(engine="sequential", workers=0), rounds=1)
    before = caplog.text[: caplog.text.index("round 1")] if "round 1" in caplog.text else caplog.text
    assert "clients with one training row, which train nothing, since batch norm cannot" in before
    assert "clients with no test rows, which have no score: no test rows" in before
    assert "clients with test rows of one class, which have no auc: one class" in before


def test_a_common_test_set_that_fails_stops_nothing() -> None:
    held = clients()
    held.common.x[0, 3] = POISON
    run = piebald.run(RECIPE, held, seeded(Fussy), runtime=RUNTIMES["stacked"], rounds=1)
    (row,) = [row for row in run.failures if row["client"] < 0]
    assert (row["name"], row["rounds"]) == ("the common test set", [0, 1])
    assert run.common is None


@pytest.mark.parametrize("runtime", [RUNTIMES["stacked"], RUNTIMES["sites"]], ids=["simulator", "sites"])
def test_many_that_fail_alike_end_the_run_with_the_reason(runtime: Any) -> None:
    held = clients()
    for client in range(1, OTHERS):
        held.x[held.indices(client, "train")[0], 3] = POISON
    with pytest.raises(
        RuntimeFault,
        match=r"training failed on 9 of 15 clients in round 1, the first one is client 'clinic 1': ValueError at",
    ):
        piebald.run(RECIPE, held, seeded(Fussy), runtime=runtime, rounds=2, evaluate_every=0)


@pytest.mark.full
def test_the_page_lists_who_could_not_do_what_in_which_rounds_and_why() -> None:
    page = render(Comparison([carried_out(RUNTIMES["stacked"])]))
    body = page[page.index('<section id="failures"') :]
    rows = re.findall(r"<tr><th scope=\"row\">(.*?)</th>(.*?)</tr>", body[: body.index("</section>")])
    cells = {(name, re.sub("<[^>]*>", "|", rest).replace("||", "|").split("|")[1]): rest for name, rest in rows}
    assert set(cells) == {
        ("one row", "train"), ("stumbles in training", "train"), ("overflows", "train"), ("one class", "evaluate"),
        ("stumbles in tests", "evaluate"), ("no test rows", "evaluate"),
    }  # fmt: skip
    assert "rounds 1, 2, 3<" in cells["overflows", "train"]
    assert "not finite" in cells["overflows", "train"]
    assert "ValueError at the client: that is too much" in cells["stumbles in tests", "evaluate"]
    assert "rounds 0, 1, 2 and 1 more" in cells["stumbles in tests", "evaluate"]
    assert "no test rows" in cells["no test rows", "evaluate"]


class Strange(nn.Module):
    """A linear model with outputs that are not finite for some rows."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x) * torch.where((x[:, 3:] == POISON), torch.nan, 1.0)


@pytest.mark.parametrize("runtime", [RUNTIMES["stacked"], RUNTIMES["sites"]], ids=["simulator", "sites"])
def test_a_loss_without_a_value_in_tests_is_told_with_the_clients_name(runtime: Any) -> None:
    run = piebald.run(RECIPE, clients(), seeded(Strange), runtime=runtime, rounds=1, per_class=False)
    rows = [row for row in run.failures if row["kind"] == "evaluate" and row["client"] >= 0]
    assert [(row["name"], row["reason"], row["rounds"]) for row in rows] == [
        ("stumbles in tests", "loss has no value on its test rows", [0, 1])
    ]
    assert {row["name"] for row in run.failures if row["kind"] == "train"} == {"stumbles in training", "overflows"}
