"""Queries of secure aggregation: keys, shares, and unmasking.

A client's side of it is a small state machine over `Secrets.kept`:

    keys      a fresh root; what was kept before is gone
    shares    one list of clients for a root, ever (the same list is answered the same way)
    mask      one vector for a root, ever (`secure_aggregation.SecureAggregation.mask`)
    opening   one list of survivors for a root, ever, and only after masking; then the root is deleted

so no client gives the shares of both another client's own mask and its pairwise masks, whatever the server asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor

from piebald.contracts import MASKING, SIGNATURE, ClientSecrets, Query, Update
from piebald.errors import Declined
from piebald.model_spec import ModelSpec
from piebald.privacy.secure_aggregation import masks, shamir
from piebald.privacy.secure_aggregation.masking_graph import (
    CONTEXT,
    KEYS,
    MEMBERS,
    MaskingGraph,
    clients_in,
    numbers,
    rows,
    texts,
)
from piebald.transforms.base import MaskingTransform

BOX = 2 * shamir.BYTES + masks.TAG  # bytes of two shares for one neighbour
SENDERS, BOXES, SHARES = MASKING + "senders", MASKING + "boxes", MASKING + "shares"
SURVIVORS = MASKING + "survivors"
SIGNED = MASKING + "signed"  # signatures of keys
SUM, PROOF = "sum", "proof"  # what a masked update carries: the masked vector, and a digest of its own mask's seed
# what a client keeps
ROOT, MASKED, OPENED = "root", "masked", "opened"


@runtime_checkable
class MasksOverGraph(Protocol):
    """A masking transform whose clients agree on keys with their neighbours in a graph; `SecureAggregation` is one."""

    @property
    def least(self) -> int:
        """Of how many clients a sum may be opened at least."""

    def graph(self, members: Sequence[int], public: Sequence[bytes]) -> MaskingGraph:
        """The graph of these clients, from their public keys."""


class KeyQuery(Query):
    """A question about keys, answered by each client from what it keeps secret."""

    axis = "query"
    answers: ClassVar[tuple[str, int]]  # the name of what is answered, and the bytes of a row
    alone: ClassVar[bool] = False  # whether it is one row

    def reply(
        self, vectors: Mapping[str, Tensor], secrets: ClientSecrets, masking: MaskingTransform
    ) -> Mapping[str, Tensor]:
        """One client's answer to a question that brought these `vectors`; `masking` is the recipe's.

        Raises:
            Declined: the client does not do that.
        """
        raise NotImplementedError

    def reject_reason(self, answer: Update, spec: ModelSpec) -> str | None:
        name, length = self.answers
        if answer.vectors.keys() - {SIGNED} != {name}:
            return f"answered with {', '.join(answer.vectors) or 'nothing'}"
        try:
            count = len(texts(answer.vectors[name], length))
            if SIGNED in answer.vectors:
                texts(answer.vectors[SIGNED], SIGNATURE)
        except Declined as error:
            return str(error)
        return f"answered with {count} rows" if self.alone and count != 1 else None


class AdvertiseKeys(KeyQuery):
    """The first round: a client makes fresh keys and tells the public ones."""

    answers = (KEYS, 2 * masks.KEY)
    alone = True

    def reply(
        self, vectors: Mapping[str, Tensor], secrets: ClientSecrets, masking: MaskingTransform
    ) -> Mapping[str, Tensor]:
        root = secrets.draw(masks.KEY)
        secrets.kept.clear()
        secrets.kept[ROOT] = rows([root], masks.KEY)
        public = public_keys(root)
        made = {KEYS: rows([public], 2 * masks.KEY)}
        if secrets.signer is not None:
            made[SIGNED] = rows([secrets.signer.sign(_claim(secrets.client, public))], SIGNATURE)
        return made


class ShareKeys(KeyQuery):
    """The second round: a client gets all public keys and sends its neighbours shares of its own secrets.

    They are the key of its pairwise masks and the seed of its own mask, in boxes that the server cannot open.
    """

    answers = (SHARES, BOX)

    def reply(
        self, vectors: Mapping[str, Tensor], secrets: ClientSecrets, masking: MaskingTransform
    ) -> Mapping[str, Tensor]:
        graph, root = _listed(vectors, masking), root_of(secrets)
        if graph.keys.get(secrets.client) != public_keys(root):
            raise Declined("the list of clients does not have this client's newest keys")
        if CONTEXT in secrets.kept and secrets.kept[CONTEXT].numpy().tobytes() != graph.context:
            raise Declined("there was another list of clients for the same keys")
        _check_signatures(vectors, graph, secrets)
        secrets.kept.update({CONTEXT: rows([graph.context], masks.KEY), **graph.vectors()})
        client, made = secrets.client, []
        shares = [own_shares(which, graph, client, root) for which in ("masks", "self")]
        for to in graph.neighbours[client]:
            both = b"".join(one[graph.place(to)] for one in shares)
            made.append(masks.encrypt_box(_box_key(root, graph, to, client, to), both))
        return {SHARES: rows(made, BOX)}


class Unmasking(KeyQuery):
    """The last round: a client hears whose vectors arrived, and gives shares that open their sum.

    Of those who arrived the share of their own mask, of its other neighbours that of their pairwise masks.
    """

    answers = (SHARES, shamir.BYTES)

    def reply(
        self, vectors: Mapping[str, Tensor], secrets: ClientSecrets, masking: MaskingTransform
    ) -> Mapping[str, Tensor]:
        check_context(secrets, vectors)
        kept, survivors = secrets.kept, clients_in(vectors.get(SURVIVORS))
        if OPENED in kept:
            if clients_in(kept[OPENED]) != survivors:
                raise Declined("this sum was opened already, for another list of survivors")
            return {SHARES: kept[SHARES]}  # the first answer may have been lost
        if MASKED not in kept:
            raise Declined("nothing was masked under these keys, so nothing is opened")
        given = self._shares(survivors, secrets, masking)
        context = kept[CONTEXT]
        kept.clear()  # the root, too: nobody can open this client's boxes later
        kept.update({CONTEXT: context, OPENED: numbers(survivors), SHARES: given})
        return {SHARES: given}

    def _shares(self, survivors: list[int], secrets: ClientSecrets, masking: MaskingTransform) -> Tensor:
        """A share for the client itself and for each client that it masked with, in order of their numbers."""
        graph, root, client = _listed(secrets.kept, masking), root_of(secrets), secrets.client
        senders = clients_in(secrets.kept[SENDERS])
        self._check(survivors, [client, *senders], graph, masking)
        given = {client: own_shares("self", graph, client, root)[graph.place(client)]}
        for sender, box in zip(senders, texts(secrets.kept[BOXES], BOX), strict=True):
            both = masks.decrypt_box(_box_key(root, graph, sender, sender, client), box)
            given[sender] = both[shamir.BYTES :] if sender in survivors else both[: shamir.BYTES]
        return rows([given[one] for one in sorted(given)], shamir.BYTES)

    @staticmethod
    def _check(survivors: list[int], partners: list[int], graph: MaskingGraph, masking: MaskingTransform) -> None:
        """Refuse lists of survivors that are none; `partners` are the client and whom it masked with."""
        if partners[0] not in survivors or not {*survivors} <= {*graph.members}:
            raise Declined("the list of survivors is not of this sum")
        least, near = max(graph.threshold, _over_graph(masking).least), len({*survivors} & {*partners})
        if len(survivors) < least or near < graph.threshold:
            raise Declined(
                f"{len(survivors)} clients arrived, {near} of them masked together here, too few for a sum of at "
                f"least {least}"
            )


# ------------------------------------------------------------------------------------------------------- what is shared


def public_keys(root: bytes) -> bytes:
    """The public keys of a root: of masks, then of boxes."""
    return b"".join(masks.public_key(masks.private_key(root, purpose)) for purpose in ("masks", "boxes"))


def own_shares(which: str, graph: MaskingGraph, client: int, root: bytes) -> dict[int, bytes]:
    """Shares by place of a client's key of pairwise masks ("masks") or of the seed of its own ("self")."""
    secret = masks.private_key(root, "masks") if which == "masks" else own_seed(root, graph)
    size = (shamir.BYTES + 16) * (graph.threshold - 1)
    stream = iter(masks.derive(root, "polynomial", which, graph.context, length=size))
    places = [graph.place(holder) for holder in graph.holders(client)]
    return shamir.share(secret, places, graph.threshold, lambda count: bytes(next(stream) for _ in range(count)))


