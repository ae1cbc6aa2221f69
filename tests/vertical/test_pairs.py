"""One source and several targets, pair by pair, by one command."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pandas
import pytest

from piebald import vertical
from piebald.cli import main
from piebald.federation.credentials.provisioning import Description, provision
from piebald.federation.hub.local_federation import free_port
from piebald.privacy.ledger import FOLDER
from piebald.vertical.key_matching import ristretto

from .conftest import small
from .test_files import people, pytestmark  # noqa: F401

pytest.importorskip("rbcl")
ristretto()  # removes the file that the import leaves behind
SHOPS = ("shop-a", "shop-b")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    bank, shop = people()
    bank.to_csv("bank.csv", index=False)
    for name, rows in zip(SHOPS, (shop[:130], pandas.concat([shop[20:60], shop[90:]])), strict=True):
        rows.rename(columns={"member": "customer"}).to_csv(f"{name}.csv", index=False)
    settings = small(data={"test": 0.3}, files={"source": {"path": "-", "key": "-", "label": "repaid"}})
    Path("two.toml").write_text(settings.text())
    provision(Description(name="three", host="127.0.0.1", port=free_port(), days=2, sites=list(SHOPS)), Path("kit"))
    return tmp_path


def at_once(*commands: list[str]) -> list[int]:
    codes = dict[int, int]()

    def act(number: int, words: list[str]) -> None:
        codes[number] = main(words)

    threads = [threading.Thread(target=act, args=given) for given in enumerate(commands)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [codes[number] for number in range(len(commands))]


def words(role: str, table: str, credentials: str, *more: str, timeout: int = 60) -> list[str]:
    return ["transfer", "two.toml", "--party", role, "--data", f"{table}.csv", "--key", "customer", "--out",
            f"run of {table}", "--set", f"runtime.credentials=kit/{credentials}", "--set", f"runtime.timeout={timeout}",
            "--quiet", *more]  # fmt: skip


@pytest.mark.full
def test_a_source_meets_several_targets_one_after_the_other_which_all_wait(folder):
    bank = words("source", "bank", "server", *(part for name in SHOPS for part in ("--partner", name)))
    assert at_once(bank, *(words("target", name, name) for name in SHOPS)) == [0, 0, 0]
    for name, shared in zip(SHOPS, (60, 40), strict=True):
        assert vertical.result(f"run of {name}").score is None  # no label of theirs is named
        matched = pandas.read_csv(f"run of bank/{name}/source.csv")
        assert matched["shared_id"].notna().sum() == shared
        assert Path(f"run of bank/{name}/source/run.db").exists()
        scores = pandas.read_csv(f"run of {name}/target/scores.csv")
        assert scores["score"].between(0, 1).all()
    entries = json.loads((folder / FOLDER / "ledger.json").read_text())["entries"]
    assert sum(count for entry, count in entries if entry[0] == "match" and "server" in entry) == 2
    of_bank = {(kind, digest): count for (kind, _, _, site, digest, *_), count in entries if site == "server"}
    for name, chunks in zip(SHOPS, (60 // 18, 40 // 18), strict=True):
        # without noise: 3 steps on so many chunks of common rows and of 5 or more of own ones, and the translator
        told = {kind: of_bank[f"transfer_{kind}", name] for kind in ("own", "common", "whole")}
        assert told == {"own": 1, "common": -(-3 // chunks), "whole": 1}


@pytest.mark.full
def test_one_that_does_not_come_costs_the_others_nothing(folder, capfd):
    bank = words("source", "bank", "server", "--partner", "shop-a", "--partner", "shop-b", timeout=8)
    assert at_once(bank, words("target", "shop-b", "shop-b")) == [1, 0]
    said = capfd.readouterr().err
    assert "shop-a: the other party did not come" in said
    assert "1 of 2 pairs did not finish: go on with --partner shop-a" in said


@pytest.mark.full
def test_one_that_shares_no_row_costs_the_others_nothing(folder, capfd):
    shop = pandas.read_csv("shop-a.csv")
    shop.assign(customer=[f"nobody {number}" for number in range(len(shop))]).to_csv("shop-a.csv", index=False)
    bank = words("source", "bank", "server", *(part for name in SHOPS for part in ("--partner", name)))
    assert at_once(bank, *(words("target", name, name) for name in SHOPS)) == [1, 2, 0]
    said = capfd.readouterr().err
    assert "shop-a: no key of the columns customer is in both tables" in said
    assert "1 of 2 pairs did not finish: go on with --partner shop-a" in said


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--partner", "shop-c"), "did you mean 'shop-"),
        (("--partner", "shop-a", "--partner", "shop-a"), "each partner is met once"),
    ],
)
def test_partners_that_cannot_be_met_are_one_sentence_before_anybody_is(folder, capsys, more, said):
    assert main(words("source", "bank", "server", *more)) == 2
    assert said in capsys.readouterr().err
    assert not Path("run of bank").exists()
    assert main(["transfer", "two.toml", "--partner", "shop-a"]) == 2
    assert "--partner is another party of this one" in capsys.readouterr().err
