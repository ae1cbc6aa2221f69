"""A party's own table: what it becomes, that only its owner reads it, and what is refused."""

from __future__ import annotations

import importlib
import json
import math
import threading
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch

from piebald import vertical
from piebald.cli import main
from piebald.core.errors import PiebaldError, SettingError
from piebald.privacy.accounting import gaussian_epsilon
from piebald.privacy.ledger import FOLDER, TRANSFER, RowLedger
from piebald.settings.toml_document import Document
from piebald.vertical import party_data as files
from piebald.vertical.chunks import own_chunks
from piebald.vertical.party_secret import PartySecret
from piebald.vertical.transfer_runs import run, run_party
from piebald.vertical.transfer_settings import PartyFile, PartyFiles, TransferRuntime, TransferSettings

from .conftest import credentials, inject_secrets, small, told

# With two features, a single step tells more numbers than a chunk has: the program says so, rightly.
pytestmark = pytest.mark.filterwarnings("ignore:.*numbers about a chunk of")

KNOWN = 60  # people whom both know
PARTIES = {"source": "server", "target": "bank"}  # names in their certificates


def people() -> tuple[pandas.DataFrame, pandas.DataFrame]:
    """A bank's table and a shop's, in different orders."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(260, 3))
    repaid = np.where(hidden[:, 0] + hidden[:, 1] > 0, "yes", "no")
    bank = pandas.DataFrame({"income": hidden[:, 0], "age": 40 + 9 * hidden[:, 1], "repaid": repaid})
    shop = pandas.DataFrame({"basket": hidden[:, 1] + 2, "visits": hidden[:, 2], "paid": repaid})
    shop["town"] = np.where(hidden[:, 0] > 0, "Ulm", "Bern")
    number = [1000 + place if place < KNOWN else None for place in range(260)]
    bank.insert(0, "customer", number)
    shop.insert(2, "member", number)
    return bank[:160].sample(frac=1, random_state=1), pandas.concat([shop[:KNOWN], shop[160:]])


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    bank, shop = people()
    bank.to_csv("bank.csv", index=False)
    shop.to_parquet("shop.parquet")
    return tmp_path


SOURCE = {"path": "bank.csv", "key": "customer", "label": "repaid"}
TARGET = {"path": "shop.parquet", "key": "member", "label": "paid"}
STATED_SOURCE = {**SOURCE, "positive": "yes", "bounds": {"income": (-3.0, 3.0), "age": (10.0, 70.0)}}
STATED_TARGET = {
    **TARGET,
    "positive": "yes",
    "bounds": {"basket": (-1.0, 5.0), "visits": (-3.0, 3.0)},
    "values": {"town": ("Ulm", "Bern")},
}


def own(source=None, target=None, **changes):
    named = {"source": SOURCE if source is None else source, "target": TARGET if target is None else target}
    return small(data={"test": 0.5}, files={role: file for role, file in named.items() if file}, **changes)


def test_co_occurring_rows_are_the_same_people_in_the_same_order(folder):
    held = files.load_files(own().files, ("source", "target"), test=0.5, seed=0)
    bank, shop = people()
    source, target = held["source"], held["target"]
    assert len(source.overlap) == len(target.overlap) == KNOWN
    income = bank.set_index("customer").loc[range(1000, 1000 + KNOWN), "income"].to_numpy()
    seen = source.x[source.overlap, source.features.index("income")].numpy()
    assert np.corrcoef(income, seen)[0, 1] == pytest.approx(1.0)
    basket = shop.set_index("member").loc[range(1000, 1000 + KNOWN), "basket"].to_numpy()
    seen = target.x[target.overlap, target.features.index("basket")].numpy()
    assert np.corrcoef(basket, seen)[0, 1] == pytest.approx(1.0)
    repaid = bank.set_index("customer").loc[range(1000, 1000 + KNOWN), "repaid"] == "yes"
    assert source.y is not None
    assert ((source.y[source.overlap] > 0).numpy() == repaid.to_numpy()).all()


def test_numbers_become_standard_scores_of_rows_that_are_trained_on_and_words_columns(folder):
    target = files.load_one(own().files, "target", test=0.5, seed=0)
    assert target.features == ("basket", "visits", "town=Bern", "town=Ulm")
    assert len(target.test) == len(target.test_y) == 50  # half of the 100 rows without a key
    torch.testing.assert_close(target.x[:, 0].mean(), torch.tensor(0.0, dtype=torch.float64), atol=1e-6, rtol=0)
    assert set(target.x[:, 2].tolist()) == {0.0, 1.0}
    assert target.y is None
    source = files.load_one(own().files, "source", test=0.5, seed=0)
    assert source.features == ("income", "age")
    assert len(source.x) == 160
    assert len(source.test) == 0


def test_gaps_are_filled_and_shown_in_a_column_of_their_own(folder):
    _, shop = people()
    shop.assign(visits=[None, None, *range(158)]).to_csv("holes.csv", index=False)
    held = files.load_one(own(target={**TARGET, "path": "holes.csv"}).files, "target", test=0.5, seed=0)
    assert held.features == ("basket", "visits", "visits is missing", "town=Bern", "town=Ulm")
    assert torch.isfinite(held.x).all()
    assert held.x[:3, 2].tolist() == [1, 1, 0]


RULES = {
    "map": {"town": {"ulm": "Ulm", "ULM a.d.D.": "Ulm", "bern": "Bern"}},
    "absent": {"visits": ["-9.0"]},
    "parse": {"basket": "decimal comma"},
    "unit": {"visits": {"factor": 2.0}},
}


@pytest.mark.full
def test_a_partys_own_rules_clean_its_rows_before_training_and_at_prediction(folder):
    """The same model and scores as of rows that were clean before; the ledger knows them as the rows of the file."""
    _, shop = people()
    shop = shop.reset_index(drop=True)
    dirty = shop.assign(
        town=[
            {"Ulm": "ULM a.d.D.", "Bern": " bern"}[town] if place % 3 else town
            for place, town in enumerate(shop["town"])
        ],
        basket=[f"{value:.4f}".replace(".", ",") for value in shop["basket"]],
        visits=[-9.0 if place % 7 == 0 else value / 2 for place, value in enumerate(shop["visits"])],
    )
    clean = shop.assign(
        basket=shop["basket"].round(4),
        visits=[math.nan if place % 7 == 0 else value / 2 * 2 for place, value in enumerate(shop["visits"])],
    )
    dirty.to_csv("dirty.csv", index=False, sep=";")
    clean.to_csv("clean.csv", index=False)
    ruled = {**TARGET, "path": "dirty.csv", "prepare": RULES}
    made = [own(target=target, steps=2) for target in (ruled, {**TARGET, "path": "clean.csv"})]
    one, other = (files.load_one(settings.files, "target", test=0.5, seed=0) for settings in made)
    assert one.features == other.features
    torch.testing.assert_close(one.x, other.x)
    for name, settings in zip(("ruled", "plain"), made, strict=True):
        run(settings, out=name)
    found = [vertical.predict(*words) for words in (("ruled", "dirty.csv"), ("plain", "clean.csv"))]
    np.testing.assert_allclose(found[0]["score"], found[1]["score"], rtol=1e-6)
    without = files.load_one(own(target={**ruled, "prepare": None, "columns": ["visits"]}).files, "target", 0.5, 0)
    assert one.records.tolist() == without.records.tolist() != []
    assert TransferSettings.of(Document(made[0].text(), "its text")).files == made[0].files


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"parse": {"basket": "hexadecimal"}}, "form"),
        ({"map": {"twon": {"ulm": "Ulm"}}}, "did you mean 'town'"),
    ],
)
def test_rules_that_cannot_be_used_are_one_sentence(folder, rules, said):
    with pytest.raises(SettingError, match=said):
        files.load_one(own(target={**TARGET, "prepare": rules}).files, "target", 0.5, 0)


def test_with_noise_no_rule_may_say_that_a_row_cannot_be_read(folder):
    made = own(target={**STATED_TARGET, "prepare": {"parse": {"basket": "number"}}})
    with pytest.raises(SettingError, match="no row may say whether the table can be read"):
        files.load_one(made.files, "target", 0.5, 0, public=True)
    files.load_one(
        own(target={**STATED_TARGET, "prepare": {"absent": {"visits": ["-9"]}}}).files, "target", 0.5, 0, True
    )


@pytest.mark.full
def test_a_run_from_files_and_its_page(folder, capsys):
    (folder / "transfer.toml").write_text(own(steps=30, lr=0.02).text())
    assert main(["transfer", "transfer.toml", "--out", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["score"]["auc"] > 0.6
    assert "with an AUC of" in Path("run/report.html").read_text()


@pytest.mark.full
def test_a_target_without_labels_scores_all_its_rows(folder, capsys):
    bare = {"path": "shop.parquet", "key": "member", "columns": ["basket", "visits"]}
    (folder / "transfer.toml").write_text(own(target=bare).text())
    assert main(["transfer", "transfer.toml", "--out", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["score"] is None
    assert len(pandas.read_csv("run/target/scores.csv")) == 160
    assert "no label of its rows is known" in Path("run/report.html").read_text()
    assert main(["resume", "run", "-q"]) == 0


def apart(one, other, simulated=True, out="run of"):
    """Both parties, each with settings of its own, over TLS; what each returns or raises."""
    importlib.import_module("torch._dynamo")  # two threads had better not do that at once
    places, said = dict(zip(("source", "target"), credentials(Path(f"credentials of {out}")).values(), strict=True)), {}
    if simulated:
        inject_secrets({role: Path(f"{out} {role}") for role in places})

    def train_party(role, settings):
        try:
            runtime = TransferRuntime(credentials=str(places[role].folder), timeout=120)
            there = settings.model_copy(update={"runtime": runtime})
            said[role] = run_party(role, there, f"{out} {role}", tell=print)
        except PiebaldError as error:
            said[role] = error

    threads = [threading.Thread(target=train_party, args=given) for given in (("source", one), ("target", other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


@pytest.mark.full
def test_each_party_names_and_reads_its_own_file_only(folder):
    together = run(own(), out="both")
    said = apart(own(target=False), own(source=False))
    assert said["source"].score is None
    assert said["target"].score == together.score


def test_parties_whose_keys_differ_part_with_a_reason(folder):
    table = pandas.read_csv("bank.csv")
    table.loc[table["customer"] == 1000, "customer"] = 999
    table.to_csv("other.csv", index=False)
    said = apart(own(source={**SOURCE, "path": "other.csv"}, target=False), own(source=False))
    assert any("and tables with the same keys" in str(error) for error in said.values())


@pytest.mark.full
def test_what_parties_tell_with_noise_is_spent_in_the_ledger_of_their_rows(folder):
    """Before, only a run's own folder knew of it, so that a new folder began anew."""
    source, target = STATED_SOURCE, STATED_TARGET
    noise, delta = 6.0, 1e-6
    method = {"kind": "smmd", "kernel": "linear", "noise": noise, "clip": 0.05}
    one, other = own(source, False, method=method), own(False, target, method=method)
    for out in ("first", "second"):
        said = apart(one, other, simulated=False, out=out)
        assert not any(isinstance(result, PiebaldError) for result in said.values()), said
    for role, settings in (("source", one), ("target", other)):
        data = files.load_one(settings.files, role, 0.5, 0, public=True)
        ledger = RowLedger(data.records, [folder / FOLDER], PARTIES[role])
        releases = sum(told(folder / f"{out} {role}" / role).releases
                       for out in ("first", "second"))  # fmt: skip
        assert releases > 4
        assert ledger.spent(delta, TRANSFER) == pytest.approx(gaussian_epsilon(noise / math.sqrt(releases), delta))
        assert ledger.spent(delta) == ledger.spent(delta, TRANSFER)
        assert ledger.spent(delta, "noisy_sums") == 0  # answers have a budget of their own
    run(own(source, target, method=method), out="alone")  # a simulation tells nobody anything
    assert RowLedger(data.records, [folder / FOLDER], PARTIES[role]).spent(delta) == ledger.spent(delta)


