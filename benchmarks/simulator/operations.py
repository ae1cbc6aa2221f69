"""Tensor operations of a round and the memory that they read and write: counts, which no other program changes.

python benchmarks/simulator/operations.py W1
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from overhead import TARGETS, recipe_of
from shared.options import reader
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from workloads import WORKLOADS

import piebald
from piebald.server.loop import ServerLoop


class Counted(TorchDispatchMode):
    """Counts the operations of torch, and the bytes of what they take and make; views take and make none.

    A gather counts the rows that it takes, and a tensor that is one number repeated counts its storage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counting = False
        self.totals: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if self.counting:
            self.totals["operations"] += 1
            if not func.is_view and "empty" not in func.__name__:
                taken = made if func.__name__.startswith("index_select") else (args, kwargs)
                tensors = [one for one in tree_leaves((taken, made)) if isinstance(one, Tensor)]
                sizes = [min(one.numel() * one.element_size(), one.untyped_storage().nbytes()) for one in tensors]
                self.totals["bytes"] += sum(sizes)
        return made


def counted(what: str, name: str, stack: int, rounds: int = 6, first: int = 3) -> tuple[float, float]:
    """Operations and MB of a round, once clients have state."""
    work, mode = WORKLOADS[name], Counted()
    recipe = recipe_of(what, work.cohort)
    each, step = work.cohort if what == "asynchronous" else 1, ServerLoop._step

    def watched(loop: ServerLoop) -> None:
        step(loop)
        mode.counting = first * each <= loop.version < rounds * each

    ServerLoop._step = watched  # type: ignore[method-assign]
    devices = piebald.Simulator(
        fleet={"kind": "homogeneous", "seconds_per_step": 1.0}, engine="batched", stack=stack, workers=0
    )
    with mode:
        piebald.run(
            recipe, work.data(), work.network(), rounds=rounds * each, runtime=devices, evaluate_every=0, measure="none"
        )
    ServerLoop._step = step  # type: ignore[method-assign]
    return mode.totals["operations"] / (rounds - first), mode.totals["bytes"] / (rounds - first) / 1e6


def main() -> None:
    """Count and print."""
    parser = reader(__doc__, stack=25)
    parser.add_argument("workload")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| workload | | operations | times FedAvg | MB | times FedAvg |\n| --- | --- | --- | --- | --- | --- |")
    base: tuple[float, float] | None = None
    for what in TARGETS:
        if what == "run folder":
            continue
        operations, size = counted(what, options.workload, options.stack)
        base = base or (operations, size)
        shares = f"{operations:.0f} | {operations / base[0]:.2f} | {size:.0f} | {size / base[1]:.2f}"
        print(f"| {options.workload} | {what} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
