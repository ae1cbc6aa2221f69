"""Faults that a GPU had and the CPU has not: batch norm by 16 bytes, recurrent layers, attention, a lost device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piebald
from piebald.core.errors import DeviceLost
from piebald.core.machine import raise_if_lost
from piebald.engines import device_copies, engine_choice
from piebald.engines.device_copies import InOneChunk, fit_to_device, rows_first
from piebald.report.callbacks import Callback
from piebald.storage.store import RunStore
from tests.contract.conftest import method
from tests.devices.pretended import DEVICE, State, pretended
from tests.devices.test_components import images
from tests.devices.there import ENGINES, assert_as_on_the_cpu, carry_out, equal_clients, there


class Normed(nn.Module):
    """Batch norm behind a bias of ten classes, so that its statistics begin 8 bytes off; images come turned."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.turned = turned
        self.head = nn.Linear(144, 10)
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last) if self.turned else x
        found: Tensor = self.head(self.layers(x))
        return found


def normed(seed: int = 0, turned: bool = False) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Normed(turned)


def test_the_pretended_device_is_lost_by_batch_norm_by_16_bytes() -> None:
    with pretended():
        x = torch.rand(2, 4, 3, 3).to(DEVICE)
        flat = torch.ones(20).to(DEVICE)
        aligned, behind = ([flat[at : at + 4], flat[at + 4 : at + 8]] for at in (4, 2))
        turned = x.contiguous(memory_format=torch.channels_last)
        for inputs, tensors in ((x, aligned), (x, behind), (turned, aligned), (rows_first(turned), behind)):
            nn.functional.batch_norm(inputs, *tensors, training=True)
        with pytest.raises(torch.AcceleratorError, match="misaligned address"):
            nn.functional.batch_norm(turned, *behind, training=True)
        with pytest.raises(torch.AcceleratorError, match="misaligned address"):
            x + 1  # whatever comes next
    with pretended():
        torch.ones(1, device=DEVICE)  # another process


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("turned", [False, True])
def test_batch_norm_behind_a_bias_of_ten_classes_computes_there(engine: str, turned: bool) -> None:
    model = lambda seed: normed(seed, turned)  # noqa: E731
    expected = carry_out(method("fedavg"), clients=images(), model=model, engine=engine, stack=3)
    with there() as device:
        found = carry_out(method("fedavg"), device, images(), model, engine=engine, stack=3)
    assert_as_on_the_cpu(found, expected, 1e-4)  # the CPU's memory order is another one


def test_strides_that_mean_two_orders_are_made_to_mean_one() -> None:
    x = torch.rand(2, 1, 3, 3)
    both = x.as_strided(x.shape, (9, 1, 3, 1))
    assert both.is_contiguous()
    assert both.stride() != x.stride() == rows_first(both).stride()
    assert torch.equal(rows_first(both), x)
    assert rows_first(x).data_ptr() == x.data_ptr()  # no copy


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(3, 4, 2, batch_first=True)
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.layers(x.view(len(x), 2, 3))[0][:, -1])
        return found


