"""Two raw tables become a transfer in one command at each party, and what cannot work is said before anybody is met."""

from __future__ import annotations

import json
import math
import os
import random
import stat
import threading
from pathlib import Path

import pandas
import pytest

from piebald.cli import main
from piebald.core.errors import PiebaldError, SettingError
from piebald.data.clients.owner import read_owners, records_of
from piebald.privacy.ledger import FOLDER
from piebald.vertical import key_matching, transfer_runs
from piebald.vertical.party_messages import PartyEnded
from piebald.vertical.party_store import PartyStore, read_settings, write_settings
from piebald.vertical.protocol import PartySession
from piebald.vertical.raw_tables import check, named, was_raw
from piebald.vertical.transfer_runs import run, run_party

from .conftest import credentials, small
from .tampered import Killed, Mortal
from .test_files import KNOWN, people, pytestmark  # noqa: F401


@pytest.fixture
def raw(tmp_path, monkeypatch) -> Path:
    """Tables in which every row has a key, of whom the first are at both parties."""
    monkeypatch.chdir(tmp_path)
    for name, table, key, start in zip(("bank", "shop"), people(), ("customer", "member"), (5000, 9000), strict=True):
        keys = [start + place if pandas.isna(one) else int(one) for place, one in enumerate(table[key])]
        table.assign(**{key: keys}).rename(columns={key: "id"}).to_csv(f"{name}.csv", index=False)
    return tmp_path


def settings(**changes):
    files = {
        "source": {"path": "bank.csv", "key": "id", "label": "repaid"},
        "target": {"path": "shop.csv", "key": "id", "label": "paid"},
    }
    made = {"files": files, "data": {"test": 0.5}, "overlap_batch": 20, "steps": 2}
    return small(**(made | changes))


@pytest.mark.full
def test_the_rows_that_both_have_are_named_alike_and_nothing_else_is_a_feature(raw):
    made = named(settings(), ["id"], ["exact"], Path("run"))
    tables = {role: pandas.read_csv(f"run/{role}.csv") for role in ("source", "target")}
    both = pandas.read_csv("bank.csv").merge(pandas.read_csv("shop.csv"), on="id")["id"]
    of_id = [dict(zip(table["id"], table["shared_id"], strict=True)) for table in tables.values()]
    assert all(of_id[0][one] == of_id[1][one] for one in both)
    assert [int(table["shared_id"].notna().sum()) for table in tables.values()] == [len(both), len(both)]
    assert len(both) == KNOWN
    assert made.files.source.columns == ("income", "age")
    assert made.files.target.columns == ("basket", "visits", "town")
    assert run(made, out="run").score.auc > 0
    assert read_settings(Path("run")).files == made.files
    assert (Path("run/source.csv").stat().st_mode & 0o77) == 0


@pytest.mark.full
def test_rows_whose_names_differ_in_a_letter_belong_together_where_both_parties_are_here(raw):
    for name in ("bank", "shop"):
        table = pandas.read_csv(f"{name}.csv")
        words = ["".join(random.Random(one).choices("abcdefgh", k=12)) for one in table["id"]]
        table.assign(name=[word[name == "shop" :] for word in words]).to_csv(f"{name}.csv", index=False)
    named(settings(), ["name"], ["name"], Path("run"))
    tables = [pandas.read_csv(f"run/{role}.csv").dropna(subset="shared_id") for role in ("source", "target")]
    together = tables[0].merge(tables[1], on="shared_id")
    assert len(together) == KNOWN
    assert (together["id_x"] == together["id_y"]).all()


