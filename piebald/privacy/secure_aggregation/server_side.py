"""Both sides of a round of secure aggregation.

The server relays keys and shares, adds masked updates up, and unmasks the sum.  A client answers queries about keys and
masks its update, the same on every runtime.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from piebald.contracts import (
    SIGNATURE,
    SUM,
    AsksClients,
    Clients,
    ClientSecrets,
    ModelSpec,
    PartialSum,
    ServerContext,
    Split,
    SumDemands,
    Task,
    Update,
)
from piebald.core.errors import Declined
from piebald.core.parameters import nbytes
from piebald.core.randomness import key
from piebald.methods.client_work import ClientWork
from piebald.privacy.secure_aggregation import key_queries, masks
from piebald.privacy.secure_aggregation.key_exchange import ExchangedKeys, KeyRound, asked, exchange_keys
from piebald.privacy.secure_aggregation.key_queries import (
    BOTH,
    DIGEST,
    SENDERS,
    SHARES,
    SIGNED,
    KeyQuery,
    pair_seed,
    proof,
    survivor_claim,
)
from piebald.privacy.secure_aggregation.masks import CONTEXT, MaskingGraph, MasksOverGraph, numbers, rows, texts

Vector = np.ndarray[Any, Any]
Shares = dict[int, dict[int, bytes]]  # by whose they are, and by place
TRAINING = KeyRound()
_ROUGH = 1e-4  # of the range: a standard deviation of the rounding of the mean above which a warning is given


class Confirmation(NamedTuple):
    """The statement of one survivor: its signature, and the digest of what it was shown."""

    signature: bytes
    shown: bytes


class RoundSettings(MasksOverGraph, Protocol):
    """The settings of a round, and how numbers are encoded in it: a `SecureAggregation`."""

    @property
    def bits(self) -> int: ...
    @property
    def largest_share(self) -> float: ...
    @property
    def reach(self) -> float: ...
    @property
    def loss_reach(self) -> float: ...
    @property
    def vectors(self) -> dict[str, tuple[int, ...]] | None: ...

    def heaviest_of(self, graph: MaskingGraph) -> float:
        """What the heaviest member counts, at most."""

    def unit(self, clients: int) -> int:
        """The whole number that stands for the largest number of an update, in a sum of so many clients."""

    def decode(self, total: Vector, clients: int) -> Vector:
        """The numbers of a sum."""

    def numbers(self, spec: ModelSpec) -> int:
        """Return how many numbers of the model are masked and sent."""

    def spread(self, sums: Tensor, context: ServerContext) -> Tensor:
        """Their sums at their places among all shared numbers [s]."""


class SecureRound:
    """One round of secure aggregation (`contracts.KeyAgreement`).

    Attributes:
        absent: who was asked and takes no part, with the reason.
        exchanged: the clients that have exchanged keys and shares, or None where they were too few.
    """

    def __init__(self, transform: RoundSettings, exchanged: ExchangedKeys | None, absent: Mapping[int, str]) -> None:
        self.transform, self.exchanged, self.absent = transform, exchanged, absent

    @classmethod
    def of(
        cls, transform: RoundSettings, clients: Sequence[int], context: AsksClients, about: KeyRound = TRAINING
    ) -> SecureRound:
        """Have clients exchange keys and shares for the sum that `about` describes."""
        try:
            keys = exchange_keys(clients, about, transform, context)
            if len(keys.sent) < max(keys.graph.threshold, transform.least):
                raise Declined(f"only {len(keys.sent)} of {len(clients)} clients exchanged keys")
        except Declined as error:
            return cls(transform, None, dict.fromkeys(clients, f"no secure aggregation: {error}"))
        gone = [client for client in clients if client not in keys.sent]
        unbalanced = (
            f"with its rows and the others', one client could have more than {transform.largest_share:g} of them, "
            "secure_aggregation's largest_share"
        )
        return cls(
            transform,
            keys,
            {client: unbalanced if client in keys.unbalanced else "it did not exchange keys" for client in gone},
        )

    def vectors(self, client: int) -> Mapping[str, Tensor]:
        exchanged = self.exchanged
        if exchanged is None or client not in exchanged.sent:
            return {}
        shown = {owner: both for owner, both in exchanged.shown.get(client, {}).items() if owner in exchanged.sent}
        return {
            CONTEXT: rows([exchanged.graph.context], masks.KEY),
            SENDERS: numbers(sorted(exchanged.sent)),
            key_queries.SHOWN_BY: numbers(sorted(shown)),
            key_queries.SHOWN: rows([shown[owner] for owner in sorted(shown)], BOTH),
        }

    def unmask(self, masked: Mapping[int, Update], context: ServerContext) -> PartialSum | str:
        total = self.total(masked, context)
        return total if isinstance(total, str) else self._pooled(total, len(masked), context)

    def total(self, masked: Mapping[int, Update], context: AsksClients) -> Vector | str:
        """The sum of clients' masked numbers, modulo 2^bits, or why there is none."""
        if self.exchanged is None:
            return "no secure aggregation: no client has keys"
        arrived = sorted(masked)
        try:
            self.exchanged.graph.check_survivors(arrived, self.transform.least)
            signed = self._confirmed(self.exchanged, arrived, context)
            shares = self._shares(self.exchanged, arrived, signed, context)  # first: clients say who was shown what
            return self._sum(self.exchanged, masked, shares, _common(signed, self.exchanged.graph, context), context)
        except Declined as error:
            return f"no secure aggregation: {error}"

    # -- opening

    def _confirmed(
        self, exchanged: ExchangedKeys, arrived: Sequence[int], context: AsksClients
    ) -> Mapping[int, Confirmation]:
        """Return what survivors have signed about their list.

        Raises:
            Declined: they are too few.
        """
        graph = exchanged.graph
        vectors = {CONTEXT: rows([graph.context], masks.KEY), key_queries.SURVIVORS: numbers(arrived)}
        answers = asked(context, key_queries.ConfirmSurvivors(), dict.fromkeys(arrived, vectors))
        signed: dict[int, Confirmation] = {}
        for client, answer in answers.items():
            signature, digest = texts(answer[SIGNED], SIGNATURE)[0], texts(answer[DIGEST], masks.KEY)[0]
            # by the digest that the client states itself: who was shown something else is found out in `_common`
            claim = survivor_claim(graph, digest, sorted(exchanged.sent), arrived)
            if context.check_signature(client, claim, signature):
                signed[client] = Confirmation(signature, digest)
            else:
                context.exclude_client(client, "it did not sign the list of those who arrived")
        if len(signed) < graph.quorum:
            missing = _named([client for client in arrived if client not in signed])
            raise Declined(
                f"{len(signed)} of {len(arrived)} clients confirmed who arrived, it takes {graph.quorum}; {missing} "
                "did not"
            )
        return signed

    def _shares(
        self,
        exchanged: ExchangedKeys,
        arrived: Sequence[int],
        signed: Mapping[int, Confirmation],
        context: AsksClients,
    ) -> Shares:
        """The right shares by whose they are and by place: of seeds for those who arrived, of keys for the others."""
        graph, present = exchanged.graph, {*arrived}
        vectors = {
            CONTEXT: rows([graph.context], masks.KEY),
            key_queries.SURVIVORS: numbers(arrived),
            key_queries.SIGNERS: numbers(sorted(signed)),
            SIGNED: rows([signed[client].signature for client in sorted(signed)], SIGNATURE),
            DIGEST: rows([signed[client].shown for client in sorted(signed)], masks.KEY),
        }
        shares: Shares = {}
        for holder, answer in asked(context, key_queries.Unmasking(), dict.fromkeys(arrived, vectors)).items():
            # the order in which a client gives them (`key_queries._shares`): shares travel without names
            owners, parts = sorted((*exchanged.partners(holder), holder)), texts(answer[SHARES], key_queries.BYTES)
            if len(owners) != len(parts):
                context.exclude_client(holder, f"it gave {len(parts)} shares of {len(owners)}")
                # no reason to stop: a threshold of the others' shares opens each mask
                continue
            for owner, share in zip(owners, parts, strict=True):
                if exchanged.right(holder, owner, "self" if owner in present else "masks", share):
                    shares.setdefault(owner, {})[graph.place(holder)] = share
                else:
                    context.exclude_client(holder, f"it gave another share of client {owner} than it had got")
        return shares

    def _sum(
        self, exchanged: ExchangedKeys, masked: Mapping[int, Update], shares: Shares, shown: bytes, context: AsksClients
    ) -> Vector:
        """The sum of what was masked, unmasked.

        Raises:
            Declined: shares are missing, or are those of something else.
        """
        graph = exchanged.graph
        total = np.zeros(masked[min(masked)].vectors[SUM].shape, dtype=f"<u{self.transform.bits // 8}")
        away: list[bytes] = []
        back: list[bytes] = []
        for client, update in masked.items():
            total += update.vectors[SUM].contiguous().numpy().view(total.dtype)
            seed = _secret(graph, client, shares)
            if proof(seed) != exchanged.sent[client].proof:
                raise _blamed(client, "the seed of its mask", context)
            away.append(seed)
        for lost in exchanged.sent.keys() - masked.keys():
            # if none arrived, its masks are in no vector of this sum, so its key need not be opened
            near = [client for client in exchanged.partners(lost) if client in masked]
            if not near:
                continue
            private = _secret(graph, lost, shares)
            if masks.public_key(private) != graph.keys[lost][: masks.KEY]:
                raise _blamed(lost, "its key", context)
            for client in near:  # undo what `mask` did at this client
                (away if lost > client else back).append(pair_seed(private, graph, shown, lost, client))
        masks.add_masks(total, back, away)
        return total

    def _pooled(self, total: Vector, arrived: int, context: ServerContext) -> PartialSum | str:
        transform, shared = self.transform, self.transform.numbers(context.spec)
        assert self.exchanged is not None
        clients, heaviest = len(self.exchanged.graph.members), transform.heaviest_of(self.exchanged.graph)
        decoded = torch.from_numpy(transform.decode(total, clients))
        share, weighted, rest = decoded[0].item(), decoded[1 : 2 + shared].abs(), decoded[2 + shared :].abs()
        off = clients / transform.unit(clients)  # by rounding, at most
        if share <= 0:
            return "no secure aggregation: the weights of those who arrived add up to nothing"
        # |x w| is at most w for each client, hence in the sums too; both sides were rounded, hence twice `off`
        if share > arrived + off or bool((weighted > share + 2 * off).any()) or bool((rest > arrived + off).any()):
            return "no secure aggregation: it is more than clients that keep to the range can add up to"
        weight = share * heaviest
        if 2 * off / share > _ROUGH * math.sqrt(clients):
            warnings.warn(
                f"secure_aggregation rounds the mean by more than {_ROUGH * transform.reach:g}, because weights are "
                f"small beside its heaviest = {heaviest:g}: set that to the largest weight of a client, or "
                "set bits = 64",
                RuntimeWarning,
                stacklevel=2,
            )
        loss = decoded[1].item() / share * transform.loss_reach
        body = decoded[2:] * transform.reach
        vectors = {"model": transform.spread((body[:shared] * heaviest).float(), context)}
        index = shared
        for name, shape in (transform.vectors or {}).items():
            count = math.prod(shape)
            vectors[name] = body[index : index + count].view(shape).float()
            index += count
        return PartialSum(weight, vectors, True, loss)


