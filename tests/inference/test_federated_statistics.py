"""Federated statistics are those of the pooled rows; under masks they are sums, under noise a budget counts them."""

from __future__ import annotations

import math
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

import piebald
from piebald.contracts import SUM, Device
from piebald.core.errors import SettingError
from piebald.core.moments import keys_of, number_of
from piebald.data.partition import clients_from
from piebald.inference.columns import STEP, ClientColumns, SumPlan, as_text, statistics_request
from piebald.inference.queries.columns import MaskedSumsQuery
from piebald.inference.simulated import AskedSites, TableClients, simulated
from piebald.inference.statistics_at_sites import edges_of, statistics, statistics_at_sites
from piebald.privacy import SecureAggregation
from piebald.privacy.ledger import Ledger, noise_for

SHARES = (0.0, 0.1, 0.25, 0.5, 0.9, 1.0)


@pytest.fixture
def frame() -> pandas.DataFrame:
    """Six clients, one of them with a single row and one without a number in a column."""
    rng = np.random.default_rng(3)
    n = 400
    table = pandas.DataFrame({
        "site": rng.choice(list("abcde"), n), "x": rng.normal(1e6, 1e-2, n), "skewed": np.exp(rng.normal(0, 3, n)),
        "whole": rng.integers(-3, 4, n), "constant": 0.1, "colour": rng.choice(["red", "green", "[blue]"], n),
    })  # fmt: skip
    table.loc[3, "site"] = "alone"
    table.loc[10:40, "skewed"] = np.nan
    table.loc[table.site == "b", "skewed"] = np.nan
    table.loc[7, "colour"] = None
    return table


@pytest.mark.parametrize("named", ["site", "client"])
@pytest.mark.parametrize("first", [True, False])
def test_the_column_of_clients_is_one_of_a_contingency_table(named: str, first: bool, frame: pandas.DataFrame) -> None:
    pairs = [(named, name) if first else (name, named) for name in ("colour", "whole")]
    found = statistics(frame, client="site", quantiles=(), tables=[*pairs, ("colour", "whole")])
    assert {*found.tables} == {*pairs, ("colour", "whole")}
    for pair in pairs:
        crossed = pandas.crosstab(*(frame["site" if name == named else name] for name in pair))
        assert found.tables[pair] == {
            str(value): {str(other): count for other, count in line.items()} for value, line in crossed.T.items()
        }
    words = {"colour": sorted(frame.colour.dropna().unique())}
    noisy = statistics(
        frame, client="site", columns=["colour"], quantiles=(), tables=[(named, "colour")], categories=words,
        epsilon=50, delta=1e-5, noise_at="client",
    )  # fmt: skip
    assert noisy.noise > 0
    counts = np.array([[*line.values()] for line in noisy.tables[named, "colour"].values()])
    right = pandas.crosstab(frame.site, frame.colour).to_numpy()
    assert 0 < np.abs(counts - right).max() < 10 * noisy.noise


def test_a_table_by_client_is_refused_where_clients_hide_in_a_sum(frame: pandas.DataFrame) -> None:
    words: dict[str, Any] = {"columns": ["colour"], "categories": {"colour": ["blue", "red"]}, "quantiles": ()}
    for hidden in ({"secure": True}, {"epsilon": 1.0, "delta": 1e-5}):
        with pytest.raises(SettingError, match="a table by client shows what"):
            statistics(frame, client="site", tables=[("site", "colour")], **words, **hidden)


