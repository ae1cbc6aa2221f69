"""Tables and pictures from what was run: python benchmarks/distfl/results.py --out runs/distfl [--results FILE]"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Line = dict[str, Any]
STEPS, ROWS, BATCH = 50, 500, 20  # of the shares of a round: synthesis steps when cold, a client's rows, rows a step


def interval(values: Sequence[float], scale: float = 100) -> str:
    """Mean and half width of a 95 % interval by Student's t; the mean alone for one seed."""
    from scipy.stats import t

    mean = scale * statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:.1f}"
    half = scale * t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.1f} ± {half:.1f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)


def grouped(lines: Sequence[Line], part: str) -> dict[str, dict[str, list[Line]]]:
    """Lines of one part by case and method, in the order in which they were run."""
    found: dict[str, dict[str, list[Line]]] = {}
    for line in lines:
        if line["part"] == part:
            found.setdefault(line["case"], {}).setdefault(line["method"], []).append(line)
    return found


def classes(lines: Sequence[Line]) -> str:
    """Accuracy and groups of each method."""
    text = []
    for case, methods in grouped(lines, "category").items():
        rows = [
            [
                method,
                interval([one["accuracy"] for one in ones]),
                " ".join(f"{value:.2f}" for value in ones[0]["ari"]),
                f"{ones[0]['groups'][-1]}",
                f"{statistics.fmean(one['mb'] for one in ones):.0f}",
                f"{ones[0]['extraction'] / max(ones[0]['seconds'] - ones[0]['extraction'], 1e-9):.1f}",
                " ".join(map(str, ones[0]["steps"])),
                f"{len(ones)}",
            ]
            for method, ones in methods.items()
        ]
        head = [
            "method",
            "accuracy on own test rows, %",
            "ARI by round (first seed)",
            "groups",
            "MB",
            "extraction / training",
            "synthesis steps",
            "seeds",
        ]
        text += [f"{case}:", "", table(head, rows), ""]
    return "\n".join(text)


def environment(lines: Sequence[Line], part: str) -> str:
    """Accuracy, groups, and whether they stay."""
    rows = []
    for methods in grouped(lines, part).values():
        for method, ones in methods.items():
            mine = ones[0]["by_client"]
            rows.append([
                method,
                interval([one["accuracy"] for one in ones]),
                f"{100 * min(mine):.0f} to {100 * max(mine):.0f}",
                " ".join(map(str, ones[0]["groups"])),
                f"{ones[0]['ari'][-1]:.2f}",
                f"{len(ones)}",
            ])  # fmt: skip
    head = ["method", "accuracy, %", "clients from, to", "groups by round (first seed)", "ARI at last", "seeds"]
    return table(head, rows)


def per_client(lines: Sequence[Line], part: str) -> str:
    """Accuracy of each client, first seed."""
    (methods,) = grouped(lines, part).values()
    count = len(next(iter(methods.values()))[0]["by_client"])
    rows = [
        [str(client), *(f"{100 * ones[0]['by_client'][client]:.0f}" for ones in methods.values())]
        for client in range(count)
    ]
    return table(["client", *methods], rows)


def attacks(lines: Sequence[Line], part: str) -> str:
    """Accuracy and attack success on the common test set, a column a share of attackers."""
    cases = grouped(lines, part)
    methods = list(dict.fromkeys(method for found in cases.values() for method in found))
    rows = []
    for method in methods:
        row = [method]
        for found in cases.values():
            ones = found.get(method, [])
            row.append(interval([one["common"]["accuracy"] for one in ones]) if ones else "")
            row.append(interval([one["common"]["attack_success"] for one in ones]) if ones else "")
        rows.append([*row, str(max(len(found.get(method, [])) for found in cases.values()))])
    head = ["method"]
    for case in cases:
        head += [f"{case}: accuracy, %", "ASR, %"]
    return table([*head, "seeds"], rows)


def privacy(lines: Sequence[Line]) -> str:
    """Accuracy over the noise, with the epsilon of each client's uploads."""
    from piebald.update.budget import local

    rows = []
    for case, methods in grouped(lines, "privacy").items():
        noise = float(case.removeprefix("noise "))
        first = next(iter(methods.values()))[0]
        epsilon = local(noise, first["rounds"], 1e-5).epsilon_pld if noise > 0.05 else math.inf
        found = [methods.get(method, []) for method in ("DistFL", "FedAvg")]
        cells = [interval([one["accuracy"] for one in ones]) if ones else "" for ones in found]
        told = f"{epsilon:.0f}" if epsilon < 1e6 else "more than any accountant tells" if noise else "infinite"
        rows.append([f"{noise:g}", told, *cells, f"{found[0][0]['ari'][-1]:.2f}" if found[0] else ""])
    head = ["noise in clips", "epsilon of a client's uploads", "DistFL, %", "FedAvg, %", "ARI of DistFL's groups"]
    return table(head, rows)


