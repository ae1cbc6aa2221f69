"""Secure aggregation: keys that are ground, lists that differ, signatures that are replayed; and rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from piebald import recipes
from piebald.contracts import SIGNATURE, SumDemands, Update
from piebald.core.errors import Declined
from piebald.methods.transforms import Gaussian
from piebald.privacy import SecureAggregation
from piebald.privacy.secure_aggregation.key_queries import (
    COMMITMENTS,
    KEYS,
    SENDERS,
    SIGNED,
    SIGNERS,
    SURVIVORS,
    AdvertiseKeys,
    CommitKeys,
    ConfirmSurvivors,
    ShareKeys,
    Unmasking,
    commitment,
    keep_shares,
    key_claim,
    public_keys,
    round_digest,
)
from piebald.privacy.secure_aggregation.masks import CONTEXT, MEMBERS, numbers, round_stochastically, rows, texts
from piebald.privacy.secure_aggregation.server_side import SecureRound
from tests.fakes import classified, seeded, simulate

from .lying_server import Clients
from .test_lying_server import summing

# ------------------------------------------------------------------------------------------------- keys that are ground

VICTIM, COLLUDERS, COUNT = 0, (15, 16, 17, 18, 19), 20


def root(colluder: int, attempt: int) -> bytes:
    return bytes([colluder]) + attempt.to_bytes(31)


class Grinding:
    """Honest clients and five colluders, who speak last and look for keys that put the victim among them."""

    def __init__(self) -> None:
        self.masking = summing(neighbours=6)
        self.clients = Clients(self.masking, COUNT)
        self.honest = [client for client in range(COUNT) if client not in COLLUDERS]
        self.promised = {client: self.reply(CommitKeys(), client, {})[COMMITMENTS] for client in self.honest}
        self.told: dict[int, Any] = {}

    def reply(self, query: Any, client: int, vectors: Any) -> Any:
        return query.reply(vectors, self.clients.secrets(client), self.masking)

    def commitments(self, attempt: int) -> dict[str, Tensor]:
        own = {one: rows([commitment(public_keys(root(one, attempt)))], 32) for one in COLLUDERS}
        promised = {**self.promised, **own}
        return {MEMBERS: numbers(range(COUNT)), COMMITMENTS: torch.cat([promised[one] for one in range(COUNT)])}

    def advertise(self) -> None:
        about = self.commitments(0)
        self.told = {client: self.reply(AdvertiseKeys(), client, about) for client in self.honest}

    def listed(self, attempt: int) -> tuple[Any, dict[str, Tensor]]:
        """The graph and the list where the colluders take the keys of this attempt, which they sign for that sum."""
        about = self.commitments(attempt)
        digest = round_digest(0, (), range(COUNT), texts(about[COMMITMENTS], 32), "")
        public = {client: texts(self.told[client][KEYS], 64)[0] for client in self.honest}
        signed = {client: self.told[client][SIGNED] for client in self.honest}
        for one in COLLUDERS:
            public[one] = public_keys(root(one, attempt))
            signer = self.clients.secrets(one).signer
            signed[one] = rows([signer.sign(key_claim(one, public[one], digest, 0))], SIGNATURE)
        graph = self.masking.graph(range(COUNT), [public[one] for one in range(COUNT)], [0] * COUNT, digest)
        return graph, {**graph.vectors(), SIGNED: torch.cat([signed[one] for one in range(COUNT)])}


def test_the_last_to_speak_cannot_grind_the_ring() -> None:
    """Before, any keys were taken: five colluders stood around one victim of fifty after some seconds of trying."""
    made = Grinding()
    made.advertise()
    around = {attempt: len({*made.listed(attempt)[0].neighbours[VICTIM]} & {*COLLUDERS}) for attempt in range(60)}
    best = max(around, key=lambda attempt: around[attempt])
    assert around[best] > around[0]  # there is something to be won
    with pytest.raises(Declined, match="are not signed by its site for this run and its terms, and for this sum"):
        made.reply(ShareKeys(), VICTIM, made.listed(best)[1])
    made.reply(ShareKeys(), VICTIM, made.listed(0)[1])


def test_keys_are_shown_for_one_list_of_commitments_only() -> None:
    made = Grinding()
    for absent in ({}, {MEMBERS: numbers([]), COMMITMENTS: rows([], 32)}):
        with pytest.raises(Declined, match=r"something else|does not have this client's newest one"):
            made.reply(AdvertiseKeys(), VICTIM, absent)
    made.advertise()
    made.reply(AdvertiseKeys(), VICTIM, made.commitments(0))  # the first answer may have been lost
    with pytest.raises(Declined, match="another list of commitments for the same keys"):
        made.reply(AdvertiseKeys(), VICTIM, made.commitments(1))
    fewer = {MEMBERS: numbers(made.honest), COMMITMENTS: torch.cat([*made.promised.values()])}
    with pytest.raises(Declined, match="another list of commitments for the same keys"):
        made.reply(AdvertiseKeys(), VICTIM, fewer)


def test_who_withholds_its_keys_makes_all_begin_again() -> None:
    """Otherwise a colluder could choose between two rings: that with it, and that without it."""
    clients = Clients(summing(neighbours=4), 12)
    real, asked = clients.ask, []

    def ask(client: int, query: Any, vectors: Any) -> Update | None:
        asked.append((query.kind, client))
        return None if (query.kind, client) == ("advertise_keys", 5) else real(client, query, vectors)

    clients.ask = ask  # type: ignore[method-assign]
    made = SecureRound.of(clients.masking, range(12), clients)  # type: ignore[arg-type]
    assert made.exchanged is not None
    graph = made.exchanged.graph
    assert graph.members == tuple(client for client in range(12) if client != 5)
    assert [client for kind, client in asked if kind == "commit_keys"] == [*range(12), *graph.members]


# ------------------------------------------------------------------------------------------ what is signed, and by whom


@pytest.fixture
def masked() -> tuple[Clients, SecureRound]:
    """Six clients that have masked their updates; nothing is signed yet."""
    clients = Clients(summing(), 6)
    made = SecureRound.of(clients.masking, range(6), clients)  # type: ignore[arg-type]
    for client in range(6):
        assert clients.mask(client, made.vectors(client)) is not None
    return clients, made


def about(made: SecureRound, survivors: Sequence[int]) -> dict[str, Tensor]:
    assert made.exchanged is not None
    return {CONTEXT: rows([made.exchanged.graph.context], 32), SURVIVORS: numbers(survivors)}


def signatures(clients: Clients, made: SecureRound, survivors: Sequence[int]) -> dict[int, Tensor]:
    query, found = ConfirmSurvivors(), {}
    for client in survivors:
        found[client] = query.reply(about(made, survivors), clients.secrets(client), clients.masking)[SIGNED]
    return found


def open_with(clients: Clients, made: SecureRound, survivors: Sequence[int], signed: dict[int, Tensor]) -> Any:
    vectors = {SIGNERS: numbers(sorted(signed)), SIGNED: torch.cat([signed[one] for one in sorted(signed)])}
    return Unmasking().reply({**about(made, survivors), **vectors}, clients.secrets(0), clients.masking)


def test_a_quorum_must_sign_the_very_list(masked: tuple[Clients, SecureRound]) -> None:
    clients, made = masked
    signed = signatures(clients, made, range(6))
    for few in (1, 3):
        with pytest.raises(Declined, match=f"{few} survivors have signed this list of survivors, it takes 4"):
            open_with(clients, made, range(6), {one: signed[one] for one in range(few)})
    one_for_all = dict.fromkeys(range(6), signed[0])
    with pytest.raises(Declined, match="1 survivors have signed"):
        open_with(clients, made, range(6), one_for_all)
    bad = {**signed, 5: torch.zeros_like(signed[5])}  # one that lies does not stop the others
    assert open_with(clients, made, range(6), bad)


def test_signatures_of_another_list_or_another_sum_do_not_count(masked: tuple[Clients, SecureRound]) -> None:
    clients, made = masked
    signed = signatures(clients, made, range(6))
    with pytest.raises(Declined, match="another list of survivors was signed already"):
        open_with(clients, made, range(5), {one: signed[one] for one in range(5)})
    again = SecureRound.of(clients.masking, range(6), clients)  # type: ignore[arg-type]
    for client in range(6):
        clients.mask(client, again.vectors(client))
    with pytest.raises(Declined, match="0 survivors have signed"):
        open_with(clients, again, range(6), signed)


def test_who_was_told_of_other_senders_signs_something_else(masked: tuple[Clients, SecureRound]) -> None:
    """Client 5 masks with four of the others: its signature is for another pair of lists."""
    clients, _ = masked
    made = SecureRound.of(clients.masking, range(6), clients)  # type: ignore[arg-type]
    for client in range(6):
        told = dict(made.vectors(client))
        if client == 5:
            told |= {SENDERS: numbers([0, 1, 2, 3, 5])}
        assert clients.mask(client, told) is not None
    signed = signatures(clients, made, [0, 1, 2, 3, 5])
    with pytest.raises(Declined, match="2 survivors have signed"):
        open_with(clients, made, [0, 1, 2, 3, 5], {one: signed[one] for one in (0, 1, 5)})


def test_shares_must_be_those_of_all_senders() -> None:
    clients = Clients(summing(), 6)
    made = SecureRound.of(clients.masking, range(6), clients)  # type: ignore[arg-type]
    told = dict(made.vectors(0))
    for senders in ([1, 2, 3, 4, 5], [0, 1, 2], [0, 1, 2, 3, 4, 5, 9]):
        assert clients.mask(0, {**told, SENDERS: numbers(senders)}) is None
    held = dict(clients.kept[0])
    keep_shares(clients.secrets(0), {one: bytes(66) for one in (1, 2, 3, 4)})
    assert clients.mask(0, told) is None  # it has no share from client 5
    clients.kept[0] = held
    assert clients.mask(0, told) is not None


def test_a_restart_changes_no_answer(masked: tuple[Clients, SecureRound]) -> None:
    """What a client keeps goes to its disk and back between any two messages."""
    clients, made = masked

    def restarted() -> None:
        clients.kept = {client: load(save(kept)) for client, kept in clients.kept.items()}

    restarted()
    signed = signatures(clients, made, range(6))
    restarted()
    with pytest.raises(Declined, match="another list of survivors was signed already"):
        signatures(clients, made, range(5))
    given = open_with(clients, made, range(6), signed)
    restarted()
    again = open_with(clients, made, range(6), signed)
    assert all(torch.equal(given[name], again[name]) for name in given)
    with pytest.raises(Declined, match="opened already, for another list"):
        open_with(clients, made, range(5), signed)


def test_a_ring_that_drop_outs_cut_into_parts_is_not_opened() -> None:
    """Before, each client looked at its own neighbours, and the sums of two arcs could be read."""
    graph = summing(neighbours=4, threshold=0.6).graph(range(24), [public_keys(bytes([one]) * 32) for one in range(24)])
    assert graph.threshold == 3
    ends = [*graph.ring[:2], *graph.ring[12:14]]
    with pytest.raises(Declined, match="fall into parts that share no mask"):
        graph.check_survivors([one for one in graph.members if one not in ends], 2)
    graph.check_survivors([one for one in graph.members if one not in ends[:2]], 2)
    around = graph.neighbours[graph.ring[5]][:3]
    with pytest.raises(Declined, match="of those who hold shares of one client 2 arrived, it takes 3"):
        graph.check_survivors([one for one in graph.members if one not in around], 2)


def test_a_site_says_no_before_it_shares_anything() -> None:
    """The site's own demands, on the list of clients as they are."""
    clients = Clients(summing(neighbours=8), 60, SumDemands(least=2))
    made = SecureRound.of(clients.masking, range(60), clients)  # type: ignore[arg-type]
    assert made.exchanged is None
    assert "only 0 of 60 clients exchanged keys" in made.absent[0]
    assert all("masking/context" not in kept for kept in clients.kept.values())


