"""The stand-in for CUDA graphs passes sound steps and finds what a graph would get wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.devices.recorded_on_cpu import CannotRecord, Recording, same_steps

LENGTHS = (6, 6, 6, 2)  # rows of each step of an epoch
Fault = Callable[["TableStep"], None]


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def cnn() -> nn.Module:
    layers = nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 10))


class TableStep:
    """A training step on a flat vector that finds what changes from step to step in tables, by its own counter."""

    def __init__(self, network: Callable[[], nn.Module], adam: bool = False) -> None:
        torch.manual_seed(0)
        self.module, self.adam = network(), adam
        self.parameters = list(self.module.parameters())
        self.x, self.y = torch.rand(20, 1, 8, 8), torch.randint(0, 10, (20,))
        self.vector = torch.cat([one.detach().flatten() for one in self.parameters])
        at = 0
        for one in self.parameters:
            one.data = self.vector[at : at + one.numel()].view(one.shape)
            at += one.numel()
        self.places = torch.stack([torch.randperm(20)[:6] for _ in range(16)])
        self.rates = 0.05 / torch.arange(1.0, 17.0)
        self.mean, self.square, self.total = (
            torch.zeros_like(self.vector),
            torch.zeros_like(self.vector),
            torch.zeros(()),
        )
        self.number = torch.zeros(1, dtype=torch.int64)

    @property
    def reads(self) -> list[Tensor]:
        return [self.x, self.y, self.places, self.rates]

    @property
    def writes(self) -> list[Tensor]:
        return [self.vector, self.mean, self.square, self.total, self.number]

    def loss(self, length: int) -> Tensor:
        places = self.places.index_select(0, self.number)[0, :length]
        return nn.functional.cross_entropy(self.module(self.x[places]), self.y[places])

    def __call__(self, length: int = 6) -> None:
        loss = self.loss(length)
        gradients = torch.autograd.grad(loss, self.parameters)
        with torch.no_grad():
            rate = self.rates.index_select(0, self.number)[0]
            self.number += 1
            if self.adam:
                g = torch.cat([one.flatten() for one in gradients])
                self.mean.lerp_(g, 0.1)
                self.square.mul_(0.999).addcmul_(g, g, value=0.001)
                self.vector.sub_(rate * self.mean / (self.square / (1 - 0.999**self.number)).sqrt().add(1e-8))
            else:
                torch._foreach_sub_(self.parameters, torch._foreach_mul(gradients, rate))
            self.total += loss.detach()

    def recorded(self, step: Callable[[], None]) -> Recording:
        """The recording of a step, with the buffers as they were before it."""
        before = [buffer.clone() for buffer in self.writes]
        try:
            return Recording(step, self.reads, self.writes)
        finally:
            for buffer, value in zip(self.writes, before, strict=True):
                buffer.copy_(value)


@pytest.mark.parametrize("network", [perceptron, cnn])
@pytest.mark.parametrize("adam", [False, True])
def test_sound_steps_replay_with_their_own_bits(network: Callable[[], nn.Module], adam: bool) -> None:
    plain, replayed = TableStep(network, adam), TableStep(network, adam)
    recordings = {length: replayed.recorded(lambda length=length: replayed(length)) for length in set(LENGTHS)}
    for length in LENGTHS * 3:
        plain(length)
        recordings[length].replay()
        for found, expected in zip(replayed.writes, plain.writes, strict=True):
            assert torch.equal(found, expected)
    for length, first in recordings.items():  # the same from any row of the tables
        same_steps(first, replayed.recorded(lambda length=length: replayed(length)))


def a_host_read(step: TableStep) -> None:
    step.recorded(lambda: step() if bool(step.total >= 0) else None)


def a_fresh_index(step: TableStep) -> None:
    index = torch.arange(6)  # as if a new one were sent for every batch
    step.recorded(lambda: step.total.add_(step.x[index].sum()))


def a_write_to_what_is_read(step: TableStep) -> None:
    step.recorded(lambda: step.rates.mul_(0.5))


def a_shorter_batch(step: TableStep) -> None:
    same_steps(*(step.recorded(lambda length=length: step(length)) for length in (6, 2)))


def a_step_count_of_the_host(step: TableStep) -> None:
    taken: list[int] = []
    same_steps(*(step.recorded(lambda: (taken.append(1), step.vector.mul_(1 - 0.9 ** len(taken)))) for _ in range(2)))


def a_row_by_a_number_of_the_host(step: TableStep) -> None:
    same_steps(*(step.recorded(lambda row=row: step.total.add_(step.rates[row])) for row in range(2)))


def state_made_by_the_first_step(step: TableStep) -> None:
    state: dict[str, Tensor] = {}

    def momentum() -> None:
        if "u" not in state:
            state["u"] = torch.zeros_like(step.vector)
        step.vector.add_(state["u"].mul_(0.9))

    same_steps(*(step.recorded(momentum) for _ in range(2)))


def random_numbers(step: TableStep) -> None:
    step.recorded(lambda: step.total.add_(nn.functional.dropout(step.rates, 0.5).sum()))


def numbers_sent(step: TableStep) -> None:
    step.recorded(lambda: step.total.mul_(torch.tensor(2.0)))


FAULTS: dict[Fault, str] = {
    a_host_read: "the host waits",
    a_fresh_index: "no declared buffer",
    a_write_to_what_is_read: "only to be read",
    a_shorter_batch: "differ from step to step",
    a_step_count_of_the_host: "differ from step to step",
    a_row_by_a_number_of_the_host: "differ from step to step",
    state_made_by_the_first_step: "no declared buffer",
    random_numbers: "torch's generator",
    numbers_sent: "would not send again",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("network", [perceptron, cnn])
def test_planted_faults_are_found(network: Callable[[], nn.Module], fault: Fault) -> None:
    with pytest.raises(CannotRecord, match=FAULTS[fault]):
        fault(TableStep(network))


def test_what_was_not_declared_is_nothing_after_a_replay() -> None:
    step, seen = TableStep(cnn), list[Tensor]()
    recording = step.recorded(lambda: seen.extend(torch.autograd.grad(step.loss(6), step.parameters)))
    recording.replay()
    assert all(bool(gradient.isnan().all()) for gradient in seen)
