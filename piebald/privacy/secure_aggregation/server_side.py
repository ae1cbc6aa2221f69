"""The server's side of secure aggregation: it relays keys and shares, adds masked updates up, and unmasks the sum."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from piebald.contracts import SIGNATURE, PartialSum, Query, QueryRequest, ServerContext, Update
from piebald.errors import Declined
from piebald.privacy.secure_aggregation import masks, shamir
from piebald.privacy.secure_aggregation.key_material import BOX, pair_seed, proof
from piebald.privacy.secure_aggregation.key_queries import (
    BOXES,
    COMMITMENTS,
    PROOF,
    SENDERS,
    SHARES,
    SIGNED,
    SUM,
    AdvertiseKeys,
    CommitKeys,
    ShareKeys,
)
from piebald.privacy.secure_aggregation.masking_graph import (
    CONTEXT,
    KEYS,
    MEMBERS,
    MaskingGraph,
    numbers,
    rows,
    texts,
)
from piebald.privacy.secure_aggregation.unmasking import SIGNERS, SURVIVORS, ConfirmSurvivors, Unmasking

if TYPE_CHECKING:
    from piebald.model_spec import ModelSpec

Vector = np.ndarray[Any, Any]


class SumSettings(Protocol):
    """The settings of a round, and how numbers are encoded in it: a `SecureAggregation`."""

    @property
    def least(self) -> int: ...
    @property
    def neighbours(self) -> int | None: ...
    @property
    def bits(self) -> int: ...
    @property
    def reach(self) -> float: ...
    @property
    def loss_reach(self) -> float: ...
    @property
    def heaviest(self) -> float | None: ...
    @property
    def vectors(self) -> dict[str, tuple[int, ...]] | None: ...

    def graph(self, members: Sequence[int], public: Sequence[bytes]) -> MaskingGraph:
        """The masking graph of these clients."""

    def unit(self, clients: int) -> int:
        """The whole number that stands for the largest number of an update, in a sum of so many clients."""

    def decode(self, total: Vector, clients: int) -> Vector:
        """The numbers of a sum."""


class SecureRound:
    """One round of secure aggregation (`contracts.KeyAgreement`).

    Attributes:
        absent: who was asked and takes no part, with the reason.
        graph: the clients that sent their keys, or None where there were too few.
        boxes: what each client was sent, by sender, for those that take part.
    """

    def __init__(self, transform: SumSettings, graph: MaskingGraph | None, boxes: dict[int, dict[int, bytes]]) -> None:
        self.transform, self.graph, self.boxes = transform, graph, boxes
        self.absent: dict[int, str] = {}

    @classmethod
    def of(cls, transform: SumSettings, clients: Sequence[int], context: ServerContext) -> SecureRound:
        """Have clients exchange keys and shares."""
        told = _keys(transform.neighbours is not None, clients, context)
        members = sorted(told)
        try:
            graph = transform.graph(members, [texts(told[client][KEYS], 2 * masks.KEY)[0] for client in members])
        except Declined as error:
            return cls._given_up(transform, clients, f"{len(clients)} clients were asked for keys: {error}")
        about = {**graph.vectors(), SIGNED: torch.cat([told[client][SIGNED] for client in members])}
        shares = _asked(context, ShareKeys(), dict.fromkeys(members, about), SHARES, BOX)
        boxes: dict[int, dict[int, bytes]] = {client: {} for client in shares}
        for sender, sent in shares.items():
            if len(sent) != len(graph.neighbours[sender]):
                del boxes[sender]
        for sender in boxes:
            for reader, box in zip(graph.neighbours[sender], shares[sender], strict=True):
                if reader in boxes:
                    boxes[reader][sender] = box
        if len(boxes) < max(graph.threshold, transform.least):
            return cls._given_up(transform, clients, f"only {len(boxes)} of {len(clients)} clients exchanged keys")
        made = cls(transform, graph, boxes)
        made.absent = {client: "it did not exchange keys" for client in clients if client not in boxes}
        return made

    @classmethod
    def _given_up(cls, transform: SumSettings, clients: Sequence[int], reason: str) -> SecureRound:
        made = cls(transform, None, {})
        made.absent = dict.fromkeys(clients, f"no secure aggregation: {reason}")
        return made

    def vectors(self, client: int) -> Mapping[str, Tensor]:
        if self.graph is None or client not in self.boxes:
            return {}
        sent = self.boxes[client]
        return {
            CONTEXT: rows([self.graph.context], masks.KEY),
            SENDERS: numbers(sorted(self.boxes)),
            BOXES: rows([sent[sender] for sender in sorted(sent)], BOX),
        }

    def unmask(self, masked: Mapping[int, Update], context: ServerContext) -> PartialSum | str:
        graph = self.graph
        if graph is None:
            return "no secure aggregation: no client has keys"
        arrived = sorted(masked)
        try:
            graph.check_survivors(arrived, self.transform.least)
            known = self._shares(arrived, self._confirmed(arrived, context), context)
            total = self._sum(masked, known)
        except Declined as error:
            return f"no secure aggregation: {error}"
        return self._pooled(total, len(arrived), context.spec)

    # -- opening

    def _confirmed(self, arrived: Sequence[int], context: ServerContext) -> Mapping[int, bytes]:
        """The signatures of survivors for their list.

        Raises:
            Declined: they are too few.
        """
        assert self.graph is not None
        about = {CONTEXT: rows([self.graph.context], masks.KEY), SURVIVORS: numbers(arrived)}
        signed = _asked(context, ConfirmSurvivors(), dict.fromkeys(arrived, about), SIGNED, SIGNATURE)
        if len(signed) < self.graph.quorum:
            raise Declined(
                f"{len(signed)} of {len(arrived)} clients confirmed who arrived, it takes {self.graph.quorum}"
            )
        return {client: one[0] for client, one in signed.items()}

    def _shares(
        self, arrived: Sequence[int], signed: Mapping[int, bytes], context: ServerContext
    ) -> dict[int, dict[int, bytes]]:
        """The shares by whose they are and by place: of own masks for those who arrived, of keys for the others."""
        assert self.graph is not None
        about = {
            CONTEXT: rows([self.graph.context], masks.KEY),
            SURVIVORS: numbers(arrived),
            SIGNERS: numbers(sorted(signed)),
            SIGNED: rows([signed[client] for client in sorted(signed)], SIGNATURE),
        }
        answers = _asked(context, Unmasking(), dict.fromkeys(arrived, about), SHARES, shamir.BYTES)
        known: dict[int, dict[int, bytes]] = {}
        for holder, given in answers.items():
            owners = sorted((*self.boxes[holder], holder))
            if len(owners) == len(given):
                for owner, share in zip(owners, given, strict=True):
                    known.setdefault(owner, {})[self.graph.place(holder)] = share
        return known

    def _sum(self, masked: Mapping[int, Update], known: Mapping[int, Mapping[int, bytes]]) -> Vector:
        """The sum of what was masked, unmasked.

        Raises:
            Declined: shares are missing or wrong.
        """
        graph = self.graph
        assert graph is not None
        total = np.zeros(masked[min(masked)].vectors[SUM].shape, dtype=f"<u{self.transform.bits // 8}")
        away: list[bytes] = []
        back: list[bytes] = []
        for client, update in masked.items():
            total += update.vectors[SUM].contiguous().numpy().view(total.dtype)
            seed = self._secret(client, known)
            if proof(seed) != texts(update.vectors[PROOF], masks.KEY)[0]:
                raise Declined("a client sent wrong shares")
            away.append(seed)
        for lost in self.boxes.keys() - masked.keys():
            near = [client for client in graph.neighbours[lost] if client in masked and lost in self.boxes[client]]
            if not near:
                continue
            private = self._secret(lost, known)
            if masks.public_key(private) != graph.keys[lost][: masks.KEY]:
                raise Declined("a client sent wrong shares")
            for client in near:  # undo what `mask` did at this client
                (away if lost > client else back).append(pair_seed(private, graph, lost, client))
        masks.add_masks(total, back, away)
        return total

    def _secret(self, owner: int, known: Mapping[int, Mapping[int, bytes]]) -> bytes:
        assert self.graph is not None
        shares, wanted = known.get(owner, {}), self.graph.threshold
        if len(shares) < wanted:
            raise Declined(f"{len(shares)} shares of a mask came, it takes {wanted}")
        return shamir.combine(dict(sorted(shares.items())[:wanted]))

    def _pooled(self, total: Vector, arrived: int, spec: ModelSpec) -> PartialSum | str:
        transform, shared = self.transform, spec.layout.shared
        assert transform.heaviest is not None
        assert self.graph is not None
        clients = len(self.graph.members)
        decoded = torch.from_numpy(transform.decode(total, clients))
        share, weighted, others = decoded[0].item(), decoded[1 : 2 + shared].abs(), decoded[2 + shared :].abs()
        off = clients / transform.unit(clients)  # by rounding, at most
        if share <= 0:
            return "no secure aggregation: the weights of those who arrived add up to nothing"
        if share > arrived + off or bool((weighted > share + 2 * off).any()) or bool((others > arrived + off).any()):
            return "no secure aggregation: it is more than clients that keep to the range can add up to"
        weight = share * transform.heaviest
        loss = decoded[1].item() / share * transform.loss_reach
        body = decoded[2:] * transform.reach
        vectors = {"model": (body[:shared] * transform.heaviest).float()}
        place = shared
        for name, shape in (transform.vectors or {}).items():
            count = math.prod(shape)
            vectors[name] = body[place : place + count].view(shape).float()
            place += count
        return PartialSum(weight, vectors, True, loss)


def _keys(commit: bool, clients: Sequence[int], context: ServerContext) -> Mapping[int, Mapping[str, Tensor]]:
    """What clients answer about their keys; where they commit to them before, all of these must answer.

    If one is gone in between, the others begin again without it: who could choose whether its keys count could choose
    among rings.
    """
    asked = sorted(clients)
    while commit and asked:
        promised = _asked(context, CommitKeys(), {client: {} for client in asked}, COMMITMENTS, masks.KEY)
        about = {
            MEMBERS: numbers(sorted(promised)),
            COMMITMENTS: rows([promised[client][0] for client in sorted(promised)], masks.KEY),
        }
        told = _told(context, AdvertiseKeys(), dict.fromkeys(sorted(promised), about))
        if told.keys() == promised.keys():
            return told
        asked = sorted(told)
    return {} if commit else _told(context, AdvertiseKeys(), {client: {} for client in asked})


def _told(
    context: ServerContext, query: Query, about: Mapping[int, Mapping[str, Tensor]]
) -> dict[int, Mapping[str, Tensor]]:
    """What clients answered, of those that answered."""
    answers = context.query([QueryRequest(client, query, vectors) for client, vectors in about.items()])
    return {client: answer.vectors for client, answer in zip(about, answers, strict=True) if answer is not None}


def _asked(
    context: ServerContext, query: Query, about: Mapping[int, Mapping[str, Tensor]], name: str, length: int
) -> dict[int, list[bytes]]:
    """The rows of one vector of the answers, of those that answered."""
    return {client: texts(vectors[name], length) for client, vectors in _told(context, query, about).items()}
