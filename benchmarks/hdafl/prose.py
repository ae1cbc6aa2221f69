"""The sentences of RESULTS.md that state figures: read from its own tables, so that text and tables cannot differ."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import paper
import settings
from blocks import Number
from shared.markdown import block, put, rows, sections, table
from shared.verdicts import verdict as sized

OVERVIEW = {"iid": "iid", "writer": "writer", "disjoint": "disjoint_five"}  # the paper's settings among ours
NOT_IN_PAPER = ("dirichlet_0.3", "dirichlet_0.1", "disjoint_groups")


def fill(text: str) -> str:
    """Return a RESULTS.md whose prose blocks follow from the tables in it; blocks without a table stay."""
    for name, made in {
        "claims": claims(text),
        "beside": beside(text),
        "leaf prose": leaf(text),
        "traffic prose": traffic(text),
        "advice": advice(text),
    }.items():
        text = put(text, name, made, append=True) if made else text
    return text


def overview(text: str, setting: str, model: str = "small_cnn") -> list[dict[str, str]]:
    """Return the rows of the overview for a setting, by rising clients per round."""
    found = [
        row
        for row in rows(block(text, "overview"))
        if row["model"] == model and row["setting"] == settings.TITLES[setting]
    ]
    return sorted(found, key=lambda row: int(row["C"]))


def figures(lines: Iterable[dict[str, str]], column: str) -> list[Number]:
    """Return the figures of a column, without empty cells."""
    return [number for line in lines if (number := Number.of(line[column])) is not None]


def span(numbers: Sequence[Number], form: str = "+.1f") -> str:
    """Format the least and the largest of some figures."""
    low, high = (f"{edge(number.value for number in numbers):{form}}" for edge in (min, max))
    return low if low == high else f"{low} to {high}"


def verdict(printed: Sequence[float], here: Sequence[Number]) -> str:
    """Say for how many cohorts, or rounds, a difference has which size beside the paper's, none of which is none."""
    words = [sized(value, number.value, number.half, none=0.0) for value, number in zip(printed, here, strict=False)]
    counts = Counter(words)
    return "; ".join(
        word if count == len(words) else f"{word} ({count} of {len(words)})" for word, count in counts.items()
    )


def gained(gains: Sequence[float]) -> str:
    """Say in how many cases fewer bytes are sent than the rows have, as in the paper in all of them."""
    won = sum(gain > 1 for gain in gains)
    said = {"agrees, weaker": won, "opposite": len(gains) - won}
    parts = [
        word if count == len(gains) else f"{word} ({count} of {len(gains)})" for word, count in said.items() if count
    ]
    return "; ".join(parts)


