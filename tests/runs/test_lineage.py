"""A run that goes on from a finished one begins exactly where that one ended, and can be told from its folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import piebald
from piebald import data, models, partition
from piebald.cli import main
from piebald.core.errors import RunFolderError, SettingError
from piebald.report.comparison import Comparison
from piebald.report.page.report_page import render
from piebald.storage.store import RunStore

ROWS = data.digits()
ENGINE = {"kind": "simulator", "engine": "sequential", "workers": 0}


def clients(count: int = 3) -> Any:
    return partition.Iid(clients=count, validation=0.1, limit=240).split(ROWS)


def trained(recipe: str, out: Path | None, count: int = 3, hidden: int = 8, **more: Any) -> piebald.Run:
    own = {name: more.pop(name) for name in ("cohort", "k", "lr") if name in more}
    made = piebald.recipes.make(recipe, **{"lr": 0.1} | own)

    def model(seed: int) -> Any:
        return models.build_model("mlp", (1, 8, 8), 10, seed, hidden=[hidden])

    return piebald.run(made, clients(count), model, **{"rounds": 2, "runtime": ENGINE, "out": out} | more)


def scores(run: piebald.Run, version: int) -> dict[Any, float]:
    found = [row for row in run._store.rows("score") if row["version"] == version]
    return {(row["client"], row["model"], row["split"], row["metric"]): row["value"] for row in found}


STATES = "the state of 3 clients"


@pytest.mark.parametrize(
    ("recipe", "taken"),
    [
        ("hdafl", {STATES}),
        ("scaffold", {STATES, "what the server sends besides the model", "the server optimizer's state"}),
        ("ditto", {STATES}),
        ("ifca", {"the state of clustering"}),
        ("fedavgm", {"the server optimizer's state"}),
        ("async_fedavg", {"the last models of clients"}),
    ],
)
def test_it_begins_with_the_bits_that_the_other_one_ended_with(recipe: str, taken: set[str], tmp_path: Path) -> None:
    before = trained(recipe, tmp_path / "before")
    after = trained(recipe, tmp_path / "after", start_from=tmp_path / "before", rounds=1)
    assert scores(after, 0) == scores(before, 2)
    anew = trained(recipe, None, seed=1, rounds=1)
    assert scores(anew, 0) != scores(before, 2)
    lineage = after.meta["lineage"]
    assert (lineage["run"], lineage["step"], lineage["seeds"]) == (before.meta["id"], 2, [0])
    assert set(lineage["taken"][1:]) == taken
    assert after.meta["seed"] == 1  # batches of another seed than those that the model has seen


def test_a_third_one_needs_neither_folder_and_is_resumed_to_the_same_bits(tmp_path: Path) -> None:
    trained("hdafl", tmp_path / "first").close()
    trained("hdafl", tmp_path / "second", start_from=tmp_path / "first").close()
    whole = trained("hdafl", tmp_path / "whole", start_from=tmp_path / "second", rounds=2)

    class Stopped(piebald.report.callbacks.Callback):
        def on_server_step(self, step: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained("hdafl", tmp_path / "cut", start_from=tmp_path / "second", callbacks=[Stopped()], checkpoint_every=2)
    for name in ("first", "second"):
        shutil.rmtree(tmp_path / name)
    with RunStore.open_read_only(tmp_path / "cut") as store:
        assert store.last_checkpoint() is None
    settings = clients(), lambda seed: models.build_model("mlp", (1, 8, 8), 10, seed, hidden=[8])
    resumed = piebald.resume(tmp_path / "cut", *settings)
    assert scores(resumed, 2) == scores(whole, 2)
    assert resumed.meta["lineage"]["sha256"] == whole.meta["lineage"]["sha256"]
    assert whole.meta["lineage"]["before"]["step"] == 2
    assert (whole.meta["seed"], whole.meta["lineage"]["steps_before"]) == (2, 4)
    page = render(Comparison([resumed]), None)
    assert "Goes on from" in page
    assert whole.meta["lineage"]["sha256"] in page


def test_more_clients_and_another_recipe_say_what_is_new(tmp_path: Path) -> None:
    trained("ifca", tmp_path / "before").close()
    more = trained("ifca", None, count=4, start_from=tmp_path / "before", rounds=1)
    assert more.meta["lineage"]["newcomers"] == [str(clients(4).names[3])]
    assert "3 cluster models" in more.meta["lineage"]["taken"] or "2 cluster models" in more.meta["lineage"]["taken"]
    other = trained("fedavg", None, start_from=tmp_path / "before", rounds=1)
    assert other.meta["lineage"]["taken"] == ["the global model"]


@pytest.mark.parametrize(
    ("recipe", "more", "says"),
    [
        ("fedavg", {"hidden": 7}, r"has features.1.0.weight of shape \[8, 64\], this one has .* of shape \[7, 64\]"),
        ("hdafl", {}, "take a recipe with the same private layers"),
        ("fedavg", {"loss": nn.CrossEntropyLoss(reduction="none")}, "objective"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_no_folder(
    recipe: str, more: dict[str, Any], says: str, tmp_path: Path
) -> None:
    trained("fedavg", tmp_path / "before").close()
    with pytest.raises(SettingError, match=says):
        trained(recipe, tmp_path / "after", start_from=tmp_path / "before", **more)
    assert not (tmp_path / "after").exists()


def test_unfinished_damaged_and_missing_runs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained("fedavg", tmp_path / "before").close()
    trained("fedavg", tmp_path / "after", start_from=tmp_path / "before").close()
    with RunStore.open(tmp_path / "before") as store:
        store.set_meta(status="stopped")
    with pytest.raises(RunFolderError, match="is not finished, so nothing can go on from it"):
        trained("fedavg", None, start_from=tmp_path / "before")
    start = tmp_path / "after" / "start.safetensors"
    start.write_bytes(start.read_bytes()[:-4] + b"\1\2\3\4")
    with RunStore.open(tmp_path / "after") as store:
        store.set_meta(status="stopped")
    with pytest.raises(RunFolderError, match=r"start\.safetensors is damaged"):
        piebald.resume(tmp_path / "after", clients(), models.build_model("mlp", (1, 8, 8), 10, 0, hidden=[8]))
    assert main(["run", "--from", str(tmp_path / "nowhere")]) == 2
    assert "there is no run folder" in capsys.readouterr().err
