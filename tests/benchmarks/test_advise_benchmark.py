"""The adviser's benchmark: the race is replayed by the rules, and scores are what a truth that was made up says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from piebald.advice import race

MODULES = (
    "federations", "grid", "truth", "single_rows", "known", "portfolio", "simulated", "product", "score", "adviser",
)  # fmt: skip
FOLDER = Path(__file__).parents[2] / "benchmarks" / "advise"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, Any]:
    """The benchmark's modules, for one test: their names are no package's."""
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(FOLDER))
    import grid
    import known
    import score

    made = grid, known, score
    for name in MODULES:
        if name in sys.modules:
            monkeypatch.setitem(sys.modules, name, sys.modules[name])
    return made


ROWS = {"validation": [100] * 6, "test": [100] * 6}
SIZES = {"validation": [9, 16], "test": [1, 21]}  # of two clients, bytes that are full and others


def lines(best: str, points: dict[str, float], seeds: int, grid: Any, leaders: bool = False) -> list[dict[str, Any]]:
    """A truth in which every client has the points of its recipe and the middle rate is best."""
    rng = np.random.default_rng(0)
    found = []
    for seed in range(seeds):
        for entry in [*grid.entries(False), *(grid.entries(False, leaders=True) if leaders else [])]:
            settings = dict(entry.settings)
            level = points.get(entry.recipe, 50.0) - (0 if settings["lr"] == grid.RATES[0] else 10)
            values = [[round(100 * (level - lag + noise)) for noise in rng.normal(size=6)] for lag in (8, 4, 0)]
            found.append({
                "entry": entry.label, "recipe": entry.recipe, "settings": settings, "seed": seed, "bytes": 1,
                "steps": 1, "validation": values,
                "test": [round(100 * (level + noise)) for noise in rng.normal(size=6)],
            })  # fmt: skip
    return found


def test_a_clear_winner_wins_by_every_rule_but_those_that_leave_it_out(parts: tuple[Any, Any, Any]) -> None:
    grid, known, score = parts
    made = lines("ditto", {"ditto": 90.0, "local": 60.0, "fedavg": 40.0}, 3, grid)
    truth = score.Known(score.BY_NAME["digits-iid"], known.entries_of(made), ROWS)
    assert truth.seeds == [0, 1, 2]
    for rule in ("full grid, one seed", "always Ditto"):
        assert score.judged(truth, rule, []).regret < 3, rule  # the same points, but for noise
    assert score.judged(truth, "always alone", []).regret > 25
    assert score.federating_pays(truth) is True
    assert score.judged(truth, "always alone", []).pays == 0
    assert score.judged(truth, "full grid, all seeds", []).cost == 1
    noise = score.Known(truth.federation, known.entries_of(lines("", {}, 3, grid)), ROWS)
    assert score.federating_pays(noise) is None


CLEAR = {"ditto": 90.0, "local": 60.0, "fedavg": 40.0}


@pytest.mark.parametrize("portfolio", ["learned", "of the package"])
def test_the_adviser_finds_a_clear_winner_within_its_budget(portfolio: str, parts: tuple[Any, Any, Any]) -> None:
    grid, known, score = parts
    from adviser import advised

    truth = score.Known(score.BY_NAME["digits-iid"], known.entries_of(lines("ditto", CLEAR, 2, grid)), ROWS)
    settings = score.learned([truth]) if portfolio == "learned" else race.portfolio()
    found = advised(truth, 0, 230, settings)
    assert found.entry.recipe == "ditto"
    assert found.pays.pays == found.before.pays == "yes"
    assert (found.pays.rows, found.before.rows) == ("test", "validation")
    assert found.rounds <= 230


def test_methods_are_compared_on_the_same_rows_where_these_are_known(parts: tuple[Any, Any, Any]) -> None:
    """A method that is right wherever Local is, and on a row more, pays; by shares alone that cannot be told."""
    grid, known, score = parts
    from adviser import advised

    truth = score.Known(score.BY_NAME["digits-iid"], known.entries_of(lines("", {}, 3, grid)), ROWS)
    local, other = np.repeat([1.0, 0.0], [50, 50]), np.repeat([1.0, 0.0], [56, 44])
    for entry in truth.entries:
        share = 100 * (local if entry.recipe == "local" else other).mean()
        entry.validation[...] = entry.test[...] = share
        for seed in truth.seeds:
            rows = [local if entry.recipe == "local" else other] * 6
            truth.right[entry.label, seed] = {"validation": rows, "test": rows}
    settings = score.learned([truth])
    by_rows = advised(truth, 0, 230, settings)
    assert (by_rows.pays.pays, by_rows.before.pays, by_rows.pays.noise) == ("yes", "yes", "rows")
    assert by_rows.pays.gain == pytest.approx(0.06)
    assert {run for run in by_rows.finished if run[0].startswith("local")} <= truth.right.keys()
    truth.right.clear()
    assert advised(truth, 0, 230, settings).pays.error > by_rows.pays.error


@pytest.mark.parametrize("off", [0, 299, 301])
def test_rows_are_kept_only_of_runs_near_the_truth(
    off: int, parts: tuple[Any, Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of a made-up federation of two clients, whose scores are those of the truth, or three points away."""
    grid, _, _ = parts
    import single_rows
    import torch
    from truth import kept as stored

    rng = np.random.default_rng(1)
    right = {part: [rng.random(size) < 0.5 for size in sizes] for part, sizes in SIZES.items()}

    class Run:
        def model(self, client: int) -> torch.nn.Module:
            return torch.nn.Identity()

        def close(self) -> None: ...

    class Clients:
        def __len__(self) -> int:
            return 2

        def size(self, client: int, part: str) -> int:
            return len(right[part][client])

        def rows(self, client: int, part: str) -> Any:
            chosen = torch.from_numpy(right[part][client]).long()
            return type("Rows", (), {"x": torch.eye(2)[chosen], "y": torch.ones_like(chosen)})

    monkeypatch.setattr(single_rows, "trained", lambda *_, **__: (Run(), False))
    federation = FakeFederation("heart")
    monkeypatch.setattr(federation, "clients", Clients, raising=False)
    monkeypatch.setattr(single_rows, "BY_NAME", {"heart": federation})
    label = grid.entries(False)[0].label
    shares = {part: [round(10_000 * float(rows.mean())) + off for rows in own] for part, own in right.items()}
    line = {"entry": label, "seed": 2, "validation": [[0, 0], shares["validation"]], "test": shares["test"]}
    stored(tmp_path, "heart").add(line)
    moved = {"validation": SIZES["test"], "test": SIZES["test"]}
    monkeypatch.setattr(single_rows, "known_rows", lambda folder: {"heart": moved})
    assert single_rows.run_all(tmp_path, {"heart": [(label, 2)]}, 1) == (0, 0)  # other rows than those of the truth
    monkeypatch.setattr(single_rows, "known_rows", lambda folder: {"heart": SIZES})
    if off > 300:
        assert single_rows.run_all(tmp_path, {"heart": [(label, 2)]}, 1) == (0, 0)
        assert stored(tmp_path / "single_rows", "heart").read() == []
        return
    for _ in range(2):  # the second time it is there
        assert single_rows.run_all(tmp_path, {"heart": [(label, 2)]}, 1) == (1, 1)
    assert len(stored(tmp_path / "single_rows", "heart").read()) == 1
    kept = single_rows.single_rows(tmp_path, "heart", SIZES)[label, 2]
    for part, own in right.items():
        assert [rows.tolist() for rows in kept[part]] == [rows.astype(float).tolist() for rows in own]


