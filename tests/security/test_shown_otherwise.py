"""A server that shows members of one sum different things learns nothing of any: their masks do not cancel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piebald import recipes
from piebald.contracts import SUM, ClientSecrets, Task, Update, server, shown_digest, task_digest
from piebald.core.errors import SettingError
from piebald.inference.queries.columns import MaskedSumsQuery
from piebald.privacy import SecureAggregation
from piebald.privacy.secure_aggregation import key_queries, masks, server_side
from piebald.privacy.secure_aggregation.key_exchange import KeyRound
from piebald.privacy.secure_aggregation.key_queries import DIGEST, rounding_seed
from piebald.privacy.secure_aggregation.server_side import SecureRound, masked, replied
from tests.fakes import few

from .lying_server import Clients

COUNT, VICTIM, SIZE = 5, 2, 4000
QUERY = MaskedSumsQuery(bounds=((0.0, 1.0),), bins=4)
TRUE = Task(2, 0, 3, {"model": torch.linspace(-1, 1, 60), "control": torch.ones(7), "private": torch.zeros(2)})

Change = Callable[[Task], Task]


def with_vectors(**vectors: torch.Tensor) -> Change:
    return lambda task: dataclasses.replace(task, vectors={**task.vectors, **vectors})


def with_fields(**fields: Any) -> Change:
    return lambda task: dataclasses.replace(task, **fields)


def one_bit(task: Task) -> Task:
    model = task.vectors["model"].clone()
    model.view(torch.int32)[-1] ^= 1
    return with_vectors(model=model)(task)


def without_control(task: Task) -> Task:
    return dataclasses.replace(task, vectors={n: one for n, one in task.vectors.items() if n != "control"})


LIES: dict[str, Change] = {
    "hidden biases that kill all units": with_vectors(model=torch.full((60,), -1e4)),
    "a model that differs in one bit": one_bit,
    "a model of another type": with_vectors(model=TRUE.vectors["model"].double()),
    "a model of another shape": with_vectors(model=TRUE.vectors["model"].view(6, 10)),
    "SCAFFOLD's control": with_vectors(control=torch.full((7,), 9.0)),
    "no control": without_control,
    "one vector more": with_vectors(candidates=torch.zeros(3)),
    "a vector of another name": lambda task: with_vectors(c=task.vectors["control"])(without_control(task)),
    "another attempt": with_fields(attempt=1),
    "other steps behind the model": with_fields(committed=10),
}
ASKED = with_fields(query=QUERY)
QUESTIONS: dict[str, Change] = {
    "bounds that hide all rows": with_fields(query=MaskedSumsQuery(bounds=((1e29, 2e29),), bins=4)),
    "other bins": with_fields(query=MaskedSumsQuery(bounds=((0.0, 1.0),), bins=5)),
}
ABOUT_OTHER_ROWS: dict[str, tuple[Task, Change]] = {
    "a question in place of training": (TRUE, ASKED),
    "training in place of a question": (ASKED(TRUE), with_fields(query=None)),
    "another split": (ASKED(TRUE), with_fields(query=QUERY.model_copy(update={"split": "test"}))),
    "another version": (TRUE, with_fields(version=4)),  # than that which their signatures are for
}


class Shown:
    """Five clients whose tasks the server changes as it likes; the victim alone has an update that is not zero.

    Attributes:
        updates: as they arrived.
        why: why clients sent nothing.
    """

    def __init__(self, tasks: Mapping[int, Task], terms: Mapping[int, str] | None = None, bits: int = 32) -> None:
        masking = SecureAggregation(aggregation={"kind": "equal_weighted"}, heaviest=1.0, least=2, range=8.0, bits=bits)  # type: ignore[arg-type]
        self.clients = clients = Clients(masking, COUNT)
        self.terms = terms or {}
        clients.secrets = self._secrets  # type: ignore[method-assign]
        self.own = torch.randn(SIZE, generator=torch.Generator().manual_seed(4))
        zero = Update({"model": torch.zeros(SIZE)}, 1, 1, {"loss": 0.0})
        clients.updates = {client: zero for client in range(COUNT)} | {
            VICTIM: dataclasses.replace(zero, vectors={"model": self.own})
        }
        query = next(iter(tasks.values())).query if VICTIM not in tasks else tasks[VICTIM].query
        about = KeyRound(TRUE.version, () if query is None else tuple(query.rows_read(False)))
        self.round = SecureRound.of(masking, range(COUNT), clients, about)  # type: ignore[arg-type]
        self.updates: dict[int, Update] = {}
        self.why: dict[int, str] = {}
        for client, task in tasks.items():
            told = dataclasses.replace(task, client=client, vectors={**task.vectors, **self.round.vectors(client)})
            made, why = masked(clients.updates[client], told, clients.spec, clients.secrets(client))
            if made is None:
                self.why[client] = str(why)
            else:
                self.updates[client] = made

    def _secrets(self, client: int) -> ClientSecrets:
        secrets = Clients.secrets(self.clients, client)
        return dataclasses.replace(secrets, terms=self.terms.get(client, ""))

    def opened(self) -> np.ndarray[Any, Any] | str:
        """What the server gets: the numbers of the sum, or why there is none."""
        total = self.round.total(self.updates, self.clients)  # type: ignore[arg-type]
        if isinstance(total, str):
            return total
        return self.clients.masking.decode(total, COUNT)[2:] * self.clients.masking.reach

    def likeness(self, numbers: np.ndarray[Any, Any]) -> float:
        """The cosine between what the server has and the victim's update."""
        own = self.own.double().numpy()
        return float(numbers @ own / np.linalg.norm(numbers) / np.linalg.norm(own))


