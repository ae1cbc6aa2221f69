"""The answer: one screen whoever asks, the same sentence everywhere, and gains of clients that are shrunk honestly."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len

from piebald import recipes
from piebald.advice.adviser import reasons
from piebald.advice.answer import Advice, noise_of_privacy
from piebald.advice.answer_page import gain_picture, screen
from piebald.advice.evidence import Checked, ClientGain, Evidence, PlainAlone, shrunken, whether_it_pays, with_shrunk
from piebald.advice.more_data import More
from piebald.advice.odd_sites import in_points
from piebald.advice.tuning.space import Cost
from piebald.core.result_table import ResultTable
from piebald.report.paired import Difference, Scores
from piebald.report.verdict import ScoreVerdict

LONG = "university hospital of the district of {} and its surroundings (department of cardiology)"
WIDE = "東京都立広域医療センター循環器内科第{}病棟と関連施設"


def answer(
    gains: Sequence[float],
    metric: str = "accuracy",
    name: str = "site {}",
    rows: int = 60,
    chosen: str = "ditto",
    naive: float = 0.5,
    **changes: Any,
) -> Advice:
    """An answer about clients with these true gains over 70 %, measured on rows that are drawn."""
    rng, names = np.random.default_rng(len(gains)), [name.format(number) for number in range(len(gains))]
    counted, table = metric == "accuracy", {}
    for label, own in (("local", np.zeros(len(gains))), ("ditto", np.array(gains)), ("fedavg", np.array(gains) - 0.02)):
        right = {(0, client): rng.random(rows) < 0.7 + gain for client, gain in zip(names, own, strict=True)}
        values = np.array([[right[0, client].mean() for client in names]])
        singles = {cell: values.astype(float) for cell, values in right.items()} if counted else {}
        table[label] = Scores(values, names, [0], sizes=[rows] * len(names), rows=singles, counted=counted)
    tested = [Checked(label, table[label], {}) for label in dict.fromkeys((chosen, "local", "fedavg"))]
    runners = [SimpleNamespace(label=label, last=scores) for label, scores in table.items()]
    runs = SimpleNamespace(names=names, higher_is_better=True, metric="accuracy")
    by_label = {runner.label: runner for runner in runners}
    evidence = whether_it_pays(runners, by_label["local"], by_label[chosen], tested, runs)
    constant = {
        "the most frequent class": Scores(np.full((1, len(names)), naive), names, [0], sizes=[rows] * len(names))
    }
    verdict = ScoreVerdict.of(table, metric, True, "local", constant)
    against = ScoreVerdict.of({chosen: table[chosen]}, metric, True, naive=constant)
    assert verdict is not None
    pairs = zip(*(table[label].values[0] for label in (chosen, "local")), names, strict=True)
    clients = [
        ClientGain(client, rows, {chosen: ours, "local": own}, ours - own, 0.06 if counted else None, train=rows)
        for ours, own, client in pairs
    ]
    step = Difference(0.03, 0.03, 0.03, 1, len(names), "range", 0.01, 0.01)
    fields: dict[str, Any] = {
        "recommended": chosen, "recipe": recipes.make(chosen), "title": "a personal model beside the shared one",
        "metric": metric, "higher_is_better": True, "pays": evidence.pays, "evidence": evidence, "verdict": verdict,
        "against_naive": against, "imbalance": f"One class has over 70% of the judged rows at {names[0]}.",
        "probability": 0.8, "gain_alone": None, "gain_together": None, "losers": [], "reasons": [], "unusable": {},
        "tried": ResultTable({"method": label, "score": scores.mean} for label, scores in table.items()),
        "curve": {2: 0.6, 20: 0.7}, "cost": Cost(20, 10**7, 0.2, 500, 90.0), "spent": Cost(400, 10**9, 90.0, 10**5),
        "tested": tested, "clients": with_shrunk(clients) if chosen != "local" else [], "rounds": 20, "seeds": [0],
        "folder": None, "settings": None, "more": [More("rows", step), More("clients", step, clients=2)],
    }  # fmt: skip
    return Advice(**(fields | changes))


@pytest.mark.parametrize("count", [3, 200])
@pytest.mark.parametrize("name", ["site {}", LONG, WIDE])
@pytest.mark.parametrize("size", [-0.3, 0.25])
def test_the_answer_is_one_screen_whoever_asks(count: int, name: str, size: float) -> None:
    given = answer([size if number % 3 else -size for number in range(count)], name=name)
    for shown in (given, answer([size] * count, "auc", name), answer([size] * count, chosen="local", name=name)):
        lines = shown.text().splitlines()
        assert len(lines) <= 24
        assert max(map(cell_len, lines)) <= 80
        assert {"Answer", "Measured", "Gain", "Costs", "Leaves", "Next"} <= {line.split(" ")[0] for line in lines}
        useless = "No method is recommended" in shown.headline()
        end = "or more rows, before any run" if useless else "piebald.run(advice.recipe, clients, model)"
        assert " ".join(shown.text().split()).endswith(end)
        assert max(map(cell_len, shown.details().splitlines())) <= 80


def test_it_is_named_who_gains_and_who_loses_and_of_many_the_largest() -> None:
    parts = {heading: text for heading, text, _ in answer([0.25] * 5 + [-0.4] * 5, rows=400).parts()}
    named = {heading: set(re.findall(r"site \d", parts[heading])) for heading in ("Gain", "Lose")}
    assert named == {"Gain": {f"site {n}" for n in range(5)}, "Lose": {f"site {n}" for n in range(5, 10)}}
    many = {heading: text for heading, text, _ in answer([0.25] * 200, rows=400).parts()}
    assert re.search(r"^site \d+ \+\d\d\.\d, .* points and 1\d\d more\.$", many["Gain"])


@pytest.mark.parametrize(("size", "start"), [(0.3, "Yes, "), (-0.3, "No, "), (0.0, "Whether training together pays")])
def test_the_same_sentence_in_every_place(size: float, start: str) -> None:
    given = answer([size] * 6, naive=0.2)
    sentence = given.headline()
    assert sentence.startswith(start)
    assert sentence in " ".join(given.text().split())
    assert repr(given) == f"<Advice: {sentence}>"
    assert f"<p><strong>{html.escape(sentence)}</strong></p>" in given._repr_html_()
    assert f"<h1>{html.escape(sentence)}</h1>" in given.page()
    assert json.loads(json.dumps(given.plain()))["headline"] == sentence
    assert sentence in given.toml()
    # and the verdict on validation rows, which comparisons and reports show as well
    verdict = given.verdict.sentence()
    assert verdict in " ".join(given.details().split())
    assert html.escape(verdict) in given.page()
    assert given.plain()["verdict"]["sentence"] == verdict


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("fedavg", "secure sums would hide what single sites send"),
        ("hdafl", "secure sums would hide what single sites send"),
        ("ifca", "secure sums do not fit ifca."),
        ("distfl", "secure sums do not fit distfl."),
    ],
)
def test_secure_sums_are_offered_only_where_the_server_needs_nothing_but_sums(recipe: str, said: str) -> None:
    given = answer([0.2] * 4, recipe=recipes.make(recipe), recommended=recipe)
    assert said in dict((heading, text) for heading, text, _ in given.parts())["Leaves"]


def test_a_plain_model_that_is_better_alone_is_named_in_the_sentence() -> None:
    """It was better by validation rows already, so the method is not called the best by them."""
    given = answer([-0.3] * 6, naive=0.2)
    assert "the best by validation rows" in given.headline()
    plain = replace(given, plain_alone=PlainAlone("shrunken LDA", {}, None)).headline()
    assert plain == (
        "No, training together does not pay: ditto (a personal model beside the shared one) is no better than shrunken "
        "LDA, fitted by each client alone."
    )


def test_nothing_is_recommended_that_one_answer_for_all_rows_matches() -> None:
    assert answer([0.02] * 6, naive=0.9).headline() == (
        "No method is recommended: ditto (a personal model beside the shared one), the best choice here, is not better "
        "than always the most frequent class (90.0%)."
    )


def test_whether_a_method_is_of_use_is_open_where_rows_cannot_tell_it_from_one_answer() -> None:
    """72 % against 70 % on 360 rows: six points more are possible, and so are two less."""
    given = answer([0.02] * 6, naive=0.7)
    assert given.headline() == (
        "No method is recommended yet: whether ditto (a personal model beside the shared one) is better than always "
        "the most frequent class (70.0%) cannot be known from these rows."
    )
    verdict = given.against_naive
    assert verdict is not None
    assert verdict.over_naive is not None
    sure = replace(verdict, over_naive=replace(verdict.over_naive, mean=0.005, error=0.002))
    assert "yet" not in replace(given, against_naive=sure).headline()  # less than a point, and that is sure
    turned = replace(verdict, over_naive=replace(verdict.over_naive, mean=-0.2, error=0.002))
    assert "yet" in replace(given, against_naive=turned, higher_is_better=False).headline()
    unknown = replace(verdict, over_naive=None)
    assert "yet" in replace(given, against_naive=unknown).headline()


def test_lines_that_some_parts_leave_over_are_for_those_that_need_more() -> None:
    """A sentence is cut only where the whole screen is full."""
    long = " ".join(["word"] * 80)  # six lines
    assert screen([("A", "short", 2), ("B", long, 2), ("C", "short", 3)]).count("word") == 80
    full = screen([("A", long, 12), ("B", long * 9, 12), ("C", long * 9, 6)]).splitlines()
    assert len(full) == 24
    assert full[5].startswith(" ")
    assert full[6].startswith("B")
    assert full[-1].endswith("\N{HORIZONTAL ELLIPSIS}")


def test_a_difference_is_beyond_chance_only_where_its_test_says_so() -> None:
    """It does not pay where the interval ends below a point, and that interval may hold 0."""
    evidence = Evidence("no", "validation", gain=-0.007, error=0.006, noise="rows", p=0.3, low=-0.018, high=0.004)
    measured = answer([0.0] * 6, chosen="local", evidence=evidence, pays="no").parts()[1][1]
    assert measured.endswith(
        "against alone on validation rows: -0.7 points (95 %: -1.8 to +0.4), within the chance of other rows of these "
        "clients, so too little is to be gained."
    )
    clear = replace(evidence, p=0.01, high=-0.002)
    assert "beyond the chance of other rows of these clients." in answer([0.0] * 6, evidence=clear).parts()[1][1]


def test_the_gain_of_an_error_is_called_better_or_worse() -> None:
    """4.76 against 5.62 is a gain, which "+0.86" beside them does not say."""
    given = answer([0.1] * 4, "absolute_error", higher_is_better=False)
    for gain, said in ((0.86, "ditto against alone: 0.86 better ("), (-0.86, "ditto against alone: 0.86 worse (")):
        evidence = replace(given.evidence, gain=gain, low=gain - 1, high=gain + 1)
        assert said in replace(given, evidence=evidence).parts()[1][1]


def test_what_is_open_is_settled_by_so_many_rows_more() -> None:
    """Four times the rows halve a standard error: of 360 rows with one of 2.1 points, 2.8 of which are 6 points."""
    given = answer([0.01] * 6)
    error = given.evidence.error or 0.0
    missing = 360 * ((2.8016 * error / 0.03) ** 2 - 1)
    said = re.search(r"([\d,]+) more test rows would settle 3.0 points", " ".join(given.text().split()))
    assert said is not None
    assert missing <= int(said[1].replace(",", "")) <= 1.1 * missing + 1


def test_noise_that_hides_rows_shrinks_with_their_number_and_is_that_of_the_gaussian_mechanism() -> None:
    """rho = 0.174 for epsilon 3 and delta 1e-5, so the multiplier of 20 rounds is 7.6."""
    assert noise_of_privacy(20, 100, 1) == pytest.approx(0.0759, rel=0.01)
    assert noise_of_privacy(20, 200, 4) == pytest.approx(noise_of_privacy(20, 100, 1))


@pytest.mark.parametrize("effects", ["normal", "skewed"])
@pytest.mark.parametrize(("clients", "spread"), [(2, 0.05), (4, 0.05), (6, 0.1), (10, 0.05), (10, 0.1)])
def test_intervals_of_shrunk_gains_hold_the_truth(clients: int, spread: float, effects: str) -> None:
    rng = np.random.default_rng(3)
    held = []
    for _ in range(400):
        drawn = rng.normal(size=clients) if effects == "normal" else rng.exponential(size=clients) - 1
        truth, errors = 0.02 + spread * drawn, np.sqrt(0.15 / rng.integers(30, 300, clients))
        values, own = shrunken(truth + errors * rng.normal(size=clients), errors)
        held += (np.abs(values - truth) < 1.96 * own).tolist()
    assert 0.93 <= np.mean(held) <= 0.97


def test_gains_are_drawn_the_largest_first_on_a_round_axis_with_zero() -> None:
    gains = with_shrunk([ClientGain(f"<{n}>", 50, {}, (n - 30) / 100, 0.02) for n in range(60)])
    drawn = gain_picture(gains, 100)
    shown = [float(value) for value in re.findall(r"<td>([+-]?[\d.]+)<small>", drawn.replace("\u2212", "-"))]
    assert shown == sorted(shown, reverse=True)
    assert len(shown) == 40
    assert "20 clients between" in drawn
    assert "&lt;59&gt;" in drawn
    assert ">0</text>" in drawn
    assert gain_picture([ClientGain("a", 1, {}, None, None)], 1) == ""


def test_no_reason_is_given_where_clients_and_rounds_differ_by_noise_alone() -> None:
    """Two rungs and two rivals of equal methods: one answer in twenty may give one."""
    rng = np.random.default_rng(1)

    def scores(clients: int) -> Scores:
        return Scores(0.7 + 0.05 * rng.normal(size=(1, clients)), [f"c{number}" for number in range(clients)])

    def given(clients: int) -> list[str]:
        held = SimpleNamespace(
            counts=lambda client, split: [client + 1] * (client + 1), size=lambda client, split: 9 * client
        )
        runs: Any = SimpleNamespace(
            rungs=(2, 4), metric="accuracy", higher_is_better=True, names=range(clients), choosing=held
        )
        chosen, alone, together = (
            SimpleNamespace(
                scores={2: scores(clients), 4: (last := scores(clients))}, last=last, mean=0.7, stopped=None
            )
            for _ in range(3)
        )
        return reasons(chosen, alone, together, runs)  # type: ignore[arg-type]

    assert sum(bool(given(4)) for _ in range(100)) <= 12


def test_what_is_not_better_than_one_answer_is_not_run_next() -> None:
    """A metric that no constant answer is good by may show more, where one class has most rows."""
    useless = answer([0.0] * 4, naive=0.9)
    assert useless.headline().startswith("No method is recommended")
    parts = {heading: text for heading, text, _ in useless.parts()}
    assert parts["Next"].endswith(
        "judge with --set evaluate.metrics='[\"balanced_accuracy\"]', or more rows, before any run"
    )
    parts = {heading: text for heading, text, _ in replace(useless, imbalance="").parts()}
    assert parts["Next"].endswith("give other columns, or more rows, before any run")


def test_levels_that_stand_beside_a_gain_differ_by_it() -> None:
    """Local has a second seed, under which all do worse: its mean over both would not fit the gain."""
    given = answer([0.1] * 4, rows=100)
    ditto, local, fedavg = given.tested
    values = np.vstack([local.scores.values, local.scores.values - 0.3])
    worse = replace(local.scores, values=values, seeds=[0, 1], trained=np.ones((2, 4), bool))
    shown = replace(given, tested=[ditto, replace(local, scores=worse), fedavg]).parts()[1][1]
    ours, alone = (float(re.findall(rf"{name}\)? (\d+\.\d)%", shown)[0]) for name in ("ditto", "local"))
    gain = float(re.findall(r"ditto against alone: ([+-]\d+\.\d)", shown)[0])
    assert ours - alone == pytest.approx(gain, abs=0.11)  # each is rounded


def test_sites_at_odds_with_the_others_are_named_on_the_screen() -> None:
    sentence = "At odds with the others: site 3."
    given = answer([0.1] * 4, odd=[sentence])
    assert sentence in given.text()
    assert given.plain()["odd"] == [sentence]
    assert sentence in given.details()


def test_no_gain_is_minus_zero_and_no_amount_a_power_of_ten() -> None:
    assert in_points("accuracy", -0.0004) == "+0.0 points"
    assert in_points("absolute_error", -14149.7) == "-14,100"
