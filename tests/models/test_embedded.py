"""Clients behind a frozen extractor: run once for each client, cached, in the same order, for any kind of clients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import piebald
from piebald import data, partition
from piebald.core.errors import SettingError
from piebald.models import build_model, embedded


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIEBALD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "embeddings"


class Counting(nn.Module):
    """Row sums and means; counts the rows that it has seen."""

    seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counting.seen += len(x)
        flat = x.flatten(1)
        return torch.stack([flat.sum(1), flat.mean(1), flat[:, 20]], 1)


@pytest.fixture
def clients() -> partition.PooledClients:
    return partition.Dirichlet(clients=3, alpha=0.5, limit=90, validation=0.2).split(data.digits())


def test_every_row_becomes_its_embedding_once(clients, cache: Path) -> None:
    Counting.seen = 0
    behind = embedded(clients, Counting(), key="mine")
    held = sum(clients.size(client, split) for client in range(3) for split in ("train", "validation", "test"))
    assert Counting.seen == held + len(clients.common)
    assert len(list(cache.iterdir())) == 3 + 1  # a file for each client, and the common test set
    again = embedded(clients, Counting(), key="mine")
    assert Counting.seen == held + len(clients.common)
    for client in range(3):
        for split in ("train", "validation", "test"):
            rows, made = clients.rows(client, split), behind.rows(client, split)
            torch.testing.assert_close(made.x, Counting()(rows.x))
            assert torch.equal(made.y, rows.y)
            assert torch.equal(again.rows(client, split).x, made.x)
            assert behind.size(client, split) == len(rows)
            assert behind.counts(client, split) == clients.counts(client, split)
    assert behind.names == clients.names
    torch.testing.assert_close(behind.common.x, Counting()(clients.common.x))


def test_rows_of_the_server_and_of_all_are_embedded_as_well() -> None:
    clients = partition.Iid(clients=2, limit=60, server_rows=9, public_rows=12).split(data.digits())
    behind = embedded(clients, Counting())
    for before, made in ((clients.server_rows, behind.server_rows), (clients.public_rows, behind.public_rows)):
        torch.testing.assert_close(made.x, Counting()(before.x))
        assert torch.equal(made.y, before.y)


def test_training_over_embeddings_repeats_and_runs_on_every_engine(clients) -> None:
    behind = embedded(clients, Counting())
    ends = []
    for engine in ("sequential", "vmapped"):
        run = piebald.run(
            "cgau", behind, build_model("gated_classifier", (3,), 10, units=(4,)), rounds=2,
            runtime=piebald.Simulator(engine=engine, workers=0),
        )  # fmt: skip
        ends.append(run.work.layout.flatten(run.model()))
    torch.testing.assert_close(ends[0], ends[1], atol=1e-5, rtol=1e-4)


def test_settings_name_the_extractor(tmp_path: Path) -> None:
    from piebald.experiments.file import ExperimentSettings

    file = tmp_path / "run.toml"
    text = """
        rounds = 1
        keep = "best"
        extractor = "{}"
        data = {{ name = "digits" }}
        partition = {{ kind = "iid", clients = 2, limit = 40, validation = 0.2 }}
        model = {{ name = "gated_classifier", units = [4] }}
        recipe = {{ name = "cgau" }}
        evaluate = {{ metrics = ["auc", "accuracy"] }}
    """
    file.write_text(text.format("nonsense"))
    with pytest.raises(SettingError, match=r"run.toml:4: there is no extractor 'nonsense'"):
        ExperimentSettings.load(file).plan()
    file.write_text(text.format("log_mel"))
    with pytest.raises(SettingError, match=r"run.toml:4: log_mel reads recordings"):
        ExperimentSettings.load(file).plan()


@pytest.mark.skipif(
    "PIEBALD_DATA" not in __import__("os").environ, reason="PIEBALD_DATA is not set: it has the weights"
)
def test_a_run_from_settings_over_squeezenet(tmp_path: Path) -> None:
    from piebald.experiments.file import ExperimentSettings

    file = tmp_path / "run.toml"
    file.write_text("""
        extractor = "squeezenet"
        data = { name = "digits" }
        partition = { kind = "iid", clients = 2, limit = 12 }
        model = { name = "gated_classifier", units = [4] }
        recipe = { name = "cgau" }
    """)
    plan = ExperimentSettings.load(file).plan()
    assert plan.clients.rows(0, "train").x.shape[1:] == (512,)
    assert plan.model(0)(plan.clients.rows(1, "test").x).shape[1] == 10
