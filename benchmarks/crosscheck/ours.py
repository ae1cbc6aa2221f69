"""What Piebald makes of the inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import inputs
import numpy as np
import pandas
import torch
from inputs import (
    ADAPTIVE,
    BUDGETS,
    BULYAN,
    DECAY,
    DELTA,
    DIRICHLET,
    EXPECTED,
    FEDALA,
    FEDAMP,
    FEDASYNC,
    FEDBUFF,
    FEDLC,
    KERNEL_SIGMA,
    MOMENTUM,
    MOON,
    PRIVATE,
    ROWS,
    TRAINING,
    USUAL,
    Arrays,
    label_statistics,
)
from shared.intervals import interval
from torch import Tensor, nn

import piebald
from piebald import recipes
from piebald.contracts import Cohort, Rows, StepContext, Update
from piebald.data import DataSet
from piebald.data.measures.heterogeneity import frechet
from piebald.data.partition import Dirichlet, Lists, PooledClients
from piebald.data.partition.devices import Devices, Homogeneous, LogNormal
from piebald.methods import aggregation
from piebald.methods.clustering import Attentive
from piebald.methods.recipe import Recipe
from piebald.methods.server_optimizer import Adam, Momentum, Yogi
from piebald.privacy import accounting
from piebald.vertical.kernels import GaussianKernel, LinearKernel, PolynomialKernel

AGGREGATORS: dict[str, aggregation.Aggregator] = {
    "weighted mean": aggregation.ExampleWeighted(),
    "median": aggregation.Median(),
    "trimmed mean": aggregation.TrimmedMean(attackers=EXPECTED),
    "Krum": aggregation.Krum(attackers=EXPECTED),
    "multi-Krum": aggregation.MultiKrum(attackers=EXPECTED),
    "Bulyan": aggregation.Bulyan(attackers=BULYAN),
    "geometric median": aggregation.GeometricMedian(iterations=1000),
}


def cohort(matrix: Tensor, examples: list[int]) -> Cohort:
    """Return the updates of one step."""
    updates = [Update({"model": row}, n, 1, {}, float(row.norm())) for row, n in zip(matrix, examples, strict=True)]
    return Cohort(list(range(len(matrix))), [0] * len(matrix), updates, matrix, 0)


def aggregations(given: Arrays) -> Arrays:
    """Each aggregator's average of the same updates, and the lines of IRLS."""
    nothing: Any = None  # these ask the server nothing
    step = cohort(torch.from_numpy(given["updates"]), given["examples"].tolist())
    found = {name: one.aggregate(step, nothing)[0].numpy() for name, one in AGGREGATORS.items()}
    for intercept in ("medians", "residuals"):
        irls = aggregation.Irls(intercept=intercept)
        found[f"IRLS line, {intercept}"] = irls.confidence(torch.from_numpy(given["cloud"]))[1].numpy()
    return found


def server_steps(given: Arrays) -> Arrays:
    """The model after each step of the server's optimizers, from the same averages."""
    found = {}
    for name, optimizer in {
        "FedAdam": Adam(**ADAPTIVE), "FedYogi": Yogi(**ADAPTIVE), "FedAvgM": Momentum(**MOMENTUM),
    }.items():  # fmt: skip
        model = torch.zeros(given["averages"].shape[1])
        state, models = optimizer.initial_state(model), []
        for version, average in enumerate(torch.from_numpy(given["averages"])):
            model, state = optimizer.step(model, average, StepContext(1, 1, version, state=state))
            models.append(model.numpy())
        found[name] = np.stack(models)
    return found


def federation(given: Arrays) -> PooledClients:
    """The clients, all rows for training."""
    x, y = torch.from_numpy(given["x"]).flatten(0, 1), torch.from_numpy(given["y"]).flatten()
    ends = np.arange(0, len(y) + 1, ROWS)
    return PooledClients(
        x, y, {"train": Lists(np.arange(len(y)), ends)}, classes=["a", "b", "c"], common=Rows(x[:0], y[:0])
    )


def trained(
    recipe: Recipe,
    given: Arrays,
    rounds: int,
    bias: bool = True,
    fleet: Devices | None = None,
    model: nn.Module | None = None,
) -> Any:
    """A run of a recipe on the clients."""
    return piebald.run(
        recipe, federation(given), model or inputs.linear(given, bias), rounds=rounds, evaluate_every=0,
        runtime=piebald.Simulator(workers=0, deterministic=True, fleet=fleet or Homogeneous()),
    )  # fmt: skip


@contextmanager
def kept(recipe: Recipe, clients: PooledClients, model: nn.Module) -> Iterator[Any]:
    """Give a run whose clients' own models can be asked for while it is open."""
    with TemporaryDirectory() as folder:
        yield piebald.run(
            recipe, clients, model, rounds=int(TRAINING["rounds"]), evaluate_every=0,
            runtime=piebald.Simulator(workers=0, deterministic=True), out=f"{folder}/run",
        )  # fmt: skip


def flat(run: Any) -> np.ndarray[Any, Any]:
    """The parameters of a run's last model, in the module's order."""
    return inputs.flat(run.model())


def training(given: Arrays) -> Arrays:
    """FedAvg, one DP-SGD client without noise, and FedAvg run to the optimum of a logistic regression."""
    first = {**given, "x": given["x"][:1], "y": given["y"][:1]}
    private = recipes.dp_sgd(lr=PRIVATE["lr"], steps=int(PRIVATE["steps"]), batch=ROWS, clip=PRIVATE["clip"], noise=0.0)
    optimum = recipes.fedavg(lr=0.5, steps=1, batch=ROWS, weight_decay=DECAY)
    return {
        "FedAvg": flat(trained(recipes.fedavg(**USUAL), given, int(TRAINING["rounds"]))),
        "DP-SGD": flat(trained(private, first, 1)),
        "logistic regression": flat(trained(optimum, given, 400, bias=False)),
    }


