"""Members of a secure aggregation that do not keep to the protocol: the others get their sum, or a name.

Before, a wrong signature or a wrong share of one member made the round fail, and every round after it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from piebald import recipes
from piebald.contracts import SIGNATURE, PartialSum, QueryRequest, Update
from piebald.core.errors import Declined
from piebald.privacy import SecureAggregation
from piebald.privacy.secure_aggregation import key_queries, server_side
from piebald.privacy.secure_aggregation.key_queries import (
    COMMITMENTS,
    DISPUTED,
    KEYS,
    PROOF,
    PUBLISHED,
    READERS,
    SHARES,
    SIGNED,
    ShowShares,
)
from piebald.privacy.secure_aggregation.masks import CONTEXT, MaskingGraph, numbers, rows
from piebald.privacy.secure_aggregation.server_side import SecureRound
from tests.fakes import classified, seeded, simulate

from .lying_server import SIZE, Clients
from .test_lying_server import summing

BAD, COUNT = 2, 7
Answer = dict[str, Tensor]
Change = Callable[[Answer], Answer | None]


class WithOneLiar(Clients):
    """Clients of whom one changes its answers to questions of some kinds, and may not upload."""

    def __init__(self, changes: dict[str, Change], uploads: bool = True, **fields: Any) -> None:
        super().__init__(summing(**fields), COUNT)
        self.changes, self.uploads, self.asked = changes, uploads, list[str]()

    def query(self, requests: Sequence[QueryRequest]) -> list[Update | None]:
        kind = requests[0].query.kind
        self.asked.append(kind)
        answers = super().query(requests)
        for place, (one, answer) in enumerate(zip(requests, answers, strict=True)):
            if one.client == BAD and answer is not None and kind in self.changes:
                changed = self.changes[kind](dict(answer.vectors))
                answers[place] = None if changed is None else Update(changed, 0, 0, {})
            found = answers[place]
            if found is not None and one.query.reject_reason(found, self.spec) is not None:
                answers[place] = None
        return answers

    def sum(self) -> PartialSum | str:
        made = SecureRound.of(self.masking, [*self.updates], self)  # type: ignore[arg-type]
        arrived = {}
        for client in sorted(self.updates.keys() - made.absent.keys()):
            vector = self.mask(client, made.vectors(client))
            assert vector is not None, client
            if client != BAD or self.uploads:
                arrived[client] = Update(
                    {"sum": torch.from_numpy(vector.view(f"<i{self.masking.bits // 8}"))}, 0, 0, {}
                )
        return made.unmask(arrived, self)  # type: ignore[arg-type]

    def right(self, found: PartialSum | str, members: Sequence[int]) -> bool:
        """Whether a sum is that of these members."""
        assert isinstance(found, PartialSum), found
        mean = sum(0.25 * (1 + client % 7) for client in members) / len(members)
        return found.weight == pytest.approx(len(members)) and bool(
            torch.allclose(found.vectors["model"] / found.weight, torch.full((SIZE,), mean), atol=1e-6)
        )


def garbled(name: str, row: int = 0) -> Change:
    """Another row in place of one, or of all (-1)."""

    def change(answer: Answer) -> Answer:
        answer[name] = answer[name].clone()
        answer[name][slice(None) if row < 0 else row] ^= 1
        return answer

    return change


def shorter(name: str) -> Change:
    return lambda answer: answer | {name: answer[name][:-1]}


def silent(_: Answer) -> None:
    return None


def low_order(answer: Answer) -> Answer:
    return answer | {KEYS: torch.zeros_like(answer[KEYS])}


def accuses(answer: Answer) -> Answer:
    """Disputes everything, with signatures of nothing."""
    count = len(answer[DISPUTED])
    return {DISPUTED: torch.ones(count, 1, dtype=torch.uint8), SIGNED: torch.ones(count, SIGNATURE, dtype=torch.uint8)}


OTHERS = [client for client in range(COUNT) if client != BAD]
LIES: dict[str, tuple[dict[str, Change], str | None]] = {
    "a bad signature": ({"advertise_keys": garbled(SIGNED)}, "its keys are not signed by it for this sum"),
    "keys of low order": ({"advertise_keys": low_order}, "its public keys are no keys"),
    "other keys than signed": (
        {"advertise_keys": garbled(KEYS)},
        "it showed other keys than those that it had committed to",
    ),
    "no keys": ({"advertise_keys": silent}, None),
    "boxes missing": ({"share_keys": shorter(SHARES)}, "it sent shares for 5 neighbours of 6, 7 digests of them"),
    "digests missing": ({"share_keys": shorter(PUBLISHED)}, "it sent shares for 6 neighbours of 6, 6 digests of them"),
    "no shares": ({"share_keys": silent}, None),
    "no check": ({"check_shares": silent}, None),
    "half a check": ({"check_shares": shorter(DISPUTED)}, "it judged 5 shares of 6, with 0 signatures"),
    "accusations without signatures": (
        {"check_shares": accuses},
        "it did not sign that it disputes the shares of client 0",
    ),
    "boxes of garbage, and silence": ({"share_keys": garbled(SHARES, -1)}, None),
    "wrong digests, and silence": ({"share_keys": garbled(PUBLISHED)}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", LIES)
def test_who_lies_before_training_is_left_out_and_the_others_get_their_sum(case: str) -> None:
    changes, says = LIES[case]
    clients = WithOneLiar(changes)
    assert clients.right(clients.sum(), OTHERS)
    assert clients.excluded == ({} if says is None else {BAD: says})


@pytest.mark.parametrize("neighbours", [None, 4])
def test_keys_must_be_those_that_were_committed_to(neighbours: int | None) -> None:
    clients = WithOneLiar({"commit_keys": garbled(COMMITMENTS)}, neighbours=neighbours)
    assert clients.right(clients.sum(), OTHERS)
    assert clients.excluded == {}  # its client noticed, and showed no keys


LATE: dict[str, tuple[dict[str, Change], str | None]] = {
    "a bad signature of the survivors": (
        {"confirm_survivors": garbled(SIGNED)},
        "it did not sign the list of those who arrived",
    ),
    "no signature of the survivors": ({"confirm_survivors": silent}, None),
    "a wrong share": ({"unmasking": garbled(SHARES, 3)}, "it gave another share of client 3 than it had got"),
    "wrong shares of everything": (
        {"unmasking": garbled(SHARES, -1)},
        "it gave another share of client 0 than it had got",
    ),
    "fewer shares": ({"unmasking": shorter(SHARES)}, "it gave 6 shares of 7"),
    "no shares": ({"unmasking": silent}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", LATE)
def test_who_lies_later_is_named_and_the_sum_is_right(case: str) -> None:
    """Its own update arrived and is in the sum; what it gives of others does not count."""
    changes, says = LATE[case]
    clients = WithOneLiar(changes)
    assert clients.right(clients.sum(), range(COUNT))
    assert clients.excluded == ({} if says is None else {BAD: says})


@pytest.mark.parametrize("shows", ["what it published", "something else"])
def test_who_sends_garbage_shows_what_it_published_or_is_left_out(shows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = key_queries.encrypted_for

    def encrypted(graph: MaskingGraph, client: int, root: bytes, both: Any) -> dict[int, bytes]:
        boxes = real(graph, client, root, both)
        return {to: bytes(len(box)) for to, box in boxes.items()} if client == BAD else boxes

    for module in (key_queries,):
        monkeypatch.setattr(module, "encrypted_for", encrypted)
    clients = WithOneLiar({} if shows == "what it published" else {"show_shares": garbled(SHARES)}, threshold=1.0)
    if shows == "what it published":  # six neighbours dispute it, and seven shares open a mask
        assert clients.right(clients.sum(), range(COUNT))
        assert clients.excluded == {}
    else:
        made = SecureRound.of(clients.masking, range(COUNT), clients)  # type: ignore[arg-type]
        assert {*made.absent.values()} == {"no secure aggregation: only 6 of 7 clients exchanged keys"}
        assert clients.excluded == {BAD: "it sent client 0 other shares than it has published digests of"}


def test_false_accusations_stop_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member disputes right shares, with its signature: who sent them shows them, to who has them anyway."""
    real = key_queries.share_digests

    def blind(both: bytes, graph: MaskingGraph, owner: int, holder: int) -> bytes:
        return b"" if holder == BAD and owner < COUNT and watching[0] else real(both, graph, owner, holder)

    watching = [False]
    clients = WithOneLiar({})
    asked = clients.ask

    def ask(client: int, query: Any, vectors: Any) -> Update | None:
        watching[0] = (query.kind, client) == ("check_shares", BAD)
        return asked(client, query, vectors)

    monkeypatch.setattr(key_queries, "share_digests", blind)
    monkeypatch.setattr(clients, "ask", ask)
    assert clients.right(clients.sum(), range(COUNT))
    assert clients.asked.count("show_shares") == 1
    assert clients.excluded == {}


