"""The differential privacy of a transfer: the whole of what leaves is computed from releases, and these are as stated.

Before, noise was on the moments alone, while the weights were trained on the same rows without any: with one row
replaced and its label flipped, a stated epsilon of 2.87 was 16.14 by exact computation.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from piebald.core.errors import SettingError
from piebald.privacy.accounting import gaussian_epsilon
from piebald.vertical.channel import InMemoryChannel
from piebald.vertical.chunks import own_chunks
from piebald.vertical.disclosure_ledger import DisclosureLedger
from piebald.vertical.encryption.backend import FixedPointScale
from piebald.vertical.kernels import LinearKernel
from piebald.vertical.party import Party
from piebald.vertical.party_data import PartyHolding
from piebald.vertical.party_data import load_one as load
from piebald.vertical.party_messages import HEADER, MessageKind
from piebald.vertical.party_secret import PartySecret
from piebald.vertical.protocol import Products
from piebald.vertical.transfer_methods import RowNoise
from piebald.vertical.transfer_results import write_page
from piebald.vertical.transfer_runs import run
from piebald.vertical.transfer_settings import PartyFile, PartyFiles, TransferSettings
from tests.security.audits import from_pairs
from tests.vertical.conftest import small, train_both
from tests.vertical.conftest import told as told_in
from tests.vertical.tampered import Tampered

KERNELS = [
    "linear",
    {"kind": "polynomial", "c": 0.5},
    {"kind": "polynomial", "degree": 3, "c": 0.3},
    {"kind": "gaussian", "sigma": 1.5},
]


def noisy(kernel: object = "linear", noise: float = 2.0, **changes: object) -> TransferSettings:
    method = {"kind": "smmd", "kernel": kernel, "noise": noise, "clip": 0.05}
    return small(**{"method": method, "steps": 6, "data": {"overlap": 18}} | changes)


def party_data(role: str, rows: int = 58, features: int = 5) -> tuple[PartyHolding, PartyHolding]:
    """Two that differ in one row of the party's own, and its label: the first of them in the chunk of step 0."""
    rng = torch.Generator().manual_seed(3)
    x = 2 * torch.randn(rows, features, generator=rng, dtype=torch.float64)
    y = torch.where(torch.arange(rows) % 2 == 0, 1.0, -1.0).double() if role == "source" else None
    held = PartyHolding(x, y, np.arange(18), tuple(map(str, range(features))), x[:4], x[:4, 0].sign())
    place = own_chunks(held, 20, PartySecret.simulated(0, role), by_label=False)[0][0]
    other, label = x.clone(), None if y is None else y.clone()
    other[place] = -20 * x[place]
    if label is not None:
        label[place] *= -1
    return held, replace(held, x=other, y=label)


@pytest.mark.parametrize("share", [0.0, 0.03, 0.5, 0.9, 1.0])
def test_one_row_moves_the_translator_as_far_as_is_said_and_no_further(share: float) -> None:
    """Whatever the row and its label are; also where nearly all labels are alike."""
    noise = RowNoise(1.0, 0.05, LinearKernel(), True, PartySecret.simulated(0, "source"), None)  # type: ignore[arg-type]
    rows = [torch.tensor(row, dtype=torch.float64) for row in ([1.0, 0.5], [0.0, 0.5], [1.0, 1.0], [0.5, 0.5])]
    others = torch.tensor([[0.2, 0.9]] * 3, dtype=torch.float64)
    told = []
    for row in rows:
        for label in (1.0, -1.0):
            labels = torch.tensor([label, 1.0, -1.0, 1.0], dtype=torch.float64)
            told.append(noise.translator(torch.cat([row[None], others]), labels, share))
    reach = told[0][1]
    assert max(float((one - two).norm()) for one, _ in told for two, _ in told) == pytest.approx(reach)


