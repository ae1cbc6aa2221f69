"""Write RESULTS.md and the figures from run folders: every number in the text is computed."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deals
import paper
import pictures
import settings
from shared import markdown
from shared.markdown import block, put
from table_1 import Found, cases, labels, last, printed, section, standard_error

from piebald.report.tables import History

LONG = "long"  # the scale whose table stands on the page of the others
LONGER = "## Five fast and five slow clients for 24 synchronous rounds: `--scale long`"
TITLES = {
    "synchronous": "Synchronous, {rounds} rounds",
    "uneven": "Five fast and five slow clients, {seconds:,.0f} virtual seconds",
    "corrupted": "Synchronous, and the second largest client has random labels",
}


def read(out: Path, seconds: float) -> Found:
    """Return what the tables need of each finished run, by part, case and recipe.

    With fast and slow clients only models count that there are after so many virtual seconds.  The round in which a
    synchronous run passes them does not count; the update in which an asynchronous one does, its last, is one of many.
    """
    found = defaultdict(list)
    for database in sorted(out.glob("*/*/*/seed-*/run.db")):
        with History(database.parent) as run:
            if run.meta.get("status") != "finished":
                continue
            times = {0: 0.0} | {row["version"]: row["time"] for row in run.rounds}
            own = run.label in settings.OWN_MODELS
            accuracy = own_models(run.scores) if own else community(run.scores)
            trained = [row for row in run.results if row["kind"] == "train" and row["status"] == "ok"]
            asked = [row for row in run.results if row["kind"] == "validate"]
            part = database.parts[-5]
            limit = seconds if part == "uneven" and run.label.startswith("Sync") else math.inf
            if all(times[version] > limit for version in accuracy if version):
                continue  # no model was scored in time but the first one, which says nothing of the policy
            size = 4 * run.meta["shared"] or 1  # Local shares nothing, and sends nothing
            found[part, database.parts[-4].replace("_", " "), run.label].append(
                {
                    "seed": run.seed,
                    "counts": [row["counts"] for row in run.clients],
                    "curve": sorted(
                        (times[version], 100 * value) for version, value in accuracy.items() if times[version] <= limit
                    ),
                    "staleness": pictures.first_cycles(trained),
                    "updates": len(trained),
                    "steps": sum(row["steps"] for row in trained) / len(trained),
                    "kinds": [statistics.mean(steps_of(trained, kind)) for kind in (0, 1)],
                    "models": round(sum(row["bytes_down"] + row["bytes_up"] for row in run.results) / size),
                    "evaluation": round(sum(row["bytes_down"] for row in asked) / size),
                    "shares": shares(trained),
                }
            )
    return found


def community(scores: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Return the accuracy of the community model on the common test set, by version."""
    wanted = ("common", "accuracy")
    return {row["version"]: row["value"] for row in scores if (row["split"], row["metric"]) == wanted}