def _common(signed: Mapping[int, Confirmation], graph: MaskingGraph, context: AsksClients) -> bytes:
    """The digest of what all were shown, as they have signed.

    Raises:
        Declined: somebody has signed another; where a quorum agrees, it is excluded.
    """
    shown = [confirmation.shown for confirmation in signed.values()]
    digest = max(shown, key=shown.count)
    unlike = [client for client, confirmation in signed.items() if confirmation.shown != digest]
    if unlike and len(signed) - len(unlike) >= graph.quorum:
        for client in unlike:
            context.exclude_client(client, "it signed that it was shown something else than the others")
    if unlike:
        raise Declined(f"{_named(unlike)} signed that other terms, another model or another question came")
    return digest


def _secret(graph: MaskingGraph, owner: int, shares_of: Shares) -> bytes:
    """The secret of which there are enough shares."""
    shares, needed = shares_of.get(owner, {}), graph.threshold
    if len(shares) < needed:
        missing = _named([holder for holder in graph.holders(owner) if graph.place(holder) not in shares])
        raise Declined(
            f"{len(shares)} right shares of the mask of client {owner} came, it takes {needed}; {missing} gave none"
        )
    # more than a threshold only cost time; always the lowest places, for the cache of weights
    return key_queries.combine(dict(sorted(shares.items())[:needed]))


