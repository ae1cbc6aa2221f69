from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from piebald import data
from piebald.cli import main
from piebald.data import DataSet
from piebald.data.measures import pictures
from piebald.data.measures.heterogeneity import survey
from piebald.data.partition import Dirichlet, FastSlow, Iid, LazyClients, Lists, PooledClients, clients_from


@pytest.mark.full
def test_every_picture_is_drawn(tmp_path) -> None:
    clients = Dirichlet(clients=30, alpha=0.3).split(data.digits())
    drawn = pictures.draw(clients, tmp_path / "new", embed=pictures.flat, fleet=FastSlow())
    assert [path.name for path in drawn] == ["classes.png", "sizes.png", "embedding.png", "devices.png"]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in drawn)


def test_what_is_not_known_is_not_drawn(tmp_path) -> None:
    lazy = LazyClients(3, lambda client: (torch.zeros(4, 2).numpy(), torch.zeros(4).numpy()), test=0.0)
    assert pictures.draw(lazy, tmp_path) == []
    real = Iid(clients=2).split(DataSet("real", torch.zeros(9, 1), torch.zeros(9)))
    assert [path.name for path in pictures.draw(real, tmp_path, embed=pictures.flat)] == ["sizes.png"]


@pytest.mark.full
def test_names_are_no_formulas_and_may_have_letters_that_the_font_lacks(tmp_path) -> None:
    """Before, a dollar sign in a client's name was a traceback, and a pictogram a warning on the terminal."""
    rows = (torch.arange(12.0).reshape(6, 2).numpy(), torch.arange(6).numpy() % 2)
    clients = clients_from({"$\\frac$": rows, "$x_{$": rows, "\N{HOSPITAL}": rows}, classes=["$\\foo$", "\N{HOSPITAL}"])
    drawn = pictures.draw(clients, tmp_path, embed=pictures.flat, fleet=FastSlow())
    assert [path.name for path in drawn] == ["classes.png", "sizes.png", "embedding.png", "devices.png"]


def test_inputs_are_made_small() -> None:
    assert pictures.flat(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape == (2, 192)
    assert pictures.flat(torch.zeros(2, 9, 128)).shape == (2, 288)
    assert pictures.flat(torch.zeros(2, 1, 8, 8)).shape == (2, 64)


@pytest.mark.full
def test_from_the_command_line(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data", "show", "digits", "--partition", "non_iid", "--set", "clients=10"]
    words += ["--set", "classes_each=8x1,4x1,3x8", "--set", 'sizes={kind="power_law"}', "--out", str(tmp_path)]
    assert main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["federation"]["size_gini"] > 0.4
    assert len(said["clients"]) == 10
    assert len(said["files"]) == 3
    assert main(words) == 0
    assert "total_variation" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("data --partition iid", "needs a data set: piebald data show NAME --partition iid"),
        ("data show", "takes list, show NAME or NAME"),
        ("data show digits --set clients=3", "add --partition KIND"),
        ("data show digits --partition idd", "there is no partition 'idd': did you mean 'iid'?"),
        ("data show digits --partition iid --set clients", "--set must be KEY=VALUE, got 'clients'"),
        ("data show digit", "there is no data set 'digit': did you mean 'digits'?"),
    ],
)
def test_wrong_words(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("shape", "width"), [((3, 32, 32), 192), ((9, 128), 288), ((1, 30), 30), ((1, 8, 8), 64)])
def test_a_client_without_training_rows_is_described(shape: tuple[int, ...], width: int) -> None:
    """Before, images and signals of such a client ended in an IndexError: they were measured by the first row."""
    assert pictures.flat(torch.zeros(0, *shape)).shape == (0, width)
    lists = {"train": Lists(np.arange(6), np.array([0, 6, 6])), "test": Lists(np.arange(6, 8), np.array([0, 1, 2]))}
    x = torch.arange(8.0).reshape(8, *[1] * len(shape)).expand(8, *shape)
    y = torch.arange(8) % 2
    seen = survey(PooledClients(x, y, lists, names=["all", "none"], classes=["a", "b"]))
    assert seen is not None
    assert seen.rows.tolist() == [6, 0]
