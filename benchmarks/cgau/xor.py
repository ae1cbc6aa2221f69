"""XOR of appendix A: how often each model solves it, and what a conditioned unit has learnt.

python benchmarks/cgau/xor.py    prints the table (about a minute)

Two features; the label is whether their signs differ.  There are two clients, which are the two half-planes: at the up
client the second feature is positive, at the down client negative.  No model is told the client but through its
conditioning, so without that the client is seen only in the sign of the second feature.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import binomtest
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from piebald.models import GatedUnit

STARTS, STEPS, RATE = 50, 3000, 0.03
ROWS, SPREAD = 40, 0.2  # points of each client, and the deviation of a cluster; the paper prints neither
UP, DOWN = 0, 1
CLIENTS = ("up", "down")


class Gated(nn.Module):
    """One gated unit of two features, and a threshold.

    Args:
        filter: whether the filter is conditioned on the client.
        gate: whether the gate is.
    """

    def __init__(self, filter: bool, gate: bool) -> None:
        super().__init__()
        self.unit = GatedUnit(2, 1, filter, gate, clients=2)
        self.out = nn.Linear(1, 1)

    def forward(self, x: Tensor, client: Tensor) -> Tensor:
        """Map rows [n, 2] of one client [2] (one-hot) to logits [n]."""
        if self.unit.conditioning is not None:
            self.unit.conditioning.client = client
        return self.out(self.unit(x))[:, 0]


class Perceptron(nn.Module):
    """Plain units of the two features; the client is ignored."""

    def __init__(self, units: int, activation: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, units), activation, nn.Linear(units, 1))

    def forward(self, x: Tensor, client: Tensor) -> Tensor:
        """See `Gated.forward`."""
        return self.layers(x)[:, 0]


CONDITIONED, BLIND, MLP = "one gated unit, conditioned", "one gated unit, not conditioned", "MLP, two units (tanh)"
MODELS: dict[str, Callable[[], nn.Module]] = {
    CONDITIONED: lambda: Gated(True, True),
    BLIND: lambda: Gated(False, False),
    "one gated unit, only its filter conditioned": lambda: Gated(True, False),
    "one gated unit, only its gate conditioned": lambda: Gated(False, True),
    MLP: lambda: Perceptron(2, nn.Tanh()),
    "MLP, two units (ReLU)": lambda: Perceptron(2, nn.ReLU()),
}


def points(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return rows [2, n, 2] of both clients, in clusters around (±1, ±1), and labels [2, n]: whether signs differ."""
    draw = torch.Generator().manual_seed(seed)
    first = (2.0 * (torch.arange(ROWS) % 2) - 1).expand(2, ROWS)
    second = torch.tensor([1.0, -1.0])[:, None].expand(2, ROWS)
    x = torch.stack([first, second], 2) + SPREAD * torch.randn(2, ROWS, 2, generator=draw)
    return x, (first != second).float()


def logits(module: nn.Module, numbers: dict[str, Tensor], x: Tensor) -> Tensor:
    """Logits [2, n] of the rows of both clients, with these parameters."""
    return torch.stack([functional_call(module, numbers, (x[client], torch.eye(2)[client])) for client in (UP, DOWN)])


def train(make: Callable[[], nn.Module], starts: int = STARTS, steps: int = STEPS) -> tuple[dict, Tensor, nn.Module]:
    """Train all starts at once by Adam, from standard normal numbers.

    Return the parameters [starts, ...], each start's accuracy, and one module."""
    torch.manual_seed(0)
    modules = [make() for _ in range(starts)]
    for parameter in (parameter for module in modules for parameter in module.parameters()):
        nn.init.normal_(parameter)
    numbers, _ = stack_module_state(modules)
    numbers = {name: value.detach().requires_grad_() for name, value in numbers.items()}
    module = copy.deepcopy(modules[0])
    x, y = points()
    many = vmap(lambda own: logits(module, own, x))
    optimiser = torch.optim.Adam(list(numbers.values()), RATE)
    for _ in range(steps):
        out = many(numbers)
        loss = nn.functional.binary_cross_entropy_with_logits(out, y.expand_as(out), reduction="none")
        optimiser.zero_grad()
        loss.mean((1, 2)).sum().backward()
        optimiser.step()
    right = ((many(numbers) > 0) == (y > 0.5)).float().mean((1, 2))
    return {name: value.detach() for name, value in numbers.items()}, right, module


