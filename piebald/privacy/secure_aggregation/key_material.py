"""What a client derives from the root of one sum: its public keys, shares of its secrets, seeds, boxes, claims."""

from __future__ import annotations

from collections.abc import Sequence

from piebald.contracts import ClientSecrets
from piebald.errors import Declined
from piebald.privacy.secure_aggregation import masks, shamir
from piebald.privacy.secure_aggregation.masking_graph import MaskingGraph, texts

BOX = 2 * shamir.BYTES + masks.TAG  # bytes of two shares for one neighbour
ROOT = "root"  # the name under which a client keeps it


def root_of(secrets: ClientSecrets) -> bytes:
    """What a client's secrets of this sum come from.

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
    """What a client sends before anybody has shown keys: it can show no other keys afterwards."""
    return masks.derive(public, "commitment")


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


def rounding_seed(root: bytes, graph: MaskingGraph) -> bytes:
    """The seed of a client's stochastic rounding: the same update is rounded the same way again."""
    return masks.derive(root, "rounding", graph.context)


def pair_seed(private: bytes, graph: MaskingGraph, client: int, other: int) -> bytes:
    """The seed of the mask that two neighbours share, from one's private and the other's public key."""
    return masks.agree(private, graph.keys[other][: masks.KEY], "pair", graph.context, *sorted((client, other)))


def box_key(root: bytes, graph: MaskingGraph, other: int, sender: int, reader: int) -> bytes:
    """The key of the box from `sender` to `reader`; `root` is that of one of them, `other` the other one."""
    theirs = graph.keys[other][masks.KEY :]
    return masks.agree(masks.private_key(root, "boxes"), theirs, "box", graph.context, sender, reader)


def proof(seed: bytes) -> bytes:
    """What tells whether shares of a client's own seed were right."""
    return masks.derive(seed, "proof")


def key_claim(client: int, public: bytes) -> bytes:
    """What a client signs before shares are made: that these are its keys."""
    return b"keys %d:" % client + public


def survivor_claim(graph: MaskingGraph, senders: Sequence[int], survivors: Sequence[int]) -> bytes:
    """What a client signs before anything is opened: whose boxes and whose masked updates it was told of.

    The context stands for the run's list of clients, their keys and all settings.
    """
    lists = (" ".join(map(str, one)) for one in (senders, survivors))
    return b"survivors:" + masks.derive(graph.context, "survivors", *lists)