def test_statistics_are_those_of_the_pooled_rows(frame: pandas.DataFrame) -> None:
    found = statistics(frame, client="site", quantiles=SHARES, bins=7, tables=[("colour", "whole")], by_client=True)
    assert found.rows is not None
    assert sum(found.rows) == len(frame)
    for name in ("x", "skewed", "whole", "constant"):
        pooled, one = frame[name].dropna().to_numpy(), found.numbers[name]
        assert (one.present, one.missing, one.infinite) == (len(pooled), frame[name].isna().sum(), 0)
        assert one.mean == pytest.approx(math.fsum(pooled) / len(pooled), rel=1e-15)
        centred = [(value - math.fsum(pooled) / len(pooled)) ** 2 for value in pooled.tolist()]
        assert one.variance == pytest.approx(math.fsum(centred) / (len(pooled) - 1), rel=1e-9)
        assert list(one.quantiles.values()) == np.quantile(pooled, SHARES).tolist()  # to the bit
        counts, edges = np.histogram(pooled, 7)
        assert list(one.counts) == counts.tolist()
        assert one.edges == pytest.approx(edges.tolist())
    assert found.numbers["constant"].variance == 0
    assert found.texts["colour"].counts == frame.colour.value_counts().to_dict()
    assert found.texts["colour"].missing == 1
    crossed = pandas.crosstab(frame.colour, frame.whole)
    for colour, line in found.tables["colour", "whole"].items():
        assert line == {str(value): crossed.loc[colour, int(value)] for value in line}
    alone = found.by_client["alone"]
    assert (alone["x"].mean, math.isnan(alone["x"].variance)) == (frame.x[3], True)
    assert math.isnan(found.by_client["b"]["skewed"].mean)


def test_a_large_offset_costs_no_digits() -> None:
    tiny = np.arange(1000) % 7 / 1000
    clients = {str(k): pandas.DataFrame({"x": 1e9 + tiny[k::5]}) for k in range(5)}
    exact = (1e9 + tiny) - 1e9  # what float64 holds of it
    assert statistics(clients)["x"].variance == pytest.approx(np.var(exact, ddof=1), rel=1e-12)


def test_infinite_numbers_are_counted_and_left_out() -> None:
    table = pandas.DataFrame({"site": list("aab"), "x": [1.0, np.inf, 3.0]})
    found = statistics(table, client="site", quantiles=[0.5])["x"]
    assert (found.present, found.infinite, found.mean, found.quantiles[0.5]) == (2, 1, 2.0, 2.0)


def test_the_order_of_all_numbers_is_that_of_their_keys() -> None:
    numbers = np.array([-np.inf, -1e308, -5e-324, 0.0, 5e-324, 1.0, np.nextafter(1, 2), 1e308, np.inf])
    assert bool((np.diff(keys_of(numbers)[1:-1]) > 0).all())
    assert (number_of(keys_of(numbers)) == numbers).all()


def test_clients_with_splits_give_their_training_rows() -> None:
    rng = np.random.default_rng(0)
    clients = clients_from({k: (rng.normal(k, 1, (20, 3)), rng.integers(0, 2, 20)) for k in range(3)}, test=0.5)
    found = piebald.statistics(clients, features=["a", "b", "c"])
    pooled = np.concatenate([clients.rows(k, "train").x.double().numpy() for k in range(3)])
    assert [one.mean for one in found.numbers.values()] == pytest.approx(pooled.mean(0).tolist(), rel=1e-14)
    assert sum(found.texts["target"].counts.values()) == len(pooled)
    assert "<table>" in found._repr_html_()


HIDDEN: dict[str, Any] = {"columns": ["skewed", "whole"], "bounds": {"skewed": (0.0, 50.0), "whole": (-3, 3)}}


