"""Queries that settle, before anything is masked, whether each client got the shares that it should have got.

A client publishes digests of all shares of its secrets.  Each holder compares what is in its boxes with them.  Where
they differ, or a box does not open, either of the two may be at fault, so the holder signs that, and the sender shows
this holder's shares to the server, which relays them.  A sender that cannot show what it published is at fault for
certain; one that is accused without reason loses nothing, since the holder knew these shares.  (The complaints of
verifiable secret sharing; see Pedersen 1991, section 4.)

Afterwards a wrong share at the opening is the fault of who gives it, and a wrong secret behind right shares the fault
of who shared it.

A sender shows shares only to holders who signed the very box and digests that it made, for the very list of clients.
An honest holder signs that of no honest sender, whatever the server relays, so a server that lies learns shares only of
holders who act with it, and these it knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from piebald.contracts import MASKING, SIGNATURE, ClientSecrets
from piebald.core.errors import Declined
from piebald.methods.transforms.base import MaskingTransform
from piebald.privacy.secure_aggregation import masks
from piebald.privacy.secure_aggregation.key_material import (
    BOTH,
    BOX,
    DIGESTS,
    box_key,
    dispute_claim,
    encrypted_for,
    root_of,
    share_digests,
    shares_by_holder,
)
from piebald.privacy.secure_aggregation.key_queries import (
    BOXES,
    MASKED,
    PUBLISHED,
    SENDERS,
    SHARES,
    SIGNED,
    KeyQuery,
    known_graph,
    partners_among,
)
from piebald.privacy.secure_aggregation.masking_graph import (
    MaskingGraph,
    clients_in,
    numbers,
    rows,
    texts,
)

DISPUTED, READERS = MASKING + "disputed", MASKING + "readers"


SHOWN_BY, SHOWN = MASKING + "shown_by", MASKING + "shown"  # shares that came by way of the server


_HELD_OF, _HELD, _SHOWN_TO = "held_of", "held", "shown_to"  # what a client keeps


class CheckShares(KeyQuery):
    """A client opens its boxes, keeps what is in them, and signs which of them hold something else than they should.

    It answers a 0 or 1 for each neighbour who sent a box, and a signature for each 1.
    """

    answers: ClassVar = {DISPUTED: 1, SIGNED: SIGNATURE}

    def reply(
        self, vectors: Mapping[str, Tensor], secrets: ClientSecrets, masking: MaskingTransform
    ) -> Mapping[str, Tensor]:
        graph, client = _before_masking(vectors, secrets, masking), secrets.client
        partners = partners_among(clients_in(vectors.get(SENDERS)), graph, client)
        boxes, published = texts(vectors.get(BOXES), BOX), texts(vectors.get(PUBLISHED), DIGESTS)
        if not len(partners) == len(boxes) == len(published):
            raise Declined("there is not one box from each neighbour that sent shares")
        root, held, signed = root_of(secrets), dict[int, bytes](), list[bytes]()
        for sender, box, digests in zip(partners, boxes, published, strict=True):
            both = _opened(root, graph, sender, client, box)
            if both is not None and share_digests(both, graph, sender, client) == digests:
                held[sender] = both
            else:
                signed.append(secrets.signer.sign(dispute_claim(graph, sender, client, box, digests)))
        keep_shares(secrets, held)
        verdicts = [bytes([sender not in held]) for sender in partners]
        return {DISPUTED: rows(verdicts, 1), SIGNED: rows(signed, SIGNATURE)}


class ShowShares(KeyQuery):
    """A client hears which holders dispute the shares that it sent them, and shows the server these shares."""

    answers: ClassVar = {SHARES: BOTH}

    def reply(
        self, vectors: Mapping[str, Tensor], secrets: ClientSecrets, masking: MaskingTransform
    ) -> Mapping[str, Tensor]:
        graph, client = _before_masking(vectors, secrets, masking), secrets.client
        readers, signed = clients_in(vectors.get(READERS)), texts(vectors.get(SIGNED), SIGNATURE)
        if len(readers) != len(signed) or not {*readers} <= {*graph.neighbours[client]}:
            raise Declined("the disputes are not those of neighbours")
        shown = {*readers} | ({*clients_in(secrets.kept[_SHOWN_TO])} if _SHOWN_TO in secrets.kept else set())
        if len(shown) >= graph.threshold:  # so many must act together that their word is worth nothing
            raise Declined(f"{len(shown)} neighbours dispute their shares, and {graph.threshold} shares open a mask")
        root = root_of(secrets)
        both = shares_by_holder(graph, client, root)
        boxes = encrypted_for(graph, client, root, both)
        for reader, signature in zip(readers, signed, strict=True):
            digests = share_digests(both[reader], graph, client, reader)
            claim = dispute_claim(graph, client, reader, boxes[reader], digests)
            if not secrets.signer.check(reader, claim, signature):
                raise Declined(f"client {reader} has not signed that it disputes the shares that this client sent it")
        secrets.kept[_SHOWN_TO] = numbers(sorted(shown))
        return {SHARES: rows([both[reader] for reader in readers], BOTH)}


def keep_shares(secrets: ClientSecrets, held: Mapping[int, bytes]) -> None:
    """Keep the shares that a client holds of others."""
    secrets.kept.update({_HELD_OF: numbers(sorted(held)), _HELD: rows([held[client] for client in sorted(held)], BOTH)})


def held_shares(secrets: ClientSecrets) -> dict[int, bytes]:
    """The shares that a client holds: of each owner its share of the key, then that of the seed."""
    if _HELD_OF not in secrets.kept:
        return {}
    return dict(zip(clients_in(secrets.kept[_HELD_OF]), texts(secrets.kept[_HELD], BOTH), strict=True))


def all_shares(vectors: Mapping[str, Tensor], secrets: ClientSecrets) -> dict[int, bytes]:
    """The shares that a client holds, and those that were shown since it disputed what it got."""
    held = held_shares(secrets)
    if SHOWN_BY not in vectors:
        return held
    owners, shown = clients_in(vectors[SHOWN_BY]), texts(vectors.get(SHOWN), BOTH)
    if len(owners) != len(shown):
        raise Declined("the shares that were shown are not one for each client that showed some")
    return dict(zip(owners, shown, strict=True)) | held


def _before_masking(vectors: Mapping[str, Tensor], secrets: ClientSecrets, masking: MaskingTransform) -> MaskingGraph:
    graph = known_graph(secrets, vectors, masking)
    if MASKED in secrets.kept:
        raise Declined("an update was masked already under these keys")
    return graph


def _opened(root: bytes, graph: MaskingGraph, sender: int, client: int, box: bytes) -> bytes | None:
    try:
        return masks.decrypt_box(box_key(root, graph, sender, sender, client), box)
    except Declined:
        return None