class Transcript:
    """What a party releases: recorded, or forced to what another party has released."""

    def __init__(self, forced: list[list[np.ndarray]] | None = None) -> None:
        self.exact: list[list[np.ndarray]] = []
        self.released: list[list[np.ndarray]] = []
        self.deviations: list[list[float]] = []
        self.forced = forced

    def follow(self, party: Party) -> Party:
        noise = party.noise
        assert noise is not None

        def release(what, chunk, step, parts):
            released = RowNoise.release(noise, what, chunk, step, parts)
            self.exact.append([np.array(part) for part, _ in parts])
            self.deviations.append([noise.noise * reach * math.sqrt(len(parts)) for _, reach in parts])
            if self.forced is not None:
                released = self.forced[len(self.released)]
            self.released.append(released)
            return [np.array(part) for part in released]

        party.noise = Followed(noise, release)
        return party

    def distance(self, other: Transcript) -> float:
        """How far apart both are, in standard deviations, all releases together: mu of Gaussian privacy."""
        return math.sqrt(
            sum(
                float(((one - two) ** 2).sum()) / deviation**2
                for parts, others, deviations in zip(self.exact, other.exact, self.deviations, strict=True)
                for one, two, deviation in zip(parts, others, deviations, strict=True)
            )
        )


class Followed(RowNoise):
    """Noise whose releases are followed."""

    def __init__(self, noise: RowNoise, release: object) -> None:
        super().__init__(noise.noise, noise.clip, noise.kernel, noise.balanced, noise.secret, noise.ledger)
        object.__setattr__(self, "release", release)


def answers(party: Party) -> list[np.ndarray]:
    """What the other party could answer."""
    rng = np.random.default_rng(5)
    return [rng.uniform(-0.2, 0.2, (size.rows, size.width)) for term in party.terms for size in term.requested]


def steps(party: Party, count: int) -> list[np.ndarray]:
    """Take steps against fixed answers; everything that the party told."""
    told = []
    for _ in range(count):
        view = party._disclosed(party.view())
        told += [part for term in party.terms for s in term.statistics(view) for part in (s.matrix, s.constant)]
        party._update(view, answers(party))
        party.done += 1
    if party.role == "source":
        phi, rate = party.summary()
        told += [phi.numpy(), np.array([rate])]
    return told


@pytest.mark.parametrize("role", ["source", "target"])
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("aligned", [[8], [6, 8]], ids=["one layer", "two layers"])
def test_the_whole_transcript_is_within_the_stated_epsilon(role, kernel, aligned):
    """One row replaced, its label flipped: with the same releases, all else is the same, bit for bit, the weights too;
    and the releases are no further apart than as many Gaussian mechanisms as were counted."""
    settings = noisy(kernel, network={"hidden": [10], "aligned": aligned})
    found = []
    for held in party_data(role):
        transcript = Transcript(found[0][0].released if found else None)
        party = transcript.follow(Party(role, held, settings, PartySecret.simulated(0, role)))
        told = steps(party, settings.steps)
        weights = torch.cat([part.detach().ravel() for part in party.network.parameters()])
        found.append((transcript, told, weights, party.ledger))
    (one, told, weights, ledger), (other, others, moved, _) = found
    assert torch.equal(weights, moved)
    assert all(np.array_equal(a, b) for a, b in zip(told, others, strict=True))
    releases = ledger.uses("own", "gradient") + ledger.uses("whole")
    assert releases == 2 * 3 + (2 if role == "source" else 0)  # 6 steps use each of two chunks three times
    distance, allowed = one.distance(other), math.sqrt(releases) / 2.0
    assert distance <= allowed * (1 + 1e-9)
    assert distance > 0.4 * allowed  # the row is one that matters
    said = settings.method.statement(role, releases)
    assert f"({gaussian_epsilon(1 / allowed, 1e-5):.3g}, 1e-05)-differentially private" in said


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_no_row_moves_a_release_by_more_than_is_said(kernel, seed):
    """Each part for itself, for any rows and the same weights: the first step's."""
    rng = torch.Generator().manual_seed(seed)
    settings, found = noisy(kernel), []
    held = party_data("source")[0]
    place = own_chunks(held, 20, PartySecret.simulated(0, "source"), by_label=False)[0][seed]
    for _ in range(8):
        x, y = held.x.clone(), held.y.clone()
        x[place] = 10 ** float(4 * torch.rand(1, generator=rng) - 2) * torch.randn(5, generator=rng).double()
        y[place] = 1.0 if torch.rand(1, generator=rng) < 0.5 else -1.0
        transcript = Transcript(found[0].released if found else None)
        party = Party("source", replace(held, x=x, y=y), settings, PartySecret.simulated(0, "source"))
        transcript.follow(party)
        steps(party, 1)
        found.append(transcript)
    noise = settings.method.noise
    for one in found:
        for other in found:
            for parts, others, deviations in zip(one.exact, other.exact, one.deviations, strict=True):
                for a, b, deviation in zip(parts, others, deviations, strict=True):
                    assert np.linalg.norm(a - b) <= deviation / (noise * math.sqrt(len(parts))) * (1 + 1e-9)


