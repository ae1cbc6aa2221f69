"""Queries of secure aggregation around training: keys, shares of them, one list of survivors, and the shares for it.

A client's side of a sum is a small state machine over `Secrets.kept`:

    commitment  a fresh root; what was kept before is gone
    keys        one list of commitments for a root, ever
    shares      one list of clients for a root, ever (the same list is answered the same way)
    check       shares that came are held if they are what their sender has published digests of (`CheckShares`)
    reveal      shares are shown to the server if their holder has signed that it did not get them
    mask        one vector and one list of those who sent shares for a root, ever (`transform.SecureAggregation.mask`)
    survivors   one list of survivors is signed for a root, ever, and only after masking (`key_exchange`)
    opening     of the list that a quorum has signed; then the root is deleted

so honest clients give shares for one list of survivors, the same at all of them, whatever the server shows to whom.

From one sum's root a client derives its public keys, shares of its secrets, seeds, boxes and claims.  Shares are by
Shamir's secret sharing: any `threshold` of them give the secret back, fewer say nothing about it.  A secret is the
constant term of a random polynomial of degree threshold - 1 over a prime field, share x its value at x (Shamir 1979).
The field is just larger than 32 bytes, so a key is one element of it.

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

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import ClassVar, NamedTuple

from pydantic import Field
from torch import Tensor

from piebald.contracts import MASKING, SIGNATURE, ClientSecrets, Query, ResultForm, Split, Task, Update, task_digest
from piebald.contracts.data import ModelSpec
from piebald.core.errors import Declined
from piebald.methods.transforms.base import MaskingTransform
from piebald.privacy.secure_aggregation import masks
from piebald.privacy.secure_aggregation.masks import (
    ABOUT,
    CONTEXT,
    KEYS,
    MEMBERS,
    SIZE,
    SIZES,
    MaskingGraph,
    MasksOverGraph,
    clients_in,
    demands_reject_reason,
    numbers,
    packed_sizes,
    rows,
    sizes_in,
    texts,
)

PRIME = 2**256 + 297  # the smallest prime above 2**256


BYTES = 33  # of a share


def share(secret: bytes, places: list[int], threshold: int, draw: Callable[[int], bytes]) -> dict[int, bytes]:
    """A share for each place.

    Args:
        secret: 32 bytes.
        places: the x of each share: different whole numbers from 1 up.
        threshold: so many shares are needed, at most as many as there are.
        draw: that many random bytes.
    """
    # 16 bytes more than an element has, so that no element is likelier than another by more than 2**-120
    coefficients = [int.from_bytes(draw(BYTES + 16)) % PRIME for _ in range(threshold - 1)]
    polynomial = [int.from_bytes(secret), *coefficients]
    return {place: _value(polynomial, place).to_bytes(BYTES) for place in places}


def combine(shares: Mapping[int, bytes]) -> bytes:
    """The secret behind at least `threshold` shares by place; some other 32 bytes where a share is wrong."""
    # sorted, so that the same holders hit the cache of `_weights` in whatever order they answered
    places = tuple(sorted(shares))
    secret = sum(w * int.from_bytes(shares[x]) for x, w in zip(places, _weights(places), strict=True)) % PRIME
    # wrong shares may give one of the 297 elements beyond 32 bytes, which to_bytes would refuse
    return (secret % 2**256).to_bytes(32)


def _value(polynomial: list[int], x: int) -> int:
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * x + coefficient) % PRIME
    return value


# the survivors of one sum open many secrets with the same places
@lru_cache(maxsize=256)
def _weights(places: tuple[int, ...]) -> list[int]:
    """Lagrange's weights at 0: the product over the other places y of y / (y - x)."""
    weights = []
    for x in places:
        above = below = 1
        for y in places:
            if y != x:
                above, below = above * y % PRIME, below * (y - x) % PRIME
        # one inverse for each weight, not for each factor: an inverse costs many times a product
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return weights


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
    # as many bytes as `share` draws; from the root, so that a question asked twice gets the same shares
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
        size: what it announces that it counts, see `transform.size_of`.
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


