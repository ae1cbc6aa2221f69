"""Names and settings that users of other programs write."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

import piebald
from piebald import recipes
from piebald.cli import main
from piebald.core.errors import SettingError


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("FedPer", "hdafl keeps the classifier private"),
        ("fed-per", "hdafl"),
        ("pFedHN", "cgau"),
        ("FedAvg_FT", "fine_tuned"),
        ("standalone", "it is 'local' here"),
        ("fedavgg", "did you mean 'fedavg'"),
    ],
)
def test_a_method_of_another_program_names_what_does_the_same(name: str, says: str) -> None:
    with pytest.raises(SettingError, match=f"there is no recipe '{name}': {says}"):
        recipes.make(name)


def test_every_recipe_that_such_a_sentence_names_is_there() -> None:
    from piebald.methods.catalog import registry as named

    known = set(recipes.names())
    for sentence in named._ELSEWHERE.values():
        words = {word.strip(",") for word in sentence.split()}
        assert words & known or sentence.startswith(("aggregation = ", "piebald transfer")), sentence
    assert not known & set(named._ELSEWHERE)  # a recipe of that name would hide the sentence


def test_a_setting_of_another_recipe_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SettingError, match="recipe 'fedavg' called 'mu': it is a setting of fedprox, "):
        piebald.recipes.fedavg(mu=0.1)
    assert main(["run", "--set", 'recipe={name="fedavg", mu=0.1}']) == 2
    assert "it is a setting of fedprox, " in capsys.readouterr().err
    with pytest.raises(SettingError, match="called 'learning_rate': it is lr"):
        piebald.recipes.fedavg(learning_rate=0.1)  # type: ignore[call-arg]
    with pytest.raises(SettingError, match=r"'epochs': it belongs to the recipe: piebald.recipes.fedavg\(epochs=...\)"):
        piebald.run("fedavg", None, None, epochs=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "says"),
    [("emnist", "femnist has EMNIST"), ("CIFAR", "cifar10 or cifar100"), ("CIFAR-100", "did you mean 'cifar100'")],
)
def test_a_data_set_of_another_name(name: str, says: str) -> None:
    with pytest.raises(SettingError, match=f"there is no data set '{name}': {says}"):
        piebald.data.load(name)


def test_mnist_is_read_from_its_four_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = importlib.import_module("piebald.data.sets.mnist")
    checksums = {}
    rng = np.random.default_rng(0)
    for name, count in (("train", 6), ("t10k", 3)):
        for kind, content in (
            ("images-idx3", struct.pack(">BBBBIII", 0, 0, 8, 3, count, 28, 28) + rng.bytes(count * 784)),
            ("labels-idx1", struct.pack(">BBBBI", 0, 0, 8, 1, count) + bytes(range(count))),
        ):
            path = tmp_path / "mnist" / f"{name}-{kind}-ubyte.gz"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(gzip.compress(content))
            checksums[path.name] = f"md5:{hashlib.md5(path.read_bytes()).hexdigest()}"
    monkeypatch.setenv("PIEBALD_DATA", str(tmp_path))
    monkeypatch.setattr(module, "CHECKSUMS", checksums)
    mnist = piebald.data.load("mnist")
    assert mnist.x.shape == (9, 1, 28, 28)
    assert mnist.y.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert (mnist.train.tolist(), mnist.test.tolist()) == ([0, 1, 2, 3, 4, 5], [6, 7, 8])


def test_a_recipe_of_another_name_and_a_table_in_place_of_a_file_are_told_at_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipes", "fedper"]) == 2
    assert "hdafl keeps the classifier private" in capsys.readouterr().err
    (tmp_path / "patients.csv").write_text("age,ill\n1,0\n", "utf-8")
    assert main(["run", str(tmp_path / "patients.csv")]) == 2
    assert "patients.csv is a table: name it as source in [data]" in capsys.readouterr().err


def test_train_means_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    assert "Train with one recipe" in capsys.readouterr().out
    assert main(["--help"]) == 0
    assert "  train " not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("roc_auc", "it is 'auc' here"),
        ("MSE", "it is 'squared_error' here"),
        ("f1_macro", "it is 'f1' here"),
        ("precision", "give torchmetrics' object of it"),
    ],
)
def test_a_metric_of_scikit_learn_names_what_does_the_same(name: str, says: str) -> None:
    from piebald.core.objective import objective_for

    with pytest.raises(SettingError, match=f"there is no metric '{name}': {says}"):
        objective_for(torch.tensor([0, 1]), metrics=[name])


def test_an_attribute_that_is_no_recipe_and_a_setting_beside_the_recipe_say_where_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(AttributeError, match="hdafl keeps the classifier private"):
        _ = recipes.fedper
    assert main(["run", "--set", "epochs=3"]) == 2
    assert "it belongs to the recipe, as recipe.epochs" in capsys.readouterr().err
    for name, home in (
        ("metrics", "[evaluate]"),
        ("patience", "[stop]"),
        ("weights", "[data]"),
        ("strategy", "a recipe here"),
    ):
        assert main(["run", "--set", f"{name}=3"]) == 2
        assert home in capsys.readouterr().err


def test_a_model_that_does_not_fit_is_told_in_words_of_ours() -> None:
    class Empty(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

    x, y = np.zeros((20, 4), np.float32), np.linspace(0.5, 1.5, 20)

    class Silent(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> None:  # type: ignore[override]
            super().forward(x)

    clients = piebald.clients_from({"a": (x, y), "b": (x, y)})
    words = torch.nn.Sequential(torch.nn.Embedding(9, 2), torch.nn.Flatten(), torch.nn.Linear(8, 1))
    for model, says in (
        (torch.nn.Linear(4, 2), r"outputs \[4, 2\] must be as many numbers as targets \[4\]"),
        (words, "give clients_from tokens=True"),
        (
            torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(3, 1)),
            r"its layer Linear\(in_features=3.*shape \[8\]",
        ),
        (torch.nn.Conv2d(1, 2, 3), r"its layer Conv2d\(1, 2.* cannot take rows of shape \[4\]"),
        (Silent(4, 1), "got nothing: end forward with return"),
        (lambda: torch.nn.Linear(4, 1), r"this lambda cannot be called with a seed .*write lambda seed: \.\.\."),
        (Empty(), r"Empty has no method forward\(self, x\): define it"),
    ):
        with pytest.raises(SettingError, match=says):
            piebald.run("fedavg", clients, model, rounds=1)
    for loss in (torch.nn.functional.cross_entropy, lambda outputs: outputs.mean()):
        with pytest.raises(
            SettingError, match=r"the loss cannot take \(outputs, targets\), outputs being float32 \[4, 3\]"
        ):
            piebald.run("fedavg", clients, torch.nn.Linear(4, 3), rounds=1, loss=loss)


def test_a_run_in_memory_says_before_it_trains_that_it_keeps_no_models_of_clients(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    rows = (np.zeros((20, 4), np.float32), np.arange(20) % 2)
    clients = piebald.clients_from({"a": rows, "b": rows})
    for recipe, out, says in (("ditto", None, True), ("ditto", tmp_path / "run", False), ("fedavg", None, False)):
        caplog.clear()
        piebald.run(recipe, clients, torch.nn.Linear(4, 2), rounds=1, out=out)
        assert ("kept only with out=" in caplog.text) == says