def test_rows_are_dealt_by_their_numbers_and_not_by_what_they_hold():
    """Before, chunks were dealt over the rows in the order of their labels: one flipped label moved all after it."""
    held, other = party_data("source")
    secret = PartySecret.fresh()
    for one, two in zip(own_chunks(held, 20, secret, False), own_chunks(other, 20, secret, False), strict=True):
        assert np.array_equal(one, two)
    party = Party("source", held, noisy(), secret)
    assert all(np.array_equal(a, b) for a, b in zip(party.own, own_chunks(other, 20, secret, False), strict=True))


# ------------------------------------------------------------------------------------------------------------- an audit


DELTA = 0.3  # an attacker by experiment sees large deltas best


def audit(noise: float, runs: int) -> float:
    """A lower bound on epsilon at `DELTA`, at 99 %: an attacker who knows all but the noise tells two rows apart."""
    settings = noisy(steps=1, noise=AUDITED)
    pair = party_data("source", rows=38)

    def told(held: PartyHolding, forced: Transcript | None = None) -> Transcript:
        transcript = Transcript(None if forced is None else forced.released)
        party = Party("source", held, settings, PartySecret.simulated(0, "source"))
        if forced is None:
            party.noise = replace(party.noise, noise=noise, secret=PartySecret.fresh())
        steps(transcript.follow(party), 1)
        return transcript

    def unlikely(found: Transcript, by: Transcript) -> float:
        """How far what was released is from what was exact by some rows, as of the logarithm of a density."""
        return sum(
            float(((out - exact) ** 2).sum()) / deviation**2
            for outs, exacts, deviations in zip(found.released, by.exact, found.deviations, strict=True)
            for out, exact, deviation in zip(outs, exacts, deviations, strict=True)
        )

    scores = []
    for held, other, sign in ((pair[1], pair[0], 1), (pair[0], pair[1], -1)):
        runs_of = [told(held) for _ in range(runs)]
        scores.append(np.array([sign * (unlikely(one, told(other, one)) - unlikely(one, one)) for one in runs_of]))
    return from_pairs(scores[0], scores[1], DELTA)


AUDITED = 2.0
STATED = gaussian_epsilon(AUDITED / math.sqrt(4), DELTA)  # both releases of a step, the share and the translator


@pytest.mark.long
def test_an_attack_stays_below_the_stated_epsilon_and_finds_half_the_noise():
    assert audit(AUDITED, 400) <= STATED
    assert audit(AUDITED / 2, 800) > STATED


# --------------------------------------------------------------------------------------------------- what is left out


@pytest.mark.full
def test_no_losses_are_computed_with_noise_and_the_statement_counts_releases(tmp_path):
    settings = noisy(data={"name": "breast_cancer", "overlap": 100})
    made = run(settings, out=tmp_path / "run", tell=lambda _: None)
    assert made.first == made.last == {}
    counted = told_in(tmp_path / "run" / "source")
    releases = counted.uses("own", "gradient") + counted.uses("whole")
    assert f"by {releases} releases about one row" in made.statement
    assert "all that the source has sent in this run is (" in made.statement
    assert "all that the target has sent in this run is (" in made.statement
    assert "Not covered are co-occurring rows" in made.statement
    page = write_page(tmp_path / "run")[0].read_text()
    assert "No losses were computed" in page
    assert f"by {releases} releases about one row" in page


