"""What is remade at full size, the most telling first, with the papers' figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

METHODS = ("FedAvg", "Local", "LG-Net (fine-tuning)", "K-Cluster (K = 5)", "DistFL")
TABLE_2 = {  # DistFL, table 2: the mean accuracy over the five types, per cent, in the order of METHODS
    "vgg": (33.97, 79.36, 83.32, 88.63, 91.08),
    "resnet": (30.29, 71.60, 78.00, 72.39, 85.41),
}
TABLE_6 = {  # DistFL, table 6: accuracy and the attack's success, per cent
    "FedAvg": (31.84, 56.15), "credit": (72.68, 2.26), "irls": (72.63, 2.35), "gra": (71.53, 2.48),
    "DistFL": (72.69, 2.22),
}  # fmt: skip
CLASSES = ("IID", "Non-IID(5)", "Non-IID(3)")
TABLE_I_200 = {"FedAvg": (71.13, 64.07, 48.69), "DVW": (77.09, 71.63, 61.91)}  # Metis, power law, after 200 rounds
TABLE_I_14K = {  # the same after 14,000 seconds with slow clients
    "SyncFedAvg": (51.49, 30.16, 12.02), "SyncDVW": (72.21, 62.81, 35.46), "AsyncFedAvg": (65.07, 42.45, 14.61),
    "FedAsync": (72.48, 56.72, 42.05), "AsyncDVW": (75.37, 68.07, 55.17), "AsyncDVW, adaptive": (76.82, 69.48, 57.03),
}  # fmt: skip
CGAU = {"plain": "0.780 with all shuffled; else a plot", "CGAU": "0.785 with all shuffled; else a plot"}
HDAFL = {  # table 3 prints the ends of Fig. 3's curves: clients a round, HDAFL, FedAvg, per cent
    "writer": {10: (79.61, 78.00), 20: (79.97, 78.88), 50: (80.47, 79.06)},
    "disjoint": {10: (97.53, 17.44), 20: (97.80, 18.99), 31: (97.78, 19.51)},
}
# The test accuracy, per cent, that the authors of FedSpeed (Sun et al. 2023, ICLR) publish with their program
# (github.com/woodenchild95/FL-Simulator, README): CIFAR-10, ResNet-18 with group norm, Dirichlet 0.1, ten of 100
# clients a round, batch 50, five local epochs, 1,000 rounds.  There, each client draws its classes and all have as many
# rows.
DIRICHLET = {"fedavg": 77.31, "fedprox": 76.86, "scaffold": 79.92, "fedadam": 77.58, "feddyn": 78.96}


# Seconds of a run on one H100: of "distfl vgg" measured beside two others, with TF32; of the rest, arithmetic from the
# seconds of a step there and the number of steps.
SECONDS = {
    ("distfl", "vgg"): 300, ("distfl", "resnet"): 3000, ("distfl", "replacement"): 600, ("metis", "synchronous"): 120,
    ("metis", "uneven"): 300, ("cgau", ""): 60, ("hdafl", ""): 90, ("dirichlet", ""): 4000,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One run.

    Attributes:
        table: the paper's table or figure.
        study: which function of `studies.py` makes it.
        about: what that function is told.
        seed: of partition, model and training.
        paper: the paper's figure.
    """

    table: str
    study: str
    about: tuple[str, ...]
    seed: int
    paper: str

    @property
    def name(self) -> str:
        """The row's name."""
        return f"{', '.join(self.about)}, seed {self.seed}"


def folder_name(study: str, about: Sequence[str]) -> str:
    """The name of the folder of a row's run."""
    return "-".join([study, *about]).replace(" ", "_").replace(",", "")


def expected_seconds(row: Row) -> int:
    """How long a row should take on an H100 (`SECONDS`)."""
    return SECONDS.get((row.study, row.about[0]), SECONDS.get((row.study, ""), 0))


def table_2(seed: int) -> Iterator[Row]:
    """DistFL's table 2: five methods with each network."""
    for part, figures in TABLE_2.items():
        for method, figure in zip(METHODS, figures, strict=True):
            yield Row("DistFL, Table 2, full width", "distfl", (part, method), seed, f"{figure:.2f}")


def metis() -> Iterator[Row]:
    """The column of Metis' table I for sizes by a power law."""
    for place, classes in reversed([*enumerate(CLASSES)]):
        for label, figures in TABLE_I_200.items():
            about = ("synchronous", classes, label)
            yield Row("Metis, Table I, power law, batch 100", "metis", about, 1990, f"{figures[place]:.2f}")
        for label, figures in TABLE_I_14K.items():
            about = ("uneven", classes, label)
            yield Row("Metis, Table I, power law, batch 100", "metis", about, 1990, f"{figures[place]:.2f}")


def table_6(seed: int) -> Iterator[Row]:
    """DistFL's table 6: one client of fifty replaces the model."""
    for method, (accuracy, success) in TABLE_6.items():
        figure = f"{accuracy:.2f} / {success:.2f}"
        yield Row("DistFL, Table 6: accuracy / attack success", "distfl", ("replacement", method), seed, figure)


def fig_2b(seed: int) -> Iterator[Row]:
    """CGAU's Fig. 2b, first its ends."""
    for shuffle in ("0.0", "1.0", "0.4", "0.2", "0.6", "0.8"):
        for method, figure in CGAU.items():
            yield Row("CGAU, Fig. 2b", "cgau", (f"shuffle {shuffle}", method), seed, figure)


def fig_3(seed: int) -> Iterator[Row]:
    """HDAFL's Fig. 3, 400 rounds."""
    for setting, figures in HDAFL.items():
        for cohort, (ours, base) in figures.items():
            for label, figure in (("HDAFL", ours), ("FedAvg", base)):
                yield Row("HDAFL, Fig. 3, 400 rounds", "hdafl", (setting, str(cohort), label), seed, f"{figure:.2f}")


def dirichlet(seed: int) -> Iterator[Row]:
    """CIFAR-10 with Dirichlet 0.1 and ResNet-18 with group norm."""
    for recipe, figure in DIRICHLET.items():
        said = f"{figure:.2f} with equal sizes"
        yield Row("CIFAR-10, Dirichlet 0.1, ResNet-18 with group norm", "dirichlet", (recipe,), seed, said)


def rows() -> Iterator[Row]:
    """All rows: one seed of everything before a second seed of anything."""
    for seed in (0, 1, 2):
        yield from table_2(seed)
        if seed == 0:
            yield from metis()
        yield from table_6(seed)
        yield from fig_2b(seed)
        yield from fig_3(seed)
        yield from dirichlet(seed)


STUDIES = ("distfl", "metis", "cgau", "hdafl", "dirichlet")
