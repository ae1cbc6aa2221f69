"""The summary of RESULTS.md: read from its own tables of differences, so that text and tables cannot differ."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shared.markdown import block, body

PHE_BEFORE = {"encrypt": 7.46, "decrypt": 2.11}  # milliseconds of `phe` on the day of the prototype
GAUSSIAN = "SMMD, Gaussian, sigma 1, encrypted"
BASE = "features as in reality, 5 and 8 in common"
COSTS = 0.01  # AUC that encryption may cost


@dataclass(frozen=True)
class Difference:
    """A row of the table of differences.

    Attributes:
        data: the data set.
        one: whose AUC.
        other: minus whose.
        mean: the difference.
        half: half of its 95 % interval, nan for one seed.
    """

    data: str
    one: str
    other: str
    mean: float
    half: float

    @property
    def verdict(self) -> str:
        """Whether it can be told apart from none."""
        if not self.half >= 0:  # nan: one seed
            return "no verdict from one seed"
        return "not shown" if abs(self.mean) <= self.half else "yes" if self.mean > 0 else "no, the opposite"

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ± {self.half:.4f} on {self.data}"


def differences(text: str) -> list[Difference]:
    """Return the rows of the table of differences."""
    found = []
    for *about, shown in body(block(text, "claims")):
        mean, _, half = shown.partition(" ± ")
        found.append(Difference(*about, float(mean), float(half)))
    return found


def seeds(text: str) -> str:
    """Return on how many seeds the scores rest, as the tables say."""
    counts = sorted({int(line[-1]) for name in ("credit", "census") for line in body(block(text, name))})
    return " to ".join(map(str, dict.fromkeys((counts[0], counts[-1])))) if counts else "no"


def summary(text: str) -> str:
    """Return the table of claims with what was found, or nothing where there are no differences."""
    every = differences(text)
    if not every:
        return ""
    encrypted = [row for row in every if row.other == row.one.replace(", encrypted", ", without encryption")]
    most = max(abs(row.mean) + max(row.half, 0.0) for row in encrypted)
    lines = ["| claim | found |", "| --- | --- |"]
    lines.append(
        f"| encryption costs less than {COSTS:g} AUC | {'yes' if most < COSTS else 'no'}: the intervals of "
        f"{len(encrypted)} pairs (two sets, five kernels) lie within {most:.4f} of no difference |"
    )
    for claim, rival in (
        ("transfer beats source only on the target's rows", "source only, without encryption"),
        ("transfer beats source only on its own features", "source only, on its own features, without encryption"),
        ("better than the co-occurring labels alone", "co-occurring labels only, without encryption"),
        ("the alignment improves the target (against alpha = 0)", "no alignment (alpha = 0), without encryption"),
        ("better than FTL", "FTL, encrypted"),
    ):
        rows = [row for row in every if (row.one, row.other) == (GAUSSIAN, rival)]
        if rows:
            lines.append(f"| {claim} | {'; '.join(f'{row.verdict}: {row}' for row in rows)} |")
    kernels = [row for row in every if row.one == GAUSSIAN and row.other.startswith("SMMD")]
    rows = [row for row in kernels if "eq. 5" in row.other]
    kernels = [row for row in kernels if row not in rows]
    if rows:
        lines.append(
            "| aligning each party's own rows (eq. 1) is better than the co-occurring ones (eq. 5) | "
            f"{'; '.join(f'{row.verdict}: {row}' for row in rows)} |"
        )
    ahead = [row for row in kernels if row.verdict == "yes"]
    behind = [row for row in kernels if row.verdict == "no, the opposite"]
    found = "yes" if len(ahead) == len(kernels) else "no"
    lines.append(
        f"| the Gaussian of sigma 1 is the best kernel | {found}: of {len(kernels)} comparisons it is ahead in "
        f"{len(ahead)}{_named(ahead)}, behind in {len(behind)}{_named(behind)}, and cannot be told apart in the rest |"
    )
    return "\n".join([*lines, "", f"± are halves of 95 % intervals over seeds ({seeds(text)}), paired by seed."])


@dataclass(frozen=True)
class Change:
    """A row of the table of one change at a time; F by how it is averaged."""

    data: str
    name: str
    auc: float
    mean: float
    half: float
    f: dict[str, float]
    seeds: int

    @property
    def shown(self) -> str:
        """The change and what it does."""
        return f"{self.name} {self.mean:+.3f} ± {self.half:.3f}"


def changes(text: str) -> list[Change]:
    """Return the rows of the table of changes that have an interval."""
    found = []
    for data, name, auc, apart, *f, count in body(block(text, "gap")):
        mean, _, half = apart.partition(" ± ")
        averages = dict(zip(("positives", "macro", "weighted"), map(float, f), strict=True))
        found.append(Change(data, name, float(auc), float(mean), float(half or "nan"), averages, int(count)))
    return found


def printed(text: str, row: str) -> dict[str, dict[str, float]]:
    """Return the paper's F and AUC of a row, by set."""
    for name, *values in body(block(text, "paper")):
        if name == row:
            one = [float(value) for value in values]
            return {"credit": {"f": one[0], "auc": one[1]}, "census": {"f": one[3], "auc": one[4]}}
    raise ValueError(f"the paper's table has no row {row!r}")


