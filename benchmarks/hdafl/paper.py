"""What the paper prints (Yang, Beliard, Rossi 2020), and its conditions beside those of a run.

FedAvg is evaluated there as the mean over clients of the accuracy on their own test rows (Fig. 3: "clients average
testing accuracy") of the model that the server has averaged, without a local step: after one, no client with two
classes would be at 17 %.  HDAFL is evaluated as each client has it, with its own last layer.  Which rows are for
testing is not printed.
"""

from __future__ import annotations

import settings
from settings import Scale
from shared.stored import printed as printed_figures

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


def gains(setting: str) -> list[float]:
    """HDAFL minus FedAvg of table 3 in points, by rising clients per round."""
    return [ours - base for ours, base in TABLE_3[setting].values()]


def printed(scale: Scale, here: bool) -> str:
    """Return the paper's conditions beside those of the parts "paper" and "traffic".

    Args:
        scale: the scale of the run.
        here: whether FEMNIST is here; without it, all 70,000 digits by writer stand in.
    """
    plans = settings.paper_plans(scale.paper_rounds, here)
    every, few = ([str(cohort) for cohort in group] for group in plans)
    digits = "MNIST's 70,000 digits, 836 writers"
    digits = digits if scale.paper_rows is None else f"{scale.paper_rows:,} of {digits}"
    rows = [
        ("Tables 3 and 4, Fig. 3: --only paper", "", ""),
        ("data", "FEMNIST, 2000 writers", "FEMNIST, 2000 writers" if here else digits),
        ("classes", "62", "62" if here else "10"),
        ("clients", "100; disjoint 31", f"100; disjoint {31 if here else 5}"),
        ("classes each, disjoint", "2", "2"),
        ("clients per round", "10, 20, 50", ", ".join(every)),
        ("the same, disjoint", "10, 20, 31", ", ".join(few)),
        ("rounds", "400", str(scale.paper_rounds)),
        ("local epochs", "1", "1"),
        ("repetitions", "6", str(len(scale.paper_seeds))),
        ("network", "2 convolutions, 2 linear layers; 66 kB", f"small_cnn: the same; {77 if here else 68} kB"),
        ("private", "the last layer", "the last layer"),
        ("batch", "not printed", str(settings.BATCH)),
        ("learning rate", "not printed", str(settings.LEARNING_RATE)),
        ("test rows", "not printed", f"{settings.TEST:.0%} of each client's"),
        ("Table 5: --only traffic", "", ""),
        ("data", "Huawei's, 1.9 million flows", "FG-Net, 52,356 flows"),
        ("apps", "35", "53"),
        ("clients", "2: home, enterprise", "2: two captures, a fortnight apart"),
        ("input", "sizes of 10 packets", f"sizes of {settings.PACKETS} packets"),
        ("rounds", "4, 8, 20", ", ".join(map(str, settings.table_5_rounds(scale)))),
    ]  # fmt: skip
    lines = [f"{'':26} {'paper':40} here"]
    for name, theirs, ours in rows:
        lines += ["", name] if not theirs else [f"  {name:24} {theirs:40} {ours}{'' if theirs == ours else '   *'}"]
    return "\n".join([*lines, "", "* differs from the paper, or says more than it"])
