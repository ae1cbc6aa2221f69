"""The tables and their sentences: python benchmarks/distfl/results.py --out runs/distfl [--write]"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

import numpy as np
import prose
from settings import DELTA, noise_of
from shared.intervals import interval, plus_minus
from shared.markdown import put, table
from shared.options import reader
from shared.stored import Lines

Line = dict[str, Any]
STEPS, ROWS, BATCH = 50, 500, 20  # for the cost: synthesis steps of a cold start, rows per client, rows per step


def spread(values: Sequence[float], scale: float = 100) -> str:
    """Format the mean and half of the 95 % interval by Student's t; only the mean for one seed."""
    return plus_minus(*interval([scale * value for value in values]), ".1f")


def by_case(lines: Sequence[Line], part: str) -> dict[str, dict[str, list[Line]]]:
    """Return the lines of one part by case and method, in the order in which they were run."""
    found: dict[str, dict[str, list[Line]]] = {}
    for line in lines:
        if line["part"] == part:
            found.setdefault(line["case"], {}).setdefault(line["method"], []).append(line)
    return found


def classes(lines: Sequence[Line], part: str) -> str:
    """Table: accuracy and clusters of each method."""
    text = []
    for case, methods in by_case(lines, part).items():
        rows = [
            [
                method,
                spread([one["accuracy"] for one in ones]),
                " ".join(f"{value:.2f}" for value in ones[0]["ari"]),
                f"{ones[0]['clusters'][-1]}",
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
            "clusters",
            "MB",
            "extraction / training",
            "synthesis steps",
            "seeds",
        ]
        text += [f"{case}:", "", table(head, rows), ""]
    return "\n".join(text)


def environment(lines: Sequence[Line], part: str) -> str:
    """Table: accuracy, clusters, and since when they are stable."""
    rows = []
    for methods in by_case(lines, part).values():
        for method, ones in methods.items():
            worst, best = (statistics.fmean(pick(one["by_client"]) for one in ones) for pick in (min, max))
            rows.append([
                method,
                spread([one["accuracy"] for one in ones]),
                f"{100 * worst:.0f} to {100 * best:.0f}",
                ", ".join(str(one["clusters"][-1]) for one in ones),
                ", ".join(str(stable_since(one["labels"])) for one in ones),
                ", ".join(f"{one['ari'][-1]:.2f}" for one in ones) if part == "domains" else "",
                f"{len(ones)}",
            ])  # fmt: skip
    head = [
        "method", "accuracy, %", "worst to best client", "clusters at the end, by seed", "stable after round", "ARI",
        "seeds",
    ]  # fmt: skip
    return table(head, rows)


def stable_since(labels: Sequence[Sequence[int]]) -> int:
    """Return the first round after which no client changed its cluster."""
    return max((i + 1 for i, (one, two) in enumerate(pairwise(labels), 1) if one != two), default=1)


def per_client(lines: Sequence[Line], part: str) -> str:
    """Table: accuracy of each client, mean over seeds, with the clusters that DistFL found with each seed."""
    (methods,) = by_case(lines, part).values()
    found = [one["labels"][-1] for one in methods["DistFL"]]
    rows = [
        [
            str(client),
            str(methods["DistFL"][0]["truth"][client]),
            " ".join(str(labels[client]) for labels in found),
            *(f"{100 * statistics.fmean(one['by_client'][client] for one in ones):.0f}" for ones in methods.values()),
        ]
        for client in range(len(found[0]))
    ]
    return table(["client", "domain" if part == "domains" else "person", "DistFL's clusters", *methods], rows)


def attacks(lines: Sequence[Line], part: str) -> str:
    """Table: accuracy and attack success on the common test set, by share of attackers."""
    cases = dict(sorted(by_case(lines, part).items(), key=lambda case: [int(n) for n in re.findall(r"\d+", case[0])]))
    methods = list(dict.fromkeys(method for found in cases.values() for method in found))
    rows = []
    for method in methods:
        row = [method]
        for found in cases.values():
            ones = found.get(method, [])
            row.append(spread([one["common"]["accuracy"] for one in ones]) if ones else "")
            row.append(spread([one["common"]["attack_success"] for one in ones]) if ones else "")
        rows.append([*row, str(max(len(found.get(method, [])) for found in cases.values()))])
    head = ["method"]
    for case in cases:
        head += [f"{case}: accuracy, %", "ASR, %"]
    return table([*head, "seeds"], rows)


def control(lines: Sequence[Line]) -> str:
    """Table and sentence: how often one distribution was split."""
    rows, split, whole = [], 0, 0
    for case, methods in by_case(lines, "control").items():
        for one in methods["DistFL"]:
            wrong = sum(count > 1 for count in one["clusters"])
            split, whole = split + wrong, whole + len(one["clusters"])
            rows.append([case, str(one["seed"]), str(len(one["clusters"])), str(wrong), str(max(one["clusters"]))])
    share = 100 * split / max(whole, 1)
    from scipy.stats import beta

    most = 100 * beta.ppf(0.95, split + 1, whole - split) if split < whole else 100.0
    verdict = "above the goal of 1 %" if share > 1 else "within the goal of 1 %"
    shown = "so that it is missed" if share > 1 else "so that more rounds are needed to show it"
    shown = "which shows it under that assumption" if most <= 1 else shown
    runs, bad = len(rows), sum(row[3] != "0" for row in rows)
    by_run = 100 * beta.ppf(0.95, bad + 1, runs - bad) if bad < runs else 100.0
    said = (
        f"Of {whole} rounds with one distribution, {split} had more than one cluster: {share:.1f} %, {verdict}.  The "
        f"upper 95 % bound is {most:.1f} % if rounds were independent, {shown}.  Rounds of one run are not: of {runs} "
        f"runs {bad} had such a round, which bounds the share of runs by {by_run:.1f} %."
    )
    return table(["case", "seed", "rounds", "rounds that were split", "most clusters"], rows) + f"\n\n{said}"


def scales(lines: Sequence[Line]) -> str:
    """Table: a lone attacker whose update is scaled, and since when DistFL has it alone."""
    cases = by_case(lines, "scales")
    methods = list(dict.fromkeys(method for found in cases.values() for method in found))
    rows = []
    for case, found in cases.items():
        cells = []
        for method in methods:
            ones = found.get(method, [])
            names = ("accuracy", "attack_success")
            cells.append(" / ".join(spread([one["common"][name] for one in ones]) for name in names) if ones else "")
        alone = [isolated_since(one["labels"], 0) for one in found.get("DistFL", [])]
        rows.append([case, *cells, ", ".join("never" if at is None else str(at) for at in alone)])
    return table(["case", *(f"{method}: accuracy / ASR, %" for method in methods), "alone since round, by seed"], rows)


def isolated_since(labels: Sequence[Sequence[int]], client: int) -> int | None:
    """Return the first round from which on a client was in a cluster of its own, or None."""
    alone = [one.count(one[client]) == 1 for one in map(list, labels)]
    since = max((i + 1 for i, now in enumerate(alone, 1) if not now), default=1)
    return since if since <= len(alone) else None


def privacy(lines: Sequence[Line], part: str) -> str:
    """Table: accuracy over the noise, with epsilon of one upload and of all uploads of a client."""
    from piebald.privacy.accounting import local

    rows, cases = [], by_case(lines, part)
    methods = list(dict.fromkeys(method for found in cases.values() for method in found))
    for case, found in cases.items():
        word, _, number = case.partition(" ")
        noise, first = float(number) if word == "noise" else noise_of(float(number)), next(iter(found.values()))[0]
        upload = f"{math.sqrt(2 * math.log(1.25 / DELTA)) / noise:.3g}" if noise else "infinite"
        whole = f"{local(noise, first['rounds'], DELTA).epsilon_rdp:,.3g}" if noise else "infinite"
        cells = [spread([o["honest"] for o in found[method]]) if method in found else "" for method in methods]
        ari = ", ".join(f"{one['ari'][-1]:.2f}" for one in found.get("DistFL", []))
        rows.append([f"{noise:.3g}", upload, whole, *cells, ari])
    head = ["noise in clips", "epsilon of one upload", "of the run (RDP)", *(f"{m}, %" for m in methods)]
    return table([*head, "DistFL's ARI, by seed"], rows)


def row_privacy(lines: Sequence[Line]) -> str:
    """Table: accuracy over epsilon with DP-SGD."""
    rows = []
    for case, methods in by_case(lines, "rows").items():
        for ones in methods.values():
            budget = [one for one in ones[0]["privacy"] or [] if one.get("unit") == "row"]
            names = ("epsilon_pld", "epsilon_prv", "epsilon_rdp")
            cells = [f"{budget[0][name]:.2f}" if budget and budget[0][name] else "infinite" for name in names]
            rows.append([case, *cells, spread([one["common"]["accuracy"] for one in ones]), str(len(ones))])
    return table(["case", "epsilon, PLD", "opacus' PRV", "RDP", "accuracy, %", "seeds"], rows)


def ablation(lines: Sequence[Line], out: Path) -> str:
    """Table and heat map: noise, z and E."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    probes = sorted({line["probes"] for line in lines})
    shares = sorted({line["channels"] for line in lines})
    figure, both = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    shown = (("true_silhouette", "Silhouette of the true clusters"), ("ari", "ARI of the two clusters found"))
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
    return f"ARI of two clusters, mean of {seeds} seeds:\n\n" + table(["E", *(f"z = {z}" for z in probes)], rows)


def rounds(lines: Sequence[Line]) -> str:
    """Table: the clusters that each way of comparing found in the same uploads, by round."""
    rows = []
    for line in lines:
        scores = line["rounds"]
        rows.append([
            line["case"], str(line["seed"]), line["way"],
            " ".join(f"{one['ari']:.2f}" for one in scores),
            " ".join(str(one["clusters"]) for one in scores),
            " ".join(f"{one['best']:.2f}" for one in scores),
            " ".join(f"{one['gap']:.2f}" for one in scores),
            " ".join(f"{inside / every:.2f}" for inside, every in line["apart"]),
        ])  # fmt: skip
    head = [
        "case", "seed", "compared on", "ARI by round", "clusters", "ARI of the best cut", "ARI of the gap",
        "weights' divergence inside clusters",
    ]  # fmt: skip
    return table(head, rows)


def cost(found: dict[str, Any]) -> str:
    """Table: extraction as a share of a round's training, from the measured steps."""
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


def rule(found: dict[str, Any]) -> str:
    """Table: the rule in a run beside the passes and matrices that it consists of."""
    rows = [
        [
            name,
            str(one["steps"]),
            f"{1000 * one['seconds']:.0f}",
            f"{1000 * one['counted']:.0f}",
            f"{one['times']:.2f}",
        ]
        for name, one in found["rule"].items()
    ]
    return table(["model", "synthesis steps", "the rule, ms", "its steps by themselves, ms", "times, median"], rows)


def study(lines: Sequence[Line]) -> str:
    """Lines: the clusters of DistFL by round."""
    return "\n".join(
        f"- {case}, seed {one['seed']}: {' '.join(f'{value:.2f}' for value in one['ari'])} {one['clusters']}"
        for case, methods in by_case(lines, "study").items()
        for one in methods["DistFL"]
    )


def blocks(lines: Sequence[Line], out: Path, figures: Path) -> dict[str, str]:
    """Return the table of each part that was run, with its sentences, by the part's name."""
    tables: dict[str, Callable[[str], str]] = {
        "study": lambda part: study(lines),
        **dict.fromkeys(("category", "vgg", "resnet", "wide"), lambda part: classes(lines, part)),
        **dict.fromkeys(("domains", "people"), lambda part: f"{environment(lines, part)}\n\n{per_client(lines, part)}"),
        **dict.fromkeys(("attacks", "helped", "cifar", "replacement"), lambda part: attacks(lines, part)),
        "control": lambda part: control(lines),
        "scales": lambda part: scales(lines),
        **dict.fromkeys(("privacy", "mixed", "environment_privacy"), lambda part: privacy(lines, part)),
        "rows": lambda part: row_privacy(lines),
    }
    said: dict[str, Callable[[Any], list[str]]] = {
        **dict.fromkeys(("category", "vgg", "resnet", "domains", "people"), prose.category),
        **dict.fromkeys(("attacks", "helped", "cifar", "replacement"), prose.attacks),
        "scales": prose.scales,
        **dict.fromkeys(("privacy", "mixed", "environment_privacy"), prose.private),
    }
    ran = {line["part"] for line in lines}
    made = {}
    for part in (part for part in tables if part in ran):
        sentences = [f"- {one}" for one in said[part](by_case(lines, part))] if part in said else []
        made[part] = "\n".join([tables[part](part).strip(), *([""] if sentences else []), *sentences])
    if (out / "ablation.json").exists():
        made["ablation"] = ablation(json.loads((out / "ablation.json").read_text()), figures)
    if (out / "rounds.jsonl").exists():
        made["rounds"] = rounds(Lines(out / "rounds.jsonl").read())
    if (out / "cost.json").exists():
        costs = json.loads((out / "cost.json").read_text())
        made |= {"cost": cost(costs), "rule": rule(costs)}
    return made


def main() -> None:
    """Print the tables and sentences, draw the figure, and put them into RESULTS.md."""
    here = Path(__file__).parent
    options = reader(__doc__, out=Path("runs/distfl"), figures=here, write=False).parse_args()
    lines, page = Lines(options.out / "results.jsonl").read(), here / "RESULTS.md"
    lines.sort(key=lambda line: int(line["seed"]))  # whichever was run first
    text = page.read_text("utf-8")
    for name, inside in blocks(lines, options.out, options.figures).items():
        print(f"\n{name}:\n\n{inside}")
        text = put(text, name, inside)
    if options.write:
        page.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
