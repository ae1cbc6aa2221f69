"""Copies of a large model that are in memory at once, counted: numbers that the machine's load does not change."""

from __future__ import annotations

import gc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piebald
from piebald import recipes
from piebald.core import tensor_store
from piebald.core.cohort_matrix import divided, weighted_sum
from piebald.core.errors import RuntimeFault
from piebald.core.tensor_store import file_of_start, mapped
from piebald.engines import sequential
from piebald.engines.sequential import SequentialEngine
from piebald.engines.sgd_step import SgdRun
from piebald.report.callbacks import Callback

HERE = piebald.Simulator(engine="sequential", workers=0)
MAPPED = HERE.model_copy(update={"map_above": 0})
MAPS = Path("/proc/self/maps")


def in_files(maps: str) -> list[range]:
    """The addresses of nameless files that this process has mapped."""
    spans = [line.split()[0].split("-") for line in maps.splitlines() if line.endswith("(deleted)")]
    return [range(int(start, 16), int(stop, 16)) for start, stop in spans]


def copies(numbers: int) -> float:
    """Copies of a model of so many numbers that live tensors hold in memory, each storage counted once, float64 as two.

    Those in mapped files are left out: the system gives them up when it needs their memory.
    """
    found, files = {}, in_files(MAPS.read_text()) if MAPS.exists() else []
    for one in gc.get_objects():
        if type(one) in (Tensor, nn.Parameter):
            with suppress(NotImplementedError):  # a traceback of another test may hold vmap's, which have no storage
                storage = one.untyped_storage()
                if storage.nbytes() >= numbers:
                    found[storage.data_ptr()] = storage.nbytes()
    return sum(size for start, size in found.items() if not any(start in span for span in files)) / (4 * numbers)


