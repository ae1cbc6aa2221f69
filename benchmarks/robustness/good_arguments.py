"""Arguments of good calls, by name: what a fuzzer changes one of, so that the call gets as far as that one.

Those of one callable go by "callable.name".
"""
# ruff: noqa: E501 - the table of good arguments

from __future__ import annotations

import tomllib
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import piebald
from piebald import data, models, partition, recipes, tuning, vertical
from piebald.data.clients.data_source import DataSource

PLAIN = tomllib.loads(Path(__file__).with_name("good_arguments.toml").read_text("utf-8"))


def good_arguments(folder: Path) -> dict[str, Any]:
    """Good arguments by name; those of one callable go by "callable.name"."""
    dataset = data.digits()
    clients = partition.Iid(clients=3, limit=60).split(dataset)
    model = models.build_model("logistic", (1, 8, 8), 10)
    here = {"kind": "simulator", "workers": 0}
    finished = piebald.run("fedavg", clients, model, rounds=1, out=folder / "run", runtime=here)
    rows = clients.rows(0, "train")
    images = folder / "images" / "class"
    images.mkdir(parents=True)
    Image.new("RGB", (9, 9)).save(images / "one.png")
    with wave.open(str(images / "one.wav"), "wb") as sound:
        sound.setparams((1, 2, 16_000, 0, "NONE", ""))
        sound.writeframes(bytes(32_000))
    numbers = np.arange(3)
    party = partition.PartyRows(numbers, torch.zeros(3, 2), None, ("a", "b"))
    holding = {"x": torch.zeros(3, 2), "y": None, "overlap": numbers, "features": ("a", "b"), "test": torch.zeros(0, 2)}
    told = piebald.statistics({name: (rows.x.flatten(1), rows.y) for name in "ab"})
    lazy = piebald.LazyClients(2, lambda number: (rows.x, rows.y))
    space = tuning.SearchSpace.of({"lr": [0.05, 0.1]})
    comparison = piebald.compare(["fedavg"], clients, model, rounds=1)
    values = [finished, comparison, clients, lazy, told, space, tuning.Budget(5), piebald.Ledger(1.0, 1e-5)]
    weights = finished.save(folder / "weights.safetensors")
    return {
        "values": values, "clients": clients, "data": dataset,
        "delta": 1e-5, "fleet": None, "folder": folder / "run", "histories": [finished], "input_shape": (1, 8, 8),
        "known": 10, "methods": ["fedavg"], "model": model, "newcomer": (rows.x, rows.y), "noise": 1.0, "outputs": 10,
        "path": folder / "run", "recipe": recipes.fedavg(), "rounds": 1, "run": finished, "run_paths": [folder / "run"],
        "share": 0.5, "sizes": [10, 20], "source": {"a": (rows.x, rows.y), "b": (rows.x, rows.y)}, "steps": 3,
        "x": rows.x, "y": rows.y, "piebald.run.runtime": here, "piebald.run.rounds": 1, "piebald.compare.rounds": 1,
        "piebald.write_report.out": folder / "report", "piebald.data.load.name": "digits", "piebald.experiments.preview.show.source": DataSource(name="digits"),
        "piebald.models.build_model.name": "logistic", "piebald.experiments.preview.show.partition": "iid",
        "piebald.experiments.preview.show.settings": {"clients": 3}, "piebald.methods.catalog.recipes.make.name": "fedavg",
        "piebald.vertical.run.settings": vertical.TransferSettings(steps=1, batch=128, overlap_batch=128),
        "piebald.resume.path": folder / "run", "piebald.resume.clients": clients, "piebald.resume.model": model,
        "piebald.LazyClients.load": lambda number: (rows.x, rows.y), "piebald.data.Owners.codes": numbers,
        "piebald.data.Owners.names": ["a", "b", "c"], "piebald.data.audio_folder.folder": folder / "images",
        "piebald.data.image_folder.folder": folder / "images", "piebald.models.Cnn1d.input_shape": (3, 16),
        "piebald.models.Cnn1dBn.input_shape": (3, 16), "piebald.models.embed.network": torch.nn.Flatten(),
        "piebald.models.embedded.extractor": torch.nn.Flatten(), "piebald.data.Decoded.shape": (2, 2),
        "piebald.data.Decoded.dtype": torch.float32, "piebald.data.Decoded.read": lambda row: np.zeros((2, 2)),
        "piebald.data.partition.Heterogeneity.rows": np.ones(3), "piebald.data.partition.Lists.values": numbers,
        "piebald.data.partition.Lists.starts": numbers, "piebald.data.partition.Parties.active": party,
        "piebald.data.partition.Parties.passive": party, "piebald.data.partition.Parties.overlap": numbers,
        "piebald.data.partition.PartyRows.ids": numbers, "piebald.data.partition.PartyRows.y": None,
        "piebald.data.partition.PartyRows.features": ("a",), "piebald.data.partition.PooledClients.parts": {"train": clients.lists("train")},
        "piebald.data.partition.measure.statistics": partition.collect(clients), "piebald.experiments.preview.columns.rows": [{"a": 1}],
        "piebald.experiments.preview.DataPreview.partition": {}, "piebald.experiments.preview.DataPreview.clients": [],
        "piebald.experiments.preview.DataPreview.federation": {}, "piebald.experiments.preview.DataPreview.units": {},
        "piebald.experiments.preview.DataPreview.files": [], "piebald.methods.catalog.recipes.rebuild.table": recipes.fedavg().model_dump(),
        "piebald.data.measures.heterogeneity.measure_heterogeneity.how": "data", "piebald.data.measures.heterogeneity.measure_heterogeneity.work": finished.work,
        "Run.frame.name": "rounds", "Comparison.paired.base": "fedavg", **{f"{kind}.{name}.client": 0 for kind in ("PooledClients", "LazyClients") for name in ("rows", "size", "counts", "indices")}, "piebald.data.partition.Trace.file": str(folder / "none.csv"),
        "piebald.data.measures.heterogeneity.Divergence.clients": np.ones(3), "piebald.data.measures.heterogeneity.Divergence.pooled": None,
        **{f"piebald.vertical.PartyHolding.{name}": value for name, value in holding.items()},
        "piebald.vertical.PartyHolding.test_y": torch.zeros(0), "piebald.Layout.slots": finished.work.layout.slots,
        "piebald.Layout.shared": 650, "piebald.Layout.size": 650,
        **{f"piebald.Recipe.{axis}": getattr(recipes.fedavg(), axis) for axis in recipes.fedavg().axes},
        "piebald.methods.training.RuleOptimizer.groups": [{"params": [torch.zeros(1)]}], "partition.sites.clients": ("a",), "piebald.data.partition.Sites.clients": ("a",),
        "piebald.adapt.epochs": 1, "piebald.data.partition.NonIid.classes_each": 2, "piebald.data.partition.NonIid.clients": 3, "piebald.methods.catalog.recipes.settings_of.name": "fedavg",
        "piebald.data.partition.FlipPairs.pairs": ((1, 2),), "partition.non_iid.classes_each": 2, "change.flip_pairs.pairs": ((1, 2),),
        "piebald.models.count_parameters.name": "logistic", "piebald.models.count_parameters.most": 10**6, "piebald.models.StandardisedInputs.network": model,
        "piebald.models.PretrainedNetwork.network": model, "piebald.models.NearestNeighbours.module": model, "piebald.load_weights.module": model, "piebald.load_weights.path": weights,
        "piebald.data.partition.Standardisation.mean": [0.0], "piebald.data.partition.Standardisation.deviation": [1.0],
        "piebald.data.partition.StandardisedClients.standardisation": partition.standardised(clients).standardisation,
        "piebald.data.partition.TorchClients.datasets": [torch.utils.data.TensorDataset(rows.x, rows.y)],
        **_of_questions(), **_of_python(finished), **PLAIN,
    }  # fmt: skip