def claims(text: str) -> str:
    """The paper's figures beside ours, with a verdict."""
    lines: list[list[str]] = []
    for name, mine in OVERVIEW.items():
        here = figures(found := overview(text, mine), "HDAFL - FedAvg")
        if here:
            printed = paper.gains(name)
            cohorts = ", ".join(str(cohort) for cohort in paper.TABLE_3[name])
            lines.append(
                [
                    f"Table 3, {name}: HDAFL minus FedAvg, points",
                    f"{', '.join(f'{value:+.2f}' for value in printed)} (C = {cohorts})",
                    f"{'; '.join(row['HDAFL - FedAvg'] for row in found)} (C = {', '.join(row['C'] for row in found)})",
                    verdict(printed, here),
                ]
            )
    if found := overview(text, "writer"):
        ratios = [ours / base for ours, _, base, _ in paper.TABLE_4.values()]
        here = figures(found, "rounds, HDAFL / FedAvg")
        lines.append(
            [
                "Table 4, by writer: rounds to a common target, HDAFL's share of FedAvg's",
                ", ".join(f"{ratio:.2f}" for ratio in ratios),
                ", ".join(f"{number.value:.2f}" for number in here),
                "agrees"
                if all(n.value < 1 for n in here)
                else "opposite"
                if all(n.value > 1 for n in here)
                else "mixed",
            ]
        )
    for case, found in fifth(text).items():
        known = [paper.TABLE_5[int(row["rounds"])] for row in found]
        more = [lost - won for lost, _, won, _ in known]
        rounds = ", ".join(row["rounds"] for row in found)
        gains = [float(row["gain"]) for row in found]
        lines += [
            [
                f"Table 5, {case}: HDAFL minus FedAvg, points",
                f"{', '.join(f'{value:+.1f}' for value in more)} ({rounds} rounds)",
                "; ".join(row["to FedAvg"] for row in found),
                verdict(more, figures(found, "to FedAvg")),
            ],
            [
                f"Table 5, {case}: HDAFL's bytes gain",
                f"{', '.join(f'{gain:.1f}' for *_, gain in known)} ({rounds} rounds)",
                "; ".join(row["gain"] for row in found),
                gained(gains),
            ],
        ]
    for setting in NOT_IN_PAPER:
        if found := overview(text, setting):
            here_too = "; ".join(row["HDAFL - FedAvg"] for row in found)
            cohorts = ", ".join(row["C"] for row in found)
            title = settings.TITLES[setting]
            lines.append(
                [f"{title}: HDAFL minus FedAvg, points", "not in the paper", f"{here_too} (C = {cohorts})", ""]
            )
    return table(["what", "paper", "here", "verdict"], lines) if lines else ""


def fifth(text: str) -> dict[str, list[dict[str, str]]]:
    """HDAFL's rows of table 5 by case and network, by rising rounds."""
    found: dict[str, list[dict[str, str]]] = {}
    for title, inside in sections(block(text, "paper")).items():
        if title.startswith("Table 5"):
            for row in rows(inside):
                if row["recipe"] == "HDAFL":
                    found.setdefault(row["case"], []).append(row)
    return found


def losses(text: str) -> dict[str, tuple[int, float, float, float, float]]:
    """Rounds, points lost to the centralised model by FedAvg, HDAFL and tuned FedAvg, and HDAFL's gain, by table."""
    found = {}
    for title, inside in sections(block(text, "traffic")).items():
        by = {row["recipe"]: row for row in rows(inside)}
        if {"FedAvg", "HDAFL"} <= by.keys():
            three = (by[name]["loss to centralised"] for name in ("FedAvg", "HDAFL", settings.NAMES["FedAvg_tuned"]))
            base, mine, tuned = map(float, three)
            name, _, count = re.sub(r" \(.*?\)", "", title).rpartition(", ")
            gain = float(by["HDAFL"]["gain in all"])
            found[name] = (int(count.removesuffix(" rounds")), base, mine, tuned, gain)
    return found


def beside(text: str) -> str:
    """What the tables show besides the paper's results."""
    skewed = [row for name in ("dirichlet_0.1", "disjoint_groups", "disjoint_five") for row in overview(text, name)]
    if not skewed:
        return ""
    clear = [
        f"{row['setting']}, C = {row['C']}: {row['HDAFL - tuned FedAvg']}"
        for row in skewed
        if (number := Number.of(row["HDAFL - tuned FedAvg"])) is not None and abs(number.value) > number.half
    ]
    few = figures(overview(text, "disjoint_five"), "HDAFL - Local")
    groups = figures(overview(text, "disjoint_groups"), "HDAFL - Local")
    return "\n".join(
        [
            f"- HDAFL minus **FedAvg followed by one unsent local epoch** on the {len(skewed)} rows with "
            f"Dirichlet(0.1) or disjoint classes: {span(figures(skewed, 'HDAFL - tuned FedAvg'))} points. "
            f"The interval excludes 0 in {len(clear) or 'none'} of them{': ' + '; '.join(clear) if clear else ''}.",
            f"- **Five clients with two classes each do not need federated learning**: HDAFL minus Local is "
            f"{span(few)} points there, and {span(groups)} in groups, where clients have a twentieth of the rows.",
        ]
    )