def own_seed(root: bytes, graph: MaskingGraph) -> bytes:
    """The seed of a client's own mask."""
    return masks.derive(root, "self", graph.context)


def pair_seed(private: bytes, graph: MaskingGraph, client: int, other: int) -> bytes:
    """The seed of the mask that two neighbours share, from one's private and the other's public key."""
    return masks.agree(private, graph.keys[other][: masks.KEY], "pair", graph.context, *sorted((client, other)))


def root_of(secrets: ClientSecrets) -> bytes:
    """What a client's secrets of this sum come from.

    Raises:
        Declined: it has none.
    """
    if ROOT not in secrets.kept:
        raise Declined("this client has no keys for that")
    return texts(secrets.kept[ROOT], masks.KEY)[0]


def known_graph(secrets: ClientSecrets, vectors: Mapping[str, Tensor], masking: MaskingTransform) -> MaskingGraph:
    """The graph that a client gave shares to, if the server means the same one and it is not open yet."""
    check_context(secrets, vectors)
    root_of(secrets)
    return _listed(secrets.kept, masking)


def check_context(secrets: ClientSecrets, vectors: Mapping[str, Tensor]) -> None:
    """Refuse what is about another sum than the client's keys."""
    came = texts(vectors.get(CONTEXT), masks.KEY)
    if CONTEXT not in secrets.kept or texts(secrets.kept[CONTEXT], masks.KEY) != came:
        raise Declined("this client's keys are of another sum")


