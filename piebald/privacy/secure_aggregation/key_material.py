"""Values that a client derives from one sum's root: its public keys, shares of its secrets, seeds, boxes, claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from piebald.contracts import ClientSecrets, Task, task_digest
from piebald.core.errors import Declined
from piebald.privacy.secure_aggregation import masks
from piebald.privacy.secure_aggregation.masking_graph import MaskingGraph, texts
from piebald.privacy.secure_aggregation.shamir import BYTES, share

BOTH = 2 * BYTES  # bytes of two shares for one neighbour: of the key of pairwise masks, then of the own seed
BOX = BOTH + masks.TAG  # bytes of them in a box
DIGESTS = 2 * masks.KEY  # bytes of what a client publishes of them
ROOT = "root"  # the name under which a client keeps it


def root_of(secrets: ClientSecrets) -> bytes:
    """Return what a client's secrets of this sum come from.

    Raises:
        Declined: it has none.
    """
    if ROOT not in secrets.kept:
        raise Declined("this client has no keys for that")
    return texts(secrets.kept[ROOT], masks.KEY)[0]


def public_keys(root: bytes) -> bytes:
    """The public keys of a root: of masks, then of boxes."""
    return b"".join(masks.public_key(masks.private_key(root, purpose)) for purpose in ("masks", "boxes"))


def commitment(public: bytes) -> bytes:
    """Return what a client sends before anybody has shown keys: it can show no other keys afterwards."""
    return masks.derive(public, "commitment")


def own_shares(which: str, graph: MaskingGraph, client: int, root: bytes) -> dict[int, bytes]:
    """Shares by place of a client's key of pairwise masks ("masks") or of the seed of its own ("self")."""
    secret = masks.private_key(root, "masks") if which == "masks" else own_seed(root, graph)
    # as many bytes as `shamir.share` draws; from the root, so that a question asked twice gets the same shares
    size = (BYTES + 16) * (graph.threshold - 1)
    stream = iter(masks.derive(root, "polynomial", which, graph.context, length=size))
    places = [graph.place(holder) for holder in graph.holders(client)]
    return share(secret, places, graph.threshold, lambda count: bytes(next(stream) for _ in range(count)))


def shares_by_holder(graph: MaskingGraph, client: int, root: bytes) -> dict[int, bytes]:
    """Return what each holder of a client's shares has: its share of the key, then its share of the seed."""
    both = [own_shares(which, graph, client, root) for which in ("masks", "self")]
    return {holder: b"".join(shares[graph.place(holder)] for shares in both) for holder in graph.holders(client)}


def share_digest(share: bytes, which: str, graph: MaskingGraph, owner: int, holder: int) -> bytes:
    """Return what the owner of a share publishes of it, so that nobody can give another in its place.

    A share has 256 random bits, so a digest tells no more of it than whether a guess is right.
    """
    return masks.derive(share, "share", which, graph.context, owner, holder)


def share_digests(both: bytes, graph: MaskingGraph, owner: int, holder: int) -> bytes:
    """The digests of a holder's share of the key, then of its share of the seed."""
    halves = {"masks": both[:BYTES], "self": both[BYTES:]}
    return b"".join(share_digest(share, which, graph, owner, holder) for which, share in halves.items())


def encrypted_for(graph: MaskingGraph, client: int, root: bytes, both: Mapping[int, bytes]) -> dict[int, bytes]:
    """The box with a client's two shares for each of its neighbours."""
    return {to: masks.encrypt_box(box_key(root, graph, to, client, to), both[to]) for to in graph.neighbours[client]}


def own_seed(root: bytes, graph: MaskingGraph) -> bytes:
    """The seed of a client's own mask."""
    return masks.derive(root, "self", graph.context)


def rounding_seed(task: bytes, client: int) -> bytes:
    """The seed of a client's stochastic rounding, from the digest of its task: a run that is repeated rounds as before.

    It need not be secret: what is rounded is under masks.
    """
    return masks.derive(task, "rounding", client)


def shown_to(task: Task, secrets: ClientSecrets) -> bytes:
    """The digest of all that a client was shown before it masks, and of what it does: terms, work and task."""
    return masks.derive(task_digest(task), "shown", secrets.terms, secrets.work)


def pair_seed(private: bytes, graph: MaskingGraph, shown: bytes, client: int, other: int) -> bytes:
    """The seed of the mask that two neighbours share, from one's private and the other's public key.

    It belongs to what they were `shown`: the masks of two who were shown different things do not cancel.
    """
    theirs = graph.keys[other][: masks.KEY]
    return masks.agree(private, theirs, "pair", graph.context, shown, *sorted((client, other)))


def box_key(root: bytes, graph: MaskingGraph, other: int, sender: int, reader: int) -> bytes:
    """The key of the box from `sender` to `reader`; `root` is that of one of them, `other` the other one."""
    # sender and reader in order: both directions agree on one secret, and a fixed nonce allows one text for a key
    theirs = graph.keys[other][masks.KEY :]
    return masks.agree(masks.private_key(root, "boxes"), theirs, "box", graph.context, sender, reader)


def proof(seed: bytes) -> bytes:
    """Return what tells whether shares of a client's own seed were right."""
    return masks.derive(seed, "proof")


def round_digest(
    version: int, splits: Sequence[str], members: Sequence[int], promised: Sequence[bytes], work: str
) -> bytes:
    """The digest of one sum, to which keys belong: they are worth nothing in another one.

    Args:
        version: server steps made.
        splits: the rows that it is about, none for training.
        members: who is asked for keys.
        promised: their commitments, each to keys that were made for this sum.
        work: digest of what a member does.
    """
    return masks.derive(b"".join(promised), "round", version, " ".join(splits), work, *members)


def key_claim(client: int, public: bytes, about: bytes, size: int) -> bytes:
    """Return what a client signs before shares are made: that these are its keys for one sum, and what it counts there.

    Args:
        client: its number.
        public: its public keys.
        about: the `round_digest` of the sum.
        size: what it announces that it counts, see `sizes.size_of`.
    """
    return b"keys %d %d:" % (client, size) + about + public


def dispute_claim(graph: MaskingGraph, sender: int, reader: int, box: bytes, digests: bytes) -> bytes:
    """Return what a client signs when a box does not hold the shares that its sender has published digests of.

    The very box and digests are in it, so the sender notices where they are not those that it sent.
    """
    return b"dispute:" + masks.derive(graph.context, "dispute", sender, reader, box, digests)


def survivor_claim(graph: MaskingGraph, shown: bytes, senders: Sequence[int], survivors: Sequence[int]) -> bytes:
    """Return what a client signs before anything is opened: what it was shown, whose boxes and whose masked updates
    there are.

    The context stands for the run's list of clients, their keys and all settings.
    """
    # each list is a word with its length, so that no client can move from one list to the other
    lists = (" ".join(map(str, clients)) for clients in (senders, survivors))
    return b"survivors:" + masks.derive(graph.context, "survivors", shown, *lists)