def _blamed(client: int, fault: str, context: AsksClients) -> Declined:
    """Exclude who shared something else than its secret: all shares are those of which it has published digests."""
    context.exclude_client(client, f"it shared something else than {fault}")
    return Declined(f"client {client} shared something else than {fault}, so the sum cannot be opened")


def _named(clients: Sequence[int]) -> str:
    return f"client{'s' if len(clients) > 1 else ''} {', '.join(map(str, clients))}"


ANY_SUM = SumDemands(least=2, threshold=0.5, colluding=0, largest_share=1)  # what clients of a simulation demand
Outcome = tuple[Update | None, str | None]  # an update, or why there is none


def counted_rows(work: ClientWork, clients: Clients, client: int) -> dict[Split, float]:
    """Return how many rows of each split a client has; of those to train on, how much they count."""
    others: tuple[Split, ...] = ("validation", "test")
    held = {split: clients.size(client, split) for split in others}
    sizes = {split: len(clients.rows(client, split)) if size is None else size for split, size in held.items()}
    return {"train": work.counted(clients.rows(client, "train")), **sizes}


def replied(task: Task, work: ClientWork, secrets: ClientSecrets) -> Outcome:
    """The answer to a question about keys."""
    masking, query = work.masking, task.query
    if masking is None or not isinstance(query, KeyQuery):
        return None, "this run masks nothing"
    try:
        vectors = query.reply(task.vectors, secrets, masking)
    except Declined as error:
        return None, str(error)
    return Update(vectors, 0, 0, {}, nbytes=nbytes(vectors)), None


