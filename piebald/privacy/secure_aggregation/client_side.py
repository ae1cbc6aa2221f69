"""The client's side of secure aggregation, the same on every runtime: queries about keys, and masked updates."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch

from piebald.contracts import SIGNATURE, Clients, ClientSecrets, Split, SumDemands, Task, Update
from piebald.core.errors import Declined
from piebald.core.parameters import nbytes
from piebald.core.randomness import key
from piebald.methods.client_work import ClientWork
from piebald.privacy.secure_aggregation.key_queries import KeyQuery

ANY_SUM = SumDemands(least=2, threshold=0.5, colluding=0, largest_share=1)  # what clients of a simulation demand
Outcome = tuple[Update | None, str | None]  # an update, or why there is none


def counted_rows(work: ClientWork, clients: Clients, client: int) -> dict[Split, int]:
    """Return how many rows of each split a client has; of those to train on, how much they count."""
    others: tuple[Split, ...] = ("validation", "test")
    held = {split: clients.size(client, split) for split in others}
    sizes = {split: len(clients.rows(client, split)) if size is None else size for split, size in held.items()}
    return {"train": work.counted(clients.rows(client, "train")), **sizes}


def replied(task: Task, work: ClientWork, secrets: ClientSecrets) -> Outcome:
    """The answer to a question about keys."""
    masking, query = work.masking, task.query
    if masking is None or not isinstance(query, KeyQuery):
        return None, "this run masks nothing"
    try:
        vectors = query.reply(task.vectors, secrets, masking)
    except Declined as error:
        return None, str(error)
    return Update(vectors, 0, 0, {}, nbytes=nbytes(vectors)), None


def masked(update: Update, task: Task, work: ClientWork, secrets: ClientSecrets) -> Outcome:
    """Return what leaves instead of a trained update: the update itself where nothing masks."""
    masking = work.masking
    if masking is None:
        return update, None
    if task.query is None:
        update = replace(update, vectors=masking.bounded(update.vectors, work.of_task(task).layout.shared_trained))
    places = work.masked_places(task.client, task.version)
    if places is not None:
        # before masking, since masked numbers cannot be left out: all clients send the same ones, so their masks cancel
        vectors = {**update.vectors, "model": update.vectors["model"][torch.from_numpy(places)]}
        update = replace(update, vectors=vectors)
    try:
        return masking.mask(update, task, secrets), None
    except Declined as error:
        return None, str(error)


class SimulatedSigner:
    """Signs for one client of a simulation, and checks the others (`contracts.Signer`).

    Signatures are keyed digests with keys that follow from the run's seed, so the protocol is the same as among real
    sites; whoever knows the seed could make them.
    """

    def __init__(self, seed: int, client: int) -> None:
        self._seed, self._client = seed, client

    def sign(self, text: bytes) -> bytes:
        return _signature(self._seed, self._client, text)

    def check(self, client: int, text: bytes, signature: bytes) -> bool:
        return signature == _signature(self._seed, client, text)

    def name(self, client: int) -> str:
        return f"client {client}"


@lru_cache(maxsize=4096)
def _signature(seed: int, client: int, text: bytes) -> bytes:
    """A client's simulated signature; kept, since every client checks those of all others."""
    secret = key("signature", seed, client).to_bytes(8)
    return hashlib.blake2b(text, key=secret).digest().ljust(SIGNATURE, b"\0")


def repeatable(*words: int | str) -> Callable[[int], bytes]:
    """Random bytes for a simulation: they come from these words, so that a run can be repeated."""
    calls = 0

    def draw(count: int) -> bytes:
        nonlocal calls
        # counted, so that several draws for one question differ
        calls += 1
        return hashlib.shake_256(key("secrets", calls, *words).to_bytes(8)).digest(count)

    return draw
