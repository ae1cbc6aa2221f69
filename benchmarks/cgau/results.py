"""Write the tables and figures of RESULTS.md from the measured results; other text is kept."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jobs
import pictures
import settings
import xor
from shared.intervals import interval, plus_minus
from shared.markdown import put, table


def formatted(values: Sequence[float], signed: bool = False) -> str:
    """Format a mean with its interval, in points; empty if there are no values."""
    if not values:
        return ""
    return plus_minus(*interval([100 * value for value in values], least=3), "+.1f" if signed else ".1f")


def differences(found: dict[str, dict[int, dict[str, Any]]], one: str, other: str, which: str = "mean") -> list[float]:
    """Differences over common seeds, of the version that is kept ("mean") or of the last one ("last")."""
    seeds = found.get(one, {}).keys() & found.get(other, {}).keys()
    return [found[one][seed][which] - found[other][seed][which] for seed in seeds]


def paired(found: dict[str, dict[int, dict[str, Any]]], one: str, other: str, which: str = "mean") -> str:
    """Format the mean difference over common seeds."""
    return formatted(differences(found, one, other, which), True)


def xor_table(out: Path) -> str:
    """Table: how often each model solves XOR, and what turning conditioning off does to the starts that solve it."""
    found = json.loads((out / "xor.json").read_text())
    off = [
        [f"conditioned: {name}", *(f"{100 * value:.0f}" for value in values)]
        for name, values in found[xor.CONDITIONED]["turned off"].items()
    ]
    heads = ["of the starts that solve it, accuracy, %", *(f"{client} client" for client in xor.CLIENTS)]
    return f"{table(xor.HEADS, xor.counts(found))}\n\n{table(heads, off)}"


def shuffled_table(out: Path, part: str) -> str:
    """Table: accuracy or AUC of every method at each level of shuffling that has been measured, kept and last."""
    found = {shuffle: jobs.by_method(out, part, f"shuffle {shuffle}") for shuffle in settings.SHUFFLES}
    found = {shuffle: methods for shuffle, methods in found.items() if methods.get(settings.CGAU)}
    if not found:
        raise OSError(f"no results of {part}")
    rows: list[list[object]] = []
    for which, title in (("mean", ""), ("last", ", last")):
        for method in settings.SHORT:
            cells = [[one[which] for one in methods.get(method, {}).values()] for methods in found.values()]
            rows.append([method + title, *map(formatted, cells)])
        for other in settings.SHORT[1:]:
            cells = [paired(methods, settings.CGAU, other, which) for methods in found.values()]
            rows.append([f"*CGAU minus {other}{title}*", *cells])
    rows.append(["*repetitions*", *(len(methods[settings.CGAU]) for methods in found.values())])
    return table(["shuffled", *(f"{shuffle:.1f}" for shuffle in found)], rows)


def image_table(out: Path) -> str:
    """Table: accuracy of every method at every level of shuffling, and the distance between clients."""
    known = [json.loads(file.read_text()) for file in (out / "federations").glob("*.json")]
    found = {shuffle: jobs.by_method(out, "images", f"shuffle {shuffle}") for shuffle in settings.SHUFFLES}
    rows: list[list[object]] = []
    for method in settings.METHODS:
        cells = [[one["mean"] for one in found[shuffle].get(method, {}).values()] for shuffle in settings.SHUFFLES]
        if any(cells):
            rows.append([method, *(formatted(values) for values in cells)])
    for other in (settings.BLIND, settings.RELU, settings.MATCHED, settings.HEAD):
        rows.append([f"*CGAU minus {other}*", *(paired(found[s], settings.CGAU, other) for s in settings.SHUFFLES)])
    distance: list[object] = ["*average Fréchet distance, 32 components*"]
    all_components: list[object] = ["*the same on all 512 numbers, seed 0*"]
    for shuffle in settings.SHUFFLES:
        here = [one for one in known if one["setting"] == f"shuffle {shuffle}"]
        middle, half = interval([one["frechet"] for one in here]) if here else (math.nan, math.nan)
        distance.append(f"{middle:.1f} ± {half:.1f}")
        all_components.append("".join(f"{one['frechet_512']:.0f}" for one in here if one["frechet_512"] is not None))
    counts = [len(found[shuffle].get(settings.CGAU, {})) for shuffle in settings.SHUFFLES]
    rows += [["*repetitions*", *counts], distance, all_components]
    return table(["shuffled", *(f"{shuffle:.1f}" for shuffle in settings.SHUFFLES)], rows)


def why_table(out: Path) -> str:
    """Table: how well the client and the position predict the label, with clusters inside classes and without."""
    known = [json.loads(file.read_text()) for file in (out / "federations").glob("*.json")]
    wheres = {
        "shuffle 0.0": "clusters in classes",
        "shuffle 1.0": "the same, all shuffled",
        "label-free": "label-free clusters",
    }
    rows = []
    for name in ("client", "position", "client and position"):
        cells = [[one["prior"][name] for one in known if one["setting"] == where] for where in wheres]
        rows.append([f"label from {name} alone", *map(formatted, cells)])
    found = {where: jobs.by_method(out, "controls" if where == "label-free" else "images", where) for where in wheres}
    for method in settings.METHODS:
        cells = [[one["mean"] for one in found[where].get(method, {}).values()] for where in wheres]
        rows.append([method, *(formatted(values) for values in cells)])
    for other in (settings.BLIND, settings.RELU, settings.MATCHED):
        rows.append([f"*CGAU minus {other}*", *(paired(found[where], settings.CGAU, other) for where in wheres)])
    return table(["accuracy, %", *wheres.values()], rows)


def longer_table(out: Path) -> str:
    """Table: three times the rounds, with the version that is kept and the last one."""
    found = jobs.by_method(out, "longer", "shuffle 0.0")
    short = jobs.by_method(out, "images", "shuffle 0.0")
    rows = []
    for method, seeds in found.items():
        usual = [short[method][seed]["mean"] for seed in seeds]
        kept, last = ([one[which] for one in seeds.values()] for which in ("mean", "last"))
        rows.append([method, formatted(usual), formatted(kept), formatted(last), len(seeds)])
    for other in (settings.BLIND, settings.RELU):
        pairs = found[settings.CGAU].keys() & found[other].keys()
        ends = formatted([found[settings.CGAU][seed]["last"] - found[other][seed]["last"] for seed in pairs], True)
        same = {m: {seed: short[m][seed] for seed in pairs} for m in (settings.CGAU, other)}
        row = [paired(same, settings.CGAU, other), paired(found, settings.CGAU, other), ends, len(pairs)]
        rows.append([f"*CGAU minus {other}*", *row])
    few = settings.IMAGE_TASK.rounds
    return table(
        ["accuracy, %", f"{few} rounds", f"{settings.LONGER}, kept", f"{settings.LONGER}, last", "seeds"], rows
    )


def switch_table(out: Path) -> str:
    """Table: filter or gate alone, a shared bias, and the averaged matrix, at shuffling 0."""
    found = jobs.by_method(out, "images", "shuffle 0.0")
    names = [settings.BLIND, settings.MATRIX, *settings.SWITCHES, settings.CGAU]
    rows = [
        [name, formatted([one["mean"] for one in found[name].values()]), paired(found, name, settings.BLIND)]
        for name in names
        if name in found
    ]
    return table(["", "accuracy, %", "minus no conditioning"], rows)


def method_table(out: Path, part: str, setting: str, metric: str) -> str:
    """Table: all methods on one federation."""
    found = jobs.by_method(out, part, setting)
    rows = []
    for method in settings.METHODS:
        if mine := found.get(method):
            worst = formatted([one["worst_decile"] for one in mine.values()])
            rows.append(
                [
                    method,
                    formatted([one["mean"] for one in mine.values()]),
                    worst,
                    paired(found, settings.CGAU, method),
                    len(mine),
                ]
            )
    return table(["", metric, "worst decile of clients", "CGAU minus this", "repetitions"], rows)


def tuning_table(out: Path) -> str:
    """Table: learning rates, with the seed that is used for nothing else."""
    made = {(one["job"]["method"], one["job"]["rate"]): one["mean"] for one in jobs.load(out, "tuning")}
    methods = list(dict.fromkeys(method for method, _ in made))
    rows = [[m, *(f"{100 * made[m, r]:.1f}" if (m, r) in made else "" for r in settings.TUNED_RATES)] for m in methods]
    return table(["learning rate", *map(str, settings.TUNED_RATES)], rows)


def newcomer_table(out: Path) -> str:
    """Table: clients held out until the end, with each method of adapting to them, on their own test rows."""
    rows = []
    for setting in ("shuffle 0.0", "label-free", "by domain", "by subject"):
        for method, seeds in jobs.by_method(out, "newcomers", setting).items():
            ways: dict[str, list[float]] = {}
            for one in seeds.values():
                for newcomer in one["newcomers"]:
                    for way in newcomer["methods"]:
                        if way["test"] is not None:
                            ways.setdefault(way["name"], []).append(way["test"])
                            if way["name"] == newcomer["best"]:
                                ways.setdefault("best", []).append(way["test"])
            cells = [
                f"{100 * sum(ways[name]) / len(ways[name]):.1f}" if name in ways else ""
                for name in ("global", "private", "head", "fine_tune", "best")
            ]
            seen = f"{100 * sum(one['mean'] for one in seeds.values()) / len(seeds):.1f}"
            rows.append([setting, method, seen, *cells, len(ways.get("best", []))])
    heads = [
        "clients",
        "run",
        "clients seen",
        "global model",
        "private layers",
        "head",
        "all",
        "as validation chose",
        "newcomers",
    ]
    return table(heads, rows)


def cost_table(out: Path) -> str:
    """Table: time and bytes of a round."""
    found = json.loads((out / "cost.json").read_text())
    rows = []
    for name, one in found.items():
        cells = []
        for engine in ("sequential", "vmapped"):
            low, high = one[f"{engine}_range"]
            cells.append(f"{one[engine]:.2f} s, {one[f'{engine}_ratio']:.2f} ({low:.2f} to {high:.2f})")
        rows.append([name, f"{one['numbers']:,}", one["private"], f"{one['bytes_up']:,.0f}", *cells])
    return table(
        ["", "numbers", "private", "bytes up per client and round", "sequential, to plain", "vmapped, to plain"], rows
    )


def conditioning_table(out: Path, folder: Path) -> str:
    """Table: the correlation of distances between data and between conditioning vectors."""
    found = pictures.conditioning(out, folder / "conditioning.png")
    rows = [[pictures.WHERE[setting], f"{rank:+.2f}", f"{p_value:.2g}"] for setting, (rank, p_value) in found.items()]
    return table(["federation", "Spearman's correlation", "p (relabelled clients)"], rows)


NEEDS = {  # where a table's results are, unless in the folder of its name
    "xor": "xor.json",
    "more rows": "more_rows",
    "paper images": "paper_images",
    "paper rare": "paper_rare",
    "why": "controls",
    "switches": "images",
    "cost": "cost.json",
}


def write(out: Path, folder: Path) -> Path:
    """Fill in the tables of RESULTS.md between their markers (a missing file is created), and draw the figures."""
    parts: dict[str, Callable[[], str]] = {
        "xor": lambda: xor_table(out),
        "more rows": lambda: shuffled_table(out, "more_rows"),
        "rare": lambda: shuffled_table(out, "rare"),
        "paper images": lambda: shuffled_table(out, "paper_images"),
        "paper rare": lambda: shuffled_table(out, "paper_rare"),
        "images": lambda: image_table(out),
        "why": lambda: why_table(out),
        "longer": lambda: longer_table(out),
        "switches": lambda: switch_table(out),
        "office": lambda: method_table(out, "office", "by domain", "accuracy, %"),
        "signals": lambda: method_table(out, "signals", "by subject", "AUC, %"),
        "newcomers": lambda: newcomer_table(out),
        "cost": lambda: cost_table(out),
        "conditioning": lambda: conditioning_table(out, folder),
        "tuning": lambda: tuning_table(out),
    }
    path = folder / "RESULTS.md"
    text = (
        path.read_text("utf-8") if path.exists() else "\n".join(f"<!-- {n} -->\n<!-- end of {n} -->\n" for n in parts)
    )
    for name, make in parts.items():
        if not (out / NEEDS.get(name, name)).exists():
            print(f"{name}: unchanged, since {NEEDS.get(name, name)} has not been measured")
            continue
        try:
            made = make()
        except (OSError, KeyError, ZeroDivisionError) as error:
            print(f"{name}: unchanged, since not everything has been measured ({type(error).__name__}: {error})")
            continue
        text = put(text, name, made)
    path.write_text(text, "utf-8")
    if (out / "xor.json").exists():
        xor.draw(out, folder / "xor.png")
    if (out / "images").exists():
        pictures.shuffling(out, folder / "shuffling.png")
    return path
