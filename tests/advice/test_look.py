"""The look before training: what rows can show, which unlikeness is found, which recipes are refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from piebald import data
from piebald.advice import look
from piebald.advice.odd_sites import detectable_difference
from piebald.advice.unlikeness import probe, references
from piebald.core.errors import SettingError
from piebald.core.randomness import generator
from piebald.data.partition import Dirichlet, Disjoint, FastSlow, FlipPairs, Iid, Sensor, Sites, clients_from
from piebald.models import build_model

SWAPPED = FlipPairs(pairs=((0, 5), (1, 6), (2, 7), (3, 8), (4, 9)), clients=(0, 1, 2, 3))


def found_share(rows: list[int], difference: float, disagreement: float, repeats: int = 4000) -> float:
    """How often a paired z-test of the mean over clients finds a true difference."""
    rng = generator(0, "power")
    better = (disagreement + difference) / 2
    means, errors = [], []
    for count in rows:
        wins = rng.multinomial(count, [better, disagreement - better, 1 - disagreement], size=repeats)
        mean = (wins[:, 0] - wins[:, 1]) / count
        means.append(mean)
        errors.append((wins[:, 0] + wins[:, 1]) / count**2 - mean**2 / count)
    mean, error = np.mean(means, 0), np.sqrt(np.sum(errors, 0)) / len(rows)
    return float((np.abs(mean) > 1.96 * error).mean())


@pytest.mark.parametrize("rows", [[60] * 9, [20, 40, 400], [300]])
def test_the_detectable_difference_is_found_four_times_in_five(rows: list[int]) -> None:
    smallest = detectable_difference(rows)
    assert smallest is not None
    assert 0.75 < found_share(rows, smallest, 0.1) < 0.93
    assert found_share(rows, smallest / 2, 0.1) < 0.5
    assert found_share(rows, 0.0, 0.1) < 0.1


def test_more_rows_show_smaller_differences_and_none_show_nothing() -> None:
    few, more = detectable_difference([10, 10, 0]), detectable_difference([1000, 1000])
    assert few is not None
    assert more is not None
    assert more < few <= 1
    assert few == detectable_difference([10, 10])
    assert detectable_difference([0, 0]) is None
    assert detectable_difference([1]) == 1.0  # one row shows nothing that exists
    with pytest.raises(SettingError, match="disagreement must be a finite number above 0"):
        detectable_difference([10], disagreement=0.0)


def words(clients: object, **more: object) -> dict[str, str]:
    return {kind: one.word for kind, one in look(clients, **more).unlikeness.items()}


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_iid_clients_are_alike_in_everything(seed: int) -> None:
    found = words(Iid(clients=8, seed=seed).split(data.digits()), seed=seed)
    assert [found[kind] for kind in ("size", "label", "speed")] == ["none", "none", "unknown"]
    values = look(Iid(clients=8, seed=seed).split(data.digits()), seed=seed).unlikeness
    assert all((values[kind].value or 0.0) < 0.1 for kind in ("feature", "label_given_feature"))


def test_each_kind_is_found_where_it_was_made() -> None:
    digits = data.digits()
    value = {
        name: {kind: one.value or 0.0 for kind, one in look(clients).unlikeness.items()}
        for name, clients in {
            "iid": Iid(clients=8).split(digits),
            "label": Dirichlet(clients=8, alpha=0.1).split(digits),
            "label_given_feature": Iid(clients=8, changes=(SWAPPED,)).split(digits),
            "feature": Iid(clients=8, changes=(Sensor(gain=0.5, bias=0.2),)).split(digits),
        }.items()
    }
    for kind in ("label", "label_given_feature", "feature"):
        largest = max(value, key=lambda name: value[name][kind])
        assert largest == kind, (kind, value)
        assert value[kind][kind] > value["iid"][kind] + 0.2
    # what was not made is not found
    assert value["label"]["label_given_feature"] < 0.1
    assert value["feature"]["label"] < 0.05


def test_disjoint_classes_leave_features_unknown_and_say_why() -> None:
    found = look(Disjoint(clients=5, classes_each=2).split(data.digits()))
    assert found.unlikeness["feature"].value is None
    assert found.unlikeness["label"].word != "none"
    assert "no client has enough rows of classes that others have" in " ".join(found.text().split())


def test_speed_is_the_share_of_a_round_that_devices_wait() -> None:
    fleet = FastSlow(slow_factor=5.0, share_slow=0.5)
    clients = clients_from({name: (np.eye(4), [0, 1, 0, 1]) for name in ("a", "b", "c", "d")}, test=0.0)
    assert look(clients, fleet=fleet).unlikeness["speed"].value == pytest.approx(1 - (1 + 5) / 2 / 5)


@pytest.mark.full
def test_recipes_are_asked_and_their_reasons_are_shown() -> None:
    digits = data.digits()
    without = look(Iid(clients=3).split(digits), build_model("mlp", (1, 8, 8), 10))
    assert "has no batch norm" in without.unusable["distfl"]
    assert "needs validation rows" in without.unusable["sync_dvw"]
    assert "fedavg" not in without.unusable
    rows = Iid(clients=3, validation=0.2).split(digits)
    with_both = look(rows, build_model("mlp_bn", (1, 8, 8), 10), recipes={"D": "distfl", "S": "sync_dvw"})
    assert with_both.unusable == {}
    assert with_both.asked == 2


def test_text_fits_a_terminal_and_rows_are_plain() -> None:
    names = {f"the hospital of a very long name, number {n}\x1b[2J": (np.eye(6), [0, 1, 0, 1, 0, 1]) for n in range(3)}
    found = look(clients_from(names, test=0.3), build_model("logistic", (6,), 2))
    assert max(map(len, found.text().splitlines())) <= 80
    assert "\x1b" not in json.dumps(found.rows(), allow_nan=False)
    assert [row["client"] for row in found.rows()["clients"]] == list(found.names)


def test_numbers_to_predict_have_no_points_of_accuracy() -> None:
    rng = generator(1, "look")
    x = rng.normal(size=(120, 3))
    alike = {str(n): (x[n::4], x[n::4] @ [1.0, 2.0, 3.0]) for n in range(4)}
    turned = alike | {"3": (x[3::4], -(x[3::4] @ [1.0, 2.0, 3.0]))}
    assert look(clients_from(alike)).detectable("test") is None
    lost = [look(clients_from(rows)).unlikeness["label_given_feature"].value or 0.0 for rows in (alike, turned)]
    assert lost[1] > lost[0]


def test_rows_at_their_sites_are_not_asked_for() -> None:
    sites = Sites(clients=["a", "b"], inputs=[5], classes=["no", "yes"]).clients_elsewhere()
    found = look(sites, build_model("logistic", (5,), 2))
    assert found.sizes["train"] is None
    assert {one.word for one in found.unlikeness.values()} == {"unknown"}
    assert "distfl" in found.unusable
    assert "cannot be counted here" in found.text()


def test_words_follow_from_the_reference_federations() -> None:
    found = look(Dirichlet(clients=8, alpha=0.3).split(data.digits())).unlikeness["label"]
    named = {one["name"]: one["label"] for one in references()}
    assert found.value is not None
    assert found.like is not None
    distance = {name: abs(value - found.value) for name, value in named.items() if value is not None}
    assert distance[found.like] == min(distance.values())
    present = sorted(value for value in named.values() if value)
    below = sum(value < found.value for value in present) / len(present)
    assert found.word == ("mild" if below < 1 / 3 else "moderate" if below < 2 / 3 else "strong")


@pytest.mark.full
def test_many_clients_and_wide_inputs_are_looked_at_in_part() -> None:
    rng = generator(2, "look")
    many = {str(n): (rng.normal(size=(3, 2)), [0, 1, 0]) for n in range(6000)}
    assert look(clients_from(many, test=0.0)).unlikeness["label"].word == "none"
    wide = [(rng.normal(size=(12, 3000)), [0, 1] * 6) for _ in range(3)]
    assert look(clients_from(wide, test=0.0)).unlikeness["feature"].value is not None


def test_one_client_is_unlike_nobody() -> None:
    alone = look(clients_from({"b": (np.eye(4), [0, 1, 0, 1])}))
    assert {one.word for one in alone.unlikeness.values()} == {"unknown"}
    assert "there is one client" in alone.text()


@pytest.mark.parametrize("constant", [1.0, 0.0, -0.1, 1e20, 1e-20, 1e300])
@pytest.mark.parametrize("unit", [1.0, 1e-12, 1e12, 1e200])
def test_constant_columns_and_units_hide_no_unlikeness(constant: float, unit: float) -> None:
    """A column that says nothing, such as a country that all rows share, and a unit leave a probe as it is."""
    rng = np.random.default_rng(0)
    client, label = np.repeat([0, 1], 60), np.tile([0, 1], 60)
    inputs = rng.normal(size=(120, 3)) + 3.0 * client[:, None]
    expected = probe(inputs, label, client, 0, seed=0)
    shown = probe(np.column_stack([np.full(120, constant), inputs * unit]), label, client, 0, seed=0)
    assert expected is not None
    assert shown is not None
    assert expected.feature > 0.9
    assert shown.feature == pytest.approx(expected.feature, abs=1e-6)
    assert shown.label_given_feature == pytest.approx(expected.label_given_feature, abs=1e-6)
