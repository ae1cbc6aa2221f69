"""The split model: what both parties train together is logistic regression on all columns, and both are asked."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch

from piebald import vertical
from piebald.cli import main
from piebald.core.errors import PiebaldError, RunFolderError, RuntimeFault, SettingError
from piebald.data.clients.owner import read_owners, records_of
from piebald.privacy.ledger import FOLDER, RowLedger
from piebald.vertical.loss_terms import MOST_SCORE
from piebald.vertical.party_data import PartyPreparation, load
from piebald.vertical.party_network import taylor_loss
from piebald.vertical.party_store import PartyStore
from piebald.vertical.protocol import ROLES
from piebald.vertical.transfer_runs import resume, run

from .conftest import checkpoint, encrypted, party, run_steps, small, train_both
from .test_files import KNOWN, SOURCE, apart, folder, own, people, pytestmark  # noqa: F401

SPLIT = {"kind": "split", "inputs": 16}


def split(**changes):
    return small(**({"method": SPLIT, "overlap_batch": 32, "lr": 0.05} | changes))


def files(**changes):
    return own(method={"kind": "split", "inputs": 5}, overlap_batch=15, steps=40, lr=0.1, **changes)


def weights(run_folder: Path, role: str) -> torch.Tensor:
    return checkpoint(run_folder / role, 40)["network.weight"]


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_the_protocol_is_logistic_regression_on_all_columns_by_autograd(optimizer):
    settings = split(backend="plain", steps=7, optimizer=optimizer)
    parties, steps = train_both(settings)
    held = load(settings.data, 0)
    x = {role: held[role].x.clamp(-8, 8) for role in ROLES}
    x["source"] = torch.cat([x["source"], torch.ones(len(x["source"]), 1)], 1)
    w = {role: torch.zeros(x[role].shape[1], dtype=torch.float64, requires_grad=True) for role in ROLES}
    make = torch.optim.Adam if optimizer == "adam" else torch.optim.SGD
    joint = make(list(w.values()), lr=settings.lr, weight_decay=settings.beta)
    for number in range(settings.steps):
        rows = {role: parties[role].common[number % 3] for role in ROLES}
        loss = taylor_loss(sum(x[role][rows[role]] @ w[role] for role in ROLES), held["source"].y[rows["source"]])
        for role in ROLES:
            if told := steps[role][number].losses:
                assert told["loss"] == pytest.approx(loss.item(), abs=1e-12)
        joint.zero_grad()
        loss.backward()
        joint.step()
    for role in ROLES:
        torch.testing.assert_close(parties[role].network.weight, w[role], rtol=0, atol=1e-12)


@pytest.mark.parametrize("role", ROLES)
def test_a_row_whose_share_is_clipped_moves_no_weight_whatever_the_other_party_sends(role):
    """As by autograd, where a clipped share has no slope: the other party's part of the gradient left it in."""
    settings = split(backend="plain", steps=1, optimizer="sgd", beta=0.0, lr=1.0)
    held = load(settings.data, 0)
    parties = {one: party(one, held[one], settings) for one in ROLES}
    with torch.no_grad():  # some rows of this party beyond 8, and shares of the other one at its end
        parties[role].network.weight[0] = 7.0
        parties["target" if role == "source" else "source"].network.weight[:] = 50.0
    before = {one: parties[one].network.weight.detach().clone().requires_grad_() for one in ROLES}
    rows = {one: parties[one].common[0] for one in ROLES}
    x = {one: parties[one].network.inputs(held[one].x[rows[one]]) for one in ROLES}
    sums = {one: x[one] @ before[one] for one in ROLES}
    assert 0 < int((sums[role].abs() > MOST_SCORE).sum()) < len(rows[role])
    z = sum(one.clamp(-MOST_SCORE, MOST_SCORE) for one in sums.values())
    taylor_loss(z, held["source"].y[rows["source"]]).backward()
    run_steps(settings, parties)
    torch.testing.assert_close(before[role].detach() - parties[role].network.weight, before[role].grad, rtol=0,
                               atol=1e-12)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("backend", [encrypted("bfv")])
def test_under_encryption_it_is_the_same_bit_for_bit(backend):
    found, fixed = (train_both(split(backend=kind, steps=2)) for kind in (backend, "fixed"))
    for role in ROLES:
        assert torch.equal(found[0][role].network.weight, fixed[0][role].network.weight)
        assert [step.losses for step in found[1][role]] == [step.losses for step in fixed[1][role]]