def without(numbers: dict[str, Tensor], *halves: str) -> dict[str, Tensor]:
    """These parameters with the conditioning of some halves ("filter", "gate") turned off."""
    off = {f"unit.conditioning.{half}" for half in halves}
    return {name: torch.zeros_like(value) if name in off else value for name, value in numbers.items()}


def turned_off(numbers: dict[str, Tensor], solved: Tensor, module: nn.Module) -> dict[str, list[float]]:
    """Accuracy at the up and the down client of the starts that solve it, with conditioning turned off afterwards."""
    x, y = points()
    own = {name: value[solved] for name, value in numbers.items()}
    found = {}
    for name, halves in {
        "filter and gate": (),
        "gate only (no modulation)": ("filter",),
        "filter only (no expression)": ("gate",),
        "nothing": ("filter", "gate"),
    }.items():
        out = vmap(lambda one: logits(module, one, x))(without(own, *halves))
        found[name] = ((out > 0) == (y > 0.5)).float().mean((0, 2)).tolist()
    return found


def measure(out: Path, starts: int = STARTS, steps: int = STEPS) -> dict[str, Any]:
    """Save how often each model solves it, and the parameters of its best start."""
    found: dict[str, Any] = {}
    for name, make in MODELS.items():
        numbers, right, module = train(make, starts, steps)
        best = int(right.argmax())
        found[name] = {
            "solved": int((right == 1).sum()),
            "starts": starts,
            "best": float(right.max()),
            "mean": float(right.mean()),
            "numbers": sum(parameter.numel() for parameter in module.parameters()),
            "one": {key: value[best].tolist() for key, value in numbers.items()},
        }
        if name == CONDITIONED:
            found[name]["turned off"] = turned_off(numbers, right == 1, module)
    out.mkdir(parents=True, exist_ok=True)
    (out / "xor.json").write_text(json.dumps(found))
    return found


def interval(solved: int, starts: int) -> tuple[float, float]:
    """95 % interval of the share of starts (Clopper, Pearson 1934)."""
    made = binomtest(solved, starts).proportion_ci(0.95)
    return float(made.low), float(made.high)


def counts(found: dict[str, Any]) -> list[list[object]]:
    """Rows of the table: model, numbers, starts that solve it, their share with its interval, mean accuracy."""
    rows: list[list[object]] = []
    for name, one in found.items():
        low, high = interval(one["solved"], one["starts"])
        share = f"{one['solved'] / one['starts']:.0%} [{low:.0%}, {high:.0%}]"
        rows.append([name, one["numbers"], f"{one['solved']} of {one['starts']}", share, f"{100 * one['mean']:.0f}"])
    return rows


HEADS = ["model", "numbers", "starts that solve it", "share [95 %]", "mean accuracy, %"]


BLUE, RED, GREY = "#2f6fb4", "#c8442d", "#505a68"
SIDE, EDGE = 201, 1.9