def test_what_reaches_the_other_party_is_what_was_released(monkeypatch):
    """In a whole run of both parties: nothing exact goes into the products or into the handover."""
    sent, exchange = [], Products.exchange

    def recorded(products, statistics, *more, **words):
        sent.extend(statistics)
        return exchange(products, statistics, *more, **words)

    monkeypatch.setattr(Products, "exchange", recorded)
    settings = noisy("linear", data={"name": "breast_cancer", "overlap": 100}, steps=2)
    parties, _ = train_both(settings)
    views = [party.view() for party in parties.values()]
    for party in parties.values():
        party.done = 0
    exact = [party.terms[1].statistics(party.view())[0].constant for party in parties.values()]
    assert len(sent) == 2 * 2 * 2
    told = [one.constant for one in sent if not len(one.matrix)]
    assert len(told) == 2 * 2
    assert not any(np.allclose(one, part) for one in told for part in exact)
    assert not np.allclose(parties["target"].phi.numpy(), views[0].phi.detach().numpy(), atol=1e-4)


def test_means_in_the_open_are_the_release_and_its_noise_is_the_stated_one(monkeypatch):
    """Protocol 4 sends them unencrypted: read off the wire, they are what was counted, with one noise, of one size."""
    released, release = [], RowNoise.release

    def recorded(noise, kind, chunk, step, parts):
        made = release(noise, kind, chunk, step, parts)
        if kind == "own" and noise.secret == PartySecret.simulated(small().seed, "source"):
            deviation = noise.noise * parts[0][1] * math.sqrt(len(parts))
            released.append((np.array(parts[0][0]).ravel(), made[0].ravel().copy(), deviation))
        return made

    monkeypatch.setattr(RowNoise, "release", recorded)
    one, other = InMemoryChannel.pair()
    frames = Tampered(one, 10**6, lambda frames: b"")
    settings = noisy("linear", noise=0.02, data={"name": "breast_cancer", "overlap": 100}, steps=30)
    parties, _ = train_both(settings, ends=(frames, other))
    digits = FixedPointScale.of(parties["source"].terms[1].owned[0]).statistics
    sent = [frame for frame in frames.frames if HEADER.unpack(frame[: HEADER.size])[1] == MessageKind.STATISTICS]
    told = [frame[-16 - 8 * 8 : -16] for frame in sent]  # 8 units, before the digest of the frame
    assert len(told) == len(released) == 30
    for wire, (_, made, _) in zip(told, released, strict=True):
        assert np.array_equal(np.frombuffer(wire, "<i8"), np.rint(np.ldexp(made, digits)))
    scaled = np.concatenate([(made - exact) / deviation for exact, made, deviation in released])
    # all chunks and steps are different content, so these are independent and of variance 1: within 4.5 deviations
    assert abs(float((scaled**2).mean()) - 1) < 4.5 * math.sqrt(2 / len(scaled))
    assert abs(float(scaled.mean())) < 4.5 / math.sqrt(len(scaled))


def test_noise_is_the_same_for_the_same_numbers_and_other_for_others():
    """So a repeated step tells nothing new, and two different sums never have the same noise."""
    secret, ledger = PartySecret.fresh(), DisclosureLedger({("own", 0): 2})
    method = noisy().method
    noise = RowNoise(2.0, 1.0, method.kernel, True, secret, ledger)
    one, again, other = (
        noise.release("own", 0, 0, [(np.full(4, value), 0.5)])[0] - value for value in (0.25, 0.25, 0.75)
    )
    assert np.array_equal(one, again)
    assert np.abs(one - other).min() > 1e-4
    assert ledger.uses("own") == 2


def table(folder, bounds: str, rows: list[str]):
    path = folder / "bank.csv"
    path.write_text("key,age,town,label\n" + "\n".join(rows) + "\n")
    file = {"path": str(path), "key": "key", "label": "label"}
    file |= {"positive": 1}
    if bounds == "stated":
        file |= {"bounds": {"age": (0, 100)}, "values": {"town": ("A", "B")}}
    return PartyFiles(source=PartyFile(**file))


