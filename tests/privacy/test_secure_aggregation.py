"""Secure aggregation: the mean that results, what the server can see of it, and what clients refuse to do."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import piebald
from piebald import recipes
from piebald.contracts import (
    SIGNATURE,
    SUM,
    ClientSecrets,
    KeyAgreement,
    PartialSum,
    QueryRequest,
    Result,
    Task,
    Update,
)
from piebald.core.errors import Declined, RuntimeFault, SettingError
from piebald.data.partition import Homogeneous
from piebald.data.partition.devices import Devices
from piebald.methods.transforms import Gaussian
from piebald.privacy import SecureAggregation
from piebald.privacy.secure_aggregation import key_queries
from piebald.privacy.secure_aggregation import masks as keys
from piebald.privacy.secure_aggregation.key_queries import (
    BOXES,
    DIGEST,
    DISPUTED,
    PUBLISHED,
    READERS,
    SENDERS,
    SHARES,
    SIGNED,
    SIGNERS,
    SURVIVORS,
    CheckShares,
    ConfirmSurvivors,
    ShareKeys,
    ShowShares,
    Unmasking,
    survivor_claim,
)
from piebald.privacy.secure_aggregation.masks import CONTEXT, KEYS, numbers, rows, texts
from piebald.privacy.secure_aggregation.server_side import ANY_SUM, SimulatedSigner, masked, repeatable, replied
from piebald.runtimes.simulation.simulation import Simulation
from tests.fakes import SGD, classified, client_work, few, parameters, seeded, simulate
from tests.security.lying_server import told_keys

ROUNDS = ("commit_keys", "advertise_keys", "share_keys", "check_shares", "upload", "confirm_survivors", "unmasking")
SIZE = 3


def summing(**fields: Any) -> SecureAggregation:
    """Secure aggregation that knows the aggregator."""
    return SecureAggregation(**{"aggregation": {"kind": "example_weighted"}, "heaviest": 100.0, "least": 2} | fields)


class FakeFederation:
    """A server context of a few lines with clients that answer it; everything that the server receives is kept.

    `away` says from which of the rounds on a client does not answer.
    """

    def __init__(
        self, masking: SecureAggregation, updates: Mapping[int, Update], away: Mapping[int, str] | None = None
    ) -> None:
        size = next(iter(updates.values())).vectors["model"].numel()
        self.masking, self.updates = masking, dict(updates)
        self.spec = client_work(parameters(size), SGD, (masking,))
        self.known, self.state, self.excluded = len(updates), {}, dict[int, str]()
        self.away = {client: ROUNDS.index(name) for client, name in (away or {}).items()}
        self.kept: dict[int, dict[str, Tensor]] = {client: {} for client in updates}
        self.received: list[tuple[int, str, Mapping[str, Tensor]]] = []
        self.refusals: dict[int, str | None] = {}
        self.roots: dict[int, bytes] = {}
        self.seed = self.version = 0

    def secrets(self, client: int) -> ClientSecrets:
        draw, counted = repeatable(self.seed, client), {"train": self.updates[client].examples}
        work, signer = self.spec.digest, SimulatedSigner(0, client)
        return ClientSecrets(client, self.kept[client], draw, signer, ANY_SUM, work=work, rows=counted)  # type: ignore[arg-type]

    def check_signature(self, client: int, text: bytes, signature: bytes) -> bool:
        return SimulatedSigner(0, client).check(client, text, signature)

    def exclude_client(self, client: int, reason: str) -> None:
        self.excluded.setdefault(client, reason)

    def there(self, client: int, name: str) -> bool:
        return self.away.get(client, len(ROUNDS)) > ROUNDS.index(name)

    def query(self, requests: Sequence[QueryRequest]) -> list[Update | None]:
        return [self._one(one) if self.there(one.client, one.query.kind) else None for one in requests]

    def _one(self, one: QueryRequest) -> Update | None:
        answer, self.refusals[one.client] = replied(
            Task(1, one.client, 0, one.vectors, one.query), self.spec, self.secrets(one.client)
        )
        if answer is not None:
            assert one.query.reject_reason(answer, self.spec) is None
            self.received.append((one.client, one.query.kind, answer.vectors))
        return answer

    def upload(self, agreement: KeyAgreement) -> dict[int, Update]:
        """All clients that are there mask their updates and send them."""
        arrived = {}
        for client in sorted(self.updates.keys() - agreement.absent.keys()):
            asked = Task(2, client, 0, {"model": torch.zeros(SIZE), **agreement.vectors(client)})
            self.roots[client] = texts(self.kept[client]["root"], keys.KEY)[0]
            made, self.refusals[client] = masked(self.updates[client], asked, self.spec, self.secrets(client))
            if made is not None and self.there(client, "upload"):
                assert self.masking.masked_reject_reason(made, self.spec) is None
                self.received.append((client, "upload", made.vectors))
                arrived[client] = made
        return arrived

    def sum(self) -> PartialSum | str:
        agreement = self.masking.agree_keys(sorted(self.updates), self)  # type: ignore[arg-type]
        return agreement.unmask(self.upload(agreement), self)  # type: ignore[arg-type]


def update(model: Tensor, examples: int = 1, loss: float = 1.0) -> Update:
    return Update({"model": model}, examples, 1, {"loss": loss}, float(model.norm()))


# -------------------------------------------------------------------------------------------------------------- the sum


@pytest.mark.full
@settings(few, max_examples=80)
@given(st.data())
def test_the_mean_of_the_clients_that_arrived_or_nothing(data: st.DataObject) -> None:
    """Within the stated rounding, whichever clients drop out in whichever round, with any number of neighbours."""
    count = data.draw(st.integers(2, 7), "clients")
    threshold = data.draw(st.sampled_from([0.51, 2 / 3, 1.0]), "threshold")
    masking = summing(
        threshold=threshold,
        largest_share=0.999,
        neighbours=data.draw(st.sampled_from([None, 2, 4])),
        bits=data.draw(st.sampled_from([32, 64])),
        range=data.draw(st.sampled_from([1.0, 8.0])),
    )
    number = st.floats(-1, 1, width=32)
    updates = {
        client: update(torch.tensor(data.draw(st.lists(number, min_size=SIZE, max_size=SIZE))), examples)
        for client, examples in enumerate(data.draw(st.lists(st.integers(1, 100), min_size=count, max_size=count)))
    }
    away = data.draw(st.dictionaries(st.integers(0, count - 1), st.sampled_from(ROUNDS), max_size=3))
    found = FakeFederation(masking, updates, away).sum()
    there = [[c for c in updates if ROUNDS.index(away.get(c, ROUNDS[-1])) > place or c not in away]
             for place in range(len(ROUNDS))]  # fmt: skip
    members, shared, senders, arrived, confirmed, unmasking = there[1:]
    n = len(members)
    holders = n if masking.neighbours is None else min(masking.neighbours + 1, n)
    wanted = max(2, math.ceil(round(threshold * holders, 9)))
    if isinstance(found, str):
        # never without a reason: where all are neighbours, only if a round was too small
        assert away or count < wanted
        if masking.neighbours is None:
            assert min(map(len, there)) < wanted
        return
    assert min(map(len, (shared, senders, arrived, confirmed, unmasking))) >= wanted
    weights = torch.tensor([updates[c].examples for c in arrived], dtype=torch.float64)
    matrix = torch.stack([updates[c].vectors["model"] for c in arrived]).double()
    step = masking.reach * 100.0 / masking.unit(n)
    bound = 2 * n * step / found.weight + 1e-6
    torch.testing.assert_close(
        found.vectors["model"].double() / found.weight, weights @ matrix / weights.sum(), rtol=0, atol=bound
    )
    assert found.weight == pytest.approx(float(weights.sum()), abs=n * 100.0 / masking.unit(n) + 1e-9)
    assert found.loss == pytest.approx(1.0, abs=8 * bound)


@given(st.integers(2, 2_000_000), st.sampled_from([32, 64]))
def test_nothing_can_wrap_around(clients: int, bits: int) -> None:
    unit = summing(bits=bits).unit(clients)
    most = (1 << (bits - 1)) - 1
    assert clients * unit <= most < 2 * clients * unit + clients


def test_the_largest_numbers_add_up() -> None:
    for bits, sign in itertools.product((32, 64), (1.0, -1.0)):
        masking = summing(bits=bits, range=2.0, heaviest=5.0)
        found = FakeFederation(masking, {client: update(torch.full((SIZE,), 2 * sign), 5) for client in range(7)}).sum()
        assert isinstance(found, PartialSum)
        assert found.vectors["model"] / found.weight == pytest.approx([2 * sign] * SIZE, rel=1e-6)


@few
@given(st.binary(min_size=32, max_size=32), st.integers(2, 6), st.integers(0, 3), st.randoms(use_true_random=False))
def test_shares(secret: bytes, threshold: int, more: int, random: Any) -> None:
    """Any `threshold` of them give the secret; with one fewer every other secret would do as well."""
    places = list(range(1, threshold + more + 1))
    shares = key_queries.share(secret, places, threshold, random.randbytes)
    assert {len(one) for one in shares.values()} == {key_queries.BYTES}
    some = random.sample(places, threshold)
    assert key_queries.combine({place: shares[place] for place in some}) == secret
    other = random.randbytes(32)
    known = {place: int.from_bytes(shares[place]) for place in some[1:]} | {0: int.from_bytes(other)}
    completed = {place: shares[place] for place in some[1:]} | {
        some[0]: lagrange(known, some[0]).to_bytes(key_queries.BYTES)
    }
    assert key_queries.combine(completed) == other


def lagrange(points: Mapping[int, int], x: int) -> int:
    """The polynomial through some points, at x: slow and plain."""
    value = 0
    for one, y in points.items():
        for other in points.keys() - {one}:
            y = y * (x - other) * pow(one - other, -1, key_queries.PRIME) % key_queries.PRIME
        value += y
    return value % key_queries.PRIME


# ---------------------------------------------------------------------------------------------- what the server can see


def uniform(vector: np.ndarray[Any, Any]) -> float:
    """How many standard deviations the chi-square of all bytes is away from that of uniform ones."""
    counts = np.bincount(np.frombuffer(vector.tobytes(), np.uint8), minlength=256)
    expected = counts.sum() / 256
    return float((((counts - expected) ** 2).sum() / expected - 255) / math.sqrt(2 * 255))


MANY = 100_000


@pytest.mark.parametrize("bits", [32, 64])
def test_what_arrives_is_uniform_whatever_was_sent(bits: int) -> None:
    """All bytes are equally frequent, for an update of zeros as for one at the end of the range; plain they are not."""
    masking = summing(bits=bits)
    views = []
    for fill in (0.0, 8.0):
        fake = FakeFederation(masking, {client: update(torch.full((MANY,), fill), 100) for client in range(3)})
        fake.sum()
        assert uniform(masking.encode(fake.updates[0], 3, bytes(32))) > 1000
        seen = [vectors[SUM].numpy() for _, name, vectors in fake.received if name == "upload"]
        assert all(abs(uniform(vector)) < 4.5 for vector in seen)
        assert all(abs(uniform(one - other)) < 4.5 for one, other in itertools.combinations(seen, 2))
        views.append(seen[0].view(f"<u{bits // 8}"))
    # the same keys give the same mask whatever is under it: what arrives is the update plus numbers that know nothing
    # of it, and so has one distribution for all updates
    plain = [masking.encode(update(torch.full((MANY,), fill), 100), 3, bytes(32)) for fill in (0.0, 8.0)]
    assert np.array_equal(views[1] - views[0], plain[1] - plain[0])


def test_masks_are_fresh_for_every_round() -> None:
    fake = FakeFederation(summing(), {client: update(torch.zeros(MANY)) for client in range(3)})
    for fake.seed in (1, 2):
        fake.sum()
    first, second = (vectors[SUM].numpy() for client, name, vectors in fake.received if (client, name) == (0, "upload"))
    assert abs(uniform(first - second)) < 4.5


def test_nothing_on_the_wire_is_a_plain_number() -> None:
    """Neither as float32, nor as the whole numbers that are summed; and no secret key, root or seed."""
    draw = torch.Generator().manual_seed(3)
    masking = summing(neighbours=4, threshold=0.51)
    updates = {client: update(torch.rand(500, generator=draw) * 2 - 1, client + 1) for client in range(6)}
    fake = FakeFederation(masking, updates, {1: "upload", 4: "unmasking"})
    assert isinstance(fake.sum(), PartialSum)
    wire = b"|".join(bytes(tensor.numpy().tobytes()) for _, _, vectors in fake.received for tensor in vectors.values())
    for client, own in updates.items():
        plain = own.vectors["model"].numpy().tobytes()
        whole = masking.encode(own, 6, bytes(32)).tobytes()
        pieces = [text[at : at + 8] for text in (plain, whole) for at in range(0, len(text) - 8, 4)]
        assert not any(piece in wire for piece in pieces)
        root = fake.roots[client]
        hidden = [root, *(keys.private_key(root, purpose) for purpose in ("masks", "boxes"))]
        assert not any(secret in wire for secret in hidden)


def test_where_too_few_arrive_no_client_sends_shares() -> None:
    fake = FakeFederation(
        summing(), {client: update(torch.ones(SIZE)) for client in range(5)}, {0: "upload", 3: "upload"}
    )
    found = fake.sum()
    assert found == "no secure aggregation: 3 of 5 clients arrived, it takes 4"
    assert {name for _, name, _ in fake.received} == {*ROUNDS[:5]}


@pytest.mark.parametrize("name", ROUNDS)
@pytest.mark.parametrize("lost", [1, 2, 4])
def test_drop_outs_in_every_round(name: str, lost: int) -> None:
    """Of five, four are enough; where two are lost, the threshold follows from the clients that sent keys."""
    updates = {client: update(torch.full((SIZE,), float(client))) for client in range(5)}
    found = FakeFederation(summing(), updates, dict.fromkeys(range(lost), name)).sum()
    if lost == 1:
        assert isinstance(found, PartialSum)
        left = [0, 1, 2, 3, 4] if name in ("confirm_survivors", "unmasking") else [1, 2, 3, 4]
        assert found.vectors["model"] / found.weight == pytest.approx([sum(left) / len(left)] * SIZE, abs=1e-5)
    elif lost == 2 and name in ("commit_keys", "advertise_keys"):
        assert isinstance(found, PartialSum)  # three sent keys, and of three it takes two
    else:
        assert isinstance(found, str)


# --------------------------------------------------------------------------------------------------- a server that lies


@pytest.fixture
def uploaded() -> tuple[FakeFederation, KeyAgreement, dict[int, Update]]:
    """Five clients that have masked their updates and sent them; nothing is unmasked yet."""
    made = FakeFederation(summing(), {client: update(torch.full((SIZE,), 0.5 * client)) for client in range(5)})
    agreement = made.masking.agree_keys(range(5), made)  # type: ignore[arg-type]
    return made, agreement, made.upload(agreement)


def confirm_for(fake: FakeFederation, agreement: KeyAgreement, client: int, survivors: Sequence[int]) -> Tensor:
    vectors = {CONTEXT: agreement.vectors(client)[CONTEXT], SURVIVORS: numbers(survivors)}
    return ConfirmSurvivors().reply(vectors, fake.secrets(client), fake.masking)[SIGNED]


def unmask_for(
    fake: FakeFederation,
    agreement: KeyAgreement,
    client: int,
    survivors: Sequence[int],
    signed: Mapping[int, Tensor] | None = None,
) -> Mapping[str, Tensor]:
    """Without `signed`, all survivors who do so sign the list first."""
    if signed is None:
        signed = {}
        for one in survivors:
            with contextlib.suppress(Declined, KeyError):
                signed[one] = confirm_for(fake, agreement, one, survivors)
    vectors = {
        CONTEXT: agreement.vectors(client)[CONTEXT],
        SURVIVORS: numbers(survivors),
        SIGNERS: numbers(sorted(signed)),
        SIGNED: torch.cat([rows([], SIGNATURE), *(signed[one] for one in sorted(signed))]),
    }
    return Unmasking().reply(vectors, fake.secrets(client), fake.masking)


def test_no_client_gives_both_kinds_of_shares(uploaded: tuple[FakeFederation, KeyAgreement, dict[int, Update]]) -> None:
    """Whichever lists of survivors a client gets, and in whichever order, it answers for one of them.

    All others collude and sign every list.
    """
    made, agreement, _ = uploaded
    graph = agreement.exchanged.graph  # type: ignore[attr-defined]
    shown = texts(made.kept[0][DIGEST], keys.KEY)[0]

    def signed(survivors: Sequence[int]) -> dict[int, Tensor]:
        claim = survivor_claim(graph, shown, range(5), survivors)
        return {one: rows([SimulatedSigner(0, one).sign(claim)], SIGNATURE) for one in survivors}

    lists = [some for size in range(6) for some in itertools.combinations(range(5), size)]
    for client, tried in ((0, lists), (1, lists[::-1])):
        answered = []
        for survivors in tried:
            try:
                unmask_for(made, agreement, client, survivors, signed(survivors))
                answered.append(survivors)
            except Declined:
                pass
        assert len(answered) == 1
        assert len(answered[0]) >= 4
        unmask_for(made, agreement, client, answered[0])  # the same again: its answer may have been lost
        with pytest.raises(Declined, match="opened already, for another list"):
            unmask_for(made, agreement, client, (0, 1, 2, 3) if answered[0] != (0, 1, 2, 3) else (0, 1, 2, 3, 4))


@pytest.mark.full
def test_two_lists_of_survivors_unmask_no_update(
    uploaded: tuple[FakeFederation, KeyAgreement, dict[int, Update]],
) -> None:
    """Client 4 is a survivor for some clients and not for others: at most one of the lists gets four signatures."""
    made, _, _ = uploaded
    for ways in itertools.product((True, False), repeat=4):
        fresh = FakeFederation(made.masking, made.updates)
        again = fresh.masking.agree_keys(range(5), fresh)  # type: ignore[arg-type]
        fresh.upload(again)
        for client, there in enumerate(ways):
            confirm_for(fresh, again, client, (0, 1, 2, 3, 4) if there else (0, 1, 2, 3))
        with contextlib.suppress(Declined):
            confirm_for(fresh, again, 4, (0, 1, 2, 3, 4))
        opened = set()
        for client, there in enumerate(ways):
            with contextlib.suppress(Declined):
                unmask_for(fresh, again, client, (0, 1, 2, 3, 4) if there else (0, 1, 2, 3))
                opened.add(there)
        assert opened == ({sum(ways) >= 3} if sum(ways) >= 3 or not any(ways) else set())


def test_what_else_a_client_refuses(uploaded: tuple[FakeFederation, KeyAgreement, dict[int, Update]]) -> None:
    made, agreement, _ = uploaded
    with pytest.raises(Declined, match="the list of survivors is not of this sum"):
        unmask_for(made, agreement, 0, (1, 2, 3, 4))
    with pytest.raises(Declined, match="3 of 5 clients arrived, it takes 4"):
        unmask_for(made, agreement, 0, (0, 1, 2))
    with pytest.raises(Declined, match="not of this sum"):
        unmask_for(made, agreement, 0, (0, 1, 2, 3, 4, 9))
    with pytest.raises(Declined, match="keys are of another sum"):
        Unmasking().reply({CONTEXT: torch.zeros(1, 32, dtype=torch.uint8)}, made.secrets(0), made.masking)
    asked = Task(3, 0, 0, {"model": torch.zeros(SIZE), **agreement.vectors(0)})
    again, refused = masked(made.updates[0], asked, made.spec, made.secrets(0))
    assert refused is None  # the same vector under the same keys is the same message
    assert again is not None
    _, refused = masked(update(torch.ones(SIZE)), asked, made.spec, made.secrets(0))
    assert refused == "its keys have masked another update already"


def test_keys_are_forgotten_once_a_sum_is_unmasked(
    uploaded: tuple[FakeFederation, KeyAgreement, dict[int, Update]],
) -> None:
    made, agreement, _ = uploaded
    unmask_for(made, agreement, 0, range(5))
    assert made.roots[0] not in b"".join(tensor.numpy().tobytes() for tensor in made.kept[0].values())
    asked = Task(3, 0, 0, {"model": torch.zeros(SIZE), **agreement.vectors(0)})
    _, refused = masked(made.updates[0], asked, made.spec, made.secrets(0))
    assert refused == "this client has no keys for that"


def test_nothing_is_unmasked_before_it_is_masked() -> None:
    made = FakeFederation(summing(), {client: update(torch.ones(SIZE)) for client in range(4)})
    agreement = made.masking.agree_keys(range(4), made)  # type: ignore[arg-type]
    with pytest.raises(Declined, match="nothing was masked under these keys"):
        unmask_for(made, agreement, 0, (0, 1, 2, 3))


def test_one_list_of_clients_for_one_set_of_keys(
    uploaded: tuple[FakeFederation, KeyAgreement, dict[int, Update]],
) -> None:
    made, agreement, _ = uploaded
    graph = agreement.exchanged.graph  # type: ignore[attr-defined]
    about = [0] * 5, graph.about
    shorter = made.masking.graph(range(4), [graph.keys[client] for client in range(4)], [0] * 4, graph.about)
    with pytest.raises(Declined, match="another list of clients for the same keys"):
        ShareKeys().reply(shorter.vectors(), made.secrets(0), made.masking)
    swapped = made.masking.graph(range(5), [graph.keys[client] for client in (1, 0, 2, 3, 4)], *about)
    with pytest.raises(Declined, match="does not have this client's newest keys"):
        ShareKeys().reply(swapped.vectors(), made.secrets(0), made.masking)


def test_other_lists_for_other_clients_are_noticed() -> None:
    """Client 0 is told of a client 9 that no other client knows: it cannot open the others' boxes.

    It disputes what came, honestly; who sent it shows nothing for another list than its own.
    """
    made = FakeFederation(summing(), {client: update(torch.ones(SIZE)) for client in range(4)})
    masking, known = made.masking, [0, 1, 2, 3, 9]
    held = {client: replace(made.secrets(client), work="") for client in (0, 1, 2, 3)}
    held[9] = ClientSecrets(9, {}, repeatable(9), SimulatedSigner(0, 9), ANY_SUM, rows={"train": 1})
    digest, told = told_keys(masking, held)
    public = {client: texts(one[KEYS], 64)[0] for client, one in told.items()}
    graph, other = (
        masking.graph(some, [public[client] for client in some], [0] * len(some), digest) for some in (known[:4], known)
    )
    lists = [{**one.vectors(), SIGNED: torch.cat([told[c][SIGNED] for c in one.members])} for one in (graph, other)]
    sent = {c: ShareKeys().reply(lists[c == 0], made.secrets(c), masking) for c in range(4)}
    boxes = {c: texts(sent[c][SHARES], 82)[graph.neighbours[c].index(0)] for c in (1, 2, 3)}
    published = {c: texts(sent[c][PUBLISHED], 64)[graph.holders(c).index(0)] for c in (1, 2, 3)}
    about = {CONTEXT: rows([other.context], 32), SENDERS: numbers([0, 1, 2, 3])}
    about |= {BOXES: rows([*boxes.values()], 82), PUBLISHED: rows([*published.values()], 64)}
    answer = CheckShares().reply(about, made.secrets(0), masking)
    assert answer[DISPUTED].tolist() == [[1], [1], [1]]
    for place, sender in enumerate((1, 2, 3)):
        signed = answer[SIGNED][place : place + 1]
        told_sender = {CONTEXT: rows([graph.context], 32), READERS: numbers([0]), SIGNED: signed}
        with pytest.raises(Declined, match="client 0 has not signed that it disputes"):
            ShowShares().reply(told_sender, made.secrets(sender), masking)
    _, refused = masked(made.updates[0], Task(1, 0, 0, about), made.spec, made.secrets(0))
    assert refused == "there is no share from client 1, who is said to have sent shares"


@pytest.mark.full
@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_garbled_update_moves_the_mean_no_further_than_the_range(place: int) -> None:
    """Whatever one client masks: an honest sum has bounds, and one outside of them is not used."""
    updates = {client: update(torch.ones(SIZE), 20) for client in range(5)}
    outcomes = []
    for exponent in range(31):
        fake = FakeFederation(summing(), updates)
        agreement = fake.masking.agree_keys(range(5), fake)  # type: ignore[arg-type]
        arrived = fake.upload(agreement)
        arrived[0].vectors[SUM][place] += 1 << exponent
        found = agreement.unmask(arrived, fake)  # type: ignore[arg-type]
        outcomes.append(found)
        if isinstance(found, PartialSum):
            assert bool((found.vectors["model"].abs() / found.weight <= 8.001).all())
    assert any(isinstance(found, PartialSum) for found in outcomes)
    assert place == 0 or any(isinstance(found, str) for found in outcomes)  # five weights of `heaviest` may be true


# ------------------------------------------------------------------------------------------------- what does not fit in


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (
            update(torch.tensor([0.0, 8.1, 0.0])),
            "a number of its update is outside secure_aggregation's range = 8: raise that",
        ),
        (update(torch.tensor([0.0, math.nan, 0.0])), "outside secure_aggregation's range"),
        (update(torch.tensor([0.0, math.inf, 0.0])), "outside secure_aggregation's range"),
        (update(torch.zeros(SIZE), 101), "its weight is above secure_aggregation's heaviest = 100: raise that"),
    ],
    ids=["a number", "not a number", "infinite", "a weight"],
)
def test_a_client_does_not_send_what_is_out_of_range(bad: Update, says: str) -> None:
    fake = FakeFederation(summing(), {0: bad, **{client: update(torch.ones(SIZE)) for client in range(1, 5)}})
    found = fake.sum()
    assert isinstance(found, PartialSum)
    assert found.vectors["model"] / found.weight == pytest.approx([1.0] * SIZE, abs=1e-5)
    assert 0 not in {client for client, name, _ in fake.received if name == "upload"}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"threshold": 0.5}, "threshold must be a share above 0.5 and up to 1.0, or a number of clients from 2 up"),
        ({"threshold": 1}, "threshold must be"),
        ({"neighbours": 3}, "multiple of 2"),
        ({"bits": 16}, "bits"),
        ({"least": 1}, "least"),
    ],
)
def test_bad_settings_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingError, match=says.replace("(", r"\(")):
        SecureAggregation(**fields)


CONFLICTS: dict[str, tuple[Any, str]] = {
    "a median": (
        lambda: recipes.fedavg().with_(aggregation="median", transforms=[SecureAggregation()]),
        "needs individual updates",
    ),
    "Krum": (
        lambda: recipes.fedavg().with_(aggregation="krum", transforms=[SecureAggregation()]),
        "needs individual updates",
    ),
    "clusters": (lambda: recipes.distfl().with_(transforms=[SecureAggregation()]), "needs individual updates"),
    "K clusters": (lambda: recipes.ifca().with_(transforms=[SecureAggregation()]), "needs individual updates"),
    "no rounds": (
        lambda: recipes.fedavg().with_(
            scheduling={"kind": "buffered", "buffer_size": 3}, transforms=[SecureAggregation()]
        ),
        "choose scheduling = 'synchronous'",
    ),
    "one at a time": (lambda: recipes.fedasync().with_(transforms=[SecureAggregation()]), "secure_aggregation"),
    "the cache": (lambda: recipes.async_fedavg().with_(transforms=[SecureAggregation()]), "drop secure_aggregation"),
    "late updates": (
        lambda: recipes.fedavg().with_(
            scheduling={"kind": "deadline", "seconds": 1.0}, transforms=[SecureAggregation()]
        ),
        "set its max_staleness = 0",
    ),
    "something behind it": (
        lambda: recipes.fedavg().with_(transforms=[SecureAggregation(), Gaussian(clip=1.0, where="client")]),
        "put it last",
    ),
    "noise that needs the largest weight": (
        lambda: recipes.fedavg().with_(transforms=[Gaussian(clip=1.0), SecureAggregation()]),
        "set aggregation = 'equal_weighted', or where = 'client'",
    ),
    "a trainer that depends on others' steps": (
        lambda: recipes.fedavg().with_(training="adaptive_frequency", transforms=[SecureAggregation()]),
        "which secure_aggregation hides",
    ),
}


@pytest.mark.parametrize("case", CONFLICTS)
def test_what_cannot_go_together(case: str) -> None:
    make, says = CONFLICTS[case]
    with pytest.raises(SettingError) as caught:
        make()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


# ----------------------------------------------------------------------------------------------------------- whole runs

CLIENTS = classified(20, 30, 12, 40, 25, 18)


def model() -> torch.nn.Module:
    return seeded(lambda: torch.nn.Linear(4, 2))


@pytest.mark.full
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "hdafl", "fedadam", "fedbn", "ditto"])
@pytest.mark.parametrize("fields", [{}, {"neighbours": 2, "bits": 64}], ids=str)
def test_a_run_comes_to_the_same_model(name: str, fields: dict[str, Any]) -> None:
    made = seeded(lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)))
    recipe = recipes.make(name, lr=0.1)
    plain = simulate(recipe, CLIENTS, made, rounds=3)
    summed = simulate(recipe.with_(transforms=[SecureAggregation(**fields)]), CLIENTS, made, rounds=3)
    torch.testing.assert_close(summed.cluster_models[0], plain.cluster_models[0], atol=1e-4, rtol=1e-4)
    for mine, theirs in zip(plain.rounds, summed.rounds, strict=True):
        assert theirs["arrived"] == mine["arrived"]


def test_tables_hold_nothing_about_individual_updates() -> None:
    run = simulate(recipes.fedavg(lr=0.1).with_(transforms=[SecureAggregation()]), CLIENTS, model(), rounds=2)
    trained = [row for row in run.results if row["kind"] == "train"]
    assert len(trained) == 12
    for row in trained:
        assert (row["examples"], row["steps"], row["loss"], row["raw_weight"]) == (0, 0, None, None)
        assert row["weight"] == pytest.approx(1 / 6)
    plain = simulate(recipes.fedavg(lr=0.1), CLIENTS, model(), rounds=2)
    for mine, theirs in zip(plain.rounds, run.rounds, strict=True):
        assert theirs["loss"] == pytest.approx(mine["loss"], rel=1e-3)
    kinds = {row["kind"] for row in run.results}
    assert kinds == {
        "commit_keys",
        "advertise_keys",
        "share_keys",
        "check_shares",
        "train",
        "confirm_survivors",
        "unmasking",
    }


def test_nothing_plain_leaves_a_simulated_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """What leaves a client is masked, and no client's plain change is in it."""
    crossed: list[Result] = []
    plain: list[Tensor] = []
    real, whole = Simulation.next, SecureAggregation.mask

    def spied(self: Simulation, until: float = float("inf")) -> Result | None:
        result = real(self, until)
        crossed.extend([result] if result is not None else [])
        return result

    def masking(self: SecureAggregation, one: Update, task: Task, secrets: ClientSecrets) -> Update:
        plain.append(one.vectors["model"].clone())
        return whole(self, one, task, secrets)

    monkeypatch.setattr(Simulation, "next", spied)
    monkeypatch.setattr(SecureAggregation, "mask", masking)
    simulate(
        recipes.fedavg(lr=0.1).with_(transforms=[SecureAggregation()]), CLIENTS, model(), rounds=2, evaluate_every=0
    )
    trained = [result for result in crossed if result.task.query is None]
    assert len(plain) == len(trained) == 12
    wire = b"|".join(
        tensor.contiguous().numpy().tobytes()
        for result in crossed
        if result.update is not None
        for tensor in result.update.vectors.values()
    )
    for change in plain:
        text = change.numpy().tobytes()
        assert not any(text[at : at + 8] in wire for at in range(0, len(text) - 8, 4))
    for result in trained:
        assert result.update is not None
        assert (result.update.examples, result.update.steps, result.update.metrics) == (0, 0, {})


