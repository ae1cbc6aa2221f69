"""Figures of a federation before training: classes, sizes, embeddings and devices of the clients."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from piebald.contracts import Clients, Fleet, Split
from piebald.core import pytree
from piebald.core.errors import SettingError
from piebald.core.plain_text import any_letters
from piebald.core.private_files import replaced

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes
    from torch import Tensor

MOST_NAMED = 40  # clients or classes whose names fit on an axis
MOST_POINTS = 3000  # rows in a scatter
MOST_COLORED = 20  # clients in a scatter


def draw(
    clients: Clients,
    folder: Path,
    *,
    embed: Callable[[Tensor], Tensor] | None = None,
    fleet: Fleet | None = None,
    split: Split = "train",
) -> list[Path]:
    """Draw the figures for which these clients have data; return their paths.

    classes.png (rows of each class by client, as shares of the client's rows), sizes.png, embedding.png (two principal
    components, one color for each of the first clients) and devices.png.

    Args:
        clients: the clients.
        folder: folder to write to, created if missing.
        embed: inputs [n, ...] to embeddings [n, d].
        fleet: the clients' devices.
        split: split of the rows.

    Raises:
        SettingError: the folder cannot be written.
    """
    plans: dict[str, Callable[[Axes], bool]] = {
        "classes": lambda ax: heat_map(ax, clients, split),
        "sizes": lambda ax: sizes(ax, clients, split),
    }
    if embed is not None:
        plans["embedding"] = lambda ax: scatter(ax, clients, embed, split)
    if fleet is not None:
        plans["devices"] = lambda ax: devices(ax, fleet, len(clients))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        drawn = (_write(folder / f"{name}.png", plan) for name, plan in plans.items())
        return [path for path in drawn if path is not None]
    except OSError as error:
        raise SettingError(f"figures cannot be written to {folder}: {error}") from None


def _write(path: Path, plan: Callable[[Axes], bool]) -> Path | None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"text.parse_math": False}), any_letters():  # a client's name may hold dollar signs
        figure = Figure(figsize=(7.2, 4.4), layout="constrained")
        if not plan(figure.subplots()):
            return None
        with replaced(path) as part:
            figure.savefig(part, dpi=120, format="png")
    return path


def heat_map(ax: Axes, clients: Clients, split: Split = "train") -> bool:
    """Classes by clients; the color is a class's share of the client's rows."""
    if clients.classes is None or clients.counts(0, split) is None:
        return False
    table = np.array([clients.counts(client, split) for client in range(len(clients))], dtype=np.float64)
    shares = table / np.maximum(table.sum(1, keepdims=True), 1)
    image = ax.imshow(shares.T, aspect="auto", cmap="Blues", vmin=0, interpolation="nearest")
    ax.figure.colorbar(image, ax=ax, label="share of the client's rows")
    if len(clients.classes) <= MOST_NAMED:
        ax.set_yticks(range(len(clients.classes)), list(clients.classes))
    _clients_axis(ax, clients)
    ax.set_ylabel("class")
    ax.set_title("Classes of each client", loc="left")
    return True


def sizes(ax: Axes, clients: Clients, split: Split = "train") -> bool:
    """Rows of each client."""
    counts = [clients.size(client, split) for client in range(len(clients))]
    rows = [count for count in counts if count is not None]
    if len(rows) < len(counts):
        return False
    ax.bar(range(len(rows)), rows, color="#2f6db5", width=0.9)
    _clients_axis(ax, clients)
    ax.set_ylabel("rows")
    ax.set_title("Sizes", loc="left")
    return True


def scatter(ax: Axes, clients: Clients, embed: Callable[[Tensor], Tensor], split: Split = "train") -> bool:
    """Two principal components of the embeddings, colored by client."""
    from sklearn.decomposition import PCA

    shown = range(min(len(clients), MOST_COLORED))
    most = max(MOST_POINTS // len(shown), 2)
    parts: list[NDArray[Any]] = []
    for client in shown:
        rows = clients.rows(client, split)
        # rounded up, so that no client has more than its share of points
        step = -(-len(rows) // most) or 1
        parts.append(
            embed(pytree.single(rows[::step].x, "an embedding")).detach().cpu().numpy()
            if len(rows)
            else np.zeros((0, 0))
        )
    filled = [part for part in parts if len(part)]
    if not filled or min(sum(map(len, filled)), filled[0].shape[1]) < 2:
        return False
    pca = PCA(2).fit(np.concatenate(filled))
    from matplotlib import colormaps

    color = colormaps["tab10" if len(shown) <= 10 else "tab20"]
    for client, part in zip(shown, parts, strict=True):
        if len(part):
            x, y = pca.transform(part).T
            ax.scatter(x, y, s=6, alpha=0.6, linewidths=0, color=color(client), label=clients.names[client])
    ax.legend(title="client", fontsize=7, markerscale=2, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    ax.set_xlabel(f"first principal component ({pca.explained_variance_ratio_[0]:.0%} of the variance)")
    ax.set_ylabel(f"second ({pca.explained_variance_ratio_[1]:.0%})")
    few = "" if len(clients) <= MOST_COLORED else f" of the first {MOST_COLORED} clients"
    ax.set_title(f"Embeddings{few}", loc="left")
    return True


def devices(ax: Axes, fleet: Fleet, clients: int) -> bool:
    """Seconds of one optimizer step on each client's device."""
    from matplotlib.ticker import MaxNLocator

    seconds = [fleet.device(client).seconds_per_step for client in range(clients)]
    ax.bar(range(clients), seconds, color="#b5622f", width=0.9)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("client")
    ax.set_ylabel("seconds per step")
    ax.set_title("Devices", loc="left")
    return True


def _clients_axis(ax: Axes, clients: Clients) -> None:
    if len(clients) <= MOST_NAMED:
        ax.set_xticks(range(len(clients)), list(clients.names), rotation=90 if len(clients) > 12 else 0, fontsize=7)
    ax.set_xlabel("client")


def flat(x: Tensor) -> Tensor:
    """Inputs as embeddings [n, d], flattened; large images are averaged to 8 x 8 pixels, long signals to 32 samples."""
    from torch.nn import functional

    if x.dim() == 4 and x.shape[1:].numel() > 256:
        x = functional.adaptive_avg_pool2d(x.float(), 8)
    elif x.dim() == 3 and x.shape[1:].numel() > 256:
        x = functional.adaptive_avg_pool1d(x.float(), 32)
    return x.float().flatten(1)
