"""Metis' adaptive update frequency beside the rules of the paper's section V, on scripted validation losses."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piebald
from piebald import recipes
from piebald.contracts import TrainInput
from piebald.core.errors import SettingError
from piebald.methods.training import AdaptiveFrequency

from .test_metis import classified_federation


class Scripted:
    """A client context with given validation losses: a row for each client, a column for each cycle after the first."""

    def __init__(self, losses: list[list[float]]) -> None:
        self.losses, self.cycle, self.walks = torch.tensor(losses), -1, 0

    def run_sgd(self, model: Tensor, config: Any, **_: Any) -> Any:
        from piebald.contracts import SgdOutcome

        self.walks += 1
        count = len(model)
        return SgdOutcome(model + 1, torch.full((count,), 4.0), torch.ones(count))

    def score(self, model: Tensor, split: str, metrics: bool = True) -> Any:
        self.cycle += 1
        return {"loss": self.losses[:, min(self.cycle, self.losses.shape[1] - 1)]}, None


def begin(
    trainer: AdaptiveFrequency, count: int, committed: float = 0.0, clients: list[int] | None = None, **state: Tensor
) -> TrainInput:
    kept = trainer.initial_state(torch.zeros(2), 2) | state
    stacked = {name: torch.stack([tensor] * count) for name, tensor in kept.items()}
    seen = torch.full((count, 1), committed, dtype=torch.float64)
    return TrainInput(torch.zeros(count, 2), 2, stacked, {}, [0] * count, seen, torch.ones(count, 1), clients or ())


@pytest.mark.parametrize(
    ("settings", "losses", "cycles"),
    [
        ({}, [1.0, 0.9, 0.8, 0.85, 0.1], 3),  # C1: the third cycle did not help
        ({"vc_tomb": 1}, [1.0, 0.9, 0.95, 0.8, 0.85, 0.1], 4),  # one failure is forgiven
        ({"vc_loss": 5.0}, [1.0, 0.9, 0.87, 0.1], 2),  # C2: 3.3 percent is too little
        ({"vc_loss": 5.0, "vc_tomb": 1}, [1.0, 0.9, 0.87, 0.8, 0.79], 4),
        ({"vc_loss": 25.0}, [1.0, 0.75, 0.1], 1),  # C2: |Vpct| <= VC_loss, so exactly 25 percent is too little as well
        ({"vc_loss": 25.0}, [1.0, 0.74, 0.7], 2),
        ({}, [1.0, 0.5, 0.5, 0.1], 2),  # C1: Vpct >= 0, so an equal loss is a failure
        ({"cycles": 2}, [1.0, 0.9, 0.8, 0.7], 2),
        ({}, [math.nan, math.nan, math.nan], 1),  # no validation rows: nothing shows that another cycle helps
    ],
)
def test_a_client_stops_where_another_cycle_does_not_help(
    settings: dict[str, Any], losses: list[float], cycles: int
) -> None:
    trainer, context = AdaptiveFrequency(**settings), Scripted([losses])
    output = trainer.train(begin(trainer, 1), context)
    assert context.walks == cycles
    assert output.steps.tolist() == [4.0 * cycles]
    assert output.model.tolist() == [[cycles] * 2]


def test_clients_of_a_stack_stop_one_by_one() -> None:
    trainer, context = AdaptiveFrequency(), Scripted([[1.0, 1.1, 0.0, 0.0], [1.0, 0.9, 0.8, 0.8], [1.0, 0.9, 0.9, 0.0]])
    output = trainer.train(begin(trainer, 3), context)
    assert output.steps.tolist() == [4.0, 12.0, 8.0]
    assert output.model[:, 0].tolist() == [1.0, 3.0, 2.0]
    assert not output.state["seen"].any()  # how many steps others took meanwhile comes with the next task
    inputs = dataclasses.replace(begin(trainer, 3, committed=100.0), state=output.state)
    after = trainer.train(inputs, Scripted([[1.0, 1.1]] * 3)).state
    assert after["seen"].flatten().tolist() == [1.0, 1.0, 1.0]  # one validation cycle each, however long
    assert after["staleness"][:, 0].tolist() == [100.0, 100.0, 100.0]


def requests(trainer: AdaptiveFrequency, losses: list[float], count: int, others: float = 0.0) -> list[float]:
    """Epochs of each request of one client with the same losses in each; others commit so many steps meanwhile."""
    inputs, committed, epochs = begin(trainer, 1), 0.0, []
    for _ in range(count):
        output = trainer.train(inputs, Scripted([losses]))
        epochs.append(float(output.steps[0]) / 4)
        committed += float(output.steps[0]) + others
        inputs = begin(trainer, 1, committed, **{name: tensor[0] for name, tensor in output.state.items()})
    return epochs


def test_a_validation_cycle_is_all_epochs_of_one_request() -> None:
    """Losses that stop falling after 5 epochs: each request takes 5, and the median of the cycles is 5, so it stays so.

    Before, partial sums of each request were noted too (1, 2, 3, 4, 5, ...): from the fifth request on it took 4.
    """
    falling = [1.0, 0.9, 0.8, 0.7, 0.6, 0.6]
    assert requests(AdaptiveFrequency(), falling, 30) == [5.0] * 30


def test_the_first_twenty_requests_set_the_median() -> None:
    """20 requests of 5 epochs, then losses that fall without end: C3 stops after the sixth, above the median of 5."""
    trainer = AdaptiveFrequency()
    short, long = [1.0, 0.9, 0.8, 0.7, 0.6, 0.6], [1.0 / (1 + epoch) for epoch in range(30)]
    inputs, epochs, seen = begin(trainer, 1), [], []
    for request in range(24):
        output = trainer.train(inputs, Scripted([short if request < 20 else long]))
        epochs.append(float(output.steps[0]) / 4)
        seen.append(int(output.state["seen"][0]))
        inputs = begin(trainer, 1, **{name: tensor[0] for name, tensor in output.state.items()})
    assert epochs == [5.0] * 20 + [6.0] * 4
    assert seen == [*range(21), 20, 20, 20]


def test_others_steps_count_in_a_cycle_once() -> None:
    """Others commit 180 steps while a request takes 5 epochs of 4: the effective staleness of each cycle is 200."""
    trainer, losses = AdaptiveFrequency(), [1.0, 0.9, 0.8, 0.7, 0.6, 0.6]
    inputs, committed = begin(trainer, 1), 0.0
    for _ in range(3):
        output = trainer.train(inputs, Scripted([losses]))
        committed += 200.0
        inputs = begin(trainer, 1, committed, **{name: tensor[0] for name, tensor in output.state.items()})
    # also of the first one, before whose end the client knows no speed of the others
    assert output.state["staleness"][0, :3].tolist() == [200.0, 200.0, 0.0]


def test_learners_of_two_classes_have_their_own_thresholds() -> None:
    """Metis, figure 3: VC_loss 0 and VC_tomb 4 for fast learners, 1 and 1 for slow ones; one stack of both."""
    trainer = AdaptiveFrequency(vc_tomb=4, groups=[{"clients": [1, 7], "vc_loss": 1.0, "vc_tomb": 1}])
    slowly = [1.0 - 0.005 * epoch for epoch in range(30)]  # falls by half a percent: a failure for slow learners only
    rising = [1.0 + 0.1 * epoch for epoch in range(30)]  # a failure for all
    context = Scripted([slowly, slowly, rising, rising])
    output = trainer.train(begin(trainer, 4, clients=[0, 1, 2, 7]), context)
    assert (output.steps / 4).tolist() == [20.0, 2.0, 5.0, 2.0]


def test_thresholds_of_groups_reach_the_clients_of_a_run() -> None:
    """The numbers of clients are those of the federation, whatever stack they train in."""
    clients = classified_federation((20, 20, 20))
    groups = [{"clients": [1], "vc_loss": 0.0, "vc_tomb": 99}]
    made = recipes.adaptive_dvw(cycles=6, vc_loss=99.0, groups=groups, lr=0.01, batch=20)
    rebuilt = recipes.rebuild(made.model_dump())
    assert rebuilt.training == made.training
    assert recipes.toml(made).count("vc_tomb = 99") >= 1
    for simulator in ({"engine": "sequential"}, {"engine": "vmapped", "stack": 3}):
        run = piebald.run(
            rebuilt.with_(scheduling={"kind": "synchronous"}), clients, nn.Linear(3, 2), rounds=1, evaluate_every=0,
            runtime=piebald.Simulator(workers=0, **simulator),
        )  # fmt: skip
        assert [row["steps"] for row in run.results if row["kind"] == "train"] == [1, 6, 1]


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (
            [{"clients": [1], "vc_loss": 1.0, "vc_tomb": 1}, {"clients": [1], "vc_loss": 0, "vc_tomb": 0}],
            "client 1 twice",
        ),
        (
            [{"clients": [1], "vc_los": 1.0, "vc_tomb": 1}],
            "no setting of a table called 'vc_los'",
        ),
        ([{"clients": [], "vc_loss": 1.0, "vc_tomb": 1}], "in number 0, a table: clients"),
        ("slow", "must be a list of tables"),
    ],
)
def test_bad_groups_are_refused(groups: Any, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        AdaptiveFrequency(groups=groups)


def test_staleness_beyond_the_median_of_the_first_cycles_stops() -> None:
    """Others took 9 steps for each of ours since last time (own 10, 100 committed): a cycle of 4 steps is 40 stale."""
    falling = [[1.0 / (1 + cycle) for cycle in range(30)]]
    past = torch.arange(1.0, 21.0) * 10  # median 105
    known = {"staleness": past, "seen": torch.tensor([20.0]), "met": torch.tensor([0.0, 10.0]).double()}
    trainer = AdaptiveFrequency()
    output = trainer.train(begin(trainer, 1, committed=100.0, **known), Scripted(falling))
    assert output.steps.tolist() == [12.0]  # 40, 80, 120
    assert output.state["staleness"][0].tolist() == past.tolist()  # only the first twenty set the measure
    assert output.state["met"][0].tolist() == [100.0, 12.0]
    patient = AdaptiveFrequency(limit_staleness=False).train(
        begin(trainer, 1, committed=100.0, **known), Scripted(falling)
    )
    assert patient.steps.tolist() == [80.0]  # all 20 cycles


def test_adaptive_training_only_ever_stops_earlier() -> None:
    """On real data: where every failure is forgiven it is plain training for as many epochs."""
    clients = classified_federation((30, 12, 7))
    forgiving = AdaptiveFrequency(cycles=3, vc_tomb=99, limit_staleness=False, lr=0.1)
    stop = {"engine": "sequential", "workers": 0}
    runs = [
        piebald.run(
            recipes.fedavg().with_(training=trainer),
            clients,
            nn.Linear(3, 2),
            rounds=2,
            runtime=piebald.Simulator(**stop),
        )
        for trainer in (forgiving, AdaptiveFrequency(cycles=3, lr=0.1))
    ]
    steps = [[row["steps"] for row in run.results if row["kind"] == "train"] for run in runs]
    assert steps[0] == [6, 3, 3] * 2
    assert all(mine <= theirs for mine, theirs in zip(steps[1], steps[0], strict=True))
