"""Low precision, accumulated gradients and checkpointed layers: on every engine what a plain loop of torch makes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import piebald
from piebald import recipes
from piebald.core.errors import SettingError
from piebald.data.partition import Lists, PooledClients
from piebald.engines.sgd_step import LossScale
from piebald.methods.training import Sgd
from piebald.privacy import accounting

from .conftest import assert_same, carry_out, method, on_ray, plain_network, reference, vector

STACKED = [
    {"engine": "sequential"},
    pytest.param({"engine": "vmapped", "stack": 3}, marks=pytest.mark.full),
    {"engine": "batched", "stack": 3},
]
HALF = {"precision": "float16", "loss_scale": 2.0**17}  # so large that the first steps of a task overflow


class Watched(nn.Module):
    """Two blocks with dropout that count their passes and the rows of the largest one."""

    def __init__(self, drop: float = 0.3) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.blocks = nn.ModuleList([Block(size, drop) for size in (6, 8)])
            self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            WATCHED["most"] = max(WATCHED["most"], len(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self, size: int, drop: float) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(size, 8), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        WATCHED["passes"] += self.training
        return self.drop(self.layer(x).relu())


WATCHED = {"passes": 0, "most": 0}


def watched(recipe: Any, drop: float = 0.3, **simulator: Any) -> tuple[piebald.Run, int, int]:
    """A run of two rounds, the passes of its blocks in training, and the rows of the largest one."""
    WATCHED.update(passes=0, most=0)
    run = carry_out(recipe, model=Watched(drop), rounds=2, simulator=simulator)
    return run, WATCHED["passes"], WATCHED["most"]


# -- float16


@pytest.mark.full
@pytest.mark.parametrize("simulator", STACKED, ids=str)
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("fedprox", HALF | {"loss_scale": 2.0**18}),
        ("fedsam", HALF | {"loss_scale": 2.0**18, "accumulate": 2, "batch": 5, "momentum": 0.5}),
        ("scaffold", HALF | {"loss_scale": 2.0**18, "option": "I"}),
        ("moon", HALF | {"optimizer": {"kind": "adam", "eps": 0.1}, "optimizer_state": "kept", "clip": 0.5}),
    ],
    ids=str,
)
def test_float16_skips_what_torchs_scaler_skips(name: str, more: dict[str, Any], simulator: dict[str, Any]) -> None:
    """The engine "reference" trains with `torch.amp.GradScaler` itself."""
    recipe = method(name, **more)
    run = carry_out(recipe, rounds=2, simulator=simulator)
    # a proximal term is rounded once more than the reference's; the last bit of a float32 may turn that of a float16
    assert_same(reference(recipe, rounds=2), run, atol=1e-4 if name == "fedprox" else 1e-5)
    whole = carry_out(method(name, **more | {"precision": "float32", "loss_scale": 2.0**16}), rounds=2)
    made, planned = ([row["steps"] for row in one.results] for one in (run, whole))
    assert sum(made) < sum(planned), "nothing overflowed"
    assert max(made) > 0


def test_float16_is_a_loop_with_autocast_and_a_scaler() -> None:
    """Ten steps of AdamW on all rows of one client, and the same written down with torch."""
    clients = alone(23)
    scale, module = 2.0**21, plain(0)
    recipe = recipes.fedavg(
        optimizer="adamw", lr=0.01, batch=100, epochs=10, clip=0.7, precision="float16", loss_scale=scale
    )
    run = piebald.run(recipe, clients, plain(0), rounds=1, runtime=piebald.Simulator(engine="sequential", workers=0))
    x, y = clients.rows(0, "train").x, clients.rows(0, "train").y
    optimizer, scaler = torch.optim.AdamW(module.parameters(), lr=0.01), torch.amp.GradScaler("cpu", scale)
    skipped = 0
    for _ in range(10):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(module(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(module.parameters(), 0.7)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
    assert 0 < skipped < 10
    assert [row["steps"] for row in run.results] == [10 - skipped]
    torch.testing.assert_close(vector(run), run.work.layout.flatten(module), atol=2e-4, rtol=1e-3)
    assert {tensor.dtype for tensor in run.model().state_dict().values()} == {torch.float32}


def test_the_loss_scale_grows_as_that_of_torch() -> None:
    ours, theirs = LossScale(2.0**10, torch.device("cpu")), torch.amp.GradScaler("cpu", 2.0**10)
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for step in range(2100):
        gradient = torch.full((3,), torch.inf if step in (3, 4, 50) else 1.0)
        scaled = theirs.scale(torch.ones(()))
        parameter.grad = gradient * scaled
        mine = [gradient * ours.factor]
        ours.unscale(mine)
        theirs.step(optimizer)
        theirs.update()
        assert ours.takes_step() == (step not in (3, 4, 50))
        assert float(ours.factor) == theirs.get_scale()
        if step not in (3, 4, 50):
            assert torch.equal(mine[0], gradient)
    assert ours.skipped == 3
    assert float(ours.factor) == 2.0**8  # three times halved, once doubled


# -- bfloat16


@pytest.mark.full
@pytest.mark.parametrize("simulator", STACKED, ids=str)
@pytest.mark.parametrize("name", ["fedavg", "dp_sgd", "apfl"])
def test_bfloat16_stays_near_float32_and_is_not_float32(name: str, simulator: dict[str, Any]) -> None:
    seen = list[torch.dtype]()

    class Seeing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            seen.append(out.dtype)
            return out

    model = plain(3)
    model[0].__class__ = Seeing
    # runs of two precisions have noise of their own, which would be all that is compared
    quiet = {"noise": 0.0} if name == "dp_sgd" else {}
    full = carry_out(method(name, **quiet), model=plain(3), simulator=simulator)
    half = carry_out(method(name, precision="bfloat16", **quiet), model=model, simulator=simulator)
    torch.testing.assert_close(vector(half), vector(full), atol=0.02, rtol=0.05)
    assert not torch.equal(vector(half), vector(full))
    if simulator["engine"] != "batched":  # which has layers of its own
        assert seen[-1] == torch.float32, "models are evaluated in float32"
        assert torch.bfloat16 in seen


# -- accumulation


@pytest.mark.full
@pytest.mark.parametrize("simulator", STACKED, ids=str)
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("fedavg", {"epochs": 2}),
        ("fedprox", {"optimizer": "adam", "lr": 0.01, "optimizer_state": "averaged", "clip": 0.5}),
        ("dp_sgd", {"clip": 0.5, "noise": 0.7}),
        ("apfl", {"steps": 3}),
        ("fedsam", {}),
    ],
    ids=str,
)
def test_accumulated_batches_are_one_larger_batch(name: str, more: dict[str, Any], simulator: dict[str, Any]) -> None:
    """Of 7, 12, 21, 33 and 40 rows, steps of 12 rows leave groups that are not whole, and batches that are not."""
    large, _, most = watched(method(name, batch=12, **more), drop=0.0, engine="sequential")
    small, _, fewer = watched(method(name, batch=4, accumulate=3, **more), drop=0.0, **simulator)
    assert_same(large, small, atol=2e-6)
    if name != "dp_sgd":  # whose passes are of single rows
        assert most == 12
        assert fewer == 4


def test_accumulated_batches_with_batch_norm_and_dropout_are_those_of_the_plain_loop() -> None:
    recipe = method("fedavg", batch=4, accumulate=3)  # of 33 rows the last step has 4, 4 and a lone one, which joins
    assert_same(reference(recipe), carry_out(recipe))


@pytest.mark.full
def test_dp_sgd_pays_for_the_rows_of_a_step() -> None:
    sizes, rounds = [200, 90], 5
    (one,), (other,) = (
        [accounting.of_rows(recipes.dp_sgd(noise=1.0, batch=batch, accumulate=times), sizes, rounds)]
        for batch, times in ((30, 1), (10, 3))
    )
    assert one == other
    assert one.epsilon_rdp > accounting.of_rows(recipes.dp_sgd(noise=1.0, batch=10), sizes, rounds).epsilon_rdp


# -- checkpointing


@pytest.mark.parametrize("simulator", STACKED, ids=str)
@pytest.mark.parametrize(
    "more", [{}, {"precision": "bfloat16", "accumulate": 2, "batch": 5, "batches": "exact"}], ids=str
)
def test_checkpointed_layers_have_the_same_gradients(more: dict[str, Any], simulator: dict[str, Any]) -> None:
    """The same bits, with dropout: a layer's second pass draws the masks of its first."""
    kept, passes, _ = watched(method("fedavg", **more), engine="sequential")
    again, twice, _ = watched(method("fedavg", checkpointing="blocks.*", **more), **simulator)
    assert torch.equal(vector(kept), vector(again))
    batch = more.get("batch", 10)
    tried = 2 if simulator["engine"] == "vmapped" else 0  # blocks of the pass that tells whether vmap can run the model
    steps = sum(math.ceil(row["examples"] / batch) for row in again.results)
    assert twice - passes - tried == 2 * steps  # of two blocks


