"""Start the runs of a benchmark without carrying them out: `python starting.py BENCHMARK` prints a line for each cell.

Each is built to data, partition, model and recipe by the benchmark's own program, checked as a run checks it before
training, and takes one step of one client, once for each network.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import piebald
from piebald.core import pytree
from piebald.core.parameters import copied
from piebald.experiments.run_settings import RunSettings
from piebald.runs.prepare import prepare

ROOT = Path(__file__).parents[2]
ROWS = 16  # of the one step
STEPPED: set[str] = set()  # networks that have taken their step, which cells have in common
MADE_ONCE = {  # functions of a benchmark's federations, whose clients several methods have in common
    "distfl": ("planted", "attacked", "people"),
    "cgau": ("all_embedded_images", "published_by_clusters", "rare_by_clusters"),
}
NOT_RUN = ("DVW, above chance", "DVW, sharp", "AsyncDVW, sharp")  # at Metis' full scale
Cells = Iterator[tuple[str, Callable[[], Any]]]


def started(case: Any) -> str:
    """Check a run as it is checked before training, take one step, and return what there is."""
    names = {"rounds", "stop", "metrics", "evaluate_every", "longest_step", "checkpoint_every"} & case.options.keys()
    seed = case.options.get("seed", (case.options.get("seeds") or (0,))[0])
    plainly = piebald.Simulator(engine="sequential", workers=0)  # measures no engine
    given = RunSettings.of_keywords({"seed": seed, "runtime": plainly} | {name: case.options[name] for name in names})
    plan = prepare(case.recipe, case.clients, case.model, given)
    module = plan.work.model
    if str(module) not in STEPPED:
        take_a_step(module, plan.clients)
        STEPPED.add(str(module))
    return f"{len(plan.clients)} clients, {sum(part.numel() for part in module.parameters())} parameters"


def take_a_step(model: torch.nn.Module, clients: Any) -> None:
    """Take a step of gradient descent on the first client's rows; `torch.optim` would be imported for seconds."""
    module, rows = copied(model).train(), clients.rows(0, "train")[:ROWS]
    cross_entropy(pytree.run(module, rows.x), torch.as_tensor(rows.y).long()).backward()
    steps = torch.cat(
        [torch.zeros_like(p).view(-1) if p.grad is None else p.grad.view(-1) for p in module.parameters()]
    )
    assert torch.isfinite(steps).all(), "the step is not finite"
    assert steps.any(), "the step moves nothing"


def made_once(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes the same clients once for all methods of a cell; the last ones are kept."""
    known: dict[str, Any] = {}

    def call(*values: Any, **options: Any) -> Any:
        key = repr((values, options))
        if key not in known:
            known.clear()
            known[key] = make(*values, **options)
        return known[key]

    return call


def cells(benchmark: str) -> Cells:
    """The runs of a paper's benchmark at its full scale with its first seed."""
    from shared.programs import listed, without_the_extractor

    if names := MADE_ONCE.get(benchmark):
        import federations

        for name in names:
            setattr(federations, name, made_once(getattr(federations, name)))
    if benchmark == "cgau":
        without_the_extractor()
    for one in listed(benchmark, "full", 1990 if benchmark == "metis" else 0):
        if one.label not in NOT_RUN:
            yield " ".join((one.part, one.case, one.label)), one.begin


def smmd() -> Cells:
    """Tables 1 to 3, each arm with a single step, which a transfer has no way to leave out."""
    import conditions
    import tables

    settings = tables.settings
    tables.settings = lambda name, seed, **changes: settings(name, seed, **{"steps": 1} | changes)
    for name in tables.SETS:
        for arm, variant, make in tables.arms(name, 0, conditions.BACKENDS["full"]):
            yield f"{name} {arm} {variant}", make


def main(benchmark: str) -> None:
    """Print what there is of each cell, or what is missing."""
    sys.path[:0] = [str(ROOT / "benchmarks" / benchmark), str(ROOT / "benchmarks"), str(ROOT)]
    from shared.capture import capture

    for name, begin in smmd() if benchmark == "smmd" else cells(benchmark):
        try:
            with redirect_stdout(sys.stderr):  # a transfer says what it reveals
                found = f"begins, {begin() if benchmark == 'smmd' else started(capture(begin))}"
        except Exception as error:  # the other cells are tried
            found = f"{type(error).__name__}: {error}"
        print(f"{name}: {found}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
