"""A masked sum is of members that count, each about as much as any other, and keys are for one sum.

Before, masks counted members: four sites without rows, or with a weight of next to nothing, hid the fifth from nobody,
and keys that a site had signed for one round could be shown in any other one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piebald import recipes
from piebald.contracts import SIGNATURE, PartialSum, Split, SumDemands, Update
from piebald.core.errors import Declined
from piebald.federation.site.policy import Policy
from piebald.methods.transforms import Gaussian
from piebald.privacy import SecureAggregation
from piebald.privacy.secure_aggregation import masks
from piebald.privacy.secure_aggregation.key_exchange import KeyRound
from piebald.privacy.secure_aggregation.key_queries import KEYS, SIGNED, SIZES, ShareKeys
from piebald.privacy.secure_aggregation.masks import sizes_in, texts
from piebald.privacy.secure_aggregation.server_side import SecureRound
from piebald.privacy.secure_aggregation.transform import largest_weight, least_weight, size_of
from tests.fakes import SGD, classified, client_work, few, parameters, seeded, simulate

from .lying_server import SIZE, Clients, told_keys
from .test_lying_server import summing

BY_ROWS: dict[str, Any] = {"aggregation": {"kind": "example_weighted"}, "heaviest": 10_000.0}


class OfRows(Clients):
    """Clients with these numbers of rows, whose updates are their own numbers."""

    def __init__(self, rows: Sequence[int], masking: SecureAggregation | None = None) -> None:
        super().__init__(masking or summing(**BY_ROWS), len(rows))
        for client, count in enumerate(rows):
            self.updates[client] = replace(self.updates[client], examples=count, steps=0)
        self.said: dict[int, str | None] = {}

    def round(self, splits: tuple[Split, ...] = ()) -> SecureRound:
        return SecureRound.of(self.masking, [*self.updates], self, KeyRound(splits=splits))  # type: ignore[arg-type]

    def sum(self, gone: int | None = None) -> PartialSum | str:
        """The sum of all clients, or of all but one whose update does not arrive."""
        agreed, arrived = self.round(), {}
        for client in sorted(self.updates.keys() - agreed.absent.keys() - {gone}):
            vector = self.mask(client, agreed.vectors(client))
            if vector is not None:
                numbers = torch.from_numpy(vector.view(f"<i{self.masking.bits // 8}"))
                arrived[client] = Update({"sum": numbers}, 0, 0, {})
        return agreed.unmask(arrived, self)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- members that count


def test_who_has_no_rows_is_no_member() -> None:
    """Four of five: the sum would be the update of the fifth."""
    alone = OfRows([0, 0, 700, 0, 0], summing(**BY_ROWS, least=5, threshold=1.0))
    assert isinstance(alone.sum(), str)
    four = OfRows([10, 20, 0, 30, 40], summing(**BY_ROWS, least=4))
    found = four.sum()
    assert isinstance(found, PartialSum)
    assert found.weight == pytest.approx(100, rel=1e-6)
    assert isinstance(OfRows([10, 20, 0, 30, 40], summing(**BY_ROWS, least=5)).sum(), str)


@pytest.mark.parametrize("aggregation", ["equal_weighted", "example_weighted"])
def test_who_says_that_it_counts_and_then_does_not_is_left_out(aggregation: str) -> None:
    """Its rows turn out to have no known target, so nothing of it is in the sum, and the others need their `least`."""
    fields = BY_ROWS | {"aggregation": {"kind": aggregation}}
    clients = OfRows([10, 10, 10, 10, 10], summing(**fields, least=5))
    held = clients.secrets

    def secrets(client: int) -> Any:
        return replace(held(client), rows={"train": 10})

    clients.secrets = secrets  # type: ignore[method-assign]
    clients.updates[3] = replace(clients.updates[3], examples=0)
    assert "4 of 5 clients arrived, it takes 5" in str(clients.sum())


def test_answers_are_of_members_with_rows_of_the_split_that_the_question_is_about() -> None:
    clients = OfRows([10, 10, 10, 10])
    made = clients.round(splits=("test",))
    assert {*made.absent} == {0, 1, 2, 3}
    assert clients.round(splits=("train",)).absent == {}


def test_a_run_goes_on_without_a_client_that_has_no_rows() -> None:
    rows = classified(20, 20, 20, 20)
    recipe = recipes.fedavg(lr=0.1).with_(transforms=["secure_aggregation"])
    model = seeded(lambda: torch.nn.Linear(4, 2))
    run = simulate(recipe, WithoutRows(rows, 1), model, rounds=2, evaluate_every=0)
    assert [row["arrived"] for row in run.rounds] == [3, 3]


class WithoutRows:
    """Clients of whom one has no training rows."""

    def __init__(self, clients: Any, empty: int) -> None:
        self._clients, self._empty = clients, empty
        self.names, self.classes, self.common = clients.names, clients.classes, None

    def __len__(self) -> int:
        return len(self._clients)

    def rows(self, client: int, split: Split) -> Any:
        rows = self._clients.rows(client, split)
        return rows[:0] if (client, split) == (self._empty, "train") else rows

    def size(self, client: int, split: Split) -> int:
        return len(self.rows(client, split))

    def counts(self, client: int, split: Split) -> None:
        return None


# ------------------------------------------------------------------------------------------------ none counts for all


@pytest.mark.parametrize("share", [0.25, 0.34, 0.6, 0.75])
@pytest.mark.parametrize("gone", [None, 0, 2])
def test_no_member_is_more_than_the_stated_share_of_a_sum(share: float, gone: int | None) -> None:
    """Before, one of five could be 89 % of the weights; of those who are left none is more than the share, either."""
    rows = [3, 4, 9000, 5, 700]
    clients = OfRows(rows, summing(**BY_ROWS, largest_share=share, bits=64))
    clients.spec = client_work(parameters(5), SGD, (clients.masking,))
    for client, update in clients.updates.items():  # of each its own number, so that the sum has the weights
        clients.updates[client] = replace(update, vectors={"model": torch.eye(5)[client]})
    opened = clients.sum(gone)
    assert isinstance(opened, PartialSum)
    weights = opened.vectors["model"]
    assert float(weights.max()) <= share * opened.weight * (1 + 1e-6)
    assert float(weights.sum()) == pytest.approx(opened.weight, rel=1e-5)
    for client, count in enumerate(rows):
        assert weights[client] <= count * (1 + 1e-6)
        assert (weights[client] > 2) == (client != gone)


@few
@given(st.lists(st.floats(-30, 30), min_size=2, max_size=9), st.data())
def test_largest_weights_are_for_the_worst_case(logarithms: list[float], data: st.DataObject) -> None:
    """Of all members within their sizes and all groups that may be left; a slightly larger one would be too much."""
    weights = [2.0**logarithm for logarithm in logarithms]
    fewest = data.draw(st.integers(2, len(weights)))
    share = data.draw(st.floats(1 / fewest, 0.99))
    sizes = [size_of(weight) for weight in weights]
    most = largest_weight(sizes, fewest, share)

    def largest(bound: float) -> float:
        lightest = sorted(min(least_weight(size), bound) for size in sizes)[: fewest - 1]
        heaviest = min(least_weight(max(sizes) + 1), bound)
        return heaviest / (heaviest + sum(lightest))

    assert largest(most) <= share * (1 + 1e-9)
    assert most >= least_weight(max(sizes) + 1) * (1 - 1e-9) or largest(most * 1.01) > share * (1 - 1e-9)
    for weight, size in zip(weights, sizes, strict=True):
        assert least_weight(size) <= weight < least_weight(size + 1)


def test_a_share_that_cannot_be_kept_to_is_refused_before_anything_is_masked() -> None:
    clients = OfRows([10] * 5, summing(**BY_ROWS, least=4, largest_share=0.2))
    assert "one of them is more than 0.2 of it" in clients.round().absent[0]
    assert isinstance(OfRows([10] * 5, summing(**BY_ROWS, least=5, threshold=1.0, largest_share=0.2)).sum(), PartialSum)


@pytest.mark.parametrize(
    ("rows", "together"),
    [
        ([100, 120, 90, 101], [0, 1, 2, 3]),
        ([3, 3, 9000, 3, 3], [0, 1, 3, 4]),
        ([1, 500, 400, 300, 2], [1, 2, 3]),
        ([100, 200, 160], [0, 1, 2]),
    ],
)
def test_a_question_is_answered_by_members_of_whom_none_dominates(rows: list[int], together: list[int]) -> None:
    clients = OfRows(rows, summing(**BY_ROWS, least=3))
    agreed = clients.round(splits=("train",))
    assert [client for client in range(len(rows)) if client not in agreed.absent] == together


def test_a_site_with_many_more_rows_than_the_others_makes_all_refuse() -> None:
    """Where the server leaves it in the list."""
    clients = OfRows([3, 3, 9000, 3])
    held = {client: clients.secrets(client) for client in range(4)}
    about, told = told_keys(clients.masking, held, ("train",))
    for client in range(4):
        with pytest.raises(Declined, match="of all rows: set secure_aggregation's largest_share"):
            ShareKeys().reply(listed(clients.masking, about, told), held[client], clients.masking)


def test_an_update_is_shortened_before_it_is_masked() -> None:
    recipe = recipes.fedavg(lr=1000.0).with_(
        aggregation="equal_weighted", transforms=[SecureAggregation(clip=0.5, bits=64)]
    )
    model = seeded(lambda: torch.nn.Linear(4, 2))
    run = simulate(recipe, classified(20, 20, 20), model, rounds=1, evaluate_every=0)
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    assert run.rounds[0]["arrived"] == 3
    assert 0 < float((run.cluster_models[0] - before).norm()) <= 0.5 * (1 + 1e-6)


def test_without_a_clip_there_is_one_anyway_and_a_site_refuses_terms_that_take_it_away() -> None:
    work = client_work(parameters(SIZE), SGD, ())
    plain = recipes.fedavg().with_(transforms=["secure_aggregation"])
    noisy = recipes.fedavg().with_(transforms=[Gaussian(clip=0.25, where="client"), SecureAggregation()])
    made = plain.adapted_to(work).transforms[-1]
    assert isinstance(made, SecureAggregation)
    assert made.clip == made.range
    behind_noise = noisy.adapted_to(work).transforms
    assert isinstance(behind_noise[-1], SecureAggregation)
    assert behind_noise[-1].clip is None  # what is noised would lose its mean
    any_sum, strict = Policy(), Policy(secure_aggregation=SumDemands(clip=1.0))
    for policy, transforms, says in (
        (any_sum, (made,), None),
        (any_sum, behind_noise, None),
        (strict, behind_noise, None),
        (any_sum, (made.model_copy(update={"clip": None}),), "updates would be masked in any length"),
        (strict, (made,), "shortened to norm 8, this site demands 1"),
        (any_sum, (made.model_copy(update={"largest_share": 0.9}),), "one client could be 0.9 of a sum"),
    ):
        reason = policy.reject_reason(client_work(parameters(SIZE), SGD, transforms))
        assert reason is None if says is None else says in str(reason)


def test_all_vectors_of_an_update_are_shortened_to_the_norm_that_a_site_demands() -> None:
    """Before, numbers of SCAFFOLD's control were bounded one by one, and it was as long as there are numbers."""
    trainer = recipes.scaffold(lr=0.1).training
    masking = SecureAggregation(least=3, clip=0.5, range=0.6, vectors={"control": (SIZE,)})
    long = {"model": torch.full((SIZE,), 0.4), "control": torch.full((SIZE,), -7.0)}
    for vector in masking.bounded(long, SIZE).values():
        assert float(vector.norm()) == pytest.approx(0.5)
    behind_noise = masking.model_copy(update={"clip": None})
    assert {name: float(vector.norm()) for name, vector in behind_noise.bounded(long, SIZE).items()} == {
        "model": pytest.approx(float(long["model"].norm())),  # which the noise has shortened
        "control": pytest.approx(0.6),
    }
    noise = Gaussian(clip=0.5, noise=0.0)
    policy = Policy(secure_aggregation=SumDemands(clip=0.5))
    assert policy.reject_reason(client_work(parameters(SIZE), trainer, (masking,))) is None
    work = client_work(parameters(SIZE), trainer, (noise, behind_noise))
    assert "'control' would be shortened to norm 0.6" in str(policy.reject_reason(work))


