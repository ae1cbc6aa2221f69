"""Weight divergence: how far one local epoch carries the clients' models apart (Zhao et al. 2018)."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn

from piebald.errors import SettingError
from piebald.objective import objective_for
from piebald.parameters import Layout
from piebald.partition.heterogeneity import Heterogeneity, weight_divergence
from piebald.partition.survey import survey
from piebald.randomness import generator

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from piebald.client_work import ClientWork
    from piebald.contracts import Clients, Fleet, Rows
    from piebald.objective import Objective

Measure = Literal["none", "data", "weights"]
MOST_NUMBERS = 500_000_000  # of all clients' models together, 2 GB


@dataclass(frozen=True, slots=True, eq=False)
class Divergence:
    """How far one epoch of local SGD takes models apart, as shares of a model's length.

    Attributes:
        clients: |w_k - w| / |w| of each client's model w_k [c]; w is their average by rows.  No row moves for it.
        pooled: |w - w_SGD| / |w_SGD| (Zhao et al. 2018, section 3.1), w_SGD after one epoch on all rows together, in
            batches as many times larger as there are clients, so that both take about as many steps; None where rows
            were not pooled.
    """

    clients: NDArray[np.float64]
    pooled: float | None


def diverge(
    clients: Clients,
    model: nn.Module,
    *,
    lr: float = 0.05,
    batch: int = 20,
    seed: int = 0,
    loss: Any = None,
    pool: bool = True,
) -> Divergence:
    """Train a copy of one model on each client for one epoch of plain SGD, and see how far they come apart.

    Zhao et al. compare FedAvg's model with one that was trained on all rows (`pooled`).  A real federation cannot pool
    rows, so each client's own number is measured from the clients' average.  Clients without training rows have none
    and are left out (NaN).

    Args:
        clients: who holds what.
        model: the first model, which is not changed.
        lr: learning rate.
        batch: rows a step.
        seed: of the orders of rows.
        loss: as in `piebald.run`.
        pool: also train on all rows together.

    Raises:
        SettingError: nobody has rows, or too many models to keep in memory.
    """
    layout = Layout.of(model)
    if len(clients) * layout.size > MOST_NUMBERS:
        raise SettingError(
            f"{len(clients)} models of {layout.size} numbers are too much to compare: take fewer clients, or a smaller "
            f"model, for at most {MOST_NUMBERS} numbers"
        )
    held = [clients.rows(client, "train") for client in range(len(clients))]
    some = [client for client, rows in enumerate(held) if len(rows)]
    if not some:
        raise SettingError("weight divergence needs clients with training rows, and no client has one")
    objective = objective_for(held[some[0]].y, loss)
    trained = [_epoch(model, layout, objective, held[client], lr, batch, (seed, client)) for client in some]
    centre = None
    if pool:
        x, y = torch.cat([held[client].x for client in some]), torch.cat([held[client].y for client in some])
        everything = type(held[some[0]])(x, y)
        centre = _epoch(model, layout, objective, everything, lr, batch * len(some), (seed, "pooled")).numpy()
    models = torch.stack(trained).numpy()
    apart, pooled = weight_divergence(models, np.array([len(held[client]) for client in some]), centre)
    every = np.full(len(clients), np.nan)
    every[some] = apart
    return Divergence(every, pooled)


def unlike(clients: Clients, fleet: Fleet | None, work: ClientWork, how: Measure) -> Heterogeneity | None:
    """How unlike the clients of a run are; None where nothing is asked for, or nothing can be said without loading.

    Args:
        clients: who holds what.
        fleet: their devices.
        work: the run's model, loss and seed.
        how: "data" for what is known of data and devices, "weights" also for the divergence of weights, or "none".
    """
    seen = None if how == "none" else survey(clients, fleet)
    if seen is None or how == "data":
        return seen
    apart = diverge(clients, work.model, seed=work.seed, loss=work.objective.loss)
    return replace(seen, divergence=apart.clients, pooled_divergence=apart.pooled)


def _epoch(
    model: nn.Module,
    layout: Layout,
    objective: Objective,
    rows: Rows,
    lr: float,
    batch: int,
    words: tuple[int | str, ...],
) -> Tensor:
    """One epoch of plain SGD from the model; its vector [p] afterwards.  The global random state is left as it was."""
    module = copy.deepcopy(model).train()
    optimiser = torch.optim.SGD(module.parameters(), lr=lr)
    dice = generator("divergence", *words)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(dice.integers(1 << 62)))  # for dropout
        order = torch.from_numpy(dice.permutation(len(rows)))
        for start in range(0, len(rows), batch):
            places = order[start : start + batch]
            if len(places) == 1 and len(rows) > 1:
                continue  # batch norm cannot learn from one row; a lone last one is left out for all models alike
            optimiser.zero_grad()
            torch.autograd.backward(objective.loss(module(rows.x[places]), rows.y[places]).mean())
            optimiser.step()
    return layout.flatten(module)
