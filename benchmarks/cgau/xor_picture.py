"""The eight panels of appendix A: boundaries of an MLP and of a conditioned unit, and what the unit's halves do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
import xor
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.func import functional_call

BLUE, RED, GREY = "#2f6fb4", "#c8442d", "#505a68"
SIDE, EDGE = 201, 1.9


def draw(out: Path, path: Path) -> None:
    """Draw panels (a) to (h) of the paper's figure 3, for the best start of each model.

    Where conditioning is on, the upper half-plane is computed as the up client and the lower as the down client; where
    it is off, all of the plane by the same model, which knows no client."""
    found = json.loads((out / "xor.json").read_text())
    plain, gated = (_loaded(found, name) for name in (xor.MLP, xor.CONDITIONED))
    module, numbers = gated
    none = xor.without(numbers, "filter", "gate")
    panels: list[tuple[str, Callable[[], Tensor], bool]] = [
        ("(a) MLP", lambda: torch.sigmoid(_plane(*plain)), True),
        ("(b) CGAU", lambda: torch.sigmoid(_plane(*gated)), True),
        ("(c) filter, conditioning off", lambda: _halves(module, none)[0], False),
        ("(d) gate, conditioning off", lambda: _halves(module, none)[1], False),
        ("(e) filter, conditioned", lambda: _halves(*gated)[0], False),
        ("(f) gate, conditioned", lambda: _halves(*gated)[1], False),
        ("(g) without modulation", lambda: torch.sigmoid(_plane(module, xor.without(numbers, "filter"))), True),
        ("(h) without expression", lambda: torch.sigmoid(_plane(module, xor.without(numbers, "gate"))), True),
    ]
    figure = Figure(figsize=(12, 6.4), layout="constrained")
    for panel, (title, make, boundary) in zip(figure.subplots(2, 4).ravel(), panels, strict=True):
        with torch.no_grad():
            _panel(panel, make(), title, boundary)
    figure.savefig(path, dpi=110)


def _loaded(found: dict, name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    return xor.MODELS[name](), {key: torch.tensor(value) for key, value in found[name]["one"].items()}


def _grid() -> Tensor:
    """Points of the plane [SIDE * SIDE, 2], the second feature falling from row to row."""
    line = torch.linspace(-EDGE, EDGE, SIDE)
    second, first = torch.meshgrid(line.flip(0), line, indexing="ij")
    return torch.stack([first.ravel(), second.ravel()], 1)


def _by_client(value: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Values on the grid [SIDE, SIDE]: of the up client above, of the down client below."""
    grid = _grid()
    both = [value(grid, one) for one in torch.eye(2)]
    return torch.where(grid[:, 1] >= 0, both[xor.UP], both[xor.DOWN]).reshape(SIDE, SIDE)


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
    x, y = xor.points()
    for mark, client in zip("^v", (xor.UP, xor.DOWN), strict=True):
        colours = [BLUE if label > 0.5 else RED for label in y[client].tolist()]
        panel.scatter(x[client, :, 0], x[client, :, 1], c=colours, s=13, marker=mark, edgecolors="white", lw=0.4)
    panel.axhline(0, color=GREY, lw=0.6, ls=":")
    panel.set_title(title, fontsize=10)
    panel.set(xticks=(-1, 0, 1), yticks=(-1, 0, 1), xlabel="feature 1", ylabel="feature 2")
    panel.figure.colorbar(shown, ax=panel, shrink=0.8)
