"""The best version by validation loss is kept and used at the end, also for private layers and after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import piebald
from piebald import data, models, partition, recipes
from piebald.contracts import Checkpoint
from piebald.core.errors import RunFolderError, SettingError
from piebald.server.best_version import BestVersion, validation_loss
from piebald.storage.store import RunStore

HERE = piebald.Simulator(engine="sequential", workers=0)
ROUNDS = 6


@pytest.fixture(scope="module")
def clients() -> partition.PooledClients:
    return partition.Dirichlet(clients=5, alpha=0.5, limit=300, validation=0.3).split(data.digits())


def model(seed: int) -> torch.nn.Module:
    return models.build_model("mlp", (1, 8, 8), 10, seed, hidden=(16,))


def spoiling(name: str = "hdafl") -> piebald.Recipe:
    """Three good rounds, then much larger steps, so that the best version is in the middle."""

    class Rising(piebald.methods.training.lr_schedule.LrSchedule):
        """Times 40 from version 3 on."""

        def factor(self, version: int) -> float:
            return 1.0 if version < 3 else 40.0

    return recipes.make(name, lr=0.3, lr_schedule=Rising())


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    from piebald.contracts.component import Component

    monkeypatch.setattr(Component, "registry", {axis: dict(kinds) for axis, kinds in Component.registry.items()})


def score(row: dict) -> tuple:
    return row["version"], row["client"], row["model"], row["split"], row["metric"]


@pytest.mark.parametrize("name", ["fedavg", "hdafl", "ditto"])
def test_the_best_version_is_kept_with_private_layers(clients, name: str, tmp_path: Path) -> None:
    recipe = spoiling(name)
    kept = piebald.run(recipe, clients, model, rounds=ROUNDS, runtime=HERE, keep="best", out=tmp_path / "best")
    losses = {v: validation_loss([r for r in kept.scores if r["version"] == v]) for v in range(1, ROUNDS + 1)}
    best = min(losses, key=lambda version: losses[version])
    assert 1 < best < ROUNDS
    assert kept.best == best == kept.final["best"]

    short = piebald.run(recipe, clients, model, rounds=best, runtime=HERE, out=tmp_path / "short")
    flat = kept.work.layout.flatten
    assert torch.equal(flat(kept.model()), flat(short.model()))
    for client in range(5):
        assert torch.equal(flat(kept.model(client)), flat(short.model(client)))
    assert kept.per_client == short.per_client
    assert kept.accuracy == short.accuracy
    assert [point["version"] for point in kept.curve] == list(range(ROUNDS + 1))  # the curve shows all of it


def test_without_a_folder_the_global_model_is_the_best(clients) -> None:
    kept = piebald.run(spoiling("fedavg"), clients, model, rounds=ROUNDS, runtime=HERE, keep="best")
    short = piebald.run(spoiling("fedavg"), clients, model, rounds=kept.best, runtime=HERE)
    assert kept.best < ROUNDS
    assert torch.equal(kept.work.layout.flatten(kept.model()), short.work.layout.flatten(short.model()))


def test_a_run_interrupted_after_its_best_version_ends_with_it(clients, tmp_path: Path, monkeypatch) -> None:
    recipe = spoiling()
    whole = piebald.run(recipe, clients, model, rounds=ROUNDS, runtime=HERE, keep="best", out=tmp_path / "whole")
    real, calls = RunStore.commit, []

    def cut(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == ROUNDS:
            raise KeyboardInterrupt
        real(self, *args, **kwargs)

    monkeypatch.setattr(RunStore, "commit", cut)
    with pytest.raises(KeyboardInterrupt):
        piebald.run(recipe, clients, model, rounds=ROUNDS, runtime=HERE, keep="best", out=tmp_path / "cut")
    monkeypatch.setattr(RunStore, "commit", real)
    resumed = piebald.resume(tmp_path / "cut", clients, model)
    again = piebald.resume(tmp_path / "cut", clients, model)  # a finished one is handed back
    flat = whole.work.layout.flatten
    for other in (resumed, again):
        assert other.best == whole.best < ROUNDS - 1
        for client in (None, *range(5)):
            assert torch.equal(flat(whole.model(client)), flat(other.model(client)))


def test_sparse_checkpoints_still_have_the_best(clients, tmp_path: Path) -> None:
    run = piebald.run(
        spoiling(), clients, model, rounds=ROUNDS, runtime=HERE, keep="best", checkpoint_every=4, out=tmp_path / "run"
    )
    assert run.best not in (4, ROUNDS)
    assert run.model(0) is not None


def test_no_more_checkpoints_are_kept_than_are_needed(clients, tmp_path: Path) -> None:
    run = piebald.run(spoiling(), clients, model, rounds=ROUNDS, runtime=HERE, keep="best", out=tmp_path / "run")
    files = sorted(int(path.stem.split("-")[1]) for path in (tmp_path / "run").glob("vectors-*.safetensors"))
    assert files == sorted({run.best, ROUNDS - 1, ROUNDS})
    with pytest.raises(RunFolderError, match="no checkpoint of server step 1"):
        run._store.server_checkpoint(1)


def test_the_earliest_of_equals_and_never_the_start() -> None:
    def rows(loss: float) -> list[dict]:
        row = {"split": "validation", "metric": "loss", "model": "global", "client": 0, "value": loss, "examples": 3}
        return [row]

    best = BestVersion()
    for version, loss in ((0, 0.125), (1, 0.5), (2, 0.25), (3, 0.25), (4, float("nan"))):
        best.consider(version, rows(loss), Checkpoint())
    assert (best.version, best.loss) == (2, 0.25)
    again = BestVersion()
    again.restore(best.state())
    assert (again.version, again.loss) == (2, 0.25)


def test_the_loss_is_weighted_by_rows_and_prefers_personal_models() -> None:
    def row(client: int, name: str, value: float, examples: int, split: str = "validation") -> dict:
        return {"split": split, "metric": "loss", "model": name, "client": client, "value": value, "examples": examples}

    rows = [row(0, "personal", 1.0, 30), row(0, "global", 9.0, 30), row(1, "global", 2.0, 10)]
    assert validation_loss(rows) == pytest.approx((30 * 1.0 + 10 * 2.0) / 40)
    assert validation_loss(rows[::-1]) == pytest.approx(1.25)
    assert validation_loss([row(0, "personal", 1.0, 30, "test")]) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": "newest"}, "keep must be 'last' or 'best' or 'best_for_each' or 'knn_per' or a table, got 'newest'"),
        ({"keep": "best", "evaluate_every": 0}, "needs evaluations to choose by"),
    ],
)
def test_errors_are_one_sentence(clients, options, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        piebald.run("fedavg", clients, model, rounds=1, **options)


def test_validation_rows_are_needed() -> None:
    bare = partition.Iid(clients=2, limit=40).split(data.digits())
    with pytest.raises(SettingError, match="needs validation rows but no client has any"):
        piebald.run("fedavg", bare, model, rounds=1, keep="best")
