"""Queries around training: whether each client got its shares, one list of survivors, and the shares that open it.

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

A server that shows clients different lists of survivors could collect shares of a client's own mask from some and of
its pairwise masks from others.  So clients first sign the list that they were shown, together with the list of those
who sent shares and the digest of all else that they were shown, and give shares only for what a quorum has signed (the
consistency check of Bonawitz et al. 2017, figure 4, for active adversaries).
Of n clients q sign; each honest one signs once, so two lists can both have a quorum only where at least 2 q - n clients
collude with the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from torch import Tensor

from piebald.contracts import MASKING, SIGNATURE, ClientSecrets
from piebald.core.errors import Declined
from piebald.methods.transforms.base import MaskingTransform
from piebald.privacy.secure_aggregation import key_queries, masks
from piebald.privacy.secure_aggregation.key_queries import (
    BOTH,
    BOX,
    BOXES,
    DIGEST,
    DIGESTS,
    MASKED,
    PUBLISHED,
    SENDERS,
    SHARES,
    SIGNED,
    KeyQuery,
    box_key,
    check_context,
    dispute_claim,
    encrypted_for,
    known_graph,
    over_graph,
    own_shares,
    partners_among,
    root_of,
    share_digests,
    shares_by_holder,
    survivor_claim,
)
from piebald.privacy.secure_aggregation.masks import CONTEXT, MaskingGraph, clients_in, numbers, rows, texts

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
        # with those of earlier questions, or a server could collect a threshold of shares a few at a time
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
    # what came in a box wins over what the server relays
    return dict(zip(owners, shown, strict=True)) | held


def _before_masking(vectors: Mapping[str, Tensor], secrets: ClientSecrets, masking: MaskingTransform) -> MaskingGraph:
    graph = known_graph(secrets, vectors, masking)
    if MASKED in secrets.kept:
        raise Declined("an update was masked already under these keys")
    return graph


def _opened(root: bytes, graph: MaskingGraph, sender: int, client: int, box: bytes) -> bytes | None:
    try:
        # a box that does not open is one to dispute, no reason to stop this client's check of the others
        return masks.decrypt_box(box_key(root, graph, sender, sender, client), box)
    except Declined:
        return None


SURVIVORS, SIGNERS = MASKING + "survivors", MASKING + "signers"


CONFIRMED, OPENED = "confirmed", "opened"  # what a client keeps, besides


class ConfirmSurvivors(KeyQuery):
    """A client hears whose masked updates arrived, and signs that list, that of those who sent shares, and a digest.

    The digest is of what it was shown when it masked.  It is told besides, so that others can say who was shown
    something else.
    """

    answers: ClassVar = {SIGNED: SIGNATURE, DIGEST: masks.KEY}
    alone = True

    def reply(
        self, vectors: Mapping[str, Tensor], secrets: ClientSecrets, masking: MaskingTransform
    ) -> Mapping[str, Tensor]:
        arrival = _arrived(vectors, secrets, masking)
        # noted before it is signed: another list is refused even where this answer is lost
        secrets.kept[CONFIRMED] = numbers(arrival.survivors)
        signature = secrets.signer.sign(arrival.claim(arrival.shown))
        return {SIGNED: rows([signature], SIGNATURE), DIGEST: rows([arrival.shown], masks.KEY)}


class Unmasking(KeyQuery):
    """A client gets the signatures of others for its own list of survivors, and gives shares that open their sum.

    Of those who arrived the share of their own mask, of its other neighbours that of their pairwise masks.
    """

    answers: ClassVar = {SHARES: key_queries.BYTES}

    def reply(
        self, vectors: Mapping[str, Tensor], secrets: ClientSecrets, masking: MaskingTransform
    ) -> Mapping[str, Tensor]:
        check_context(secrets, vectors)
        memory = secrets.kept
        if OPENED in memory:
            if clients_in(memory[OPENED]) != clients_in(vectors.get(SURVIVORS)):
                raise Declined("this sum was opened already, for another list of survivors")
            return {SHARES: memory[SHARES]}  # the first answer may have been lost
        arrival = _arrived(vectors, secrets, masking)
        _check_quorum(vectors, arrival, secrets)
        shares = _shares(arrival, secrets)
        context = memory[CONTEXT]
        memory.clear()  # the root, too: nobody can open this client's boxes later
        memory.update({CONTEXT: context, OPENED: numbers(arrival.survivors), SHARES: shares})
        return {SHARES: shares}


class _Arrival(NamedTuple):
    """The clients in a sum, as one of them was told: the graph, who sent shares, and whose masked updates arrived; and
    the digest of what this client was shown.
    """

    graph: MaskingGraph
    senders: list[int]
    survivors: list[int]
    shown: bytes

    def claim(self, shown: bytes) -> bytes:
        """Return what a client signs that was shown this."""
        return survivor_claim(self.graph, shown, self.senders, self.survivors)


def _arrived(vectors: Mapping[str, Tensor], secrets: ClientSecrets, masking: MaskingTransform) -> _Arrival:
    """Return what a question about survivors is about.

    Raises:
        Declined: nothing is masked yet, or the survivors' sum must not be opened, or it signed another list.
    """
    graph, survivors = known_graph(secrets, vectors, masking), clients_in(vectors.get(SURVIVORS))
    if MASKED not in secrets.kept:
        raise Declined("nothing was masked under these keys, so nothing is opened")
    # the list that it masked with, not a list that the server states afterwards
    senders = clients_in(secrets.kept[SENDERS])
    if secrets.client not in survivors or not {*survivors} <= {*senders}:
        raise Declined("the list of survivors is not of this sum")
    # a site's own demand holds even where the recipe would open sums of fewer clients
    graph.check_survivors(survivors, max(over_graph(masking).least, secrets.demands.least))
    if CONFIRMED in secrets.kept and clients_in(secrets.kept[CONFIRMED]) != survivors:
        raise Declined("another list of survivors was signed already")
    return _Arrival(graph, senders, survivors, texts(secrets.kept.get(DIGEST), masks.KEY)[0])


def _check_quorum(vectors: Mapping[str, Tensor], arrival: _Arrival, secrets: ClientSecrets) -> None:
    """Refuse what too few survivors have signed, or what one of them was shown otherwise.

    A wrong signature does not count and stops nobody.
    """
    signers, signed = clients_in(vectors.get(SIGNERS)), texts(vectors.get(SIGNED), SIGNATURE)
    shown = texts(vectors[DIGEST], masks.KEY) if DIGEST in vectors else [arrival.shown] * len(signers)
    if not len(signers) == len(signed) == len(shown) or not {*signers} <= {*arrival.survivors}:
        raise Declined("the signatures are not those of survivors")
    agreeing = 0
    for client, signature, theirs in zip(signers, signed, shown, strict=True):
        if not secrets.signer.check(client, arrival.claim(theirs), signature):
            continue
        # a valid signature under another digest proves that clients were shown different things
        if theirs != arrival.shown:
            raise Declined(
                f"{secrets.signer.name(client)} has signed that the server showed it something else than this site: "
                "other terms, another model or another question"
            )
        agreeing += 1
    if agreeing < arrival.graph.quorum:
        raise Declined(
            f"{agreeing} survivors have signed this list of survivors, it takes {arrival.graph.quorum}: others did not "
            "sign, or were shown something else than this site"
        )


def _shares(arrival: _Arrival, secrets: ClientSecrets) -> Tensor:
    """A share for the client itself and for each client that it masked with, in order of their numbers."""
    client, graph, present = secrets.client, arrival.graph, {*arrival.survivors}
    shares = {client: own_shares("self", graph, client, root_of(secrets))[graph.place(client)]}
    held = held_shares(secrets)
    for sender in partners_among(arrival.senders, graph, client):
        # one half of each pair of shares: who had both could take all masks off a single update
        shares[sender] = held[sender][key_queries.BYTES :] if sender in present else held[sender][: key_queries.BYTES]
    return rows([shares[owner] for owner in sorted(shares)], key_queries.BYTES)
