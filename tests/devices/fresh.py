"""A run whose workers share the device, in a process that has not used it: python -m tests.devices.fresh NAME HOW

It runs there and, with the choices that were made there, on the CPU.  What must be so is asserted here, and the exit
code says whether it is.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from tests.contract.conftest import method
from tests.devices import pretended
from tests.devices.there import NAME, assert_as_on_the_cpu, carry_out, there


class Untouched(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts what this process computes on the pretended device; forked ones have a count of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.touched = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.touched += isinstance(made, pretended.OnDevice)
        return made


def main(name: str, how: dict[str, Any]) -> None:
    """Run twice, and compare."""
    torch.set_num_threads(4)  # as on a large machine: what a forked process must not inherit
    with there() as device, Untouched() as seen:
        found = carry_out(method(name), device, **how)
    assert seen.touched == 0
    assert NAME == "pretended" or not torch.cuda.is_initialized()
    chosen = {key: found.meta["runtime"][key] for key in ("engine", "stack", "workers")}
    assert chosen["workers"] == 2
    assert_as_on_the_cpu(found, carry_out(method(name), **chosen))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