def masked(update: Update, task: Task, work: ClientWork, secrets: ClientSecrets) -> Outcome:
    """Return what leaves instead of a trained update: the update itself where nothing masks."""
    masking = work.masking
    if masking is None:
        return update, None
    if task.query is None:
        update = replace(update, vectors=masking.bounded(update.vectors, work.of_task(task).layout.shared_trained))
    places = work.masked_places(task.client, task.version)
    if places is not None:
        # before masking, since masked numbers cannot be left out: all clients send the same ones, so their masks cancel
        vectors = {**update.vectors, "model": update.vectors["model"][torch.from_numpy(places)]}
        update = replace(update, vectors=vectors)
    try:
        return masking.mask(update, task, secrets), None
    except Declined as error:
        return None, str(error)


class SimulatedSigner:
    """Signs for one client of a simulation, and checks the others (`contracts.Signer`).

    Signatures are keyed digests with keys that follow from the run's seed, so the protocol is the same as among real
    sites; whoever knows the seed could make them.
    """

    def __init__(self, seed: int, client: int) -> None:
        self._seed, self._client = seed, client

    def sign(self, text: bytes) -> bytes:
        return _signature(self._seed, self._client, text)

    def check(self, client: int, text: bytes, signature: bytes) -> bool:
        return signature == _signature(self._seed, client, text)

    def name(self, client: int) -> str:
        return f"client {client}"


@lru_cache(maxsize=4096)
def _signature(seed: int, client: int, text: bytes) -> bytes:
    """A client's simulated signature; kept, since every client checks those of all others."""
    secret = key("signature", seed, client).to_bytes(8)
    return hashlib.blake2b(text, key=secret).digest().ljust(SIGNATURE, b"\0")


def repeatable(*words: int | str) -> Callable[[int], bytes]:
    """Random bytes for a simulation: they come from these words, so that a run can be repeated."""
    calls = 0

    def draw(count: int) -> bytes:
        nonlocal calls
        # counted, so that several draws for one question differ
        calls += 1
        return hashlib.shake_256(key("secrets", calls, *words).to_bytes(8)).digest(count)

    return draw
