"""Write RESULTS.md from run folders: each table replaces the one of its name, what has not been run keeps its own."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

import federations
import figures
import numpy as np
import paper
import settings
import torch
from blocks import merged, merged_rows
from finished_runs import BASE, OURS, comparisons, finished, traffic_runs
from shared.markdown import block, put
from shared.markdown import table as table_of

import piebald
from piebald.report.comparison import Comparison

SOURCES = {  # the parts whose runs are in a table, unless that of its name
    "facts": ("tuning", "digits", "why", "leaf"),
    "overview": ("digits", "leaf"),
    "paper": ("paper", "traffic"),
    "paper facts": ("paper", "traffic"),
}
ORDER = [settings.NAMES.get(label, label) for label in settings.LABELS]  # of recipes in tables
SECTIONS = ("digits", "leaf", "traffic", "paper")  # blocks of several tables


def write(out: Path, path: Path) -> str:
    """Write the tables into a file, which is created if it is missing, and the plots into its folder."""
    text = path.read_text("utf-8") if path.exists() else "# HDAFL on real data\n"
    blocks = {
        "facts": facts(out, SOURCES["facts"]),
        "overview": merged_rows(block(text, "overview"), overview(out), "HDAFL - FedAvg"),
        "digits": "\n".join(digit_tables(out, "digits")),
        "leaf": "\n".join(digit_tables(out, "leaf")),
        "traffic": "\n".join(traffic_tables(out)),
        "why": "\n".join(why_table(out)),
        "tuning": tuning_table(out),
        "paper": "\n".join(paper.tables(out)),
        "paper facts": facts(out, SOURCES["paper facts"]),
    }
    for name, made in blocks.items():
        if any((out / part).exists() for part in SOURCES.get(name, (name,))):  # what has not been run keeps its table
            text = put(text, name, merged(block(text, name), made, ORDER) if name in SECTIONS else made, append=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    drawn = figures.draw(out, path.parent)
    return f"wrote {path} and {', '.join(figure.name for figure in drawn) or 'no plots'}"


def common_target(made: Comparison) -> float:
    """Return the accuracy that both FedAvg and HDAFL reach with every seed, rounded down to a point."""
    return math.floor(100 * min(final["mean"] for label in (BASE, OURS) for final in made.finals[label])) / 100


def rounds_ratio(made: Comparison) -> float | None:
    """Return HDAFL's mean number of rounds to the common target, divided by FedAvg's."""
    rows = {row["label"]: row for row in made.to_target(common_target(made))}
    mine, theirs = rows[OURS]["rounds"], rows[BASE]["rounds"]
    return mine / theirs if mine is not None and theirs else None


# ------------------------------------------------------------------------------------------------------------- tables


def digit_tables(out: Path, part: str) -> Iterator[str]:
    """Yield one table per setting, with a row for each cohort and recipe."""
    last = None
    for model, setting, cohort, made in comparisons(out, part):
        if setting != last:
            yield f"\n### {settings.TITLES[setting]}, `{model}`\n"
            yield table_head(
                "C", "recipe", "accuracy [95 %]", "to FedAvg, paired [95 %]", "sd", "worst decile", "target",
                "rounds to it", "MB to it", "seeds",
            )  # fmt: skip
            last = setting
        target = common_target(made)
        reached = {row["label"]: row for row in made.to_target(target)}
        paired = {row["label"]: row for row in made.paired(BASE)}
        summary = {row["label"]: row for row in made.summary()}
        for label in settings.LABELS:
            if label in summary:
                row, to = summary[label], reached[label]
                yield table_row(
                    str(cohort), settings.NAMES.get(label, label),
                    points(row),
                    signed(paired[label]) if label in paired else "",
                    f"{100 * row['sd']:.1f}", f"{100 * row['worst_decile']:.1f}",
                    f"{100 * target:.0f}", *costs(to), str(row["seeds"]),
                )  # fmt: skip


def overview(out: Path) -> str:
    """Compare HDAFL with FedAvg and the others, one row per setting and cohort."""
    lines = [
        table_head(
            "model", "setting", "C", "HDAFL - FedAvg", "HDAFL - tuned FedAvg", "HDAFL - LG-FedAvg", "HDAFL - Local",
            "rounds, HDAFL / FedAvg", "seeds",
        )
    ]  # fmt: skip
    for part in ("digits", "leaf"):
        for model, setting, cohort, made in comparisons(out, part):
            against = [
                next((signed(row) for row in made.paired(label) if row["label"] == OURS), "")
                if label in made.labels
                else ""
                for label in (BASE, "FedAvg_tuned", "LG-FedAvg", "Local")
            ]
            ratio = rounds_ratio(made)
            lines.append(
                table_row(
                    model, settings.TITLES[setting], str(cohort), *against,
                    "" if ratio is None else f"{ratio:.2f}", str(len(made.by_label[OURS])),
                )
            )  # fmt: skip
    return "\n".join(lines)


def why_table(out: Path) -> Iterator[str]:
    """Dirichlet(0.3), as in the tables, with more rounds and with more rows."""
    yield table_head(
        "Dirichlet(0.3), C = 10", "rows a client", "rounds", "FedAvg", "FedAvg, tuned", "HDAFL", "HDAFL - FedAvg"
    )
    seed = None
    for name in (None, *settings.WHY):
        folder = out / "why" / name if name else out / "digits" / "small_cnn"
        runs = finished(folder / settings.WHY_SETTING / "C10")
        seed = runs[0].seed if seed is None and runs else seed
        ends = {run.label: run.final for run in runs if run.seed == seed}
        if {BASE, OURS, "FedAvg_tuned"} <= set(ends):
            values = [100 * ends[label]["mean"] for label in (BASE, "FedAvg_tuned", OURS)]
            called = name.replace("_", " ") if name else "as in the tables"
            held = np.mean([client["train"] for client in runs[0].clients])
            cells = [f"{held:.0f}", str(ends[BASE]["rounds"]), *(f"{value:.1f}" for value in values)]
            yield table_row(called, *cells, f"{values[2] - values[0]:+.1f}")


def tuning_table(out: Path) -> str:
    """Return the final accuracy by learning rate."""
    lines = [table_head("setting", "recipe", *(f"lr {rate}" for rate in settings.TUNED_RATES))]
    for setting in settings.TUNED_SETTINGS:
        for label in (BASE, OURS):
            cells = []
            for rate in settings.TUNED_RATES:
                runs = [run for run in finished(out / "tuning" / f"lr{rate}" / setting) if run.label == label]
                cells.append(f"{100 * runs[0].accuracy:.1f}" if runs else "")
            lines.append(table_row(settings.TITLES[setting], label, *cells))
    return "\n".join(lines)


def traffic_tables(out: Path) -> Iterator[str]:
    """Compare accuracy with the centralised model, and bytes sent with the size of the compressed data."""
    for model in settings.TRAFFIC_MODELS:
        for case, alone in settings.TRAFFIC_CASES.items():
            runs = traffic_runs(out, model, case)
            if not runs:
                continue
            ran = {run.label for run in runs}
            labels = [label for label in (*settings.LABELS, federations.CENTRAL) if label in ran]
            by_label = {label: [run for run in runs if run.label == label] for label in labels}
            meta = by_label[BASE][0].meta
            data = federations.compressed(case, None, by_label[BASE][0].seed)
            title = "the same apps on both sides" if not alone else f"{alone} apps that only one side has, on each side"
            yield f"\n### {title}, `{model}` ({meta['parameters']:,} parameters), {meta['rounds']} rounds\n"
            yield (
                f"Training rows: {data['rows']:,} flows, {data['raw'] / 1e6:.2f} MB raw, "
                f"{data['npz'] / 1e6:.3f} MB as npz, {data['xz'] / 1e6:.3f} MB as xz (seed {by_label[BASE][0].seed}).\n"
            )
            made = Comparison(runs)
            target = common_target(made)
            yield table_head(
                "recipe", "accuracy [95 %]", "loss to centralised", "D1", "D2", "MB in all", "gain in all",
                f"MB to {100 * target:.0f} %", f"gain to {100 * target:.0f} %", "rounds to it", "seeds",
            )  # fmt: skip
            against = {row["label"]: row for row in made.paired(federations.CENTRAL)}
            reached = {row["label"]: row for row in made.to_target(target)}
            for row in sorted(made.summary(), key=lambda row: list(by_label).index(row["label"])):
                label = row["label"]
                sides = [np.mean([run.per_client[side] for run in by_label[label]]) for side in (0, 1)]
                loss = against.get(label)
                sent, need = row["mb_up"] + row["mb_down"], reached[label]["mb"]
                central = label == federations.CENTRAL
                yield table_row(
                    settings.NAMES.get(label, label),
                    points(row),
                    f"{-100 * loss['difference']:.1f}" if loss else "",
                    *(f"{100 * side:.1f}" for side in sides),
                    "" if central else f"{sent:.2f}",
                    "" if central or not sent else f"{data['npz'] / 1e6 / sent:.2f}",
                    "" if central or need is None else f"{need:.2f}",
                    "" if central or not need else f"{data['npz'] / 1e6 / need:.2f}",
                    "" if reached[label]["rounds"] is None else f"{reached[label]['rounds']:.1f}",
                    str(row["seeds"]),
                )  # fmt: skip


def facts(out: Path, parts: Sequence[str]) -> str:
    """List the versions, the training settings, and how far two recipes that must agree differ, for some parts."""
    lines = [
        f"Piebald {piebald.__version__}, Python {platform.python_version()}, PyTorch {torch.__version__}, "
        f"NumPy {np.__version__}; {finished_count(out, parts)} finished runs.",
    ]
    if "digits" in parts:
        lines += [
            "",
            f"Training: SGD, learning rate {settings.LEARNING_RATE}, batch {settings.BATCH}, one local epoch (E = 1).",
        ]
    worst, pairs = agreement(out, parts)
    lines.append(
        f"The global model of the fine-tuned runs is FedAvg's: over {pairs} pairs of runs its final mean accuracy "
        f"differs by at most {worst:.2e}."
    )
    return "\n".join(lines)


def finished_count(out: Path, parts: Sequence[str]) -> int:
    """Count the finished runs of some parts."""
    return sum(len(finished(group)) for part in parts for group in (out / part).glob("*/*/*"))


def agreement(out: Path, parts: Sequence[str]) -> tuple[float, int]:
    """Return the largest difference of FedAvg and the global model of a fine-tuned run, and the number of pairs."""
    worst, pairs = 0.0, 0
    for part in parts:
        for folder in (out / part).glob("*/*/C*"):
            runs = {(run.label, run.seed): run for run in finished(folder)}
            for (label, seed), run in runs.items():
                if label == "FedAvg_tuned" and (BASE, seed) in runs:
                    last = max(row["version"] for row in run.scores)
                    score = [
                        row["value"] for row in run.scores
                        if row["version"] == last and row["model"] == "global" and row["metric"] == run.metric
                        and row["client"] is not None
                    ]  # fmt: skip
                    worst = max(worst, abs(float(np.mean(score)) - runs[BASE, seed].accuracy))
                    pairs += 1
    return worst, pairs


# -------------------------------------------------------------------------------------------------------------- words


def points(row: dict) -> str:
    """Format an accuracy in per cent with its interval."""
    return f"{100 * row['mean']:.1f}{interval(row, '.1f')}"


def signed(row: dict) -> str:
    """Format a paired difference in points with its interval."""
    return f"{100 * row['difference']:+.1f}{interval(row, '+.1f')}"


def interval(row: dict, form: str) -> str:
    """Format the 95 % interval of three seeds or more; with two it is too wide to be of use."""
    return f" [{100 * row['low']:{form}}, {100 * row['high']:{form}}]" if row["seeds"] > 2 else ""


def costs(row: dict) -> tuple[str, str]:
    """Return the rounds and megabytes to the target, and how many runs reached it if not all did."""
    if not row["reached"]:
        return "not reached", ""
    some = "" if row["reached"] == row["runs"] else f" ({row['reached']} of {row['runs']} runs)"
    return f"{row['rounds']:.1f}{some}", f"{row['mb']:.2f}"


def table_head(*names: str) -> str:
    """Return the first two lines of a table."""
    return table_of(names, [])


def table_row(*cells: str) -> str:
    """Return one line of a table."""
    return f"| {' | '.join(cells)} |"
