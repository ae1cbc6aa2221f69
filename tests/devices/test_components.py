"""Every component and every query that works at clients runs on a device; what is new in the package is missed here."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import piebald
from piebald.contracts import SERVER_ID, Query
from piebald.contracts.component import Component
from piebald.data.partition import Lists, PooledClients
from piebald.engines.engine_choice import make_engine
from piebald.engines.outgoing import serve
from piebald.engines.stack import PRIVATE, ClientStack, StackResult
from piebald.inference.queries.columns import MaskedSumsQuery, NoisySumsQuery, StatisticsQuery
from piebald.inference.queries.trees import MaskedTreeSumsQuery, TreeScoresQuery, TreesQuery
from piebald.inference.trees.forest import TreeSettings
from piebald.methods.choice import BestForEach, KnnPer
from piebald.methods.client_work import ClientWork
from piebald.methods.queries.batch_norms import BatchStatistics
from piebald.methods.queries.row_scores import NaiveScores, RowScores, TrainingTotals
from piebald.methods.queries.scores import Confusion, Evaluate, Validate
from piebald.methods.queries.server_rows import RootLoss, RootTraining
from piebald.methods.queries.threshold_scores import ThresholdCounts, ThresholdScores
from piebald.methods.transforms.compression import Compressor
from piebald.privacy.secure_aggregation.key_queries import KeyQuery
from tests.contract.conftest import TABLE, method, plain_network
from tests.devices.there import ENGINES, NAME, assert_as_on_the_cpu, carry_out, equal_clients, there


def doubled(x: Tensor, y: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """An augmentation of one's own."""
    return 2 * x, y


def images(count: int = 4, rows: int = 12) -> PooledClients:
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(count * rows, 3, 8, 8, generator=draw)
    y = torch.randint(0, 4, (count * rows,), generator=draw)
    lists = Lists(np.arange(count * rows), np.arange(0, count * rows + 1, rows))
    return PooledClients(x, y, {"train": lists, "test": lists}, classes=list("abcd"))  # type: ignore[arg-type]


def conv_net(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))


def norm_net(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))


def tried(optimizer: dict[str, Any], **more: Any) -> Any:
    return method("fedprox", optimizer=optimizer, **more)


# Recipe, clients and model of a run, and how far numbers may be apart: fused kernels, autocast and memory formats round
# otherwise.  `eps` is large where a rule divides by the size of gradients: else a first step has the sign of a gradient
# that is all rounding, and full length.
CASES: dict[str, tuple[Any, Any, Any, float]] = {
    "augmented vectors, Nesterov": (
        tried(
            {"kind": "sgd", "nesterov": True}, momentum=0.9,
            augmentation=["gaussian_noise", "mix_up", {"kind": "function", "function": f"{__name__}:doubled"}],
        ), None, None, 0.0,
    ),
    "augmented images, Adam": (
        tried(
            {"kind": "adam", "amsgrad": True, "eps": 0.1}, optimizer_state="kept",
            augmentation=[{"kind": "random_crop", "padding": 1}, "horizontal_flip"],
        ), images(), conv_net, 1e-4,
    ),
    "bfloat16, moments of inputs": (
        method("fedavg").with_(
            training={"kind": "with_moments", "layers": ["0", "3"], "lr": 0.1, "batch": 10, "precision": "bfloat16"}
        ), None, plain_network, 0.02,
    ),
    "RMSprop": (tried({"kind": "rmsprop", "centered": True, "eps": 0.1}), None, None, 1e-4),
    "float16, accumulated, Adagrad": (
        tried({"kind": "adagrad", "eps": 0.1}, precision="float16", accumulate=2, batch=5), None, plain_network, 0.02,
    ),
    "checkpointed, AdamW, packed": (
        tried({"kind": "adamw", "eps": 0.1}, checkpointing="*").with_(transforms=["top_k"]), None, plain_network, 1e-4,
    ),
    "prototypes, judged by the classifier": (method("fedproto", inference="classifier"), None, None, 0.0),
    "attacks": (
        method("fedavg").with_(transforms=[
            {"kind": kind, "clients": [client]}
            for client, kind in enumerate(["sign_flip", "inner_product", "little_is_enough", "model_replacement"])
        ]), None, None, 0.0,
    ),
}  # fmt: skip
ELSEWHERE = {"gaussian", "random_update", "secure_aggregation"}  # transforms of test_devices.COMPOSED


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_components_compute_there_what_they_compute_on_the_cpu(case: str) -> None:
    recipe, clients, model, apart = CASES[case]
    if NAME != "pretended" and case.startswith("float16"):
        apart = 0.1  # the length of a step: where a gradient nearly overflows, one of both may leave it out
    engine = ENGINES[1 + list(CASES).index(case) % 2]  # those that train many at once, if they can
    expected = carry_out(recipe, clients=clients, model=model, engine=engine, stack=3)
    with there() as device:
        found = carry_out(recipe, device, clients, model, engine=engine, stack=3)
    assert_as_on_the_cpu(found, expected, apart)


