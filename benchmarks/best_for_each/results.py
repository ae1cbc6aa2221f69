"""RESULTS.md from what was measured."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

COMMAND = (
    "python benchmarks/best_for_each/run.py --out runs/best_for_each --results benchmarks/best_for_each/RESULTS.md"
)
ROLES = ("shared", "rule 0", "rule 1", "rule 2")
TITLES = {
    "shared": "what the recipe gives",
    "rule 0": "lowest validation loss",
    "rule 1": "one standard error",
    "rule 2": "two standard errors",
}
NAMES = {"digits": "digits, Dirichlet(0.3)", "mnist_writers": "MNIST by writer", "har": "HAR by person",
         "heart": "heart, four hospitals"}  # fmt: skip

Clients = list[dict[str, Any]]


def write(folder: Path, file: Path) -> Path:
    """Write the tables."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for name in NAMES:
        for recipe in ("fedavg", "hdafl"):
            if found := [run for run in runs if (run["federation"], run["recipe"]) == (name, recipe)]:
                groups[name, recipe] = found
    text = _head(runs) + _verdict(groups)
    text += _losers(groups, "loss") + _losers(groups, "accuracy") + _scores(groups) + _choices(groups) + _cost(groups)
    file.write_text(text)
    return file


def _head(runs: list[dict[str, Any]]) -> str:
    seeds = sorted({run["seed"] for run in runs})
    return f"""# Who loses by joining?

`keep = "best_for_each"` lets each client take the best of several models by its own validation rows, with a guard
against luck.  The promise is that nobody loses by joining, beyond noise: at most 1 % of the clients end with a model
that is worse on their test rows than the one they would have trained alone, with the same work, by more than two
standard errors of the paired differences of rows.  Two standard errors are passed by luck alone by 2.3 % of clients
whose two models are equally good, and by none whose two models are the same.

Seeds {", ".join(map(str, seeds))}.  Made by

    {COMMAND}

"""


def _verdict(groups: dict[tuple[str, str], list[dict[str, Any]]]) -> str:
    """Whether the goal is reached, with the rows of HAR and without them."""
    lines = ["## Whether the goal is reached\n"]
    for recipe in ("fedavg", "hdafl"):
        found = {name: _clients(runs) for (name, made), runs in groups.items() if made == recipe}
        everybody = [one for clients in found.values() for one in clients]
        others = [one for name, clients in found.items() if name != "har" for one in clients]
        parts = []
        for measure in ("accuracy", "loss"):
            share, before, without = (
                f"{100 * sum(_loses(one, role, measure) for one in clients) / len(clients):.1f} %"
                for clients, role in ((everybody, "rule 1"), (everybody, "shared"), (others, "rule 1"))
            )
            parts.append(f"by {measure} {share} (with {recipe} alone {before}; without HAR {without})")
        lines.append(f"- {recipe}: {'; '.join(parts)}.")
    return (
        "\n".join(lines)
        + """

The goal of 1 % is reached where it says so above, and missed elsewhere.  Windows of HAR overlap by half and come in
segments: rows are no independent draws there, so a standard error over rows is too small, on validation rows (the guard
is passed by luck more often) and on test rows (more clients seem to lose).  The loss is the stricter measure: a model
that is as often right but surer of its mistakes loses by it.

"""
    )


def _clients(runs: list[dict[str, Any]]) -> Clients:
    return [client for run in runs for client in run["clients"] if client["compared"] and client["rows"][1] > 1]


def _loses(client: dict[str, Any], role: str, measure: str) -> bool:
    difference, error = client["compared"][role][measure]
    return bool(difference > 2 * error + 1e-12)


def _losers(groups: dict[tuple[str, str], list[dict[str, Any]]], measure: str) -> str:
    lines = [
        f"## Clients that lose against training alone, by {measure}\n",
        f"| federation | recipe | clients x seeds | {' | '.join(TITLES[role] for role in ROLES)} |",
        f"|---|---|{'--:|' * (1 + len(ROLES))}",
    ]
    everybody: dict[str, Clients] = {}
    for (name, recipe), runs in groups.items():
        clients = _clients(runs)
        everybody.setdefault(recipe, []).extend(clients)
        lines.append(f"| {NAMES[name]} | {recipe} | {len(clients)} | {_shares(clients, measure)} |")
    for recipe, clients in everybody.items():
        lines.append(f"| **all** | {recipe} | {len(clients)} | {_shares(clients, measure)} |")
    return "\n".join(lines) + "\n\n"


def _shares(clients: Clients, measure: str) -> str:
    return " | ".join(
        f"{100 * sum(_loses(one, role, measure) for one in clients) / len(clients):.1f} %" for role in ROLES
    )


def _scores(groups: dict[tuple[str, str], list[dict[str, Any]]]) -> str:
    lines = [
        "## Mean accuracy of clients on test rows\n",
        f"| federation | recipe | alone | {' | '.join(TITLES[role] for role in ROLES)} |",
        f"|---|---|{'--:|' * (1 + len(ROLES))}",
    ]
    for (name, recipe), runs in groups.items():
        clients = _clients(runs)
        alone = [one["compared"]["shared"]["alone"] for one in clients]
        means = [_percent([one["compared"][role]["score"] for one in clients]) for role in ROLES]
        lines.append(f"| {NAMES[name]} | {recipe} | {_percent(alone)} | {' | '.join(means)} |")
    return "\n".join(lines) + "\n\n"


def _percent(values: list[float]) -> str:
    return f"{100 * sum(values) / len(values):.1f} %"


def _choices(groups: dict[tuple[str, str], list[dict[str, Any]]]) -> str:
    names = ("global", "personal", "fine_tuned", "mixed", "local")
    lines = [
        "## What clients choose (one standard error), and what each candidate scores on test rows\n",
        f"| federation | recipe | {' | '.join(names)} |",
        f"|---|---|{'--:|' * len(names)}",
    ]
    for (name, recipe), runs in groups.items():
        clients = _clients(runs)
        taken = Counter(one["compared"]["rule 1"]["model"] for one in clients)
        cells = []
        for model in names:
            scores = [one["candidates"][model] for one in clients if model in one["candidates"]]
            cells.append(f"{100 * taken[model] / len(clients):.0f} % ({_percent(scores)})" if scores else "")
        lines.append(f"| {NAMES[name]} | {recipe} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n\n"


def _cost(groups: dict[tuple[str, str], list[dict[str, Any]]]) -> str:
    lines = [
        "## Cost\n",
        "Seconds of one run without evaluation, and of its clients' choice, on one core that others shared.  Nothing",
        "is sent.\n",
        "| federation | recipe | optimizer steps | run | choice |",
        "|---|---|--:|--:|--:|",
    ]
    for (name, recipe), runs in groups.items():
        run, choice = (sum(one["seconds"][part] for one in runs) / len(runs) for part in ("run", "choice"))
        steps = sum(one["steps"] for one in runs) // len(runs)
        lines.append(f"| {NAMES[name]} | {recipe} | {steps:,} | {run:.0f} s | {choice:.0f} s |")
    return "\n".join(lines) + "\n"
