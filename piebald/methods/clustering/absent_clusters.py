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
    counts = Counter(known[client] for client in clients if client in known)
    elsewhere = {number for client, number in known.items() if client not in here}
    # sorted, since the columns of the divergences are in this order
    return sorted(number for number in elsewhere if number not in names and counts[number] <= 1)


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
    # infinity on the diagonal, or everybody's nearest would be itself
    nearest = np.where(np.eye(count, dtype=bool), np.inf, pairs[:count, :count]).min(1)
    usual, adopted_names = float(np.median(nearest)), list(names)
    for name in sorted({name for name in names if name not in known}):
        rows = [row for row, number in enumerate(names) if number == name]
        best = int(away[rows].mean(0).argmin())
        # a cluster of one is left to the second pass, which measures by what a client alone can be measured by
        free = absent[best] not in adopted_names and len(rows) > 1
        if free and found.threshold is not None and float(away[rows, best].mean()) <= found.threshold:
            for row in rows:
                adopted_names[row] = absent[best]
    for row, number in enumerate(adopted_names):
        companions = [index for index, name in enumerate(adopted_names) if name == number and index != row]
        earlier = known[row]
        # only newcomers and clients of absent clusters are placed: others were compared with their own clusters
        if number in absent or earlier not in (None, *absent):
            continue
        best = int(away[row].argmin())
        if companions and float(away[row, best]) < float(near[row, companions].mean()):
            adopted_names[row] = absent[best]
        elif not companions:
            # divergences for a client alone: they say how near a model is, and correlations only in which direction
            model = int(pairs[row, count:].argmin())
            if pairs[row, count + model] <= max(far * usual, nearest[row] / 2):
                adopted_names[row] = absent[model]
            else:
                adopted_names[row] = number if earlier is None else earlier
    return adopted_names