def shown_to_others(change: Change, base: Task = TRUE) -> dict[int, Task]:
    return {client: base if client == VICTIM else change(base) for client in range(COUNT)}


def gullible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that give shares whatever others have signed, and a server that goes on."""
    monkeypatch.setattr(key_queries, "_check_quorum", lambda *_: None)
    monkeypatch.setattr(server_side, "_common", lambda signed, *_: signed[VICTIM].shown)


CASES = {**{name: (TRUE, change) for name, change in LIES.items()},
         **{name: (ASKED(TRUE), change) for name, change in QUESTIONS.items()}}  # fmt: skip


@pytest.mark.parametrize(("base", "change"), CASES.values(), ids=CASES)
def test_who_was_shown_something_else_is_named_and_nothing_is_opened(base: Task, change: Change) -> None:
    made = Shown(shown_to_others(change, base))
    said = made.opened()
    assert said == "no secure aggregation: client 2 signed that other terms, another model or another question came"
    assert made.clients.excluded == {VICTIM: "it signed that it was shown something else than the others"}


@pytest.mark.parametrize(("base", "change"), CASES.values(), ids=CASES)
def test_masks_alone_hide_it_from_who_has_every_seed_of_an_own_mask(
    base: Task, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where all clients give their shares, which they do not: pairwise masks are left, and the sum is noise."""
    gullible(monkeypatch)
    numbers = Shown(shown_to_others(change, base)).opened()
    assert not isinstance(numbers, str)
    assert abs(Shown(shown_to_others(lambda task: task)).likeness(numbers)) < 6 / np.sqrt(SIZE)


@pytest.mark.parametrize(("base", "change"), ABOUT_OTHER_ROWS.values(), ids=ABOUT_OTHER_ROWS)
def test_keys_are_for_one_kind_of_rows_and_one_version(base: Task, change: Change) -> None:
    """Who has said what its training rows count sends no answer about its test rows under these keys."""
    made = Shown(shown_to_others(change, base))
    assert made.updates.keys() == {VICTIM}
    assert all("keys are for a sum" in why for why in made.why.values())


def test_without_the_digest_in_the_seeds_the_same_lies_open_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control of the attack, as it was: the sum is the victim's update, whatever signatures say."""
    gullible(monkeypatch)
    monkeypatch.setattr(key_queries, "shown_to", lambda *_: bytes(32))
    made = Shown(shown_to_others(LIES["hidden biases that kill all units"]))
    numbers = made.opened()
    assert not isinstance(numbers, str)
    assert made.likeness(numbers) == pytest.approx(1.0, abs=1e-6)


def test_other_terms_hide_it_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {client: "ab" if client == VICTIM else "cd" for client in range(COUNT)}
    alike = shown_to_others(lambda task: task)
    assert "client 2 signed" in str(Shown(alike, others).opened())
    gullible(monkeypatch)
    made = Shown(alike, others)
    assert abs(made.likeness(made.opened())) < 6 / np.sqrt(SIZE)  # type: ignore[arg-type]


