"""A small Hugging Face model on padded texts, with all that saves memory: a federation ends as a simulation does."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests import processes

pytest.importorskip("transformers")

MODULE = """
import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel


def load():
    rng = np.random.default_rng(0)
    clients = {}
    for name in ("north", "south"):
        texts = [rng.integers(1, 12, rng.integers(3, 8)).tolist() for _ in range(80)]
        clients[name] = (texts, texts)
    return clients


def make(seed):
    config = GPT2Config(vocab_size=12, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config)


def without_words(x, y, rng):
    heard = torch.rand(x["input_ids"].shape, generator=rng) > 0.2
    return {**x, "input_ids": x["input_ids"] * heard}, y
"""
FILE = """
rounds = 2
plugins = ["my_texts"]
loss = { name = "language_modelling", label_smoothing = 0.1 }

[data]
source = "my_texts:load"
collate = "pad"
length = 8

[model]
name = "my_texts:make"

[recipe]
name = "fedavg"
lr = 0.1
batch = 2
accumulate = 2
precision = "bfloat16"
checkpointing = "auto"
augmentation = ["my_texts:without_words"]
"""


@pytest.mark.long
@pytest.mark.full
def test_a_padded_text_model_ends_as_in_the_simulator(tmp_path: Path) -> None:
    (tmp_path / "my_texts.py").write_text(MODULE)
    (tmp_path / "texts.toml").write_text(FILE)
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])  # as an installed package

    def piebald(*words: str) -> dict[str, float]:
        done = processes.run(
            processes.command(*words, "--json"),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, float] = json.loads(done.stdout)
        return found

    simulated = piebald("run", "texts.toml", "--out", "run", "--set", "runtime={ engine = 'sequential', workers = 0 }")
    real = piebald("up", "texts.toml", "--local", "2", "--out", "up")
    assert real["perplexity"] == pytest.approx(simulated["perplexity"], rel=1e-3)  # sites tell rounded scores
    assert real["rounds"] == simulated["rounds"] == 2
    assert simulated["perplexity"] < 12  # a model that knows nothing of the 11 words has 12 or more
