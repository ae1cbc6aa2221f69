"""Methods whose authors have published their program: what Piebald and the programs are given, and ours.

Only NumPy is needed to import this.  Three of the six clients have other labels, so that clusters are worth having.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from inputs import CLASSES, CLIENTS, FEATURES, ROWS, TRAINING, USUAL, Arrays

CFL = {"eps1": 0.25, "eps2": 0.4}  # plain lengths
IFCA = {"k": 3}
WIDTHS = (1.0, 0.5, 0.3)  # of clients by their numbers, those beyond the third begin with the first again
CHANNELS, PICTURE = (6, 5), (1, 3, 4)
RANKS, WHOLE, ALPHA = (2, 1, 3, 1), 4, 16  # of adapters; the authors' program has this alpha in its text
WIDE, HIGH = 7, 5  # inputs and outputs of the adapted layer
EXAMPLES = (30, 10, 40, 20)
GATED, OUTPUTS = (8, 8), 10  # units of the gated layers; classes, and clients, of the authors' network
GATES = (
    "weight filter 0", "client filter 0", "weight gate 0", "client gate 0",
    "weight filter 1", "client filter 1", "weight gate 1", "client gate 1", "weight last", "client last",
)  # fmt: skip
CUT, NOISE = ("pulled apart", "noise")


def labels(given: Arrays) -> np.ndarray[Any, Any]:
    """Labels [clients, rows], in the second half of the clients one class further."""
    y = given["y"].copy()
    y[CLIENTS // 2 :] = (y[CLIENTS // 2 :] + 1) % CLASSES
    return y


def some_labels(given: Arrays) -> np.ndarray[Any, Any]:
    """Labels of which each client lacks the last one, or its own number's."""
    y = given["y"].copy()
    for client in range(CLIENTS):
        absent = client % CLASSES
        y[client] = np.where(y[client] == absent, (absent + 1) % CLASSES, y[client])
    return y


def updates(given: Arrays) -> dict[str, np.ndarray[Any, Any]]:
    """Clients' updates to be cut: two groups that pull apart, and noise in which no two are alike."""
    drawn = given["updates"][3:]
    sides = np.where(np.arange(len(drawn)) % 3 == 0, 1.0, -1.0)[:, None]
    return {CUT: (drawn + 2 * sides * given["updates"][0] / 8).astype(np.float32), NOISE: drawn}


def adapters(given: Arrays) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """A [rank, inputs] and B [outputs, rank] of each client."""
    drawn = given["updates"][3:]
    return [
        (drawn[client, : rank * WIDE].reshape(rank, WIDE), drawn[client, 100 : 100 + rank * HIGH].reshape(HIGH, rank))
        for client, rank in enumerate(RANKS)
    ]


def convolutions() -> Arrays:
    """First numbers of the network of two convolutions and a linear layer, by name in the order of the module."""
    draw, (first, second) = np.random.default_rng(2), CHANNELS
    sizes: dict[str, Any] = {
        "0.weight": (first, PICTURE[0], 3, 3), "0.bias": first,
        "1.weight": (second, first, 3, 3), "1.bias": second,
        "2.weight": (CLASSES, second), "2.bias": CLASSES,
    }  # fmt: skip
    return {name: (0.4 * draw.normal(size=size)).astype(np.float32) for name, size in sizes.items()}


def gates() -> Arrays:
    """Numbers of a network of gated units: kernels [inputs, units], and a vector of each client [clients, units]."""
    draw, found = np.random.default_rng(3), {}
    widths = (FEATURES, *GATED, OUTPUTS)
    for name in GATES[:-1]:  # the last layer has no vectors of clients
        whose, _, layer = name.partition(" ")
        place = int(layer.split()[-1]) if layer != "last" else len(GATED)
        first = OUTPUTS if whose == "client" else widths[place]
        found[name] = (0.5 * draw.normal(size=(first, widths[place + 1]))).astype(np.float32)
    return found


def results(given: Arrays) -> Arrays:
    """What Piebald makes of them; "events" are what another program cannot draw, and is told."""
    return _cut(given) | _chosen(given) | _narrow(given) | _products(given) | _gated(given)


def models_of_clients(recipe: Any, given: Arrays, model: Any) -> tuple[Any, np.ndarray[Any, Any]]:
    """A run on the clients with some other labels, and the model of each client at its end [clients, numbers]."""
    import ours
    import torch

    with ours.kept(recipe, ours.federation(given | {"y": labels(given)}), model) as run:
        models = [
            torch.cat([one.detach().flatten() for one in run.model(client).parameters()]) for client in range(CLIENTS)
        ]
    return run, torch.stack(models).numpy()


def _cut(given: Arrays) -> Arrays:
    """CFL: the models after a cut in a run, what was measured at it, and the cuts of given updates."""
    import personal
    import torch

    from piebald import recipes
    from piebald.core.cohort_matrix import gram

    found = {}
    rule = {"kind": "cfl", "relative": False, "least": 1, **CFL}
    recipe = recipes.cfl(**USUAL).with_(clustering=rule)
    run, models = models_of_clients(recipe, given, personal.network())
    (first,) = next(note["value"] for note in run.notes if note["name"] == "cuts")
    found["CFL, models"] = models
    found["CFL, lengths and cosine of the cut"] = np.array([first["mean"], first["longest"], first["cosine"]])
    for name, matrix in updates(given).items():
        inner = gram(torch.from_numpy(matrix))
        smaller, _ = recipe.clustering.halved(inner, inner.diagonal().sqrt())  # type: ignore[attr-defined]
        found[f"CFL, cut of {name}"] = sides(len(matrix), smaller)
    return found


