"""Folders of weights that hold no model, and settings of pretrained networks that do not fit, are one sentence."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from piebald import models
from piebald.core.errors import SettingError
from piebald.models.weights_folder import read_config

pytest.importorskip("transformers", reason="needs the extra: pip install '.[hf]'")
pytest.importorskip("peft", reason="needs the extra: pip install '.[hf]'")


def changed_config(folder: Path, values: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def nested(levels: int) -> str:
    return '{"model_type": "distilbert", "part": ' + "[" * levels + "]" * levels + "}"


def test_no_part_of_a_configuration_says_which_code_computes(folder: Path, tmp_path: Path) -> None:
    """Before, only its top was looked at, and sizes of convolutions were left out with the names of kernels."""
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    code = {"_attn_implementation": "other/code", "experts_implementation": "other/code", "kernel_config": {"a": "b"}}
    before = read_config(tmp_path)
    changed_config(tmp_path, {**code, "use_kernels": True, "text_config": {**code, "dim": 3}, "conv_kernel": [3, 4]})
    assert read_config(tmp_path) == {**before, "text_config": {"dim": 3}, "conv_kernel": [3, 4]}


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def only_pickled(folder: Path) -> None:
    without_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04}")


def only_an_adapter(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text("{}")


def index_that_leads_away(folder: Path) -> None:
    without_weights(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))


def half(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:2000])


def a_layer_missing(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: one for name, one in tensors.items() if "layer.1.ffn.lin1" not in name}, folder / "model.safetensors"
    )


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder: (folder / "config.json").unlink(), "holds no model: give one with a config.json"),
        (only_an_adapter, "it holds an adapter"),
        (lambda folder: (folder / "config.json").write_text("[]"), "must name its model_type"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be read as JSON"),
        (lambda folder: changed_config(folder, {"model_type": "distillbert"}), "did you mean 'distilbert'"),
        (lambda folder: changed_config(folder, {"model_type": "vit"}), "set task = 'image_classification'"),
        (lambda folder: changed_config(folder, {"auto_map": {"AutoModel": "m.Net"}}), "needs code of its own"),
        (lambda folder: changed_config(folder, {"part": [{"auto_map": {"A": "m.Net"}}]}), "needs code of its own"),
        (lambda folder: changed_config(folder, {"quantization_config": {}}), "are quantized"),
        (lambda folder: (folder / "config.json").write_text("[" * 99_999), "cannot be read as JSON"),
        (lambda folder: (folder / "config.json").write_text(nested(600)), "nested too deeply"),
        (lambda folder: changed_config(folder, {"n_heads": 3}), "tiny"),
        (without_weights, "must hold model.safetensors"),
        (only_pickled, r"pickled weights \(pytorch_model.bin\), which are never read"),
        (index_that_leads_away, "no file in its folder"),
        (half, "cannot be read as safetensors"),
        (a_layer_missing, "is missing or has another shape"),
        (lambda folder: changed_config(folder, {"dim": 32}), "is missing or has another shape"),
    ],
)  # fmt: skip
def test_folders_that_hold_no_model_are_refused(
    folder: Path, tmp_path: Path, spoil: Callable[[Path], object], says: str
) -> None:
    spoiled = tmp_path / "tiny"
    spoiled.mkdir()
    for file in folder.iterdir():
        (spoiled / file.name).write_bytes(file.read_bytes())
    spoil(spoiled)
    with pytest.raises(SettingError, match=says):
        models.pretrained(spoiled, outputs=2)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"adapter": "lora", "rank": 17}, "rank must be at most 16"),
        ({"adapter": "lora", "rank": 0}, "rank must be"),
        ({"adapter": "lora", "targets": ["q_lin", "qlin"]}, r"linear layers of this network \(k_lin, lin1.*got 'qlin'"),
        ({"rank": 4}, "rank belongs to adapters but adapter is None"),
        ({"adapter": "lore"}, "adapter must be"),
        ({"task": "chess"}, "task must be"),
        ({"task": "image_classification"}, "set task = 'sequence_classification'"),
        ({"revision": "main"}, "a folder has no revision"),
    ],
)
def test_settings_that_do_not_fit_are_refused(folder: Path, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        models.pretrained(folder, **settings)


@pytest.mark.parametrize("package", ["peft", "transformers", "huggingface_hub"])
def test_a_missing_extra_is_named(folder: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SettingError, match=r"pip install '\.\[hf\]'"):
        models.pretrained("someone/weights" if package == "huggingface_hub" else folder, adapter="lora")
