"""Queries of secure aggregation before training: keys, and shares of them.

A client's side of a sum is a small state machine over `Secrets.kept`:

    commitment  a fresh root; what was kept before is gone (where clients have few neighbours)
    keys        one list of commitments for a root, ever; without commitments a fresh root
    shares      one list of clients for a root, ever (the same list is answered the same way)
    mask        one vector and one list of those who sent shares for a root, ever (`transform.SecureAggregation.mask`)
    survivors   one list of survivors is signed for a root, ever, and only after masking (`unmasking`)
    opening     of the list that a quorum has signed; then the root is deleted

so honest clients give shares for one list of survivors, the same at all of them, whatever the server shows to whom.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor

from piebald.contracts import MASKING, SIGNATURE, ClientSecrets, Query, Update
from piebald.errors import Declined
from piebald.model_spec import ModelSpec
from piebald.privacy.secure_aggregation import masks
from piebald.privacy.secure_aggregation.demands import demands_reject_reason
from piebald.privacy.secure_aggregation.key_material import (
    BOX,
    ROOT,
    box_key,
    commitment,
    key_claim,
    own_shares,
    public_keys,
    root_of,
)
from piebald.privacy.secure_aggregation.masking_graph import (
    CONTEXT,
    KEYS,
    MEMBERS,
    MaskingGraph,
    clients_in,
    rows,
    texts,
)
from piebald.transforms.base import MaskingTransform

COMMITMENTS = MASKING + "commitments"
SENDERS, BOXES, SHARES = MASKING + "senders", MASKING + "boxes", MASKING + "shares"
SIGNED = MASKING + "signed"  # signatures
SUM, PROOF = "sum", "proof"  # what a masked update carries: the masked vector, and a digest of its own mask's seed
COMMITTED, MASKED = "committed", "masked"  # what a client keeps, besides


@runtime_checkable
class MasksOverGraph(Protocol):
    """A masking transform whose clients agree on keys with their neighbours in a graph; `SecureAggregation` is one."""

    @property
    def least(self) -> int:
        """Of how many clients a sum may be opened at least."""

    @property
    def neighbours(self) -> int | None:
        """With how many others a client masks, None for all of them."""

    def graph(self, members: Sequence[int], public: Sequence[bytes]) -> MaskingGraph:
        """The graph of these clients, from their public keys."""


class KeyQuery(Query):
    """A question about keys, answered by each client from what it keeps secret."""

    axis = "query"
    answers: ClassVar[tuple[str, int]]  # the name of what is answered, and the bytes of a row
    alone: ClassVar[bool] = False  # whether it is one row
    signed: ClassVar[bool] = False  # whether a signature comes with it

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
        if answer.vectors.keys() != {name, *([SIGNED] if self.signed else [])}:
            return f"answered with {', '.join(answer.vectors) or 'nothing'}"
        try:
            count = len(texts(answer.vectors[name], length))
            if self.signed and len(texts(answer.vectors.get(SIGNED), SIGNATURE)) != 1:
                return "answered with other than one signature"
        except Declined as error:
            return str(error)
        return f"answered with {count} rows" if self.alone and count != 1 else None


class CommitKeys(KeyQuery):
    """Before keys are shown: a client makes fresh ones and commits to them.

    The order of the ring follows from all keys.  Each of them is fixed before any is shown, so whoever speaks last
    cannot choose keys that put a client among neighbours who collude.
    """

    answers = (COMMITMENTS, masks.KEY)
    alone = True

    def reply(
        self, vectors: Mapping[str, Tensor], secrets: ClientSecrets, masking: MaskingTransform
    ) -> Mapping[str, Tensor]:
        return {COMMITMENTS: rows([commitment(_fresh_keys(secrets))], masks.KEY)}


class AdvertiseKeys(KeyQuery):
    """A client tells its public keys: fresh ones, or those that it has committed to."""

    answers = (KEYS, 2 * masks.KEY)
    alone = signed = True

    def reply(
        self, vectors: Mapping[str, Tensor], secrets: ClientSecrets, masking: MaskingTransform
    ) -> Mapping[str, Tensor]:
        if over_graph(masking).neighbours is None:
            public = _fresh_keys(secrets)
        else:
            public = public_keys(root_of(secrets))
            members, promised = clients_in(vectors.get(MEMBERS)), texts(vectors.get(COMMITMENTS), masks.KEY)
            if (secrets.client, commitment(public)) not in zip(members, promised, strict=False):
                raise Declined("the list of commitments does not have this client's newest one")
            digest = _digest(members, promised)
            if COMMITTED in secrets.kept and texts(secrets.kept[COMMITTED], masks.KEY) != [digest]:
                raise Declined("there was another list of commitments for the same keys")
            secrets.kept[COMMITTED] = rows([digest], masks.KEY)
        signature = secrets.signer.sign(key_claim(secrets.client, public))
        return {KEYS: rows([public], 2 * masks.KEY), SIGNED: rows([signature], SIGNATURE)}


class ShareKeys(KeyQuery):
    """A client gets all public keys and sends its neighbours shares of its own secrets.

    They are the key of its pairwise masks and the seed of its own mask, in boxes that the server cannot open.
    """

    answers = (SHARES, BOX)

    def reply(
        self, vectors: Mapping[str, Tensor], secrets: ClientSecrets, masking: MaskingTransform
    ) -> Mapping[str, Tensor]:
        graph, root = listed(vectors, masking), root_of(secrets)
        if graph.keys.get(secrets.client) != public_keys(root):
            raise Declined("the list of clients does not have this client's newest keys")
        if CONTEXT in secrets.kept and secrets.kept[CONTEXT].numpy().tobytes() != graph.context:
            raise Declined("there was another list of clients for the same keys")
        if over_graph(masking).neighbours is not None:
            promised = _digest(graph.members, [commitment(graph.keys[client]) for client in graph.members])
            if COMMITTED not in secrets.kept or texts(secrets.kept[COMMITTED], masks.KEY) != [promised]:
                raise Declined("the keys are not those of all who committed to keys")
        if reason := demands_reject_reason(graph, secrets.demands):
            raise Declined(reason)
        _check_signatures(vectors, graph, secrets)
        secrets.kept.update({CONTEXT: rows([graph.context], masks.KEY), **graph.vectors()})
        client, made = secrets.client, []
        shares = [own_shares(which, graph, client, root) for which in ("masks", "self")]
        for to in graph.neighbours[client]:
            both = b"".join(one[graph.place(to)] for one in shares)
            made.append(masks.encrypt_box(box_key(root, graph, to, client, to), both))
        return {SHARES: rows(made, BOX)}


# ------------------------------------------------------------------------------------------------------ what is checked


def known_graph(secrets: ClientSecrets, vectors: Mapping[str, Tensor], masking: MaskingTransform) -> MaskingGraph:
    """The graph that a client gave shares to, if the server means the same one and it is not open yet."""
    check_context(secrets, vectors)
    root_of(secrets)
    return listed(secrets.kept, masking)


def check_context(secrets: ClientSecrets, vectors: Mapping[str, Tensor]) -> None:
    """Refuse what is about another sum than the client's keys."""
    came = texts(vectors.get(CONTEXT), masks.KEY)
    if CONTEXT not in secrets.kept or texts(secrets.kept[CONTEXT], masks.KEY) != came:
        raise Declined("this client's keys are of another sum")


