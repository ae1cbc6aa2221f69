"""Differences that a benchmark has measured: read from stored seeds, or from the tables of its page of results."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from scipy.stats import t
from shared.intervals import differences, interval
from shared.markdown import block, rows
from shared.stored import Lines

ROOT = Path(__file__).parents[2]
NUMBER = r"[-+]?\d+\.\d+"


@dataclass(frozen=True)
class Difference:
    """A mean difference, half of its 95 % interval, the seeds behind it, and how it is written."""

    mean: float
    half: float
    seeds: int
    text: str


@cache
def page(benchmark: str) -> str:
    """Return a benchmark's page of results."""
    return (ROOT / "benchmarks" / benchmark / "RESULTS.md").read_text("utf-8")


def of_text(text: str, seeds: int) -> Difference:
    """Return a difference from "+1.2 ± 0.3", or from "+1.2 [+0.9, +1.5]", whose nearer end counts."""
    mean, *ends = map(float, re.findall(NUMBER, text))
    half = math.nan if not ends else ends[0] if len(ends) == 1 else mean - ends[0] if mean > 0 else ends[1] - mean
    return Difference(mean, half, seeds, text.strip())


def counted(inside: str, method: str = "") -> int:
    """Return the number of seeds that a table says, by the row of a method where its rows differ, or has figures of."""
    if by_seed := rows(inside)[0].get("DistFL's ARI, by seed"):
        return len(by_seed.split(", "))
    said = [row["seeds"] for row in rows(inside) if "seeds" in row and method in ("", next(iter(row.values())))]
    return int(said[0])


def sentence(what: str, case: str = "", *, name: str) -> Difference:
    """DistFL minus a method, from the sentence of a block of its page."""
    inside = block(page("distfl"), name)
    line = next(one for one in inside.splitlines() if one.startswith(f"- {case}") and "minus the others" in one)
    found = re.search(rf"[:,] {re.escape(what)} ({NUMBER} ± {NUMBER})", line)
    if found is None:
        raise LookupError(f"{name}, {case}: there is no difference to {what}")
    return of_text(found[1], counted(inside, what))


def stored(first: str, second: str, part: str) -> Difference:
    """One method minus another in DistFL's stored seeds, in points on the common test rows."""
    lines = [one for one in Lines(ROOT / "benchmarks" / "distfl" / f"{part}.jsonl").read() if one["part"] == part]
    by_seed = [{one["seed"]: 100 * one["common"]["accuracy"] for one in lines if one["method"] == name}
               for name in (first, second)]  # fmt: skip
    gains = differences(*by_seed)
    mean, half = interval(gains)
    return Difference(mean, half, len(gains), f"{mean:+.1f} ± {half:.1f}")


def cell(row: str, *, benchmark: str, name: str, column: str) -> Difference:
    """A cell of the first table of a block, whose seeds the row *repetitions* has."""
    table = rows(block(page(benchmark), name))
    first = next(iter(table[0]))
    by_row = {one[first]: one for one in table}
    return of_text(by_row[row][column], int(by_row["*repetitions*"][column]))


def table_3(setting: str, cohort: str) -> Difference:
    """HDAFL minus FedAvg in its table 3."""
    wanted, table = (setting, cohort, "HDAFL"), rows(block(page("hdafl"), "paper"))
    line = next(row for row in table if (row["setting"], row["C in the paper; here"], row["recipe"]) == wanted)
    return of_text(line["to FedAvg"], int(line["seeds"]))


def table_5(case: str, after: str) -> Difference:
    """HDAFL minus FedAvg in its table 5, after so many rounds."""
    inside = block(page("hdafl"), "paper").partition("### Table 5")[2]
    line = next(row for row in rows(inside) if (row["case"], row["rounds"], row["recipe"]) == (case, after, "HDAFL"))
    return of_text(line["to FedAvg"], int(line["seeds"]))


def auc(data: str, first: str, second: str) -> Difference:
    """The AUC of one arm of SMMD, "arm, variant", minus that of another in its stored seeds."""
    lines = [one for one in Lines(ROOT / "benchmarks" / "smmd" / "seeds.jsonl").read() if one["set"] == data]
    by_seed = [{one["seed"]: one["auc"] for one in lines if f"{one['arm']}, {one['variant']}" == name}
               for name in (first, second)]  # fmt: skip
    gains = differences(*by_seed)
    mean, half = interval(gains)
    return Difference(mean, half, len(gains), f"{mean:+.4f} ± {half:.4f}")