@pytest.mark.parametrize("row", [60, 75, 100, 159])
@pytest.mark.parametrize("label", ["", "yes", "no"])
def test_a_label_of_the_target_deals_no_row_into_another_chunk(folder, row, label):
    """One emptied cell dealt nearly every row into another one: first moments moved by 3.98 reaches of a row."""
    target = STATED_TARGET

    def chunks():
        held = files.load_one(own(target=target).files, "target", 0.5, 0, public=True)
        return [held.x[places] for places in own_chunks(held, 10, PartySecret.simulated(0, "target"), by_label=False)]

    before = chunks()
    _, shop = people()
    shop.iloc[row, list(shop.columns).index("paid")] = label
    shop.to_parquet("shop.parquet")
    after = chunks()
    assert len(before) == len(after) > 3
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_folder_of_another_file_is_not_gone_on_with(folder, capsys):
    run(own(), out="run")
    Path("shop.parquet").rename("moved.parquet")
    (folder / "transfer.toml").write_text(own(target={**TARGET, "path": "moved.parquet"}).text())
    assert main(["transfer", "transfer.toml", "--out", "run"]) == 2
    assert "holds a transfer with other settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("files.source.path=gone.csv", "there is no file gone.csv"),
        (
            "files.source.path=bank.txt",
            "must be a .csv, .tsv, .parquet, .xlsx",
        ),
        ("files.source.key=costumer", "did you mean 'customer'"),
        ("files.source.label=repayed", "did you mean 'repaid'"),
        ("files.source.label=age", "column 'age' of bank.csv must have two values"),
        ("files.source.positive=maybe", "two values, one of them 'maybe', got no, yes"),
        ('files.source.columns=["income", "repaid"]', "must not include the label 'repaid'"),
        ('files.source={ path = "bank.csv" }', "[files.source] needs a key"),
        ("files=3", "files must be a table, like [files], got 3"),
        ('files.target.columns=["town", "town"]', "files.target.columns must name at least one column, and none twice"),
        ("files.target.columns=[]", "files.target.columns must name at least one column"),
        ("files.source.colums=3", "did you mean 'columns'"),
        ("files.sauce.path=3", "there is no setting of [files] called 'sauce'"),
        ("files.target.path=more.csv", "keys in their co-occurring rows, got 60 and 61"),
        ("files.target.path=towns.csv", "column 'town' of towns.csv has more than 100 different values"),
        ('files.target.bounds={ basket = [0, 1], "cash" = [0, 1] }', "'cash' of shop.parquet has bounds or values"),
        ("files.target.path=twice.csv", "key '1001' is in two rows of twice.csv"),
        ("files.target.path=endless.csv", "endless.csv: column 'visits' must have a finite number"),
        ("data.test=0.001", "must have rows of both labels without a key"),
        ("data.name=census", "files replace the data set"),
        ("overlap_batch=61", "overlap_batch must be at most the 60 co-occurring rows, got 61"),
    ],
)
def test_bad_files_are_one_sentence_and_exit_code_2(folder, capsys, flag, said):
    Path("bank.txt").write_text("x")
    _, shop = people()
    many = pandas.concat([shop] * 16).assign(member=[*shop["member"], *[None] * 2400])
    many.assign(town=[f"town {index % 110}" for index in range(len(many))]).to_csv("towns.csv", index=False)
    shop.assign(member=[1001, *shop["member"][1:]]).to_csv("twice.csv", index=False)
    shop.assign(member=[*shop["member"][:-1], 5]).to_csv("more.csv", index=False)
    shop.assign(visits=[np.inf, *range(159)]).to_csv("endless.csv", index=False)
    (folder / "transfer.toml").write_text(own().text())
    assert main(["transfer", "transfer.toml", "--set", flag]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.strip().splitlines()) == 1


def test_a_party_without_its_own_file_or_label_is_told(folder):
    with pytest.raises(SettingError, match=r"files.target is missing: give path and key"):
        files.load_one(own(target=False).files, "target", test=0.2, seed=0)
    bare = PartyFiles(source=PartyFile(path="bank.csv", key="customer"))
    with pytest.raises(SettingError, match=r"files.source.label is missing"):
        files.load_one(bare, "source", test=0.2, seed=0)


def test_keys_too_long_to_be_numbers_are_refused_and_text_is_not(folder):
    table = pandas.read_csv("bank.csv")
    table["customer"] = table["customer"] * 1e15
    table.to_csv("long.csv", index=False)
    with pytest.raises(SettingError, match="more than 15 digits: quote them"):
        files.load_one(own(source={**SOURCE, "path": "long.csv"}).files, "source", test=0.2, seed=0)
    table["customer"] = [None if np.isnan(one) else f"AB{one:.0f}" for one in table["customer"]]
    table.to_csv("text.csv", index=False)
    assert len(files.load_one(own(source={**SOURCE, "path": "text.csv"}).files, "source", 0.2, 0).overlap) == KNOWN
