"""The sentences of RESULTS.md that state figures, from the same lines as its tables, so that both cannot differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shared.intervals import differences, interval

Line = dict[str, Any]
Methods = Mapping[str, Sequence[Line]]
Value = Callable[[Line], float]
SEEDS = 3  # a verdict needs so many at least
BOUND = "honest clients only"


def own(line: Line) -> float:
    """Mean accuracy on clients' own test rows."""
    return float(line["accuracy"])


def common(line: Line) -> float:
    """Accuracy on the common test set."""
    return float(line["common"]["accuracy"])


def honest(line: Line) -> float:
    """Mean accuracy of honest clients on their own test rows."""
    return float(line["honest"])


def apart(mine: Sequence[Line], theirs: Sequence[Line], value: Value) -> tuple[float, float | None, int] | None:
    """Difference in points, half of its 95 % interval (Student's t, paired by seed), and the number of seeds.

    There is no interval for one seed, and no difference without a seed that both have.
    """
    gains = differences(*({line["seed"]: 100 * value(line) for line in lines} for lines in (mine, theirs)))
    if not gains:
        return None
    mean, half = interval(gains)
    return mean, None if math.isnan(half) else half, len(gains)


def shown(mean: float, half: float | None) -> str:
    """Format a difference."""
    return f"{mean:+.1f}" if half is None else f"{mean:+.1f} ± {half:.1f}"


def verdict(mean: float, half: float | None, seeds: int) -> str:
    """Say whether a difference can be told apart from none."""
    if half is None or seeds < SEEDS:
        return "no verdict from fewer than three seeds"
    return "cannot be told apart" if abs(mean) <= half else "better" if mean > 0 else "worse"


def against(methods: Methods, name: str, value: Value) -> str:
    """Say how a method differs from each other one, grouped by the verdict."""
    groups: dict[str, list[str]] = {}
    for other in methods:
        found = apart(methods.get(name, []), methods[other], value) if other != name else None
        if found is not None:
            groups.setdefault(verdict(*found), []).append(f"{other} {shown(*found[:2])}")
    parts = [f"{word}: {', '.join(groups[word])}" for word in sorted(groups)]
    return f"{name} minus the others, in points.  {'; '.join(parts)}." if parts else ""


def clustered(methods: Methods) -> str:
    """How well each clustering found the true groups at the end, by seed."""
    found = [
        f"{name} " + ", ".join(f"{line['ari'][-1]:.2f}" for line in lines)
        for name, lines in methods.items()
        if any(count > 1 for line in lines for count in line["clusters"])
    ]
    return f"ARI at the end, by seed: {'; '.join(found)}." if found else "No method found more than one cluster."


def category(cases: Mapping[str, Methods]) -> list[str]:
    """Sentences about planted types."""
    return [
        part for methods in cases.values() for part in (against(methods, "DistFL", own), clustered(methods)) if part
    ]


def attacks(cases: Mapping[str, Methods]) -> list[str]:
    """Sentences about attacks: DistFL against each other method, and each method against the bound."""
    said = []
    for case, methods in cases.items():
        for name in (name for name in methods if name.startswith("DistFL") and "noise" not in name):
            if sentence := against(methods, name, common):
                said.append(f"{case}.  {sentence}")
        lost = [
            f"{name} {shown(*found[:2])}"
            for name in methods
            if name != BOUND and (found := apart(methods[name], methods.get(BOUND, []), common)) is not None
        ]
        if lost:
            said.append(f"{case}.  Minus the bound without attackers: {', '.join(lost)}.")
    return said


def scales(cases: Mapping[str, Methods]) -> list[str]:
    """Sentence about a lone attacker: the most that each method loses at any scale, against the bound."""
    bound = cases.get(BOUND, {}).get("FedAvg", [])
    worst: dict[str, tuple[float, float | None, str]] = {}
    for case, methods in cases.items():
        for name, lines in methods.items():
            found = apart(lines, bound, common)
            if case != BOUND and found is not None and found[0] < worst.get(name, (math.inf,))[0]:
                worst[name] = (*found[:2], case)
    ordered = sorted(worst.items(), key=lambda pair: -pair[1][0])
    parts = [f"{name} {shown(mean, half)} ({case})" for name, (mean, half, case) in ordered]
    return [f"The worst difference to the bound over all scales, in points: {', '.join(parts)}."] if parts else []


def private(cases: Mapping[str, Methods]) -> list[str]:
    """Sentences about noise: at each level DistFL against the others, and against Local, which sends nothing."""
    quiet = cases.get("noise 0", {})
    said = []
    for case, methods in cases.items():
        together = {**methods, **{name: quiet[name] for name in ("Local",) if name in quiet}}
        if sentence := against(together, "DistFL", honest):
            said.append(f"{case}.  {sentence}")
    return said
