"""The server's side of a sum before training: it relays keys, shares and disputes, and finds who does not keep to that.

A client whose answer is wrong beyond doubt takes no part in this sum, nor in the run any more
(`AsksClients.exclude_client`); one that does not answer takes no part in this sum.  The others go on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from piebald.contracts import SIGNATURE, AsksClients, Query, QueryRequest, Split
from piebald.core.errors import Declined
from piebald.privacy.secure_aggregation import key_queries, masks
from piebald.privacy.secure_aggregation.key_queries import DISPUTED, READERS, CheckShares, ShowShares
from piebald.privacy.secure_aggregation.masks import (
    CONTEXT,
    KEYS,
    MEMBERS,
    SIZES,
    MaskingGraph,
    MasksOverGraph,
    numbers,
    rows,
    sizes_in,
    texts,
)

Answers = dict[int, Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class KeyRound:
    """What a sum is about, to which its keys belong.

    Attributes:
        version: server steps made.
        splits: the rows that it is about; none for training.
        work: digest of what members do (`ClientWork.digest`).
    """

    version: int = 0
    splits: tuple[Split, ...] = ()
    work: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class SentShares:
    """The shares of its secrets that one client sent.

    Attributes:
        boxes: by who reads them.
        published: digests of the two shares of each holder.
        proof: a digest of the seed of its own mask.
    """

    boxes: Mapping[int, bytes]
    published: Mapping[int, bytes]
    proof: bytes


@dataclass(slots=True, eq=False)
class ExchangedKeys:
    """Clients that have exchanged keys and shares.

    Attributes:
        graph: the clients that sent their keys.
        sent: what each client sent that takes part.
        shown: shares that their holder disputed and their owner has shown, by holder and owner.
        unbalanced: who was left out, as its number of rows would be too much beside the others', or theirs beside its.
    """

    graph: MaskingGraph
    sent: dict[int, SentShares]
    shown: dict[int, dict[int, bytes]] = field(default_factory=dict)
    unbalanced: set[int] = field(default_factory=set)

    def partners(self, client: int) -> list[int]:
        """The neighbours of a client that take part, increasing."""
        return [neighbour for neighbour in self.graph.neighbours[client] if neighbour in self.sent]

    def right(self, holder: int, owner: int, which: str, share: bytes) -> bool:
        """Return whether a share is the one that its owner has published a digest of."""
        published = self.sent[owner].published[holder]
        digest = published[: masks.KEY] if which == "masks" else published[masks.KEY :]
        return key_queries.share_digest(share, which, self.graph, owner, holder) == digest

    def leave_out(self, clients: Collection[int]) -> None:
        """Go on without some clients."""
        self.sent = {client: sent for client, sent in self.sent.items() if client not in clients}


def exchange_keys(
    clients: Sequence[int], about: KeyRound, settings: MasksOverGraph, context: AsksClients
) -> ExchangedKeys:
    """Have clients exchange keys and shares.

    Args:
        clients: who is asked.
        about: the sum.
        settings: makes the graph of clients with public keys.
        context: asks them, checks signatures, and excludes whose answers are wrong.

    Raises:
        Declined: they are too few.
    """
    unbalanced = set[int]()
    digest, public_keys = _keys(about, settings, clients, context, unbalanced)
    members = sorted(public_keys)
    try:
        keys_of = [texts(public_keys[client][KEYS], 2 * masks.KEY)[0] for client in members]
        sizes = [sizes_in(public_keys[client][SIZES])[0] for client in members]
        graph = settings.graph(members, keys_of, sizes, digest)
    except Declined as error:
        raise Declined(f"{len(clients)} clients were asked for keys: {error}") from None
    # with the signatures, since clients must check one another's keys and not believe the server
    vectors = {
        **graph.vectors(),
        key_queries.SIGNED: torch.cat([public_keys[client][key_queries.SIGNED] for client in members]),
    }
    answers = asked(context, key_queries.ShareKeys(), dict.fromkeys(members, vectors))
    keys = ExchangedKeys(graph, {}, unbalanced=unbalanced)
    for client, answer in answers.items():
        shares = _sent(graph, client, answer)
        if isinstance(shares, str):
            context.exclude_client(client, shares)
        else:
            keys.sent[client] = shares
    _settle(keys, context)
    return keys


def asked(context: AsksClients, query: Query, about: Mapping[int, Mapping[str, Tensor]]) -> Answers:
    """Return what clients answered, of those that answered."""
    answers = context.query([QueryRequest(client, query, vectors) for client, vectors in about.items()])
    return {client: answer.vectors for client, answer in zip(about, answers, strict=True) if answer is not None}


# ----------------------------------------------------------------------------------------------------------------- keys


def _keys(
    about: KeyRound, settings: MasksOverGraph, clients: Sequence[int], context: AsksClients, unbalanced: set[int]
) -> tuple[bytes, Answers]:
    """Return the digest of the sum, and what clients answer about their keys, to which all have committed before.

    On a ring, all who commit must answer.  If one is gone in between, the others begin again without it: who could
    choose whether its keys count could choose among rings.  Who is left out because of its number of rows is added to
    `unbalanced`.
    """
    remaining = sorted(clients)
    query = key_queries.AdvertiseKeys(version=about.version, splits=about.splits)
    while remaining:
        answers = asked(context, key_queries.CommitKeys(), {client: {} for client in remaining})
        promised = {client: texts(answers[client][key_queries.COMMITMENTS], masks.KEY)[0] for client in sorted(answers)}
        digest = key_queries.round_digest(about.version, about.splits, [*promised], [*promised.values()], about.work)
        vectors = {MEMBERS: numbers([*promised]), key_queries.COMMITMENTS: rows([*promised.values()], masks.KEY)}
        public_keys = _sound(asked(context, query, dict.fromkeys(promised, vectors)), promised, digest, context)
        if about.splits:  # training shortens what counts too much, answers cannot be shortened
            together = settings.balanced({client: sizes_in(answer[SIZES])[0] for client, answer in public_keys.items()})
            unbalanced |= public_keys.keys() - {*together}
            public_keys = {client: public_keys[client] for client in together}
        if settings.neighbours is None or public_keys.keys() == promised.keys():
            return digest, public_keys
        # at least one fewer each time, so this ends
        remaining = sorted(public_keys)
    return b"", {}


def _sound(answers: Answers, promised: Mapping[int, bytes], digest: bytes, context: AsksClients) -> Answers:
    """The answers whose keys can be relayed; the others' clients are excluded."""
    sound = {}
    for client, answer in answers.items():
        public, size = texts(answer[KEYS], 2 * masks.KEY)[0], sizes_in(answer[SIZES])[0]
        signature = texts(answer[key_queries.SIGNED], SIGNATURE)[0]
        if not all(masks.is_public_key(part) for part in (public[: masks.KEY], public[masks.KEY :])):
            context.exclude_client(client, "its public keys are no keys")
        elif key_queries.commitment(public) != promised[client]:
            context.exclude_client(client, "it showed other keys than those that it had committed to")
        elif not context.check_signature(client, key_queries.key_claim(client, public, digest, size), signature):
            context.exclude_client(client, "its keys are not signed by it for this sum")
        else:
            sound[client] = answer
    return sound