def test_sums_under_masks_are_the_pooled_ones(frame: pandas.DataFrame, caplog: pytest.LogCaptureFixture) -> None:
    """Also the row of a client that has one; the log says who is left out, since it would be most of the sum."""
    joined = frame.assign(site=frame.site.replace({"b": "a", "c": "a"}))
    smaller = statistics(joined, client="site", secure=True, bins=64, **HIDDEN)
    assert [record for record in caplog.messages if record.startswith("a is left out")]
    left = joined[joined.site != "a"].skewed.clip(0, 50).dropna()
    assert sum(smaller["skewed"].counts) == smaller["skewed"].present == len(left)
    caplog.clear()
    found = statistics(frame, client="site", secure=True, bins=64, **HIDDEN)
    assert not [record for record in caplog.messages if "left out" in record]
    clipped = frame.skewed.clip(0, 50).dropna()
    assert found.rows is None
    assert found["skewed"].mean == pytest.approx(clipped.mean(), abs=50 * 2**-30)
    assert found["skewed"].variance == pytest.approx(clipped.var(), abs=50**2 * 2**-28)
    assert sum(found["skewed"].counts) == found["skewed"].present == len(clipped)
    for share, value in found["skewed"].quantiles.items():
        assert abs(value - np.quantile(clipped, share)) <= found["skewed"].quantile_error


class Absent:
    """A fleet whose last client loses every task after those in which it exchanged keys."""

    def __init__(self, clients: int) -> None:
        self.last = clients - 1

    def device(self, client: int) -> Device:
        return Device(dropout=1.0 if client == self.last else 0.0)

    def available(self, clients: int, now: float) -> list[int]:
        return list(range(clients))


def held(clients: int, rows: int = 9) -> TableClients:
    rng = np.random.default_rng(1)
    return TableClients.of([
        ClientColumns(f"c{k}", rows, {"x": rng.normal(k, 1, rows)}, {}) for k in range(clients)
    ])  # fmt: skip


def test_what_a_client_sends_under_masks_in_the_simulator_is_random_and_the_masks_cancel() -> None:
    clients, sent = held(4), []
    query = MaskedSumsQuery(bounds=((-9.0, 9.0),), bins=200)
    with simulated(clients, [SecureAggregation(bits=64)]) as (runtime, work):
        sites, deliver = AskedSites(runtime, work), runtime.next
        runtime.next = lambda until=math.inf: sent.append(deliver(until)) or sent[-1]  # type: ignore[method-assign]
        taking_part, total = sites.sums(query, work.masking)  # type: ignore[arg-type]
    own = [
        query.plan.vector(ClientColumns("", 9, {"0": clients.rows(k, "train").x[:, 0].numpy()}, {})) for k in range(4)
    ]  # type: ignore[index, union-attr]
    assert taking_part == [0, 1, 2, 3]
    assert total.tolist() == np.sum(own, axis=0).tolist()
    answers = [one.update.vectors[SUM].numpy() for one in sent if one is not None and one.task.query == query]  # type: ignore[union-attr]
    for vector in answers:  # uniform: each of 64 bits is 1 in half of 205 numbers, by 8 standard deviations
        bits = [int(((vector.view(np.uint64) >> np.uint64(bit)) & np.uint64(1)).sum()) for bit in range(64)]
        assert max(abs(count - len(vector) / 2) for count in bits) < 8 * math.sqrt(len(vector) / 4)


def test_a_simulated_client_that_is_lost_is_left_out_with_its_name_as_a_site_is() -> None:
    for secure in (False, True):
        said, request = list[str](), statistics_request((), None, {"x": (-9.0, 9.0)}, secure=secure)
        with simulated(held(5), [SecureAggregation(bits=64)] * secure, Absent(5)) as (runtime, work):
            found = statistics_at_sites(runtime, work, held(5), request, say=said.append)
        assert found.clients == ["c0", "c1", "c2", "c3"]
        assert found["x"].present == 4 * 9
        assert [*found.left_out] == ["c4"]
        assert said == [f"c4 is left out: {found.left_out['c4']}"]
        assert found.plain()["left_out"] == found.left_out
        assert "Left out: c4 (" in found._repr_html_()
        assert "4 clients, 1 left out" in repr(found)