def test_the_number_of_a_partys_columns_changes_no_length():
    settings = split(steps=1, watch_every=1)
    held = load(settings.data, 0)
    one = held["target"]
    fewer = vertical.PartyHolding(x=one.x[:, :3], y=None, overlap=one.overlap, features=one.features[:3],
                                  test=one.test[:, :3], test_y=one.test_y)  # fmt: skip
    sent = [train_both(settings, data)[1]["target"][0].sent for data in (held, held | {"target": fewer})]
    assert sent[0] == sent[1]


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])  # the second one has no state to go on with
def test_a_run_gone_on_with_ends_as_one_that_was_not_interrupted(tmp_path, optimizer):
    settings = split(steps=5, checkpoint_every=2, optimizer=optimizer)
    run(settings, out=tmp_path / "calm")

    def stop(line):
        if line["step"] == 2:
            raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, PiebaldError)):
        run(settings, out=tmp_path / "stopped", watch=stop)
    again = resume(tmp_path / "stopped")
    assert again.score == vertical.result(tmp_path / "calm").score
    for role in ROLES:
        found, expected = (checkpoint(tmp_path / name / role, 5)["network.weight"] for name in ("stopped", "calm"))
        assert torch.equal(found, expected)


@pytest.mark.full
def test_it_uses_what_the_source_alone_knows_and_says_what_is_beside_it():
    settings = split(steps=60, lr=0.1, runtime={"compare": True})
    result = run(settings)
    assert set(result.baselines) >= {"FTL", "SMMD", "alpha = 0", "the joined table"}
    # within a hair of the model that sees both parties' columns, on rows that neither was trained on
    assert result.score.auc > result.baselines["the joined table"] - 0.02
    assert "target can compute these rows' labels" in result.secrecy["method"]


@pytest.mark.full
def test_scores_need_both_parties_rows_of_the_same_keys(folder, capsys):  # noqa: F811
    bank, shop = people()
    result = run(files(), out="run")
    assert result.score.auc > 0.8  # on co-occurring rows that were held out: half of them
    found = vertical.predict("run", shop, bank)
    known = found["member"].notna()
    assert known.sum() == KNOWN
    assert found.loc[~known, "score"].isna().all()
    # by hand: both shares of each person
    source, target = weights(Path("run"), "source"), weights(Path("run"), "target")
    with PartyStore.open_read_only("run/source") as store:
        prepared = PartyPreparation.model_validate(store.meta["preparation"])
        bank_x = prepared.inputs(bank)
    with PartyStore.open_read_only("run/target") as store:
        prepared = PartyPreparation.model_validate(store.meta["preparation"])
        shop_x = prepared.inputs(shop)
    theirs = dict(zip(bank["customer"], (bank_x @ source[:-1] + source[-1]).tolist(), strict=True))
    for place in np.flatnonzero(known):
        z = (shop_x[place] @ target).item() + theirs[shop["member"].iloc[place]]
        assert found["score"].iloc[place] == pytest.approx(1 / (1 + np.exp(-z)), rel=1e-9)
    # rows in another order and by the command
    shop.sample(frac=1, random_state=3).to_csv("shop.csv", index=False)
    assert main(["predict", "run", "shop.csv", "--source-rows", "bank.csv", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["predictions"]
    by_key = dict(zip(found["member"], found["score"], strict=True))
    shown = [(key, score) for key, score in zip(said["member"], said["score"], strict=True) if key == key and key]
    assert len(shown) == KNOWN
    for key, score in shown:
        assert score == pytest.approx(by_key[float(key)], rel=1e-9)


@pytest.mark.full
def test_new_tables_are_read_as_those_of_training_were(folder):  # noqa: F811
    """A table that only its rules can read, with a key among numbers that is written in two ways."""
    bank, shop = people()
    written = bank.assign(income=[f"{value:.3f}".replace(".", ",") for value in bank["income"]])
    written["customer"] = [
        str(key) if key == 1007 else None if key != key else f"{key:.0f}" for key in bank["customer"]
    ]
    written.to_csv("written.csv", index=False)
    rules = {"parse": {"income": "decimal comma"}}
    settings = files(source={**SOURCE, "path": "written.csv", "prepare": rules})
    with pytest.raises(SettingError, match="income"):
        read_owners(Path("written.csv"))
    run(settings, out="ruled")
    bank.assign(income=bank["income"].round(3)).to_csv("clean.csv", index=False)
    run(files(source={**SOURCE, "path": "clean.csv"}), out="clean")
    shop.to_csv("shop.csv", index=False)
    found = [vertical.predict(name, "shop.csv", table) for name, table in
             (("ruled", "written.csv"), ("clean", "clean.csv"))]  # fmt: skip
    assert found[0]["score"].notna().sum() == KNOWN
    np.testing.assert_allclose(found[0]["score"], found[1]["score"], rtol=1e-6)


def both_predict(folders, tables):
    said = {}

    def one(role):
        try:
            said[role] = vertical.predict(folders[role], tables[role])
        except PiebaldError as error:
            said[role] = error

    threads = [threading.Thread(target=one, args=(role,)) for role in ROLES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


@pytest.mark.full
def test_two_parties_apart_predict_as_one_user_would_and_each_telling_is_counted(folder):  # noqa: F811
    bank, shop = people()
    together = run(files(), out="both")
    apart(files(target=False), files(source=False))
    folders = {role: f"run of {role}" for role in ROLES}
    assert vertical.result("run of target").score == together.score
    shop.to_csv("shop.csv", index=False)
    said = both_predict(folders, {"source": "bank.csv", "target": "shop.csv"})
    expected = vertical.predict("both", "shop.csv", "bank.csv")
    pandas.testing.assert_frame_equal(said["target"], expected)
    assert list(said["source"].columns) == ["row", "customer"]
    records = records_of(read_owners(Path("bank.csv")), "source")
    # 40 steps on two chunks, the shares of the held-out rows, and those of the new ones
    counts = {"transfer_common": 20, "transfer_shares": 2}
    assert RowLedger(records, [folder / FOLDER], "server").counts == counts
    entries = json.loads((folder / FOLDER / "ledger.json").read_text())["entries"]
    assert {digest for (kind, _, _, _, digest, *_), _ in entries if kind == "transfer_shares"} == {"bank"}
    bank[bank["customer"] != 1000].to_csv("fewer.csv", index=False)
    said = both_predict(folders, {"source": "fewer.csv", "target": "shop.csv"})
    assert "tables with the same keys" in str(said["source"])
    assert RowLedger(records, [folder / FOLDER], "server").counts == counts  # nothing was told


def test_what_cannot_be_counted_is_not_handed_over(monkeypatch):
    """Before anything of it is sent, and once where both repeat it after an interruption."""
    told: list[tuple[str, float]] = []

    def spend(kind, noise):
        told.append((kind, noise))
        if kind == "shares":
            raise RunFolderError("no space left")

    settings = split(steps=4)
    held = load(settings.data, 0)
    parties = {one: party(one, held[one], settings) for one in ROLES}
    parties["source"].ledger._spend = spend
    with pytest.raises(PiebaldError, match=r"no space left|ended the run"):
        run_steps(settings, parties)
    assert told == [("common", 0.0), ("common", 0.0), ("shares", 0.0)]  # 4 steps on 3 chunks: two uses of the first
    assert parties["target"].phi is None


@pytest.mark.full
@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda bank, shop: vertical.predict("run", shop), "needs source_rows, the source's table"),
        (lambda bank, shop: vertical.predict("run", shop, bank[bank["customer"] != 1000]), "must have the same keys"),
        (lambda bank, shop: vertical.predict("run", shop.drop(columns="member"), bank), "column"),
        (lambda bank, shop: vertical.predict("smmd", shop, bank), "predicts alone"),
    ],
)
def test_what_cannot_be_scored_is_one_sentence(folder, act, said):  # noqa: F811
    run(files(), out="run")
    run(own(), out="smmd")
    with pytest.raises(SettingError, match=said):
        act(*people())