# --------------------------------------------------------------------------------------------------------------- shares


def _sent(graph: MaskingGraph, client: int, answer: Mapping[str, Tensor]) -> SentShares | str:
    """Return what a client sent of its secrets, or what is wrong with it."""
    boxes, published = (
        texts(answer[key_queries.SHARES], key_queries.BOX),
        texts(answer[key_queries.PUBLISHED], key_queries.DIGESTS),
    )
    readers, holders, proofs = (
        graph.neighbours[client],
        graph.holders(client),
        texts(answer[key_queries.PROOF], masks.KEY),
    )
    if (len(boxes), len(published), len(proofs)) != (len(readers), len(holders), 1):
        return f"it sent shares for {len(boxes)} neighbours of {len(readers)}, {len(published)} digests of them"
    return SentShares(dict(zip(readers, boxes, strict=True)), dict(zip(holders, published, strict=True)), proofs[0])


def _settle(keys: ExchangedKeys, context: AsksClients) -> None:
    """Have clients check what they got, and have those who sent it show what is disputed."""
    answers = asked(context, CheckShares(), {reader: _to_check(keys, reader) for reader in keys.sent})
    disputes: dict[int, dict[int, bytes]] = {}  # signatures by who sent the shares, and by their holder
    # who does not check its boxes may lack shares at the opening, when it is too late to go on without it
    gone = keys.sent.keys() - answers.keys()
    for reader, answer in answers.items():
        disputed = _disputed(keys, reader, answer, context)
        if isinstance(disputed, str):
            context.exclude_client(reader, disputed)
            gone.add(reader)
            continue
        for sender, signature in disputed.items():
            disputes.setdefault(sender, {})[reader] = signature
    keys.leave_out(gone)
    disputes = {sender: signed for sender, signed in sorted(disputes.items()) if sender in keys.sent}
    if disputes:
        keys.leave_out(_show(keys, disputes, context))