@pytest.mark.full
def test_rounds_of_too_few_are_abandoned_and_the_run_goes_on() -> None:
    """Devices drop out in every exchange of a round; the model moves only where there is a sum."""
    fleet = Homogeneous(dropout=0.1)
    recipe = recipes.fedavg(lr=0.1).with_(transforms=[SecureAggregation(threshold=0.8)])
    run = simulate(recipe, CLIENTS, model(), rounds=12, simulator={"fleet": fleet}, evaluate_every=0)
    reasons = [row["reason"] or "" for row in run.results]
    norms = [row["norm"] for row in run.rounds]
    assert len(norms) == 12
    whole = [row["arrived"] > 0 for row in run.rounds]
    assert any(whole)
    assert not all(whole)
    for before, after, step in zip(norms, norms[1:], whole[1:], strict=False):
        assert (before != after) == step
    assert any("no secure aggregation" in reason for reason in reasons)
    assert "it did not exchange keys" in reasons
    assert "lost" in reasons
    again = simulate(recipe, CLIENTS, model(), rounds=12, simulator={"fleet": fleet}, evaluate_every=0)
    assert again.results == run.results


def test_a_run_whose_rounds_are_all_abandoned_fails() -> None:
    with pytest.raises(RuntimeFault, match="no update counted"):
        simulate(recipes.fedavg(lr=0.1, cohort=1).with_(transforms=[SecureAggregation()]), CLIENTS, model(), rounds=2)


