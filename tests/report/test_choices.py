"""The page's section about clients that chose their models."""

from __future__ import annotations

from typing import Any

from piebald.methods.choice.best_for_each import loses
from piebald.report.comparison import Comparison
from piebald.report.page.cluster_section import MOST_CHOICES, against_alone, headline
from piebald.report.page.report_page import render
from piebald.report.tables import History
from piebald.storage.run_folder import CHOICE_AXIS
from piebald.storage.store import RunStore

NAMES = ["george", "<b>lucas</b>", "jackson"]


def choice(chosen: str, difference: float = 0.0, error: float = 0.1, **more: Any) -> dict[str, Any]:
    tried = {"global": {"loss": 1.0, "accuracy": 0.5}, "local": {"loss": 0.125, "accuracy": 0.75}}
    judged = {"rows": 9, "chosen": {"loss": 0.5, "accuracy": 0.625}, "local": {"loss": 0.25, "accuracy": 0.875}}
    alone = {"difference": difference, "error": error}
    return {
        "chosen": chosen,
        "why": "it is so",
        "rows": 20,
        "candidates": tried,
        "judged": judged,
        "alone": alone,
    } | more


def history(*choices: dict[str, Any], **meta: Any) -> History:
    described = {"recipe": {"name": "x", "table": {}}, "label": "x", "seed": 0, "keep": "best_for_each"}
    store = RunStore.create(None, described | meta)
    store.clients([{"client": number, "name": name} for number, name in enumerate(NAMES)])
    store.commit({"version": 1, "time": 1.0}, [])
    scores = []
    for client, one in enumerate(choices):
        row = {"version": 1, "client": client, "split": "test", "metric": "accuracy", "examples": 9}
        scores += [row | {"model": "global", "value": 0.1}, row | {"model": "chosen", "value": 0.625}]
        store.add_notes([{"axis": CHOICE_AXIS, "cluster": 0, "name": f"client-{client}", "value": one}])
    store.scores(scores)
    return History(store)


def test_the_chosen_model_is_judged_and_counted() -> None:
    made = history(choice("local"), choice("global"), choice("global"))
    assert made.accuracy == 0.625
    assert made.final["chosen"] == {"local": 1, "global": 2}
    assert [(one["client"], one["name"]) for one in made.choices] == list(enumerate(NAMES))
    assert headline(made.choices) == "Of 3 clients, 2 took the global model, 1 took their own local model"


def test_who_would_be_better_off_alone() -> None:
    made = history(choice("global", 0.3), choice("global", 0.19), choice("local"))
    assert [loses(one) for one in made.choices] == [True, False, False]
    assert against_alone(made.choices).startswith("1 of 3 clients would be better off alone, by more than two ")
    assert against_alone(made.choices).endswith(": george.")
    assert not loses(choice("global", 0.3, alone={"difference": 0.3, "error": None}))
    assert against_alone([{"chosen": "global", "name": "george"}]) == ""


def test_the_page_says_who_took_what_by_name_and_what_each_candidate_scored() -> None:
    mixed = choice("mixed", mixture={"of": "fine_tuned", "share": 0.25})
    page = render(Comparison([history(choice("local", epochs=5), mixed, choice("global"))]))
    body = page[page.index('<section id="choices"') :]
    body = body[: body.index("</section>")]
    for said in ("george", "&lt;b&gt;lucas&lt;/b&gt;", "5 more passes", "25% fine-tuned", "75.0%", "0.125", "it is so"):
        assert said in body
    assert "<b>lucas" not in page


def test_many_clients_and_those_without_an_answer() -> None:
    choices = [choice("global") for _ in range(MOST_CHOICES)] + [{"chosen": None, "why": "no answer"}]
    page = render(Comparison([history(*choices)]))
    assert f"The first {MOST_CHOICES} of {MOST_CHOICES + 1} clients" in page
    page = render(Comparison([history({"chosen": None, "why": "it gave no usable answer"})]))
    assert "it gave no usable answer" in page


def test_sites_that_choose_by_themselves_tell_nobody() -> None:
    page = render(Comparison([history(runtime={"kind": "federation"})]))
    assert "Each site chose its model when the run had ended, and told nobody" in page
    assert 'id="choices"' not in render(Comparison([history(keep="last")]))