def draw(out: Path, path: Path) -> None:
    """Draw panels (a) to (h) of the paper's figure 3, for the best start of each model.

    Where conditioning is on, the upper half-plane is computed as the up client and the lower as the down client; where
    it is off, all of the plane by the same model, which knows no client."""
    found = json.loads((out / "xor.json").read_text())
    plain, gated = (_loaded(found, name) for name in (MLP, CONDITIONED))
    module, numbers = gated
    none = without(numbers, "filter", "gate")
    panels: list[tuple[str, Callable[[], Tensor], bool]] = [
        ("(a) MLP", lambda: torch.sigmoid(_plane(*plain)), True),
        ("(b) CGAU", lambda: torch.sigmoid(_plane(*gated)), True),
        ("(c) filter, conditioning off", lambda: _halves(module, none)[0], False),
        ("(d) gate, conditioning off", lambda: _halves(module, none)[1], False),
        ("(e) filter, conditioned", lambda: _halves(*gated)[0], False),
        ("(f) gate, conditioned", lambda: _halves(*gated)[1], False),
        ("(g) without modulation", lambda: torch.sigmoid(_plane(module, without(numbers, "filter"))), True),
        ("(h) without expression", lambda: torch.sigmoid(_plane(module, without(numbers, "gate"))), True),
    ]
    figure = Figure(figsize=(12, 6.4), layout="constrained")
    for panel, (title, make, boundary) in zip(figure.subplots(2, 4).ravel(), panels, strict=True):
        with torch.no_grad():
            _panel(panel, make(), title, boundary)
    figure.savefig(path, dpi=110)


def _loaded(found: dict, name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    return MODELS[name](), {key: torch.tensor(value) for key, value in found[name]["one"].items()}


def _grid() -> Tensor:
    """Points of the plane [SIDE * SIDE, 2], the second feature falling from row to row."""
    line = torch.linspace(-EDGE, EDGE, SIDE)
    second, first = torch.meshgrid(line.flip(0), line, indexing="ij")
    return torch.stack([first.ravel(), second.ravel()], 1)


def _by_client(value: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Values on the grid [SIDE, SIDE]: of the up client above, of the down client below."""
    grid = _grid()
    both = [value(grid, one) for one in torch.eye(2)]
    return torch.where(grid[:, 1] >= 0, both[UP], both[DOWN]).reshape(SIDE, SIDE)


def _plane(module: nn.Module, numbers: dict[str, Tensor]) -> Tensor:
    return _by_client(lambda grid, client: functional_call(module, numbers, (grid, client)))


def _halves(module: nn.Module, numbers: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Filter tanh(W_f x + V_f c) and gate sigmoid(W_g x + V_g c) on the grid."""
    module.load_state_dict(numbers, strict=False)
    unit = module.unit

    def both(grid: Tensor, client: Tensor) -> Tensor:
        unit.conditioning.client = client
        return grid @ unit.product.weight.T + unit.offsets()

    return _by_client(lambda g, c: both(g, c)[:, 0].tanh()), _by_client(lambda g, c: both(g, c)[:, 1].sigmoid())


def _panel(panel: Axes, values: Tensor, title: str, boundary: bool) -> None:
    low = 0.0 if boundary or float(values.min()) >= 0 else -1.0
    shown = panel.imshow(
        values, extent=(-EDGE, EDGE, -EDGE, EDGE), cmap="RdBu" if boundary else "PuOr", vmin=low, vmax=1, alpha=0.75
    )
    if boundary:
        line = torch.linspace(-EDGE, EDGE, SIDE)
        panel.contour(line, line.flip(0), values, levels=[0.5], colors=GREY, linewidths=1.2)
    x, y = points()
    for mark, client in zip("^v", (UP, DOWN), strict=True):
        colours = [BLUE if label > 0.5 else RED for label in y[client].tolist()]
        panel.scatter(x[client, :, 0], x[client, :, 1], c=colours, s=13, marker=mark, edgecolors="white", lw=0.4)
    panel.axhline(0, color=GREY, lw=0.6, ls=":")
    panel.set_title(title, fontsize=10)
    panel.set(xticks=(-1, 0, 1), yticks=(-1, 0, 1), xlabel="feature 1", ylabel="feature 2")
    panel.figure.colorbar(shown, ax=panel, shrink=0.8)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in [HEADS, *counts(measure(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/cgau")))]:
        print(" | ".join(map(str, line)))