@pytest.mark.parametrize("uploads", [True, False])
@pytest.mark.parametrize("which", ["masks", "self"])
def test_who_shares_something_else_than_its_secret_is_named(
    which: str, uploads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right digests of shares of a wrong secret, or of no secret at all: nobody can tell before they are opened.

    It costs one step.  No wrong sum results, and no share of the other kind is given.
    """
    real = key_queries.own_shares

    def other(kind: str, graph: MaskingGraph, client: int, root: bytes) -> dict[int, bytes]:
        shares = real(kind, graph, client, root)
        if (kind, client) != (which, BAD):
            return shares
        return {place: place.to_bytes(key_queries.BYTES) for place in shares}  # on a line, its secret is 0

    for module in (key_queries,):
        monkeypatch.setattr(module, "own_shares", other)
    clients = WithOneLiar({}, uploads=uploads)
    found = clients.sum()
    if (which == "self") is not uploads:  # what it shared wrongly is not needed
        assert clients.right(found, range(COUNT) if uploads else OTHERS)
        return
    what = "the seed of its mask" if which == "self" else "its key"
    assert (
        found == f"no secure aggregation: client {BAD} shared something else than {what}, so the sum cannot be opened"
    )
    assert clients.excluded == {BAD: f"it shared something else than {what}"}


def test_a_wrong_digest_of_the_seed_is_named() -> None:
    clients = WithOneLiar({"share_keys": garbled(PROOF)})
    assert "client 2 shared something else than the seed of its mask" in str(clients.sum())
    assert [*clients.excluded] == [BAD]


def test_too_few_that_answer_are_named() -> None:
    clients = WithOneLiar({"confirm_survivors": silent}, threshold=1.0)
    assert clients.sum() == (
        "no secure aggregation: 6 of 7 clients confirmed who arrived, it takes 7; client 2 did not"
    )
    clients = WithOneLiar({"unmasking": garbled(SHARES, -1)}, threshold=1.0)
    assert clients.sum() == (
        "no secure aggregation: 6 right shares of the mask of client 0 came, it takes 7; client 2 gave none"
    )


# ------------------------------------------------------------------------------- what the new questions tell the server


def shown_for(clients: Clients, sender: int, reader: int, signer: int, claim: bytes, context: bytes) -> Any:
    signed = clients.secrets(signer).signer.sign(claim)
    about = {CONTEXT: rows([context], 32), READERS: numbers([reader]), SIGNED: rows([signed], SIGNATURE)}
    return ShowShares().reply(about, clients.secrets(sender), clients.masking)


@pytest.mark.parametrize("tampered", [key_queries.BOXES, PUBLISHED])
def test_a_server_that_lies_sees_no_share_of_holders_that_did_not_ask_for_it(tampered: str) -> None:
    """It changes a box or a digest, so that an honest holder disputes what an honest member has sent."""
    seen = list[tuple[str, Update | None]]()

    class Tampering(Clients):
        def ask(self, client: int, query: Any, vectors: Any) -> Update | None:
            if query.kind == "check_shares":
                vectors = {**vectors, tampered: vectors[tampered] ^ 1}
            answer = super().ask(client, query, vectors)
            seen.append((query.kind, answer))
            return answer

        def check_signature(self, client: int, text: bytes, signature: bytes) -> bool:
            return True

    SecureRound.of(summing(), range(COUNT), Tampering(summing(), COUNT))  # type: ignore[arg-type]
    disputed = [answer for kind, answer in seen if kind == "check_shares"]
    assert all(one is not None and bool(one.vectors[DISPUTED].all()) for one in disputed)
    assert [answer for kind, answer in seen if kind == "show_shares"] == [None] * COUNT


def test_shares_are_shown_once_signed_for_and_to_fewer_than_open_a_mask() -> None:
    clients = Clients(summing(), COUNT)
    made = SecureRound.of(clients.masking, range(COUNT), clients)  # type: ignore[arg-type]
    assert made.exchanged is not None
    graph, sent = made.exchanged.graph, made.exchanged.sent[0]
    claims = {
        reader: key_queries.dispute_claim(graph, 0, reader, sent.boxes[reader], sent.published[reader])
        for reader in graph.neighbours[0]
    }
    for reader, signer, claim in ((1, 2, claims[1]), (1, 1, claims[2]), (0, 0, claims[1])):
        with pytest.raises(Declined, match=r"has not signed that it disputes|not those of neighbours"):
            shown_for(clients, 0, reader, signer, claim, graph.context)
    for reader in range(1, graph.threshold):  # these act with the server
        shown_for(clients, 0, reader, reader, claims[reader], graph.context)
    last = graph.threshold
    with pytest.raises(Declined, match=f"{last} neighbours dispute their shares, and {last} shares open a mask"):
        shown_for(clients, 0, last, last, claims[last], graph.context)
    assert clients.mask(0, made.vectors(0)) is not None
    with pytest.raises(Declined, match="an update was masked already"):
        shown_for(clients, 0, 1, 1, claims[1], graph.context)


# ----------------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_goes_on_without_a_member_that_lies(
    workers: int, monkeypatch: pytest.MonkeyPatch, caplog: Any, tmp_path: Path
) -> None:
    """Each member that lies spoils one step at most; the run folder and the log name it.

    Workers train only.  All members are in the process that is the server as well, so none can lie in a worker.
    """
    real, place = server_side.replied, tmp_path / "processes"
    lies = {1: ("advertise_keys", SIGNED), 4: ("share_keys", PROOF)}

    def lying(task: Any, work: Any, secrets: Any) -> server_side.Outcome:
        with place.open("a") as file:  # a forked worker would write here, too
            file.write(f"{os.getpid()}\n")
        answer, why = real(task, work, secrets)
        kind, name = lies.get(task.client, ("", ""))
        if answer is not None and task.query.kind == kind:
            answer = Update(garbled(name)(dict(answer.vectors)) or {}, 0, 0, {})
        return answer, why

    monkeypatch.setattr(server_side, "replied", lying)
    recipe = recipes.fedavg(lr=0.1).with_(transforms=[SecureAggregation()])
    clients, model = classified(*itertools.repeat(20, COUNT)), seeded(lambda: torch.nn.Linear(4, 2))
    run = simulate(recipe, clients, model, rounds=3, simulator={"workers": workers})
    assert {*place.read_text().split()} == {str(os.getpid())}
    assert [row["arrived"] for row in run.rounds] == [0, COUNT - 2, COUNT - 2]
    noted = [one for note in run.notes if note["name"] == "refused" for one in note["value"]]
    assert [(one["client"], one["reason"]) for one in noted] == [
        (1, "its keys are not signed by it for this sum"),
        (4, "it shared something else than the seed of its mask"),
    ]
    assert caplog.messages == [f"client {one['client']} is not asked any more: {one['reason']}" for one in noted]
