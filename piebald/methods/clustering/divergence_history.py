"""The divergences of pairs of clients over the rounds of DistFL, for those that took part most recently."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from piebald.core.tensor_store import places_of, resized, resized_pairs
from piebald.methods.clustering.partitioning import ClusterSearch, Matrix, agree, evidence, gram_of, isolation
from piebald.methods.clustering.response_divergence import unlikeness

_PAIRS = ("unlike0", "unlike1", "count0", "count1", "gram")
FEW = 4  # below so many clients nobody can be an outlier of the others
TESTED = 12  # clients from which the test against one cloud tells clear clusters apart


@dataclass(frozen=True, slots=True, eq=False)
class PairMeans:
    """Means over rounds for the clients of a step; pairs that have not met since they are remembered have this round's.

    Attributes:
        unlike: [n, n], unlikeness over all rounds.
        halves: that over odd and over even rounds, or None where a pair has not met in both.
        gram: [n, n], inner products of what models answer.
        rounds: that were compared.
    """

    unlike: Matrix
    halves: tuple[Matrix, Matrix] | None
    gram: Matrix
    rounds: int


def isolated(
    state: dict[str, Any], divergence: Matrix, clients: Sequence[int], version: int, most: int, forget: float
) -> Matrix:
    """The geometric mean over rounds of each client's isolation [n]; this round's is added to the state.

    One more round, in which nobody was isolated, is counted with them: late in training, when models are much alike,
    an honest client may look isolated for one round.

    Args:
        state: the component's; a table of its own, see `tensor_store.places_of`.
        divergence: [n, n] of this round.
        clients: whose.
        version: of this step.
        most: clients that are remembered.
        forget: what earlier rounds count from one to the next.
    """
    # a prefix, since `pair_means` keeps a table of places of its own, of other clients, in the same state
    history = {name.removeprefix("far_"): value for name, value in state.items() if name.startswith("far_")}
    places = places_of(history, clients, version, most)
    table = resized(history.get("sums"), places, 2) * forget
    # logarithms, so that the mean over rounds is geometric: one round at 50 must not outweigh many near 1
    logs = np.log(np.maximum(isolation(divergence), 1e-6)) if len(clients) >= FEW else np.zeros(len(clients))
    table[places.rows] += torch.stack([torch.from_numpy(logs).float(), torch.ones(len(clients))], dim=1)
    history["sums"] = table
    state |= {f"far_{name}": value for name, value in history.items()}
    sums = table[places.rows].double()
    # + 1 is the round in which nobody is isolated: its logarithm adds 0
    isolations: Matrix = (sums[:, 0] / (sums[:, 1] + 1)).exp().numpy()
    return isolations


def pair_means(
    state: dict[str, Any], divergence: Matrix, clients: Sequence[int], version: int, most: int, forget: float
) -> PairMeans:
    """Add this round's divergences [n, n] to the state and return the means over rounds; arguments as in `isolated`."""
    turn = int(state.get("turn", 0))
    # groupings are counted, not versions: with `every` = 2 all versions that are grouped have one parity
    half, state["turn"] = f"{turn % 2}", turn + 1
    places = places_of(state, clients, version, most)
    tables = {name: resized_pairs(state.get(name), places) for name in _PAIRS}
    rows = (places.rows[:, None], places.rows[None, :])
    tables[f"unlike{half}"][rows] += unlikeness(torch.from_numpy(divergence)).float()
    tables["gram"][rows] += torch.from_numpy(gram_of(divergence)).float()
    tables[f"count{half}"][rows] += 1
    unlike, counts, gram = (
        [tables[name][rows].double() for name in names]
        for names in (("unlike0", "unlike1"), ("count0", "count1"), ("gram",))
    )
    # after they were read: this round counts in full, and what it leaves to the next is damped
    for table in tables.values():
        table[rows] *= forget
    state |= tables
    whole = counts[0] + counts[1]
    # all pairs or none: a half with gaps in its matrix cannot be clustered
    both = all(float(times.min()) > 0 for times in counts)
    halves = tuple((total / times).numpy() for total, times in zip(unlike, counts, strict=True)) if both else None
    return PairMeans(
        ((unlike[0] + unlike[1]) / whole).numpy(),
        (halves[0], halves[1]) if halves else None,
        (gram[0] / whole).numpy(),
        turn + 1,
    )


def believed(
    found: ClusterSearch,
    means: PairMeans,
    cut: Callable[[Matrix, float], ClusterSearch],
    accept: float,
    least: float,
    deviations: float,
    rng: np.random.Generator,
) -> ClusterSearch:
    """Clusters that are clear, or faint but found by both halves of the rounds, and not those of one cloud; else one.

    One round alone says little, since models that have hardly been trained differ by chance: there the silhouette must
    lie halfway between `accept` and 1.

    Args:
        found: the clear clusters, or one cluster where none are.
        means: over the rounds.
        cut: finds clusters from unlikeness [n, n] whose silhouette reaches a number.
        accept: the silhouette from which clusters are clear.
        least: agreement of the halves from which faint clusters are believed.
        deviations: see `cluster_evidence.evidence`.
        rng: for the test.
    """
    if means.rounds == 1 and found.score < (1 + accept) / 2:
        return dataclasses.replace(found, labels=np.zeros_like(found.labels), threshold=None)
    # labels start at 0, so no label above it means one cluster
    if not found.labels.any():
        if means.halves is None:
            return found
        # -1 is the least silhouette there is, so every cut passes: whether it is believed is for the agreement to say
        agreement = agree(*(cut(half, -1.0).labels for half in means.halves))
        if agreement < least:
            return dataclasses.replace(found, agreement=agreement)
        found = dataclasses.replace(cut(means.unlike, -1.0), agreement=agreement)
    # of fewer points a random cloud is explained so well by clusters that true ones would fail the test
    if len(found.labels) < TESTED or not found.labels.any():
        return found
    surplus = evidence(means.gram, found.labels, rng)
    if surplus < deviations:
        return dataclasses.replace(found, labels=np.zeros_like(found.labels), threshold=None, surplus=surplus)
    return dataclasses.replace(found, surplus=surplus)
