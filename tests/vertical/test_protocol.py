"""Two parties that exchange messages train as one program that sees everything would."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from piebald.core.errors import SettingError
from piebald.vertical.kernels import GaussianKernel, PolynomialKernel, mmd2
from piebald.vertical.party_data import load
from piebald.vertical.party_network import taylor_loss, translator
from piebald.vertical.protocol import ROLES
from piebald.vertical.transfer_results import transfer_score
from piebald.vertical.transfer_settings import TransferSettings
from tests.scripts import loaded

from .conftest import encrypted, small, train_both

baselines = loaded(Path(__file__).parents[2] / "benchmarks" / "smmd" / "baselines.py")
PRINTED = [  # the kernels of the paper's tables 1 to 3
    "linear", {"kind": "polynomial", "c": 0, "degree": 2}, {"kind": "polynomial", "c": 0, "degree": 3},
    {"kind": "gaussian", "sigma": 1}, {"kind": "gaussian", "sigma": 2},
]  # fmt: skip
SMMD = [
    {"kind": "smmd", "kernel": "linear"},
    {"kind": "smmd", "kernel": {"kind": "polynomial", "c": 0.5}},
    {"kind": "smmd", "kernel": {"kind": "polynomial", "degree": 3}, "normalize": False},
    {"kind": "smmd", "kernel": {"kind": "gaussian", "sigma": 2}, "alpha": 3},
    {"kind": "smmd", "kernel": {"kind": "gaussian", "sigma": 2}, "alpha": 3, "rows": "common"},
]


def weights(party) -> torch.Tensor:
    return torch.cat([one.detach().ravel() for one in party.network.parameters()])


@pytest.mark.parametrize("method", SMMD, ids=lambda method: str(method["kernel"]))
@pytest.mark.parametrize("aligned", [[8], [6, 8]], ids=["one layer", "two layers"])
def test_the_protocol_is_the_joint_loss_by_autograd(method, aligned):
    settings = small(backend="plain", method=method, network={"hidden": [10], "aligned": aligned})
    parties, _ = train_both(settings)
    for party, reference in zip(
        parties.values(), baselines.train_jointly(load(settings.data, 0), settings, exact=False), strict=True
    ):
        torch.testing.assert_close(weights(party), weights(reference), rtol=0, atol=1e-12)


def test_another_optimiser_and_few_rows_train_as_the_joint_loss_does():
    """What the paper does not print can be said: plain gradient steps, and batches that reveal rows."""
    settings = small(backend="plain", method=SMMD[0], optimizer="sgd", batch=15, overlap_batch=10, few_rows=True)
    parties, _ = train_both(settings)
    for party, reference in zip(
        parties.values(), baselines.train_jointly(load(settings.data, 0), settings, exact=False), strict=True
    ):
        torch.testing.assert_close(weights(party), weights(reference), rtol=0, atol=1e-12)
    adam, _ = train_both(settings.model_copy(update={"optimizer": "adam"}))
    assert not torch.allclose(weights(adam["source"]), weights(parties["source"]), rtol=0, atol=1e-3)


def test_ftl_is_its_joint_loss_by_autograd():
    settings = small(backend="plain", steps=1, own=0, beta=0, method={"kind": "ftl", "kappa": 0.3})
    parties, _ = train_both(settings)
    fresh = train_both(small(backend="plain", steps=1, own=0, beta=0, lr=1e-300, method={"kind": "ftl"}))[0]
    for party in fresh.values():
        party.done = 0
        party.optimizer.zero_grad()
    views = [fresh[role].view() for role in ROLES]
    loss = taylor_loss(views[1].common @ views[0].phi, views[0].labels)
    (loss - 0.3 * (views[0].common * views[1].common).sum(1).mean()).backward()
    for role in ROLES:
        for moved, start in zip(parties[role].network.parameters(), fresh[role].network.parameters(), strict=True):
            # Adam's first step has the size lr and the sign of the gradient
            step = -0.01 * start.grad / (start.grad.abs() + 1e-8)
            torch.testing.assert_close(moved.detach() - start.detach(), step, rtol=0, atol=1e-9)


@pytest.mark.full
@pytest.mark.parametrize("backend", [encrypted("bfv")])
@pytest.mark.parametrize(
    "method", [*({"kind": "smmd", "kernel": kernel} for kernel in PRINTED), {"kind": "ftl"}], ids=str
)
def test_encrypted_training_is_fixed_point_training_bit_for_bit(backend, method):
    found, fixed = (train_both(small(backend=kind, method=method, steps=2)) for kind in (backend, "fixed"))
    for role in ROLES:
        assert torch.equal(weights(found[0][role]), weights(fixed[0][role]))
        assert [step.losses for step in found[1][role]] == [step.losses for step in fixed[1][role]]


def test_watched_losses_are_those_of_the_batches():
    settings = small(backend="plain", lr=1e-300, method=SMMD[3])
    parties, steps = train_both(settings)
    for number in (0, 2):
        for party in parties.values():
            party.done = number
        source, target = (parties[role].view() for role in ROLES)
        loss = taylor_loss(target.common @ source.phi, source.labels)
        moment = mmd2(GaussianKernel(sigma=2), source.layers[0], target.layers[0], exact=False)
        for role in ROLES:
            found = steps[role][number].losses
            assert found["loss"] == pytest.approx(loss.item(), abs=1e-12)
            assert found["mmd2"] == pytest.approx(moment.item(), abs=1e-12)
    assert steps["source"][1].losses is None


def test_the_discrepancy_of_eq_5_is_that_of_the_co_occurring_rows():
    """Its sums written out over the N_st co-occurring rows, and not over those of each party's own."""
    method = {"kind": "smmd", "kernel": "linear", "rows": "common", "normalize": False}
    settings = small(backend="plain", lr=1e-300, steps=1, method=method)
    parties, steps = train_both(settings)
    hidden = [party.network(party.data.x[party.common[0]])[-1].detach().numpy() for party in parties.values()]
    count = len(hidden[0])
    assert count == settings.overlap_batch != settings.batch
    total = sum(
        x[0] @ y[0] + x[1] @ y[1] - 2 * x[0] @ y[1]
        for x in zip(*hidden, strict=True)
        for y in zip(*hidden, strict=True)
    )
    assert steps["source"][0].losses["mmd2"] == pytest.approx(total / count**2, abs=1e-12)
    own, common = (
        (term.disclosed_own, term.disclosed_common)
        for term in (small(method={"kind": "smmd"}).terms("source")[1], settings.terms("source")[1])
    )
    assert own[0] > own[1] == 0 == common[0] < common[1]


