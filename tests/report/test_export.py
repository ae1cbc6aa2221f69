"""Exported models: other programs read the same outputs from each format, and loading refuses what does not fit."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import piebald
from piebald import data, models, partition
from piebald.core.errors import SettingError
from piebald.runs.finished_run import Run


def model(seed: int = 0) -> nn.Module:
    return models.build_model("cnn_bn", (1, 8, 8), 10, seed)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    clients = partition.Disjoint(clients=5, classes_each=2, limit=300).split(data.digits())
    return piebald.run("hdafl", clients, model, rounds=1, label="a|b", out=tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def rows() -> Tensor:
    return data.digits().x[:7].float()


def outputs(module: nn.Module, rows: Tensor) -> Tensor:
    with torch.no_grad():
        return module(rows)


@pytest.mark.parametrize("client", [None, 3])
@pytest.mark.parametrize("name", ["m.safetensors", "m.pt", "folder"])
def test_weights_come_back(run: Run, rows: Tensor, tmp_path: Path, name: str, client: int | None) -> None:
    again = piebald.load_weights(model(seed=1), run.save(tmp_path / name, client))
    assert torch.equal(outputs(again, rows), outputs(run.model(client), rows))


def test_another_framework_reads_names_and_origin(run: Run, tmp_path: Path) -> None:
    with safe_open(str(run.save(tmp_path / "m.safetensors", "3")), "pt") as file:
        assert set(file.keys()) == set(run.model(3).state_dict())
        assert (file.metadata()["recipe"], file.metadata()["client"]) == ("hdafl", "3")


@pytest.mark.full
def test_torch_export_takes_batches_of_any_size(run: Run, rows: Tensor, tmp_path: Path) -> None:
    program = torch.export.load(run.save(tmp_path / "m.pt2", 3))
    for batch in (rows, rows[:1]):
        torch.testing.assert_close(program.module()(batch), outputs(run.model(3), batch))


@pytest.mark.full
def test_onnx_takes_batches_of_any_size(run: Run, rows: Tensor, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(run.save(tmp_path / "m.onnx", 3))
    for batch in (rows, rows[:1]):
        (found,) = session.run(None, {"input": batch.numpy()})
        torch.testing.assert_close(torch.tensor(found), outputs(run.model(3), batch), rtol=1e-4, atol=1e-5)
    assert session.get_modelmeta().custom_metadata_map["recipe"] == "hdafl"


@pytest.mark.full
def test_a_folder_for_hugging_face_has_a_card(run: Run, tmp_path: Path) -> None:
    folder = run.save(tmp_path / "folder", 3)
    names = ["README.md", "config.json", "model.onnx", "model.safetensors", "outputs.json", "score.py"]
    assert sorted(file.name for file in folder.iterdir()) == names
    card = (folder / "README.md").read_text()
    _, front, text = card.split("---", 2)
    values = {name: json.loads(value) for name, value in (line.split(": ", 1) for line in front.strip().splitlines())}
    assert values["model-index"][0]["results"][0]["metrics"][0]["value"] == run.accuracy
    assert "personal model of client 3" in text
    assert f"{len(run.per_client)} clients, of which " in text
    assert f"| client 3 | {100 * run.per_client[3]:.1f}% |" in text
    assert "no differential privacy is claimed" in text
    assert json.loads((folder / "config.json").read_text())["server_steps"] == "1"


@pytest.mark.full
def test_a_module_that_saves_itself_is_asked_to(tmp_path: Path) -> None:
    class Pretrained(nn.Linear):
        def save_pretrained(self, save_directory: Path) -> None:
            (save_directory / "adapter.bin").write_text("mine")

    clients = partition.Iid(clients=2, limit=40).split(data.digits())
    run = piebald.run("fedavg", clients, nn.Sequential(nn.Flatten(), Pretrained(64, 10)), rounds=1)
    assert (run.save(tmp_path / "whole") / "model.safetensors").exists()  # the outer module does not
    exported = piebald.report.export.Exported(Pretrained(2, 2), Tensor, lambda: "card", {})
    folder = piebald.report.export.export_model(exported, tmp_path / "own")
    assert sorted(file.name for file in folder.iterdir()) == ["README.md", "adapter.bin"]


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("m.bin", {}, "does not say its format"),
        ("m.bin", {"file_format": "keras"}, "file_format must be"),
        ("here/m.pt", {"client": "george"}, "there is no client 'george'"),
        ("here/m.pt", {"client": 5}, "client must be a number from 0 to 4, got 5"),
        ("taken.pt", {}, "exists already"),
        ("taken.pt/m.pt", {}, "cannot be written"),
    ],
)
def test_what_cannot_be_written_is_said_and_leaves_nothing(
    run: Run, tmp_path: Path, name: str, more: dict, said: str
) -> None:
    (tmp_path / "taken.pt").write_text("mine")
    with pytest.raises(SettingError, match=said):
        run.save(tmp_path / name, **more)
    assert [file.name for file in tmp_path.rglob("*")] == ["taken.pt"]
    assert (tmp_path / "taken.pt").read_text() == "mine"


def test_a_module_that_cannot_be_recorded_is_named(tmp_path: Path) -> None:
    class Branches(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flatten(1)) if x.sum() > 0 else super().forward(-x.flatten(1))

    clients = partition.Iid(clients=2, limit=40).split(data.digits())
    run = piebald.run("fedavg", clients, Branches(64, 10), rounds=1)
    with pytest.raises(SettingError, match=r"cannot record Branches .*use safetensors"):
        run.save(tmp_path / "m.pt2")
    assert not list(tmp_path.iterdir())


class Evil:
    def __reduce__(self) -> tuple:
        return (Path.touch, (Path("executed"),))


def test_loading_executes_nothing_and_names_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("evil.pt").write_bytes(pickle.dumps(Evil()))
    torch.save({"weight": Evil()}, "evil2.pt")
    torch.save([1, 2], "list.pt")
    Path("cut.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{}")
    save_file({"weight": torch.zeros(3, 2)}, "one.safetensors")
    save_file({"weight": torch.zeros(2, 2), "bias": torch.zeros(3)}, "shape.safetensors")
    for name, said in {
        "evil.pt": "cannot be read as weights",
        "evil2.pt": "cannot be read as weights",
        "list.pt": "holds no state dict",
        "cut.safetensors": "cannot be read as weights",
        "none.safetensors": "there is no file",
        "one.safetensors": "only the module has 'bias'",
        "shape.safetensors": r"weight is \[2, 2\] in the file and \[3, 2\] in the module",
    }.items():
        with pytest.raises(SettingError, match=said):
            piebald.load_weights(nn.Linear(2, 3), name)
    assert not Path("executed").exists()