def test_a_layer_that_is_never_run_is_refused() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(6, 2), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.attention(x, x, x)[0])

    with pytest.raises(piebald.PiebaldError, match="the model never calls"):
        carry_out(method("fedavg", checkpointing="attention.out_proj"), model=Attending())


# -- settings


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("fedavg", {"precision": "half"}, "precision"),
        ("fedavg", {"accumulate": 0}, "accumulate"),
        ("fedavg", {"loss_scale": 8.0}, "would have no effect"),
        ("fedavg", {"checkpointing": ["auto", "blocks.*"]}, "leave one out"),
        ("dp_sgd", {"precision": "float16"}, "depend on single rows"),
        ("apfl", {"precision": "float16"}, "no common loss scale"),
        ("per_fedavg", {"precision": "float16"}, "write 'bfloat16'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(name: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words) as caught:
        recipes.make(name, **fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"checkpointing": "block.*"}, "no layer of this model called 'block.\\*'"),
        ({"checkpointing": "blocks"}, "is never run itself: write 'blocks.\\*'"),
        ({"checkpointing": "auto"}, "Watched does not say"),
    ],
)
def test_layers_that_the_model_lacks_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        carry_out(method("fedavg", **fields), model=Watched())


def test_batch_norm_that_would_count_twice_is_refused() -> None:
    with pytest.raises(SettingError, match="count each batch twice"):
        carry_out(method("fedavg", checkpointing="1"))


