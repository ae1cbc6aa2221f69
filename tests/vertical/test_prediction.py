"""The target predicts for new rows from its run folder alone, as it would have in the run."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from sklearn.metrics import roc_auc_score

from piebald import vertical
from piebald.cli import main
from piebald.core.errors import PiebaldError, RunFolderError, SettingError
from piebald.vertical.party_data import load, load_one
from piebald.vertical.party_store import PartyStore
from piebald.vertical.transfer_runs import run

from .conftest import small, train_both
from .test_files import STATED_TARGET, TARGET, folder, own, people, pytestmark  # noqa: F401


@pytest.mark.full
def test_scores_of_the_file_have_row_numbers_and_keys_and_new_rows_are_prepared_alike(folder, capsys):  # noqa: F811
    _, shop = people()
    run(own(), out="run")
    scores = pandas.read_csv("run/target/scores.csv")
    assert list(scores.columns) == ["row", "member", "score"]
    assert scores["row"].tolist() == list(range(1, len(shop) + 1))
    assert scores["member"].dropna().tolist() == shop["member"].dropna().tolist()
    # any order of columns and rows, without keys and labels
    order = np.random.default_rng(1).permutation(len(shop))
    new = shop.drop(columns=["member", "paid"])[["town", "visits", "basket"]].iloc[order]
    found = vertical.predict("run", new)
    assert list(found.columns) == ["row", "score"]
    np.testing.assert_allclose(found["score"], scores["score"].to_numpy()[order], rtol=1e-12)
    new.to_csv("new.csv", index=False)
    assert main(["predict", "run", "new.csv", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["predictions"]["score"] == pytest.approx(found["score"].tolist())
    # the scores of the test rows are those that the result was made of
    held = load_one(own().files, "target", own().data.test, own().seed)
    order = [one for one in range(len(shop)) if shop["member"].isna().iloc[one]]
    predictor = vertical.TransferPredictor.of_run(Path("run"))
    made = torch.sigmoid(predictor.network(held.test)[-1] @ predictor.translator).detach().numpy()
    assert set(np.round(made, 12)) <= set(np.round(scores["score"].to_numpy()[order], 12))
    auc = vertical.result("run").score.auc
    assert auc == roc_auc_score(held.test_y > 0, made)
    assert main(["predict", "run", "new.csv", "--out", "scores.csv"]) == 0
    np.testing.assert_allclose(pandas.read_csv("scores.csv")["score"], found["score"], rtol=1e-9)


@pytest.mark.full
@pytest.mark.parametrize("target", [TARGET, STATED_TARGET], ids=["by rows", "stated"])
def test_a_single_row_is_scored_as_among_all(folder, target):  # noqa: F811
    _, shop = people()
    run(own(target=target), out="run")
    predictor = vertical.TransferPredictor.of_run(Path("run"))
    together = predictor.predict(shop)["score"].to_numpy()
    alone = [predictor.predict(shop.iloc[[index]])["score"].item() for index in range(5)]
    np.testing.assert_allclose(alone, together[:5], rtol=1e-6)


def test_rows_from_python_are_scored_by_the_names_of_their_features(tmp_path):
    settings = small()
    held = load(settings.data, settings.seed)
    run(settings, held, out=tmp_path / "run")
    target: vertical.Party = train_both(settings, held)[0]["target"]
    frame = pandas.DataFrame(held["target"].test.numpy(), columns=list(held["target"].features))
    found = vertical.predict(tmp_path / "run", frame[frame.columns[::-1]])
    np.testing.assert_allclose(found["score"], target.predict(held["target"].test).numpy(), rtol=1e-12)


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["predict", "run", "gone.csv"], "there is no file gone.csv"),
        (["predict", "run", "few.csv"], "few.csv has no column 'visits'"),
        (["predict", "run", "words.csv"], "column 'basket' must have a number in each row, got 'many'"),
        (
            ["predict", "run", "shop.csv", "--client", "3"],
            "holds a transfer, with one model: give none of the options that choose one",
        ),
        (["predict", "source alone", "shop.csv"], "holds no target that has finished"),
    ],
)
def test_what_cannot_be_predicted_is_one_sentence(folder, capsys, words, said):  # noqa: F811
    _, shop = people()
    run(own(), out="run")
    shop.to_csv("shop.csv", index=False)
    shop.drop(columns="visits").to_csv("few.csv", index=False)
    shop.astype({"basket": object}).assign(basket=["many", *shop["basket"][1:]]).to_csv("words.csv", index=False)
    Path("source alone/source").mkdir(parents=True)
    Path("source alone/transfer.toml").write_bytes(Path("run/transfer.toml").read_bytes())
    capsys.readouterr()
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.full
@pytest.mark.parametrize("damaged", ["vectors-3.safetensors", "run.db", {"preparation": {}}, {"rate": []}])
def test_a_damaged_folder_is_one_sentence(folder, damaged):  # noqa: F811
    run(own(), out="run")
    if isinstance(damaged, str):
        Path("run/target", damaged).write_bytes(b"nonsense")
    else:
        with PartyStore.of(Path("run"), "target") as store:
            store.set_meta(**damaged)
    with pytest.raises((RunFolderError, SettingError), match="damaged") as raised:
        vertical.predict("run", people()[1])
    assert isinstance(raised.value, PiebaldError)


@pytest.mark.full
def test_settings_that_name_a_larger_network_than_was_trained_take_no_memory(folder):  # noqa: F811
    """They lie in a folder that may come from a stranger: 16 TB of weights would be made before they are compared."""
    run(own(), out="run")
    path = Path("run/transfer.toml")
    path.write_text(re.sub(r"hidden = \[.*?\]", "hidden = [1000000000000]", path.read_text(), flags=re.DOTALL))
    assert "1000000000000" in path.read_text()
    with pytest.raises(RunFolderError, match=r"run cannot be read, it may be damaged: (?s:.)*size mismatch"):
        vertical.predict("run", people()[1])


DAMAGE = [
    "UPDATE row_score SET row_values = NULL",
    "UPDATE row_score SET model = NULL",
    "UPDATE score SET metric = 'x' WHERE metric = 'auc'",
    "UPDATE score SET value = NULL",
    "DELETE FROM score WHERE metric = 'f1'",
    "UPDATE step SET time = NULL",
    "UPDATE step SET bytes_up = NULL",
    "UPDATE note SET value = '{}' WHERE axis = 'loss'",
    "DELETE FROM note WHERE axis = 'loss' AND name = 'loss' AND version > 1",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("finished"))
        run(small(watch_every=1), out="run")
        return Path("run").resolve()


@pytest.mark.parametrize("damage", DAMAGE)
def test_records_that_no_transfer_makes_are_one_sentence(finished, tmp_path, capsys, damage):
    shutil.copytree(finished, tmp_path / "run")
    with closing(sqlite3.connect(tmp_path / "run/target/run.db")) as database, database:
        assert database.execute(damage).rowcount
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "page")]) == 2
    assert capsys.readouterr().err.strip() == (
        f"{tmp_path}/run holds records that no transfer makes: restore it from a copy"
    )


@pytest.mark.full
@pytest.mark.parametrize("translator", [[0.0] * 3, [float("nan")] * 8, [[0.0]] * 8])
def test_a_translator_of_another_network_is_one_sentence(folder, translator):  # noqa: F811
    run(own(), out="run")
    with PartyStore.of(Path("run"), "target") as store:
        store.set_meta(translator=translator)
    with pytest.raises(RunFolderError, match="the translator must be 8 numbers"):
        vertical.predict("run", people()[1])


@pytest.mark.full
def test_what_is_stored_holds_no_row(folder):  # noqa: F811
    run(own(), out="run")
    with PartyStore.open_read_only("run/target") as store:
        told = store.meta
    stored = told["preparation"]
    assert set(stored) == {"features", "key", "bounds", "columns", "as_written"}
    assert stored["key"] == "member"
    assert len(told["translator"]) == 8
    assert np.isfinite(told["translator"]).all()
