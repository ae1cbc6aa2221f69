"""Queries of secure aggregation after training: one list of survivors for everybody, then the shares that open its sum.

A server that shows clients different lists of survivors could collect shares of a client's own mask from some and of
its pairwise masks from others.  So clients first sign the list that they were shown, together with the list of those
who sent shares, and give shares only for lists that a quorum has signed (the consistency check of Bonawitz et al. 2017,
figure 4, for active adversaries).  Of n clients q sign; each honest one signs once, so two lists can both have a quorum
only where at least 2 q - n clients collude with the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from piebald.contracts import MASKING, SIGNATURE, ClientSecrets
from piebald.errors import Declined
from piebald.privacy.secure_aggregation import shamir
from piebald.privacy.secure_aggregation.key_material import own_shares, root_of, survivor_claim
from piebald.privacy.secure_aggregation.key_queries import (
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
from piebald.privacy.secure_aggregation.masking_graph import CONTEXT, MaskingGraph, clients_in, numbers, rows, texts
from piebald.privacy.secure_aggregation.share_checks import held_shares
from piebald.transforms.base import MaskingTransform

SURVIVORS, SIGNERS = MASKING + "survivors", MASKING + "signers"
CONFIRMED, OPENED = "confirmed", "opened"  # what a client keeps, besides


class ConfirmSurvivors(KeyQuery):
    """A client hears whose masked updates arrived, and signs that list with the list of those who sent shares."""

    answers: ClassVar = {SIGNED: SIGNATURE}
    alone = True

    def reply(
        self, vectors: Mapping[str, Tensor], secrets: ClientSecrets, masking: MaskingTransform
    ) -> Mapping[str, Tensor]:
        graph, survivors, senders = _arrived(vectors, secrets, masking)
        secrets.kept[CONFIRMED] = numbers(survivors)
        signature = secrets.signer.sign(survivor_claim(graph, senders, survivors))
        return {SIGNED: rows([signature], SIGNATURE)}


class Unmasking(KeyQuery):
    """A client gets the signatures of others for its own list of survivors, and gives shares that open their sum.

    Of those who arrived the share of their own mask, of its other neighbours that of their pairwise masks.
    """

    answers: ClassVar = {SHARES: shamir.BYTES}

    def reply(
        self, vectors: Mapping[str, Tensor], secrets: ClientSecrets, masking: MaskingTransform
    ) -> Mapping[str, Tensor]:
        check_context(secrets, vectors)
        kept = secrets.kept
        if OPENED in kept:
            if clients_in(kept[OPENED]) != clients_in(vectors.get(SURVIVORS)):
                raise Declined("this sum was opened already, for another list of survivors")
            return {SHARES: kept[SHARES]}  # the first answer may have been lost
        graph, survivors, senders = _arrived(vectors, secrets, masking)
        _check_quorum(vectors, graph, survivors, survivor_claim(graph, senders, survivors), secrets)
        given = _shares(graph, survivors, senders, secrets)
        context = kept[CONTEXT]
        kept.clear()  # the root, too: nobody can open this client's boxes later
        kept.update({CONTEXT: context, OPENED: numbers(survivors), SHARES: given})
        return {SHARES: given}


def _arrived(
    vectors: Mapping[str, Tensor], secrets: ClientSecrets, masking: MaskingTransform
) -> tuple[MaskingGraph, list[int], list[int]]:
    """The graph, the survivors in a question, and those who sent shares as this client was told.

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
    return graph, survivors, senders


def _check_quorum(
    vectors: Mapping[str, Tensor], graph: MaskingGraph, survivors: list[int], claim: bytes, secrets: ClientSecrets
) -> None:
    """Refuse a list of survivors that too few have signed; a wrong signature does not count."""
    signers, signed = clients_in(vectors.get(SIGNERS)), texts(vectors.get(SIGNED), SIGNATURE)
    if len(signers) != len(signed) or not {*signers} <= {*survivors}:
        raise Declined("the signatures are not those of survivors")
    found = sum(secrets.signer.check(*one) for one in zip(signers, [claim] * len(signers), signed, strict=True))
    if found < graph.quorum:
        raise Declined(f"{found} survivors have signed this list of survivors, it takes {graph.quorum}")


def _shares(graph: MaskingGraph, survivors: list[int], senders: list[int], secrets: ClientSecrets) -> Tensor:
    """A share for the client itself and for each client that it masked with, in order of their numbers."""
    client, there = secrets.client, {*survivors}
    given = {client: own_shares("self", graph, client, root_of(secrets))[graph.place(client)]}
    held = held_shares(secrets)
    for sender in partners_among(senders, graph, client):
        given[sender] = held[sender][shamir.BYTES :] if sender in there else held[sender][: shamir.BYTES]
    return rows([given[one] for one in sorted(given)], shamir.BYTES)
