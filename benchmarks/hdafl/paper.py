"""What the paper prints (Yang, Beliard, Rossi 2020), and its conditions beside those of a run.

FedAvg is evaluated there as the mean over clients of the accuracy on their own test rows (Fig. 3: "clients average
testing accuracy") of the model that the server has averaged, without a local step: after one, no client with two
classes would be at 17 %.  HDAFL is evaluated as each client has it, with its own last layer.  Which rows are for
testing is not printed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import federations
import numpy as np
import settings
from finished_runs import BASE, OURS, comparison, traffic_runs
from settings import Scale
from shared.conditions import LEGEND, beside, filled
from shared.markdown import table
from shared.stored import printed as printed_figures

from piebald.report.comparison import Comparison, Interval
from piebald.report.tables import History

PRINTED = printed_figures("hdafl")
# Accuracy in per cent after 400 rounds, by setting and clients per round: HDAFL, FedAvg.
TABLE_3 = {
    setting: {int(cohort): tuple(both) for cohort, both in by_cohort.items()}
    for setting, by_cohort in PRINTED["table_3"].items()
}
# Rounds and MB to 78 %, by clients per round: HDAFL's rounds and MB, FedAvg's rounds and MB.
TABLE_4 = {int(cohort): tuple(figures) for cohort, figures in PRINTED["table_4"].items()}
# Points lost to the centralised model and the communication gain, by rounds: FedAvg's, then HDAFL's.
TABLE_5 = {int(rounds): tuple(figures) for rounds, figures in PRINTED["table_5"].items()}


def printed(scale: Scale, here: bool) -> str:
    """Return the paper's conditions beside those of the parts "paper" and "traffic".

    Args:
        scale: the scale of the run.
        here: whether FEMNIST is here; without it, all 70,000 digits by writer stand in.
    """
    plans = settings.paper_plans(scale.paper_rounds, here)
    every, few = (", ".join(map(str, group)) for group in plans)
    digits = "MNIST's 70,000 digits, 836 writers"
    digits = digits if scale.paper_rows is None else f"{scale.paper_rows:,} of {digits}"
    values = {
        "scale": scale, "settings": settings, "every": every, "few": few, "repetitions": len(scale.paper_seeds),
        "rounds": ", ".join(map(str, settings.table_5_rounds(scale))), "classes": 62 if here else 10,
        "data": "FEMNIST, 2000 writers" if here else digits, "disjoint": 31 if here else 5,
        "kilobytes": 77 if here else 68,
    }  # fmt: skip
    lines = [f"{'':26} {'paper':40} here"]
    for title, rows in filled(Path(__file__).with_name("conditions.toml"), **values):
        lines += ["", title, *beside(rows, 24, 40)]
    return "\n".join([*lines, *LEGEND])


OTHERS = {label: f"minus {settings.NAMES.get(label, label)}" for label in ("FedAvg_tuned", "FedAvg_equal", "Local")}
TITLES = {
    "iid": "i.i.d.", "writer": "non-i.i.d. (by writer)", settings.MANY_ROWS: "by writer, 480 rows each",
    "disjoint": "disjoint", settings.APPS: "disjoint, 52 apps",
}  # fmt: skip
LIKE = {settings.APPS: "disjoint", settings.MANY_ROWS: "writer"}  # the paper's setting that another stands for


def made(out: Path, setting: str, needed: Sequence[str] = (BASE,)) -> dict[int, Comparison]:
    """Return the runs of a setting by clients per round, where those of all needed recipes have finished."""
    folders = sorted((out / "paper").glob(f"*/{setting}/C*"), key=lambda path: int(path.name[1:]))
    found = {int(folder.name[1:]): comparison(folder, needed) for folder in folders}
    return {cohort: runs for cohort, runs in found.items() if runs is not None}


def tables(out: Path) -> Iterator[str]:
    """Yield the tables for which there are runs."""
    found = {setting: runs for setting in TITLES if (runs := made(out, setting))}
    if found:
        yield "### Table 3: accuracy, %\n"
        yield from _table_3(found)
        lines = list(_against_others(found))
        if lines:
            yield "\n### Beside table 3: HDAFL minus the others, points\n"
            yield table(["setting", "C in the paper; here", *OTHERS.values(), "seeds"], lines)
    if "writer" in found:
        yield "\n### Table 4: rounds and MB to a target, by writer\n"
        yield from _table_4(found["writer"])
    lines = list(_table_5(out))
    if lines:
        yield "\n### Table 5: points lost to the centralised model, and bytes gained\n"
        yield table(
            ["case", "rounds", "recipe", "loss, paper", "loss", "to FedAvg", "gain, paper", "gain", "seeds"], lines
        )


def _table_3(found: dict[str, dict[int, Comparison]]) -> Iterator[str]:
    lines = []
    for setting, by_cohort in found.items():
        for cohort, runs in by_cohort.items():
            theirs = settings.NEAREST.get(cohort, cohort)
            printed = TABLE_3[LIKE.get(setting, setting)][theirs]
            for label in (label for label in settings.LABELS if label in runs.labels):
                known = {OURS: printed[0], BASE: printed[1]}.get(label)
                mine = Interval.of([*_by_seed(runs, label).values()])
                assert mine is not None
                lines.append(
                    [
                        TITLES[setting], f"{theirs}; {cohort}", settings.NAMES.get(label, label),
                        "" if known is None else f"{known:.2f}",
                        _interval(mine, ".2f"), _apart(runs, label, BASE), str(mine.count),
                    ]
                )  # fmt: skip
    yield table(["setting", "C in the paper; here", "recipe", "paper", "here", "to FedAvg", "seeds"], lines)


def _against_others(found: dict[str, dict[int, Comparison]]) -> Iterator[list[str]]:
    for setting, by_cohort in found.items():
        for cohort, runs in by_cohort.items():
            cells = [_apart(runs, OURS, label) for label in OTHERS]
            if any(cells):
                where = [TITLES[setting], f"{settings.NEAREST.get(cohort, cohort)}; {cohort}"]
                yield [*where, *cells, str(len(_by_seed(runs, OURS)))]


def _table_4(by_cohort: dict[int, Comparison]) -> Iterator[str]:
    """As the paper chose its 78 %: the least final accuracy of FedAvg, rounded down to a point."""
    target = math.floor(100 * min(np.mean([f["mean"] for f in runs.finals[BASE]]) for runs in by_cohort.values())) / 100
    lines = []
    for cohort, runs in by_cohort.items():
        ours, ours_mb, base, base_mb = TABLE_4[cohort]
        for row in runs.to_target(target):
            known = {OURS: f"{ours}, {ours_mb} MB", BASE: f"{base}, {base_mb} MB"}.get(row["label"], "")
            here = "not reached" if not row["reached"] else f"{row['rounds']:.0f}, {row['mb']:.1f} MB"
            some = "" if row["reached"] in (0, row["runs"]) else f" ({row['reached']} of {row['runs']} runs)"
            lines.append([str(cohort), settings.NAMES.get(row["label"], row["label"]), known, here + some])
    yield table(["C", "recipe", "paper, to 78 %", f"here, to {100 * target:.0f} %"], lines)


def _table_5(out: Path) -> Iterator[list[str]]:
    for model in settings.TRAFFIC_MODELS:
        for case in settings.TRAFFIC_CASES:
            runs = traffic_runs(out, model, case)
            seeds = sorted({run.seed for run in runs})
            by = {(run.label, run.seed): run for run in runs}
            for rounds, printed in TABLE_5.items():
                for label in settings.LABELS:
                    pairs = [(by[label, seed], by[federations.CENTRAL, seed]) for seed in seeds if (label, seed) in by]
                    lost = [
                        100 * (central.curve[-1]["mean"] - at)
                        for run, central in pairs
                        if (at := _accuracy(run, rounds)) is not None
                    ]
                    if (loss := Interval.of(lost)) is None:
                        continue
                    sent = float(np.mean([_bytes(run, rounds) for run, _ in pairs]))
                    packed = np.mean([federations.compressed(case, None, seed)["npz"] for seed in seeds])
                    theirs = {BASE: printed[:2], OURS: printed[2:]}.get(label)
                    yield [
                        f"{case.replace('_', ' ')}, {model}", str(rounds), settings.NAMES.get(label, label),
                        "" if theirs is None else f"{theirs[0]:.1f}", _interval(loss, ".1f"),
                        "" if label == BASE else _to_base(by, label, seeds, rounds),
                        "" if theirs is None else f"{theirs[1]:.1f}", f"{packed / sent:.2f}" if sent else "",
                        str(loss.count),
                    ]  # fmt: skip


def _to_base(by: dict[tuple[str, int], History], label: str, seeds: list[int], rounds: int) -> str:
    """Points more than FedAvg has after as many rounds, paired by seed; empty where one of them was not evaluated."""
    pairs = [(_accuracy(by[label, seed], rounds), _accuracy(by[BASE, seed], rounds)) for seed in seeds]
    made = Interval.of([100 * (mine - base) for mine, base in pairs if mine is not None and base is not None])
    return "" if made is None else _interval(made, "+.1f")


def _interval(made: Interval, form: str) -> str:
    wide = made.low is None or made.high is None or made.count < 3
    return f"{made.mean:{form}}" + ("" if wide else f" [{made.low:{form}}, {made.high:{form}}]")


def _accuracy(run: History, rounds: int) -> float | None:
    return next((point["mean"] for point in run.curve if point["version"] == rounds), None)


def _bytes(run: History, rounds: int) -> int:
    return max((point["bytes"] for point in run.curve if point["version"] <= rounds), default=0)


def _by_seed(runs: Comparison, label: str) -> dict[int, float]:
    """Final accuracy in per cent by seed."""
    return {run.seed: 100 * run.final["mean"] for run in runs.by_label.get(label, [])}


def _apart(runs: Comparison, label: str, base: str) -> str:
    """Points more than another recipe has, paired by seed; empty for the recipe itself and without common seeds."""
    mine, theirs = _by_seed(runs, label), _by_seed(runs, base)
    made = Interval.of([mine[seed] - theirs[seed] for seed in sorted(mine.keys() & theirs.keys())])
    return "" if made is None or label == base else _interval(made, "+.2f")
