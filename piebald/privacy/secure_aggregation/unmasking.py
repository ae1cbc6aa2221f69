"""Queries of secure aggregation after training: one list of survivors for everybody, then the shares that open its sum.

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
from piebald.privacy.secure_aggregation import masks, shamir
from piebald.privacy.secure_aggregation.key_material import (
    own_shares,
    root_of,
    survivor_claim,
)
from piebald.privacy.secure_aggregation.key_queries import (
    DIGEST,
    MASKED,
    SENDERS,
    SHARES,
    SIGNED,
    KeyQuery,
    check_context,
    known_graph,
    over_graph,
    partners_among,
)
from piebald.privacy.secure_aggregation.masking_graph import (
    CONTEXT,
    MaskingGraph,
    clients_in,
    numbers,
    rows,
    texts,
)
from piebald.privacy.secure_aggregation.share_checks import held_shares

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
        secrets.kept[CONFIRMED] = numbers(arrival.survivors)
        signature = secrets.signer.sign(arrival.claim(arrival.shown))
        return {SIGNED: rows([signature], SIGNATURE), DIGEST: rows([arrival.shown], masks.KEY)}


class Unmasking(KeyQuery):
    """A client gets the signatures of others for its own list of survivors, and gives shares that open their sum.

    Of those who arrived the share of their own mask, of its other neighbours that of their pairwise masks.
    """

    answers: ClassVar = {SHARES: shamir.BYTES}

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
    senders = clients_in(secrets.kept[SENDERS])
    if secrets.client not in survivors or not {*survivors} <= {*senders}:
        raise Declined("the list of survivors is not of this sum")
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
        shares[sender] = held[sender][shamir.BYTES :] if sender in present else held[sender][: shamir.BYTES]
    return rows([shares[owner] for owner in sorted(shares)], shamir.BYTES)
