"""Public rows from a file: in a simulation, and at sites that have rows and a copy of the file of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import piebald
from piebald.contracts import HasPublicRows
from piebald.core.errors import SettingError
from piebald.experiments.file import ExperimentSettings

from .in_process import in_process

COLUMNS, CLASSES = ["a", "b", "c"], ["yes", "no"]  # not in the order of the alphabet
FEDMD: dict[str, Any] = {"name": "fedmd", "lr": 0.1, "digest_steps": 2, "public_steps": 1}


def table(rows: int, seed: int) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    frame = pd.DataFrame(draw.normal(size=(rows, 3)).astype(np.float32), columns=COLUMNS)
    return frame.assign(ill=np.where(frame.a > 0, "yes", "no"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    table(60, 0).assign(site=["north", "south"] * 30).to_csv(tmp_path / "all.csv", index=False)
    table(9, 1).to_csv(tmp_path / "public.csv", index=False)
    table(9, 2).to_csv(tmp_path / "other.csv", index=False)
    frame = table(9, 1)
    np.savez(tmp_path / "public.npz", x=frame[COLUMNS].to_numpy(np.float32), y=frame.ill.to_numpy(str))
    np.savez(tmp_path / "narrow.npz", x=np.zeros((4, 2), np.float32), y=np.zeros(4, np.int64))
    return tmp_path


def experiment(folder: Path, text: str) -> ExperimentSettings:
    start = 'rounds = 2\nmodel = { name = "mlp", hidden = [4] }\n'
    recipe = 'recipe = { name = "fedmd", lr = 0.1, digest_steps = 2, public_steps = 1 }\n'
    (folder / "run.toml").write_text(start + recipe + text)
    return ExperimentSettings.load(folder / "run.toml")


def here(folder: Path, public: str, more: str = "") -> ExperimentSettings:
    columns = 'client = "site", target = "ill", features = ["a", "b", "c"], classes = ["yes", "no"]'
    return experiment(folder, f'data = {{ source = "all.csv", {columns}, public = "{public}" }}\n{more}')


def test_a_file_of_public_rows_is_what_all_clients_have(folder: Path) -> None:
    frame, vectors = table(9, 1), []
    for public in ("public.csv", "public.npz"):
        plan = here(folder, public, "prepare = 'none'\n").plan()
        assert isinstance(plan.clients, HasPublicRows)
        rows = plan.clients.public_rows
        assert rows is not None
        torch.testing.assert_close(rows.x, torch.tensor(frame[COLUMNS].to_numpy(np.float32)))
        assert [CLASSES[number] for number in rows.y.tolist()] == frame.ill.tolist()
        options: dict[str, Any] = {"rounds": 2, "runtime": piebald.Simulator(engine="sequential", workers=0)}
        run = piebald.run(
            next(iter(plan.recipes.values())), plan.clients, plan.model, out=folder / public[7:], **options
        )
        assert {row["bytes_up"] for row in run.results} == {4 * 9 * 2}
        vectors.append(torch.cat([one.flatten() for one in run.model(0).parameters()]))
    assert torch.allclose(*vectors, atol=1e-6)


@pytest.mark.parametrize(
    ("public", "more", "words"),
    [
        ("nothing.csv", "", "public = .* must be a .npz file with arrays x and y, or a table"),
        ("run.toml", "", "must be a .npz file with arrays x and y"),
        (
            "narrow.npz",
            "",
            r"look like the clients' rows, float32 rows \[3\] with targets int64 .*got float32 rows \[2\]",
        ),
        ("public.csv", 'partition = { kind = "by_owner", owner = "site", public_rows = 5 }', "public rows already"),
    ],
)
def test_files_that_hold_no_such_rows_are_refused(folder: Path, public: str, more: str, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        here(folder, public, more).plan()


def test_sites_have_copies_of_the_file_and_no_path_of_the_servers_is_read(folder: Path) -> None:
    sites = 'partition = { kind = "sites", clients = ["north", "south"], inputs = [3], classes = ["yes", "no"] }\n'
    made = experiment(folder, sites + 'data = { target = "ill", public = "public.csv" }\n')
    plan = made.plan()
    recipe = next(iter(plan.recipes.values()))
    own: dict[str, Any] = {"source": str(folder / "all.csv"), "client": "site", "target": "ill", "features": COLUMNS}

    def carried_out(**data: Any) -> piebald.Run:
        return piebald.run(recipe, plan.clients, plan.model, rounds=2, runtime=in_process(made, data=own | data))

    (folder / "copy.csv").write_text((folder / "public.csv").read_text())
    run = carried_out(public=str(folder / "copy.csv"))
    assert {row["status"] for row in run.results} == {"ok"}
    assert {row["bytes_up"] for row in run.results if row["kind"] == "train"} != {0}
    with pytest.raises(SettingError, match="this site has others: name the same file as the server"):
        carried_out(public=str(folder / "other.csv"))
    with pytest.raises(SettingError, match="this site has none"):
        carried_out()
