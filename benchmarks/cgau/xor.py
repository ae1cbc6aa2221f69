"""XOR of an input and the client: how often each kind of unit solves it, and how a gated unit does."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from piebald.models import GatedUnit

STARTS, STEPS, RATE, ROWS = 50, 3000, 0.03, 40
BLUE, RED, GREY = "#2f6fb4", "#c8442d", "#505a68"


class Gated(nn.Module):
    """One gated unit and a threshold; the unit sees x, and the client only through its conditioning."""

    def __init__(self, filter: bool, gate: bool) -> None:
        super().__init__()
        self.unit = GatedUnit(1, 1, filter, gate, clients=2)
        self.out = nn.Linear(1, 1)

    def forward(self, x: Tensor, client: Tensor) -> Tensor:
        """Map inputs [n, 1] of one client [2] (one-hot) to logits [n]."""
        if self.unit.conditioning is not None:
            self.unit.conditioning.client = client
        return self.out(self.unit(x))[:, 0]


class Perceptron(nn.Module):
    """Plain units with two inputs: x and the client's number."""

    def __init__(self, units: int, activation: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, units), activation, nn.Linear(units, 1))

    def forward(self, x: Tensor, client: Tensor) -> Tensor:
        """See `Gated.forward`."""
        who = (client[1] - client[0]).expand(len(x), 1)
        return self.layers(torch.cat([x, who], 1))[:, 0]


MODELS = {
    "one gated unit, conditioned": lambda: Gated(True, True),
    "one gated unit, only its filter conditioned": lambda: Gated(True, False),
    "one gated unit, only its gate conditioned": lambda: Gated(False, True),
    "one gated unit, not conditioned": lambda: Gated(False, False),
    "MLP, one unit (tanh)": lambda: Perceptron(1, nn.Tanh()),
    "MLP, two units (tanh)": lambda: Perceptron(2, nn.Tanh()),
    "MLP, two units (ReLU)": lambda: Perceptron(2, nn.ReLU()),
}


def points() -> tuple[Tensor, Tensor]:
    """Return inputs [2, n, 1] of two clients, near -1 and 1, and labels [2, n]: the XOR of x > 0 and client B."""
    draw = torch.Generator().manual_seed(0)
    side = torch.arange(ROWS) % 2
    x = (2 * side - 1 + 0.2 * torch.randn(2, ROWS, generator=draw)).unsqueeze(2)
    return x, torch.stack([side, 1 - side]).float()


def train(make) -> tuple[dict[str, Tensor], Tensor, nn.Module]:
    """Train all starts at once by Adam.

    Return the parameters [starts, ...], each start's accuracy, and one module."""
    torch.manual_seed(0)
    modules = [make() for _ in range(STARTS)]
    for module in modules:
        for parameter in module.parameters():
            nn.init.normal_(parameter)
    numbers, _ = stack_module_state(modules)
    numbers = {name: value.detach().requires_grad_() for name, value in numbers.items()}
    module = copy.deepcopy(modules[0])
    x, y = points()

    def logits(own: dict[str, Tensor]) -> Tensor:
        return torch.stack([functional_call(module, own, (x[client], torch.eye(2)[client])) for client in range(2)])

    many = vmap(logits)
    optimiser = torch.optim.Adam(list(numbers.values()), RATE)
    for _ in range(STEPS):
        out = many(numbers)
        loss = nn.functional.binary_cross_entropy_with_logits(out, y.expand_as(out), reduction="none")
        optimiser.zero_grad()
        loss.mean((1, 2)).sum().backward()
        optimiser.step()
    right = ((many(numbers) > 0) == (y > 0.5)).float().mean((1, 2))
    return {name: value.detach() for name, value in numbers.items()}, right, module


def measure(out: Path) -> None:
    """Save how often each model solves it, and the parameters of its best start."""
    found = {}
    for name, make in MODELS.items():
        numbers, right, module = train(make)
        best = int(right.argmax())
        count = sum(parameter.numel() for parameter in module.parameters())
        kept = {key: value[best].tolist() for key, value in numbers.items()}
        found[name] = {"solved": int((right == 1).sum()), "best": float(right.max()), "numbers": count, "one": kept}
    out.mkdir(parents=True, exist_ok=True)
    (out / "xor.json").write_text(json.dumps(found))


def draw(out: Path, path: Path) -> None:
    """Draw, for each of two clients, the points, the filter, the gate, and their product with the threshold."""
    kept = json.loads((out / "xor.json").read_text())["one gated unit, conditioned"]["one"]
    module = Gated(True, True)
    module.load_state_dict({name: torch.tensor(value) for name, value in kept.items()}, strict=False)
    x, y = points()
    line = torch.linspace(-1.8, 1.8, 200).unsqueeze(1)
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    panels = figure.subplots(2, 4, sharex=True)
    slope, offset = module.out.weight.item(), module.out.bias.item()
    threshold, above = -offset / slope, BLUE if slope > 0 else RED
    below = RED if above == BLUE else BLUE
    with torch.no_grad():
        for client, row in enumerate(panels):
            module.unit.conditioning.client = torch.eye(2)[client]
            both = line @ module.unit.product.weight.T + module.unit.offsets()
            curves = [None, both[:, 0].tanh(), both[:, 1].sigmoid(), module.unit(line)[:, 0]]
            titles = ["points", "filter: tanh(W_f x + V_f c)", "gate: sigmoid(W_g x + V_g c)", "filter times gate"]
            for place, (panel, curve, title) in enumerate(zip(row, curves, titles, strict=True)):
                _panel(panel, line[:, 0], curve, x[client, :, 0], y[client])
                if client == 0:
                    panel.set_title(title, fontsize=10)
                if place == 3:
                    low, high = -1.15, 1.15
                    panel.axhspan(threshold, high, color=above, alpha=0.10, lw=0)
                    panel.axhspan(low, threshold, color=below, alpha=0.10, lw=0)
                    panel.axhline(threshold, color=GREY, lw=1, ls="--")
            row[0].set_ylabel(f"client {'AB'[client]}", fontsize=11)
    for panel in panels[1]:
        panel.set_xlabel("x")
    names = (("label 0", RED), ("label 1", BLUE))
    keys = [panels[0][0].scatter([], [], color=colour, label=name) for name, colour in names]
    figure.legend(handles=keys, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=120)


def _panel(panel, line: Tensor, curve: Tensor | None, x: Tensor, y: Tensor) -> None:
    colours = [BLUE if label > 0.5 else RED for label in y.tolist()]
    if curve is None:
        panel.scatter(x, torch.linspace(-0.6, 0.6, len(x)), c=colours, s=14)
        panel.set_yticks([])
    else:
        panel.plot(line, curve, color=GREY, lw=2)
        nearest = (line.unsqueeze(0) - x.unsqueeze(1)).abs().argmin(1)
        panel.scatter(x, curve[nearest], c=colours, s=14, zorder=3)
    panel.set_ylim(-1.15, 1.15)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(color="#e8ebef")
    panel.set_axisbelow(True)