def metis(section: str, classes: str, policy: str) -> Difference:
    """A policy minus FedAvg, or SyncFedAvg, in Metis' table I; sections are the page's headings, or "long"."""
    text = page("metis")
    seeds = re.search(r"^\| seed \|.*\| ([\d, ]+) \|$", text, re.MULTILINE)
    assert seeds is not None
    inside = block(text, "long") if section == "long" else text.partition(f"\n## {section}")[2].partition("\n### ")[0]
    line = next(row for row in rows(inside.partition("\nMinus ")[2]) if row["sizes, classes"] == classes)
    return of_text(line[policy].partition(" (")[0], len(seeds[1].split(",")))


def unpaired(section: str, classes: str, first: str, second: str) -> Difference:
    """One policy minus another in a cell of Metis' table I, by Welch's interval: seeds are stored, pairs are not.

    The page has mean, least and largest of three seeds, from which the third follows.
    """
    inside = page("metis").partition(f"\n## {section}")[2].partition(f"\n### {classes}\n")[2]
    by_recipe = {row["recipe"]: row for row in rows(inside.partition("\n### ")[0])}
    samples = []
    for name in (first, second):
        mean, low, high = map(float, re.findall(NUMBER, by_recipe[name]["last"]))
        assert by_recipe[name]["seeds"] == "3"
        samples.append([low, 3 * mean - low - high, high])
    errors = [statistics.variance(values) / 3 for values in samples]
    mean, total = statistics.fmean(samples[0]) - statistics.fmean(samples[1]), sum(errors)
    half = float(t.ppf(0.975, total**2 / sum(error**2 / 2 for error in errors))) * math.sqrt(total)
    return Difference(mean, half, 3, f"{mean:+.1f} ± {half:.1f} (unpaired)")


def distance(data: str, share: str) -> Difference:
    """The Fréchet distance at a share that is shuffled, as a share of that without."""
    text = page("partition").partition("## Distance over shuffling")[2]
    seeds = re.search(r"mean over (\d+) seeds", text)
    assert seeds is not None
    return of_text(next(row for row in rows(text) if row["share shuffled"] == data)[share], int(seeds[1]))


def solved(first: str, second: str) -> Difference:
    """The share of starts that solve XOR with one model minus that with another, in points."""
    by_model = {row["model"]: row["starts that solve it"] for row in rows(block(page("cgau"), "xor"))}
    shares, starts = [], 0
    for name in (first, second):
        good, starts = map(int, by_model[name].split(" of "))
        shares.append(good / starts)
    half = 196 * math.sqrt(sum(share * (1 - share) for share in shares) / starts)
    mean = 100 * (shares[0] - shares[1])
    return Difference(mean, half, starts, f"{mean:+.1f} ± {half:.1f}")


def requests() -> Difference:
    """How many fewer requests adaptive clients of Metis send, in per cent of those of a fixed frequency, over cells."""
    shares = [float(one) for one in re.findall(r"adaptive clients send (\d\.\d+) times", page("metis"))]
    mean, half = interval([100 * (1 - share) for share in shares])
    return Difference(mean, half, len(shares), f"{mean:+.1f} ± {half:.1f}")


def index_of_noise() -> Difference:
    """The adjusted Rand index of DistFL's clusters on plain noise in the first round."""
    lines = rows(block(page("distfl"), "rounds"))
    first = [float(row["ARI by round"].split()[0]) for row in lines if row["compared on"] == "plain noise"]
    mean, half = interval(first)
    return Difference(mean, half, len(first), f"{mean:+.2f} ± {half:.2f}")


def clusters_beyond_one() -> Difference:
    """How many clusters DistFL finds among 20 people, beside the first."""
    line = next(row for row in rows(block(page("distfl"), "people")) if row["method"] == "DistFL")
    found = [int(one) - 1.0 for one in line["clusters at the end, by seed"].split(", ")]
    mean, half = interval(found)
    return Difference(mean, half, len(found), f"{mean:+.1f} ± {half:.1f}")


def epoch_time() -> Difference:
    """How much longer an epoch of CGAU takes than of the plain classifier, in per cent, by three alternating runs."""
    line = next(row for row in rows(block(page("cgau"), "cost")) if row[""] == "CGAU")
    ratios = map(float, re.findall(r"\d\.\d\d", line["sequential, to plain"].partition(" s, ")[2]))
    mean, half = interval([100 * (ratio - 1) for ratio in ratios])  # median, least and largest of three are all of them
    return Difference(mean, half, 3, f"{mean:+.0f} ± {half:.0f}")


READERS: dict[str, Callable[..., Difference]] = {
    one.__name__: one
    for one in (sentence, stored, cell, table_3, table_5, auc, metis, unpaired, distance, solved, requests,
                index_of_noise, clusters_beyond_one, epoch_time)
}  # fmt: skip