def test_a_precision_that_a_model_cannot_run_in_is_refused() -> None:
    class Picky(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            if out.dtype == torch.bfloat16:
                raise RuntimeError("\"solve\" not implemented for 'BFloat16'")
            return out

    with pytest.raises(SettingError, match="precision = 'bfloat16' on device 'cpu'"):
        carry_out(method("fedavg", precision="bfloat16"), model=Picky(6, 4))


def test_two_precisions_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(SettingError, match="contradict"):
        carry_out(method("fedavg", precision="float16"), simulator={"bfloat16": True})


def test_engines_are_chosen_for_one_client_at_a_time() -> None:
    where = {"engine": "auto", "deterministic": True}
    chosen = {
        times: carry_out(method("fedavg", accumulate=times), model=plain(0), rounds=1, simulator=where)
        for times in (1, 2)
    }
    assert {times: run.meta["runtime"]["engine"] for times, run in chosen.items()} == {1: "batched", 2: "sequential"}


# -- runtimes

ALL: dict[str, Any] = {"batch": 5, "accumulate": 2, "checkpointing": ["0"], **HALF}


@pytest.mark.full
def test_workers_train_alike() -> None:
    recipe = method("fedavg", **ALL)
    assert_same(
        reference(recipe, model=plain_network()), carry_out(recipe, model=plain_network(), simulator={"workers": 2})
    )


@pytest.mark.long
def test_ray_trains_alike(cluster: Any) -> None:
    recipe = method("fedavg", **ALL)
    assert_same(reference(recipe, model=plain_network()), on_ray(recipe, model=plain_network()))


def test_settings_are_recorded_and_come_back() -> None:
    recipe = method("fedavg", **ALL)
    again = recipes.rebuild(recipe.model_dump())
    assert isinstance(again.training, Sgd)
    expected = {name: value for name, value in ALL.items() if name != "batch"} | {"checkpointing": ("0",)}
    assert dataclasses.asdict(again.training.passes) == expected


def plain(seed: int) -> Any:
    """A network without dropout."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def alone(rows: int) -> PooledClients:
    """One client."""
    draw = np.random.default_rng(1)
    x = torch.from_numpy(draw.normal(size=(rows, 6)).astype(np.float32))
    y = torch.from_numpy(draw.integers(0, 4, rows))
    lists = {split: Lists(np.arange(rows), np.array([0, rows])) for split in ("train", "test")}
    return PooledClients(x, y, lists, names=["one"], classes=list("abcd"))  # type: ignore[arg-type]
