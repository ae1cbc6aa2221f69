"""Settings of the benchmark: models, partitions, recipes, learning rates, rounds, and the runs of each scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from piebald import recipes
from piebald.data.partition import ByOwner, Dirichlet, Disjoint, Iid, Partition
from piebald.methods.recipe import Recipe

PARTS = ("tuning", "digits", "traffic", "why", "leaf")
PAPER_PARTS = ("paper", "traffic")  # tables 3 to 5 and Fig. 3 in the paper's own settings
TEST = 0.2  # share of each client's rows that is used for testing
BATCH = 10
LEARNING_RATE = 0.1  # digits; chosen with `--only tuning`, the same for every recipe
TRAFFIC_BATCH = 50
TRAFFIC_LEARNING_RATE = 0.05
TRAFFIC_MOMENTUM = 0.9
PACKETS = 30  # of a flow; the paper has 10
WRITERS = 2000  # of FEMNIST, as in the paper

TUNED_RATES = (0.05, 0.1, 0.2)
TUNED_SETTINGS = ("dirichlet_0.3", "disjoint_groups")
TUNING_SEED = 100  # used for nothing else


@dataclass(frozen=True)
class Plan:
    """Number of rounds, and of rounds between evaluations.

    FedAvg and HDAFL, for which rounds to a target are compared, are evaluated every `fine` rounds, others every
    `coarse` rounds.
    """

    rounds: int
    fine: int
    coarse: int


# Dirichlet(0.3) with more rounds or rows, to find why HDAFL is behind there: (rows, plan) with C = 10.
WHY_SETTING = "dirichlet_0.3"
WHY = {
    "more_rounds": (7500, Plan(240, 10, 60)),
    "more_rows": (30000, Plan(60, 4, 15)),
    "all_rows": (None, Plan(30, 2, 15)),
}

MANY = ("iid", "writer", "dirichlet_0.3", "dirichlet_0.1", "disjoint_groups")  # 100 clients
FEW = ("disjoint_five",)  # 5 clients
TITLES = {
    "iid": "i.i.d., 100 clients",
    "writer": "by writer, 100 clients of several writers each",
    "dirichlet_0.3": "Dirichlet(0.3), 100 clients",
    "dirichlet_0.1": "Dirichlet(0.1), 100 clients",
    "disjoint_groups": "disjoint, 5 groups of 20 clients with two classes each",
    "disjoint_five": "disjoint, 5 clients with two classes each",
    "disjoint_apps": "disjoint, 26 clients with two of 53 apps each",
    "disjoint": "disjoint, as many clients with two classes each as there are classes for",
}

TRAFFIC_CASES = {"same_apps": 0, "own_apps": 18}  # number of apps that each capture has alone
TRAFFIC_MODELS = {  # settings of `cnn_1d`
    "cnn_1d_tiny": {"channels": (8, 16), "hidden": 32},
    "cnn_1d_small": {"channels": (16, 32), "hidden": 64},
    "cnn_1d": {},
}


@dataclass(frozen=True)
class Scale:
    """Size of the benchmark.

    Attributes:
        rows: number of digits in the partition, for training and testing; None means all 70,000.
        seeds: each redraws the rows, the partition, the first model and the cohorts.
        plans: plans for `small_cnn`, by clients per round out of 100.
        few_plans: the same, out of 5.
        alone: plan for Local on digits, where every client trains in every round.
        leaf_plans: plans for `leaf_cnn`, by clients per round.
        leaf_alone: plan for Local with `leaf_cnn`.
        leaf_settings: settings that are run with `leaf_cnn`.
        leaf_seeds: seeds for `leaf_cnn`.
        traffic_rounds: rounds of one epoch on both captures.
        traffic_rows: number of flows; None means all 52,356.
        traffic_models: keys of `TRAFFIC_MODELS`.
        traffic_seeds: each redraws the split by trace, the apps that are removed, and the first model.
        paper_rounds: rounds of the part "paper".
        paper_rows: its digits, None for all; FEMNIST is never cut.
        paper_every: its rounds between evaluations of FedAvg and HDAFL.
        paper_alone: its epochs of Local; None means as many as rounds.
        paper_seeds: its seeds.
    """

    rows: int | None
    seeds: Sequence[int]
    plans: Mapping[int, Plan]
    few_plans: Mapping[int, Plan]
    alone: Plan
    leaf_plans: Mapping[int, Plan]
    leaf_alone: Plan
    leaf_settings: Sequence[str]
    leaf_seeds: Sequence[int]
    traffic_rounds: int
    traffic_rows: int | None
    traffic_models: Sequence[str]
    traffic_seeds: Sequence[int]
    paper_rounds: int = 400
    paper_rows: int | None = None
    paper_every: int = 1
    paper_alone: int | None = None
    paper_seeds: Sequence[int] = range(6)


SCALES = {
    "small": Scale(
        rows=7500,
        seeds=(0, 1, 2),
        plans={10: Plan(60, 2, 12), 50: Plan(25, 1, 5), 20: Plan(40, 1, 8)},
        few_plans={2: Plan(20, 1, 4), 5: Plan(12, 1, 3), 1: Plan(30, 1, 6)},
        alone=Plan(15, 15, 15),
        leaf_plans={10: Plan(30, 2, 10), 50: Plan(12, 1, 4), 20: Plan(20, 1, 5)},
        leaf_alone=Plan(5, 5, 5),
        leaf_settings=("disjoint_groups", "dirichlet_0.1", "dirichlet_0.3", "iid", "writer"),
        leaf_seeds=(0, 1, 2),
        traffic_rounds=20,  # as in table 5, which also has 4 and 8
        traffic_rows=None,
        traffic_models=("cnn_1d_small", "cnn_1d_tiny"),
        traffic_seeds=(0, 1, 2),
        paper_rows=7500,
        paper_every=10,
        paper_alone=40,  # what a client of 100 trains in 400 rounds of 10
        paper_seeds=(0, 1, 2),
    ),
    "full": Scale(
        rows=None,
        seeds=(0, 1, 2, 3, 4),
        plans={10: Plan(150, 2, 15), 20: Plan(100, 2, 10), 50: Plan(60, 1, 6)},
        few_plans={1: Plan(100, 1, 10), 2: Plan(60, 1, 6), 5: Plan(40, 1, 4)},
        alone=Plan(60, 10, 10),
        leaf_plans={10: Plan(60, 2, 10), 20: Plan(40, 2, 8), 50: Plan(20, 1, 4)},
        leaf_alone=Plan(20, 5, 5),
        leaf_settings=MANY,
        leaf_seeds=(0, 1, 2),
        traffic_rounds=20,
        traffic_rows=None,
        traffic_models=("cnn_1d_tiny", "cnn_1d_small", "cnn_1d"),
        traffic_seeds=(0, 1, 2, 3, 4),
    ),
}


# Table 3's disjoint classes where there are as many of them as in the paper: 26 clients with 2 of FG-Net's 53 apps.
APPS, APPS_CLIENTS, APPS_MODEL, APPS_PLAN = "disjoint_apps", 26, "cnn_1d_small", Plan(120, 20, 60)

# Table 3's writers with eight times the rows, 480 for training at each client: 60 are few for a private layer.
MANY_ROWS, MANY_ROWS_LIMIT, MANY_ROWS_PLAN = "writer_480", 60_000, Plan(30, 5, 15)

NEAREST = {2: 10, 3: 20, 5: 31}  # disjoint clients per round of 5 that stand for the paper's of 31


def paper_plans(rounds: int, letters: bool, every: int = 1) -> tuple[dict[int, Plan], dict[int, Plan]]:
    """Return the plans of table 3 by clients per round: for 100 clients, and for the disjoint ones.

    Without letters there are ten classes, so 5 disjoint clients instead of 31."""
    plan = Plan(rounds, every, max(1, rounds // 20))
    return dict.fromkeys((10, 20, 50), plan), dict.fromkeys((10, 20, 31) if letters else NEAREST, plan)


def table_5_rounds(scale: Scale) -> list[int]:
    """Return the rounds of table 5 that a scale reaches."""
    return [rounds for rounds in (4, 8, 20) if rounds <= scale.traffic_rounds]


def partition(setting: str, rows: int | None, seed: int, classes: int = 10) -> Partition:
    """Return the partition of a setting.

    MNIST's published training and test parts are pooled, so that clients test on rows like their own."""
    common = {"seed": seed, "limit": rows, "test": TEST, "pool": True}
    match setting:
        case "iid":
            return Iid(clients=100, **common)
        case "writer" | "writer_480":
            return ByOwner(owner="writer", clients=100, **common)
        case "disjoint_groups":
            return Disjoint(clients=100, classes_each=2, shared_by=20, **common)
        case "disjoint_apps":
            return Disjoint(clients=APPS_CLIENTS, classes_each=2, **common)
        case "disjoint":
            return Disjoint(clients=classes // 2, classes_each=2, **common)
        case "disjoint_five":
            return Disjoint(clients=5, classes_each=2, **common)
    return Dirichlet(clients=100, alpha=float(setting.removeprefix("dirichlet_")), **common)


def compared(cohort: float, **training: object) -> dict[str, Recipe]:
    """Return the recipes that are compared, by label, with the same training settings."""
    return {
        "Local": recipes.local(cohort=cohort, **training),
        "FedAvg": recipes.fedavg(cohort=cohort, **training),
        "FedAvg_tuned": recipes.fine_tuned(cohort=cohort, **training),
        "FedAvg_equal": recipes.fedavg(cohort=cohort, **training).with_(aggregation="equal_weighted"),
        "HDAFL": recipes.hdafl(cohort=cohort, **training),
        "LG-FedAvg": recipes.lg_fedavg(cohort=cohort, **training),
    }


LABELS = tuple(compared(1))
ALONE = 1.0  # clients per round of Local, as a share: all of them
FINE = ("FedAvg", "HDAFL", "centralised")
NAMES = {
    "FedAvg_tuned": "FedAvg, then one unsent local epoch",
    "FedAvg_equal": "FedAvg, equal weights",
}
