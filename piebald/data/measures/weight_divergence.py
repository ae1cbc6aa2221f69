"""Weight divergence: the distance between clients' models after one local epoch (Zhao et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from piebald.contracts import Clients, Fleet, Rows
from piebald.core import pytree
from piebald.core.arguments import Count, Positive, checked, checked_class
from piebald.core.errors import SettingError
from piebald.core.objective import objective_for
from piebald.core.parameters import Layout, copied
from piebald.core.randomness import generator, torch_seed
from piebald.data.measures.heterogeneity import Heterogeneity, survey, weight_divergence

if TYPE_CHECKING:
    from piebald.core.objective import Objective
    from piebald.methods.client_work import ClientWork


Measure = Literal["none", "data", "weights"]


MAX_PARAMETERS = 500_000_000  # of all clients' models together, 2 GB


@checked_class
@dataclass(frozen=True, slots=True, eq=False)
class Divergence:
    """The divergence of models after one epoch of local SGD, relative to the norm of a model.

    Attributes:
        clients: |w_k - w| / |w| of each client's model w_k [c]; w is their average weighted by rows,
            which needs no pooled rows.
        pooled: |w - w_SGD| / |w_SGD| (Zhao et al. 2018, section 3.1), w_SGD after one epoch on all rows together.
            Its batches are larger by a factor of the number of clients, so that both take about as many steps.  None
            where rows were not pooled.
    """

    clients: NDArray[np.float64]
    pooled: float | None


@checked
def diverge(
    clients: Clients,
    model: nn.Module,
    *,
    lr: Positive = 0.05,
    batch: Count = 20,
    seed: int = 0,
    loss: Any = None,
    pool: bool = True,
) -> Divergence:
    """Train a copy of one model on each client for one epoch of plain SGD, and measure the divergence.

    Zhao et al. compare FedAvg's model with one that was trained on all rows (`pooled`).  A real federation cannot pool
    rows, so the divergence of each client is measured from the clients' average.  Clients without training rows are
    left out (NaN).

    Args:
        clients: the clients and their rows.
        model: the initial model, which is not changed.
        lr: learning rate.
        batch: rows per step.
        seed: the seed of the order of rows.
        loss: as in `piebald.run`.
        pool: also train on all rows together.

    Raises:
        SettingError: no client has training rows, or the models are too large to keep in memory.
    """
    layout = Layout.of(model)
    if len(clients) * layout.size > MAX_PARAMETERS:
        raise SettingError(
            f"{len(clients)} models of {layout.size} parameters are too large to compare: use fewer clients, or a "
            f"smaller model, for at most {MAX_PARAMETERS} parameters"
        )
    held = [clients.rows(client, "train") for client in range(len(clients))]
    trainable = [client for client, rows in enumerate(held) if len(rows)]
    if not trainable:
        raise SettingError("weight divergence needs clients with training rows, and no client has one")
    objective = objective_for(held[trainable[0]].y, loss)
    # keyed by the client, so that its order of rows does not depend on which clients have rows
    trained = [_epoch(model, layout, objective, held[client], lr, batch, (seed, client)) for client in trainable]
    reference = None
    if pool:
        x, y = ([held[client].x for client in trainable], [held[client].y for client in trainable])
        all_rows = Rows(pytree.joined(x), pytree.joined(y))
        reference = _epoch(model, layout, objective, all_rows, lr, batch * len(trainable), (seed, "pooled")).numpy()
    models = torch.stack(trained).numpy()
    relative, pooled = weight_divergence(models, np.array([len(held[client]) for client in trainable]), reference)
    divergence = np.full(len(clients), np.nan)
    divergence[trainable] = relative
    return Divergence(divergence, pooled)


@checked
def measure_heterogeneity(
    clients: Clients, fleet: Fleet | None, work: ClientWork, how: Measure
) -> Heterogeneity | None:
    """Measure the heterogeneity of a run's clients; None where nothing is requested or known without loading data.

    Args:
        clients: the clients and their rows.
        fleet: the devices of the clients.
        work: the model, loss and seed of the run.
        how: "data" for measures of data and devices, "weights" for weight divergence as well, or "none".
    """
    measured = None if how == "none" else survey(clients, fleet)
    if measured is None or how == "data":
        return measured
    divergence = diverge(clients, work.model, seed=work.seed, loss=work.objective.loss)
    return replace(measured, divergence=divergence.clients, pooled_divergence=divergence.pooled)


def _epoch(
    model: nn.Module,
    layout: Layout,
    objective: Objective,
    rows: Rows,
    lr: float,
    batch: int,
    key: tuple[int | str, ...],
) -> Tensor:
    """The model vector [p] after one epoch of plain SGD.  The global random state is not changed."""
    module = copied(model).train()
    optimiser = torch.optim.SGD(module.parameters(), lr=lr)
    random = generator("divergence", *key)
    with torch_seed(int(random.integers(1 << 62))):  # for dropout
        order = torch.from_numpy(random.permutation(len(rows)))
        for start in range(0, len(rows), batch):
            places = order[start : start + batch]
            if len(places) == 1 and len(rows) > 1:
                continue  # batch norm cannot train on one row; a single last row is left out for all models
            optimiser.zero_grad()
            try:
                loss = objective.loss(pytree.run(module, rows[places].x), rows[places].y).mean()
            except Exception as error:
                raise SettingError(f"the model or the loss fails: {type(error).__name__}: {error}") from error
            torch.autograd.backward(loss)
            optimiser.step()
    return layout.flatten(module)
