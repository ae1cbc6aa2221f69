"""A pretrained network in the official format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small DistilBERT for 40 words, texts of 7 tokens and three classes, without dropout; not to be changed."""
    transformers = pytest.importorskip("transformers", reason="needs the extra: pip install '.[hf]'")
    made = tmp_path_factory.mktemp("weights") / "tiny"
    config = transformers.DistilBertConfig(
        vocab_size=40, dim=16, n_layers=2, n_heads=2, hidden_dim=32, max_position_embeddings=7, num_labels=3,
        dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        transformers.DistilBertForSequenceClassification(config).save_pretrained(made)
    return made


@pytest.fixture(scope="session", params=["float32", "bfloat16", "float16"])
def stored(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same network, stored in each precision."""
    from safetensors.torch import load_file, save_file

    made = tmp_path_factory.mktemp("weights") / request.param
    made.mkdir()
    (made / "config.json").write_bytes((folder / "config.json").read_bytes())
    dtype, weights = getattr(torch, request.param), load_file(folder / "model.safetensors")
    save_file({name: one.to(dtype) for name, one in weights.items()}, made / "model.safetensors", {"format": "pt"})
    return made
