"""Flower: aggregation functions of its strategies, and its server optimizers, on the same updates."""

import sys

import numpy as np
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.strategy import FedAdam, FedAvgM, FedYogi
from flwr.server.strategy.aggregate import (
    aggregate,
    aggregate_bulyan,
    aggregate_krum,
    aggregate_median,
    aggregate_trimmed_avg,
)
from inputs import ADAPTIVE, BULYAN, EXPECTED, MOMENTUM, folder_of

given, out = folder_of(sys.argv)
updates = given["updates"]
results = [([row], int(count)) for row, count in zip(updates, given["examples"], strict=True)]
equal = [([row], 1) for row in updates]
found = {
    "weighted mean": aggregate(results)[0],
    "median": aggregate_median(results)[0],
    "trimmed mean": aggregate_trimmed_avg(results, EXPECTED / len(updates) + 1e-9)[0],
    "Krum": aggregate_krum(results, EXPECTED, 0)[0],
    "multi-Krum": aggregate_krum(equal, EXPECTED, len(updates) - EXPECTED)[0],
    "Bulyan": aggregate_bulyan(results, BULYAN, aggregate_krum, to_keep=0)[0],
}


def models(strategy):
    """The model after each step of a strategy whose only client moved by the average."""
    model, made = np.zeros(given["averages"].shape[1], dtype=np.float32), []
    for number, average in enumerate(given["averages"], 1):
        sent = ndarrays_to_parameters([model + average])
        answer = FitRes(Status(Code.OK, ""), sent, 1, {})
        model = parameters_to_ndarrays(strategy.aggregate_fit(number, [(None, answer)], [])[0])[0]
        made.append(model)
    return np.stack(made)


initial = ndarrays_to_parameters([np.zeros(given["averages"].shape[1], dtype=np.float32)])
usual = {"eta": ADAPTIVE["lr"], "beta_1": ADAPTIVE["beta1"], "beta_2": ADAPTIVE["beta2"], "tau": ADAPTIVE["tau"]}
found["FedAdam"] = models(FedAdam(initial_parameters=initial, **usual))
found["FedYogi"] = models(FedYogi(initial_parameters=initial, **usual))
found["FedAvgM"] = models(
    FedAvgM(initial_parameters=initial, server_learning_rate=MOMENTUM["lr"], server_momentum=MOMENTUM["beta"])
)
np.savez(out, **found)