@pytest.mark.parametrize(
    "scheduling",
    [
        {"kind": "synchronous", "cohort": 3, "over_selection": 2.0},
        {"kind": "deadline", "seconds": 8.0, "max_staleness": 0},
    ],
    ids=lambda one: one["kind"],
)
def test_late_updates_stay_masked(scheduling: dict[str, Any]) -> None:
    fleet: Devices = piebald.data.partition.FastSlow(fast=1.0, slow_factor=4.0, share_slow=0.4)
    recipe = recipes.fedavg(lr=0.1).with_(scheduling=scheduling, transforms=[SecureAggregation(threshold=0.51)])
    run = simulate(recipe, CLIENTS, model(), rounds=5, simulator={"fleet": fleet})
    assert {"ok", "late"} <= {row["status"] for row in run.results}
    assert sum(row["arrived"] > 0 for row in run.rounds) >= 3


@pytest.mark.full
def test_noise_at_the_clients_and_noise_at_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    # other settings have other noise, by which the two runs could not be compared
    monkeypatch.setattr("piebald.runs.prepare._noise_key", lambda *_: "the same")
    for transforms, aggregation in (
        ([Gaussian(clip=0.5, noise=1.0, where="client"), SecureAggregation()], "example_weighted"),
        ([Gaussian(clip=0.5, noise=1.0, where="server"), SecureAggregation()], "equal_weighted"),
    ):
        recipe = recipes.fedavg(lr=0.1).with_(aggregation=aggregation)
        plain = simulate(recipe.with_(transforms=transforms[:1]), CLIENTS, model(), rounds=3)
        summed = simulate(recipe.with_(transforms=transforms), CLIENTS, model(), rounds=3)
        torch.testing.assert_close(summed.cluster_models[0], plain.cluster_models[0], atol=1e-4, rtol=1e-4)
