"""What one party of a transfer could compute about the other's rows from what both know, and cannot any more.

Each attack also runs with the secrets of a simulation, which everybody can make: there it must succeed, as it did for
all runs before parties had secrets of their own.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from piebald.vertical.chunks import common_chunks, exposures, own_chunks, unknown_numbers, warning
from piebald.vertical.kernels import LinearKernel
from piebald.vertical.loss_terms import AlignmentTerm, DiscrepancyTerm, LabelTerm
from piebald.vertical.party import Party
from piebald.vertical.party_data import PartyHolding, load
from piebald.vertical.party_network import PartyNetwork, unit_rows
from piebald.vertical.party_secret import PartySecret
from piebald.vertical.transfer_settings import TransferSettings
from tests.vertical.conftest import small

SETTINGS = small(network={"hidden": [20], "aligned": [20]}, batch=40, overlap_batch=40, method={"kind": "ftl"})
SMMD = small(method={"kind": "smmd", "kernel": "linear"})


def aligned(party: Party, x: torch.Tensor) -> np.ndarray:
    """The outputs of the last aligned layer [n, d], scaled as the method compares them."""
    rows = party.network(x)[-1].detach()
    return (unit_rows(rows) if party.settings.method.unit else rows).numpy()


def secret(settings: TransferSettings, role: str, known: bool) -> PartySecret:
    return PartySecret.simulated(settings.seed, role) if known else PartySecret.fresh()


def worst(found: np.ndarray, truth: np.ndarray) -> float:
    """Largest error of any row, relative to how far rows are from their mean."""
    return float(np.abs(found - truth).max() / np.abs(truth - truth.mean(0)).max())


def best(found: np.ndarray, truth: np.ndarray) -> float:
    """Distance of the row that is recovered best, relative to that of the mean of all rows to its nearest row."""
    nearest = np.linalg.norm(truth - truth.mean(0), axis=1).min()
    return float(np.linalg.norm(found - truth, axis=1).min() / nearest)


def features_from_hidden(network: PartyNetwork, hidden: torch.Tensor) -> np.ndarray:
    """Undo a network layer by layer: sigmoid and a matrix of at least as many units as inputs."""
    with torch.no_grad():
        for layer in reversed(network.layers):
            inner = torch.logit(hidden.clamp(1e-15, 1 - 1e-15)) - layer.bias
            hidden = torch.linalg.lstsq(layer.weight, inner.T).solution.T
    return hidden.numpy()


@pytest.mark.parametrize("known", [True, False], ids=["simulated", "own secret"])
def test_ftls_hidden_rows_do_not_give_features_at_the_first_step(known):
    """Before, the first weights came from the seed: the target read the source's features to 1e-13."""
    held = load(SETTINGS.data, 0)["source"]
    source = Party("source", held, SETTINGS, secret(SETTINGS, "source", known))
    share = AlignmentTerm("source", 0.01, 40, 20).statistics(source.view())[0]
    shape = SETTINGS.network
    guess = PartyNetwork(held.x.shape[1], shape.hidden, shape.aligned, PartySecret.simulated(SETTINGS.seed, "source"))
    error = worst(features_from_hidden(guess, torch.from_numpy(-share.constant)), held.x[source.common[0]].numpy())
    assert (error < 1e-6) is known
    assert known or error > 0.3


def sums_of_steps(party: Party, steps: int, batches: list[np.ndarray] | None) -> tuple[np.ndarray, np.ndarray]:
    """What the linear kernel tells of a party whose weights stand still, and the hidden rows behind it."""
    term = DiscrepancyTerm("source", LinearKernel(), 1.0, 20, [8])
    told = []
    for step in range(steps):
        if batches is not None:
            party.own = [batches[step]]
        party.done = step
        told.append(term.statistics(party.view())[0].constant)
    return np.array(told), aligned(party, party.data.x)


@pytest.mark.parametrize("drawn", ["anew, known", "in chunks, known", "in chunks, secret"])
def test_sums_over_many_batches_do_not_give_single_rows(drawn):
    """Before, batches were drawn anew for each step from the seed: least squares gave the rows to 1e-12."""
    held = load(SMMD.data, 0)["target"]
    steps, rng = 3 * len(held.x), np.random.default_rng(0)
    target = Party("target", held, SMMD, secret(SMMD, "target", drawn != "in chunks, secret"))
    anew = [rng.choice(len(held.x), 20, replace=False) for _ in range(steps)] if drawn == "anew, known" else None
    told, truth = sums_of_steps(target, steps, anew)
    # What the other party believes the batches to be.
    believed = anew or own_chunks(held, 20, PartySecret.simulated(0, "target"))
    members = np.zeros((steps, len(held.x)))
    for step in range(steps):
        members[step, believed[step % len(believed)]] = 1 / 20
    found = np.linalg.lstsq(members, told, rcond=None)[0]
    used = np.unique(np.concatenate(believed))
    if anew:
        assert worst(found[used], truth[used]) < 1e-9
    else:
        assert worst(found[used], truth[used]) > 0.5
        assert best(found[used], truth[used]) > 0.1  # a row in sixty secrets comes as near as 0.5 by chance


