"""A server of secure aggregation that shows different clients different lists, and clients in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from piebald.contracts import SIGNATURE, SUM, ClientSecrets, Query, QueryRequest, Split, Task, Update
from piebald.privacy import SecureAggregation
from piebald.privacy.secure_aggregation import key_queries, masks
from piebald.privacy.secure_aggregation.key_queries import (
    COMMITMENTS,
    DIGEST,
    SENDERS,
    SHARES,
    SIGNED,
    SIGNERS,
    SURVIVORS,
    AdvertiseKeys,
    CommitKeys,
    ConfirmSurvivors,
    Unmasking,
    pair_seed,
    round_digest,
)
from piebald.privacy.secure_aggregation.masks import CONTEXT, MEMBERS, MaskingGraph, numbers, rows, texts
from piebald.privacy.secure_aggregation.server_side import (
    ANY_SUM,
    SecureRound,
    SimulatedSigner,
    masked,
    repeatable,
    replied,
)
from tests.fakes import SGD, client_work, parameters

SIZE = 3
Shares = dict[int, dict[int, bytes]]  # by whose they are, then by place


class Clients:
    """Clients with updates of their own numbers; a server context that asks them (`contracts.ServerContext`)."""

    def __init__(self, masking: SecureAggregation, count: int, demands: Any = ANY_SUM) -> None:
        self.masking, self.spec, self.demands = masking, client_work(parameters(SIZE), SGD, (masking,)), demands
        self.kept: dict[int, dict[str, Tensor]] = {client: {} for client in range(count)}
        self.draws = {client: repeatable(7, client) for client in range(count)}
        self.known, self.state, self.excluded = count, {}, dict[int, str]()
        self.updates = {
            client: Update({"model": torch.full((SIZE,), 0.25 * (1 + client % 7))}, 1, 1, {"loss": 1.0})
            for client in range(count)
        }

    def secrets(self, client: int) -> ClientSecrets:
        signer, rows = SimulatedSigner(7, client), {"train": self.updates[client].examples}
        return ClientSecrets(client, self.kept[client], self.draws[client], signer, self.demands, rows=rows)  # type: ignore[arg-type]

    def query(self, requests: Sequence[QueryRequest]) -> list[Update | None]:
        return [self.ask(one.client, one.query, one.vectors) for one in requests]

    def check_signature(self, client: int, text: bytes, signature: bytes) -> bool:
        return SimulatedSigner(7, client).check(client, text, signature)

    def exclude_client(self, client: int, reason: str) -> None:
        self.excluded.setdefault(client, reason)

    def ask(self, client: int, query: Query, vectors: Mapping[str, Tensor]) -> Update | None:
        return replied(Task(1, client, 0, vectors, query), self.spec, self.secrets(client))[0]

    def mask(self, client: int, vectors: Mapping[str, Tensor]) -> np.ndarray[Any, Any] | None:
        made, _ = masked(self.updates[client], Task(2, client, 0, vectors), self.spec, self.secrets(client))
        return None if made is None else made.vectors[SUM].numpy().view(f"<u{self.masking.bits // 8}")


def told_keys(
    masking: SecureAggregation, members: Mapping[int, ClientSecrets], splits: tuple[Split, ...] = ()
) -> tuple[bytes, dict[int, Any]]:
    """The digest of a sum, and the keys that these clients tell for it."""
    promised = {client: CommitKeys().reply({}, own, masking)[COMMITMENTS] for client, own in members.items()}
    about = {MEMBERS: numbers(sorted(promised)), COMMITMENTS: torch.cat([promised[one] for one in sorted(promised)])}
    told = {client: AdvertiseKeys(splits=splits).reply(about, own, masking) for client, own in members.items()}
    return round_digest(0, splits, sorted(promised), texts(about[COMMITMENTS], masks.KEY), ""), told


class LyingServer:
    """It runs a round as it should until keys are exchanged, and then tries to read what one client masked.

    The victim is told that no more than `threshold - 1` of its neighbours sent shares, so it masks with these alone.
    Each other client is told that some of these dropped out, as many as its own checks let pass, and that the victim
    did not: it gives a share of their keys, and one of the victim's own mask.
    """

    def __init__(self, clients: Clients) -> None:
        self.clients = clients
        self.round = SecureRound.of(clients.masking, list(clients.updates), clients)  # type: ignore[arg-type]
        assert self.round.exchanged is not None, self.round.absent
        self.exchanged = self.round.exchanged
        self.graph: MaskingGraph = self.exchanged.graph

    def read(self, victim: int) -> list[float] | None:
        """The victim's update, or None where the lies did not open it."""
        graph = self.graph
        partners = graph.neighbours[victim][: graph.threshold - 1]
        told = {
            CONTEXT: rows([graph.context], masks.KEY),
            SENDERS: numbers(sorted((victim, *partners))),
        }
        vector = self.clients.mask(victim, told)
        if vector is None:
            return None
        for client in graph.members:
            if client != victim:
                assert self.clients.mask(client, self.round.vectors(client)) is not None
        known = self._opened(self._lists(victim, partners))
        return self._plain(victim, partners, vector, known)

    def _lists(self, victim: int, partners: Sequence[int]) -> dict[int, list[int]]:
        """The survivors that each client is told of: each partner is said to be gone to `threshold` of its holders."""
        graph = self.graph
        room = dict.fromkeys(graph.members, graph.holders_each - graph.threshold)
        gone: dict[int, set[int]] = {client: set() for client in graph.members}
        for partner in partners:
            holders = [one for one in graph.neighbours[partner] if one != victim]
            for one in sorted(holders, key=lambda holder: -room[holder])[: graph.threshold]:
                room[one] -= 1
                gone[one].add(partner)
        return {
            client: [one for one in graph.members if one not in away]
            for client, away in gone.items()
            if client != victim
        }

    def _opened(self, lists: Mapping[int, list[int]]) -> Shares:
        """The shares that clients give for these lists of survivors, with all signatures that others gave for them."""
        signed: dict[tuple[int, ...], dict[int, Tensor]] = {}
        for client, survivors in lists.items():
            answer = self.clients.ask(client, ConfirmSurvivors(), self._about(survivors))
            if answer is not None:
                signed.setdefault(tuple(survivors), {})[client] = answer.vectors[SIGNED]
        known: Shares = {}
        for client, survivors in lists.items():
            given = signed.get(tuple(survivors), {})
            about = {
                **self._about(survivors),
                SIGNERS: numbers(sorted(given)),
                SIGNED: torch.cat([rows([], SIGNATURE), *(given[one] for one in sorted(given))]),
            }
            answer = self.clients.ask(client, Unmasking(), about)
            if answer is None:
                continue
            owners = sorted((*self.exchanged.partners(client), client))
            for owner, share in zip(owners, texts(answer.vectors[SHARES], key_queries.BYTES), strict=True):
                kind = owner if owner in survivors else ~owner
                known.setdefault(kind, {})[self.graph.place(client)] = share
        return known

    def _about(self, survivors: Sequence[int]) -> dict[str, Tensor]:
        return {CONTEXT: rows([self.graph.context], masks.KEY), SURVIVORS: numbers(survivors)}

    def _plain(
        self, victim: int, partners: Sequence[int], vector: np.ndarray[Any, Any], known: Shares
    ) -> list[float] | None:
        """What the victim masked; shares of own masks are known by client, those of keys by ~client."""
        graph, wanted = self.graph, self.graph.threshold
        needed = [victim, *(~one for one in partners)]
        if any(len(known.get(one, {})) < wanted for one in needed):
            return None
        secret = {one: key_queries.combine(dict(sorted(known[one].items())[:wanted])) for one in needed}
        shown = texts(self.clients.kept[victim][DIGEST], masks.KEY)[0]  # the server knows what it shows
        seeds = {one: pair_seed(secret[~one], graph, shown, one, victim) for one in partners}
        below = [seed for one, seed in seeds.items() if one < victim]
        above = [seed for one, seed in seeds.items() if one > victim]
        plain = vector.copy()
        masks.add_masks(plain, below, [secret[victim], *above])
        head = self.clients.masking.decode(plain, len(graph.members))
        return [float(number) for number in head[2:] / head[0] * self.clients.masking.reach]
