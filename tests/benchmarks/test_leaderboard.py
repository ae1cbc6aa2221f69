"""The leaderboard: every method has the same budget, validation rows choose, and what is said holds in simulations."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import norm

from piebald import data, models, recipes
from piebald.data.partition import Dirichlet, clients_from
from piebald.report.paired import Scores
from piebald.storage.schema import packed_values, unpacked_values

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODULES = (
    "federations", "grid", "truth", "known", "portfolio", "methods", "tiers", "competition", "standings", "as_truth",
    "page",
)  # fmt: skip
CLIENTS, ROWS = 6, 40


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """The benchmark's modules, for one test: their names are no package's."""
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    for folder in ("advise", "leaderboard"):
        monkeypatch.syspath_prepend(str(BENCHMARKS / folder))
    import as_truth
    import competition
    import methods
    import page
    import standings
    import tiers

    for name in MODULES:
        if name in sys.modules:
            monkeypatch.setitem(sys.modules, name, sys.modules[name])
    return SimpleNamespace(
        as_truth=as_truth, competition=competition, methods=methods, page=page,
        standings=standings, tiers=tiers, folder=tmp_path / "results", docs=tmp_path / "docs",
    )  # fmt: skip


# -- the protocol


def test_every_recipe_is_there_or_its_absence_has_a_reason(board: SimpleNamespace) -> None:
    listed = {method.recipe: method.reason for method in board.methods.METHODS}
    assert set(recipes.names()) == set(listed) - {board.methods.POOLED, board.methods.KNN_PER}
    assert {name for name, reason in listed.items() if reason} == {"dp_sgd", "flexlora"}
    assert len(board.methods.BY_NAME) == len(board.methods.METHODS)


def test_every_method_has_as_many_settings_of_its_own_space_and_the_same_rates(board: SimpleNamespace) -> None:
    methods, (low, high) = board.methods, board.methods.RATES
    rates = {tuple(setting["lr"] for setting in method.settings()) for method in methods.METHODS}
    (drawn,) = rates
    strata = [int(methods.SETTINGS * np.log(rate / low) / np.log(high / low)) for rate in drawn]
    assert sorted(strata) == list(range(methods.SETTINGS))
    for method in methods.METHODS:
        settings = method.settings()
        assert len(settings) == methods.SETTINGS
        for name, values in method.space.items():
            own = [setting[name] for setting in settings]
            if isinstance(values, methods.Between):
                assert all(values.low <= value <= values.high for value in own)
                assert len(set(own)) == methods.SETTINGS
            else:
                assert set(own) == set(values)
        for setting in settings:
            recipe = method.make(setting)  # a setting that the recipe does not take is refused here
            assert recipe.training.lr == setting["lr"]  # type: ignore[attr-defined]


def test_every_method_passes_over_the_rows_as_often(board: SimpleNamespace) -> None:
    """Also where it trains two models, or goes on after the last round."""
    for name, second in {"fedavg": 0, "ditto": 1, "fedrep": 1}.items():
        trainer = board.methods.BY_NAME[name].make({"lr": 0.1}).training
        other = getattr(trainer, "personal_epochs", getattr(trainer, "head_epochs", 0))
        assert trainer.epochs + other == 2, name
        assert other == second
    for name in ("fine_tuned", "fedbabu"):
        method = board.methods.BY_NAME[name]
        assert 2 * method.rounds + method.fixed["tune_epochs"] == board.methods.PASSES


@pytest.fixture
def federation(board: SimpleNamespace) -> Any:
    """Three clients with 150 digits, whose test rows differ in number."""
    clients = Dirichlet(
        clients=3, alpha=5.0, limit=150, sizes={"kind": "power_law", "exponent": 1.0}, validation=0.2, test=0.3, seed=1
    ).split(data.digits())

    def network(seed: int, own: Any) -> Any:
        name, settings = own or ("mlp_bn", {"hidden": [8]})
        return models.build_model(name, (1, 8, 8), 10, seed=seed, **settings)

    return board.tiers.Entrants("digits", "digits", board.tiers.LABELS, "digits", lambda: clients, network)


def test_a_line_holds_the_rows_that_the_kept_version_is_right_on(board: SimpleNamespace, federation: Any) -> None:
    clients, fedavg = federation.clients(), board.methods.BY_NAME["fedavg"]
    line = board.competition.run_one(federation, clients, fedavg, 1, 0)
    sizes = [clients.size(client, "test") for client in range(3)]
    assert len(set(sizes)) > 1, "clients are told apart by their rows"
    # the reference: the same run once more, with the package's own scores
    settings = fedavg.settings()[1]
    import piebald
    from piebald.runtimes import Simulator

    run = piebald.run(
        fedavg.make(settings), clients, federation.model(0), seed=0, rounds=16, evaluate_every=4, keep="best",
        measure="none", runtime=Simulator(engine="batched", stack=3, workers=0),
    )  # fmt: skip
    right = np.split(unpacked_values(line["test"]), np.cumsum(sizes)[:-1])
    assert {client: part.mean() for client, part in enumerate(right)} == pytest.approx(run.per_client)
    assert line["version"] == run.best
    assert (line["settings"], line["seed"], line["method"]) == (settings, 0, "fedavg")


def test_rows_in_one_place_keep_the_order_of_clients(board: SimpleNamespace, federation: Any) -> None:
    clients = federation.clients()
    together, about = board.competition.in_one_place(clients), board.competition.about(clients)
    for split in ("train", "validation", "test"):
        held = np.concatenate([clients.rows(client, split).x.numpy() for client in range(3)])
        assert np.array_equal(together.rows(0, split).x.numpy(), held)
    line = board.competition.run_one(federation, clients, board.methods.BY_NAME["centralised"], 1, 0)
    assert len(unpacked_values(line["test"])) == len(unpacked_values(about["naive"])) == sum(about["test"])
    assert sum(line["validation"]) <= sum(about["validation"])
    most = np.bincount(clients.rows(0, "train").y).argmax()
    expected = (clients.rows(0, "test").y == most).numpy().astype(float)
    assert np.array_equal(unpacked_values(about["naive"])[: about["test"][0]], expected)


@pytest.mark.full
def test_neighbours_and_a_network_of_its_own(board: SimpleNamespace, federation: Any) -> None:
    clients = federation.clients()
    line = board.competition.run_one(federation, clients, board.methods.BY_NAME["knn_per"], 1, 0)
    assert all(0 <= right <= clients.size(c, "test") for c, right in enumerate(line["test"]))
    assert sum(line["test"]) > 0
    cgau = board.methods.BY_NAME["cgau"]
    assert "conditioning" in str(federation.model(0, cgau.network))
    assert len(unpacked_values(board.competition.run_one(federation, clients, cgau, 0, 0)["test"])) == sum(
        clients.size(client, "test") for client in range(3)
    )


@pytest.mark.full
def test_methods_without_rounds_have_the_time_of_the_rounds(board: SimpleNamespace, federation: Any) -> None:
    """On unequal devices, where fast ones need not wait; everywhere else they are not compared."""
    unequal, runs, by_name = dataclasses.replace(federation, slow=True), board.competition, board.methods.BY_NAME
    fitting = {method.name for method in board.methods.RUN if board.competition.fits(unequal, method)}
    assert fitting == {name for name, method in by_name.items() if method.clock} | {"centralised", "local", "fedavg"}
    assert not any(board.competition.fits(federation, by_name[name]) for name in ("fedbuff", "async_dvw"))
    alike, waits, goes_on = (
        runs.run_one(where, federation.clients(), by_name[name], 1, 0)["steps"]
        for where, name in ((federation, "fedavg"), (unequal, "fedavg"), (unequal, "async_fedavg"))
    )
    assert waits == alike
    assert goes_on > 1.3 * waits


def test_the_network_for_text_reads_the_order_of_characters(board: SimpleNamespace) -> None:
    network, text = board.tiers.CharacterLstm(128, 12, width=8), torch.tensor([[97.0, 98.0, 99.0], [98.0, 97.0, 99.0]])
    scores = network(text)
    assert scores.shape == (2, 12)
    assert not torch.allclose(scores[0], scores[1])


@pytest.mark.full
def test_patients_are_scored_by_the_pairs_that_are_known(board: SimpleNamespace) -> None:
    """A concordance has no single rows; the Kaplan-Meier curve is right in half of the pairs."""
    random, parts = np.random.default_rng(3), {}
    for name, deaths in {"north": 0.5, "south": 0.5, "without deaths": 0.0}.items():
        x = random.normal(size=(100, 2)).astype(np.float32)
        target = {"time": np.exp(-2 * x[:, 0]), "event": (random.random(100) < deaths).astype(np.float32)}
        parts[name] = (x, target)
    clients = clients_from(parts, seed=0, validation=0.2, test=0.4)
    patients = board.tiers.Entrants(
        "patients", "patients", board.tiers.OWN, "patients", lambda: clients,
        lambda seed, own: models.build_model("mlp_bn", (2,), 1, seed=seed, hidden=[8]), tier=board.tiers.SURVIVAL,
        metric="concordance", options={"loss": "survival", "metrics": ["concordance"]},
    )  # fmt: skip
    about = board.competition.about(clients)
    assert about["test"] == [40, 40, 0], "where nobody died there is nothing to compare"
    assert about["naive"] == [20, 20, 0]
    for sign, value in ((1, 1.0), (-1, 0.0)):  # a hazard that puts all patients in order, and one that reverses them
        of_model = board.competition._of_one_model(lambda x, sign=sign: sign * x[:, :1], clients, "test")
        assert of_model == {0: value, 1: value}
    for name in ("centralised", "local"):
        line = board.competition.run_one(patients, clients, board.methods.BY_NAME[name], 1, 0)
        assert line["rows"][2] == line["test"][2] == 0
        assert all(0.8 * 40 < right <= 40 for right in line["test"][:2]), name
    assert not board.competition.fits(patients, board.methods.BY_NAME["ditto"])


def test_real_networks_have_the_clients_of_the_small_tier(board: SimpleNamespace) -> None:
    """So that both are compared on the same people; what each needs is named there."""
    small, real, large = (
        {one.rows: one for one in board.tiers.FEDERATIONS if one.tier == tier} for tier in ("small", "real", "large")
    )
    assert set(large) < set(real) <= set(small)
    assert set(board.methods.FEW) < set(board.methods.BY_NAME)
    fitting = {method.name for method in board.methods.RUN if board.competition.fits(real["heart"], method)}
    assert fitting == set(board.methods.FEW)
    assert sum(board.competition.fits(large["har"], method) for method in board.methods.RUN) > 30


# -- the competition and its page


LEVELS = {"local": 0.6, "fedavg": 0.4, "ditto": 0.9, "centralised": 0.65}


def bits(random: np.random.Generator, level: float) -> NDArray[np.float64]:
    return (random.random(CLIENTS * ROWS) < level).astype(float)


@pytest.fixture
def made_up(board: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int, int]]:
    """Runs that take no time: the third setting is best by validation rows and worst by test rows."""
    ran: list[tuple[str, str, int, int]] = []
    few = tuple(method for method in board.methods.RUN if method.name in LEVELS)
    for module in (board.competition, board.standings):
        monkeypatch.setattr(module, "RUN", few)
        monkeypatch.setattr(module, "FEDERATIONS", board.tiers.FEDERATIONS[:2])

    def run_one(federation: Any, clients: Any, method: Any, number: int, seed: int) -> dict[str, Any]:
        ran.append((federation.name, method.name, number, seed))
        random, level = np.random.default_rng([seed, number, *method.name.encode()]), LEVELS[method.name]
        return {
            "method": method.name, "settings": method.settings()[number], "seed": seed, "rows": [100] * CLIENTS + [0],
            "validation": [round(100 * level) + (number == 2)] * CLIENTS + [0], "bytes": 10**6, "steps": 1,
            "seconds": 1.0, "test": packed_values(bits(random, level - 0.05 * (number == 2))), "version": 16,
        }  # fmt: skip

    about = {
        "clients": [*(f"site {number}" for number in range(CLIENTS)), "site without rows to judge by"],
        "train": [100] * (CLIENTS + 1), "validation": [100] * CLIENTS + [0], "test": [ROWS] * CLIENTS + [0],
        "naive": packed_values(bits(np.random.default_rng(9), 0.3)),
    }  # fmt: skip
    monkeypatch.setattr(board.competition, "run_one", run_one)
    monkeypatch.setattr(board.competition, "about", lambda clients: about)
    monkeypatch.setattr(board.tiers.Entrants, "clients", lambda self: None)
    return ran


def test_settings_are_chosen_by_validation_and_repeated_with_the_other_seeds(
    board: SimpleNamespace, made_up: list[tuple[str, str, int, int]]
) -> None:
    assert board.competition.compete(only=["local", "ditto"], folder=board.folder) == 2 * 2 * (4 + 4)
    assert [run[0] for run in made_up] == ["heart"] * 16 + ["har-subjects"] * 16, (
        "a federation is finished before the next"
    )
    local = [(number, seed) for name, method, number, seed in made_up if (name, method) == ("heart", "local")]
    assert local == [(0, 0), (1, 0), (2, 0), (3, 0), (2, 1), (2, 2), (2, 3), (2, 4)]
    assert board.competition.compete(only=["local", "ditto"], folder=board.folder) == 0, "what is there stays"
    assert board.competition.compete(folder=board.folder) == 2 * 2 * 8, "a method is added without the others"


def test_the_page_says_what_the_runs_say(board: SimpleNamespace, made_up: list[tuple[str, str, int, int]]) -> None:
    board.competition.compete(folder=board.folder)
    board.page.write(board.folder, board.docs)
    text = (board.docs / "leaderboard.md").read_text("utf-8")
    rows = [line for line in text.splitlines() if line.startswith(("| Ditto", "| Local", "| FedAvg |", "| Pooled"))]
    assert [row.split(" | ")[0] for row in rows] == ["| Ditto", "| Pooled", "| Local", "| FedAvg"]
    ditto = [cell.strip() for cell in rows[0].strip("|").split("|")]
    assert ditto[2:6] == ["2", "0", "2", "2"], "clearly above Local in both federations, and the leader"
    assert float(ditto[1]) == pytest.approx(30, abs=3)
    assert "**" not in ditto[1], "two federations are too few for an interval"
    assert "Ditto: **+" in text, "on a federation there is one, and it stands beside the bold number"
    assert "FedAvg is clearly above in 0, below in 2 of 2." in text
    assert board.page.LITTLE in text
    assert "DP-SGD: gives up accuracy" in text
    assert all((board.docs / "images" / name).stat().st_size > 5000 for name in board.page.IMAGES)


@pytest.mark.full
def test_tiers_beside_the_small_one_have_a_table_of_a_few_methods(
    board: SimpleNamespace, made_up: list[tuple[str, str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prepared table of the hospitals stands beside their small network, and patients have points of their own."""
    board.competition.compete(folder=board.folder)
    few = [one for one in board.tiers.FEDERATIONS if one.name in ("heart", "heart-table", "cancer")]
    for module in (board.competition, board.standings, board.page):
        monkeypatch.setattr(module, "FEDERATIONS", few)
    board.competition.compete(only=["local", "centralised"], folder=board.folder, tier="real")
    board.competition.compete(folder=board.folder, tier="survival")
    board.page.write(board.folder, board.docs)
    text = (board.docs / "leaderboard.md").read_text("utf-8")
    assert "<summary>Real networks" not in text, "FedAvg is not there yet"
    heads, _, *rows = text[text.index("| method | cancer patients") :].partition("\n\n")[0].splitlines()
    assert heads == "| method | cancer patients of six regions, 7 clients |"
    cells = dict(map(str.strip, row.strip("|").split(" | ", 1)) for row in rows)
    assert cells["CFL"] == "", "it was not tried"
    assert float(cells["Local"]) == pytest.approx(60, abs=5)
    assert cells["FedAvg"].startswith("**-"), "clearly below"
    board.competition.compete(folder=board.folder, tier="real")
    board.page.write(board.folder, board.docs)
    text = (board.docs / "leaderboard.md").read_text("utf-8")
    assert "| method | small | heart hospitals, prepared table, two layers of 64 |" in text