COMMITMENTS = MASKING + "commitments"
SENDERS, BOXES, SHARES = MASKING + "senders", MASKING + "boxes", MASKING + "shares"
SIGNED = MASKING + "signed"  # signatures
DIGEST = MASKING + "digest"  # of what a client was shown
PUBLISHED, PROOF = MASKING + "published", MASKING + "proof"  # digests of a client's shares, and of its own seed
COMMITTED, MASKED, SPLITS, VERSION = "committed", "masked", "splits", "version"  # what a client keeps, besides
ALL_SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class KeyQuery(Query):
    """A question about keys, answered by each client from what it keeps secret."""

    axis = "query"
    answers: ClassVar[Mapping[str, int]]  # the bytes of a row of what is answered, by name
    alone: ClassVar[bool] = False  # whether each of these is one row

    def reply(
        self, vectors: Mapping[str, Tensor], secrets: ClientSecrets, masking: MaskingTransform
    ) -> Mapping[str, Tensor]:
        """One client's answer to a question that brought these `vectors`; `masking` is the recipe's.

        Raises:
            Declined: the client does not do that.
        """
        raise NotImplementedError

    def answer_form(self, spec: ModelSpec, rows: Mapping[Split, int]) -> ResultForm:
        return ResultForm(None, (), 0, 0)

    def reject_reason(self, answer: Update, spec: ModelSpec) -> str | None:
        if answer.vectors.keys() != self.answers.keys():
            return f"answered with {', '.join(answer.vectors) or 'nothing'}"
        try:
            counts = {name: len(texts(answer.vectors[name], length)) for name, length in self.answers.items()}
        except Declined as error:
            return str(error)
        wrong = [f"{count} rows of {name}" for name, count in counts.items() if self.alone and count != 1]
        return f"answered with {wrong[0]}" if wrong else None


class CommitKeys(KeyQuery):
    """Before keys are shown: a client makes fresh ones and commits to them.

    Keys are signed for the sum that the list of commitments defines, in which each client finds its own: keys that were
    signed for another sum are worth nothing in this one.  With few neighbours, the order of the ring follows from all
    keys, and each of them is fixed before any is shown, so whoever speaks last cannot choose keys that put a client
    among neighbours who collude.
    """

    answers: ClassVar = {COMMITMENTS: masks.KEY}
    alone = True

    def reply(
        self, vectors: Mapping[str, Tensor], secrets: ClientSecrets, masking: MaskingTransform
    ) -> Mapping[str, Tensor]:
        return {COMMITMENTS: rows([commitment(_fresh_keys(secrets))], masks.KEY)}


class AdvertiseKeys(KeyQuery):
    """A client tells the public keys that it has committed to, and what it counts in the sum.

    A client without rows that the sum is about tells none: it would count as a member and hide nobody.

    Attributes:
        version: server steps made.
        splits: the rows that the sum is about; none for training.
    """

    answers: ClassVar = {KEYS: 2 * masks.KEY, SIZES: SIZE, SIGNED: SIGNATURE}
    alone = True

    version: int = Field(default=0, ge=0)
    splits: tuple[Split, ...] = ()

    def reply(
        self, vectors: Mapping[str, Tensor], secrets: ClientSecrets, masking: MaskingTransform
    ) -> Mapping[str, Tensor]:
        public = public_keys(root_of(secrets))
        members, promised = clients_in(vectors.get(MEMBERS)), texts(vectors.get(COMMITMENTS), masks.KEY)
        # not strict: the digest below covers both lists, and `ShareKeys` finds out where they do not match
        if (secrets.client, commitment(public)) not in zip(members, promised, strict=False):
            raise Declined("the list of commitments does not have this client's newest one")
        about = round_digest(self.version, self.splits, members, promised, secrets.work)
        # with several lists for the same keys, a server could try several rings and keep the one that suits it
        if ABOUT in secrets.kept and texts(secrets.kept[ABOUT], masks.KEY) != [about]:
            raise Declined("there was another list of commitments for the same keys")
        fewest = min(secrets.rows.get(split, 0) for split in self.splits or ("train",))
        size = over_graph(masking).size(fewest, bool(self.splits))
        secrets.kept.update({ABOUT: rows([about], masks.KEY), COMMITTED: numbers(members)})
        secrets.kept[SPLITS] = numbers(sorted(ALL_SPLITS.index(split) for split in self.splits))
        secrets.kept[VERSION] = numbers([self.version])
        signature = secrets.signer.sign(key_claim(secrets.client, public, about, size))
        return {KEYS: rows([public], 2 * masks.KEY), SIZES: packed_sizes([size]), SIGNED: rows([signature], SIGNATURE)}