def gap(text: str) -> str:
    """Return what the changes explain, a line for each subject, or nothing where there is no table of them."""
    rows = changes(text)
    if not rows:
        return ""
    paper, alone = (printed(text, name) for name in ("Gaussian, sigma 1, encrypted", "source only"))
    lines = []
    for data, known in paper.items():
        here = [row for row in rows if row.data == data]
        ours = next(row for row in here if row.name == BASE)
        tried = [row for row in here if row.name != BASE and not row.name.startswith("source only")]
        near = min(ours.f, key=lambda how: abs(ours.f[how] - known["f"]))
        f = ", ".join(f"{how} {value:.3f}" for how, value in ours.f.items())
        lines.append(f"- F on {data}: {f}; the paper's {known['f']:.3f} is nearest to the average called {near}.")
        words = {
            "They raise it": [row.shown for row in tried if row.mean - row.half > 0],
            "They lower it": [row.shown for row in tried if row.mean + row.half < 0],
            "They change nothing that can be told": [row.shown for row in tried if not abs(row.mean) > row.half],
        }
        said = "".join(f"  {word}: {'; '.join(names)}." for word, names in words.items() if names)
        lines.append(f"- Changes on {data}, and what they do to the AUC of {ours.auc:.3f}.{said}")
        reached = [f"{row.name} ({row.auc:.3f})" for row in here if row.auc >= known["auc"] and row in tried]
        lines.append(
            f"- The paper's AUC of {known['auc']:.3f} on {data} is reached by: {'; '.join(reached) or 'none'}."
        )
        source = [row for row in here if row.name.startswith("source only")]
        own = "; ".join(f"with {row.name.removeprefix('source only, ')} {row.auc:.3f}" for row in source)
        lines.append(f"- Source only on {data}: {own}; in the paper {alone[data]['auc']:.3f}.")
    counts = sorted({row.seeds for row in rows})
    return "\n".join([*lines, "", f"Seeds: {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))}."])


def speed(text: str) -> str:
    """Return how long products and steps take, beside the prototype, or nothing where they were not measured."""
    both = [cells for cells in body(block(text, "speed")) if cells[10] != "-"]
    steps = body(block(text, "verify"))
    if not both or not steps:
        return ""
    ratios = [float(cells[8]) / float(cells[10]) for cells in both]
    lines = [
        "| speed | found |",
        "| --- | --- |",
        f"| one direction at 128 rows beside the prototype, processor seconds | faster in {sum(r < 1 for r in ratios)} "
        f"of {len(ratios)}: "
        + "; ".join(f"{cells[0]}, {cells[1]} {cells[8]} against {cells[10]}" for cells in both)
        + " |",
        "| a whole step of two processes at 128 rows, seconds | "
        + "; ".join(f"{cells[0]}, {cells[1]} {cells[5]}" for cells in steps if cells[2] == "128")
        + " |",
    ]
    now = dict(re.findall(r"(encrypt|decrypt) ([\d.]+) ms", block(text, "phe")))
    for name, before in PHE_BEFORE.items():
        if name in now:
            ratio = float(now[name]) / before
            lines.append(f"| `phe`, {name}, on this machine beside the prototype's day | {ratio:.2f} times as long |")
    return "\n".join(lines)


def _named(rows: list[Difference]) -> str:
    named = ", ".join(f"{row.other.removeprefix('SMMD, ').removesuffix(', encrypted')} {row}" for row in rows)
    return f" ({named})" if named else ""