def recurrent(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Recurrent()


def test_a_recurrent_layer_is_given_its_weights_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """In cuDNN's order, by pieces that pass the gradients on; and has its own weights back afterwards."""
    plain, module, x, seen = recurrent(), recurrent(), torch.rand(5, 6), list[Any]()
    layer: Any = module.layers
    order = sorted(layer._flat_weights_names, key=lambda name: ("bias" in name, name[-1]))
    InOneChunk(layer, order)
    layer.register_forward_pre_hook(lambda one, _: seen.append(list(one._flat_weights)))
    plain(x).sum().backward()
    module(x).sum().backward()
    for a, b in zip(plain.parameters(), module.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
    pieces = dict(zip(layer._flat_weights_names, seen[0], strict=True))
    assert len({one.untyped_storage().data_ptr() for one in pieces.values()}) == 1
    assert pieces[order[0]].storage_offset() == 0
    starts = [pieces[name].storage_offset() for name in order]
    assert starts == sorted(starts)
    given_back = [getattr(layer, name) for name in layer._flat_weights_names]
    assert all(one is own for one, own in zip(layer._flat_weights, given_back, strict=True))
    asked: list[Any] = []
    monkeypatch.setattr(device_copies, "chunk_order", lambda one, device: asked.append(one) or order)
    fit_to_device(fresh := recurrent(), torch.device("cpu"))
    assert not asked
    fit_to_device(fresh, torch.device("cuda"))
    assert len(asked) == 1
    monkeypatch.setattr(nn.LSTM, "flatten_parameters", lambda one: pytest.fail("the weights left the vector"))
    fresh.layers.flatten_parameters()  # type: ignore[operator,union-attr]


@pytest.mark.full
@pytest.mark.parametrize("engine", ["vmapped", "batched"])
def test_what_cannot_be_vectorized_trains_one_after_another_and_says_why(
    engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = carry_out(method("fedavg"), model=recurrent, engine="sequential", stack=1)
    with there() as device:
        found = carry_out(method("fedavg"), device, model=recurrent, engine=engine, stack=3)
    assert_as_on_the_cpu(found, expected, 1e-6)
    assert f"engine {engine!r} trains one client after another" in caplog.text


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(3, 1, batch_first=True)
        self.out = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(len(x), 2, 3)
        found: Tensor = self.out(self.attention(x, x, x, need_weights=False)[0].mean(1))
        return found


@pytest.mark.full
@pytest.mark.parametrize("engine", ["vmapped", "batched"])
def test_attention_of_many_clients_is_by_plain_products(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    enabled = torch.backends.cuda
    used: list[bool] = []
    attend = nn.functional.scaled_dot_product_attention

    def seen(*args: Any, **kwargs: Any) -> Tensor:
        used.append(enabled.flash_sdp_enabled() or enabled.mem_efficient_sdp_enabled() or enabled.cudnn_sdp_enabled())
        found: Tensor = attend(*args, **kwargs)
        return found

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Attentive()
    expected = carry_out(method("fedavg"), model=model, engine="sequential", stack=1)
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", seen)
    with there() as device:
        found = carry_out(method("fedavg"), device, model=model, engine=engine, stack=3)
    assert used.count(False) >= 2  # the trial and training; scoring takes what is fastest
    assert_as_on_the_cpu(found, expected, 1e-5)


class Unlucky(nn.Module):
    """Loses the device in a pass, once it is told to."""

    soon = False
    passes_since = 0

    def __init__(self, _: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        if Unlucky.soon:
            Unlucky.passes_since += 1
            State.lose("an illegal memory access was encountered")
        found: Tensor = self.layer(x)
        return found


class LoseAfter(Callback):
    def on_server_step(self, step: Any) -> None:
        Unlucky.soon = step["version"] == 2


@pytest.mark.parametrize("engine", ENGINES)
def test_a_lost_device_ends_the_run_with_one_sentence_and_its_checkpoint(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other client is asked afterwards; the steps before are there."""
    monkeypatch.setattr(Unlucky, "soon", False)
    monkeypatch.setattr(Unlucky, "passes_since", 0)
    where = piebald.Simulator(engine=engine, stack=2, workers=0)  # type: ignore[arg-type]
    with pretended(), pytest.raises(DeviceLost, match=r"device 'meta' has failed .*illegal memory.*piebald resume"):
        piebald.run(
            method("fedavg", cohort=1.0), equal_clients(4), Unlucky, rounds=4, seed=1, measure="none",
            runtime=where.model_copy(update={"device": str(DEVICE)}), out=tmp_path / "run", callbacks=[LoseAfter()],
            checkpoint_every=1,
        )  # fmt: skip
    assert Unlucky.passes_since == 1
    with RunStore.open_read_only(tmp_path / "run") as store:
        last = store.last_checkpoint()
    assert last is not None
    assert last[0] == 2
    assert bool(last[1].tensors["cluster/0/model"].isfinite().all())


def test_no_other_engine_is_tried_on_a_lost_device(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def losing(engine: Any, clients: Any, stack: int) -> Any:
        tried.append(engine.name)
        if len(tried) > 1:
            State.lose("misaligned address")
        return torch.ones(len(clients)).to(DEVICE), 1.0

    monkeypatch.setattr(engine_choice, "_measure", losing)
    engine_choice.MEASURED.clear()  # another test may have measured this model
    with pretended(), pytest.raises(DeviceLost, match="misaligned address"):
        carry_out(method("fedavg"), DEVICE, engine="auto", stack=None)
    assert len(tried) == 2


def test_only_fatal_errors_lose_a_device() -> None:
    gpu = torch.device("cuda")
    raise_if_lost(torch.OutOfMemoryError("CUDA error: misaligned address"), gpu)
    raise_if_lost(ValueError("misaligned address"), gpu)
    raise_if_lost(RuntimeError("shapes do not fit"))
    raise_if_lost(RuntimeError("shapes do not fit"), torch.device("cpu"))
    with pytest.raises(DeviceLost, match="the GPU has failed"):
        raise_if_lost(RuntimeError("CUDA error: device-side assert triggered\nmore"))
    with pretended():
        raise_if_lost(RuntimeError("shapes do not fit"), DEVICE)
