"""Engine choices that are remembered between runs: taken where they fit, never trusted, and switched off by a word."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pooch
import pytest
import torch
from torch import Tensor, nn

import piebald
from piebald import recipes
from piebald.core import machine
from piebald.core.errors import SettingError
from piebald.engines import engine_choice, remembered_choices
from piebald.runs.options import RunOptions
from piebald.runs.prepare import prepare
from piebald.runtimes.simulation import simulator
from tests.fakes import classified, seeded

RECIPE = recipes.fedavg(lr=0.2, batch=5)
MEASURED = ("batched", 5, 1e-4)


class Wrapped(nn.Module):
    """A model whose code a person may change while its name and its layers stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layers(x)
        return scores


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIEBALD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIEBALD_ENGINE_CACHE", "on")
    return tmp_path / "cache" / "engines"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """How often engines were measured; what is found is made up."""
    asked: list[Any] = []

    def fastest(*args: Any) -> tuple[str, int, float]:
        asked.append(args)
        return MEASURED

    monkeypatch.setattr(simulator, "fastest", fastest)
    return asked


def chosen(model: nn.Module | None = None, **simulator: Any) -> dict[str, Any]:
    trained = seeded(Wrapped) if model is None else model
    options = RunOptions(runtime=piebald.Simulator(workers=0, **simulator))
    table: dict[str, Any] = prepare(RECIPE, classified(*range(6, 20)), trained, options).meta["runtime"]
    return {name: table[name] for name in ("engine", "stack")}


def test_large_stacks_are_measured_only_of_tiny_models_and_where_each_core_gets_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A few of them would end at different times, and 250 larger models take memory that nobody expects."""
    cpu, gpu, many = torch.device("cpu"), torch.device("cuda"), 3 * 4 * 250
    monkeypatch.setattr(engine_choice, "count_cores", lambda: 3)
    tiny, larger = (
        prepare(RECIPE, classified(*range(6, 20)), seeded(make), RunOptions(runtime=piebald.Simulator(workers=0))).work
        for make in (Wrapped, lambda: nn.Sequential(nn.Linear(4, 5000), nn.Linear(5000, 2)))
    )
    few = engine_choice.stack_sizes(tiny, cpu, 10)
    assert engine_choice.stack_sizes(tiny, cpu, many - 1) == engine_choice.stack_sizes(larger, cpu, many) == few
    assert engine_choice.stack_sizes(tiny, cpu, many) == (*few, 250)
    assert engine_choice.stack_sizes(tiny, gpu, 10) == engine_choice.stack_sizes(tiny, gpu, many)


def test_the_second_run_measures_nothing(folder: Path, measured: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    first = chosen()
    assert (first["engine"], first["stack"], len(measured)) == ("batched", 5, 1)

    def not_again(*_: Any) -> Any:
        raise AssertionError("a time was measured")

    monkeypatch.setattr(engine_choice, "clock", not_again)
    assert chosen() == first
    assert len(measured) == 1
    [file] = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_another_model_machine_or_torch_is_measured(
    folder: Path, measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen()
    chosen(seeded(lambda: nn.Linear(4, 2)))
    monkeypatch.setattr(remembered_choices, "count_cores", lambda: 1000)
    chosen()
    monkeypatch.setattr(torch, "__version__", "99")
    chosen()
    assert len(measured) == 4


@pytest.mark.parametrize(
    "left",
    [
        b"", b"\xff\x00", b"[" * 5000, b"[]", b"{}", b"null",
        {"engine": "reference"}, {"engine": ["batched"]}, {"engine": "piebald:run"}, {"stack": 7}, {"stack": True},
        {"stack": 10**6}, {"seconds_per_step": float("nan")}, {"seconds_per_step": "1"}, {"more": 1},
        "folder", "old",
    ],
    ids=str,
)  # fmt: skip
def test_a_file_that_is_not_as_it_was_written_is_not_there(left: Any, folder: Path, measured: list[Any]) -> None:
    first = chosen()
    [file] = folder.iterdir()
    if left == "folder":
        file.unlink()
        file.mkdir()
    elif left == "old":
        os.utime(file, (0, 0))
    else:
        file.write_bytes(left if isinstance(left, bytes) else json.dumps(json.loads(file.read_text()) | left).encode())
    assert chosen() == first
    assert len(measured) == 2
    if left != "folder":  # what is there now is good again
        chosen()
        assert len(measured) == 2


def test_an_engine_that_computes_something_else_is_not_taken(
    folder: Path, measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's code has changed: it mixes the rows that it is given, which engines that join clients misread."""
    chosen()
    monkeypatch.setattr(Wrapped, "forward", lambda self, x: self.layers(x) * x.max())
    chosen()
    assert len(measured) == 2


def test_a_model_that_takes_only_whole_batches_is_measured(
    folder: Path, measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A remembered engine is compared on fewer rows than a batch has, which is no reason to refuse the model."""
    chosen()
    plain = Wrapped.forward

    def whole(self: Wrapped, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled() and len(x) % RECIPE.training.batch:
            raise RuntimeError("this model wants whole batches")
        return plain(self, x)

    monkeypatch.setattr(Wrapped, "forward", whole)
    assert chosen()["engine"] == MEASURED[0]
    assert len(measured) == 2


@pytest.mark.parametrize("variable", ["PIEBALD_CACHE", "PIEBALD_ENGINE_CACHE"])
def test_nothing_is_kept_where_that_is_not_possible_or_wanted(
    variable: str, folder: Path, measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, {"PIEBALD_CACHE": "/dev/null/none", "PIEBALD_ENGINE_CACHE": "off"}[variable])
    chosen()
    chosen()
    assert len(measured) == 2
    assert not folder.exists()


def test_the_switch_has_two_positions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIEBALD_ENGINE_CACHE", "perhaps")
    with pytest.raises(SettingError, match="PIEBALD_ENGINE_CACHE must be 'on' or 'off', got 'perhaps'"):
        chosen()


def test_choices_by_counting_read_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any) -> Any:
        raise SettingError("a file was read")

    monkeypatch.setattr(simulator, "recall", read)
    monkeypatch.setattr(simulator, "remember", read)
    assert chosen(deterministic=True)["engine"] == "batched"
    assert chosen(engine="vmapped")["engine"] == "vmapped"
    with pytest.raises(SettingError, match="a file was read"):  # so the test would notice
        chosen()


def test_the_folder_is_the_system_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIEBALD_CACHE", raising=False)
    assert machine.cache_folder() == pooch.os_cache("piebald")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert machine.cache_folder() == pooch.os_cache("piebald")