def test_a_method_that_does_not_fit_is_named_and_one_that_is_not_done_keeps_its_federation_off(
    board: SimpleNamespace, made_up: list[tuple[str, str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    goes = board.competition.run_one

    def run_one(federation: Any, clients: Any, method: Any, number: int, seed: int) -> dict[str, Any]:
        if (federation.name, method.name) == ("heart", "ditto"):
            raise board.competition.SettingError("ditto needs labels")
        return dict(goes(federation, clients, method, number, seed))

    monkeypatch.setattr(board.competition, "run_one", run_one)
    board.competition.compete(names=["heart"], folder=board.folder)
    board.competition.compete(names=["har-subjects"], only=["local", "fedavg"], folder=board.folder)
    assert board.competition.compete(names=["heart"], folder=board.folder) == 0
    board.page.write(board.folder, board.docs)
    text = (board.docs / "leaderboard.md").read_text("utf-8")
    assert "- heart hospitals, Ditto: ditto needs labels" in text
    assert "- Not trained to the end: HAR subjects; " in text


def test_a_portfolio_is_learned_from_other_data_sets(
    board: SimpleNamespace, made_up: list[tuple[str, str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validation rows alone would choose Ditto's third setting, which is 5 points worse than what is learned."""
    board.competition.compete(folder=board.folder)
    here = board.as_truth.known_federations(board.folder)
    assert [len(one.entries) for one in here] == [3 * 4, 3 * 4], "all but what is no federation"
    assert board.as_truth.costs(here[:1]) == [], "one data set has no others"
    monkeypatch.setattr(board.as_truth, "COUNT", 1)
    lost = {cost.words: np.array(cost.points) for cost in board.as_truth.costs(here)}
    assert lost["training alone"] == pytest.approx(30, abs=6)
    assert lost["learned here, of all methods"] == pytest.approx(-5, abs=4)
    nearest = board.as_truth._nearest(here[0].entries, {"recipe": "ditto", "lr": 0.16, "lam": 1.0})
    settings = board.methods.BY_NAME["ditto"].settings()
    apart = [abs(np.log(own["lr"] / 0.16)) + abs(np.log(own["lam"])) for own in settings]
    assert nearest == f"ditto {board.competition.label(settings[int(np.argmin(apart))])}"


def test_without_runs_there_is_no_page(board: SimpleNamespace) -> None:
    with pytest.raises(SystemExit, match="no federation has all runs yet"):
        board.page.write(board.folder, board.docs)


def test_the_page_can_be_finished() -> None:
    text = (BENCHMARKS.parent / "docs" / "leaderboard.md").read_text("utf-8")
    words = text.replace("|", " ").replace("---", " ").split()
    assert len(words) <= 2600
    read = text[: text.index("<details")].replace("|", " ").replace("---", " ").split()
    assert len(read) <= 1500


# -- simulations of what is said


def simulate(random: np.random.Generator, gains: dict[str, float], clients: int, rows: int = 50) -> dict[str, Scores]:
    """Five seeds of methods that are right on 70 % of the rows, and on more by a gain.

    A row is right where the sum of its own difficulty, what a method makes of it, and what a seed makes of it is high.
    """
    shape, names = (clients, rows), [f"site {number}" for number in range(clients)]
    difficulty, scores = random.normal(size=shape), {}
    for name, gain in gains.items():
        level = norm.ppf(0.7 + gain) * np.sqrt(3)
        of_method = difficulty + random.normal(size=shape)
        right = (level + of_method + random.normal(size=(5, *shape)) > 0).astype(float)
        single = {(seed, client): right[seed, c] for seed in range(5) for c, client in enumerate(names)}
        scores[name] = Scores(right.mean(2), names, sizes=[rows] * clients, rows=single, counted=True)
    return scores


@pytest.mark.full
def test_a_method_ten_points_ahead_is_told_apart_from_local(board: SimpleNamespace) -> None:
    """With 10 clients of 50 test rows, beside 44 methods that are not ahead, in nine of ten federations."""
    random, times = np.random.default_rng(4), 20
    told = 0
    for _ in range(times):
        scores = simulate(random, {"local": 0.0, "ahead": 0.1, **{f"m{number}": 0.0 for number in range(44)}}, 10)
        count = board.standings.effective_comparisons(scores, "local")
        assert 1 < count < 45, "correlated comparisons are fewer than independent ones"
        gap = board.standings.compared(scores["ahead"], scores["local"], count)
        told += gap.mean > 0 and gap.p < 0.05
    assert told >= 0.9 * times


@pytest.mark.full
def test_methods_that_are_alike_are_rarely_told_apart(board: SimpleNamespace) -> None:
    """Not from Local, and none of them is called behind the leader, though the leader is the luckiest."""
    random, times = np.random.default_rng(5), 30
    above, behind = 0, 0
    for _ in range(times):
        scores = simulate(random, {"local": 0.0, **{f"m{number}": 0.0 for number in range(6)}}, 10)
        above += any(gap.p < 0.05 for gap in board.standings.against(scores, "local").values())
        behind += "local" not in board.standings.not_behind(scores)
    assert above <= 4
    assert behind <= 4


def test_the_effective_number_is_that_of_independent_or_of_equal_comparisons(board: SimpleNamespace) -> None:
    random = np.random.default_rng(6)
    apart = simulate(random, {f"m{number}": 0.0 for number in range(9)}, 10)
    one = apart["m0"]
    assert board.standings.effective_comparisons({"local": apart["m1"], "a": one, "b": one, "c": one}, "local") <= 2
    # Dunnett (1955), table 2a: 2.63 for eight treatments, infinite freedom, one-sided 2.42 with correlations of 0.5
    number = board.standings.effective_comparisons(apart, "m0")
    assert norm.isf(0.025 / number) == pytest.approx(2.64, abs=0.06)


@pytest.mark.full
def test_choice_by_validation_finds_no_gain_where_there_is_none(board: SimpleNamespace) -> None:
    """Of 12 equal methods the best by validation rows gains nothing on test rows; by test rows it would seem to."""
    random, honest, flattered = np.random.default_rng(7), [], []
    for _ in range(60):
        gains = {"local": 0.0, **{f"m{number}": 0.0 for number in range(12)}}
        validation, test = (simulate(random, gains, 8, rows) for rows in (25, 50))
        results = {name: SimpleNamespace(validation=validation[name].mean, scores=test[name]) for name in gains}
        standing = board.standings.Standing(None, results, test["local"], {}, [])
        methods = [name for name in gains if name != "local"]
        for found, best in (
            (honest, standing.best(methods)),
            (flattered, max(methods, key=lambda name, own=test: own[name].mean)),
        ):
            found.append(100 * (test[best].mean - test["local"].mean))
    error = np.std(honest) / np.sqrt(len(honest))
    assert abs(np.mean(honest)) < 3 * error
    assert np.mean(flattered) > 2


def test_federations_are_the_unit_of_evidence(board: SimpleNamespace) -> None:
    over, random = board.standings.over_federations, np.random.default_rng(8)
    mean, low, high = over([1.0, 2.0, 3.0, 4.0], list("abcd"))
    assert mean == 2.5
    assert np.isnan([low, high]).all(), "four data sets are too few"
    assert np.isnan(over([1.0, 2.0, 3.0, 4.0, 5.0], list("abcdd"))[1]), "those of the same rows count once"
    held = 0
    for _ in range(100):
        _, low, high = over(random.normal(size=6).tolist(), list("abcdef"))
        held += low <= 0 <= high
    assert 90 <= held <= 100
