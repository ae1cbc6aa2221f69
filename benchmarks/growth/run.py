"""How cost grows with what is large: python benchmarks/growth/run.py --scale small|full [--cases TEXT]

Each point is a process of its own.  Seconds are those of processors (user and system, also of workers), memory is the
peak of all its processes beyond what they had before the work; the making of the inputs counts for neither, nor do
imports.  The exponent is that of the last two points, where what does not grow weighs least.  Writes RESULTS.md beside
this file, of those cases that were asked for; the others keep their lines.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.extend([str(Path(__file__).parents[1] / "simulator"), str(Path(__file__).parents[1])])

from shared.markdown import block, put, rows, table
from shared.measured import Watch, apart, children, of_tree, processor, seconds_of
from shared.options import reader

PAGE = Path(__file__).parent / "RESULTS.md"
Work = Callable[[], Any]


def trained(recipe: str, registered: int, rounds: int = 3, parameters: int = 10_000, **more: Any) -> Work:
    """A run of a recipe; `more` are its settings, but for `runtime`."""
    from torch import nn
    from workloads import CLASSES, WIDTH, registered_clients

    import piebald

    clients, runtime = registered_clients(registered), more.pop("runtime", piebald.Simulator(workers=0))
    width = round(parameters / (WIDTH + CLASSES + 1)) if parameters <= 1_000_000 else round(parameters**0.5)
    deep = [nn.Linear(width, width), nn.ReLU()] if parameters > 1_000_000 else []
    deep += [nn.BatchNorm1d(width)] if recipe == "distfl" else []  # whose statistics it reads
    model = nn.Sequential(nn.Linear(WIDTH, width), nn.ReLU(), *deep, nn.Linear(width, CLASSES))
    made, options = piebald.recipes.make(recipe, lr=0.05, **more), {"evaluate_every": 0, "measure": "none"}
    return lambda: piebald.run(made, clients, model, rounds=rounds, runtime=runtime, **options)


def tabled(count: int, clients: int = 4) -> Any:
    """A table of clients' rows: five amounts, a binary outcome, and a time until an event."""
    import numpy as np
    import pandas as pd

    draw = np.random.default_rng(0)
    frame = pd.DataFrame({f"x{column}": draw.normal(size=count).round(3) for column in range(5)})
    frame["ill"] = (frame["x0"] + draw.normal(size=count) > 0).astype(int)
    frame["months"], frame["clinic"] = draw.exponential(size=count).round(2) + 0.01, draw.integers(0, clients, count)
    return frame.assign(clinic=frame["clinic"].map("clinic {}".format))


COLUMNS = [f"x{column}" for column in range(5)]


def looked(count: int) -> Work:
    """The look at a file."""
    import tempfile

    from piebald.advice.table_look import look_at_table

    path = Path(tempfile.mkdtemp()) / "table.csv"
    tabled(count).drop(columns="months").to_csv(path, index=False)
    return lambda: look_at_table(path, client="clinic", target="ill")


def looked_at_clients(count: int) -> Work:
    """The look at clients of 40 rows."""
    import piebald

    frame = tabled(40 * count, count).drop(columns="months")
    return lambda: piebald.advice.look(piebald.clients_from(frame, client="clinic", target="ill"))


def fitted(kind: str, count: int) -> Work:
    """A model of a table, with the questions of each client."""
    import piebald

    frame = tabled(count)
    if kind == "cox":
        return lambda: piebald.cox(frame, client="clinic", time="months", event="ill", columns=COLUMNS)
    if kind == "glm":
        return lambda: piebald.glm(frame, client="clinic", target="ill", family="binomial", columns=COLUMNS)
    frame = frame.drop(columns="months")
    return lambda: piebald.trees(frame, client="clinic", target="ill", rounds=3, max_depth=3, compare=False)


def served(count: int) -> Work:
    """As many results of devices, with tasks served one by one."""
    import piebald

    fleet = {"kind": "homogeneous", "seconds_per_step": 1.0}
    runtime = piebald.Simulator(fleet=fleet, workers=0, stack=1, engine="sequential")
    return trained("fedasync", count, count, 500, runtime=runtime, cohort=count)


def chosen(how: str, count: int) -> Work:
    """A search over methods or their settings among clients of 40 rows: a comparison with its report, a tuning or an
    advice.
    """
    from torch import nn

    import piebald

    frame = tabled(40 * count, count).drop(columns="months")
    clients = piebald.clients_from(frame, client="clinic", target="ill")
    options: dict[str, Any] = {"rounds": 3, "seeds": [0, 1], "runtime": piebald.Simulator(workers=0)}
    given = (clients, lambda seed: nn.Linear(5, 2))
    if how == "advise":
        return lambda: piebald.advise(*given, families=["fedavg"], budget=9, more_data=False, **options)
    if how == "tune":
        return lambda: piebald.tune(["fedavg", "local"], *given, budget=9, **options)
    both = {name: piebald.recipes.make(name) for name in ("fedavg", "local")}
    return lambda: str(piebald.compare(both, *given, **options))


def by_ray(count: int) -> Work:
    """A run of two of Ray's actors, which have begun before."""
    import piebald

    return trained("fedavg", 10_000, cohort=count, runtime=piebald.Ray(workers=2, store=1 << 28))


def per_round(recipe: str) -> Callable[[int], Work]:
    """A recipe of which all clients take part in each round, as its clustering or aggregation sees them."""
    return lambda count: trained(recipe, count, 2, 2000)