def ablation(lines: Sequence[Line], out: Path) -> str:
    """Noise against knowledge, and z and E as a heat map."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    probes = sorted({line["probes"] for line in lines})
    shares = sorted({line["channels"] for line in lines})
    figure, both = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    shown = (("true_silhouette", "Silhouette of the true groups"), ("ari", "ARI of the two groups found"))
    for axes, (name, title) in zip(both, shown, strict=True):
        cell = [
            [statistics.fmean(one[name] for one in lines if (one["probes"], one["channels"]) == (z, e)) for z in probes]
            for e in shares
        ]
        image = axes.imshow(np.array(cell), cmap="Blues", aspect="auto")
        axes.set_xticks(range(len(probes)), [str(z) for z in probes])
        axes.set_yticks(range(len(shares)), ["plain noise" if not e else f"E = {e:.0%}" for e in shares])
        axes.set(xlabel="z, number of probes", title=title)
        middle = (np.max(cell) + np.min(cell)) / 2
        for row, values in enumerate(cell):
            for column, value in enumerate(values):
                colour = "white" if value > middle else "black"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=9)
        figure.colorbar(image, ax=axes)
    figure.savefig(out / "ablation.png", dpi=120)
    seeds = len({line["seed"] for line in lines})
    rows = [
        [
            "plain noise" if not e else f"{e:.0%}",
            *(
                f"{statistics.fmean(o['ari'] for o in lines if (o['probes'], o['channels']) == (z, e)):.2f}"
                for z in probes
            ),
        ]
        for e in shares
    ]
    return f"ARI of two groups, mean of {seeds} seeds:\n\n" + table(["E", *(f"z = {z}" for z in probes)], rows)


def rounds(lines: Sequence[Line]) -> str:
    """What each way of comparing found in the same uploads, by round."""
    rows = []
    for line in lines:
        told = line["rounds"]
        rows.append([
            line["case"], str(line["seed"]), line["way"],
            " ".join(f"{one['ari']:.2f}" for one in told),
            " ".join(str(one["groups"]) for one in told),
            " ".join(f"{one['best']:.2f}" for one in told),
            " ".join(f"{one['halves']:.2f}" for one in told),
            " ".join(f"{one['gap']:.2f}" for one in told),
        ])  # fmt: skip
    head = [
        "case",
        "seed",
        "compared on",
        "ARI by round",
        "groups",
        "ARI of the best cut",
        "halves agree",
        "ARI of the gap",
    ]
    return table(head, rows)


def cost(found: dict[str, Any]) -> str:
    """Extraction as a share of a round's training, from the measured steps."""
    rows = []
    for name, step in found["steps"].items():
        for clients in (100, 1000):
            training = clients * ROWS / BATCH * step["train"]
            matrices = found["matrices"][str(clients)]
            shares = [
                (steps * step["synthesise"] + clients * step["answer"] + matrices) / training / every
                for steps, every in ((STEPS, 1), (5, 1), (5, 5))
            ]
            rows.append([name, str(clients), *(f"{100 * share:.1f} %" for share in shares)])
    head = ["model", "clients", f"cold: {STEPS} steps", "warm: 5 steps", "warm, every fifth round"]
    return table(head, rows)


def main() -> None:
    """Print the tables; write pictures beside."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/distfl"))
    parser.add_argument("--pictures", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    file = options.out / "results.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    parts = {line["part"] for line in lines}
    if "study" in parts:
        for case, methods in grouped(lines, "study").items():
            for one in methods["DistFL"]:
                print(case, one["seed"], " ".join(f"{value:.2f}" for value in one["ari"]), one["groups"])
    if "category" in parts:
        print(classes(lines))
    for part in ("domains", "people"):
        if part in parts:
            print(f"\n{part}:\n\n{environment(lines, part)}\n\n{per_client(lines, part)}")
    for part in ("attacks", "replacement"):
        if part in parts:
            print(f"\n{part}:\n\n{attacks(lines, part)}")
    if "privacy" in parts:
        print(f"\nprivacy:\n\n{privacy(lines)}")
    if (options.out / "ablation.json").exists():
        print("\n" + ablation(json.loads((options.out / "ablation.json").read_text()), options.pictures))
    if (options.out / "rounds.jsonl").exists():
        print("\n" + rounds([json.loads(line) for line in (options.out / "rounds.jsonl").read_text().splitlines()]))
    if (options.out / "cost.json").exists():
        print("\n" + cost(json.loads((options.out / "cost.json").read_text())))


if __name__ == "__main__":
    main()
