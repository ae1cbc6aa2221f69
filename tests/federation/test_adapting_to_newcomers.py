"""A newcomer fits a real federation's run to its own rows: from a copy of the run folder, and with nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import piebald
from piebald import data
from piebald.cli import main
from piebald.federation.link import messaging

from .conftest import Sites, carry_out, settings

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    ("recipe", "start"),
    [({"name": "hdafl"}, "private"), ({"name": "ifca", "k": 2}, "cluster")],
    ids=["private layers", "clusters"],
)
def test_a_newcomer_of_a_federation_gets_what_one_of_the_simulator_gets(
    recipe: dict[str, Any], start: str, sites: Sites, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    digits = data.digits()
    x, y = digits.x[:120].numpy(), digits.y[:120].numpy()
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    made = settings(recipe)
    carry_out(made, out=tmp_path / "server", credentials=str(sites.folder / "server"))
    shutil.copytree(tmp_path / "server", tmp_path / "copy")
    shutil.rmtree(tmp_path / "server")
    with monkeypatch.context() as elsewhere:  # the credentials are not where the newcomer is
        elsewhere.setattr(messaging, "Link", lambda *_: pytest.fail("nothing is sent"))
        found = piebald.adapt(tmp_path / "copy", (x, y), validation=0.2, test=0.2, epochs=3)
        options = ["--data", str(tmp_path / "mine.npz"), "--epochs", "3", "--json"]
        assert main(["adapt", str(tmp_path / "copy"), *options]) == 0
    expected = piebald.adapt(carry_out(made), (x, y), validation=0.2, test=0.2, epochs=3)
    assert start in {one.name for one in found.methods}
    assert [one.name for one in found.methods] == [one.name for one in expected.methods]
    assert found.best == expected.best
    torch.testing.assert_close(found.vector, expected.vector, atol=1e-4, rtol=1e-3)
    assert json.loads(capsys.readouterr().out)["methods"] == found.table()["methods"]