def _of_questions() -> dict[str, Any]:
    """Of statistics and models of statistics."""
    draw = np.random.default_rng(0)
    tables = {name: (draw.normal(size=(20, 2)), draw.normal(size=20)) for name in "abc"}
    named = (
        (piebald.statistics(tables), ("clients", "mode", "rows", "numbers")),
        (piebald.glm(tables), ("family", "target", "names", "coefficients", "errors", "covariance")),
    )
    made = {f"piebald.{call}.clients": tables for call in ("statistics", "glm")}
    return made | {
        f"piebald.{type(value).__name__}.{name}": getattr(value, name) for value, names in named for name in names
    }


def _of_python(finished: piebald.Run) -> dict[str, Any]:
    """Values that a file of settings cannot hold."""
    return {
        "piebald.advice.tuning.Choices.values": (1, 2), "SearchSpace.of_recipe.recipe": recipes.fedavg(),
        "SearchSpace.own_point.recipe": recipes.fedavg(), "Run.predict.rows": np.zeros((2, 1, 8, 8), np.float32),
        "Run.curve_of.metric": finished.metric, "piebald.core.metrics.AttackSuccess.flips": {0: 4},
        "piebald.methods.training.LearnerGroup.clients": (1,),
        "piebald.methods.training.ParameterGroup.layers": ("norm",),
    }  # fmt: skip