@pytest.mark.parametrize("anew", [True, False], ids=["batches drawn anew", "chunks"])
def test_the_source_does_not_read_co_occurring_rows_off_the_label_term(anew):
    """Before, the sums of label times hidden row over known, changing batches gave the rows to 1e-12."""
    held = load(SMMD.data, 0)
    labels = held["source"].y[held["source"].overlap].numpy()
    target = Party("target", held["target"], SMMD, PartySecret.fresh())
    count, steps, rng = len(held["target"].overlap), 400, np.random.default_rng(1)
    term, members, told = LabelTerm("target", 18, 8), np.zeros((steps, count)), []
    known = common_chunks(np.arange(count), 18, SMMD.seed)
    for step in range(steps):
        batch = rng.choice(count, 18, replace=False) if anew else known[step % len(known)]
        members[step, batch] = -labels[batch] / 36
        target.common = [held["target"].overlap[batch]]
        # The gradient is this plus a multiple of Phi, which falls out of the gradients at two values of Phi.
        told.append(labels[batch] @ term.statistics(target.view())[0].matrix[8:])
    found = np.linalg.lstsq(members, np.array(told), rcond=None)[0]
    with torch.no_grad():
        truth = target.network(held["target"].x[held["target"].overlap])[-1].numpy()
    used = np.unique(np.concatenate(known)) if not anew else np.arange(count)
    assert (worst(found[used], truth[used]) < 1e-9) is anew
    assert anew or best(found[used], truth[used]) > 0.5


def test_a_row_is_always_with_the_same_others_and_in_one_chunk_only():
    settings = small(steps=50)
    held = load(settings.data, 0)
    for role in ("source", "target"):
        party = Party(role, held[role], settings, PartySecret.fresh())
        chunks = [*party.own, *party.common]
        rows = np.concatenate(chunks)
        assert len(np.unique(rows)) == len(rows)
        seen = set()
        for step in range(settings.steps):
            party.done = step
            seen |= {len(party.view().layers[0]), len(party.view().common)}
        assert seen == {20, 18}


def test_the_translator_that_is_given_is_over_the_chunks_alone():
    """Over all rows, its difference to the chunks' would be the few rows that are left over."""
    settings = small()
    held = load(settings.data, 0)["source"]
    party = Party("source", held, settings, PartySecret.fresh())
    left = np.setdiff1d(held.alone, np.concatenate(party.own))
    assert 0 < len(left) < settings.batch
    before = party.summary()
    held.x[left] += 7.0
    after = party.summary()
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]


def test_both_labels_are_in_every_chunk_of_the_source():
    """Else the mean and the translator of a chunk would give the mean of very few rows, or of one."""
    held = load(SMMD.data, 0)["source"]
    for chunks in (own_chunks(held, 20, PartySecret.fresh()) for _ in range(5)):
        positives = [int((held.y[chunk] > 0).sum()) for chunk in chunks]
        assert max(positives) - min(positives) <= 1
        assert min(positives) > 1


def test_two_parties_alone_have_other_secrets_each_time(tmp_path):
    """Before, weights and batches were functions of the settings."""
    from piebald.vertical.party_store import PartyStore

    found = []
    for name in ("a", "b"):
        with PartyStore.of(tmp_path / name, "source") as store:
            found.append(store.secret())
        with PartyStore.of(tmp_path / name, "source") as store:
            assert store.secret() == found[-1]  # after a kill the same run goes on
        assert (tmp_path / name / "source" / "run.db").stat().st_mode & 0o777 == 0o600
    assert found[0] != found[1]
    assert PartySecret.simulated(0, "source") not in found
    assert "key" not in repr(found[0])


# ------------------------------------------------------------------------------------------------------------ the bound