def _show(keys: ExchangedKeys, disputes: Mapping[int, Mapping[int, bytes]], context: AsksClients) -> set[int]:
    """Have clients show the shares that their holders dispute; returns those who do not show what they published."""
    vectors = {
        sender: {
            CONTEXT: rows([keys.graph.context], masks.KEY),
            READERS: numbers([*signed]),
            key_queries.SIGNED: rows([*signed.values()], SIGNATURE),
        }
        for sender, signed in disputes.items()
    }
    answers = asked(context, ShowShares(), vectors)
    # whoever shows nothing leaves: its holder could not help to open its masks
    gone = disputes.keys() - answers.keys()
    for sender, answer in answers.items():
        shares = texts(answer[key_queries.SHARES], key_queries.BOTH)
        if fault := _shown(keys, sender, [*disputes[sender]], shares):
            context.exclude_client(sender, fault)
            gone.add(sender)
    return gone


def _to_check(keys: ExchangedKeys, reader: int) -> Mapping[str, Tensor]:
    partners = keys.partners(reader)
    return {
        CONTEXT: rows([keys.graph.context], masks.KEY),
        key_queries.SENDERS: numbers(sorted(keys.sent)),
        key_queries.BOXES: rows([keys.sent[partner].boxes[reader] for partner in partners], key_queries.BOX),
        key_queries.PUBLISHED: rows(
            [keys.sent[partner].published[reader] for partner in partners], key_queries.DIGESTS
        ),
    }


def _disputed(
    keys: ExchangedKeys, reader: int, answer: Mapping[str, Tensor], context: AsksClients
) -> dict[int, bytes] | str:
    """The signatures of a client by whose shares it disputes, or what is wrong with its answer."""
    partners, verdicts = keys.partners(reader), texts(answer[DISPUTED], 1)
    # not strict: a wrong length is this client's fault and must exclude it, not end the sum
    against = [partner for partner, verdict in zip(partners, verdicts, strict=False) if verdict != b"\0"]
    signed = texts(answer[key_queries.SIGNED], SIGNATURE)
    if len(verdicts) != len(partners) or len(signed) != len(against):
        return f"it judged {len(verdicts)} shares of {len(partners)}, with {len(signed)} signatures"
    for sender, signature in zip(against, signed, strict=True):
        sent = keys.sent[sender]
        claim = key_queries.dispute_claim(keys.graph, sender, reader, sent.boxes[reader], sent.published[reader])
        if not context.check_signature(reader, claim, signature):
            return f"it did not sign that it disputes the shares of client {sender}"
    return dict(zip(against, signed, strict=True))


def _shown(keys: ExchangedKeys, sender: int, readers: Sequence[int], shares: Sequence[bytes]) -> str:
    """Take the shares that a client has shown; returns what is wrong with them, or nothing."""
    if len(shares) != len(readers):
        return f"it showed {len(shares)} shares of {len(readers)} that their holders dispute"
    for reader, both in zip(readers, shares, strict=True):
        if key_queries.share_digests(both, keys.graph, sender, reader) != keys.sent[sender].published[reader]:
            return f"it sent client {reader} other shares than it has published digests of"
    # in a second loop, so that a client with one wrong share leaves none of its others behind
    for reader, both in zip(readers, shares, strict=True):
        keys.shown.setdefault(reader, {})[sender] = both
    return ""