def test_both_parties_count_the_same_bytes():
    _, steps = train_both(small())
    for source, target in zip(steps["source"], steps["target"], strict=True):
        assert (source.sent, source.received) == (target.received, target.sent)
        assert source.sent > 0


def test_the_target_predicts_alone_with_the_translator_it_was_given():
    parties, _ = train_both(small())
    source, target = parties["source"], parties["target"]
    phi, rate = source.summary()
    assert target.rate == rate
    scores = target.predict(target.data.test)
    torch.testing.assert_close(scores, torch.sigmoid(target.network(target.data.test)[-1] @ phi).detach())
    fresh = train_both(small(steps=1))[0]["target"]
    fresh.phi = None
    with pytest.raises(Exception, match="only after training"):
        fresh.predict(target.data.test)


def test_transfer_beats_the_source_alone_on_real_rows():
    settings = small(steps=60, data={"name": "breast_cancer", "overlap": 100}, batch=64, overlap_batch=64)
    target = train_both(settings)[0]["target"]
    score = transfer_score(target.predict(target.data.test), target.data.test_y, target.rate)
    assert score.auc > 0.95
    assert baselines.source_only(load(settings.data, 0), settings).auc < score.auc


def test_the_translator_is_the_mean_of_signed_rows():
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 3.0], [0.0, 2.0]], dtype=torch.float64)
    labels = torch.tensor([1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    assert translator(rows, labels, balanced=False).tolist() == [0.25, -1.5]
    assert translator(rows, labels, balanced=True).tolist() == [0.5, -1.0]
    assert translator(rows, torch.ones(4, dtype=torch.float64), balanced=True).tolist() == [0.25, 1.5]


def test_the_taylor_loss_is_the_second_order_expansion():
    scores = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    exact = torch.nn.functional.softplus(-scores).mean()
    for loss in (taylor_loss(scores, torch.ones(1, dtype=torch.float64)), exact):
        (first,) = torch.autograd.grad(loss, scores, create_graph=True)
        assert loss.item() == pytest.approx(np.log(2))
        assert first.item() == pytest.approx(-0.5)
    assert taylor_loss(torch.tensor([2.0]), torch.tensor([-1.0])).item() == pytest.approx(np.log(2) + 1 + 0.5)


def test_noise_is_added_and_stated():
    """How it is drawn, what it covers and what is stated: `test_transfer_privacy`."""
    method = {"kind": "smmd", "kernel": "gaussian", "noise": 2.0}
    noisy, quiet = (train_both(small(steps=1, method=one))[0]["source"] for one in (method, {"kind": "smmd"}))
    assert not torch.equal(weights(noisy), weights(quiet))
    said = small(method=method).method.statement("source", 3)
    assert "differentially private for one of its own rows replaced, another label included, by 3 releases" in said
    assert "nothing is claimed" in small().method.statement("source", 3)


def test_rows_that_leave_the_range_of_the_expansion_are_warned_of():
    settings = small(method={"kind": "smmd", "kernel": {"kind": "gaussian", "sigma": 0.2}})
    with pytest.warns(RuntimeWarning, match=r"leave the range of the Gaussian's expansion: \d+% of its pairs"):
        train_both(settings)


def test_holdings_share_rows_where_they_overlap_and_nothing_else():
    settings = small(data={"name": "breast_cancer", "overlap": 50, "common": ["mean area"]})
    held = load(settings.data, 3)
    source, target = held["source"], held["target"]
    assert set(source.features) & set(target.features) == {"mean area"}
    area = [one.x[one.overlap][:, one.features.index("mean area")] for one in (source, target)]
    torch.testing.assert_close(*area)
    assert len(source.x) + len(target.x) - 50 + len(source.test) == 569
    assert target.y is None
    torch.testing.assert_close(source.test_y, target.test_y)


def test_a_larger_table_is_divided_in_its_natural_way(monkeypatch):
    from piebald.data import DataSet
    from piebald.vertical.party_data import division

    names = ["LIMIT_BAL", "SEX", "EDUCATION", "MARRIAGE", "AGE", "PAY_0", "BILL_AMT1", "PAY_AMT1"]
    credit = DataSet(name="credit", x=torch.zeros(3, 8), y=torch.tensor([0, 1, 0]), classes=["a", "b"], features=names)
    own, both = division(credit)
    assert "PAY_0" not in own
    assert {"BILL_AMT1", "PAY_AMT1"} < set(own)
    assert both == ("LIMIT_BAL", "SEX", "EDUCATION", "MARRIAGE", "AGE")


def test_polynomials_without_normalised_rows_keep_their_precision():
    settings = small(method={"kind": "smmd", "kernel": {"kind": "polynomial", "degree": 3}, "normalize": False})
    fixed, plain = (train_both(settings.model_copy(update={"backend": made})) for made in (settings.backend, _plain()))
    torch.testing.assert_close(weights(fixed[0]["source"]), weights(plain[0]["source"]), rtol=0, atol=0.01)
    assert isinstance(settings.method.kernel, PolynomialKernel)


def _plain():
    from piebald.vertical.encryption import PlainBackend

    return PlainBackend()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch": 15}, "batch must be at least 16, twice the units of the widest aligned layer, got 15"),
        ({"overlap_batch": 15}, "overlap_batch must be at least 16"),
        ({"overlap_batch": 101}, r"overlap_batch must be at most data.overlap = 100"),
        ({"method": {"kind": "smmd", "noise": 1.0, "rows": "common"}}, 'it needs rows = "own", got "common"'),
        ({"method": {"kind": "smmd", "kernel": {"kind": "gausian"}}}, "did you mean 'gaussian'"),
        ({"method": {"kind": "smmd", "kernel": {"kind": "polynomial", "degree": 4}}}, "2 or 3"),
        ({"backend": {"kind": "ckks"}}, "there is no backend 'ckks'"),
        ({"network": {"aligned": [0]}}, "at least 1"),
        ({"stpes": 3}, "stpes"),
    ],
)
def test_what_cannot_work_is_refused_with_its_reason(changes, said):
    with pytest.raises(SettingError, match=said):
        small(**changes)


def test_settings_survive_their_file(tmp_path):
    settings = small(method=SMMD[1], backend={"kind": "fixed"})
    (tmp_path / "a.toml").write_text(settings.text())
    assert TransferSettings.load(tmp_path / "a.toml").agreed() == settings.agreed()
