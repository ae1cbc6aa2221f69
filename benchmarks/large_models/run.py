"""A hundred million trained parameters, and what saves memory: python benchmarks/large_models/run.py

Trains clients one after another with Piebald's sequential engine and with a plain loop of torch, in a process of its
own each and on one thread.  Times are processor seconds of one client's update, so that other programs on the machine
matter less; memory is the peak of the process, also in copies of the model beyond what was there before it was made,
which other programs do not change at all.  Writes RESULTS.md next to this file, or into --out.

Cases with so many parameters are run in turn.  "mapped" is Piebald with `map_above = 0`: what lies in mapped files
counts in the peak of the process, but not in that of its anonymous memory, which the system cannot take back
("anonymous", Linux only).

`--steady` trains for ten rounds instead and prints the anonymous memory after each of them and the most during it.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

from shared.measured import Watch, apart, megabytes, processor, spread
from shared.options import reader

HERE = Path(__file__).parent
CLIENTS, ROUNDS, ROWS, BATCH, LR = 3, 4, 32, 8, 0.05
# training settings of the deep network whose activations are what takes memory
SAVING: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate = 8": {"accumulate": 8},
    "checkpointing": {"checkpointing": "blocks.*"},
    "both": {"accumulate": 8, "checkpointing": "blocks.*"},
    "both, bfloat16": {"accumulate": 8, "checkpointing": "blocks.*", "precision": "bfloat16"},
}
DEEP_BATCH = 64
STEADY = "## Over ten rounds"  # from here on the page is written by hand
WIDE = {"bare": "a plain loop", "piebald": "Piebald, sequential", "mapped": "Piebald, models mapped from disk"}


def wide(parameters: float) -> nn.Module:
    """Two dense layers with so many parameters."""
    torch.manual_seed(0)
    width = round(parameters / 2000)
    return nn.Sequential(nn.Linear(1000, width), nn.ReLU(), nn.Linear(width, 1000))


class Deep(nn.Module):
    """A transformer's encoder on sequences of 256 vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(8)]
        self.blocks, self.head = nn.ModuleList(layers), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def rows(shape: tuple[int, ...], classes: int, count: int) -> dict[str, tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    held = {}
    for client in range(CLIENTS):
        y = torch.randint(0, classes, (count,), generator=draw)
        held[f"c{client}"] = (torch.randn(count, *shape, generator=draw), y)
    return held


def bare(model: nn.Module, held: dict[str, tuple[Tensor, Tensor]]) -> list[float]:
    """FedAvg as one would write it: one module, set for each client, and a running sum of changes."""
    parameters = list(model.parameters())
    start = [one.detach().clone() for one in parameters]
    total = [torch.zeros_like(one) for one in parameters]
    times = []
    for _ in range(ROUNDS):
        for one in total:
            one.zero_()
        for x, y in held.values():
            began = time.process_time()
            with torch.no_grad():
                torch._foreach_copy_(parameters, start)
            optimizer = torch.optim.SGD(parameters, lr=LR)
            for batch in torch.randperm(len(x)).split(BATCH):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
            with torch.no_grad():
                torch._foreach_add_(total, torch._foreach_sub(parameters, start))
            times.append(time.process_time() - began)
        torch._foreach_add_(start, total, alpha=1 / len(held))
    return times


def piebalds(
    model: nn.Module,
    held: dict[str, tuple[Tensor, Tensor]],
    map_above: int = 4 << 30,
    rounds: int = ROUNDS,
    after: Callable[[], None] = lambda: None,
    **training: Any,
) -> list[float]:
    """The same with the package; an update's time is that of its round, shared among its clients."""
    import piebald
    from piebald.report.callbacks import Callback

    marks: list[float] = []

    class Clock(Callback):
        def on_server_step(self, step: Any) -> None:
            marks.append(time.process_time())
            after()

    began = time.process_time()
    piebald.run(
        piebald.recipes.fedavg(**{"lr": LR, "batch": BATCH} | training),
        piebald.clients_from(held, test=0, validation=0),
        model,
        rounds=rounds,
        evaluate_every=0,
        runtime=piebald.Simulator(engine="sequential", workers=0, map_above=map_above),
        callbacks=[Clock()],
    )
    return [(b - a) / CLIENTS for a, b in zip([began, *marks], marks, strict=False)]


def one(case: str, parameters: float) -> dict[str, Any]:
    """A case in this process: seconds of each update, and the peak of memory."""
    torch.set_num_threads(1)
    kind, _, name = case.partition(":")
    if kind == "deep":
        held = rows((256, 64), 10, DEEP_BATCH)
        training = {"batch": DEEP_BATCH} | SAVING[name]
        training["batch"] //= training.get("accumulate", 1)
        work: Callable[[], list[float]] = lambda: piebalds(Deep(), held, **training)  # noqa: E731
    else:
        held = rows((1000,), 1000, ROWS)
        above = {"map_above": 0} if kind == "mapped" else {}
        work = lambda: bare(wide(parameters), held) if kind == "bare" else piebalds(wide(parameters), held, **above)  # noqa: E731
    before, start = peak_bytes(), anonymous()
    with Watch(anonymous, 0.01) as watch:
        times = work()
    peak, most = peak_bytes(), max([start, *watch.seen]) - start
    copies = {"copies": (peak - before) / (4 * parameters), "anonymous": most / (4 * parameters)}
    return {"case": case, "seconds": times, "bytes": peak, **copies}


def steady(parameters: float, rounds: int) -> None:
    """Print the anonymous memory at the end of each round and the most during it, in copies of the model."""
    torch.set_num_threads(1)
    start = anonymous()
    model, held = wide(parameters), rows((1000,), 1000, ROWS)
    ends: list[tuple[float, float]] = []

    def after() -> None:
        ends.append((anonymous() - start, max([start, *watch.seen]) - start))
        watch.seen.clear()

    with Watch(anonymous, 0.01) as watch:
        seconds = piebalds(model, held, rounds=rounds, after=after)
    print("| round | after it | the most during it | processor seconds of an update |\n|---|---|---|---|")
    for number, ((end, most), spent) in enumerate(zip(ends, seconds, strict=True), start=1):
        print(f"| {number} | {end / 4 / parameters:.2f} | {most / 4 / parameters:.2f} | {spent:.2f} |")


def anonymous() -> float:
    """Bytes of this process that no file holds; a kB of the system has 1,024."""
    return 1_024_000 * megabytes("RssAnon")


def peak_bytes() -> int:
    """The largest memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(case: str, parameters: float) -> dict[str, Any]:
    """The same in a process of its own."""
    words = ("--case", case, "--parameters", parameters)
    made: dict[str, Any] = apart(__file__, *words, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return made


def seconds(runs: list[dict[str, Any]]) -> list[float]:
    """Of an update in each run: the median of those after the first round."""
    first = CLIENTS if runs[0]["case"] == "bare" else 1  # the loop notes each update, Piebald each round
    return [statistics.median(run["seconds"][first:]) for run in runs]


def median(runs: list[dict[str, Any]], name: str) -> float:
    """Of a number that each run has."""
    return statistics.median(run[name] for run in runs)


def table(found: dict[str, list[dict[str, Any]]], parameters: float) -> str:
    """The results as a page."""
    plain, runs = seconds(found["bare"]), len(found["bare"])
    lines = [
        "# Large models",
        "",
        f"`python benchmarks/large_models/run.py --parameters {parameters:g} --runs {runs}`: two dense layers, "
        f"{CLIENTS} clients of {ROWS} rows, batches of {BATCH}, one thread, processor seconds of one client's update "
        f"after the first round.  {processor()}, {os.cpu_count()} cores, PyTorch {torch.__version__}; {runs} runs of "
        "each case, in turn: medians, and in parentheses the range.",
        "",
        "| | seconds | times the plain loop | peak memory, GB | of it copies of the model | that are not mapped |",
        "|---|---|---|---|---|---|",
    ]
    for case, name in WIDE.items():
        ours = seconds(found[case])
        ratios = "1" if case == "bare" else spread([one / other for one, other in zip(ours, plain, strict=True)])
        memory = [median(found[case], "bytes") / 1e9, *(median(found[case], part) for part in ("copies", "anonymous"))]
        lines.append(f"| {name} | {spread(ours)} | {ratios} | {' | '.join(f'{number:.2f}' for number in memory)} |")
    lines += [
        "",
        "## What saves memory",
        "",
        f"An encoder of 8 blocks in steps of {DEEP_BATCH} sequences of 256 vectors; one run of each, the median of its "
        "updates after the first round.  A processor without instructions for bfloat16 emulates it.",
        "",
        "| training settings | processor seconds of an update | peak memory, GB |",
        "|---|---|---|",
    ]
    for name in SAVING:
        made = found[f"deep:{name}"]
        lines.append(f"| {name} | {seconds(made)[0]:.1f} | {made[0]['bytes'] / 1e9:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    given = reader(__doc__, ["case"], parameters=1e8, runs=3, out=HERE, steady=False).parse_args()
    if given.steady:
        steady(given.parameters, 10)
        return
    if given.case:
        print(json.dumps(one(given.case, given.parameters)))
        return
    deep = [f"deep:{name}" for name in SAVING]
    found: dict[str, list[dict[str, Any]]] = {case: [] for case in (*WIDE, *deep)}
    for case in [*WIDE] * given.runs + deep:
        print(case, file=sys.stderr, flush=True)
        found[case].append(measure(case, given.parameters))
    page = given.out / "RESULTS.md"
    _, mark, kept = page.read_text("utf-8").partition(STEADY) if page.exists() else ("", "", "")
    page.write_text(table(found, given.parameters) + (f"\n{mark}{kept}" if mark else ""), encoding="utf-8")


if __name__ == "__main__":
    main()