def test_one_row_adds_no_more_than_is_stated() -> None:
    plan = SumPlan({"x": (-1.0, 5.0), "y": (0.0, 1.0)}, 8, {"c": ("a", "b")}, ())
    none = ClientColumns("", 0, {"x": np.zeros(0), "y": np.zeros(0)}, {"c": np.zeros(0, dtype=object)})
    extremes = [1e300, -1e300, np.nan, np.inf, -np.inf, 5.0, -1.0, 2.0, 0.3]
    for x in extremes:
        for y in extremes:
            row = ClientColumns("", 1, {"x": np.array([x]), "y": np.array([y])}, {"c": np.array(["z"], dtype=object)})
            added = (plan.vector(row) - plan.vector(none)) * STEP
            assert np.linalg.norm(added) <= plan.influence


@pytest.mark.full
def test_noise_hides_what_the_budget_says(frame: pandas.DataFrame) -> None:
    """The noise on a count has the standard deviation that is stated, and that of epsilon 1 by Balle and Wang."""
    errors = []
    for _ in range(30):
        found = statistics(frame, client="site", epsilon=1.0, delta=1e-5, bins=20, **HIDDEN)
        errors += [found["whole"].present - 400, found["skewed"].counts[0] - 0]
        assert found.privacy is not None
        assert 0.999 < found.privacy.epsilon_pld <= 1
        assert found.privacy.unit == "row"
    assert found.noise == pytest.approx(noise_for(1.0, 1e-5) * math.sqrt(8))
    present = np.array(errors[::2])
    assert 0.5 < present.std() / found.noise < 1.7  # 30 draws
    assert len(set(present.tolist())) == 30  # fresh for each question


def test_differences_of_two_questions_are_counted(frame: pandas.DataFrame, tmp_path: Path) -> None:
    """Who asks about all rows and about all but one has asked twice, whatever the process."""
    path, given = tmp_path / "spent.json", {"epsilon": 1.0, "delta": 1e-5, "bins": 20, **HIDDEN}
    statistics(frame, client="site", ledger=Ledger(1.2, 1e-5, path), **given)
    again = Ledger(1.2, 1e-5, path)
    with pytest.raises(SettingError, match=r"all 2 questions together, the ledger allows 1\.2"):
        statistics(frame.drop(index=5), client="site", ledger=again, **given)
    assert again.spent.releases == 1
    both = Ledger(2.0, 1e-5)
    for _ in range(2):
        both.spend("x", noise_for(1.0, 1e-5))
    assert 1.2 < both.spent.epsilon_pld < 1.6  # one Gaussian with noise / sqrt(2), less than the sum
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(SettingError, match=r"delta below 1, got 1 and 1: more promises nothing"):
        Ledger(1.0, 1.0)
    for text in ("{}", '{"epsilon": 1.2, "delta": 1e-05, "spent": [["x", -1.0]]}', "no JSON"):
        path.write_text(text)
        with pytest.raises(SettingError, match=r"ledger|damaged"):
            Ledger(1.2, 1e-5, path)


def test_noise_at_the_clients_adds_up(frame: pandas.DataFrame) -> None:
    given: dict[str, Any] = {"epsilon": 5.0, "delta": 1e-5, "quantiles": (), **HIDDEN}
    server = statistics(frame, client="site", **given)
    both = statistics(frame, client="site", secure=True, **given)
    plan = SumPlan(HIDDEN["bounds"], 0, {}, ())
    # as at sites, which state their numbers of rows: for a row in place of another
    each = server.noise * plan.exchange_influence / plan.influence
    assert both.noise == pytest.approx(each * math.sqrt(len(both.clients)))
    assert both.mode == "secure and private"
    assert abs(both["whole"].present - 400) < 9 * both.noise


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"epsilon": 1.0}, "epsilon needs a delta"),
        ({"delta": 1e-5}, "delta belongs to noise"),
        ({"epsilon": 1.0, "delta": 1e-5}, "epsilon needs bounds of column 'x', which must not be taken from the rows"),
        ({"secure": True, "columns": ["colour"]}, "secure needs categories of column 'colour'"),
        ({"secure": True, "columns": ["x"], "bounds": {"x": (0, 1)}}, "secure takes quantiles from a histogram"),
        ({"secure": True, "by_client": True}, "by_client shows what secure and epsilon are to hide"),
        ({"bounds": {"x": (2, 1)}}, "bounds of 'x' must be a low and a higher number"),
        ({"bounds": {"x": (0,)}}, "bounds of 'x' must be two numbers"),
        ({"bounds": {"sx": (0, 1)}}, "did you mean 'x'"),
        ({"columns": ["colou"]}, "client 'a' has no column 'colou'"),
        ({"quantiles": [1.5]}, "quantiles must be"),
        ({"epsilon": 1000.0, "delta": 1e-5, **HIDDEN}, "epsilon must be at most 50"),
        ({"tables": [("x",)]}, "tables must be pairs of different columns"),
        ({"client": None}, "a table needs client="),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(frame: pandas.DataFrame, change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingError, match=sentence):
        statistics(frame, **{"client": "site", "quantiles": (0.5,), **change})