class ShareKeys(KeyQuery):
    """A client gets all public keys and sends its neighbours shares of its own secrets.

    They are the key of its pairwise masks and the seed of its own mask, in boxes that the server cannot open.  For
    everybody to see come digests of all shares, and of the seed: who gives other shares later, or has shared something
    else, is found out.
    """

    answers: ClassVar = {SHARES: BOX, PUBLISHED: DIGESTS, PROOF: masks.KEY}

    def reply(
        self, vectors: Mapping[str, Tensor], secrets: ClientSecrets, masking: MaskingTransform
    ) -> Mapping[str, Tensor]:
        graph, root = listed(vectors, masking), root_of(secrets)
        if graph.keys.get(secrets.client) != public_keys(root):
            raise Declined("the list of clients does not have this client's newest keys")
        if CONTEXT in secrets.kept and secrets.kept[CONTEXT].numpy().tobytes() != graph.context:
            raise Declined("there was another list of clients for the same keys")
        committed = clients_in(secrets.kept.get(COMMITTED))
        # on a ring, who leaves chooses among rings; signatures say that keys are those of the list of commitments
        if {*graph.members} - {*committed} or (over_graph(masking).neighbours and list(graph.members) != committed):
            raise Declined("the keys are not those of all who committed to keys")
        questions = len(secrets.kept[SPLITS]) > 0
        reason = demands_reject_reason(graph, secrets.demands)
        if reason := reason or (over_graph(masking).unbalanced_reason(graph) if questions else None):
            raise Declined(reason)
        _check_signatures(vectors, graph, secrets)
        if texts(secrets.kept[ABOUT], masks.KEY) != [graph.about]:
            raise Declined("the list of clients is for another sum than this client's keys")
        # kept only after every check: a refused list must not bind these keys to its context
        secrets.kept.update({CONTEXT: rows([graph.context], masks.KEY), **graph.vectors()})
        client = secrets.client
        both = shares_by_holder(graph, client, root)
        boxes = encrypted_for(graph, client, root, both)
        published = [share_digests(both[holder], graph, client, holder) for holder in graph.holders(client)]
        return {
            SHARES: rows([boxes[to] for to in graph.neighbours[client]], BOX),
            PUBLISHED: rows(published, DIGESTS),
            PROOF: rows([proof(own_seed(root, graph))], masks.KEY),
        }


# ------------------------------------------------------------------------------------------------------ what is checked


def known_graph(secrets: ClientSecrets, vectors: Mapping[str, Tensor], masking: MaskingTransform) -> MaskingGraph:
    """The graph that a client gave shares to, if the server means the same one and it is not open yet."""
    check_context(secrets, vectors)
    # fails after the opening, when the root is deleted: no question about this sum is answered then
    root_of(secrets)
    return listed(secrets.kept, masking)


def check_context(secrets: ClientSecrets, vectors: Mapping[str, Tensor]) -> None:
    """Refuse what is about another sum than the client's keys."""
    contexts = texts(vectors.get(CONTEXT), masks.KEY)
    if CONTEXT not in secrets.kept or texts(secrets.kept[CONTEXT], masks.KEY) != contexts:
        raise Declined("this client's keys are of another sum")


def partners_among(senders: list[int], graph: MaskingGraph, client: int) -> list[int]:
    """The neighbours of a client among all who sent shares.

    Raises:
        Declined: it is no list of senders for that client, or too short.
    """
    if client not in senders or not {*senders} <= {*graph.members}:
        raise Declined("the list of those who sent shares is not of this sum")
    partners = [neighbour for neighbour in graph.neighbours[client] if neighbour in {*senders}]
    # a client holds a share of its own secrets, too
    if len(partners) + 1 < graph.threshold:
        raise Declined(f"{len(partners)} neighbours sent shares, too few for a threshold of {graph.threshold}")
    return partners


def listed(vectors: Mapping[str, Tensor], masking: MaskingTransform) -> MaskingGraph:
    """The graph of the clients in some vectors."""
    about = texts(vectors.get(ABOUT), masks.KEY)
    return over_graph(masking).graph(
        clients_in(vectors.get(MEMBERS)), texts(vectors.get(KEYS), 2 * masks.KEY), sizes_in(vectors.get(SIZES)),
        about[0] if len(about) == 1 else b"",
    )  # fmt: skip


def check_task(task: Task, secrets: ClientSecrets) -> None:
    """Refuse a task about other rows, or of another version, than those that a client's keys are for.

    Raises:
        Declined: it is one.
    """
    if secrets.kept[VERSION].tolist() != [task.version]:
        raise Declined(f"this client's keys are for a sum of another version than {task.version}")
    read = set() if task.query is None else task.query.rows_read(personal=False)
    if {ALL_SPLITS.index(split) for split in read} != {*secrets.kept[SPLITS].tolist()}:
        raise Declined("this client's keys are for a sum about other rows")


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


def _check_signatures(vectors: Mapping[str, Tensor], graph: MaskingGraph, secrets: ClientSecrets) -> None:
    """Refuse a list in which a client has not signed its keys for the sum that this client's are for."""
    signed = texts(vectors.get(SIGNED), SIGNATURE)
    if len(signed) != len(graph.members):
        raise Declined(f"{len(signed)} signatures came with the keys of {len(graph.members)} clients")
    (about,) = texts(secrets.kept[ABOUT], masks.KEY)
    for client, signature in zip(graph.members, signed, strict=True):
        claim = key_claim(client, graph.keys[client], about, graph.sizes[client])
        if not secrets.signer.check(client, claim, signature):
            named = secrets.signer.name(client)
            raise Declined(
                f"the keys of {named} are not signed by its site for this run and its terms, and for this sum: they "
                "are not its keys, or those of another round, or it was shown other terms"
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

    answers: ClassVar = {SHARES: BYTES}

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
        shares[sender] = held[sender][BYTES:] if sender in present else held[sender][:BYTES]
    return rows([shares[owner] for owner in sorted(shares)], BYTES)