@pytest.mark.full
def test_nothing_serves_a_split_model_and_no_party_scores_alone(folder, capsys):  # noqa: F811
    run(files(), out="run")
    assert main(["serve", "run"]) == 2
    assert "which needs both parties: use piebald predict" in capsys.readouterr().err
    with pytest.raises(RuntimeFault, match="both parties' shares"):
        train_both(split(steps=1))[0]["target"].predict(torch.zeros(1, 15))


@pytest.mark.parametrize("kind", ["split", "ftl"])
def test_noise_where_there_is_none_is_a_sentence_that_says_what_has_it(kind):
    with pytest.raises(SettingError, match=rf"method '{kind}': there is no noise, .* take method = 'smmd'"):
        small(method={"kind": kind, "noise": 3.0})


def test_too_many_inputs_and_too_few_rows_are_refused():
    with pytest.raises(SettingError, match=r"overlap_batch must be at least 32, twice method\.inputs"):
        split(overlap_batch=20)
    with pytest.raises(SettingError, match=r"the source has 15 inputs, got method\.inputs = 15"):
        run(split(method={"kind": "split", "inputs": 15}))


@pytest.mark.parametrize(("rows", "solved"), [(10, True), (40, False)])
def test_the_first_gradient_gives_labels_of_fewer_rows_than_columns(rows, solved):
    """What the target is told at weights of 0 is the sum of its rows by their labels: so batches must be large."""
    settings = split(backend="plain", steps=1, overlap_batch=rows, few_rows=True, optimizer="sgd")
    parties, _ = train_both(settings)
    source, target = parties["source"], parties["target"]
    labels = source.data.y[source.common[0]].numpy()
    x = target.network.inputs(target.data.x[target.common[0]]).numpy()
    told = -target.network.weight.detach().numpy() / settings.lr  # its own part of the gradient is 0 at weights of 0
    guess = np.linalg.lstsq(x.T, -2 * rows * told, rcond=None)[0]
    assert np.allclose(guess, labels, atol=1e-6) == solved