def check_boxes(senders: list[int], boxes: list[bytes], graph: MaskingGraph, secrets: ClientSecrets) -> None:
    """Refuse boxes that are not from neighbours of this graph, or too few of them."""
    if len(senders) != len(boxes) or not {*senders} <= {*graph.neighbours[secrets.client]}:
        raise Declined("shares came from clients that are no neighbours")
    if len(senders) + 1 < graph.threshold:
        raise Declined(f"{len(senders)} neighbours sent shares, too few for a threshold of {graph.threshold}")
    root = root_of(secrets)
    for sender, box in zip(senders, boxes, strict=True):
        masks.decrypt_box(_box_key(root, graph, sender, sender, secrets.client), box)


def _box_key(root: bytes, graph: MaskingGraph, other: int, sender: int, reader: int) -> bytes:
    """The key of the box from `sender` to `reader`; `root` is that of one of them, `other` the other one."""
    theirs = graph.keys[other][masks.KEY :]
    return masks.agree(masks.private_key(root, "boxes"), theirs, "box", graph.context, sender, reader)


def _claim(client: int, public: bytes) -> bytes:
    """What a client signs: that these are its keys."""
    return b"%d:" % client + public


def _check_signatures(vectors: Mapping[str, Tensor], graph: MaskingGraph, secrets: ClientSecrets) -> None:
    """Refuse a list in which a client has not signed its keys, where clients can sign."""
    if secrets.signer is None:
        return
    signed = texts(vectors.get(SIGNED), SIGNATURE)
    if len(signed) != len(graph.members):
        raise Declined(f"{len(signed)} signatures came with the keys of {len(graph.members)} clients")
    for client, signature in zip(graph.members, signed, strict=True):
        if not secrets.signer.check(client, _claim(client, graph.keys[client]), signature):
            raise Declined(f"the keys of client {client} are not signed by its site")


def _listed(vectors: Mapping[str, Tensor], masking: MaskingTransform) -> MaskingGraph:
    return _over_graph(masking).graph(clients_in(vectors.get(MEMBERS)), texts(vectors.get(KEYS), 2 * masks.KEY))


def _over_graph(masking: MaskingTransform) -> MasksOverGraph:
    if not isinstance(masking, MasksOverGraph):
        raise Declined("this run has no secure aggregation")
    return masking


def proof(seed: bytes) -> bytes:
    """What tells whether shares of a client's own seed were right."""
    return masks.derive(seed, "proof")