def check_boxes(senders: list[int], boxes: list[bytes], graph: MaskingGraph, secrets: ClientSecrets) -> list[int]:
    """The neighbours that a client masks with: those among all who sent boxes.

    Raises:
        Declined: boxes are missing, changed, or too few.
    """
    if secrets.client not in senders or not {*senders} <= {*graph.members}:
        raise Declined("the list of those who sent shares is not of this sum")
    partners = [client for client in graph.neighbours[secrets.client] if client in {*senders}]
    if len(partners) != len(boxes):
        raise Declined("there is not one box from each neighbour that sent shares")
    if len(partners) + 1 < graph.threshold:
        raise Declined(f"{len(partners)} neighbours sent shares, too few for a threshold of {graph.threshold}")
    root = root_of(secrets)
    for sender, box in zip(partners, boxes, strict=True):
        masks.decrypt_box(box_key(root, graph, sender, sender, secrets.client), box)
    return partners


def listed(vectors: Mapping[str, Tensor], masking: MaskingTransform) -> MaskingGraph:
    """The graph of the clients in some vectors."""
    return over_graph(masking).graph(clients_in(vectors.get(MEMBERS)), texts(vectors.get(KEYS), 2 * masks.KEY))


def over_graph(masking: MaskingTransform) -> MasksOverGraph:
    """A masking transform as one over a graph.

    Raises:
        Declined: it is another one.
    """
    if not isinstance(masking, MasksOverGraph):
        raise Declined("this run has no secure aggregation")
    return masking


def _fresh_keys(secrets: ClientSecrets) -> bytes:
    """The public keys of a fresh root; the client forgets what it kept before."""
    root = secrets.draw(masks.KEY)
    secrets.kept.clear()
    secrets.kept[ROOT] = rows([root], masks.KEY)
    return public_keys(root)


def _digest(members: Sequence[int], promised: Sequence[bytes]) -> bytes:
    """A digest of who has committed to what."""
    return masks.derive(b"".join(promised), "committed", *members)


def _check_signatures(vectors: Mapping[str, Tensor], graph: MaskingGraph, secrets: ClientSecrets) -> None:
    """Refuse a list in which a client has not signed its keys."""
    signed = texts(vectors.get(SIGNED), SIGNATURE)
    if len(signed) != len(graph.members):
        raise Declined(f"{len(signed)} signatures came with the keys of {len(graph.members)} clients")
    for client, signature in zip(graph.members, signed, strict=True):
        if not secrets.signer.check(client, key_claim(client, graph.keys[client]), signature):
            raise Declined(f"the keys of client {client} are not signed by its site")