@pytest.mark.full
def test_two_parties_match_train_and_predict_for_new_rows_in_one_command_each(raw, capsys, monkeypatch):
    pytest.importorskip("rbcl")
    import torch._dynamo  # noqa: F401  # optimizers import it when first used, which two threads must not do at once

    places = dict(zip(("source", "target"), credentials(raw / "credentials").values(), strict=True))
    said: dict[str, object] = {}

    def act(role: str) -> None:
        runtime = {"credentials": str(places[role].folder), "compare": False}
        try:
            said[role] = run_party(
                role, settings(runtime=runtime), raw / role, tell=lambda _: None, key=["id"], kinds=["exact"]
            )
        except Exception as error:
            said[role] = error

    for _ in range(2):  # the second time without a match: the tables are there
        threads = [threading.Thread(target=act, args=(role,)) for role in places]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert said["target"].score is not None, said
        monkeypatch.setattr(key_matching, "match_keys", None)
    ledger = json.loads((raw / FOLDER / "ledger.json").read_text())
    assert [entry[0] for entry, _ in ledger["entries"]].count("match") == 2
    assert not (raw / "target" / FOLDER).exists()  # it lies beside the raw table
    pandas.read_csv("shop.csv").drop(columns=["id", "paid"])[::-1].to_csv("new.csv", index=False)
    assert main(["predict", "target", "new.csv", "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)["predictions"]["score"]
    assert scores[::-1] == pytest.approx(pandas.read_csv("target/target/scores.csv")["score"].tolist())


def transfer_together(
    raw: Path, monkeypatch, lives: dict[str, float], resumed: tuple[str, ...] = ()
) -> dict[str, object]:
    """Both parties' commands, over one channel of such lives: their results, or how they ended."""
    ends = dict(zip(("server", "bank"), Mortal.pair(), strict=True))
    for name, channel in ends.items():
        channel.life = lives.get(name, math.inf)
    monkeypatch.setattr(transfer_runs, "open_channel", lambda given, *_: ends[given.party])
    ended: dict[str, object] = {}

    def act(role: str, party: str) -> None:
        runtime = {"credentials": f"kit/{party}", "compare": False, "timeout": 20}
        try:
            if party in resumed:
                ended[party] = transfer_runs.resume(raw / role, tell=lambda _: None)
                return
            ended[party] = run_party(
                role, settings(runtime=runtime), raw / role, tell=lambda _: None, key=["id"], kinds=["exact"]
            )
        except (PiebaldError, Killed) as error:
            ended[party] = error
            ends[party].close()

    threads = [threading.Thread(target=act, args=given) for given in (("target", "server"), ("source", "bank"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended


MESSAGES = 14  # sent or received by one party, from the first one to the first step


@pytest.mark.full
@pytest.mark.parametrize("victim", ["server", "bank"])
@pytest.mark.parametrize("life", range(MESSAGES + 1))
def test_either_party_may_be_killed_at_any_message_of_the_match_and_of_the_first_handshake(
    raw, monkeypatch, victim, life
):
    """The last message of the match left one side without its match, and the other one waiting for it."""
    pytest.importorskip("rbcl")
    import torch._dynamo  # noqa: F401  # see above

    credentials(Path("kit"))
    ended = transfer_together(raw, monkeypatch, {victim: life})
    assert isinstance(ended[victim], Killed)
    assert isinstance(ended["bank" if victim == "server" else "server"], PartyEnded)
    again = transfer_together(raw, monkeypatch, {})
    assert again["server"].score is not None, again
    assert again["bank"].steps == 2, again
    assert not list(raw.rglob("*.match"))
    ledger = json.loads((raw / FOLDER / "ledger.json").read_text())
    assert [entry[0] for entry, _ in ledger["entries"]].count("match") == 2  # once at each party


@pytest.mark.full
@pytest.mark.parametrize("resumed", [("bank",), ("server", "bank")])
def test_a_run_from_raw_tables_is_resumed_beside_the_command_given_again(raw, monkeypatch, resumed):
    pytest.importorskip("rbcl")
    import torch._dynamo  # noqa: F401  # see above

    credentials(Path("kit"))
    transfer_together(raw, monkeypatch, {"bank": MESSAGES + 3})  # in the first step
    again = transfer_together(raw, monkeypatch, {}, resumed)
    assert again["server"].score is not None, again
    assert again["bank"].steps == 2, again


def test_a_table_that_was_matched_before_needs_no_handshake_of_raw_tables(raw):
    """Its `rows` say beside which table the ledger lies, which the other party may not have said of its own."""
    made = named(settings(), ["id"], ["exact"], Path("made")).files
    assert was_raw(settings(files={"source": made.source}), "source", Path("made"))
    assert not was_raw(settings(files={"source": made.source}), "source", Path("run"))
    assert not was_raw(settings(), "source", Path("run"))


def test_a_party_that_has_lost_its_named_rows_after_the_match_is_a_sentence(raw, monkeypatch):
    pytest.importorskip("rbcl")
    import torch._dynamo  # noqa: F401  # see above

    credentials(Path("kit"))
    transfer_together(raw, monkeypatch, {"bank": MESSAGES})
    assert not (raw / "source" / "source.csv.match").exists()
    (raw / "target" / "target.csv").unlink()
    ended = transfer_together(raw, monkeypatch, {})
    assert all("no checkpoint of the same step" in str(one) for one in ended.values())


def test_a_ledger_that_cannot_be_read_ends_the_connection_with_a_reason(raw, monkeypatch):
    """The other party waited, and the place to listen stayed taken for the next pair."""
    runtime = {"credentials": str(credentials(raw / "kit")["bank"].folder)}
    ours, theirs = Mortal.pair()
    monkeypatch.setattr(transfer_runs, "open_channel", lambda *_: ours)
    made = named(settings(), ["id"], ["exact"], raw / "made").files
    (raw / FOLDER).mkdir()
    (raw / FOLDER / "ledger.json").write_text("no ledger")
    with pytest.raises(SettingError, match="is no ledger that can be read"):
        run_party("source", settings(files={"source": made.source}, runtime=runtime), raw / "run", tell=lambda _: None)
    with pytest.raises(PartyEnded, match="the other party ended the run"):
        PartySession(theirs, "target", 1.0).handshake({})


@pytest.mark.parametrize("link", [False, True])
def test_a_table_that_was_there_before_is_neither_replaced_nor_trained_on(raw, link):
    """A run in the folder of raw tables would write over one that has the name of a party."""
    shop = raw / "shop.csv"
    table = raw / "target.csv"
    table.symlink_to(shop) if link else table.write_bytes(shop.read_bytes())
    before = shop.read_bytes()
    with pytest.raises(SettingError, match=r"target\.csv is there, and \. holds no transfer"):
        named(settings(), ["id"], ["exact"], Path("."))
    assert shop.read_bytes() == table.read_bytes() == before
    assert not (raw / "source.csv").exists()


def test_a_key_that_nobody_shares_leaves_no_table_behind(raw):
    """The next command, with the right key, must not go on with the match of the wrong one."""
    for name in ("bank", "shop"):
        table = pandas.read_csv(f"{name}.csv")
        table.assign(other=[f"{name}{place}" for place in range(len(table))]).to_csv(f"{name}.csv", index=False)
    with pytest.raises(SettingError, match="no key of the columns other is in both tables"):
        named(settings(), ["other"], ["exact"], Path("run"))
    assert not Path("run").exists()


def test_a_table_is_matched_again_where_its_rows_are_others(raw):
    made = named(settings(), ["id"], ["exact"], Path("run"))
    write_settings(Path("run"), made)
    assert named(settings(), ["id"], ["exact"], Path("run")).files == made.files
    pandas.read_csv("shop.csv")[1:].to_csv("shop.csv", index=False)
    with pytest.raises(SettingError, match=r"was matched from other rows than those of shop\.csv"):
        named(settings(), ["id"], ["exact"], Path("run"))


def test_a_table_with_names_survives_a_power_failure_if_the_end_of_its_match_does(tmp_path, monkeypatch):
    """A table that is on no disk beside a match that has ended there leaves one party without its rows."""
    flushed: list[bool] = []  # whether it was the folder
    monkeypatch.setattr("os.fsync", lambda handle: flushed.append(stat.S_ISDIR(os.fstat(handle).st_mode)))
    key_matching.write_named(pandas.DataFrame({"age": [3]}), ["n1"], tmp_path / "matched.csv")
    assert flushed == [False, True]


def test_rows_are_the_same_for_a_ledger_and_for_a_preparation_after_a_match(tmp_path):
    frame = pandas.DataFrame({
        "narrow": pandas.Series([0.1, 1 / 3, 2.5, None], dtype="float32"),
        "text": ["=1+1", "-", "@home", "a\rb"],
        "=odd": ["+49 (89) 1", "a\"b", None, "'quoted'"],
    })  # fmt: skip
    key_matching.write_named(frame, ["n1", "", "n2", ""], tmp_path / "matched.csv")
    owners = read_owners(tmp_path / "matched.csv")
    assert records_of(owners, "shop").tolist() == records_of(read_owners(frame), "shop").tolist()
    key_matching.write_named(frame.assign(text="\x1b[31mred"), ["", "", "", ""], tmp_path / "red.csv")
    assert set(read_owners(tmp_path / "red.csv")[0].frame["text"]) == {"[31mred"}  # as no file of text could say it
    again = owners[0].frame
    assert again["text"].tolist() == frame["text"].tolist()
    assert again["=odd"].fillna("").tolist() == frame["=odd"].fillna("").tolist()


@pytest.mark.full
def test_the_simulated_command_takes_two_tables(raw, capsys):
    file = raw / "transfer.toml"
    file.write_text(small(data={"test": 0.5}, overlap_batch=20, steps=2).text())
    labels = ["--set", "files.source.label=repaid", "--set", "files.target.label=paid"]
    words = ["transfer", str(file), "--data", "bank.csv", "--data", "shop.csv", "--key", "id", *labels]
    assert main([*words, "--check"]) == 0
    assert f"source, keys: {160} different, 0 empty" in capsys.readouterr().out
    assert not Path("run").exists()
    assert main([*words, "--out", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["score"]["auc"] > 0
    with PartyStore.open_read_only("run/target") as store:
        assert store.meta["preparation"]["key"] == "shared_id"
    assert main([*words[:4], "--key", "id"]) == 2
    assert "one table each of source and target with --data" in capsys.readouterr().err


def test_a_check_says_all_that_is_wrong_at_once(raw):
    files = {"target": {"path": "shop.csv", "key": "id", "label": "payed"}}
    with pytest.raises(SettingError) as raised:
        check(settings(files=files, runtime={"credentials": "nowhere"}), ["target"], ["id"], ["exact"])
    said = str(raised.value)
    assert "nowhere" in said
    assert "called 'payed': did you mean 'paid'" in said
    with pytest.raises(SettingError, match=r"files\.source is missing"):
        check(settings(files=files), ["source"])
    found = check(named(settings(), ["id"], ["exact"], Path("run")), ["source", "target"])
    assert found["target, of both"] == f"{KNOWN} rows"