def states(recipe: str) -> Callable[[int], Work]:
    """A recipe whose clients keep something, of whom 100 take part in a round."""
    return lambda count: trained(recipe, count, 3, 2000, cohort=100)


ROWS, CLIENTS = (10_000, 100_000), (100, 300)
# what grows: the sizes, how many of which are small, and what is done
CASES: dict[str, tuple[Sequence[int], int, Callable[[int], Work]]] = {
    "clients that are known": ((1000, 10_000, 100_000, 1_000_000), 3, lambda n: trained("fedavg", n, cohort=10)),
    **{f"clients that are known, {name}": ((1000, 10_000, 100_000), 3, states(name))
       for name in ("hdafl", "ditto", "scaffold", "apfl", "fedrep", "pfedme")},
    "clients of a round": ((10, 100, 1000, 10_000), 3, lambda n: trained("fedavg", 10_000, cohort=n)),
    "parameters": ((10**4, 10**5, 10**6, 10**7, 10**8), 4, lambda n: trained("fedavg", 4, parameters=n)),
    "rounds": ((10, 100, 1000, 10_000), 3, lambda n: trained("fedavg", 20, n, 500, cohort=2)),
    **{f"clients of a round, {name}": ((*CLIENTS, 1000), 3, per_round(name))
       for name in ("fedamp", "ifca", "cfl", "distfl", "qfedavg")},
    # each client's model goes to all others
    "clients of a round, sync_dvw": ((30, 100, 300), 3, per_round("sync_dvw")),
    "results of devices one by one": ((300, 1000, 10_000), 2, served),
    "rows, look": ((*ROWS, 1_000_000), 2, looked),
    "clients, look": ((30, 100, 300), 2, looked_at_clients),
    **{f"clients, {how}": ((30, 100, 300), 2, lambda n, how=how: chosen(how, n))
       for how in ("compare", "tune", "advise")},
    "clients of a round, Ray with two workers": ((10, 100, 1000), 2, by_ray),
    **{f"rows, {kind}": ((*ROWS, 1_000_000, 10_000_000), 3, lambda n, kind=kind: fitted(kind, n))
       for kind in ("glm", "cox", "trees")},
}  # fmt: skip


def one(case: str, size: int) -> dict[str, float]:
    """A point in this process: seconds of processors, MB, and MB that clients received and sent."""
    logging.getLogger("piebald").setLevel(logging.ERROR)
    sizes, _, make = CASES[case]
    make(sizes[0])()  # imports, and what is made once
    work = make(size)
    before, spent = of_tree()["Pss"], spent_so_far()
    with Watch(lambda: of_tree()["Pss"], 0.05) as watch:
        made = work()
    # one that has ended in between is left out, with what it had spent before
    seconds = sum(now - spent.get(pid, 0.0) for pid, now in spent_so_far().items())
    peak = max([before, *watch.seen, of_tree()["Pss"]]) - before
    steps = made.rounds if hasattr(made, "results") else []  # of a run
    traffic = sum(row["bytes_down"] + row["bytes_up"] for row in steps)
    return {"seconds": seconds, "megabytes": peak / 1000, "traffic": traffic / 1e6}


def spent_so_far() -> dict[str, float]:
    """Processor seconds of this process with those that it waited for, and of each below it, like Ray's."""
    return {"": sum(os.times()[:4]), **{pid: seconds_of(pid) for pid in children(os.getpid())}}


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Of the last two points."""
    (small, large), (less, more) = sizes[-2:], values[-2:]
    return math.log(max(more, 1e-9) / max(less, 1e-9)) / math.log(large / small)


def main() -> None:
    """Measure the cases and write the table."""
    given = reader(__doc__, ["one"], scale=("small", "full"), cases=None).parse_args()
    if given.one:
        case, size = json.loads(given.one)
        print(json.dumps(one(case, size)))
        return
    page = PAGE.read_text("utf-8") if PAGE.exists() else "# Growth\n"
    lines = {row["what grows"]: row for row in rows(block(page, "table"))}
    heads = [
        "what grows",
        "sizes",
        "processor seconds",
        "exponent",
        "peak memory, MB",
        "exponent of memory",
        "traffic, MB",
    ]
    for case, (sizes, small, _) in CASES.items():
        if given.cases and not any(text in case for text in given.cases):
            continue
        sizes = sizes[:small] if given.scale == "small" else sizes
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        try:
            points = [apart(__file__, "--one", json.dumps([case, size]), env=env) for size in sizes]
        except RuntimeError as error:
            print(f"{case}: {error}", file=sys.stderr)
            continue
        columns = {name: [point[name] for point in points] for name in points[0]}
        seconds, memory, traffic = (
            ", ".join(f"{value:{form}}" for value in columns[name])
            for name, form in (("seconds", ".2f"), ("megabytes", ".0f"), ("traffic", ".3g"))
        )
        grows = [f"{exponent(sizes, columns[name]):.2f}" for name in ("seconds", "megabytes")]
        cells = [case, ", ".join(f"{size:,}" for size in sizes), seconds, grows[0], memory, grows[1], traffic]
        lines[case] = dict(zip(heads, cells, strict=True))
        print(" | ".join(cells), flush=True)
        ordered = [[lines[name][head] for head in heads] for name in CASES if name in lines]
        PAGE.write_text(put(page, "table", f"{processor()}\n\n{table(heads, ordered)}", append=True), "utf-8")


if __name__ == "__main__":
    main()
