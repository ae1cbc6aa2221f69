"""What is remade at full size, the most telling first, with the papers' figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shared.stored import printed

DISTFL, METIS, TABLE_3 = printed("distfl"), printed("metis"), printed("hdafl")["table_3"]
CLASSES = ("IID", "Non-IID(5)", "Non-IID(3)")
LABELS = {  # of the columns of Metis' table I, by the part of its results
    "synchronous": ("rounds_200", ("FedAvg", "DVW")),
    "uneven": ("seconds_14k", ("SyncFedAvg", "SyncDVW", "AsyncFedAvg", "FedAsync", "AsyncDVW", "AsyncDVW, adaptive")),
}


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
    for part in ("vgg", "resnet"):
        for method, figure in zip(DISTFL["table_2"]["methods"], DISTFL["table_2"][part], strict=True):
            yield Row("DistFL, Table 2, full width", "distfl", (part, method), seed, f"{figure:.2f}")


def metis() -> Iterator[Row]:
    """The column of Metis' table I for sizes by a power law."""
    for classes in reversed(CLASSES):
        for part, (table, labels) in LABELS.items():
            for label, figure in zip(labels, METIS[table][f"power law, {classes}"], strict=True):
                about = (part, classes, label)
                yield Row("Metis, Table I, power law, batch 100", "metis", about, 1990, f"{figure:.2f}")


def table_6(seed: int) -> Iterator[Row]:
    """DistFL's table 6: one client of fifty replaces the model."""
    for method, (accuracy, success) in DISTFL["table_6"].items():
        figure = f"{accuracy:.2f} / {success:.2f}"
        yield Row("DistFL, Table 6: accuracy / attack success", "distfl", ("replacement", method), seed, figure)


def fig_2b(seed: int) -> Iterator[Row]:
    """CGAU's Fig. 2b, first its ends."""
    for shuffle in ("0.0", "1.0", "0.4", "0.2", "0.6", "0.8"):
        for method, figure in printed("cgau")["fig_2b"].items():
            yield Row("CGAU, Fig. 2b", "cgau", (f"shuffle {shuffle}", method), seed, figure)


def fig_3(seed: int) -> Iterator[Row]:
    """HDAFL's Fig. 3, 400 rounds."""
    for setting in ("writer", "disjoint"):
        for cohort, (ours, base) in TABLE_3[setting].items():
            for label, figure in (("HDAFL", ours), ("FedAvg", base)):
                yield Row("HDAFL, Fig. 3, 400 rounds", "hdafl", (setting, cohort, label), seed, f"{figure:.2f}")


def dirichlet(seed: int) -> Iterator[Row]:
    """CIFAR-10 with Dirichlet 0.1 and ResNet-18 with group norm."""
    for recipe, figure in printed("fedspeed")["dirichlet"].items():
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
