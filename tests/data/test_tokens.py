"""A column of text becomes token ids, by the same tokenizer everywhere, as the library makes them."""

from __future__ import annotations

import hashlib
import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import Tensor, nn

import piebald
from piebald.core.errors import SettingError
from piebald.core.references import USERS
from piebald.data.clients.prepared import preparation_of
from piebald.data.preparation import Preparation, tokens
from piebald.data.preparation.agreement import fitted
from piebald.experiments.file import ExperimentSettings
from piebald.report import write_report
from piebald.report.export import score
from piebald.runs.run import opened
from piebald.storage.backup import backup, restore

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra: pip install '.[hf]'")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "the", "dog", "cat", "sleeps", "barks"]
SIZE = len(WORDS)
BAG, PLUGINS = "tests.data.test_tokens:Bag", ["tests.data.test_tokens"]
NOTES = ["the dog barks", "the cat sleeps", "a dog sleeps and the dog barks again", None, "the cat", "dog"]


def write_tokenizer(path: Path, words: list[str] = WORDS) -> Path:
    """A tokenizer that knows these words, the first of which fills up, and that begins each text with [CLS]."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: n for n, word in enumerate(words)}, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", words.index("[CLS]"))]
    )
    made.save(str(path))
    return path


def notes(rows: int = 12) -> pandas.DataFrame:
    told = [NOTES[n % len(NOTES)] for n in range(rows)]
    ill = ["yes" if "dog" in str(text) else "no" for text in told]
    return pandas.DataFrame({"site": ["a", "b"] * (rows // 2), "note": told, "ill": ill})


class Bag(nn.Module):
    """The mean of the embeddings of a text's tokens."""

    def __init__(self, outputs: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(SIZE, 4, padding_idx=0)
        self.head = nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.words(x).mean(1))
        return scores


def test_ids_are_those_of_the_library_cut_and_filled_up(tmp_path: Path) -> None:
    path, table = write_tokenizer(tmp_path / "tokenizer.json"), notes(6)
    agreed = fitted(table[["note", "ill"]], "ill", tokenizer=str(path), length=5)
    library = tokenizers.Tokenizer.from_file(str(path))
    whole = [library.encode("" if text is None else text).ids[:5] for text in NOTES]
    ids = agreed.transform(table)
    assert ids.dtype == np.int64
    assert ids.tolist() == [row + [0] * (5 - len(row)) for row in whole]
    assert ids[0].tolist() == [2, 3, 4, 7, 0]
    assert ids[3].tolist() == [2, 0, 0, 0, 0]
    assert agreed.transform(table.head(0)).shape == (0, 5)
    assert agreed.transform(table.head(0)).dtype == np.int64
    assert agreed.text is not None
    assert agreed.text.vocabulary == SIZE
    assert agreed.text.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert Preparation.from_json(agreed.to_json()) == agreed
    assert "5 of 8 tokens by" in agreed.said
    assert agreed.text.sha256[:12] in agreed.said


