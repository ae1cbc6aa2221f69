"""What the paper prints: conditions, and the figures of Table I.

Stripelis, Ambite 2020, Accelerating federated learning in heterogeneous data and computational environments.
"""

from __future__ import annotations

from shared.stored import printed

PRINTED = printed("metis")
HETEROGENEOUS = ("SyncFedAvg", "SyncDVW", "AsyncFedAvg", "FedAsync", "AsyncDVW", "AsyncDVW, adaptive")
ROUNDS_200, SECONDS_14K = (
    {tuple(cell.split(", ")): tuple(figures) for cell, figures in PRINTED[name].items()}
    for name in ("rounds_200", "seconds_14k")
)  # Table I by sizes and classes, per cent
CONDITIONS = PRINTED["conditions"]