def told_to_one_who_knows_all_weights(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """Means of the hidden rows of one chunk at each of several weights: what the linear kernel tells."""
    return torch.cat([torch.sigmoid(x @ one).mean(0) for one in weights])


@pytest.mark.parametrize(("uses", "determined"), [(1, 0), (5, 0), (7, 0), (8, 8)])
def test_within_the_bound_every_row_stays_open_even_to_one_who_knows_all_weights(uses, determined):
    """Eight rows of four features, four units: seven uses tell (8 - 1) * 4 numbers, the most that the bound allows.

    A row is determined if no small change of it can be made up for by changes of the others.
    """
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(8, 4, generator=rng, dtype=torch.float64)
    weights = [3 * torch.randn(4, 4, generator=rng, dtype=torch.float64) for _ in range(uses)]
    jacobian = torch.autograd.functional.jacobian(lambda rows: told_to_one_who_knows_all_weights(rows, weights), x)
    matrix = jacobian.reshape(uses * 4, 32).numpy()
    open_directions = np.linalg.svd(matrix)[2][np.linalg.matrix_rank(matrix, tol=1e-9) :].reshape(-1, 8, 4)
    fixed = [row for row in range(8) if not len(open_directions) or np.abs(open_directions[:, row]).max() < 1e-9]
    assert len(fixed) == determined


def kinds_of_rows() -> np.ndarray:
    """All 32 rows of five 0/1 columns."""
    return (np.arange(32)[:, None] >> np.arange(5) & 1).astype(float)


def test_one_use_of_a_chunk_of_0_1_columns_counts_all_kinds_of_row_and_the_bound_says_so():
    """Before, 0/1 columns counted as unknown numbers, and the bound held."""
    settings = small(
        batch=80,
        overlap_batch=80,
        steps=1,
        network={"hidden": [], "aligned": [40]},
        method={"kind": "smmd", "kernel": "linear"},
    )
    rng = np.random.default_rng(0)
    x = torch.from_numpy(kinds_of_rows()[rng.integers(0, 32, 180)])
    held = PartyHolding(x, None, np.arange(80), tuple("abcde"), x[:0], x[:0, 0])
    target = Party("target", held, settings, PartySecret.fresh())
    told = DiscrepancyTerm("target", LinearKernel(), 1.0, 80, [40]).statistics(target.view())[0].constant
    told = np.ldexp(np.rint(np.ldexp(told, 30)), -30)  # as fixed-point numbers
    hidden = aligned(target, torch.from_numpy(kinds_of_rows()))
    counts = 80 * np.linalg.lstsq(hidden.T, told, rcond=1e-12)[0]
    truth = np.bincount((x[target.own[0]].numpy() @ (1 << np.arange(5))).astype(int), minlength=32)
    assert np.array_equal(np.rint(counts).astype(int), truth)

    own = exposures("target", held, settings)[0]
    assert not own.holds
    assert own.most_steps == 0
    assert "from the first step on, only the secrecy of the weights" in warning("target", [own])


@settings_of_hypothesis(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(0, 60), real=st.integers(0, 4), words=st.integers(0, 4))
def test_columns_count_by_what_there_is_to_find_out(seed, rows, real, words):
    """Numbers that never repeat count fully; others at most as collections of rows, and never below nothing."""
    rng = np.random.default_rng(seed)
    numbers = torch.from_numpy(rng.normal(size=(200, real)))
    word = torch.from_numpy(np.eye(words)[rng.integers(0, words, 200)]) if words else torch.zeros(200, 0)
    count = unknown_numbers(torch.cat([numbers, word.double()], 1), rows, 31)
    kinds = max(len(np.unique(word.numpy(), axis=0)), 1) if words else 1
    collections = math.log2(math.comb(rows + kinds - 1, rows))
    assert count == pytest.approx(rows * real + collections / 31, abs=1e-6)
    assert unknown_numbers(torch.cat([numbers, word.double()], 1), rows, 53) <= count


def test_whole_numbers_and_constants_are_no_unknown_numbers():
    whole = torch.arange(400).remainder(7).double()[:, None] / 3  # as standard scores of whole numbers are
    assert 0 < unknown_numbers(whole, 100, 31) < 2
    assert unknown_numbers(torch.full((400, 3), 0.25).double(), 100, 31) == 0


def party_data(rows: int, features: int, labels: bool) -> PartyHolding:
    x = torch.randn(rows, features, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.sign(x[:, 0]) if labels else None
    return PartyHolding(x, y, np.arange(40), tuple(map(str, range(features))), x[:0], x[:0, 0])


def test_the_bound_is_told_before_the_start_and_names_steps_and_rows():
    fine, beyond = (small(steps=steps, method={"kind": "smmd", "kernel": "linear"}) for steps in (10, 400))
    held = party_data(140, 6, labels=False)
    assert warning("target", exposures("target", held, fine)) == ""
    said = warning("target", exposures("target", held, beyond))
    # 400 steps are 80 uses of each of 5 chunks; each tells 8 means and one number for the losses
    assert "400 steps tell the source" in said
    assert "about a chunk of" in said
    (own, common) = exposures("target", held, beyond)
    assert (own.disclosed, own.unknown) == (80 * 9, 19 * 6)
    assert common.unknown == 17 * 6
    assert not own.holds
    assert own.most_steps == 400 * 19 * 6 // (80 * 9)


@pytest.mark.full
def test_a_run_beyond_the_bound_warns_and_one_within_does_not(tmp_path, recwarn):
    from piebald.vertical.transfer_runs import run

    run(small())
    assert not recwarn.list
    with pytest.warns(RuntimeWarning, match=r"numbers about a chunk of 18 of the (source|target)'s co-occurring rows"):
        run(small(steps=1, method={"kind": "ftl"}))
