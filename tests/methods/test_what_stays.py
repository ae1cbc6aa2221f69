"""Which layers stay with a client, and what leaves it: the claims of FedBN, LG-FedAvg, HDAFL and Local."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.contract.conftest import carry_out, method


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


@pytest.mark.parametrize(
    ("name", "stays"),
    [("fedbn", ("1.",)), ("lg_fedavg", ("0.", "1.")), ("hdafl", ("3.",)), ("local", ("0.", "1.", "3."))],
)
def test_layers_that_stay_differ_and_all_others_are_the_same_for_everybody(
    name: str, stays: tuple[str, ...], tmp_path: Any
) -> None:
    run = carry_out(method(name, cohort=1.0), model=network(), rounds=2, out=tmp_path / "run")
    one, other = (run.model(client).state_dict() for client in (0, 1))
    for key in one:
        # batch norm takes the mean away again, so the gradient of the bias before it is 0, or rounding of 0
        if not key.endswith("num_batches_tracked") and not (key == "0.bias" and key.startswith(stays)):
            assert torch.equal(one[key], other[key]) != key.startswith(stays), key
    sent = {row["bytes_up"] for row in run.results if row["client"] is not None}
    shared = sum(
        tensor.numel() for key, tensor in one.items() if not key.startswith(stays) and tensor.is_floating_point()
    )
    assert sent == {4 * shared}