def test_padding_of_the_tokenizer_is_kept(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json", ["[UNK]", "[CLS]", "dog", "end"])
    library = tokenizers.Tokenizer.from_file(str(path))
    library.enable_padding(direction="left", pad_id=3, pad_token="end")
    library.save(str(path))
    agreed = fitted(pandas.DataFrame({"note": ["dog", "dog dog"]}), tokenizer=str(path.parent), length=4)
    assert agreed.transform(pandas.DataFrame({"note": ["dog"]})).tolist() == [[3, 3, 1, 2]]


@pytest.mark.full
def test_a_model_with_an_embedding_trains_and_predicts_from_text(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json")
    clients = piebald.clients_from(
        notes(48), client="site", target="ill", test=0.25, prepare={"tokenizer": str(path), "length": 6}
    )
    assert clients.rows(0, "train").x.dtype == torch.int64
    assert clients.rows(0, "train").x.shape[1:] == (6,)
    run = piebald.run(piebald.recipes.fedavg(lr=1.0), clients, Bag(), rounds=30, out=tmp_path / "run", measure="none")
    kept = json.loads((tmp_path / "run" / "preparation.json").read_text())["columns"][0]
    assert kept["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert "6 token ids" in write_report([tmp_path / "run"], tmp_path / "report")[0].read_text()
    rows = pandas.DataFrame({"note": ["the dog", "the cat sleeps"]})
    told = run.predict(rows, client="a")
    module, ids = run.model("a"), torch.tensor([[2, 3, 4, 0, 0, 0], [2, 3, 5, 6, 0, 0]])
    expected = module(ids).softmax(1)[:, 1].detach()
    np.testing.assert_allclose(told["yes"], expected, atol=1e-6)
    assert told["yes"][0] > 0.5 > told["yes"][1]
    kept = tmp_path / "run" / "tokenizer.json"
    assert kept.read_bytes() == path.read_bytes()
    write_tokenizer(kept, [*WORDS[:3], *reversed(WORDS[3:])])
    tokens._tokenizer.cache_clear()
    with pytest.raises(SettingError, match=r"is not the agreed one, whose tokenizer\.json has the SHA-256"):
        run.predict(rows, client="a")


@pytest.mark.full
def test_a_run_folder_that_is_moved_reads_text_with_its_own_copy(tmp_path: Path) -> None:
    """Wherever the tokenizer and the run lay: what is opened is in the folder, not what the folder names."""
    path, table = write_tokenizer(tmp_path / "tokenizer.json"), tmp_path / "notes.csv"
    notes(48).to_csv(table, index=False)
    settings = ExperimentSettings.of_table(
        {
            "data": {"source": str(table), "client": "site", "target": "ill"}, "recipe": {"name": "fedavg", "lr": 1.0},
            "prepare": {"tokenizer": str(path), "length": 6}, "model": {"name": BAG}, "rounds": 2,
            "measure": "none", "split": {"test": 0.25, "validation": 0.25}, "runtime": {"kind": "simulator"},
        },
        "notes.toml", USERS,
    )  # fmt: skip
    plan = settings.plan()
    run = piebald.run(
        plan.recipes["fedavg"], plan.clients, plan.model, out=tmp_path / "run", **settings.run_keywords(plan)
    )
    rows = notes(4)[["note"]]
    expected, archive = run.predict(rows), tmp_path / "run.tar"
    run.close()
    backup(tmp_path / "run", archive)
    restore(archive, tmp_path / "restored")
    shutil.move(tmp_path / "run", tmp_path / "moved")
    write_tokenizer(path, [*WORDS[:3], *reversed(WORDS[3:])])  # another one where the settings say it is
    tokens._tokenizer.cache_clear()
    for place in ("moved", "restored"):
        with opened(tmp_path / place, plugins=PLUGINS) as moved:
            assert moved.predict(rows).equals(expected)
    path.unlink()
    tokens._tokenizer.cache_clear()
    with opened(tmp_path / "moved", plugins=PLUGINS) as moved:
        assert moved.predict(rows).equals(expected)
        assert moved.save(tmp_path / "model").is_dir()
    exported = json.loads((tmp_path / "model" / "preparation.json").read_text())["columns"]
    assert exported[0]["tokenizer"] == "tokenizer.json"
    assert piebald.adapt(tmp_path / "moved", notes(16)[["note", "ill"]], epochs=1, plugins=PLUGINS).chosen
    assert piebald.resume(tmp_path / "moved", rounds=3, plugins=PLUGINS).final["rounds"] == 3
    (tmp_path / "moved" / "tokenizer.json").unlink()
    tokens._tokenizer.cache_clear()
    with pytest.raises(SettingError, match=r"moved/tokenizer\.json' is not there, whose tokenizer\.json has"):
        opened(tmp_path / "moved", plugins=PLUGINS)


@pytest.mark.long
def test_a_federation_that_was_cut_off_and_moved_ends_as_the_simulator_does(tmp_path: Path) -> None:
    """Its sites are processes of this machine, which find the tokenizer where the run folder is by then."""
    path, table = write_tokenizer(tmp_path / "words.json"), tmp_path / "notes.csv"
    notes(48).to_csv(table, index=False)

    class CutOff(piebald.report.callbacks.Callback):
        def on_server_step(self, step: Any) -> None:
            if step["version"] == 2:
                raise KeyboardInterrupt

    def trained(out: Path, runtime: dict[str, Any], *callbacks: piebald.report.callbacks.Callback) -> piebald.Run:
        settings = ExperimentSettings.of_table(
            {
                "data": {"source": str(table), "client": "site", "target": "ill"},
                "prepare": {"tokenizer": str(path), "length": 6}, "recipe": {"name": "fedavg", "lr": 1.0},
                "model": {"name": BAG}, "rounds": 4, "measure": "none", "runtime": runtime,
            },
            "notes.toml", USERS,
        )  # fmt: skip
        plan = settings.plan()
        options = settings.run_keywords(plan)
        return piebald.run(plan.recipes["fedavg"], plan.clients, plan.model, out=out, callbacks=callbacks, **options)

    whole = trained(tmp_path / "whole", {"kind": "simulator", "engine": "sequential", "workers": 0})
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "run", {"kind": "federation"}, CutOff())
    shutil.move(tmp_path / "run", tmp_path / "moved")
    path.unlink()
    tokens._tokenizer.cache_clear()
    resumed = piebald.resume(tmp_path / "moved", plugins=PLUGINS)
    assert resumed.final["rounds"] == 4
    assert torch.equal(resumed.start(), whole.start())
    assert resumed.predict(notes(6)[["note"]]).equals(whole.predict(notes(6)[["note"]]))
    assert not (tmp_path / "run").exists()
    elsewhere = {"runtime": {**resumed.meta["runtime"], "credentials": "server"}}  # which know its name
    assert tokens.with_kept_tokenizer(elsewhere, tmp_path)["runtime"] == elsewhere["runtime"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tokenizer": "nowhere/tokenizer.json", "length": 5}, "there is no file 'nowhere/tokenizer.json'"),
        ({"tokenizer": "{good}"}, "tokenizer and length, the number of token ids of each text, belong together"),
        ({"length": 5}, "tokenizer and length"),
        ({"tokenizer": "{good}", "length": 1}, "must be more than the 1 tokens that the tokenizer"),
        ({"tokenizer": "{good}", "length": 5, "harmonise": "combat"}, "harmonise is for numbers"),
        ({"tokenizer": "{bad}", "length": 5}, "cannot be read"),
        ({"tokenizer": "{bare}", "length": 5}, "has no token that fills up texts"),
    ],
)
def test_what_is_no_tokenizer_is_told(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    files = {name: str(tmp_path / f"{name}.json") for name in ("good", "bad", "bare")}
    write_tokenizer(Path(files["good"]))
    write_tokenizer(Path(files["bare"]), WORDS[1:])
    Path(files["bad"]).write_text('{"version": "1.0", "model": {"type": "code"}}')
    given = {name: value.format(**files) if isinstance(value, str) else value for name, value in settings.items()}
    with pytest.raises(SettingError, match=words):
        fitted(notes()[["note", "ill"]], "ill", **given)


def test_a_name_is_refused_in_one_sentence_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def away(*_: Any, local_files_only: bool = False) -> str:
        raise OSError("no network\nand more")

    monkeypatch.setattr(hub, "hf_hub_download", away)
    with pytest.raises(SettingError, match=r"cannot be fetched from the Hugging Face Hub \(no network\)"):
        fitted(notes()[["note"]], tokenizer="tiny/dog", length=5)
    path = write_tokenizer(tmp_path / "there.json")
    monkeypatch.setattr(hub, "hf_hub_download", lambda *_, local_files_only=False: str(path))
    assert fitted(notes()[["note"]], tokenizer="tiny/dog", length=5).text is not None


def test_text_is_the_only_column_that_is_read(tmp_path: Path) -> None:
    path = str(write_tokenizer(tmp_path / "tokenizer.json"))
    table = notes().assign(age=range(12))
    with pytest.raises(SettingError, match=r"one column of text and no other.*features of \[data\]"):
        fitted(table[["note", "age", "ill"]], "ill", tokenizer=path, length=5)
    left = fitted(table[["note", "age"]], tokenizer=path, length=5, columns={"note": "text", "age": "leave out"})
    assert left.names_in == ["note"]
    assert left.left_out == {"age": "as [prepare] says"}
    with pytest.raises(SettingError, match="trees read no text"):
        left.unscaled(table)
    with pytest.raises(SettingError, match="make token ids of it by a tokenizer"):
        fitted(table[["note", "age"]], columns={"note": "text"})


def test_clients_of_one_run_agree(tmp_path: Path) -> None:
    path = str(write_tokenizer(tmp_path / "tokenizer.json"))
    clients = piebald.clients_from(
        notes(), client="site", target="ill", features=["note"], prepare={"tokenizer": path, "length": 3}
    )
    agreed = preparation_of(clients)
    assert agreed is not None
    assert agreed.feature_names_out == ["note: token 1", "note: token 2", "note: token 3"]
    columns = json.loads(agreed.to_json())["columns"]
    with pytest.raises(SettingError, match="must be the only one"):
        Preparation(columns=[columns[0], {**columns[0], "name": "other"}])


@pytest.mark.full
def test_an_exported_folder_scores_text_by_itself(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json")
    clients = piebald.clients_from(
        notes(24), client="site", target="ill", prepare={"tokenizer": str(path), "length": 4, "gaps": ["none"]}
    )
    run = piebald.run(piebald.recipes.fedavg(), clients, Bag(), rounds=1, out=tmp_path / "run", measure="none")
    folder = run.save(tmp_path / "model")
    rows = pandas.DataFrame({"note": ["the cat sleeps and sleeps", None, " dog ", "none"]})
    if find_spec("onnx") and find_spec("skl2onnx"):
        run.save(tmp_path / "model.onnx")
        beside = json.loads((tmp_path / "model.preparation.json").read_text())
        assert beside["columns"][0]["tokenizer"] == "model.tokenizer.json"
        library = tokenizers.Tokenizer.from_file(str(tmp_path / "model.tokenizer.json"))
        assert library.encode("dog").ids == [2, 4, 0, 0]
    path.unlink()
    scores = score.Scorer(folder).predict(rows)
    np.testing.assert_allclose(scores["yes"], run.predict(rows)["yes"], atol=1e-6)
    assert scores["yes"][1] == scores["yes"][3] != scores["yes"][2]
