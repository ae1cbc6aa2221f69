"""Low-rank adapters of unlike ranks: their average beside plain matrices, who sends what, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn

import piebald
from piebald import recipes
from piebald.contracts import Cohort, ServerContext, Update
from piebald.contracts.data import ModelSpec
from piebald.core.client_models import nested_positions
from piebald.core.objective import OBJECTIVES
from piebald.core.parameters import Layout
from piebald.methods.aggregation import ProductAverage
from piebald.methods.aggregation.product_average import truncated
from piebald.methods.training.adapter_ranks import with_rank
from piebald.testing.components import adapted_network, plain_network, uneven_clients

ROWS = (3, 5, 2)  # training rows of three clients
HERE = piebald.Simulator(engine="sequential", workers=0)


class Adapter(nn.Module):
    """The two matrices of an adapter from 7 numbers to 5, and one that everybody has."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(rank)
        self.lora_A = nn.Parameter(torch.randn(rank, 7, generator=draw))
        self.lora_B = nn.Parameter(torch.randn(5, rank, generator=draw))
        self.bias = nn.Parameter(torch.randn(5, generator=draw))


class Context(NamedTuple):
    spec: ModelSpec
    model: Tensor
    notes: dict[str, Any]

    def note(self, name: str, value: Any) -> None:
        self.notes[name] = value


def cohort(rank: int, ranks: tuple[int, ...], seed: int = 0) -> tuple[Cohort, Context]:
    """Clients with adapters of these ranks, each changed in all that it has."""
    whole = Adapter(rank)
    layout, draw = Layout.of(whole), torch.Generator().manual_seed(seed)
    sent, held, updates = layout.flatten(whole), list[Tensor | None](), list[Update]()
    for own, rows in zip(ranks, ROWS, strict=True):
        places = nested_positions(layout, Layout.of(with_rank(whole, own)))
        change = torch.zeros(layout.size)
        change[places] = torch.randn(len(places), generator=draw)
        held.append(None if own == rank else places)
        updates.append(Update({"model": change}, rows, 1, {}))
    matrix = torch.stack([update.vectors["model"] for update in updates])
    spec = ModelSpec(whole, layout, sent, OBJECTIVES["classification"], 0, (7,), (5,))
    return Cohort([0, 1, 2], [0] * 3, updates, matrix, 0, [sent] * 3, held=held), Context(spec, sent, {})


def products(made: Cohort, layout: Layout, ranks: tuple[int, ...], start: bool = False) -> list[Tensor]:
    """B A of each client in float64, of what it has alone."""
    found = []
    for row, rank in enumerate(ranks):
        views = layout.views(made.sent[row] if start else made.model(row))
        found.append(views["lora_B"][:, :rank].double() @ views["lora_A"][:rank].double())
    return found


def mean(matrices: list[Tensor]) -> Tensor:
    return sum(rows * one for rows, one in zip(ROWS, matrices, strict=True)) / sum(ROWS)  # type: ignore[return-value]


@pytest.mark.parametrize(("rank", "ranks"), [(5, (2, 1, 2)), (3, (3, 1, 2)), (1, (1, 1, 1))])
def test_it_is_the_mean_of_the_products_in_plain_matrices(rank: int, ranks: tuple[int, ...]) -> None:
    made, context = cohort(rank, ranks)
    layout = context.spec.layout
    average, shares = ProductAverage().aggregate(made, cast(ServerContext, context))
    ended = layout.views(context.model + average)
    wanted = mean(products(made, layout, ranks))
    u, values, v = torch.linalg.svd(wanted, full_matrices=False)
    for own in range(1, rank + 1):  # what a client of each rank gets is the nearest matrix of this rank
        nearest = u[:, :own] * values[:own] @ v[:own]
        found = ended["lora_B"][:, :own].double() @ ended["lora_A"][:own].double()
        torch.testing.assert_close(found, nearest, atol=1e-5, rtol=1e-5)
    if sum(ranks) <= rank:
        torch.testing.assert_close(ended["lora_B"].double() @ ended["lora_A"].double(), wanted, atol=1e-5, rtol=1e-5)
    lost = float(values[rank:].square().sum() / values.square().sum())
    assert context.notes["lost_share"] == {"lora_A": pytest.approx(lost, abs=1e-6)}
    assert shares == pytest.approx([rows / sum(ROWS) for rows in ROWS])
    plain = mean([layout.views(made.model(row))["bias"] for row in range(3)])
    torch.testing.assert_close(ended["bias"], plain)