def leaf(text: str) -> str:
    """What LEAF's network shows."""
    parts = []
    for setting, name in (("disjoint_groups", "disjoint groups"), ("dirichlet_0.1", "Dirichlet(0.1)")):
        if found := overview(text, setting, "leaf_cnn"):
            parts.append(
                f"{span(figures(found, 'HDAFL - FedAvg'))} points to FedAvg and "
                f"{span(figures(found, 'HDAFL - tuned FedAvg'))} to the fine-tuned one with {name}, in "
                f"{span(figures(found, 'rounds, HDAFL / FedAvg'), '.2f')} of FedAvg's rounds"
            )
    return f"HDAFL minus the others: {'; '.join(parts)}. One seed shows only a direction." if parts else ""


def traffic(text: str) -> str:
    """What the traffic tables show."""
    found = losses(text)
    if not found:
        return ""
    lines = [
        f"- {title}, after {count} rounds: FedAvg loses {base} points to the centralised model and HDAFL {mine}; "
        f"FedAvg with one unsent epoch {tuned}."
        for title, (count, base, mine, tuned, _) in found.items()
    ]
    size = [float(number) for number in re.findall(r"([\d.]+) MB as npz", block(text, "traffic"))]
    gain = [Number(gain) for *_, gain in found.values()]
    lines.append(
        f"- Bytes: all training rows are {min(size)} to {max(size)} MB compressed, and HDAFL's gain in all is "
        f"{span(gain, '.2f')}: {'no gain' if max(n.value for n in gain) < 1 else 'a gain in some cases'} on this data. "
        "A gain needs more bytes a row (payloads, longer flows) or more rows: HDAFL's rounds cost the same whatever "
        "the length of the captures."
    )
    return "\n".join(lines)


def advice(text: str) -> str:
    """When to share the head."""
    iid, groups = overview(text, "iid"), overview(text, "disjoint_groups")
    why = [Number.of(row["HDAFL - FedAvg"]) for row in rows(block(text, "why"))]
    held = [row["rows a client"] for row in rows(block(text, "why"))]
    if not (iid and groups and why and losses(text)):
        return ""
    same = [Number(base - mine) for name, (_, base, mine, *_) in losses(text).items() if name.startswith("the same")]
    own = [Number(base - mine) for name, (_, base, mine, *_) in losses(text).items() if not name.startswith("the same")]
    skewed = [row for name in NOT_IN_PAPER for row in overview(text, name)]
    first, last = why[0], why[-1]
    return "\n".join(
        [
            "1. **Share it** (FedAvg) where clients see the same classes: keeping it private made "
            f"{span(figures(iid, 'HDAFL - FedAvg'))} points on i.i.d. digits, and {span(same)} with the same apps on "
            "both sides.",
            "2. **Keep it private** (HDAFL) where clients hold different classes: "
            f"{span(figures(groups, 'HDAFL - FedAvg'))} points with disjoint groups, {span(own)} with apps of their "
            f"own, in {span(figures(groups, 'rounds, HDAFL / FedAvg'), '.2f')} of the rounds.",
            f"3. **In between, count rows**: at Dirichlet(0.3) {first.value:+.1f} points with {held[0]} rows a client "
            f"and {last.value:+.1f} with {held[-1]}; at Dirichlet(0.1) "
            f"{span(figures(overview(text, 'dirichlet_0.1'), 'HDAFL - FedAvg'))}."
            if first and last
            else "",
            "4. **First try FedAvg with one unsent local epoch, and Local**: HDAFL is "
            f"{span(figures(skewed, 'HDAFL - tuned FedAvg'))} points from the former on skewed digits, and "
            f"{span(figures(overview(text, 'disjoint_five'), 'HDAFL - Local'))} from the latter where clients have "
            "enough rows.",
        ]
    )
