"""With noise, nothing that a party sends says more of one of its own rows than its releases: not that a run ends, not
which messages there are, and not how long they are.

Before, a partner's chosen statistics ended a run with one row in 3 of 3 runs and with another in its place in none,
again and again and without a count, while the stated epsilon was 0.726.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from piebald.core.errors import PiebaldError, RunFolderError
from piebald.privacy.accounting import gaussian_epsilon
from piebald.privacy.ledger import FOLDER, TRANSFER, RowLedger
from piebald.vertical.channel import InMemoryChannel
from piebald.vertical.chunks import own_chunks
from piebald.vertical.disclosure_ledger import MOST_ABORTS
from piebald.vertical.encryption import backend
from piebald.vertical.encryption.backend import FixedPointScale
from piebald.vertical.kernels import Floats, ProductSize
from piebald.vertical.party import Party
from piebald.vertical.party_data import PartyHolding
from piebald.vertical.party_data import load_one as load
from piebald.vertical.party_messages import MessageKind
from piebald.vertical.party_network import unit_rows
from piebald.vertical.party_secret import PartySecret
from piebald.vertical.party_store import PartyStore
from piebald.vertical.protocol import ROLES, Role
from piebald.vertical.transfer_methods import RowNoise
from piebald.vertical.transfer_runs import train_party
from piebald.vertical.transfer_settings import PartyFile, PartyFiles, TransferSettings
from tests.vertical.conftest import small, told
from tests.vertical.tampered import Tampered

from .test_transfer_messages import opened, reframed
from .test_transfer_privacy import KERNELS, noisy, party_data

QUIET = "ignore:.*numbers about a chunk of:RuntimeWarning"  # a step on few features tells more than they have
pytestmark = pytest.mark.filterwarnings(QUIET)
OTHER: dict[Role, Role] = {"source": "target", "target": "source"}


def both(
    settings: TransferSettings, data: dict[Role, PartyHolding], ends: dict[Role, InMemoryChannel | Tampered],
    folder: Path | None = None,
) -> dict[Role, BaseException]:  # fmt: skip
    """Run both parties; the errors that they end with."""
    errors: dict[Role, BaseException] = {}

    def act(role: Role) -> None:
        torch.set_num_threads(1)
        try:
            with PartyStore.of(None if folder is None else folder / role, role) as store:
                train_party(role, settings, data[role], ends[role], store)
        except PiebaldError as error:
            errors[role] = error

    threads = [threading.Thread(target=act, args=(role,)) for role in ROLES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


# ---------------------------------------------------------------------------------------- statistics that were chosen


def telling(party: Party, row: int, size: ProductSize, number: int) -> Floats:
    """Statistics S [inner, width] by which C S is beyond its range for one row of the party's first chunk alone.

    The attacker knows the party's weights and all rows, and wants to know whether this one is among them.
    """
    view = party.view()
    coefficients = [c for term in party.terms for c in term.coefficients(view)][number]
    place = int(np.flatnonzero(party.own[0] == row)[0])
    others = np.delete(coefficients, place, axis=0)
    direction = np.linalg.lstsq(
        np.concatenate([others, coefficients[place : place + 1]]), np.eye(len(coefficients))[-1], rcond=None
    )[0]
    reach = float(coefficients[place] @ direction) / 2 + float((others @ direction).max()) / 2
    assert float((others @ direction).max()) < reach < float(coefficients[place] @ direction), "it can be told"
    limit = 2.0 ** max(np.ceil(np.log2(size.bound)), 0)
    return np.repeat((direction * limit / reach)[:, None], size.width, axis=1)


def outcome(
    kernel: object, noise: float, victim: Role, replaced: bool, folder: Path | None = None
) -> BaseException | None:
    """How the victim of chosen statistics ends; its row is the one that these are about, or another in its place."""
    settings = noisy(kernel, noise, steps=1, watch_every=5)
    mine = party_data(victim)
    row = int(own_chunks(mine[0], 20, PartySecret.simulated(0, victim), by_label=False)[0][0])
    # the first chunk by the first table, so that both runs have the same one
    party = Party(victim, mine[0], settings, PartySecret.simulated(0, victim))
    number = 1  # the label's product comes first
    size = [size for term in party.terms for size in term.requested][number]
    chosen = telling(party, int(party.own[0][0]) if row not in party.own[0] else row, size, number)

    def attack(frames: list[bytes]) -> bytes:
        head, parts = opened(frames[-1])
        assert head[1] == MessageKind.STATISTICS
        digits = FixedPointScale.of(size).statistics
        parts[number] = np.rint(np.ldexp(chosen, digits)).astype("<i8").tobytes()
        return reframed(head, parts)

    ends = dict(zip((OTHER[victim], victim), InMemoryChannel.pair(), strict=True))
    ends[OTHER[victim]] = Tampered(ends[OTHER[victim]], 2, attack)
    data = {OTHER[victim]: party_data(OTHER[victim])[0], victim: mine[1] if replaced else mine[0]}
    return both(settings, data, ends, folder).get(victim)


@pytest.mark.parametrize("victim", ROLES)
@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel != "linear"], ids=str)
def test_with_noise_no_row_decides_whether_a_run_ends(kernel, victim):
    """Polynomials and the Gaussian; the linear kernel multiplies by a constant."""
    assert outcome(kernel, 2.0, victim, replaced=False) is None
    assert outcome(kernel, 2.0, victim, replaced=True) is None


def test_without_noise_a_row_decides_it_and_each_such_end_is_counted(tmp_path):
    kernel = KERNELS[-1]
    ended = outcome(kernel, 0.0, "target", replaced=False, folder=tmp_path)
    assert "outside its declared range" in str(ended)
    assert told(tmp_path / "target" / "target").uses("abort") == 1
    assert outcome(kernel, 0.0, "target", replaced=True) is None


def test_a_run_that_ended_too_often_is_not_gone_on_with(tmp_path):
    said = []
    for _ in range(MOST_ABORTS + 1):
        said.append(str(outcome(KERNELS[-1], 0.0, "target", replaced=False, folder=tmp_path)))
    assert all("outside its declared range" in sentence for sentence in said[:-1])
    assert "has ended 10 times with an error about the other party's messages" in said[-1]


@pytest.mark.parametrize("noise", [0.0, 3.0])
def test_an_error_that_ends_a_run_is_a_release_in_both_ledgers(tmp_path, noise):
    records = np.arange(50, dtype=np.uint64)
    rows = RowLedger(records, [tmp_path / FOLDER], "shop")

    def spend(kind: str, spent: float) -> None:
        if spent:
            rows.spend(TRANSFER, spent)
        else:
            rows.count(f"transfer_{kind}", "bank")

    settings = noisy(noise=noise)
    for _ in range(2):
        store = PartyStore.of(tmp_path, "target")
        party = Party("target", party_data("target")[0], settings, PartySecret.fresh(), store, spend)
        party.count_abort()
        store.close()
    party = Party("target", party_data("target")[0], settings, PartySecret.fresh(), PartyStore.of(tmp_path, "target"))
    assert party.ledger.releases == 2
    again = RowLedger(records, [tmp_path / FOLDER], "shop")
    assert again.spent(1e-6, TRANSFER) == (pytest.approx(gaussian_epsilon(3 / 2**0.5, 1e-6)) if noise else 0)
    assert again.counts == ({} if noise else {"transfer_abort": 2})
    for _ in range(MOST_ABORTS - 2):
        party.ledger.check_aborts()
        party.count_abort()
    with pytest.raises(RunFolderError, match="ended 10 times"):
        party.ledger.check_aborts()


def test_an_error_that_nobody_foresaw_is_counted_as_well(tmp_path, monkeypatch):
    """The other party hears of its end, too, whatever its class is."""
    exact = Party._update

    def broken(party: Party, *given: object) -> None:
        if party.role == "target":
            raise ZeroDivisionError
        exact(party, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Party, "_update", broken)
    ends, data = dict(zip(ROLES, InMemoryChannel.pair(), strict=True)), {role: party_data(role)[0] for role in ROLES}
    said: list[str] = []

    def act() -> None:
        try:
            train_party("source", noisy(), data["source"], ends["source"], PartyStore.of(None, "source"))
        except PiebaldError as error:
            said.append(str(error))

    thread = threading.Thread(target=act)
    thread.start()
    with pytest.raises(ZeroDivisionError), PartyStore.of(tmp_path, "target") as store:
        train_party("target", noisy(), data["target"], ends["target"], store)
    thread.join()
    assert said == ["the other party ended the run: an error occurred there; see its own message"]
    assert told(tmp_path / "target").uses("abort") == 1


# -------------------------------------------------------------------------------------- each cell of one row, in turn


ROWS: dict[Role, list[str]] = {
    "source": ["key,age,town,repaid", *(f"k{n},{20 + n},{'AB'[n % 2]},{'yes' if n % 3 else 'no'}" for n in range(18)),
               *(f",{30 + n},{'AB'[n % 2]},{'yes' if n % 2 else 'no'}" for n in range(45))],
    "target": ["key,basket,card,repaid", *(f"k{n},{n / 4},{'MN'[n % 2]},{'yes' if n % 3 else 'no'}" for n in range(18)),
               *(f",{n / 9},{'MN'[n % 2]},{'yes' if n % 2 else 'no'}" for n in range(90))],
}  # fmt: skip
STATED: dict[Role, dict[str, object]] = {
    "source": {"bounds": {"age": (0, 100)}, "values": {"town": ("A", "B")}},
    "target": {"bounds": {"basket": (0, 10)}, "values": {"card": ("M", "N")}},
}
CELLS: dict[Role, list[tuple[int, str]]] = {
    "source": [(1, "5000"), (1, ""), (1, "many"), (2, "B"), (2, "C"), (2, ""), (3, "no"), (3, "perhaps"), (3, "")],
    "target": [(1, "-9"), (1, ""), (1, "inf"), (2, "M"), (2, ""), (3, "no"), (3, "perhaps"), (3, "")],
}


def tables(folder: Path, changed: Role, cell: tuple[int, str] | None) -> dict[Role, PartyHolding]:
    """Both parties' rows, with one cell of one of the changed party's own rows replaced."""
    named: dict[str, PartyFile] = {}
    for role, rows in ROWS.items():
        lines = [line.split(",") for line in rows]
        if cell is not None and role == changed:
            lines[26][cell[0]] = cell[1]
        path = folder / f"{role}.csv"
        path.write_text("\n".join(",".join(line) for line in lines) + "\n")
        named[role] = PartyFile(path=str(path), key="key", label="repaid", positive="yes", **STATED[role])  # type: ignore[arg-type]
    return {role: load(PartyFiles(**named), role, 0.3, 0, public=True) for role in ROLES}


Release = Callable[..., list[np.ndarray]]


def sent(
    monkeypatch: pytest.MonkeyPatch, data: dict[Role, PartyHolding], victim: Role, releases: list[list[np.ndarray]],
    kernel: object,
) -> list[tuple[list[object], list[bytes]]]:  # fmt: skip
    """All that the victim sends, with releases forced to those of an earlier run, where there was one."""
    made, forced = list[list[np.ndarray]](), list(releases)
    exact: Release = RowNoise.release

    def release(noise: RowNoise, *given: object) -> list[np.ndarray]:
        found = exact(noise, *given)
        if noise.secret == PartySecret.simulated(0, victim):
            made.append(found)
            found = [part.copy() for part in (forced.pop(0) if forced else found)]
        return found

    monkeypatch.setattr(RowNoise, "release", release)
    # all masks alike, so that all else that leaves can be compared byte by byte
    monkeypatch.setattr(backend, "uniform", lambda count, below: np.arange(count, dtype=np.uint64) << np.uint64(40))
    settings = noisy(kernel, 2.0, steps=3, data={"test": 0.3})
    ends = dict(zip((OTHER[victim], victim), InMemoryChannel.pair(), strict=True))
    ends[victim] = recorded = Tampered(ends[victim], 10**6, lambda frames: b"")
    assert both(settings, data, ends) == {}
    releases.extend(made[len(releases) :])
    return [opened(frame) for frame in recorded.frames]


@pytest.mark.full
@pytest.mark.parametrize("kernel", ["linear", KERNELS[-1]], ids=str)
@pytest.mark.parametrize("victim", ROLES)
def test_no_cell_of_a_row_changes_what_is_sent_but_through_releases(victim, kernel, tmp_path, monkeypatch):
    """Kinds, order and lengths of all messages; and, masked products aside, each byte."""
    releases: list[list[np.ndarray]] = []
    before = sent(monkeypatch, tables(tmp_path, victim, None), victim, releases, kernel)
    assert len(releases) == 6 + 2 * (victim == "source")
    for cell in CELLS[victim]:
        monkeypatch.undo()
        after = sent(monkeypatch, tables(tmp_path, victim, cell), victim, releases, kernel)
        for (head, parts), (other, others) in zip(before, after, strict=True):
            # the session and the nonce of the greeting are drawn anew
            assert (head[1], head[2], head[4]) == (other[1], other[2], other[4]), cell
            assert list(map(len, parts)) == list(map(len, others)), cell
            if head[1] not in (MessageKind.HELLO, MessageKind.MASKED):
                assert parts == others, (cell, MessageKind(head[1]).name)


def test_hidden_units_of_zero_and_slopes_without_a_number_end_no_run():
    """A row far away has no direction, and its gradient no number: it adds none."""
    settings = noisy(steps=2)
    held = party_data("target")[0]
    party = Party("target", held, settings, PartySecret.simulated(0, "target"))
    x = held.x.clone()
    x[party.own[0][0]] = 1e300
    data: dict[Role, PartyHolding] = {"source": party_data("source")[0], "target": replace(held, x=x)}
    with torch.no_grad():
        assert torch.isfinite(unit_rows(party.network(x)[-1])).all()
    assert both(settings, data, dict(zip(ROLES, InMemoryChannel.pair(), strict=True))) == {}


def test_the_statement_says_from_whom():
    said = noisy().method.statement("source", 3)
    assert said.startswith("from a partner that follows the protocol, all that the source has sent")
    assert all(one != other for one, other in pairwise(noisy(noise=z).method.statement("source", 3) for z in (1, 2, 3)))
    assert "nothing is claimed" in small().method.statement("source", 3)
