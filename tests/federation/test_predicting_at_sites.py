"""Predictions after a real federation: by the run with its sites on this machine, and by a site with its own model."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

FILE = """\
rounds = 2
data = { source = "rows.csv", client = "ward", target = "ill" }
model = { name = "mlp", hidden = [8] }
recipe = { name = "fedrep", lr = 0.1 }
split = { test = 0.3, validation = 0.3 }
evaluate = { threshold = "CRITERION" }
"""


def in_folder(folder: Path) -> tuple[Callable[..., str], Callable[..., pd.DataFrame]]:
    """Return what runs a command in a folder, and what reads its predictions."""

    def piebald(*words: str) -> str:
        command = [sys.executable, "-m", "piebald.cli", *words]
        told = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400, check=False)
        assert told.returncode == 0, told.stderr
        return told.stdout

    return piebald, lambda *words: pd.read_csv(io.StringIO(piebald("predict", *words)))


@pytest.mark.long
@pytest.mark.parametrize("target", ['["load", "stay"]', '{ time = "stay", event = "ill" }'])
def test_sites_with_several_targets_predict_as_a_simulation_does(target: str, tmp_path: Path) -> None:
    rng, x = np.random.default_rng(0), np.random.default_rng(1).normal(size=(80, 2))
    frame = pd.DataFrame({"ward": list("ab") * 40, "age": x[:, 0], "load": 500 + 9 * x[:, 0], "stay": np.exp(x[:, 1])})
    frame["ill"] = rng.choice(["yes", "no"], 80)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    (tmp_path / "file.toml").write_text(
        f'rounds = 2\ndata = {{ source = "rows.csv", client = "ward", target = {target}, features = ["age"] }}\n'
        'model = { name = "mlp", hidden = [8] }\nrecipe = { name = "fedavg", lr = 0.1 }\n'
    )
    piebald, predictions = in_folder(tmp_path)
    piebald("run", "file.toml", "--out", "run", "--quiet")
    piebald("up", "file.toml", "--local", "2", "--out", "up", "--quiet")
    simulated = predictions("run", "rows.csv")
    assert list(simulated) == (["risk"] if "event" in target else ["load", "stay"])
    pd.testing.assert_frame_equal(predictions("up/federation/site-1", "rows.csv"), simulated, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("criterion", ["f1", "pooled f1"])
def test_a_site_and_its_run_predict_as_a_simulation_does(criterion: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"ward": list("ab") * 40, "age": rng.normal(50, 9, 80), "blood": rng.choice(["0", "A", "B"], 80)}
    )
    frame["ill"] = np.where(frame.age + 20 * (frame.blood == "A") > 55, "yes", "no")
    frame.loc[::9, "age"] = np.nan
    frame.to_csv(tmp_path / "rows.csv", index=False)
    (tmp_path / "file.toml").write_text(FILE.replace("CRITERION", criterion))

    piebald, predictions = in_folder(tmp_path)
    engine = ("--set", "runtime={ engine = 'sequential', workers = 0 }")
    piebald("run", "file.toml", "--out", "run", "--quiet", *engine)
    piebald("up", "file.toml", "--local", "2", "--out", "up", "--quiet")
    for client, site in (("a", "site-1"), ("b", "site-2")):
        simulated = predictions("run", "rows.csv", "--client", client)
        assert list(simulated.columns) == ["no", "yes", "class"]  # by the threshold of [evaluate]
        at_site = predictions(f"up/federation/{site}", "rows.csv")  # reads no rows of the site
        pd.testing.assert_frame_equal(predictions("up", "rows.csv", "--client", client), at_site)
        pd.testing.assert_frame_equal(at_site, simulated, atol=1e-5)
    piebald("export", "up", "--client", "b", "--out", "folder")
    scored = subprocess.run(
        [sys.executable, "folder/score.py", "rows.csv"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    pd.testing.assert_frame_equal(pd.read_csv(io.StringIO(scored.stdout)), simulated.iloc[:, :2], atol=1e-5)