def test_the_sum_of_those_who_were_shown_the_same_is_opened() -> None:
    """Tasks differ in what each client may be sent alone: its number, its first private numbers, and keys."""
    tasks = {
        client: dataclasses.replace(TRUE, id=client + 7, vectors={**TRUE.vectors, "private": torch.full((2,), client)})
        for client in range(COUNT)
    }
    made = Shown(tasks, dict.fromkeys(range(COUNT), "ab"))
    numbers = made.opened()
    assert not isinstance(numbers, str)
    assert np.abs(numbers - made.own.double().numpy()).max() < 1e-5


@pytest.mark.parametrize("gone", [0, 4])
def test_the_masks_of_who_dropped_out_belong_to_what_was_shown(gone: int) -> None:
    """The server takes off the masks of a client whose update is missing by the digest that the others have signed."""
    made = Shown({client: TRUE for client in range(COUNT) if client != gone})
    numbers = made.opened()
    assert not isinstance(numbers, str)
    assert np.abs(numbers - made.own.double().numpy()).max() < 1e-5


def test_a_client_that_was_left_out_of_a_list_is_not_read_by_what_the_others_were_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others sign a list without the victim, so the server gets the key of its pairwise masks, and not its own."""
    made = Shown(shown_to_others(LIES["hidden biases that kill all units"]))
    own = made.updates.pop(VICTIM)
    numbers = made.opened()
    assert not isinstance(numbers, str)
    assert np.abs(numbers).max() < 1e-5  # the sum of four updates of zeros, and nothing of the fifth
    left = made.clients.masking.decode(own.vectors[SUM].numpy().view("<u4"), COUNT)[2:]
    assert abs(made.likeness(left)) < 6 / np.sqrt(SIZE)


def test_where_no_quorum_was_shown_the_same_nobody_is_to_blame() -> None:
    tasks = {client: TRUE if client < 3 else one_bit(TRUE) for client in range(COUNT)}
    made = Shown(tasks)
    assert str(made.opened()).startswith("no secure aggregation: clients 3, 4 signed that other terms")
    assert made.clients.excluded == {}


def test_sites_say_who_was_shown_something_else() -> None:
    made, said = Shown(shown_to_others(one_bit)), dict[int, str | None]()

    def ask(client: int, query: Any, vectors: Any) -> Update | None:
        task = Task(1, client, 0, vectors, query)
        update, said[client] = replied(task, made.clients.spec, made.clients.secrets(client))
        return update

    made.clients.ask = ask  # type: ignore[method-assign]
    made.opened()
    sentence = (
        "client {} has signed that the server showed it something else than this site: other terms, another model "
    )
    for client, why in said.items():
        assert why == sentence.format(0 if client == VICTIM else VICTIM) + "or another question"
    assert said.keys() == {*range(COUNT)}


def test_a_digest_that_was_not_signed_stops_nobody() -> None:
    """The server relays another digest than a client has signed: that signature does not count, and no more."""
    made = Shown({client: TRUE for client in range(COUNT)})
    real = made.clients.ask

    def ask(client: int, query: Any, vectors: Any) -> Update | None:
        if DIGEST in vectors:
            vectors = {**vectors, DIGEST: vectors[DIGEST].clone()}
            vectors[DIGEST][0] ^= 255
        return real(client, query, vectors)

    made.clients.ask = ask  # type: ignore[method-assign]
    assert not isinstance(made.opened(), str)


def test_a_model_that_is_sent_again_must_be_the_same() -> None:
    """Two vectors under one set of keys differ by what they hide; so do two tasks, in their masks."""
    made = Shown({client: TRUE for client in range(COUNT)})
    clients = made.clients
    about = made.round.vectors(VICTIM)
    again = dataclasses.replace(TRUE, client=VICTIM, vectors={**TRUE.vectors, **about})
    same, _ = masked(clients.updates[VICTIM], again, clients.spec, clients.secrets(VICTIM))
    assert same is not None
    assert torch.equal(same.vectors[SUM], made.updates[VICTIM].vectors[SUM])
    for change in LIES.values():
        none, why = masked(clients.updates[VICTIM], change(again), clients.spec, clients.secrets(VICTIM))
        assert (none, why) == (None, "its keys have masked another update already")


def test_a_digest_is_of_one_sum() -> None:
    """What was signed in a sum before is about other keys, so it does not count in this one."""
    first, second = (Shown({client: TRUE for client in range(COUNT)}) for _ in range(2))
    second.clients.draws = {client: (lambda count, own=client: bytes([own + 1]) * count) for client in range(COUNT)}
    fresh = SecureRound.of(second.clients.masking, range(COUNT), second.clients)  # type: ignore[arg-type]
    total = fresh.total(first.updates, second.clients)  # type: ignore[arg-type]
    assert isinstance(total, str)


# ------------------------------------------------------------------------------------------------------------ digests


NUMBERS = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.uint8, torch.float16, torch.bfloat16])
VECTORS = st.dictionaries(
    st.sampled_from(["model", "control", "a", "b"]),
    st.tuples(NUMBERS, st.lists(st.integers(0, 3), max_size=5), st.booleans()),
    max_size=3,
)


@few
@given(VECTORS, VECTORS, st.sampled_from([None, 0, "0", [0], {"a": 1}]), st.sampled_from([None, 0, "0", {"a": 1}]))
def test_digests_are_equal_for_the_same_bytes_alone(one: Any, two: Any, first: Any, second: Any) -> None:
    def made(parts: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        found = {name: torch.tensor(list(own), dtype=kind) for name, (kind, own, _) in parts.items()}
        return {name: part.view(1, -1) if parts[name][2] else part for name, part in found.items()}

    same = one == two and first == second
    assert (shown_digest(first, made(one)) == shown_digest(second, made(two))) == same


def test_a_digest_is_over_bytes_wherever_they_lie() -> None:
    """Views, strides and copies of the same numbers are the same; -0.0 and other NaN are not."""
    whole = torch.arange(24, dtype=torch.float32).view(4, 6)
    kinds = [whole, whole.clone(), torch.stack([whole, whole], 2)[:, :, 1], whole.t().contiguous().t()]
    assert len({shown_digest(None, {"model": one}) for one in kinds}) == 1
    odd = [torch.tensor([0.0]), torch.tensor([-0.0]), torch.tensor([float("nan")]), torch.tensor([-float("nan")])]
    assert len({shown_digest(None, {"model": one}) for one in odd}) == 4


def test_a_tensor_that_changes_has_another_digest() -> None:
    """The digest of a tensor that many clients are shown is computed once, and anew where it was written to."""
    model = torch.zeros(5)
    before = task_digest(Task(1, 0, 0, {"model": model}))
    assert task_digest(Task(2, 1, 0, {"model": model})) == before
    model[0] = 1
    assert (
        task_digest(Task(1, 0, 0, {"model": model})) == task_digest(Task(1, 0, 0, {"model": model.clone()})) != before
    )


def test_a_model_is_hashed_once_for_all_who_are_shown_it(monkeypatch: pytest.MonkeyPatch) -> None:
    read, real = list[int](), server.raw
    monkeypatch.setattr(server, "raw", lambda tensor: read.append(tensor.numel()) or real(tensor))
    model, control = torch.ones(50), torch.ones(20)
    for client in range(9):
        task_digest(Task(client, client, 3, {"model": model, "control": control}))
    assert sorted(read) == [20, 50]


# ------------------------------------------------------------------------------------------- what clients begin with


def test_who_begins_with_numbers_of_its_own_is_in_no_sum() -> None:
    with pytest.raises(SettingError, match="one_hot lets each client begin with other numbers"):
        recipes.cgau(shared_matrix=True).with_(transforms=["secure_aggregation"])
    recipes.cgau().with_(transforms=["secure_aggregation"])


def test_rounding_repeats_with_the_task_and_differs_between_clients() -> None:
    digest = task_digest(TRUE)
    seeds = {rounding_seed(one, client) for one in (digest, task_digest(one_bit(TRUE))) for client in range(3)}
    assert len(seeds) == 6
    assert {len(one) for one in seeds} == {masks.KEY}
    assert rounding_seed(digest, 1) == rounding_seed(task_digest(TRUE), 1)