@pytest.mark.full
def test_leaders_of_the_leaderboard_are_raced_apart_from_the_grid(
    parts: tuple[Any, Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are learned, recommended and compared only where they are asked for, within the budget of the grid."""
    grid, known, score = parts
    from truth import kept

    leader = CLEAR | {"fedrod": 95.0}
    for name in ("digits-iid", "heart", "exam"):
        for line in lines("", leader, 2, grid, leaders=name != "exam"):
            kept(tmp_path, name).add(line)
    rows = dict.fromkeys(("digits-iid", "heart", "exam"), ROWS | {"naive": [0] * 6})
    monkeypatch.setattr(known, "known_rows", lambda folder: rows)
    plain, more = known.known_federations(tmp_path), known.known_federations(tmp_path, leaders=True)
    assert {one.name for one in plain} == {"digits-iid", "heart", "exam"}
    assert {one.name for one in more} == {"digits-iid", "heart"}
    assert {score.budget_of(one) for one in plain} == {score.budget_of(one) for one in more}
    assert score.learned(plain, 1)[0]["recipe"] == "ditto"
    assert score.learned(more, 1)[0]["recipe"] == "fedrod"

    monkeypatch.setattr(score, "HELD_BACK", [])
    monkeypatch.setattr(score, "ADVICE", tmp_path / "advice.json")
    score.write_advice(tmp_path)
    score.advice.cache_clear()
    raced = score.advice()
    assert {row["entry"].split()[0] for row in raced[score.WITH_LEADERS]["heart"]} == {"fedrod"}
    assert {row["entry"].split()[0] for row in raced[score.ADVISER]["heart"]} == {"ditto"}
    assert "exam" in raced[score.ADVISER]
    assert "exam" not in raced[score.WITH_LEADERS]
    gain = score._recommended(more[0], score.WITH_LEADERS) - score._recommended(more[0], score.ADVISER)
    assert gain == pytest.approx(5, abs=1)
    score.advice.cache_clear()


def test_a_portfolio_serves_federations_of_every_kind(parts: tuple[Any, Any, Any]) -> None:
    """Two of three are best with Ditto and one with IFCA: the second setting is for that one, and not the next best."""
    grid, known, score = parts
    made = [
        score.Known(score.BY_NAME[name], known.entries_of(lines("", points, 1, grid)), ROWS)
        for name, points in (("heart", {"ditto": 90.0, "fedprox": 88.0}), ("exam", {"ditto": 90.0, "fedprox": 88.0}),
                             ("office", {"ifca": 70.0}))
    ]  # fmt: skip
    assert [point["recipe"] for point in score.learned(made, 2)] == ["ditto", "ifca"]
    assert [one.name for one in score.without(made, "exam")] == ["heart", "office"]


@pytest.mark.full
def test_the_portfolio_of_the_package_is_the_one_that_is_learned(
    parts: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, known, score = parts
    assert list(race.portfolio()) == score.learned(known.known_federations(FOLDER / "truth"))


def test_a_line_that_was_cut_off_is_run_again(parts: tuple[Any, Any, Any], tmp_path: Path) -> None:
    grid, _, _ = parts
    whole = [json.dumps(line) for line in lines("", {}, 1, grid)]
    (tmp_path / "heart.jsonl").write_text("\n".join(whole[:3]) + "\n" + whole[3][:40], "utf-8")
    from truth import kept

    assert len(kept(tmp_path, "heart").read()) == 3
    assert kept(tmp_path, "exam").read() == []


@pytest.mark.full
def test_the_results_page_follows_from_the_truth(
    parts: tuple[Any, Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, score = parts
    kept = score.RESULTS.read_text("utf-8")
    monkeypatch.setattr(score, "RESULTS", tmp_path / "RESULTS.md")
    score.write(FOLDER / "truth")
    assert (tmp_path / "RESULTS.md").read_text("utf-8") == kept


def test_eight_data_sets_and_at_least_24_federations(parts: tuple[Any, Any, Any]) -> None:
    _, known, _ = parts
    assert len(known.FEDERATIONS) >= 24
    assert len({one.rows for one in known.FEDERATIONS}) >= 6


def test_what_is_held_back_is_whole_and_of_other_data_sets(parts: tuple[Any, Any, Any]) -> None:
    _, known, score = parts
    held = known.known_federations(FOLDER / "truth", score.HELD_BACK)
    assert [one.name for one in held] == [one.name for one in score.HELD_BACK]
    assert not {one.federation.data_set for one in held} & {one.data_set for one in known.FEDERATIONS}
    for one in held:
        naive = score.judged(one, score.NAIVE, [])
        assert naive.regret == pytest.approx(one.best - one.naive)
        assert (naive.pays, naive.silent, naive.cost) == (0, 1, 0)
    assert next(one for one in held if one.name == "adult").naive > 70  # most earn less than 50,000 dollars


def test_the_truth_is_made_in_parts(
    parts: tuple[Any, Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is there already, of other federations and seeds, is neither run again nor counted."""
    truth, asked = sys.modules["truth"], []

    def run_one(federation: Any, clients: Any, entry: Any, seed: int) -> dict[str, Any]:
        asked.append((federation.name, entry.label, seed))
        return {"entry": entry.label, "seed": seed, "test": [9000, None], "wall": 60.0}

    monkeypatch.setattr(truth, "run_one", run_one)
    monkeypatch.setattr(truth, "entries", lambda slow, leaders=False: parts[0].entries(slow)[: 0 if leaders else 3])
    monkeypatch.setattr(truth, "BY_NAME", {name: FakeFederation(name) for name in "ab"})
    assert truth.run_all(tmp_path, (0,), (), float("inf")) == (6, 6)
    assert truth.run_all(tmp_path, (0, 1), ("b",), 0) == (3, 6)
    assert truth.run_all(tmp_path, (0, 1), ("b",), float("inf")) == (6, 6)
    assert asked[6:] == [("b", entry.label, 1) for entry in parts[0].entries(False)[:3]]
    progress = capsys.readouterr().out.splitlines()
    assert "[4/6, 0 s, 2 minutes left] b" in progress[-3]
    assert "[6/6, 0 s, 0 minutes left] b" in progress[-1]


class FakeFederation:
    """A federation that nobody trains on."""

    slow = False

    def __init__(self, name: str) -> None:
        self.name = name

    def clients(self) -> list[Any]:
        return []


def test_the_product_is_judged_by_the_best_run_of_the_grid_with_its_seed(
    parts: tuple[Any, Any, Any], tmp_path: Path
) -> None:
    import product

    grid = [entry for entry in parts[0].entries(slow=False) if dict(entry.settings)["lr"] in parts[0].RATES]
    kept = product.Lines(tmp_path / f"{product.FRESH[0].name}.jsonl", "entry", "seed")
    for number, entry in enumerate(grid):
        kept.add({"entry": entry.label, "seed": 0, "validation": [100 * number], "test": [100 * number, 100 * number]})
    assert product.table(tmp_path) == ""  # without the search
    best = len(grid) - 1
    kept.add({"entry": product.ADVISE, "seed": 0, "test": [4000, 4400], "ensemble": 4900, "local": [3000, 3000],
              "plain": ["shrunken LDA", [3500, 3500]], "pays": "yes", "rounds": 16 * len(grid)})  # fmt: skip
    points, found, cost = product.regrets(kept.read(), 0)
    assert points == best
    assert [found[rule] for rule in product.RULES[:5]] == pytest.approx([0, best - 42, best - 49, best - 35, best - 30])
    assert found["random, same cost"] == pytest.approx(0)  # as many draws as there are runs
    assert cost == pytest.approx(1 / 3)
    assert product.regrets(kept.read(), 1) is None
    assert f"| {product.FRESH[0].words} | 1 | {best:.1f} |" in product.table(tmp_path)


def test_what_a_distilled_model_keeps_is_told_as_a_mean_over_seeds_and_nothing_is_searched_twice(
    parts: tuple[Any, Any, Any], tmp_path: Path
) -> None:
    import product

    assert product.distilled_table(tmp_path) == ""
    kept, name = product.Lines(tmp_path / "distilled.jsonl", "entry", "seed"), product.FRESH[0].name
    for seed, scores in enumerate([(6000, 7000, 6500), (6200, 7000, 6900)]):
        kept.add({"entry": name, "seed": seed, **dict(zip(product._SCORES, scores, strict=True))})
    assert f"| {product.FRESH[0].words} | 2 | 61.0 | 70.0 | 67.0 |" in product.distilled_table(tmp_path)
    assert product.distil_all(tmp_path, (0, 1), [name]) == 2
