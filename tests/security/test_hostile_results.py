"""Results of a site that wants to stop or steer the server: refused and noted, and the run goes on.

At the commit before, run with these bytes: 10^400 examples and a group that is NaN or infinite ended the run with an
OverflowError or a ValueError; a float8 that cannot be unpacked raised a KeyError in the handler, so that the site got
no reply and the server waited for ever; 2^63 examples had weight 1.0; booleans, numbers as text, steps and losses of
any size, and metrics with escape sequences were accepted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piebald import recipes
from piebald.contracts import Result, Task, Update
from piebald.core.errors import SettingError
from piebald.federation.credentials.revocation import EXPIRED
from piebald.federation.hub.server_state import Timeouts
from piebald.federation.link.wire_format import Hello, encode, pack_update
from piebald.methods.queries import Evaluate, Validate
from piebald.privacy.secure_aggregation.key_queries import AdvertiseKeys
from piebald.server import ResultChecks
from piebald.server.cluster_state import capped
from piebald.server.records import plain_results, whole_result
from tests.fakes import SGD, FakeRuntime, few, make_server, update

from .server_entry import PATIENT, Entry, packed, rewritten, true_update

Values = dict[str, Any]


@pytest.fixture
def entry(tmp_path: Path) -> Iterator[Entry]:
    made = Entry(tmp_path, {"name": "fedavg"})
    made.join("site-1")
    yield made
    made.server.close()


def field(name: str, value: Any) -> Callable[[Values, Values], None]:
    return lambda values, head: values.__setitem__(name, value)


def metric(name: str, value: Any) -> Callable[[Values, Values], None]:
    return lambda values, head: values["metrics"].__setitem__(name, value)


def typed(name: str, width: int) -> Callable[[Values, Values], None]:
    """The model as another type, of the same bytes."""

    def change(values: Values, head: Values) -> None:
        about = head["model"]
        about["dtype"] = name
        about["shape"] = [(about["data_offsets"][1] - about["data_offsets"][0]) // width]

    return change


EXAMPLES = (1e30, 10**400, 2**63, 51, -1, True, "5", None, 0.5)
STEPS = (1e30, 10**400, 10**6, -1, True, float("nan"))
LOSSES = (float("nan"), float("inf"), 1e308, True, "x", [1.0])
HOSTILE = {
    **{f"examples {value!r}"[:40]: field("examples", value) for value in EXAMPLES},
    **{f"steps {value!r}"[:40]: field("steps", value) for value in STEPS},
    **{f"loss {value!r}"[:40]: metric("loss", value) for value in LOSSES},
    "a group that is no number": metric("cluster", float("nan")),
    "an infinite group": metric("cluster", float("-inf")),
    "a metric that clears the screen": metric("\x1b[2J", 1.0),
    "many metrics": field("metrics", {f"m{number}": 1.0 for number in range(300)}),
    "float8": typed("F8_E4M3", 1),
    "a float8 that cannot be unpacked": typed("F8_E8M0", 1),
    "complex": typed("C64", 8),
    "an unknown type": typed("QINT8", 1),
    "a type that is no text": typed(None, 4),  # type: ignore[arg-type]
    "booleans": typed("BOOL", 1),
    "half precision": typed("F16", 2),
    "whole numbers": typed("I32", 4),
    "another vector": lambda values, head: head.__setitem__("rows", head.pop("model")),
    "no fields": lambda values, head: values.clear(),
}  # fmt: skip


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_result_is_refused(change: Callable[[Values, Values], None], entry: Entry) -> None:
    entry.task()
    body = rewritten(packed(entry), change)
    assert entry.deliver(body) == "refused"
    result = entry.result()
    assert result is not None
    assert result.update is None
    assert result.refused
    assert result.failure is not None
    assert result.failure.startswith("sent ")
    assert entry.deliver(body) == "known"  # the site delivers again, since the reply may have been lost
    assert entry.result() is None


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_model_that_is_not_finite_is_refused(number: float, entry: Entry) -> None:
    entry.task()
    model = true_update(entry).vectors["model"].clone()
    model[3] = number
    assert entry.deliver(packed(entry, vectors={"model": model})) == "refused"


def test_an_honest_result_is_accepted(entry: Entry) -> None:
    entry.task()
    assert entry.deliver(packed(entry)) == "done"
    result = entry.result()
    assert result is not None
    assert result.update is not None
    assert (result.update.examples, result.update.steps) == (50, 5)


def test_the_server_computes_the_norm(entry: Entry) -> None:
    """Before, it was taken from the message, and weighed updates under `gradient_norm_weighted`."""
    entry.task()
    body = pack_update(true_update(entry, norm=1e9), None)
    assert entry.deliver(body) == "done"
    result = entry.result()
    assert result is not None
    assert result.update is not None
    assert result.update.norm == pytest.approx(float(true_update(entry).vectors["model"].norm()))


def test_examples_are_held_to_what_the_site_stated_when_it_joined(entry: Entry) -> None:
    """Before, 1e9 examples had weight 1.0.  A site that states none when it joins has none."""
    entry.join("site-2", rows=-1)
    entry.task(1, client=0)
    entry.task(2, client=1)
    assert entry.deliver(packed(entry, examples=51, steps=5)) == "refused"
    assert entry.deliver(packed(entry, examples=1, steps=1), id=2, site="site-2") == "refused"


def test_a_site_cannot_state_more_rows_later(entry: Entry) -> None:
    """Neither in a later hello nor to a server that was started again."""
    assert entry.server.clients() == [0]
    entry.join("site-1", rows=10**9)
    assert "it stated 50 train rows when it joined and 1000000000 now" in entry.server.shared.members[0].refused
    assert entry.server.clients() == []
    entry.server.shared.restore(entry.server.shared.checkpoint(), {})
    assert entry.server.shared.members[0].rows == {"train": 50, "validation": 10, "test": 10}


def test_a_refusal_of_another_run_is_none_of_this_one(entry: Entry) -> None:
    """A site that stays says at first what it said of the run before; all of them ended the next run at once."""
    entry.join("site-1", ready="", run="ab" * 8, refused="it demands five members")
    assert entry.server.shared.members[0].refused == ""
    entry.join("site-1", ready="", refused="it demands five members")
    assert entry.server.shared.members[0].refused == "it demands five members"


def test_a_site_that_has_restarted_is_asked_again_until_it_has_stated_its_rows(tmp_path: Path) -> None:
    """A finished result must not be refused because the site has not said yet what it has."""
    entry = Entry(tmp_path, {"name": "fedavg"})
    entry.server.shared.started = True
    entry.join("site-1", ready="", rows=-1)
    entry.server.shared.add(Task(1, 0, 0, {"model": entry.plan.work.initial}))
    assert entry.deliver(packed(entry)) == "again"
    entry.join("site-1")
    assert entry.deliver(packed(entry)) == "done"
    entry.server.close()


def test_a_resumed_server_refuses_what_is_delivered_again(tmp_path: Path) -> None:
    """A site delivers again what no checkpoint holds; before, the same bytes crashed the resumed server again."""
    first = Entry(tmp_path, {"name": "fedavg"})
    first.join("site-1")
    task = first.task()
    checkpoint = first.server.state()
    body = rewritten(packed(first), field("examples", 10**400))
    assert first.deliver(body) == "refused"
    first.server.close()
    second = Entry(tmp_path, {"name": "fedavg"})
    second.server.restore(checkpoint, {task.id: task})
    second.join("site-1", held=[task.id])
    assert second.deliver(body) == "refused"
    result = second.result()
    assert result is not None
    assert result.refused
    assert second.deliver(body) == "known"
    second.server.close()


def test_a_checkpoint_keeps_that_a_result_was_refused() -> None:
    task = Task(1, 0, 0, {})
    rows, tensors = plain_results([Result(task, None, 0.0, 1.0, failure="sent garbage", refused=True)])
    assert whole_result(json.loads(json.dumps(rows))[0], tensors, {1: task}).refused


# ------------------------------------------------------------------------------------------------ answers to queries


def confusion(rows: float, kind: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    matrix = torch.zeros(100)
    matrix[0] = rows
    return {"confusion": matrix.to(kind)}


@pytest.mark.parametrize(
    ("vectors", "examples", "accepted"),
    [
        (confusion(10), 10, True),
        (confusion(11), 11, False),  # more than its validation rows
        (confusion(1e9), 10**9, False),
        (confusion(1, torch.bool), 1, False),
        (confusion(float("inf")), 10, False),
        (confusion(10, torch.float64), 10, False),
        ({"confusion": torch.zeros(99)}, 0, False),
        (confusion(10) | {"model": torch.zeros(5)}, 10, False),
        ({}, 10, False),
    ],
    ids=str,
)
def test_counts_are_held_to_the_validation_rows(
    vectors: dict[str, torch.Tensor], examples: int, accepted: bool, entry: Entry
) -> None:
    """Before, counts of any size were believed, and a boolean matrix raised in the server's loop."""
    entry.task(1, query=Validate(classes=10))
    body = pack_update(Update(vectors, examples, 0, {}, nbytes=400), None)
    assert entry.deliver(body, trains=False) == ("done" if accepted else "refused")


