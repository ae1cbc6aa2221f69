"""The page of the results, written from the lines that the runs left."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from shared.stored import Lines, table

METHODS = ("Local", "FedAvg", "fine-tuned")
SEEDS = (0, 1, 2)
NETWORKS = {
    "heart": ("logistic",),
    "tcga": ("linear",),
    "tcga-scaled": ("linear",),
    "shakespeare": ("lstm", "transformer"),
    "cifar10": ("resnet18",),
}


class Job(NamedTuple):
    """One run."""

    study: str
    network: str
    method: str
    seed: int


def jobs(only: Sequence[str] = tuple(NETWORKS), seeds: Sequence[int] = SEEDS) -> Iterator[Job]:
    """All runs: one seed of everything before a second one."""
    for seed in seeds:
        for name in only:
            for network in NETWORKS[name]:
                yield from (Job(name, network, method, seed) for method in METHODS)


@dataclass(frozen=True)
class Published:
    """One published row.

    Attributes:
        study, network, method: the row of this benchmark that it stands beside.
        values: per cent, for each client a list over its authors' seeds; one list under "" where only a mean over
            clients, or the common test rows, is published.
        source: where it stands.
        conditions: what was trained, and how it differs from here.
        alike: whether rows, model and training are the same, so that a verdict can be given.
    """

    study: str
    network: str
    method: str
    values: dict[str, list[float]]
    source: str
    conditions: str
    alike: bool


PUBLISHED = [Published(**row) for row in table(Path(__file__).with_name("published.toml"))["rows"]]


Line = dict[str, Any]
# what the small scale is, beyond what stands with the published figures
_SMALL = {
    "shakespeare": "The ten longest roles, windows of 80 characters that do not overlap, the last fifth of each role "
    "for testing; two LSTM layers of 128, or a decoder of two blocks of 64; AdamW with 0.005, batch 16, clipping at 1, "
    "one epoch a round.  Few rounds: the models are far from trained out.",
    "cifar10": "Ten clients with 3,000 of the 50,000 training images, ResNet-18 of width 8 instead of 64, random crops "
    "and flips, SGD with 0.1, batch 50, one epoch a round.  Few rounds: the models are far from trained out.",
}
_MANY = 6  # clients: more of them are summed up
_WORDS = {"label_accuracy": "Accuracy", "accuracy": "Accuracy", "concordance": "Harrell's concordance"}


def write(folder: Path, scale: str) -> Path:
    """Write RESULTS.md (at small scale) or RESULTS-full.md."""
    lines = Lines(folder / f"{scale}.jsonl").read()
    page = folder / ("RESULTS.md" if scale == "small" else f"RESULTS-{scale}.md")
    page.write_text(text(lines, scale), "utf-8")
    return page


def text(lines: list[Line], scale: str) -> str:
    """The page."""
    parts = [
        "# Real models beside published figures\n",
        f"`python benchmarks/real_models/run.py --scale {scale}` made the runs and this page.  Scores are of each "
        f"client's own test rows, in per cent: means over seeds, and standard deviations between "
        "them.  Published figures are cited below each table; none was measured here.\n",
    ]
    order = list(dict.fromkeys(line["study"] for line in lines))
    for name in order:
        parts.append(study_text([line for line in lines if line["study"] == name], scale))
    done = {tuple(line[field] for field in Job._fields) for line in lines}
    missing = [" ".join(map(str, job)) for job in jobs() if job not in done]
    if missing:
        parts.append(f"## Not run yet\n\n{len(missing)} runs, which the same command makes: {', '.join(missing)}.\n")
    return "\n".join(parts)


def study_text(lines: list[Line], scale: str) -> str:
    """One study: its table, then what is published."""
    few = len(lines[0]["values"]) <= _MANY
    clients = list(lines[0]["rows"])
    heads = clients if few else ["mean of clients", "lowest client", "weighted by rows", "common test rows"]
    made = [
        f"## {lines[0]['title']}\n",
        f"{_WORDS.get(lines[0]['metric'], lines[0]['metric'])}, {len(clients)} clients, "
        f"{sum(line['seconds'] for line in lines):.0f} seconds on one thread of a machine that others shared.\n",
        *([f"{_SMALL[lines[0]['study']]}\n"] if scale == "small" and lines[0]["study"] in _SMALL else []),
        f"| network | method | rounds | seeds | {' | '.join(heads)} |" + (" mean |" if few else ""),
        "|---|---|--:|--:|" + "--:|" * (len(heads) + few),
    ]
    key = lambda line: (line["network"], line["method"])  # noqa: E731
    firsts = list(dict.fromkeys(map(key, lines)))
    groups = [(one, [line for line in lines if key(line) == one]) for one in sorted(firsts, key=lambda one: one[0])]
    for (network, method), runs in groups:
        cells = [spread([run["values"].get(name) for run in runs]) for name in clients] if few else summary(runs)
        if few:
            cells.append(spread([statistics.mean(run["values"].values()) for run in runs]))
        made.append(f"| {network} | {method} | {runs[0]['rounds']} | {len(runs)} | {' | '.join(cells)} |")
    made.append("")
    if few:
        rows = ", ".join(f"{name} {count}" for name, count in lines[0]["rows"].items())
        made.append(f"Test rows: {rows}.\n")
    for (network, method), runs in groups:
        made += [
            beside(one, runs)
            for one in PUBLISHED
            if (one.study, one.network, one.method) == (runs[0]["study"], network, method)
        ]
    return "\n".join(made)


def summary(runs: list[Line]) -> list[str]:
    """Four numbers about many clients."""
    means = [statistics.mean(run["values"].values()) for run in runs]
    lowest = [min(run["values"].values()) for run in runs]
    weighted = [
        sum(value * run["rows"][name] for name, value in run["values"].items())
        / sum(run["rows"][name] for name in run["values"])
        for run in runs
    ]
    return [spread(means), spread(lowest), spread(weighted), spread([run["common"] for run in runs])]


def spread(values: Sequence[float | None]) -> str:
    """Mean and standard deviation over seeds; empty where there is no value."""
    found = [value for value in values if value is not None]
    if not found:
        return ""
    return f"{statistics.mean(found):.1f}" + (f" ± {statistics.stdev(found):.1f}" if len(found) > 1 else "")


def beside(one: Published, runs: list[Line]) -> str:
    """A published row, and the verdict."""
    figures = "; ".join(
        f"{name + ' ' if name else ''}{statistics.mean(values):.1f}"
        + (f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else "")
        for name, values in one.values.items()
    )
    said = f"- **{one.network}, {one.method}, published:** {figures}.  {one.conditions}.  *{one.source}.*"
    return f"{said}\n  **{verdict(one, runs)}**\n"


def verdict(one: Published, runs: list[Line]) -> str:
    """Whether the seeds' range here meets the published one at each client; no verdict where conditions differ."""
    if not one.alike:
        return "No verdict: the conditions differ."
    above, below = list[str](), list[str]()
    for name, values in one.values.items():
        ours = [round(run["values"][name], 1) for run in runs]  # published values are rounded so
        if min(ours) > max(values):
            above.append(name)
        elif max(ours) < min(values):
            below.append(name)
    met = len(one.values) - len(above) - len(below)
    said = f"Verdict: the range of our seeds meets the published range at {met} of {len(one.values)} sites"
    said += f"; above it at {', '.join(above)}" if above else ""
    return said + (f"; below it at {', '.join(below)}" if below else "") + "."