def own_models(scores: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Return the mean accuracy of clients' own models on the same test set, by version."""
    found = defaultdict(list)
    for row in scores:
        if (row["split"], row["metric"], row["model"]) == ("test", "accuracy", "personal"):
            found[row["version"]].append(row["value"])
    return {version: statistics.mean(values) for version, values in found.items()}


def steps_of(trained: Sequence[dict[str, Any]], kind: int) -> list[float]:
    """Return the steps of the updates of the fast (0) or the slow (1) clients."""
    return [row["steps"] for row in trained if row["client"] % 2 == kind] or [math.nan]


def shares(trained: Sequence[dict[str, Any]]) -> list[float]:
    """Return each client's mean share of the average, in percent, over the second half of the server steps."""
    half = max(row["version"] for row in trained) / 2
    found = defaultdict(list)
    for row in trained:
        if row["version"] >= half:
            found[row["client"]].append(100 * row["weight"])
    return [statistics.mean(found[client]) for client in sorted(found)]


def late(run: dict[str, Any]) -> float:
    """Return the mean over the second half of a run's evaluations."""
    curve = run["curve"]
    return statistics.mean(value for _, value in curve[len(curve) // 2 :])


def write(out: Path, results: Path, name: str) -> str:
    """Write the text and the figures for a scale of this name; return the path of the text.

    The long scale has only a table, on the page of the others.
    """
    scale = settings.SCALES[name]
    found = read(out, scale.seconds)
    results.mkdir(parents=True, exist_ok=True)
    path = results / "RESULTS.md"
    before = path.read_text("utf-8") if path.exists() else ""
    if name == LONG:
        path.write_text(put(before, LONG, "\n".join(section(found, "uneven")), append=True), "utf-8")
        return str(path)
    for part in TITLES:
        pictures.curves(found, part, results / f"{pictures.NAMES[part]}.png")
    pictures.exchanged(found, results / "models_exchanged.png")
    pictures.staleness_picture(found, results / "staleness.png")
    kept = ["", LONGER, "", f"<!-- {LONG} -->", block(before, LONG).strip() or "Not run.", f"<!-- end of {LONG} -->"]
    path.write_text("\n".join([*text(found, name, scale), *kept]) + "\n", "utf-8")
    return str(path)


def text(found: Found, name: str, scale: settings.Scale) -> list[str]:
    """Return the lines of RESULTS.md."""
    accuracies = [last(run) for runs in found.values() for run in runs]
    worst = max(map(standard_error, accuracies), default=0.0)
    lines = [
        "# Metis on CIFAR-10", "",
        f"Written by `python benchmarks/metis/run.py --scale {name}` from {len(accuracies)} finished runs; `--dry-run` "
        "prints these conditions,", "and `--scale full` is the paper's Table I as printed.  "
        "[The page about the paper](../../docs/papers/metis.md) lists all its", "tables and figures.", "",
        conditions(scale), "", f"<!-- {deals.SENTENCE} -->", f"<!-- end of {deals.SENTENCE} -->", "",
        "Accuracy is the global model's on the common test set, in percent: the last one, the mean over the second "
        "half of the", "evaluations, and the best one; brackets are ranges over seeds, which also redraw the "
        "partition.  "
        "The standard error of an", f"accuracy on {settings.TEST:,} images is at most {worst:.1f} points here; "
        "with one seed nothing is known of how much seeds differ.", "",
        "Every policy is judged by its community model on one common test set.  Local training, and an epoch that is",
        "not sent, have a model for each client instead: the mean over clients of their accuracy on the same test set.",
        'Equal weights are "Equal" and "AsyncEqual".', "",
    ]  # fmt: skip
    for part, title in TITLES.items():
        here = cases(found, part)
        if here:
            lines += [f"## {title.format(rounds=scale.rounds, seconds=scale.seconds)}", "", *section(found, part)]
        for case in here:
            lines += [f"### {case}", "", *table(found, part, case), ""]
        if here and part != "uneven":
            lines += ["Clients' shares of the average over the second half, in percent, largest client first:", ""]
            lines += [*client_shares(found, part), ""]
        if here:
            lines += [f"![Accuracy over virtual seconds]({pictures.NAMES[part]}.png)", ""]
    lines += ["## The model cache (figure 2)", "", "It has [a page of its own](../model_cache/RESULTS.md).", ""]
    lines += [*exchange(found), *pictures.staleness_section(found), *missing(found, scale)]
    dealt = deals.record(deals.of_runs(found))
    return [
        *lines,
        "",
        "## What the cells dealt",
        "",
        f"<!-- {deals.RECORD} -->",
        dealt,
        f"<!-- end of {deals.RECORD} -->",
    ]


def missing(found: Found, scale: settings.Scale) -> list[str]:
    """Return the section about runs of the scale that have not finished, so that nothing is left out silently."""
    cells = {"synchronous": scale.settings, "uneven": scale.uneven, "corrupted": scale.settings[: scale.corrupted]}
    wanted = [(part, cell, label) for part in cells for cell in cells[part] for label in settings.labels(part)]
    lines = []
    for part, cell, label in wanted:
        absent = len(scale.seeds) - len(found.get((part, " ".join(cell), label), []))
        if absent > 0 and (scale.recipes is None or label in scale.recipes):
            lines.append(f"- {part}, {' '.join(cell)}: {label}, {absent} of {len(scale.seeds)} seeds")
    return ["## Not run", "", *(lines or ["Everything of this scale has been run."])]


def conditions(scale: settings.Scale) -> str:
    """Return the table of our conditions beside the paper's."""
    ours = settings.conditions(scale)
    rows = [[name, printed, ours[name]] for name, printed in paper.CONDITIONS.items()]
    return markdown.table(["condition", "paper", "here"], rows, "---")


def table(found: Found, part: str, case: str) -> list[str]:
    """Return the table of one case, with the best recipe first."""
    lines, rows = [], [(label, found[part, case, label]) for label in labels(found, part, case)]
    for label, runs in sorted(rows, key=lambda row: -statistics.mean(map(late, row[1]))):
        theirs = printed(part, case, label)
        best = [max(value for _, value in run["curve"]) for run in runs]
        numbers = [
            spread([last(run) for run in runs]), "-" if theirs is None else f"{theirs:.1f}",
            spread([late(run) for run in runs]), spread(best),
            f"{statistics.mean(run['updates'] for run in runs):,.0f}",
            f"{statistics.mean(run['steps'] for run in runs):.0f}",
            f"{sum(run['models'] for run in runs) / sum(run['updates'] for run in runs):.2f}", str(len(runs)),
        ]  # fmt: skip
        lines.append([label, *numbers])
    heads = ["recipe", "last", "paper", "second half", "best", "updates", "steps per update", "models per update"]
    return [markdown.table([*heads, "seeds"], lines, "---")]


def client_shares(found: Found, part: str) -> list[str]:
    """Return the table of clients' shares of the average, mean over seeds."""
    lines = []
    for case in cases(found, part):
        for label in labels(found, part, case):
            if label == settings.LOCAL:  # nothing is averaged
                continue
            runs = found[part, case, label]
            means = [statistics.mean(own) for own in zip(*(run["shares"] for run in runs), strict=True)]
            lines.append([case, label, ", ".join(f"{mean:.1f}" for mean in means)])
    return [markdown.table(["sizes, classes", "recipe", "shares"], lines, "---")]


def per_request(found: Found) -> float | None:
    """Return how many models DVW exchanges for a request, the mean of its runs."""
    each = [run["models"] / run["updates"] for (_, _, label), runs in found.items() if "DVW" in label for run in runs]
    return statistics.mean(each) if each else None


def exchange(found: Found) -> list[str]:
    """Return the section about figures 3 and 9: requests, models exchanged, and the length of validation cycles."""
    lines = ["## Requests and models exchanged (figure 9)", "", "![Totals by policy](models_exchanged.png)", ""]
    ordered = [
        (part, case, label) for part in TITLES for case in cases(found, part) for label in labels(found, part, case)
    ]
    rows = []
    for part, case, label in ordered:
        runs = found[part, case, label]
        counts = [statistics.mean(run[key] for run in runs) for key in ("updates", "models", "evaluation")]
        each_request = f"{counts[1] / counts[0]:.2f}"
        rows.append([f"{part}: {case}", label, *(f"{count:,.0f}" for count in counts), each_request])
    heads = ["part: sizes, classes", "recipe", "update requests", "models exchanged", "for evaluation", "per request"]
    lines.append(markdown.table(heads, rows, "---"))
    each = per_request(found)
    counted = "" if each is None else f"  Here it is {each:.2f} for DVW, the mean of its runs."
    lines += ["", f"The paper counts 2 models for a request, and 11 for DVW with ten clients.{counted}", ""]
    for part, case, label in ordered:
        runs, fixed = found[part, case, label], found.get((part, case, "AsyncDVW"))
        if label != "AsyncDVW, adaptive" or fixed is None:
            continue
        ratio = statistics.mean(run["updates"] for run in runs) / statistics.mean(run["updates"] for run in fixed)
        fast, slow = (statistics.mean(run["kinds"][kind] for run in runs) for kind in (0, 1))
        lines += [
            f"{case}: adaptive clients send {ratio:.2f} times the requests of clients with a fixed frequency (the "
            f"paper: fewer), after {fast:.0f} steps where they are fast and {slow:.0f} where they are slow (figure 3: "
            f"fast ones train longer).  In this run it {'agrees' if ratio < 1 else 'is the opposite'}.", "",
        ]  # fmt: skip
    return lines


def spread(values: Sequence[float]) -> str:
    """Format the mean, and the range if there are several values."""
    mean = f"{statistics.mean(values):.1f}"
    return mean if len(values) == 1 else f"{mean} [{min(values):.1f}, {max(values):.1f}]"
