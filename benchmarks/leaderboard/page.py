"""The page: docs/leaderboard.md, written from the runs; no number about them is typed by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill

import numpy as np
from as_truth import COUNT, LEARNED, SHIPPED, Cost, costs, known_federations
from competition import RESULTS, SEEDS, read
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from methods import ALONE, BY_NAME, FEW, METHODS, NAIVE, PASSES, POOLED, SETTINGS, TOGETHER
from shared.markdown import table
from shared.stored import texts
from standings import FEWEST, NOT_FEDERATED, Standing, families, first_to_try, gain, hours_of, judged_on, standings
from tiers import FEDERATIONS, HIDDEN, KINDS, REAL, SMALL, SURVIVAL, TIERS

from piebald.report.paired import Difference

MOST = 25  # points, beyond which a gain is drawn at the edge
BLUE, GREY, RED = "#1f6fb4", "#8a8f98", "#b4311f"


def title(method: str) -> str:
    """What readers call a row of the table."""
    return "Most frequent class" if method == NAIVE else BY_NAME[method].title


def draw_means(found: Sequence[Standing], methods: Sequence[str], path: Path) -> None:
    """A line for each method: a dot for each federation, the mean, and the interval for other federations."""
    figure = Figure(figsize=(8, 0.26 * len(methods) + 1.2), layout="constrained")
    panel = figure.subplots()
    for place, method in enumerate(reversed(methods)):
        own = judged_on(method, found)
        points = np.clip([one.points(method) for one in own], -MOST, MOST)
        colours = [{1: BLUE, -1: RED, 0: GREY}[one.side(method)] for one in own]
        panel.scatter(points, [place] * len(own), c=colours, s=14, zorder=3)
        mean, low, high = (min(max(end, -MOST), MOST) for end in gain(own, lambda one, name=method: name))
        panel.plot([mean], [place], "|", color="black", ms=10, zorder=4)
        if not np.isnan(low):
            panel.plot([low, high], [place, place], color="black", lw=1)
    panel.axvline(0, color="black", lw=0.8)
    panel.set_yticks(range(len(methods)), [title(method) for method in reversed(methods)], fontsize=8)
    panel.set_xlim(-MOST - 1, MOST + 1)
    panel.set_ylim(-0.6, len(methods) - 0.4)
    words = "points of test accuracy over Local; a dot is a federation, blue clearly above, red clearly below"
    panel.set_xlabel(words, fontsize=9)
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)


def draw_gains(found: Sequence[Standing], methods: Sequence[str], path: Path) -> None:
    """Points over training alone: rows are methods, columns federations by kind, a star where it is clear."""
    methods = [method for method in methods if method != ALONE]
    found = sorted(found, key=lambda one: list(KINDS).index(one.federation.kind))
    table = np.array([[one.points(name) if name in one.scores else np.nan for one in found] for name in methods])
    figure = Figure(figsize=(0.95 * len(found) + 2.6, 0.26 * len(methods) + 1.8), layout="constrained")
    panel = figure.subplots()
    panel.imshow(table, cmap="RdBu", norm=TwoSlopeNorm(0, -MOST, MOST), aspect="auto")
    for (row, column), value in np.ndenumerate(table):
        if not np.isnan(value):
            star = "*" if found[column].side(methods[row]) else ""
            colour = "white" if abs(value) > 0.7 * MOST else "black"
            panel.text(column, row, f"{value:+z.1f}{star}", ha="center", va="center", fontsize=7, color=colour)
    panel.set_xticks(
        range(len(found)), [fill(one.federation.words, 24) for one in found], rotation=35, ha="right", fontsize=8
    )
    panel.set_yticks(range(len(methods)), [title(method) for method in methods], fontsize=8)
    figure.savefig(path, dpi=100)


DOCS = Path(__file__).parents[2] / "docs"
RACED = "../benchmarks/advise/RESULTS.md#with-methods-that-lead-the-leaderboard"
TEXTS = texts(Path(__file__).with_name("page.md"))
LITTLE = "too little data to say"
IMAGES = ("leaderboard-means.png", "leaderboard-gains.png")


def write(folder: Path = RESULTS, docs: Path = DOCS) -> str:
    """Write the page and its pictures; returns where it is."""
    found = [one for one in standings(folder) if not one.absent]
    if not found:
        raise SystemExit("no federation has all runs yet: python benchmarks/leaderboard/run.py train")
    even = [one for one in found if not one.federation.slow]
    order = _order(even, found)
    (docs / "images").mkdir(parents=True, exist_ok=True)
    draw_means(found, order, docs / "images" / IMAGES[0])
    draw_gains(found, order, docs / "images" / IMAGES[1])
    introduction = TEXTS["introduction"].format(
        there_are=len({method.recipe for method in METHODS if not method.reason}) - 2, settings=SETTINGS, passes=PASSES,
        seeds=len(SEEDS), there=len(found), all=sum(one.tier == SMALL for one in FEDERATIONS),
        recipes=len({method.recipe for method in METHODS}) - 2,
    )  # fmt: skip
    parts = [introduction, *_first(found), TEXTS["pictures"]]
    protocol = TEXTS["protocol"].format(passes=PASSES, settings=SETTINGS, fewest=FEWEST)
    parts += _folded("All methods, as numbers", _methods(found, order))
    parts += _folded("Each federation", _federations(found)) + _folded(
        "Families, chosen by validation", _families(found)
    )
    real, patients = ([one for one in standings(folder, tier) if not one.absent] for tier in (REAL, SURVIVAL))
    parts += _folded("Real networks", _beside(found, real)) if real else []
    parts += _folded("Survival", _survival(patients)) if patients else []
    portfolios = costs(known_federations(folder))
    parts += _folded("The adviser's portfolio", _portfolios(portfolios)) if portfolios else []
    parts += _folded("How it was made", [protocol]) + _folded("What changed, and why", [TEXTS["changed"]])
    parts += _folded("What is not here, and what it costs", _absent(found, folder))
    (docs / "leaderboard.md").write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")
    return str(docs / "leaderboard.md")


def _order(even: Sequence[Standing], found: Sequence[Standing]) -> list[str]:
    """The rows of the table, the largest mean gain first, methods for unequal devices at the end."""
    rows = [name for name in (*BY_NAME, NAIVE) if any(name in one.scores for one in found)]
    mean = {name: np.mean([one.points(name) for one in judged_on(name, found)]) for name in rows}
    return sorted(rows, key=lambda name: (not any(name in one.scores for one in even), -mean[name]))


# -- what is learned


def _first(found: Sequence[Standing]) -> list[str]:
    lines = []
    for kind, words in KINDS.items():
        own = [one for one in found if one.federation.kind == kind]
        if not own:
            lines.append([words, LITTLE, "", "", "", ""])
            continue
        order = [name for name in first_to_try(own) if name != ALONE][:3]
        clear = _count(own, order[0], 1) > _count(own, order[0], -1)
        first = title(order[0] if clear else ALONE)
        points = _points(own, lambda one, name=order[0]: name)
        then = [f"{title(name)} {gain(own, lambda one, name=name: name)[0]:+z.1f}" for name in (*order[1:], TOGETHER)]
        lines.append([f"{words}: {_names(own)}", f"**{first}**", points if clear else f"{title(order[0])} {points}",
                      _sure(own, order[0]), len(set.intersection(*(set(one.near) for one in own))),
                      "; ".join(dict.fromkeys(then))])  # fmt: skip
    heads = ["your clients", "try first", "best by validation rows: points over Local", "clearly", "level", "others"]
    even = [one for one in found if not one.federation.slow]
    chosen = _points(even, lambda one: one.best([name for name in one.results if name not in NOT_FEDERATED]))
    level = [one for one in found if ALONE in one.near]
    return [
        "## What to try first", "", table(heads, lines), "",
        TEXTS["first"].format(fewest=FEWEST, little=LITTLE, chosen=chosen, level=len(level), count=len(found),
                     fedavg=_sure(found, TOGETHER), above=_above(even)),
    ]  # fmt: skip


def _above(even: Sequence[Standing]) -> str:
    """The methods whose interval for other federations is above 0."""
    methods = [name for name in BY_NAME if name not in (ALONE, POOLED) and any(name in one.results for one in even)]
    sure = [name for name in methods if gain(judged_on(name, even), lambda one, name=name: name)[1] > 0]
    return f"{', '.join(map(title, sure))} {'are' if len(sure) > 1 else 'is'} above Local" if sure else (
        "no method is above Local"
    )  # fmt: skip


def _points(found: Sequence[Standing], pick: Callable[[Standing], str]) -> str:
    """Points over training alone, with the interval for other federations or, of too few, what is known of these."""
    mean, low, high = gain(found, pick)
    if np.isnan(low):
        points = [one.points(pick(one)) for one in found]
        low, high = min(points), max(points)
        gap = found[0].over_alone.get(pick(found[0]))
        if len(found) == 1 and gap is not None:
            low, high = 100 * gap.low, 100 * gap.high
    return f"{mean:+z.1f} ({low:+z.1f} to {high:+z.1f})"


def _names(those: Sequence[Standing]) -> str:
    return "; ".join(one.federation.words for one in those)


def _sure(found: Sequence[Standing], method: str) -> str:
    return f"above in {_count(found, method, 1)}, below in {_count(found, method, -1)} of {len(found)}"


def _count(found: Sequence[Standing], method: str, side: int) -> int:
    return sum(one.side(method) == side for one in found)


# -- the tables


def _methods(found: Sequence[Standing], order: Sequence[str]) -> list[str]:
    lines = []
    for name in order:
        own = judged_on(name, found)
        points = _short(*gain(own, lambda one, name=name: name))
        near = "" if name in NOT_FEDERATED else sum(name in one.near for one in own)
        results = [one.results[name] for one in own if name in one.results]
        costs = ("megabytes", "seconds") if results else ()
        means = [_cost([getattr(result, what) for result in results]) for what in costs] or ["", ""]
        lines.append([title(name), points, _count(own, name, 1), _count(own, name, -1),
                      near, len(own), *means])  # fmt: skip
    heads = ["method", "points over Local", "above", "below", "level", "of", "MB", "s"]
    return [
        table(heads, lines), "",
        TEXTS["methods note"],
    ]  # fmt: skip


def _cost(values: Sequence[float]) -> str:
    """The mean of what was measured."""
    known = [value for value in values if not np.isnan(value)]
    return f"{np.mean(known):.1f}" if known else ""


def _short(mean: float, low: float, high: float) -> str:
    """A mean for a cell, bold where it is above 0, with the interval for other federations where there is one."""
    bold = "**" if low > 0 else ""
    return f"{bold}{mean:+z.1f}{bold}" + ("" if np.isnan(low) or low == high else f" ({low:+z.1f} to {high:+z.1f})")


def _federations(found: Sequence[Standing]) -> list[str]:
    lines = []
    for one in found:
        others = len([name for name in one.results if name not in NOT_FEDERATED])
        best = one.best([name for name in one.results if name not in NOT_FEDERATED])
        near = f"{len(one.near)} of {others}" if len(one.near) < others else f"all: {LITTLE}"
        means = [f"{100 * one.scores[name].mean:.1f}" if name in one.scores else "" for name in
                 (NAIVE, ALONE, TOGETHER, POOLED)]  # fmt: skip
        lines.append([one.federation.words, len(one.naive.clients), sum(one.naive.sizes), *means,
                      _lead(one, one.near[0]), _lead(one, best), near])  # fmt: skip
    heads = ["federation", "clients", "test rows", "naive", "Local", "FedAvg", "Pooled",
             "leader, over Local", "best by validation, over Local", "level with the leader"]  # fmt: skip
    return [
        table(heads, lines), "",
        TEXTS["federations note"],
    ]  # fmt: skip


def _lead(one: Standing, method: str, named: bool = True) -> str:
    gap: Difference | None = one.over_alone.get(method)
    if gap is None:
        return title(method) if named else f"{100 * one.scores[method].mean:.1f}" if method in one.scores else ""
    bold = "**" if one.side(method) > 0 or (one.side(method) and not named) else ""
    name = f"{title(method)}: " if named else ""
    return f"{name}{bold}{100 * gap.mean:+z.1f}{bold} ({100 * gap.low:+z.1f} to {100 * gap.high:+z.1f})"


def _families(found: Sequence[Standing]) -> list[str]:
    kinds = {kind: [one for one in found if one.federation.kind == kind] for kind in KINDS}
    lines = []
    for family, methods in families().items():
        cells = []
        for own in kinds.values():
            own = [one for one in own if any(name in one.results for name in methods)]
            pick = gain(own, lambda one, methods=methods: one.best(methods)) if own else None
            cells.append("" if pick is None else _short(*pick))
        lines.append([family, *cells])
    few = [kind for kind, own in kinds.items() if 0 < len({one.federation.rows for one in own}) < FEWEST]
    note = f"A kind with fewer than {FEWEST} data sets has no interval: {LITTLE} of other federations." if few else ""
    return [table(["best of the family", *kinds], lines), "", note, ""]


def _beside(found: Sequence[Standing], real: Sequence[Standing]) -> list[str]:
    """Points over Local of the same methods on the same clients, with the small network and with its own."""
    alike = {(one.federation.rows, one.federation.kind): one for one in found}
    pairs = [(alike[key], own) for own in real if (key := (own.federation.rows, own.federation.kind)) in alike]
    lines = [
        [title(name), *(cell for small, own in pairs for cell in (
            _lead(small, name, False).partition(" (")[0], _lead(own, name, False)
        ))] for name in FEW
    ]  # fmt: skip
    return [
        table(["method", *(words for _, own in pairs for words in ("small", own.federation.words))], lines), "",
        f"*Small* is one layer of {HIDDEN[0]} for the same clients: mean test accuracy of Local, points over it of "
        "others, bold where they are clearly above or below." + _refused(real), "",
    ]  # fmt: skip


def _refused(those: Sequence[Standing]) -> str:
    """Say why cells are empty."""
    reasons = {f"  {title(name)}: {why}." for one in those for name, why in one.refused.items()}
    return "".join(sorted(reasons))


def _survival(patients: Sequence[Standing]) -> list[str]:
    return [
        *_few([f"{one.federation.words}, {len(one.naive.clients)} clients" for one in patients], patients), "",
        "Harrell's concordance of Local, points over it of others; a Kaplan-Meier curve, which is the same for all of "
        "a client's patients, has 50.  A concordance has no single rows: intervals are for other clients."
        + _refused(patients), "",
    ]  # fmt: skip


def _few(heads: Sequence[str], those: Sequence[Standing]) -> list[str]:
    """Local's mean and the points of others over it, of the methods that are tried beside the small networks."""
    lines = [[title(name), *(_lead(one, name, False) for one in those)] for name in FEW]
    return [table(["method", *heads], lines)]


