"""Vertical transfer learning: two parties with different features of partly the same people train together.

Only encrypted moments leave a party.

    from piebald import vertical

    settings = vertical.TransferSettings.load("examples/transfer.toml")
    result = vertical.run(settings, out="runs/transfer")

Modules: `kernels` (MMD in moment form), `encryption` (its backends), `loss_terms` and `transfer_methods` (the loss),
`protocol`, `party_messages` and `channel` (messages and their transport), `party` (one party), `transfer_runs` (a whole
run) and `baselines` (reference methods to compare with).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from piebald.vertical.holdings import PartyHolding
    from piebald.vertical.transfer_results import TransferResult, result
    from piebald.vertical.transfer_runs import resume, run, run_party
    from piebald.vertical.transfer_settings import TransferSettings

__all__ = ["PartyHolding", "TransferResult", "TransferSettings", "result", "resume", "run", "run_party"]

_HOME_OF = {
    "PartyHolding": "holdings",
    "TransferResult": "transfer_results",
    "TransferSettings": "transfer_settings",
    "result": "transfer_results",
    "resume": "transfer_runs",
    "run": "transfer_runs",
    "run_party": "transfer_runs",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name in _HOME_OF:
        return getattr(importlib.import_module(f"piebald.vertical.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module 'piebald.vertical' has no attribute {name!r}")