# Each kind of query, and what it asks.
ASKED_SUMS: dict[str, Any] = {"bounds": ((-1.0, 1.0),) * 6, "bins": 3, "classes": 4}
QUERIES: list[Query] = [
    Evaluate(), Confusion(classes=4), RowScores(naive="classes", of_all=(1, 2, 3, 4)),
    NaiveScores(naive="classes"), TrainingTotals.of("classes"), ThresholdScores(criterion="f1"),
    ThresholdCounts(criterion="pooled f1"), Validate(), Validate(classes=4), StatisticsQuery(),
    RootLoss(), RootTraining(),
    StatisticsQuery(keys=((0, 1),) * 7), BestForEach(tasks=("0",), passes=(1,), classes=4), KnnPer(classes=4),
    TreesQuery(ask="grow", boosting=TreeSettings(max_depth=2), objective="multiclass", classes=4, start=(0.0,) * 4),
    TreeScoresQuery(ask="scores", boosting=TreeSettings(max_depth=2), objective="multiclass", classes=4,
                    start=(0.0,) * 4),
    MaskedTreeSumsQuery(ask="targets", boosting=TreeSettings(form="histogram"), objective="multiclass", classes=4),
    BatchStatistics(batch=2), MaskedSumsQuery(**ASKED_SUMS), NoisySumsQuery(**ASKED_SUMS, noise=1.0),
]  # fmt: skip


ON_THE_HOST = {
    "prepare",
    "prepare_names",
    "masked_prepare",
    "model_sums",
    "masked_model_sums",
    "noisy_model_sums",
}  # NumPy computes them from columns, as it does sums


def answer(query: Query, device: torch.device, work: ClientWork, clients: Any) -> StackResult:
    engine = make_engine("vmapped", work, clients, device, bfloat16=False)
    asked = [SERVER_ID] if isinstance(query, RootLoss | RootTraining) else [0, 2, 4]
    fresh = work.trainer.initial_state(work.initial, work.layout.shared)
    count = len(asked)
    stack = ClientStack(
        asked, [0] * count, [0] * count, [0] * count, [work.initial] * count,
        {"forest": [torch.zeros(0, 7, 2)] * count} if isinstance(query, TreesQuery) else {},
        {name: [tensor] * count for name, tensor in fresh.items() if name != PRIVATE}, query,
    )  # fmt: skip
    return serve(engine, stack)


@pytest.fixture(scope="module")
def asked() -> tuple[ClientWork, PooledClients]:
    """Clients, and the work that they are asked about."""
    clients = equal_clients(5, server_rows=np.arange(9))
    return carry_out(method("ditto"), clients=clients, model=norm_net).work, clients


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.kind)
def test_a_query_is_answered_there_as_on_the_cpu(query: Query, asked: tuple[ClientWork, PooledClients]) -> None:
    if query.kind == "trees":
        pytest.importorskip("xgboost")
    work, clients = asked
    expected = answer(query, torch.device("cpu"), work, clients)
    with there() as device:
        found = answer(query, device, work, clients)
    assert found.examples == expected.examples
    assert found.metrics.keys() == expected.metrics.keys()
    assert found.vectors.keys() == expected.vectors.keys()
    assert found.metrics or found.vectors
    close = {"rtol": 0.0, "atol": 0.0} if NAME == "pretended" else {"rtol": 1e-3, "atol": 1e-4}
    for name, values in expected.metrics.items():
        np.testing.assert_allclose(found.metrics[name], values, equal_nan=True, **close)
    for name, part in expected.vectors.items():
        assert found.vectors[name].device.type == "cpu"
        torch.testing.assert_close(found.vectors[name], part, **close)


def kinds(axis: str) -> dict[str, type[Component]]:
    """The package's own components of an axis."""
    for module in pkgutil.walk_packages(piebald.__path__, "piebald."):
        if module.name.split(".")[1] in ("training", "transforms", "attacks", "privacy", "queries", "choice"):
            import_module(module.name)
    found = Component.registry[axis]
    return {kind: one for kind, one in found.items() if one.__module__.startswith("piebald.")}


def test_no_component_is_missing_here() -> None:
    """A new one is added to a table: of recipes, of components or of queries."""
    recipes = [*map(method, TABLE), *(case[0] for case in CASES.values())]
    trained = {recipe.training.kind for recipe in recipes}
    assert trained == kinds("training").keys()
    assert {recipe.training.rule.kind for recipe in recipes if recipe.training.rule} == kinds("optimizer").keys()
    changes = {one.kind for recipe in recipes for one in recipe.training.augmentation}
    assert changes == kinds("augmentation").keys()
    sent = {one.kind for recipe in recipes for one in recipe.transforms} | ELSEWHERE
    own = {kind for kind, one in kinds("transforms").items() if not issubclass(one, Compressor)}
    assert own == {kind for kind in sent if kind != "top_k"}  # compressors work on the host, on one block of updates
    asked = {kind for kind, one in kinds("query").items() if not issubclass(one, KeyQuery)}
    assert {query.kind for query in QUERIES} == asked - ON_THE_HOST
