"""Columns with many categories, which a model reads through embeddings."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch

import piebald
from piebald.experiments.file import ExperimentSettings
from piebald.models import build_model
from piebald.models.wrappers import embedding_size, with_embeddings


def test_numbers_of_categories_become_vectors() -> None:
    module = with_embeddings(lambda width: build_model("logistic", [width], 2), 3, {1: 4})
    assert embedding_size(4) == 3
    assert [name for name, _ in module.named_parameters()][-1] == "categories.0.weight"
    table = module.get_parameter("categories.0.weight")
    x = torch.tensor([[1.0, -2.0, 5.0], [1.0, -1.0, 5.0], [1.0, 3.0, 5.0], [1.0, 99.0, 5.0]])
    plain = torch.cat([x[:, [0, 2]], table[[0, 1, 5, 5]]], dim=1)
    weights = dict(module.named_parameters())
    linear = next(name.removesuffix(".weight") for name in weights if name.endswith(".weight") and "cat" not in name)
    assert torch.allclose(module(x), plain @ weights[f"{linear}.weight"].T + weights[f"{linear}.bias"])
    twin = copy.deepcopy(module)
    torch.nn.init.zeros_(twin.get_parameter("categories.0.weight"))
    assert not torch.allclose(twin(x), module(x))  # a copy has embeddings of its own


@pytest.mark.full
@pytest.mark.parametrize("engine", ["sequential", "vmapped"])
def test_a_run_learns_from_a_column_of_forty_words(tmp_path: Path, engine: str) -> None:
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame(
        {"site": rng.choice(["a", "b"], 400), "drug": rng.choice([f"d{n}" for n in range(40)], 400)}
    )
    frame["ill"] = np.where(frame.drug.str[1:].astype(int) % 2 == 0, "yes", "no")
    frame.to_csv(tmp_path / "rows.csv", index=False)
    (tmp_path / "file.toml").write_text(
        "prepare = { least_rows = 1 }\nmodel = { name = 'mlp' }\nrecipe = { name = 'fedavg', lr = 0.5, epochs = 4 }\n"
        "data = { source = 'rows.csv', client = 'site', target = 'ill' }\n"
    )
    plan = ExperimentSettings.load(tmp_path / "file.toml").plan()
    run = piebald.run(
        plan.recipes["fedavg"], plan.clients, plan.model, rounds=6, measure="none",
        runtime=piebald.Simulator(engine=engine),
    )  # fmt: skip
    assert run.accuracy > 0.9