# ----------------------------------------------------------------------------------------------- keys are for one sum


def listed(masking: SecureAggregation, about: bytes, told: dict[int, Any]) -> dict[str, Any]:
    members = sorted(told)
    public = [texts(told[client][KEYS], 2 * masks.KEY)[0] for client in members]
    sizes = [sizes_in(told[client][SIZES])[0] for client in members]
    return {
        **masking.graph(members, public, sizes, about).vectors(),
        SIGNED: torch.cat([told[client][SIGNED] for client in members]),
    }


def test_keys_that_were_signed_in_another_round_are_refused() -> None:
    """The server knows the key of who dropped out of an earlier round, and shows it to the victim in this one."""
    clients, masking = OfRows([1] * 5), summing()
    held = {client: clients.secrets(client) for client in range(5)}
    _, before = told_keys(masking, held)
    about, told = told_keys(masking, held)
    ShareKeys().reply(listed(masking, about, told), clients.secrets(0), masking)
    about, told = told_keys(masking, held)
    with pytest.raises(Declined, match="or those of another round"):
        ShareKeys().reply(listed(masking, about, told | {1: before[1]}), clients.secrets(0), masking)


@pytest.mark.parametrize("lie", ["size", "about", "work"])
def test_a_signature_is_of_what_a_member_counts_in_one_sum_and_of_what_it_does(lie: str) -> None:
    clients, masking = OfRows([1, 1, 1, 1]), summing(**BY_ROWS)
    held = {client: clients.secrets(client) for client in range(4)}
    if lie == "work":
        held[2] = replace(held[2], work="another trainer")
    about, told = told_keys(masking, held)
    vectors = listed(masking, about, told)
    if lie == "size":
        vectors = listed(masking, about, told | {2: {**told[2], SIZES: told[2][SIZES] + 3}})
    if lie == "about":
        vectors = listed(masking, bytes(32), told)
    with pytest.raises(Declined, match=r"are not signed by its site|is for another sum"):
        ShareKeys().reply(vectors, clients.secrets(0), masking)
    assert len(texts(told[0][SIGNED], SIGNATURE)) == 1


def test_the_digest_of_what_a_member_does_is_in_its_masks() -> None:
    work = client_work(parameters(SIZE), SGD, (summing(),))
    others = [
        replace(work, trainer=SGD.model_copy(update={"lr": 1e-30})),
        replace(work, transforms=(*work.transforms, Gaussian(clip=1.0))),
        replace(work, outputs=(7,)),
    ]
    assert len({one.digest for one in (work, *others)}) == 4
    assert replace(work, seed=work.seed).digest == work.digest