def sides(count: int, half: Any) -> np.ndarray[Any, Any]:
    """Whether each client is on the other side of the cut than the first one."""
    one = np.isin(np.arange(count), np.asarray(half, dtype=int))
    made: np.ndarray[Any, Any] = (one != one[0]).astype(np.float64)
    return made


def _chosen(given: Arrays) -> Arrays:
    """IFCA: the model that each client ends with, the cluster that it chose in each round, and the first models."""
    import personal

    from piebald import recipes

    recipe = recipes.ifca(k=IFCA["k"], warm=0, **USUAL)
    run, models = models_of_clients(recipe, given, personal.network())
    rows = [row for row in run.results if row["kind"] == "train"]
    rows.sort(key=lambda row: (row["version"], row["client"]))
    chosen = np.array([row["cluster"] for row in rows], dtype=np.float64).reshape(-1, CLIENTS)
    first = recipe.clustering.candidates({}, run.work)["candidates"]  # type: ignore[attr-defined]
    return {"IFCA, models": models, "IFCA, clusters": chosen, "events, IFCA": first.numpy()}


def _narrow(given: Arrays) -> Arrays:
    """HeteroFL: the global model, also where clients lack classes and the loss is masked."""
    import ours
    import torch
    from torch import nn

    from piebald import recipes

    found = {}
    pictures = given | {"x": given["x"].reshape(CLIENTS, ROWS, *PICTURE)}
    for name, masked, y in (("HeteroFL", False, given["y"]), ("HeteroFL, masked", True, some_labels(given))):
        (first, second), numbers = CHANNELS, convolutions()
        model = nn.Sequential(
            nn.Conv2d(PICTURE[0], first, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(first, second, 3, 1, 1),
            nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(second, CLASSES),
        )  # fmt: skip
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), numbers.values(), strict=True):
                parameter.copy_(torch.from_numpy(value))
        recipe = recipes.heterofl(widths=WIDTHS, weights="equal", masked_loss=masked, **USUAL)
        found[name] = ours.flat(ours.trained(recipe, pictures | {"y": y}, int(TRAINING["rounds"]), model=model))
    return found


def _products(given: Arrays) -> Arrays:
    """FlexLoRA: what the adapters of each rank compute after the average [ranks, outputs, inputs]."""
    from types import SimpleNamespace

    import torch
    from torch import nn

    from piebald.contracts import Cohort, Update
    from piebald.core.parameters import Layout
    from piebald.methods.aggregation import ProductAverage

    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lora_A = nn.Parameter(torch.zeros(WHOLE, WIDE))
            self.lora_B = nn.Parameter(torch.zeros(HIGH, WHOLE))

    layout, rows, held = Layout.of(Adapter()), [], []
    for a, b in adapters(given):
        views = layout.views(row := torch.zeros(layout.size))
        views["lora_A"][: len(a)], views["lora_B"][:, : len(a)] = torch.from_numpy(a), torch.from_numpy(b)
        rows.append(row)
        held.append(row.nonzero().flatten())  # none of the drawn numbers is 0
    start, matrix = torch.zeros(layout.size), torch.stack(rows)
    changes = [Update({"model": row}, examples, 1, {}) for row, examples in zip(matrix, EXAMPLES, strict=True)]
    step = Cohort(list(range(len(rows))), [0] * len(rows), changes, matrix, 0, [start] * len(rows), held=held)
    server: Any = SimpleNamespace(model=start, spec=SimpleNamespace(layout=layout, initial=start), note=lambda *_: None)
    ended = layout.views(ProductAverage().aggregate(step, server)[0])
    made = [ended["lora_B"][:, :rank] @ ended["lora_A"][:rank] for rank in sorted({*RANKS})]
    return {"FlexLoRA, products": torch.stack(made).numpy()}


def _gated(given: Arrays) -> Arrays:
    """CGAU: each client's outputs, and gradients of the shared weights and of its own vectors."""
    import torch

    from piebald.models import GatedClassifier

    numbers = {name: torch.from_numpy(value) for name, value in gates().items()}
    network = GatedClassifier([FEATURES], OUTPUTS, units=GATED, dropout=0.0)
    units, last = [layer[0] for layer in network.features[1:]], network.classifier
    told, slopes = [], []
    for client in range(CLIENTS):
        with torch.no_grad():
            last.weight.copy_(numbers["weight last"].T)
            last.bias.zero_()
            for place, unit in enumerate(units):
                both = [numbers[f"weight {part} {place}"].T for part in ("filter", "gate")]
                unit.product.weight.copy_(torch.cat(both))
                unit.conditioning.filter.copy_(numbers[f"client filter {place}"][client])
                unit.conditioning.gate.copy_(numbers[f"client gate {place}"][client])
        network.zero_grad()
        logits = network(torch.from_numpy(given["x"][client]))
        torch.nn.functional.cross_entropy(logits, torch.from_numpy(given["y"][client])).backward()
        told.append(logits.softmax(1).detach())
        kernels = [half.T for unit in units for half in unit.product.weight.grad.chunk(2)] + [last.weight.grad.T]
        own = [one.grad for unit in units for one in (unit.conditioning.filter, unit.conditioning.gate)]
        slopes.append(torch.cat([one.reshape(-1) for one in (*kernels, *own)]))
    return {"CGAU, outputs": torch.stack(told).numpy(), "CGAU, gradients": torch.stack(slopes).numpy()}