def test_the_mean_of_the_changes_keeps_what_nobody_was_sent() -> None:
    ranks = (2, 1, 2)
    made, context = cohort(5, ranks)
    layout = context.spec.layout
    average, _ = ProductAverage(average="changes").aggregate(made, cast(ServerContext, context))
    ended, before = layout.views(context.model + average), layout.views(context.model)
    moved = [a - b for a, b in zip(products(made, layout, ranks), products(made, layout, ranks, True), strict=True)]
    wanted = before["lora_B"].double() @ before["lora_A"].double() + mean(moved)
    torch.testing.assert_close(ended["lora_B"].double() @ ended["lora_A"].double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ranks", [(1, 1, 1), (2, 2, 2)])
def test_models_and_changes_are_the_same_where_all_have_one_rank(ranks: tuple[int, ...]) -> None:
    made, context = cohort(ranks[0], ranks)
    views = context.spec.layout.views
    ends = [
        views(context.model + ProductAverage(average=what).aggregate(made, cast(ServerContext, context))[0])
        for what in ("models", "changes")
    ]
    first, second = (end["lora_B"] @ end["lora_A"] for end in ends)
    torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_which_directions_there_are_does_not_depend_on_their_size(size: float) -> None:
    draw = torch.Generator().manual_seed(0)
    inner, outer = (torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((3, 7), (5, 3)))
    a, b, lost = truncated(size * inner, size * outer, torch.zeros(4, 7, dtype=torch.float64))
    torch.testing.assert_close(b @ a / size**2, outer @ inner)
    assert lost == pytest.approx(0.0, abs=1e-12)
    values = torch.linalg.svdvals(outer @ inner)
    assert truncated(size * inner, size * outer, inner[:1])[2] == pytest.approx(
        float(values[1:].square().sum() / values.square().sum())
    )


def test_a_direction_without_a_mean_can_be_learned_again() -> None:
    """As at the beginning, where B is zero: A starts anew, and the product is not changed by it."""
    made, context = cohort(5, (1, 1, 1))
    layout = context.spec.layout
    average, _ = ProductAverage().aggregate(made, cast(ServerContext, context))
    ended, start = layout.views(context.model + average), layout.views(context.spec.initial)
    torch.testing.assert_close(ended["lora_A"][3:], start["lora_A"][3:])
    assert not bool(ended["lora_B"][:, 3:].any())


def run(recipe: Any, model: Any = adapted_network, **options: Any) -> piebald.Run:
    return piebald.run(recipe, uneven_clients(), model, **{"rounds": 2, "evaluate_every": 0, "runtime": HERE} | options)


def test_clients_send_and_have_adapters_of_their_own_rank() -> None:
    made = run(recipes.flexlora(ranks=(4, 2, 1), lr=0.1, batch=10))
    rest = 4 * (8 + 8 + 8 + 8 + 7 * 4 + 4)  # parameters and statistics of batch norm, and the head
    for row in made.results:
        rank = (4, 2, 1)[row["client"] % 3]
        assert made.model(row["client"])[0].lora_A.weight.shape == (rank, 6)
        assert row["bytes_up"] == row["bytes_down"] == rest + 4 * rank * (6 + 8 + 8 + 7)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    whole, cut = made.model().eval(), made.model(1).eval()
    with torch.no_grad():
        for layer in (whole[0], whole[3]):
            layer.lora_A.weight[2:] = 0
    torch.testing.assert_close(cut(x), whole(x))


def test_whole_ranks_and_private_adapters() -> None:
    """With adapters of one whole rank that stay, there is nothing but FedAvg of the rest."""
    private = {"kind": "all_except", "private_layers": "adapter"}
    settings: dict[str, Any] = {"lr": 0.1, "batch": 10}
    ends = [
        run(recipe.with_(sharing=private)).start()
        for recipe in (recipes.flexlora(ranks=(4,), **settings), recipes.fedavg(**settings))
    ]
    shared = 4 * 8 + 7 * 4 + 4
    assert ends[0].numel() == ends[1].numel() >= shared
    torch.testing.assert_close(ends[0], ends[1])


HALF = {"kind": "all_except", "private_layers": "*lora_B*"}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no adapters": (lambda: run(recipes.flexlora(), plain_network), "Sequential has none: load it with adapter"),
    "rank": (lambda: run(recipes.flexlora(ranks=(8,))), "ranks must be at most 4, that of the model's adapters, got 8"),
    "half": (lambda: run(recipes.flexlora().with_(sharing=HALF)), "0.lora_B.weight is private"),
    "krum": (lambda: recipes.flexlora().with_(aggregation={"kind": "krum"}), "krum takes every update as a change"),
    "clusters": (lambda: recipes.flexlora().with_(clustering={"kind": "ifca", "k": 2}), "choose another clustering"),
    "sums": (lambda: recipes.flexlora().with_(transforms=["secure_aggregation"]), "needs individual updates"),
    "noise": (
        lambda: recipes.flexlora().with_(transforms=[{"kind": "gaussian", "clip": 1.0, "noise": 1.0}]), "gaussian",
    ),
    "state": (lambda: recipes.flexlora(optimizer="adam", optimizer_state="averaged"), "has no average where clients"),
    "nothing to average": (
        lambda: run(recipes.fedavg().with_(aggregation="product_average"), plain_network), "this model has none",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case: str) -> None:
    make, words = REFUSED[case]
    with pytest.raises(piebald.SettingError, match=words):
        make()
