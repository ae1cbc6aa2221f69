"""Constant answers beside a method count rows by their weights, as the scores do."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import piebald
from piebald.contracts import Rows
from piebald.core.metrics import count_loss
from piebald.methods.queries.row_scores import class_totals, constant_of, known_targets
from piebald.models import build_model

pd = pytest.importorskip("pandas")


def test_the_constant_answer_is_the_best_one_for_weighted_rows() -> None:
    """Before, it was that of most rows, which weighted scores put at 20 %, so that any method looked better."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"site": list("abc") * 60, "x": rng.normal(size=180), "ill": rng.random(180) < 0.3})
    frame = frame.assign(ill=np.where(frame.ill, "yes", "no"), w=np.where(frame.ill, 8.0, 1.0))
    clients = piebald.clients_from(frame, client="site", target="ill", weights="w")
    compared = piebald.compare(["fedavg", "local"], clients, build_model("logistic", (1,), 2), rounds=2)
    said = re.search(r"most frequent class \((\d+\.\d)%\)", str(compared))
    assert said is not None
    assert float(said[1]) > 60  # of weighted rows; 20 by the other class


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_weight_w_count_as_w_rows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = torch.tensor(rng.integers(1, 5, 21))
    y = torch.tensor(rng.integers(0, 4, 21))
    again = Rows(torch.zeros(int(weights.sum()), 1), y.repeat_interleave(weights))
    rows = Rows(torch.zeros(21, 1), y, weight=weights.float())
    assert class_totals(rows, 4).tolist() == class_totals(again, 4).tolist()
    values = torch.tensor(rng.normal(size=(21, 1)))
    repeated = values.repeat_interleave(weights, 0)
    assert constant_of("mean", values, weights).tolist() == pytest.approx(constant_of("mean", repeated).tolist())
    assert constant_of("median", values, weights).tolist() == constant_of("median", repeated).tolist()


@pytest.mark.parametrize("exposed", [True, False])
def test_the_constant_rate_is_the_best_one_of_all_rows_with_both_numbers(exposed: bool) -> None:
    rng = np.random.default_rng(0)
    exposure = rng.integers(1, 9, 40) if exposed else np.ones(40)
    pairs = np.stack([rng.poisson(0.3 * exposure), exposure], 1).astype(float)
    targets, weights = torch.tensor(pairs), torch.tensor(rng.integers(1, 4, 40)).double()
    missing = targets.clone()
    missing[:3, 0] = torch.nan
    for given, weight in ((targets, None), (targets, weights), (missing, weights)):
        rows = Rows(torch.zeros(40, 1), given if exposed else given[:, :1])
        found = constant_of("rate", known_targets(rows, "rate"), weight)
        known = ~given.isnan().any(1)
        each = torch.ones(40).double() if weight is None else weight
        rates = torch.linspace(-4, 2, 6001).double()[:, None, None]
        loss = (count_loss(rates.expand(-1, 40, 1).flatten(0, 1), given.repeat(6001, 1)).view(6001, 40) * each)[
            :, known
        ]
        assert float(found) == pytest.approx(float(rates[loss.sum(1).argmin()]), abs=1e-3)
    nothing = torch.tensor([[0.0, 4.0], [0.0, 6.0]])
    assert constant_of("rate", nothing).exp().item() == pytest.approx(0.05)  # half a count
    assert constant_of("rate", nothing[:0]).tolist() == [0.0]
