"""Packed updates: what they claim, against plain programs; what they may stand beside; what they cost."""

from __future__ import annotations

import math
import re
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from piebald import recipes, testing
from piebald.contracts.data import ModelSpec
from piebald.core.errors import SettingError
from piebald.core.objective import OBJECTIVES
from piebald.core.parameters import Layout
from piebald.federation.site.policy import Policy
from piebald.methods.transforms import LowRank, Qsgd, RandomK, Sign, TopK, Zstandard, bit_fields, positions
from piebald.methods.transforms.compression import MEMORY, Compressor, WireContext
from tests.fakes import classified, client_work, few, seeded, simulate

MODEL = seeded(lambda: nn.Sequential(nn.Linear(9, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
SPEC = ModelSpec(MODEL, Layout.of(MODEL), torch.zeros(0), OBJECTIVES["classification"], 1, (9,), (3,))
TRAINED = SPEC.layout.shared_trained
CLIENTS = classified(9, 3, 5, features=9)
WITH_MEMORY = [TopK(share=0.1), RandomK(share=0.1), Sign(), LowRank(rank=1)]


def context(version: int, client: int = 0) -> WireContext:
    return WireContext(SPEC.layout, SPEC.seed, client, version)


def changes(count: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(SPEC.layout.shared, generator=draw) for _ in range(count)]


def sent(compressor: Compressor, given: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """What arrives of changes, one after another, and the client's state after them."""
    state, received = compressor.initial_state(SPEC), []
    for version, change in enumerate(given):
        made = compressor.compress(change, state, context(version))
        received.append(compressor.decompress(made.packed, context(version)))
        state = dict(made.state)
    return received, state


@pytest.mark.parametrize("compressor", [*WITH_MEMORY, Qsgd(), Zstandard()], ids=lambda one: one.kind)
def test_no_more_bytes_are_looked_at_than_twice_the_change_and_a_kilobyte(compressor: Compressor) -> None:
    """At the bound what is wrong is another thing: bytes are read, and found to be no packed change."""
    most = 2 * 4 * SPEC.layout.shared + 1024
    for count, wrong in ((most, r"^(?!at most)"), (most + 1, f"^at most {most:,} bytes are due")):
        with pytest.raises(ValueError, match=wrong):
            compressor.decompress(torch.full((count,), 255, dtype=torch.uint8), context(0))


# --------------------------------------------------------------------------------------------------- bytes of positions


@settings(few, max_examples=60)
@given(st.data())
def test_positions_are_read_back_and_take_no_more_than_any_form(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 3000))
    count = data.draw(st.integers(0, total))
    places = np.sort(np.random.default_rng(count).choice(total, count, replace=False))
    packed = positions.pack(places, total)
    assert np.array_equal(positions.unpack(packed, count, total), places)
    assert len(packed) <= 1 + min(4 * count, -(-total // 8))


def test_each_form_is_the_shortest_somewhere() -> None:
    crowded = np.flatnonzero(np.arange(8000) % 2)
    apart = np.array([2_000_000_000])
    spread = np.sort(np.random.default_rng(0).choice(10_000_000, 100_000, replace=False))
    for places, total, form in ((crowded, 8000, 0), (apart, 1 << 31, 1), (spread, 10_000_000, 2)):
        packed = positions.pack(places, total)
        assert packed[0] == form
        assert np.array_equal(positions.unpack(packed, len(places), total), places)
    # 1 in 100 positions has an entropy of 8.08 bits, which no form can be below
    bits = 8 * len(positions.pack(spread, 10_000_000)) / len(spread)
    assert -math.log2(0.01) - 99 * math.log2(0.99) <= bits < 8.2


def numbers(*values: int) -> bytes:
    return b"\x01" + np.array(values, dtype="<i4").tobytes()


GAPS = {"low": bit_fields.pack(np.array([1, 0, 1]), 1).tobytes(), "high": bytes([0b11111000])}


@pytest.mark.parametrize(
    "body",
    [
        b"", b"\x03\x00\x00", numbers(0, 1, 38), numbers(-1, 1, 2), numbers(0, 1, 1), numbers(2, 1, 0),
        numbers(0, 1),
        numbers(0, 1, 2, 3), numbers(0, 1, 2)[:-1], b"\x00\x07", b"\x00\x0f\x00\x00\x00\x00",
        b"\x00\x03\x00\x00\x00\x00",
        b"\x00\x03\x00\x00\x00\x80", b"\x02", b"\x02\x01", b"\x02\x3f" + bytes(24), b"\x02\xff" + bytes(96),
        b"\x02\x01" + GAPS["low"] + b"\xff" * 40 + GAPS["high"], b"\x02\x01" + GAPS["low"] + GAPS["high"] + b"\xff",
        b"\x02\x01\xff" + GAPS["high"],
    ],
)  # fmt: skip
def test_positions_of_others_are_checked(body: bytes) -> None:
    """Out of range, twice, in another order, too many, too few, and sums that would wrap around."""
    with pytest.raises(ValueError):  # noqa: PT011 - every one of its sentences
        positions.unpack(np.frombuffer(body, dtype=np.uint8), 3, 38)


def test_gaps_are_read_where_they_fit() -> None:
    body = b"\x02\x01" + GAPS["low"] + GAPS["high"]
    assert positions.unpack(np.frombuffer(body, dtype=np.uint8), 3, 40).tolist() == [1, 2, 4]


# ------------------------------------------------------------------------------------------------------ what they claim


@pytest.mark.parametrize("compressor", WITH_MEMORY, ids=lambda made: made.kind)
def test_what_was_sent_and_what_is_kept_add_up_to_all_changes(compressor: Compressor) -> None:
    given = changes(20)
    received, state = sent(compressor, given)
    total, arrived = sum(given).double(), sum(received).double()
    kept = arrived[:TRAINED] + state[MEMORY].double()
    torch.testing.assert_close(kept, total[:TRAINED], atol=2e-5, rtol=1e-5)
    assert torch.equal(torch.stack(received)[:, TRAINED:], torch.stack(given)[:, TRAINED:])  # buffers, whole
    assert float(state[MEMORY].abs().max()) > 0.1


@pytest.mark.parametrize("compressor", WITH_MEMORY, ids=lambda made: made.kind)
def test_without_memory_nothing_is_kept_and_a_clip_holds_where_it_is_said_to(compressor: Compressor) -> None:
    forgetful = type(compressor)(**{**compressor.model_dump(), "error_feedback": False})
    received, state = sent(forgetful, given := changes(10))
    assert MEMORY not in state
    longer = [float(a.norm()) > float(b.norm()) * (1 + 1e-6) for a, b in zip(received, given, strict=True)]
    assert forgetful.keeps_clip or any(longer)
    assert not (forgetful.keeps_clip and any(longer))
    assert not compressor.keeps_clip


def test_top_k_is_the_plain_program() -> None:
    """Mem-SGD of Stich et al. 2018, algorithm 1, number by number."""
    given = changes(5)
    received, _ = sent(TopK(share=0.07), given)
    memory, k = [0.0] * TRAINED, round(0.07 * TRAINED)
    for change, got in zip(given, received, strict=True):
        wanted = [np.float32(a) + np.float32(b) for a, b in zip(change[:TRAINED].tolist(), memory, strict=True)]
        chosen = sorted(range(TRAINED), key=lambda i: -abs(wanted[i]))[:k]
        expected = [float(wanted[i]) if i in chosen else 0.0 for i in range(TRAINED)]
        memory = [float(a - np.float32(b)) for a, b in zip(wanted, expected, strict=True)]
        assert got[:TRAINED].tolist() == expected


def test_of_equal_numbers_top_k_sends_the_first() -> None:
    change = torch.ones(SPEC.layout.shared)
    (got,), _ = sent(TopK(share=0.1), [change])
    assert np.flatnonzero(got[:TRAINED].numpy()).tolist() == list(range(round(0.1 * TRAINED)))


def test_sign_is_the_plain_program() -> None:
    """EF-signSGD of Karimireddy et al. 2019, algorithm 1, tensor by tensor."""
    given = changes(4)
    received, _ = sent(Sign(), given)
    memory = torch.zeros(TRAINED)
    for change, got in zip(given, received, strict=True):
        wanted, expected = change[:TRAINED] + memory, torch.zeros(TRAINED)
        for slot in SPEC.layout.slots:
            if not slot.buffer:
                part = wanted[slot.start : slot.stop]
                expected[slot.start : slot.stop] = part.abs().mean() * part.sign()
        memory = wanted - expected
        torch.testing.assert_close(got[:TRAINED], expected)


def test_a_tensor_without_numbers_has_no_sign() -> None:
    """Nor a scale, which would be 0 / 0."""
    model = nn.Sequential(nn.Linear(3, 2), nn.PReLU(0), nn.Linear(2, 2))
    layout = Layout.of(model)
    where, change = WireContext(layout, 1, 0, 0), torch.ones(layout.shared)
    packed = Sign(error_feedback=False).compress(change, {}, where).packed
    assert Sign().decompress(packed, where).equal(change)
    assert packed.numel() == 4 * 4 + math.ceil(layout.shared / 8)  # of four tensors with numbers


def test_low_rank_is_the_plain_program_and_finds_a_matrix_of_its_rank() -> None:
    """PowerSGD of Vogels et al. 2019, algorithm 1, for one worker; a matrix of rank 2 is sent to rounding."""
    weight = next(slot for slot in SPEC.layout.slots if slot.shape == (8, 9))
    given = changes(3)
    state, memory = LowRank(rank=2).initial_state(SPEC), torch.zeros(8, 9)
    q = state["compression/basis"][: 9 * 2].view(9, 2)
    for change, got in zip(given, sent(LowRank(rank=2), given)[0], strict=True):
        wanted = change[weight.start : weight.stop].view(8, 9) + memory
        p, _ = torch.linalg.qr(wanted @ q)
        q = wanted.T @ p
        memory = wanted - p @ q.T
        torch.testing.assert_close(got[weight.start : weight.stop].view(8, 9), p @ q.T, atol=1e-5, rtol=1e-4)
    exact = changes(1)[0]
    exact[weight.start : weight.stop] = (torch.randn(8, 2) @ torch.randn(2, 9)).flatten()
    (got,), _ = sent(LowRank(rank=2), [exact])
    torch.testing.assert_close(got[weight.start : weight.stop], exact[weight.start : weight.stop], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("bits", "bucket"), [(2, 1000), (3, 16), (8, 64)])
def test_qsgd_is_unbiased_with_the_variance_of_its_lemma(bits: int, bucket: int) -> None:
    """Alistarh et al. 2017, lemma 3.1; the mean of n draws is within 5 of its own standard errors everywhere."""
    compressor, change, draws = Qsgd(bits=bits, bucket=bucket), changes(1)[0], 600
    got = torch.stack([
        compressor.compress(change, {}, context(version)).change[:TRAINED] for version in range(draws)
    ]).double()  # fmt: skip
    exact, s = change[:TRAINED].double(), compressor.levels
    error = (got.mean(0) - exact).abs()
    lengths = torch.cat([part.norm().expand(len(part)) for part in exact.split(bucket)])
    # each number is a coin between two levels: its variance is at most a quarter of a squared step
    assert bool((error <= 5 * lengths / s / 2 / math.sqrt(draws)).all())
    for part, seen in zip(exact.split(bucket), got.split(bucket, dim=1), strict=True):
        bound = min(len(part) / s**2, math.sqrt(len(part)) / s) * float(part.norm()) ** 2
        assert float((seen - part).square().sum(1).mean()) <= bound


def test_what_is_packed_badly_arrives_all_the_same() -> None:
    """Settings with which more bytes are sent than without packing."""
    layout = Layout.of(nn.Linear(100, 50))
    change, wire = torch.randn(layout.shared), WireContext(layout, 1, 0, 0)
    compressor = Qsgd(bits=16, bucket=1)
    made = compressor.compress(change, {}, wire)
    assert len(made.packed) == 6 * layout.shared
    torch.testing.assert_close(compressor.decompress(made.packed, wire), change)


def test_random_k_without_memory_is_unbiased_and_draws_anew() -> None:
    compressor, change, draws = RandomK(share=0.25, error_feedback=False), changes(1)[0], 800
    got = torch.stack([compressor.compress(change, {}, context(version)).change for version in range(draws)]).double()
    error = (got.mean(0) - change)[:TRAINED].abs()
    deviation = change[:TRAINED].abs().double() * math.sqrt(3 / draws)  # of a coin that is 4 x with probability 1/4
    assert bool((error <= 5 * deviation + 1e-6).all())
    other = compressor.compress(change, {}, context(0, client=1)).change
    assert not torch.equal(other != 0, got[0] != 0)


# ------------------------------------------------------------------------------------------------------- in a whole run


@pytest.mark.parametrize(
    "nothing_lost", [TopK(share=1.0), RandomK(share=1.0), LowRank(rank=8), Zstandard()], ids=lambda made: made.kind
)
def test_without_effect_it_is_fedavg_bit_for_bit(nothing_lost: Compressor) -> None:
    plain = recipes.fedavg(cohort=3, batch=3)
    runs = [simulate(one, CLIENTS, MODEL, rounds=4) for one in (plain, plain.with_(transforms=[nothing_lost]))]
    vectors = [run.work.layout.flatten(run.model()) for run in runs]
    assert torch.equal(*vectors)
    if nothing_lost.kind != "zstandard":  # which takes other bytes, of course
        assert [row["bytes_up"] for row in runs[0].results] == [row["bytes_up"] for row in runs[1].results]


def test_only_the_shared_part_is_packed_and_every_byte_is_counted() -> None:
    """HDAFL's classifier stays; of the 96 trained numbers that are shared 10 are sent, and the 16 of batch norm."""
    recipe = recipes.hdafl(cohort=1.0, batch=3).with_(transforms={"kind": "sign"})
    run = simulate(recipe, CLIENTS, MODEL, rounds=2)
    trained, buffers, tensors = 9 * 8 + 8 + 16, 16, 4
    assert {row["bytes_up"] for row in run.results} == {4 * tensors + trained // 8 + 4 * buffers}
    assert {row["bytes_down"] for row in run.rounds[1:]} == {3 * 4 * (trained + buffers)}


def test_other_vectors_of_an_update_go_as_they_are() -> None:
    recipe = recipes.scaffold(cohort=1.0, batch=3).with_(transforms=[{"kind": "top_k", "share": 0.5}])
    run = simulate(recipe, CLIENTS, MODEL, rounds=2)
    shared = run.work.layout.shared
    assert {row["bytes_up"] for row in run.results} == {
        4 * shared + 4 * round(TRAINED / 2) + 1 + -(-TRAINED // 8) + 4 * (shared - TRAINED)
    }


@pytest.mark.full
@pytest.mark.parametrize("compressor", [TopK(share=0.1), pytest.param(LowRank(rank=1), marks=pytest.mark.full)])
def test_memory_is_the_clients_own_on_every_engine_and_after_a_kill(compressor: Compressor) -> None:
    testing.check_transform(compressor)


@pytest.mark.parametrize("memory", [True, False])
def test_numbers_that_all_clients_send_are_summed_under_masks(memory: bool) -> None:
    """Random-k with common positions and secure aggregation: the sum without masks, to rounding, in as few numbers."""
    packing = RandomK(share=0.25, positions="common", error_feedback=memory)
    plain = recipes.fedavg(cohort=1.0, batch=3).with_(transforms=[packing])
    masked = plain.with_(transforms=[packing, {"kind": "secure_aggregation", "heaviest": 10}])
    runs = [simulate(one, CLIENTS, MODEL, rounds=4) for one in (plain, masked)]
    # a client whose update leaves the range of the masks sends none
    assert {row["status"] for run in runs for row in run.results} == {"ok"}
    vectors = [run.work.layout.flatten(run.model()) for run in runs]
    torch.testing.assert_close(vectors[1], vectors[0], atol=1e-5, rtol=1e-4)
    assert not torch.equal(vectors[0], runs[0].work.initial)
    numbers = round(0.25 * TRAINED) + 16  # and the buffers of batch norm
    trained = [[row["bytes_up"] for row in run.results if row["kind"] == "train"] for run in runs]
    assert set(trained[0]) == {4 * numbers}
    assert set(trained[1]) == {4 * (2 + numbers)}  # the weight and the loss


# ------------------------------------------------------------------------------------------------------------- refusals

NOISE: dict[str, Any] = {"kind": "gaussian", "clip": 1.0, "noise": 1.0}
REFUSED: dict[str, tuple[list[Any], str]] = {
    "top-k under masks": (
        [TopK(), "secure_aggregation"],
        "each client of top_k sends other numbers of its update: drop",
    ),
    "numbers of their own under masks": ([RandomK(), "secure_aggregation"], "set its positions = 'common', or drop"),
    "levels under masks": ([Qsgd(), "secure_aggregation"], "levels of qsgd have another length"),
    "noise behind it": ([TopK(), {**NOISE, "where": "client"}], "nothing can be done to it afterwards: put it last"),
    "two of them": ([TopK(), Sign()], "put it last, once"),
    "a memory before noise at the server": ([NOISE, TopK()], "set error_feedback = false, where = 'client'"),
    "rounding up before noise at the server": ([NOISE, Qsgd()], "what qsgd sends may be longer: set where = 'client'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_together_is_refused(case: str) -> None:
    transforms, reason = REFUSED[case]
    with pytest.raises(SettingError, match=reason):
        recipes.fedavg().with_(transforms=transforms, aggregation="equal_weighted")


def test_what_keeps_a_clip_stands_before_noise_at_the_server_and_passes_a_sites_policy() -> None:
    clipped = recipes.fedavg().with_(transforms=[NOISE, TopK(error_feedback=False)], aggregation="equal_weighted")
    assert clipped.transforms[-1].kind == "top_k"
    policy, noisy = Policy(clip=1.0), Policy(clip=1.0, noise=1.0)
    at_server, at_client = (
        recipes.fedavg().with_(transforms=[{**NOISE, "where": where}], aggregation="equal_weighted").transforms[0]
        for where in ("server", "client")
    )
    for transforms, one, reason in (
        ((at_server, TopK(error_feedback=False)), policy, None),
        ((at_server, TopK()), policy, "what top_k sends may be longer than the clip"),
        ((at_server, Qsgd()), policy, "what qsgd sends may be longer"),
        ((TopK(), at_server), policy, "what top_k sends may be longer"),  # terms that no recipe would have
        ((at_client, TopK()), noisy, None),
        ((TopK(),), policy, "updates must be clipped by the last transform"),
    ):
        said = one.reject_reason(client_work(MODEL, recipes.fedavg().training, transforms))
        assert said is None if reason is None else reason in str(said)


@pytest.mark.parametrize(
    ("made", "setting"),
    [
        (TopK, {"share": 0.0}),
        (RandomK, {"share": 1.1}),
        (Qsgd, {"bits": 1}),
        (LowRank, {"rank": 0}),
        (Zstandard, {"level": 20}),
    ],
)
def test_settings_are_checked(made: Any, setting: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=next(iter(setting))):
        made(**setting)


def test_a_model_of_which_nothing_trained_is_shared_is_refused() -> None:
    with pytest.raises(SettingError, match="top_k has nothing to pack"):
        simulate(recipes.local().with_(transforms="top_k"), CLIENTS, MODEL)


def test_without_zstandard_the_error_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(SettingError, match=re.escape("pip install '.[compression]'")):
        simulate(recipes.fedavg().with_(transforms="zstandard"), CLIENTS, MODEL)
