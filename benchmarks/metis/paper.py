"""What the paper prints: conditions, the figures of Table I, and its tables and figures in order.

Stripelis, Ambite 2020, Accelerating federated learning in heterogeneous data and computational environments.
"""

from __future__ import annotations

from dataclasses import dataclass

CELLS = tuple((sizes, classes) for sizes in ("uniform", "skewed", "power law") for classes in (10, 5, 3))
SYNCHRONOUS = ("SyncFedAvg", "SyncDVW")
HETEROGENEOUS = ("SyncFedAvg", "SyncDVW", "AsyncFedAvg", "FedAsync", "AsyncDVW", "AsyncDVW, adaptive")
# Table I, percent: after 200 rounds on the homogeneous cluster
ROUNDS_200 = {
    ("uniform", "IID"): (82.95, 82.85),
    ("uniform", "Non-IID(5)"): (80.02, 79.94),
    ("uniform", "Non-IID(3)"): (75.76, 75.54),
    ("skewed", "IID"): (80.54, 80.66),
    ("skewed", "Non-IID(5)"): (72.24, 73.72),
    ("skewed", "Non-IID(3)"): (68.68, 69.65),
    ("power law", "IID"): (71.13, 77.09),
    ("power law", "Non-IID(5)"): (64.07, 71.63),
    ("power law", "Non-IID(3)"): (48.69, 61.91),
}
# Table I, percent: after 14,000 seconds on the heterogeneous cluster.  The conversion of the text damaged the heading;
# the order of the columns follows from the prose (FedAsync suffers on few classes, SyncFedAvg fails on the last row).
SECONDS_14K = {
    ("uniform", "IID"): (82.72, 82.07, 82.60, 80.45, 82.20, 82.72),
    ("uniform", "Non-IID(5)"): (79.33, 79.16, 80.09, 76.46, 79.93, 80.21),
    ("uniform", "Non-IID(3)"): (74.61, 74.53, 75.51, 68.97, 75.53, 75.59),
    ("skewed", "IID"): (78.99, 79.07, 79.27, 75.94, 79.74, 80.72),
    ("skewed", "Non-IID(5)"): (70.62, 71.57, 72.62, 64.28, 73.24, 73.22),
    ("skewed", "Non-IID(3)"): (66.81, 67.18, 68.24, 55.64, 68.73, 69.43),
    ("power law", "IID"): (51.49, 72.21, 65.07, 72.48, 75.37, 76.82),
    ("power law", "Non-IID(5)"): (30.16, 62.81, 42.45, 56.72, 68.07, 69.48),
    ("power law", "Non-IID(3)"): (12.02, 35.46, 14.61, 42.05, 55.17, 57.03),
}
# condition, as printed (section VI unless said otherwise)
CONDITIONS = {
    "training images": "50,000 (CIFAR-10)",
    "test images": "10,000",
    "pixels": "32 x 32",
    "network": "2-CNN of TensorFlow's tutorial",
    "clients": "10",
    "learning rate": "0.05",
    "momentum": "0.75",
    "batch": "100",
    "epochs per task": "4 (uf)",
    "validation rows": "5% for DVW, stratified; none for FedAvg, FedAsync",
    "rounds": "200",
    "seconds, heterogeneous": "14,000 of wall clock",
    "seed": "1990",
    "sizes": "uniform, skewed, power law 1.5",
    "classes": "IID, Non-IID(5), Non-IID(3)",
    "power law, Non-IID(5)": "8x1,7x1,6x1,5x7",
    "power law, Non-IID(3)": "8x1,4x1,3x8",
    "VC_Loss, fast and slow": "0, 1 (figure 3; those of Table I are not printed)",
    "VC_Tomb, fast and slow": "4, 1 (figure 3; those of Table I are not printed)",
    "most epochs in a cycle": "no limit",
    "FedAsync": "polynomial, mixing 0.5, rho 0.005",
    "seconds per step, fast": "not printed (GTX 1080 Ti)",
    "slow clients": "5 of 10, how much slower is not printed",
}


def gains(table: dict[tuple[str, str], tuple[float, ...]], labels: tuple[str, ...]) -> str:
    """Return each policy's least and largest difference to the first one over the cells of Table I, in points."""
    spans = []
    for place, label in enumerate(labels[1:], 1):
        apart = [row[place] - row[0] for row in table.values()]
        spans.append(f"{label} {min(apart):+.1f} to {max(apart):+.1f}")
    return f"minus {labels[0]}: {'; '.join(spans)}"


@dataclass(frozen=True)
class Row:
    """A table or figure of the paper.

    Attributes:
        name: as the paper numbers it.
        shows: what it shows.
        printed: the paper's figures, as far as the text gives them.
        part: the part of our results that makes it, or None.
        without: why it is not made here, and what it would need.
    """

    name: str
    shows: str
    printed: str
    part: str | None = None
    without: str = ""


ROWS = (
    Row("Figure 1", "architecture", "a drawing", None, "nothing to measure; see docs/explanation/how-it-works.md"),
    Row(
        "Figure 2", "time of a community model, with and without the cache, up to 1,000 clients",
        "constant against growing; numbers only in the picture", "cache",
    ),
    Row("Figure 3", "validation cycles of a fast and a slow learner", "VC_Loss 0, 1 and VC_Tomb 4, 1", "cycles"),
    Row(
        "Figure 4", "staleness of the first 20 cycles, fast and slow, sizes uniform and classes IID",
        "learners of one class have similar levels; numbers only in the picture", "uneven",
    ),
    Row("Figure 5", "accuracy over time, homogeneous, nine cells", "end points as in Table I, left", "synchronous"),
    Row(
        "Table I, left", "CIFAR-10, 10 equal clients, after 200 rounds", gains(ROUNDS_200, ("FedAvg", "DVW")),
        "synchronous",
    ),
    Row("Figure 6", "accuracy over time, 5 fast and 5 slow, nine cells", "end points as in Table I, right", "uneven"),
    Row(
        "Table I, right", "CIFAR-10, 5 fast and 5 slow clients, after 14,000 s", gains(SECONDS_14K, HETEROGENEOUS),
        "uneven",
    ),
    Row(
        "Table II, Figure 7", "CIFAR-100, ResNet-50, heterogeneous", "e.g. power law IID 16.5 to 44.4", None,
        "needs CIFAR-100's files and a GPU",
    ),
    Row(
        "Table III, Figure 8", "Extended MNIST By Class, heterogeneous", "e.g. power law IID 51.1 to 71.1", None,
        "needs EMNIST's files (814,255 images) and a GPU",
    ),
    Row(
        "Figure 9", "update requests and models exchanged, by policy", "x 2, and x 11 for DVW; totals in the picture",
        "uneven",
    ),
)  # fmt: skip