def _portfolios(those: Sequence[Cost]) -> list[str]:
    means = {one.words: float(np.mean(one.points)) for one in those}
    lines = [[one.words, f"{means[one.words]:+z.1f}", f"{max(one.points):+z.1f}"] for one in those]
    learned = min(mean for words, mean in means.items() if words.startswith(LEARNED))
    gain = (
        f"loses less; what the adviser's race gains by these methods is [measured on its own federations]({RACED})"
        if learned < means[SHIPPED]
        else "loses no less, so the shipped one stays"
    )
    return [
        table(["settings to choose from", "points lost, mean", "worst"], lines), "",
        f"Test points lost on {len(those[0].points)} federations by choosing, by validation rows, from {COUNT} "
        "settings and not from all; below 0 the longer list was worse.  All are learned from other data sets.  What is "
        f"learned here {gain}.  Nearest settings of the same recipes stand for the shipped ones.", "",
    ]  # fmt: skip


def _absent(found: Sequence[Standing], folder: Path) -> list[str]:
    there = {one.federation.name for one in found}
    small = [one for one in FEDERATIONS if one.tier == SMALL]
    known = {one.name: list(read(one.name, folder).values()) for one in FEDERATIONS}
    minutes = 60 * np.array([hours_of(known[one.name]) for one in small if one.name in there])
    minutes = minutes[~np.isnan(minutes)]
    left = [one for one in small if one.name not in there]
    parts = [f"- Not trained to the end: {'; '.join(one.words for one in left)}."] if left else []
    whole = {one.federation.name for tier in TIERS for one in standings(folder, tier) if not one.absent}
    untried = [one for one in FEDERATIONS if one.tier != SMALL and one.name not in whole]
    parts += [f"- Larger networks, not trained here: {'; '.join(one.words for one in untried)}."] if untried else []
    parts += [f"- {method.title}: {method.reason}." for method in METHODS if method.reason]
    parts += [f"- {one.federation.words}, {title(name)}: {why}" for one in found for name, why in one.refused.items()]
    parts += [
        f"- A federation of the small tier takes about {minutes.mean():.0f} minutes of one processor, all {len(small)} "
        f"about {len(small) * minutes.mean() / 120:.1f} hours of two cores; where other work shares them, a multiple."
    ] if len(minutes) else []  # fmt: skip
    parts += [
        f"- There are {sum(map(len, known.values())):,} runs.",
        "- `python benchmarks/leaderboard/run.py train --minutes 60` goes on where it was stopped.  A new method is "
        f"one line in `benchmarks/leaderboard/methods.py` and {SETTINGS + len(SEEDS) - 1} runs on each federation.  "
        "`--tier real` trains a few methods of each family with leaf_cnn, a 1D-CNN, an LSTM, and a network on a "
        "prepared table; `--tier large` all methods on more clients, for a GPU; `--tier survival` patients.",
        "- Runs, settings and single test rows are kept in `benchmarks/leaderboard/results`.", "",
    ]  # fmt: skip
    return parts


def _folded(heading: str, lines: Sequence[str]) -> list[str]:
    return ['<details markdown="1">', f"<summary>{heading}</summary>", "", *lines, "</details>", ""]
