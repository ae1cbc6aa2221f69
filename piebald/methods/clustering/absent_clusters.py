"""Clusters none of whose clients was asked in this round, and which of the round's clients belong to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from piebald.methods.clustering.partitioning import ClusterSearch, Matrix
from piebald.methods.clustering.response_divergence import unlikeness


def absent_clusters(names: Sequence[int], clients: Sequence[int], known: Mapping[int, int]) -> list[int]:
    """Numbers that none of the clients' clusters has, of clusters of which one client at most was asked and others were
    not.  Clusters whose clients were asked and put together with others are no more.

    Args:
        names: [n], numbers of the clusters that were found.
        clients: [n], who was asked.
        known: the clusters so far of all clients.
    """
    here = set(clients)
    asked = Counter(known[client] for client in clients if client in known)
    others = {number for client, number in known.items() if client not in here}
    return sorted(number for number in others if number not in names and asked[number] <= 1)


def adopted(
    names: list[int],
    known: Sequence[int | None],
    found: ClusterSearch,
    absent: Sequence[int],
    divergence: Matrix,
    count: int,
    far: float,
) -> list[int]:
    """The clusters' numbers, with those of absent clusters for clients who belong there.

    A new cluster takes the number of an absent one if its members are no further from that one's model than members of
    a cluster are from one another.  A client that is new, or alone of its cluster this time, goes to an absent cluster
    whose model is nearer than the clients it was put with; if it was put with none, to one that is near by the measure
    of how near clients are to one another, or by half nearer than any client.

    Args:
        names: [n], numbers of the clusters that were found.
        known: [n], the clients' numbers so far, None for newcomers.
        found: the clusters.
        absent: [m], numbers that none of the clients has now.
        divergence: [n + m, n + m], of clients and then of the absent clusters' models.
        count: n.
        far: how many times as far as clients from their nearest still counts as near.
    """
    whole = unlikeness(torch.from_numpy(divergence)).numpy()
    near, away = whole[:count, :count], whole[:count, count:]
    pairs = (divergence + divergence.T) / 2
    nearest = np.where(np.eye(count, dtype=bool), np.inf, pairs[:count, :count]).min(1)
    usual, taken = float(np.median(nearest)), list(names)
    for name in sorted({name for name in names if name not in known}):
        rows = [row for row, own in enumerate(names) if own == name]
        best = int(away[rows].mean(0).argmin())
        free = absent[best] not in taken and len(rows) > 1
        if free and found.threshold is not None and float(away[rows, best].mean()) <= found.threshold:
            for row in rows:
                taken[row] = absent[best]
    for row, own in enumerate(taken):
        others = [other for other, name in enumerate(taken) if name == own and other != row]
        mine = known[row]
        if own in absent or mine not in (None, *absent):
            continue
        best = int(away[row].argmin())
        if others and float(away[row, best]) < float(near[row, others].mean()):
            taken[row] = absent[best]
        elif not others:
            model = int(pairs[row, count:].argmin())
            if pairs[row, count + model] <= max(far * usual, nearest[row] / 2):
                taken[row] = absent[model]
            else:
                taken[row] = own if mine is None else mine
    return taken