@pytest.mark.parametrize(
    ("metrics", "examples", "accepted"),
    [
        ({"global/accuracy": 0.5, "global/loss": 1.0}, 10, True),
        ({"global/accuracy": 0.5}, 11, False),
        ({"global/secret": 0.5}, 10, False),
        ({"global/accuracy": 1e300}, 10, False),
    ],
    ids=str,
)
def test_scores_are_those_that_were_asked_for(
    metrics: dict[str, float], examples: int, accepted: bool, entry: Entry
) -> None:
    entry.task(1, query=Evaluate())
    body = pack_update(Update({}, examples, 0, metrics), None)
    assert entry.deliver(body, trains=False) == ("done" if accepted else "refused")


def test_answers_about_keys_speak_of_no_rows(entry: Entry) -> None:
    """Before, their number of rows, of any size, was recorded."""
    entry.task(1, query=AdvertiseKeys())
    body = pack_update(Update({"masking/keys": torch.zeros(1, 64, dtype=torch.uint8)}, 10**12, 0, {}), None)
    assert entry.deliver(body, trains=False) == "refused"


def test_hellos_and_heads_of_any_kind_raise_nothing(entry: Entry) -> None:
    """A handler that raised left its message without a reply; now it is dropped and reported."""
    head = '{"protocol":%s,"version":"0.1","incarnation":"ab","rows":%s}'
    for protocol, rows in (("1e400", "1"), ("1", "1e30"), ("true", "1"), ("1", str(10**400)), ("NaN", "1")):
        text = (head % (protocol, rows)).encode()
        assert entry.wire.deliver("site-1", "hello", len(text).to_bytes(4, "little") + text) is None
    entry.wire.handlers["hello"] = (Hello, lambda *_: 1 // 0)
    hello = encode(Hello(protocol=1, version="0.1", incarnation="ab"))
    assert entry.wire.deliver("site-1", "hello", hello) is None
    assert entry.wire.reports[-1] == "site-1 sent a message that raised ZeroDivisionError"


# --------------------------------------------------------------------------------------------------- in the server loop


HOSTILE_UPDATES = {
    "examples": update(1.0, 1.0, 1.0, examples=10**400),
    "examples that are true": update(1.0, 1.0, 1.0, examples=True),
    "float8": Update({"model": torch.zeros(3).to(torch.float8_e4m3fn)}, 1, 1, {}),
    "a group": Update({"model": torch.zeros(3)}, 1, 1, {"cluster": float("nan")}),
    "a metric that is text": Update({"model": torch.zeros(3)}, 1, 1, {"cluster": "x"}),  # type: ignore[dict-item]
    "a list for a vector": Update({"model": [1.0, 2.0, 3.0]}, 1, 1, {}),  # type: ignore[dict-item]
    "no vectors at all": Update(None, 1, 1, {}),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("hostile", HOSTILE_UPDATES.values(), ids=HOSTILE_UPDATES)
def test_whatever_one_result_raises_refuses_that_result(hostile: Update) -> None:
    """Whatever the runtime is.  Before, all but the first two ended the run with a TypeError or the like."""
    runtime = FakeRuntime(3, lambda task: hostile if task.client == 1 else update(1.0, 2.0, 3.0))
    server, recorder = make_server(recipes.fedavg().with_(training=SGD), runtime, rounds=2)
    server.run()
    refused = [row for row in recorder.rows if row["status"] == "refused"]
    assert [row["client"] for row in refused] == [1]
    (note,) = [note for note in recorder.notes if note["name"] == "refused"]
    assert [(one["client"], one["kind"]) for one in note["value"]] == [(1, "train")]
    assert all(bool(model.isfinite().all()) for model in server.cluster_models.models.values())


def test_one_site_cannot_poison_what_the_server_sends_to_all() -> None:
    """Before, one finite `control` of 1e38 made SCAFFOLD's common one so large that no update was finite again."""

    def answer(task: Task) -> Update:
        return update(0.1, 0.1, 0.1, control=torch.full((3,), 1e38 if task.client == 1 else 0.1))

    server, recorder = make_server(recipes.scaffold(), FakeRuntime(3, answer), rounds=2)
    server.run()
    left_out = [row for row in recorder.rows if row["status"] != "ok"]
    assert {row["client"] for row in left_out} == {1}
    assert len(left_out) == 2  # of each step: a step that is too long leaves its client out of that one alone
    assert {row["reason"] for row in left_out} == {"control is longer than longest_step allows"}
    assert float(server.cluster_models.main.server_vectors["control"].norm()) < 1


# ------------------------------------------------------------------------------------------------------------- weights


def shares(examples: dict[int, int], **limits: Any) -> dict[int, float]:
    """How much each client's update counts in a step."""
    runtime = FakeRuntime(len(examples), lambda task: update(0.1, 0.1, 0.1, examples=examples[task.client]))
    server, recorder = make_server(recipes.fedavg(steps=1), runtime, rounds=1, check=ResultChecks(**limits))
    server.run()
    return {row["client"]: row["weight"] for row in recorder.rows}


def test_one_client_cannot_outweigh_the_others() -> None:
    """`test_examples_are_held_to_what_the_site_stated` limits lies after joining; these limit what is stated there."""
    examples = {0: 10, 1: 10, 2: 10, 3: 10**9}
    assert shares(examples)[3] > 0.99
    assert shares(examples, max_examples=20)[3] == pytest.approx(20 / 50)
    assert 0.25 < shares(examples, max_weight=0.3)[3] <= 0.3
    assert shares({0: 10, 1: 10**9}, max_weight=0.3) == {0: 0.5, 1: 0.5}


@few
@given(
    st.lists(st.sampled_from([0.0, 0.1, 1.0, 3.0, 1e9, 1e18]) | st.floats(1e-3, 1e3), min_size=1, max_size=8),
    st.floats(0.05, 1.0) | st.sampled_from([1 / 3, 0.25, 0.125 + 1e-15]),
)
def test_no_weight_is_above_its_share_and_only_the_largest_are_lowered(weights: list[float], largest: float) -> None:
    """However large one is: before, it swallowed the others in a sum, and the step ended in an AssertionError."""
    found = capped(weights, largest)
    positive = sum(weight > 0 for weight in weights)
    assert max(found) <= max(largest, 1 / max(positive, 1)) * sum(found) * (1 + 1e-9)
    kept = [one for one, weight in zip(found, weights, strict=True) if one == weight]
    assert all(one == max(found) for one, weight in zip(found, weights, strict=True) if one != weight)
    assert max(kept, default=0.0) <= max(found)


def test_one_update_cannot_outweigh_the_others_by_its_length() -> None:
    """Weights that do not go by rows are limited as well, and so is what moves the model."""
    runtime = FakeRuntime(4, lambda task: update(*[10.0 if task.client == 3 else 1.0] * 3))
    by_length = recipes.fedavg().with_(aggregation="gradient_norm_weighted")
    server, recorder = make_server(by_length, runtime, rounds=1, check=ResultChecks(max_weight=0.3))
    server.run()
    assert {row["client"]: row["weight"] for row in recorder.rows}[3] == pytest.approx(0.3)
    assert server.cluster_models.main.model.tolist() == pytest.approx([0.3 * 10 + 0.7] * 3)


@pytest.mark.parametrize("recipe", ["fednova", "sync_dvw"])
def test_what_cannot_be_limited_is_refused_or_limited(recipe: str) -> None:
    made = recipes.make(recipe)
    assert ResultChecks(max_weight=0.5).unlimited_reason(made) is None
    masked = recipes.fedavg().with_(transforms=[{"kind": "secure_aggregation"}])
    assert "hides what single updates count" in str(ResultChecks(max_examples=5).unlimited_reason(masked))


# ----------------------------------------------------------------------------------------------------- never delivering


@pytest.mark.full
def test_a_site_that_only_says_hello_is_given_up(tmp_path: Path) -> None:
    """Before, `patience` counted silence alone, and a synchronous round waited for such a site for ever."""
    entry = Entry(tmp_path, {"name": "fedavg"}, Timeouts(1, 600.0, 600.0, 0.05))
    entry.join("site-1")
    entry.task(1)
    result = entry.server.next(until=60.0)
    assert result is not None
    assert result.failure == "took more than 0.05 seconds"
    assert entry.server.clients() == []  # it gets no tasks while it owes this one
    assert entry.deliver(packed(entry), id=1) == "known"
    assert entry.server.clients() == [0]
    for id in (2, 3):
        entry.task(id)
        assert entry.server.next(until=60.0) is not None
        entry.deliver(packed(entry), id=id)
    assert entry.server.clients() == []  # the third time
    entry.server.close()


def test_questions_to_sites_that_do_not_take_part_wait_for_nobody(tmp_path: Path) -> None:
    """Before, an evaluation waited for the answer of a refusing site, which says hello, for ever."""
    entry = Entry(tmp_path, {"name": "fedavg"})
    entry.join("site-1")
    entry.join("site-2", ready="", refused="it has other rows\x1b[2J")
    entry.task(1, client=1, query=Evaluate())
    result = entry.server.next(until=60.0)
    assert result is not None
    assert result.failure == "does not take part: it has other rows"
    entry.server.close()


@pytest.mark.parametrize(("wait_for", "ends"), [(None, False), (2, False), (3, True), ("all", True)])
def test_the_refusal_of_one_site_does_not_end_the_run(wait_for: Any, ends: bool, tmp_path: Path) -> None:
    """Before, it did by default: `wait_for` None meant every site."""
    entry = Entry(tmp_path, {"name": "fedavg"}, Timeouts(wait_for, 600.0, 600.0, 600.0))
    for site, refused in (("site-1", ""), ("site-2", "no"), ("site-3", "")):
        entry.join(site, refused=refused)
    if ends:
        with pytest.raises(SettingError, match="1 of 3 sites do not take part, site-2: no"):
            entry.server.clients()
    else:
        assert entry.server.clients() == [0, 2]
    entry.server.close()


@pytest.mark.parametrize("reason", ["no", f"{EXPIRED} on 2030-01-01 at 00:00 UTC"])
def test_where_all_refuse_the_run_ends(reason: str, tmp_path: Path) -> None:
    """Also where they say what the server says of a certificate, for whose renewal a run waits."""
    entry = Entry(tmp_path, {"name": "fedavg"}, PATIENT)
    for site in ("site-1", "site-2", "site-3"):
        entry.join(site, refused=reason)
    with pytest.raises(SettingError, match="3 of 3 sites do not take part"):
        entry.server.clients()
    entry.server.close()


# -------------------------------------------------------------------------------------------------------------- fuzzing


@pytest.mark.full
@pytest.mark.parametrize(
    "recipe",
    [
        *("fedavg", "hdafl", "secure"),
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("ifca", "dp", "scaffold", "distfl", "dvw", "sync_dvw", "fednova")
        ),
    ],
)
def test_mutated_results(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small piece of `benchmarks/robustness/results_fuzzer.py`."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "robustness"))
    monkeypatch.delitem(sys.modules, "results_fuzzer", raising=False)
    import results_fuzzer

    row = results_fuzzer.run_class(recipe, 50, seed=1)
    assert row["mutated"] >= 50
    assert {name: row[name] for name in ("crashes", "raw exceptions", "hangs")} == dict.fromkeys(
        ("crashes", "raw exceptions", "hangs"), 0
    ), row["why"]
    assert row["noted"] >= row["refused"]