def against_drift(given: Arrays) -> Arrays:
    """Methods against drift, with the network of two layers; and the models that FedAMP sends."""
    made = {
        "MOON": recipes.moon(**MOON, **USUAL),
        "FedLC": recipes.fedlc(**FEDLC, **USUAL),
        "FedALA": recipes.fedala(adaptive_layers="*", weight_share=1.0, **FEDALA, **USUAL),
        "SCAFFOLD": recipes.scaffold(**USUAL),
    }
    body, head = inputs.two_layers(given)
    rounds, model = int(TRAINING["rounds"]), nn.Sequential(body, nn.ReLU(), head)
    found = {name: flat(trained(recipe, given, rounds, model=model)) for name, recipe in made.items()}
    models = torch.from_numpy(given["averages"])
    return found | {"FedAMP, models sent": (Attentive(**FEDAMP).weights(models) @ models).numpy()}


def asynchronous(given: Arrays) -> Arrays:
    """FedAsync and FedBuff on clients of different speeds, with the events that another program can replay."""
    found = {}
    uneven = LogNormal(seconds_per_step=1.0)
    for name, recipe, rounds in (
        ("FedAsync", recipes.fedasync(
            alpha=FEDASYNC["alpha"], a=FEDASYNC["a"], mu=FEDASYNC["mu"], lr=FEDASYNC["lr"], epochs=2, batch=ROWS
        ), FEDASYNC["rounds"]),
        ("FedBuff", recipes.fedbuff(
            buffer_size=int(FEDBUFF["buffer_size"]), a=FEDBUFF["a"], server_lr=FEDBUFF["server_lr"],
            lr=FEDBUFF["lr"], epochs=2, batch=ROWS,
        ), FEDBUFF["rounds"]),
    ):  # fmt: skip
        run = trained(recipe, given, int(rounds), fleet=uneven)
        rows = [row for row in run.results if row["kind"] == "train" and row["status"] == "ok"]
        rows.sort(key=lambda row: (row["version"], row["time"], row["id"]))
        found[f"events, {name}"] = np.array(
            [[row[key] for key in ("client", "sent_version", "version")] for row in rows]
        )
        found[name] = flat(run)
    return found


def budgets() -> Arrays:
    """Epsilons of single rows, by Renyi moments and by privacy loss distributions."""
    spent = [accounting.rows(noise, share, steps, DELTA) for noise, share, steps in BUDGETS]
    return {
        "epsilon, RDP": np.array([one.epsilon_rdp for one in spent]),
        "epsilon, PLD": np.array([one.epsilon_pld for one in spent]),
    }


def measures(given: Arrays) -> Arrays:
    """Distances of two clouds, scores, and an interval."""
    one, other = (given[name].astype(np.float64) for name in ("one", "other"))
    x, y = torch.from_numpy(one), torch.from_numpy(other)
    found = {
        "Fréchet distance": np.array(frechet(one.mean(0), np.cov(one.T), other.mean(0), np.cov(other.T))),
        "interval": np.array(interval(given["samples"].astype(float).tolist())),
    }
    for name, kernel in {
        "linear": LinearKernel(), "polynomial": PolynomialKernel(c=1.0, degree=3),
        "Gaussian": GaussianKernel(sigma=KERNEL_SIGMA),
    }.items():  # fmt: skip
        squared = kernel.value(x, x).mean() + kernel.value(y, y).mean() - 2 * kernel.value(x, y).mean()
        found[f"MMD, {name}"] = squared.numpy()
    return found


def dirichlet() -> Arrays:
    """Statistics of labels of partitions that were drawn by class."""
    rows, classes = int(DIRICHLET["rows"]), int(DIRICHLET["classes"])  # type: ignore[call-overload]
    y = torch.from_numpy(np.random.default_rng(0).permutation(np.arange(rows) % classes))
    source = DataSet("balanced", torch.zeros(rows, 1), y, [str(label) for label in range(classes)])
    found = {}
    for alpha in DIRICHLET["alphas"]:  # type: ignore[attr-defined]
        for balance in (True, False):
            parts = [
                Dirichlet(
                    clients=DIRICHLET["clients"], alpha=alpha, by="class", min_size=DIRICHLET["least"],
                    balance=balance, test=0.0, seed=seed,
                ).split(source).table("train")
                for seed in range(DIRICHLET["repeats"])  # type: ignore[call-overload]
            ]  # fmt: skip
            found[f"Dirichlet {alpha:g}, {'balanced' if balance else 'plain'}"] = np.array(
                [label_statistics(np.asarray(part)) for part in parts]
            )
    return found


def linear_models(given: Arrays) -> Arrays:
    """Generalised linear models of all clients' rows: coefficients, standard errors and deviance."""
    found = {}
    for name, target in inputs.glm_targets(given).items():
        rows = zip(given["x"].astype(np.float64), target, strict=True)
        clients = {str(k): pandas.DataFrame(x).rename(columns=str).assign(y=y) for k, (x, y) in enumerate(rows)}
        made = piebald.glm(clients, target="y", family=name)
        found[f"GLM, {name}"] = np.concatenate([made.coefficients, made.errors])
        found[f"GLM, {name}, deviance"] = np.array([made.deviance, made.null_deviance])
    return found


def results(given: Arrays) -> Arrays:
    """Everything."""
    made = aggregations(given) | server_steps(given) | training(given) | against_drift(given)
    made |= asynchronous(given) | budgets() | linear_models(given)
    return made | measures(given) | dirichlet()
