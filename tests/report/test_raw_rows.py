"""ONNX files of prepared tables take raw columns, and return what the run predicts."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from torch import nn

import piebald
from piebald.runs.finished_run import Run

from .test_score import HERE, SETTINGS, everything

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("skl2onnx")


def table(**changes: Any) -> pd.DataFrame:
    frame = everything(160).drop(columns="seen")
    ill = np.where(frame["age"].fillna(50) + 5 * (frame["ward"] == "a") > 52, "yes", "no")
    return frame.assign(site=list("ab") * (len(frame) // 2), ill=ill, **changes)


def trained(frame: pd.DataFrame, target: str, model: nn.Module | None = None, **settings: Any) -> Run:
    clients = piebald.clients_from(frame, client="site", target=target, validation=0.2, prepare=settings)
    inputs = clients.rows(0, "train").x.shape[1]
    outputs = 1 if target == "dose" else 2
    return piebald.run("fedavg", clients, model or nn.Linear(inputs, outputs), rounds=1, runtime=HERE, measure="none")


def answered(path: Path, frame: pd.DataFrame) -> np.ndarray:
    """Return what ONNX Runtime answers to raw columns: numbers as they are, and text, empty for a gap."""
    session, columns = onnxruntime.InferenceSession(path), {}
    for column in session.get_inputs():
        values = frame[[column.name]].to_numpy()
        if column.type == "tensor(string)":
            columns[column.name] = np.array([["" if pd.isna(value) else str(value)] for (value,) in values], object)
        else:
            columns[column.name] = values.astype(np.float32)
    (answers,) = session.run(None, columns)
    return answers


@pytest.mark.long
def test_raw_columns_of_every_kind_get_the_probabilities_of_predict(tmp_path: Path) -> None:
    run = trained(table(), "ill", **{**SETTINGS, "gaps": ["-9", "unknown"]})
    new = table().sample(frac=1, random_state=0).reset_index(drop=True)
    new.loc[0, ["ward", "town", "code"]] = ["unseen", "unseen", None]
    new.loc[1, ["age", "whole", "raw", "ranked"]] = [-9, np.nan, np.nan, np.nan]
    new.loc[2, ["age", "ranked", "skewed", "income"]] = [1e4, 1e4, -5.0, 0.0]
    new.loc[3, ["ranked", "smoker", "ward", "town"]] = [-1e4, "JA", "unknown", "NA"]
    new.loc[4, "smoker"] = "Falsch"
    path, expected = run.save(tmp_path / "m.onnx", calibrate=True), run.predict(new, calibrate=True)
    np.testing.assert_allclose(answered(path, new), expected, atol=1e-5)
    np.testing.assert_allclose(answered(path, new[:1]), expected[:1], atol=1e-5)
    properties = onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map
    assert json.loads(properties["outputs"])["names"] == ["no", "yes"]
    assert [file.name for file in tmp_path.iterdir() if file.suffix != ".onnx"] == []


@pytest.mark.full
def test_categories_without_rare_ones_and_gaps(tmp_path: Path) -> None:
    frame = table()[["site", "ward", "age", "ill"]].query("ward in ['a', 'b']").fillna({"age": 50.0})
    run = trained(frame, "ill", nn.Linear(3, 2), least_rows=1)
    new = pd.DataFrame({"ward": ["a", "b", "other", None], "age": [50.0, 60.0, 40.0, 45.0]})
    np.testing.assert_allclose(answered(run.save(tmp_path / "m.onnx"), new), run.predict(new), atol=1e-5)


@pytest.mark.full
def test_numbers_are_predicted_in_their_unit_after_the_effect_of_the_client(tmp_path: Path) -> None:
    frame = table()[["site", "age", "whole", "raw"]].assign(dose=lambda frame: 100 + 10 * frame["raw"])
    frame["age"] += 20 * (frame["site"] == "a")
    run = trained(frame, "dose", harmonise="combat")
    np.testing.assert_allclose(answered(run.save(tmp_path / "m.onnx", "a"), frame), run.predict(frame, "a"), rtol=1e-5)
    for client in ("a", "b", None):
        own = run.preparation.for_client(client).transform(frame)
        np.testing.assert_allclose(own, run.preparation.transform(frame, client), atol=1e-6)


@pytest.mark.full
def test_dates_are_refused_with_the_preparation_beside_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    frame = everything()[["seen", "raw"]].assign(site=list("ab") * 60, ill=["yes", "no", "no"] * 40)
    run = trained(frame, "ill")
    with caplog.at_level(logging.WARNING, "piebald"):
        path = run.save(tmp_path / "m.onnx")
    assert "column 'seen' has dates, which ONNX has no operator to read" in caplog.text
    assert json.loads((tmp_path / "m.preparation.json").read_text()) == run.preparation.model_dump(mode="json")
    x = run.preparation.transform(frame)
    (scores,) = onnxruntime.InferenceSession(path).run(None, {"input": x})
    odds = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    np.testing.assert_allclose(odds, run.predict(frame), atol=1e-5)