def test_clients_that_do_not_fit_together_are_named(caplog: pytest.LogCaptureFixture) -> None:
    numbers, text = pandas.DataFrame({"x": [1.0]}), pandas.DataFrame({"x": ["one"]})
    assert statistics({"a": numbers, "b": text}).texts["x"].counts == {"1": 1, "one": 1}  # as a training takes it
    lacking = statistics({"a": numbers, "b": pandas.DataFrame({"x": [1.0], "y": [2]})})["y"]
    assert (lacking.present, lacking.missing) == (1, 1)
    assert "column 'y' is not in the table of a, whose rows count as gaps in it" in caplog.text
    with pytest.raises(SettingError, match="column 'x' must hold numbers below 1e150"):
        statistics({"a": pandas.DataFrame({"x": [1e200, -1e200]})})
    with pytest.raises(SettingError, match="secure sums are of 3"):
        statistics({"a": numbers, "b": numbers}, secure=True, bounds={"x": (0, 1)}, quantiles=())


@pytest.mark.parametrize("secure", [False, True], ids=["exact", "secure"])
def test_codes_that_are_long_numbers_are_counted_apart(secure: bool) -> None:
    """Before, both were counted as "1.23457e+06"."""
    frame = pandas.DataFrame({"site": list("aabc"), "code": [1234567, 1234568, 1234568, 1234568], "y": [0, 1, 0, 1]})
    stated = {"code": ["1234567", "1234568"], "y": ["0", "1"]}
    found = statistics(
        frame, client="site", quantiles=(), categories=stated, tables=[("code", "y")], secure=secure
    ).tables["code", "y"]
    counts = {(code, y): round(held.get(y, 0)) for code, held in found.items() for y in ("0", "1")}
    assert {place: count for place, count in counts.items() if count} == {
        ("1234567", "0"): 1, ("1234568", "0"): 1, ("1234568", "1"): 2,
    }  # fmt: skip


def test_a_number_as_text() -> None:
    numbers = np.array([3.0, -0.0, 1e15, 0.1234567, np.nan, np.inf])
    assert as_text(numbers).tolist() == ["3", "0", "1000000000000000", "0.123457", None, "inf"]


@pytest.mark.parametrize("apart", [256.0, 1e-12])
def test_numbers_that_lie_too_near_for_so_many_bins_have_a_histogram(apart: float) -> None:
    """As of times in nanoseconds; numpy.histogram refuses them."""
    base = 1.7e18 if apart > 1 else 1.0
    low, high = np.array([base]), np.array([base + apart])
    with pytest.raises(ValueError, match="Too many bins"):
        np.histogram_bin_edges((base, base + apart), 10_000)
    edges = edges_of(low, high, 10_000)
    assert edges.shape == (1, 10_001)
    assert (edges[0, 0], edges[0, -1]) == (low[0], high[0])
    assert (np.diff(edges[0]) >= 0).all()