# ------------------------------------------------------------------------------------------------------------- rounding


def test_rounding_is_unbiased_and_repeats() -> None:
    draw = np.random.default_rng(3)
    values = np.concatenate([draw.uniform(-5, 5, 1000), [0.0, -1.0, 2.0, 0.25, -0.75, float(2**52), -(2.0**61)]])
    trials = np.stack([round_stochastically(values, bytes([t % 256, t // 256]) + bytes(30)) for t in range(4000)])
    low = np.floor(values)
    assert set(np.unique(trials - low)) <= {0.0, 1.0}
    fraction = values - low
    error = np.sqrt(fraction * (1 - fraction) / len(trials))
    off = trials.mean(0) - values
    assert np.all(off[error == 0] == 0)
    assert float(np.abs(off[error > 0] / error[error > 0]).max()) < 5.0  # a thousand Gaussians
    assert np.array_equal(trials[0], round_stochastically(values, bytes(32)))


def test_many_small_updates_add_up() -> None:
    """Before, the mean of updates of 3e-4, each with one of 10,000 rows of the heaviest weight, was exactly 0."""
    masking = SecureAggregation(aggregation={"kind": "example_weighted"}, heaviest=10_000.0)
    count, size, small = 256, 4096, 3e-4
    step = masking.reach * 10_000.0 / masking.unit(count)
    assert small < step / 10
    one, total = Update({"model": torch.full((size,), small)}, 1, 1, {}), np.zeros(size + 2)
    for client in range(count):
        total += masking.decode(masking.encode(one, count, bytes([client]) + bytes(31)), count)
    means = total[2:] * masking.reach * 10_000.0 / count
    share = small / step
    deviation = step * math.sqrt(share * (1 - share) / count)
    assert abs(means.mean() - small) < 4 * deviation / math.sqrt(size)
    assert means.std() == pytest.approx(deviation, rel=0.1)
    assert total[0] * 10_000.0 == pytest.approx(count, rel=0.05)


@pytest.mark.parametrize("noise", [{"where": "server"}, {"where": "client", "noise": 2.0}], ids=str)
def test_the_range_follows_from_the_clip(noise: dict[str, Any]) -> None:
    """No update is refused for its range, and the steps are as fine as the clip allows."""
    clip = 0.01
    recipe = recipes.fedavg(lr=0.5).with_(
        aggregation="equal_weighted", transforms=[Gaussian(clip=clip, **noise), SecureAggregation()]
    )
    run = simulate(recipe, classified(20, 30, 12, 40), seeded(lambda: torch.nn.Linear(4, 2)), rounds=3)
    assert [row["arrived"] for row in run.rounds] == [4, 4, 4]
    made = recipe.transforms[-1].adapted_to(recipe, Clients(summing(), 2).spec)
    assert made.range == pytest.approx(clip * (1 + (17.2 if noise["where"] == "client" else 0)), rel=2e-3)
    assert SecureAggregation(range=5.0).adapted_to(recipe, Clients(summing(), 2).spec).range == 5.0
