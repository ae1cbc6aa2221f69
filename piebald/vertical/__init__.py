"""Two parties with different features of partly the same people train together; only encrypted moments pass.

    settings = transfer.Settings.load("examples/transfer.toml")
    result = transfer.run(settings, out="runs/transfer")

`kernels` (MMD in moment form), `backends` (encryption), `terms` and `methods` (the loss), `protocol`, `messages` and
`channel` (what is said and how it travels), `party` (one side), `runs` (both), `baselines` (what it is compared with).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from piebald.vertical.holdings import PartyHolding
    from piebald.vertical.transfer_runs import TransferResult, result, resume, run, run_party
    from piebald.vertical.transfer_settings import TransferSettings

__all__ = ["PartyHolding", "TransferResult", "TransferSettings", "result", "resume", "run", "run_party"]

_HOME_OF = {"PartyHolding": "holdings", "TransferSettings": "settings"} | dict.fromkeys(
    ("TransferResult", "result", "resume", "run", "run_party"), "runs"
)


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used."""
    if name in _HOME_OF:
        return getattr(importlib.import_module(f"piebald.vertical.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module 'piebald.vertical' has no attribute {name!r}")
