"""The demands of a client on the graph of a sum before it shares anything."""

from __future__ import annotations

import math

from piebald.contracts import SumDemands
from piebald.privacy.secure_aggregation.masking_graph import MaskingGraph
from piebald.privacy.secure_aggregation.security import SECURITY, exposure


def demands_reject_reason(graph: MaskingGraph, demands: SumDemands) -> str | None:
    """The reason why a client takes no part in a sum over this graph, or None."""
    clients, holders, shares = len(graph.members), graph.holders_each, graph.threshold
    if shares < round(demands.threshold * holders, 9):
        return (
            f"{shares} of {holders} shares open a mask, this site demands a share of {demands.threshold:.3g}: raise "
            "secure_aggregation's threshold"
        )
    if not graph.complete and demands.neighbours is not None and holders - 1 < demands.neighbours:
        return (
            f"clients have {holders - 1} neighbours, this site demands {demands.neighbours}: raise "
            "secure_aggregation's neighbours"
        )
    bad = math.floor(demands.colluding * clients)
    sure = 2 * graph.quorum - clients > bad and shares > bad
    if sure and (graph.complete or exposure(clients, holders - 1, shares, bad) <= 2.0**-SECURITY):
        return None
    return (
        f"{bad} of {clients} clients that collude could open an update with {holders - 1} neighbours and a threshold "
        f"of {shares}: raise them, or leave neighbours out"
    )
