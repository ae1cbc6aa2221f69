"""Tokenizers of strangers: what ends the library's process, or never ends, is one sentence here.

Before, a file of 900 bytes aborted the process, and a pattern was a raw PanicException.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pandas
import pytest

from piebald.cli import main
from piebald.core.errors import SettingError
from piebald.data.preparation import run_tokenizer, tokens
from piebald.data.preparation.agreement import fitted
from piebald.data.preparation.tokens import token_ids
from tests.data.test_tokens import NOTES, WORDS, notes, write_tokenizer

pytest.importorskip("tokenizers", reason="needs the extra: pip install '.[hf]'")

VOCABULARY = {word: number for number, word in enumerate(WORDS)}
LEVEL = {"type": "WordLevel", "vocab": VOCABULARY, "unk_token": "[UNK]"}
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
REPLACE = {"type": "Replace", "content": "b"}


def nested(kind: str, inside: str, depth: int) -> Any:
    value: Any = {"type": kind, inside: []}
    for _ in range(depth):
        value = {"type": kind, inside: [value]}
    return value


def deep(depth: int, key: str, kind: str, inside: str) -> str:
    """Nested more deeply than Python writes JSON."""
    inner = f'{{"type": "{kind}", "{inside}": [' * depth + "]}" * depth
    return f'{{"version": "1.0", "{key}": {inner}, "model": {json.dumps(LEVEL)}}}'


HOSTILE: dict[str, Any] = {
    "backtracking": {"pre_tokenizer": {**SPLIT, "pattern": {"Regex": "(a|aa)+$"}}},
    "more backtracking": {"pre_tokenizer": {**SPLIT, "pattern": {"Regex": "((a+)+)+[^a]$"}}},
    "replacing": {"normalizer": {**REPLACE, "pattern": {"Regex": "(a|a)*c"}}},
    "growing": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 50}] * 8,
        }
    },
    "prepending": {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "a" * 9999}] * 999}
    },
    "broken pattern": {"pre_tokenizer": {**SPLIT, "pattern": {"Regex": "(?<a"}}},
    "recursive pattern": {"pre_tokenizer": {**SPLIT, "pattern": {"Regex": "(?<n>a\\g<n>?b?)+$"}}},
    "huge repetition": {"pre_tokenizer": {**SPLIT, "pattern": {"Regex": "((a{1,1000}){1,1000}){1,1000}"}}},
    "huge truncation": {
        "truncation": {"max_length": 2**63, "stride": 2**63, "strategy": "LongestFirst", "direction": "Right"}
    },
    "huge padding": {
        "padding": {"strategy": {"Fixed": 2**62}, "direction": "Right", "pad_to_multiple_of": 2**62, "pad_id": 0,
                    "pad_type_id": 0, "pad_token": "[PAD]"}
    },
    "no multiple": {
        "padding": {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": 0, "pad_id": 0,
                    "pad_type_id": 0, "pad_token": "[PAD]"}
    },
    "missing special token": {
        "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}],
                           "pair": [], "special_tokens": {}}
    },
    "odd bytes": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////wAA"}},
    "unigram without tokens": {"model": {"type": "Unigram", "unk_id": 5, "vocab": []}},
    "merges of nothing": {"model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}},
    "no unknown token": {"model": {"type": "WordPiece", "vocab": {"[PAD]": 0}, "unk_token": "x",
                                   "continuing_subword_prefix": "##", "max_input_chars_per_word": 2**63}},
    "huge ids": {"model": {**LEVEL, "vocab": {"[PAD]": 2**32 - 1, "[UNK]": 2**32 - 2}}},
    "deep normalizers": deep(20_000, "normalizer", "Sequence", "normalizers"),
    "deep splits": deep(120, "pre_tokenizer", "Sequence", "pretokenizers"),
    "deep processors": deep(120, "post_processor", "Sequence", "processors"),
    "deep decoders": deep(120, "decoder", "Sequence", "decoders"),
    "a list": "[]",
    "not JSON": "{",
    "not text": b"\xff\xfe\x00",
    "nothing": "",
}  # fmt: skip
TEXTS = ["a" * 40_000 + "b", "the dog", "", "\x00\ud7ff\U0010ffff" * 9]


def hostile(folder: Path, name: str) -> Path:
    path, value = folder / "tokenizer.json", HOSTILE[name]
    if isinstance(value, dict):
        value = json.dumps({"version": "1.0", "added_tokens": [], "model": LEVEL} | value)
    path.write_bytes(value if isinstance(value, bytes) else value.encode())
    return path


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.full] if name in ("growing", "prepending") else []) for name in HOSTILE],
)
def test_a_tokenizer_of_a_stranger_ends_in_token_ids_or_in_one_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "_SECONDS", 20.0)
    table = pandas.DataFrame({"note": TEXTS * 3})
    told = ""
    try:
        made = fitted(table, tokenizer=str(hostile(tmp_path, name)), length=5, columns={"note": "text"})
        assert made.text is not None
        assert token_ids(made.text, table["note"]).shape == (12, 5)
    except SettingError as error:
        told = str(error)
    assert told.isprintable()
    assert len(told) < 1000


@pytest.mark.parametrize("name", ["backtracking", "deep normalizers"])
def test_a_run_ends_with_exit_code_2(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes().assign(note=TEXTS * 3).to_csv(tmp_path / "notes.csv", index=False)
    hostile(tmp_path, name)
    (tmp_path / "e.toml").write_text(
        'rounds = 1\ndata = { source = "notes.csv", client = "site", target = "ill", features = ["note"] }\n'
        f'prepare = {{ tokenizer = "{tmp_path}/tokenizer.json", length = 5, columns = {{ note = "text" }} }}\n'
        'recipe = { name = "fedavg" }\nmodel = { name = "embedding" }\n'
    )
    assert main(["run", str(tmp_path / "e.toml"), "--out", str(tmp_path / "run"), "--quiet"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_after_a_text_that_it_fails_on_a_tokenizer_goes_on(tmp_path: Path) -> None:
    content = json.loads(write_tokenizer(tmp_path / "t.json").read_text())
    content["pre_tokenizer"] = {**SPLIT, "pattern": {"Regex": "(a|aa)+$"}}
    process = tokens.TokenizerProcess(json.dumps(content).encode(), "mine", 4)
    before = process.ids(["the"])
    with pytest.raises(SettingError, match="the tokenizer 'mine' fails on a text"):
        process.ids(["a" * 40_000 + "b"])
    assert process.ids(["the"]) == before
    child = os.fork()
    if child == 0:  # a worker has a process of its own
        os._exit(0 if process.ids(["the"]) == before else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert process.ids(["the"]) == before


def test_what_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = write_tokenizer(tmp_path / "t.json").read_bytes()
    process = tokens.TokenizerProcess(content, "mine", 4)
    monkeypatch.setattr(tokens, "_SECONDS", 0.0)
    monkeypatch.setattr(tokens, "_BYTES", 1e12)
    with pytest.raises(SettingError, match="cannot be used: it ends the process that runs it"):
        process.ids(list(NOTES[:2]) * 30_000)  # type: ignore[arg-type]


def test_nothing_else_imports_the_library() -> None:
    """In whatever process: the panics of a library that is imported elsewhere would be raw there."""
    package = Path(run_tokenizer.__file__).parents[2]
    users = {path.name for path in package.rglob("*.py") if "from tokenizers" in path.read_text()}
    assert users == {"run_tokenizer.py", "score.py"}  # the second runs beside the user's own exported model