@pytest.mark.full
@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (HERE, [1, 3, 3, 2, 4, 4]),
        pytest.param(
            MAPPED, [0, 2, 2, 0, 2, 2], marks=pytest.mark.skipif(not MAPS.exists(), reason="needs /proc of Linux")
        ),
    ],
    ids=["in memory", "mapped"],
)
def test_what_lies_in_memory_while_a_client_trains(
    where: piebald.Simulator, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's first numbers, in which its module lies, the global model, and the sum (two).

    The user's model was there before, and the engine hands over what it trained.  Where they are mapped from files, the
    first numbers and the global model take no memory.
    """
    draw = torch.Generator().manual_seed(0)
    held = {who: (torch.randn(8, 300, generator=draw), torch.arange(8) % 4) for who in "abc"}
    model = nn.Sequential(nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 300))
    numbers, seen = sum(one.numel() for one in model.parameters()), list[float]()
    gc.collect()
    trains, there = SequentialEngine.run_sgd, copies(numbers)

    def counted(self: SequentialEngine, run: SgdRun) -> Any:
        gc.collect()
        seen.append(copies(numbers) - there)
        return trains(self, run)

    monkeypatch.setattr(SequentialEngine, "run_sgd", counted)
    monkeypatch.setattr(sequential, "LARGE", 0)
    clients = piebald.clients_from(held, test=0, classes=[str(one) for one in range(300)])
    piebald.run(recipes.fedavg(lr=0.1), clients, model, rounds=2, evaluate_every=0, runtime=where)
    # the user's model was there before; the global model is the run's first numbers until the first step
    assert [round(one) for one in seen] == expected


def numbers_of(run: piebald.Run) -> Tensor:
    return run.work.layout.flatten(run.model())


def small_clients() -> Any:
    draw = torch.Generator().manual_seed(2)
    held = {who: (torch.randn(6, 4, generator=draw), torch.arange(6) % 3) for who in "abc"}
    return piebald.clients_from(held, test=0, validation=0.3)


def small_network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def small_run(name: str, where: piebald.Simulator, **options: Any) -> piebald.Run:
    more = {"optimizer": "adam", "optimizer_state": "averaged"} if name == "ifca" else {}
    recipe = recipes.make(name, **more)
    return piebald.run(recipe, small_clients(), small_network, rounds=3, runtime=where, **options)


@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedala", "scaffold", "async_dvw", "hdafl", "fedrep", "apfl"])
def test_what_is_trained_in_place_and_handed_over_has_the_bits_of_a_copy(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a client trains several models in a task, and keeps some of them."""
    runs = [small_run(name, HERE, out=tmp_path / "copied")]
    monkeypatch.setattr(sequential, "LARGE", 0)
    runs.append(small_run(name, HERE, out=tmp_path / "handed over"))
    assert torch.equal(*map(numbers_of, runs))
    assert runs[0].scores == runs[1].scores
    for client in ("a", "b"):
        assert torch.equal(*(run.work.layout.flatten(run.model(client=client)) for run in runs))


@pytest.mark.parametrize("name", ["fedadam", "ifca", "async_dvw", "hdafl"])
def test_mapped_vectors_have_the_bits_of_those_in_memory(name: str) -> None:
    """A server optimizer with state, averaged state of clients in two clusters, a cache, and private layers."""
    runs = [small_run(name, where, keep="best") for where in (HERE, MAPPED)]
    assert torch.equal(*map(numbers_of, runs))


class Stops(Callback):
    """Ends a run after its second step, as a user's Ctrl-C does."""

    def on_server_step(self, step: Any) -> None:
        if step["version"] == 2:
            raise KeyboardInterrupt


@pytest.mark.full
@pytest.mark.skipif(not MAPS.exists(), reason="needs /proc of Linux")
def test_an_interrupted_run_goes_on_from_mapped_vectors_and_leaves_no_file(tmp_path: Path) -> None:
    gc.collect()
    before = len(in_files(MAPS.read_text()))
    whole = numbers_of(small_run("fedadam", HERE))
    with pytest.raises(KeyboardInterrupt):
        small_run("fedadam", MAPPED, out=tmp_path, checkpoint_every=1, callbacks=[Stops()])
    assert torch.equal(numbers_of(piebald.resume(tmp_path, small_clients(), small_network)), whole)
    gc.collect()
    assert len(in_files(MAPS.read_text())) == before


def test_a_folder_without_room_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RuntimeFault, match=r"cannot be kept in a file in .*missing.*raise the runtime's map_above"):
        mapped(torch.zeros(3), 0, tmp_path / "missing")
    short = torch.zeros(3)
    assert mapped(short, 12, tmp_path / "missing") is short


@pytest.mark.skipif(not MAPS.exists(), reason="needs /proc of Linux")
def test_the_first_numbers_of_a_run_lie_in_a_file_before_its_global_models_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = small_run("fedavg", HERE)
    monkeypatch.setattr(tensor_store, "MOST_IN_MEMORY", 100)
    run = small_run("fedavg", HERE)
    files = in_files(MAPS.read_text())
    assert any(run.work.initial.data_ptr() in span for span in files)
    assert not any(run.cluster_models[0].data_ptr() in span for span in files)
    assert torch.equal(numbers_of(run), numbers_of(whole))
    missing, vector = tmp_path / "missing", torch.zeros(50)
    assert file_of_start(vector, missing, 1000) is vector  # a run that would go on in memory does so
    with pytest.raises(RuntimeFault, match="map_above"):
        file_of_start(vector, missing, 150)


@pytest.mark.parametrize("rows", [1, 3])
def test_sums_and_quotients_by_blocks_have_the_bits_of_whole_ones(rows: int) -> None:
    draw = torch.Generator().manual_seed(rows)
    matrix, weights = torch.randn(rows, 700_001, generator=draw), [0.1, 2.3, 3.0][:rows]
    total = weighted_sum(matrix, weights)
    whole = sum(weight * row.double() for weight, row in zip(weights, matrix, strict=True))
    torch.testing.assert_close(total, whole, rtol=1e-15, atol=1e-15)
    assert torch.equal(divided(total.view(-1, 1), 0.7), (total / 0.7).float().view(-1, 1))