ROWS = ["k,20,A,1", ",30,B,0", ",40,A,1", ",50,B,0"]


def test_with_noise_no_column_is_prepared_by_the_rows(tmp_path):
    """Before, every standard score moved with one row."""
    first = load(table(tmp_path, "stated", ROWS), "source", 0.2, 0, public=True)
    assert first.features == ("age", "town=A", "town=B", "town is another")
    assert first.x[0].tolist() == pytest.approx([-0.6, 1, 0, 0])
    prepared = {
        ",5000,C,0": [1, 0, 0, 1],
        ",,,": [0, 0, 0, 1],
        ",many,A,perhaps": [0, 1, 0, 0],
        ",-inf,B,1": [-1, 0, 1, 0],
    }
    for cells, inputs in prepared.items():
        second = load(table(tmp_path, "stated", [*ROWS[:3], cells]), "source", 0.2, 0, public=True)
        assert second.features == first.features
        assert torch.equal(first.x[:3], second.x[:3])
        assert second.x[3].tolist() == inputs
        assert second.y.tolist() == [1, -1, 1, 1 if cells.endswith("1") else -1]
    unsaid = PartyFiles(source=PartyFile(path=str(tmp_path / "bank.csv"), key="key", label="label"))
    with pytest.raises(SettingError, match=r"positive is missing: with method.noise"):
        load(unsaid, "source", 0.2, 0, public=True)
    with pytest.raises(SettingError, match=r"'age' of .* needs files.source.bounds: with method.noise"):
        load(table(tmp_path, "positive alone", ROWS), "source", 0.2, 0, public=True)


ODD = [
    "",
    "C",
    "NA",
    "1.5",
    "3,5",
    "1,234",
    "2024-05-05",
    "inf",
    "1e30",
    "7 kg",
    "True",
    "0x10",
    "12345678901234567890",
]


@pytest.mark.full
@pytest.mark.parametrize("place", ["age", "town", "repaid"])
@pytest.mark.parametrize(
    "words", [("A", "B"), ("1", "2"), ("007", "008"), ("1.50", "2.50"), ("True", "False")], ids=str
)
def test_with_noise_no_cell_says_how_others_are_read(tmp_path, words, place):
    """Before, one word among numbers, or one gap, made 59 of 60 rows other ones: the reader takes a column's kind from
    all of its cells."""
    rows = [{"key": f"k{n}" * (n < 8), "age": 20 + n, "town": words[n % 2], "repaid": n % 2} for n in range(30)]
    stated = {"bounds": {"age": (0.0, 100.0)}, "values": {"town": words}}

    def held(cell: str | None) -> PartyHolding:
        table = [dict(row) for row in rows]
        table[17] |= {} if cell is None else {place: cell}
        lines = [",".join(f'"{one}"' if "," in str(one) else str(one) for one in row.values()) for row in table]
        (tmp_path / "rows.csv").write_text("\n".join(["key,age,town,repaid", *lines]) + "\n")
        file = PartyFile(path=str(tmp_path / "rows.csv"), key="key", label="repaid", positive="1", **stated)
        return load(PartyFiles(source=file), "source", 0.3, 0, public=True)

    before = held(None)
    assert before.x[:, [before.features.index(f"town={word}") for word in words]].sum(0).tolist() == [15, 15]
    assert before.y.sum() == 0
    for cell in ODD:
        after = held(cell)
        others = np.arange(30) != 17
        assert after.features == before.features
        assert torch.equal(after.x[others], before.x[others]), cell
        assert torch.equal(after.y[others], before.y[others]), cell


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": {"kind": "smmd", "noise": 1.0, "normalize": False}}, "noise needs normalize = true"),
        ({"method": {"kind": "smmd", "noise": 1.0}, "backend": "plain"}, "needs a backend that masks products"),
        ({"method": {"kind": "smmd", "noise": 1.0, "clip": 0.0}}, "clip"),
    ],
)
def test_noise_that_would_hide_nothing_is_refused(changes, said):
    with pytest.raises(SettingError, match=said):
        small(**changes)
