"""Models that a real server maps from disk, over TLS: the bits of those in memory, also when processes are killed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import piebald
from piebald.runs import execution
from piebald.runs.run import opened
from piebald.storage.store import RunStore

from .conftest import Server, Sites, carry_out, provisioned, settings, until

NAMES = ["site-1", "site-2"]  # two, whose sum has the same bits in either order of arrival
ROUNDS = 5
ADAM = {"optimizer": "adam", "optimizer_state": "averaged"}
# the state of a server optimizer, of clients, and averaged over clients in two clusters
RECIPES: dict[str, dict[str, Any]] = {
    "server state": {"name": "fedadam", "momentum": 0.5, "keep_momentum": True},
    "clusters": {"name": "ifca", "k": 2, **ADAM},
}
NEVER = {"every": 0}
PARTITION = {"kind": "dirichlet", "clients": 2, "alpha": 0.5, "validation": 0.1, "limit": 300}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    """Two sites, which stay for further runs."""
    made = Sites(provisioned(tmp_path_factory.mktemp("two") / "credentials", NAMES))
    for name in NAMES:
        made.start(name)
    yield made
    made.close()


def numbers(folder: Path) -> Mapping[str, Tensor]:
    """All vectors of a run's last checkpoint: models, and what the server keeps beside them."""
    with RunStore.open_read_only(folder) as store:
        return store.server_checkpoint(store.version).tensors


def assert_same_bits(one: Path, other: Path) -> None:
    mine, theirs = numbers(one), numbers(other)
    assert mine.keys() == theirs.keys()
    assert sum(len(vector.flatten()) > 1000 for vector in mine.values()) > 1
    for name, vector in mine.items():
        assert torch.equal(vector, theirs[name]), name


@pytest.mark.full
@pytest.mark.parametrize("name", RECIPES)
def test_mapped_models_of_a_federation_have_the_bits_of_those_in_memory(
    name: str, two: Sites, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, moved = execution.mapped, dict[int, int]()

    def counted(vector: Tensor, above: int, folder: Path) -> Tensor:
        moved[above] = moved.get(above, 0) + (vector.nbytes > above)
        assert folder.parent == tmp_path
        return real(vector, above, folder)

    monkeypatch.setattr(execution, "mapped", counted)
    made = settings(RECIPES[name], rounds=ROUNDS, partition=PARTITION)
    credentials = str(two.folder / "server")
    runs = [
        carry_out(made, tmp_path / str(above), credentials=credentials, map_above=above) for above in (4 << 30, 1000)
    ]
    assert moved[4 << 30] == 0
    assert moved[1000] > 2 * ROUNDS
    assert_same_bits(tmp_path / str(4 << 30), tmp_path / "1000")
    assert runs[0].scores == runs[1].scores
    updates = [[row["bytes_up"] for row in run.results if row["kind"] == "train"] for run in runs]
    assert updates[0] == updates[1]


@pytest.mark.long
@pytest.mark.parametrize("name", RECIPES)
def test_killed_servers_and_sites_go_on_with_mapped_models_to_the_same_bits(
    name: str, two: Sites, tmp_path: Path
) -> None:
    """SIGKILL for a site while it trains, then for the server, which maps its models anew."""
    recipe, options = RECIPES[name] | {"epochs": 10}, {"rounds": ROUNDS, "partition": PARTITION, "evaluate": NEVER}
    carry_out(settings(recipe, **options), tmp_path / "undisturbed", credentials=str(two.folder / "server"))
    made = settings(recipe, **options, runtime={"kind": "federation", "map_above": 1000})
    server = Server(made, two.folder / "server", tmp_path / "run")
    try:
        until(lambda: server.version() > 0 or server.over())
        assert in_files(server) > 0
        two.kill("site-2")
        two.start("site-2")
        now = server.version()
        until(lambda: server.version() > now or server.over())
        assert not server.over(), "it ended before it could be killed: more rounds are needed"
        server.kill_and_resume()
        until(lambda: in_files(server) or server.over())
        until(server.over)
    finally:
        server.close()
    assert_same_bits(tmp_path / "undisturbed", server.out)
    assert piebald.resume(server.out).rounds[-1]["version"] == ROUNDS
    left = {path.name.split("-")[0] for path in server.out.iterdir()}
    assert left <= {"run.db", "run.lock", "vectors", "federation"}, "a mapped file has no name"
    assert opened(server.out).meta["runtime"]["map_above"] == 1000


def in_files(server: Server) -> int:
    """Nameless files in the run folder that the server has mapped."""
    lines = Path(f"/proc/{server.process.pid}/maps").read_text().splitlines()
    return sum(line.endswith("(deleted)") and str(server.out) in line for line in lines)
