"""The pretended device refuses what a GPU refuses, counts what a GPU waits for, and passes for one without float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from piebald.core.machine import moved
from tests.contract.conftest import VARIANTS, method
from tests.devices.pretended import DEVICE, Mixed, pretended
from tests.devices.there import assert_as_on_the_cpu, carry_out
from tests.devices.waits import Waits

# Operations on `a` of the device and `b` of the host, and whether a GPU carries them out.
MIXED: dict[str, Any] = {
    "add": lambda a, b: a + b,
    "add a number": lambda a, b: a + b.sum(),
    "multiply into": lambda a, b: a.mul_(b),
    "dot": lambda a, b: a @ b,
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "where a number": lambda a, b: torch.where(a > 0, a, b.sum()),
    "index_select": lambda a, b: a.index_select(0, b.long()),
    "gather": lambda a, b: a.gather(0, b.long()),
    "into the host": lambda a, b: torch.add(a, a, out=b),
    "foreach": lambda a, b: torch._foreach_add([a], [b]),
    "fill a mask": lambda a, b: a.masked_fill(b > 0, 0.0),
    "loss": lambda a, b: torch.nn.functional.cross_entropy(a[None], b[:1].long()),
}
# What fake tensors let pass and CUDA refuses.
ALSO_REFUSED: dict[str, Any] = {
    "stack with a number": lambda a, b: torch.stack([a.sum(), b.sum()]),
    "two numbers": lambda a, b: torch.addcmul(a, b.sum(), b.sum()),
    "into a number": lambda a, b: b.sum().add_(a.sum()),
    "a generator": lambda a, b: torch.rand(3, generator=torch.Generator(), device=a.device),
    "a generator, in place": lambda a, b: a.normal_(generator=torch.Generator()),
}


@pytest.mark.parametrize("name", MIXED)
def test_the_pretended_device_refuses_what_torch_says_a_gpu_refuses(name: str) -> None:
    """Against fake tensors, which know torch's rules for CUDA without having any numbers."""
    operation = MIXED[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        refused = _refused(operation, torch.zeros(3, device="cuda"), torch.zeros(3), RuntimeError)
    with pretended():
        assert _refused(operation, torch.zeros(3, device=DEVICE), torch.zeros(3), Mixed) == refused


@pytest.mark.parametrize("name", ALSO_REFUSED)
def test_it_refuses_what_only_cuda_refuses(name: str) -> None:
    with pretended():
        assert _refused(ALSO_REFUSED[name], torch.zeros(3, device=DEVICE), torch.zeros(3), Mixed)


def _refused(operation: Any, a: Tensor, b: Tensor, error: type[Exception]) -> bool:
    try:
        operation(a, b)
    except error:
        return True
    return False


def test_the_pretended_device_keeps_numbers_and_counts_what_waits() -> None:
    with pretended(), Waits() as seen:
        a = moved(torch.arange(4.0), DEVICE)
        assert a.device == DEVICE
        assert (seen.sent, sum(seen.seen.values())) == (1, 0)
        assert (a * 2).sum().item() == 12.0
        assert a[a > 1].cpu().tolist() == [2.0, 3.0]
        assert torch.nonzero(a).shape == (3, 1)
        torch.zeros(2).to(DEVICE)
        assert a[torch.tensor([2])].sum().cpu() == 2.0  # a GPU takes places of the host, which it waits for
        with pytest.raises(Mixed):
            torch.zeros(4)[a.long()]
    assert {name: count for name, count in seen.seen.items() if count} == {
        "item": 1, "mask": 1, "to the host": 2, "nonzero": 1, "to the device": 1, "places": 1,
    }  # fmt: skip


WITHOUT_FLOAT64 = {
    "sums": (method("fedavg"), "batched"),
    "noise": (method("fedbn").with_(transforms=[{"kind": "gaussian", "clip": 0.1, "where": "client"}]), "sequential"),
    "hidden rows": (method("dp_sgd"), "vmapped"),
    "steps of Adam, by client": (method("fedavg", **VARIANTS["adamw, kept"]), "batched"),
    "features of classes": (method("fedproto"), "sequential"),
}


@pytest.mark.parametrize(
    "case", ["sums", *(pytest.param(one, marks=pytest.mark.full) for one in [*WITHOUT_FLOAT64][1:])]
)
def test_methods_run_where_there_is_no_float64(case: str) -> None:
    """As on Apple's GPUs."""
    recipe, engine = WITHOUT_FLOAT64[case]
    expected = carry_out(recipe, engine=engine, stack=3)
    with pretended(float64=False):
        with pytest.raises(TypeError, match="float64"):
            torch.zeros(2).double().to(DEVICE)
        found = carry_out(recipe, DEVICE, engine=engine, stack=3)
    assert_as_on_the_cpu(found, expected, 1e-4 if "Adam" in case else 0.0)
