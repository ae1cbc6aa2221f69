"""A server that shows real sites different things under secure aggregation: it gets noise, and the sites say so."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from piebald.contracts import ClientSecrets, Task, Update
from piebald.core.errors import PiebaldError
from piebald.experiments.file import ExperimentSettings
from piebald.federation.credentials.certificates import SignatureCheck
from piebald.federation.hub import server_messages
from piebald.federation.hub.member_list import Member
from piebald.federation.hub.server_messages import ServerMessages
from piebald.federation.hub.server_state import FederationState
from piebald.federation.link.transfer import piece_at
from piebald.federation.link.wire_format import Hello, Piece, TermsRequest, Welcome, digest, encode, task_body
from piebald.inference.columns import statistics_request
from piebald.inference.experiment import statistics_of_sites
from piebald.inference.queries.columns import MaskedSumsQuery
from piebald.inference.trees import site_clients as trees_of_experiment
from piebald.privacy.secure_aggregation import server_side
from piebald.privacy.secure_aggregation.server_side import SecureRound
from piebald.privacy.secure_aggregation.transform import SecureAggregation

from .conftest import Server, Sites, carry_out, provisioned, settings, until

NAMES = [f"site-{number}" for number in range(1, 6)]
VICTIM = 2
RECIPE = {"name": "fedavg", "transforms": [{"kind": "secure_aggregation"}]}
SMALL: dict[str, Any] = {"model": {"name": "mlp", "hidden": [16]}, "evaluate": {"every": 0}}
FIVE = {"kind": "dirichlet", "clients": 5, "alpha": 0.5, "validation": 0.1, "limit": 300}
PATIENT: dict[str, Any] = {"wait_for": "all", "patience": 300.0, "silence": 120.0}  # however busy the machine is
POLICY = "[policy]\nqueries = ['masked_sums', 'masked_tree_sums', 'evaluate']\nleast_rows = 1\n"
OTHERWISE = "has signed that the server showed it something else than this site"

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    """Five sites that answer questions about sums under masks."""
    made = Sites(provisioned(tmp_path_factory.mktemp("five"), NAMES))
    for name in NAMES:
        (made.folder / name / "site.toml").write_text(POLICY)
        made.start(name)
    yield made
    made.close()


def described(**more: Any) -> ExperimentSettings:
    return settings(RECIPE, **{"rounds": 1, "partition": FIVE, **SMALL, **more})


def as_file(sites: Sites, **more: Any) -> tuple[Path, list[str]]:
    """An experiment file beside the credentials."""
    file = sites.folder / "asked.toml"
    file.write_text(described(**more).text())
    return file, ["runtime.wait_for='all'", "runtime.silence=120.0"]


class LyingServer:
    """The server of this process, which shows some sites other things and believes whatever they sign.

    It relays to each site the signatures of those who were shown the same, so that nobody there sees a contradiction,
    unless it is `careless`.

    Attributes:
        totals: what it got where it took off all masks that it could.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, careless: bool = False) -> None:
        self._patch, self.totals = monkeypatch, list[np.ndarray[Any, Any]]()
        monkeypatch.setattr(SignatureCheck, "check", lambda *_: True)  # of the server alone: sites are other processes
        monkeypatch.setattr(server_side, "_common", lambda signed, *_: most(signed), raising=False)
        total, confirmed = SecureRound.total, SecureRound._confirmed

        def most(signed: Mapping[int, Any]) -> bytes:
            shown = [one.shown for one in signed.values()]
            return max(shown, key=shown.count)

        def kept(round: SecureRound, masked: Mapping[int, Update], context: Any) -> Any:
            found = total(round, masked, context)
            if not isinstance(found, str):
                self.totals.append(found)
            return found

        def relayed(round: SecureRound, exchanged: Any, arrived: Any, context: Any) -> Any:
            found = confirmed(round, exchanged, arrived, context)
            if careless or any(isinstance(one, bytes) for one in found.values()):  # before, nobody signed a digest
                return found
            return {client: one for client, one in found.items() if one.shown == most(found)}

        monkeypatch.setattr(SecureRound, "total", kept)
        monkeypatch.setattr(SecureRound, "_confirmed", relayed)

    def show_others(self, change: Callable[[Task], Task]) -> None:
        """Change what goes to all sites but the victim."""
        self._patch.setattr(
            server_messages, "task_body", lambda task: task_body(task if task.client == VICTIM else change(task))
        )

    def tell_others(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Change the terms that all sites but the victim get."""
        hears, on_hello_before = FederationState.take_hello, ServerMessages._on_hello
        lies: dict[str, bytes] = {}

        def of(messages: ServerMessages, origin: str) -> bytes:
            if origin == NAMES[VICTIM]:
                return messages._terms
            table = json.loads(messages._terms)
            change(table)
            return lies.setdefault(origin, json.dumps(table, sort_keys=True).encode())

        def on_terms(messages: ServerMessages, origin: str, request: TermsRequest, body: memoryview) -> bytes:
            own = of(messages, origin)
            state = messages._state
            piece = Piece(run=state.run, epoch=state.epoch, id=0, trains=False, start=request.start, size=len(own),
                          digest=digest(own))  # fmt: skip
            return encode(piece, piece_at(own, request.start))

        def on_hello(messages: ServerMessages, origin: str, hello: Hello, body: memoryview) -> bytes:
            of(messages, origin)
            return on_hello_before(messages, origin, hello, body)

        def take_hello(state: FederationState, member: Member, hello: Hello, refused: str) -> Welcome:
            own = digest(lies[member.name]) if member.name in lies else state.terms
            known = hello.model_copy(update={"ready": state.terms}) if hello.ready == own else hello
            return hears(state, member, known, refused).model_copy(update={"terms": own})

        self._patch.setattr(ServerMessages, "_on_hello", on_hello)
        self._patch.setattr(ServerMessages, "_on_terms_request", on_terms)
        self._patch.setattr(FederationState, "take_hello", take_hello)


def victims_update(made: ExperimentSettings, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The change that the victim sends under its masks, from a simulation of the same run."""
    sent: dict[int, torch.Tensor] = {}
    real = SecureAggregation.mask

    def mask(self: SecureAggregation, update: Update, task: Task, secrets: ClientSecrets) -> Update:
        sent[task.client] = update.vectors["model"]
        return real(self, update, task, secrets)

    with monkeypatch.context() as patch:
        patch.setattr(SecureAggregation, "mask", mask)
        carry_out(made)
    return sent[VICTIM]


def likeness(total: np.ndarray[Any, Any], update: torch.Tensor) -> float:
    """The cosine between the numbers of a sum and an update."""
    numbers, own = total.view(f"<i{total.itemsize}").astype(np.float64)[2 : 2 + len(update)], update.double().numpy()
    return float(numbers @ own / np.linalg.norm(numbers) / np.linalg.norm(own))


def dead(task: Task) -> Task:
    """A model whose hidden biases are -1e4 (Pasquini et al., CCS 2022): its gradients are those of the last bias."""
    if task.query is not None or "model" not in task.vectors:
        return task
    model = task.vectors["model"].clone()
    model[64 * 16 : 64 * 16 + 16] = -1e4
    return replace(task, vectors={**task.vectors, "model": model})


def test_others_whose_lr_is_next_to_nothing(five: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the mean times five was the victim's update, with cosine 1.0."""
    made = described()
    update = victims_update(made, monkeypatch)
    server = LyingServer(monkeypatch)

    def slow(terms: dict[str, Any]) -> None:
        terms["training"]["lr"] = terms["experiment"]["recipe"]["lr"] = 1e-30

    server.tell_others(slow)
    with pytest.raises(PiebaldError, match="no update counted"):
        carry_out(made, credentials=str(five.folder / "server"), **PATIENT)
    assert all(abs(likeness(total, update)) < 0.2 for total in server.totals)
    said = five.log(NAMES[VICTIM])
    assert "the keys of client 0 (site-1) are not signed by its site for this run and its terms" in said
    assert "the keys of client 2 (site-3) are not signed by its site" in five.log("site-1")


@pytest.mark.long
def test_others_whose_model_is_dead(five: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the sum was the victim's in every layer but the last bias."""
    made = described()
    update = victims_update(made, monkeypatch)
    server = LyingServer(monkeypatch)
    server.show_others(dead)
    with pytest.raises(PiebaldError):
        carry_out(made, credentials=str(five.folder / "server"), **PATIENT)
    assert all(abs(likeness(total, update)) < 0.2 for total in server.totals)
    assert f"client 0 (site-1) {OTHERWISE}" in five.log(NAMES[VICTIM])


@pytest.mark.long
def test_sites_name_who_was_shown_something_else(five: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    server = LyingServer(monkeypatch, careless=True)
    server.show_others(dead)
    with pytest.raises(PiebaldError):
        carry_out(described(seed=2), credentials=str(five.folder / "server"), **PATIENT)
    assert server.totals == []
    assert f"client 0 (site-1) {OTHERWISE}" in five.log(NAMES[VICTIM])
    assert f"client 2 (site-3) {OTHERWISE}" in five.log("site-5")


def test_others_whose_bounds_hide_their_rows(five: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the total was the victim's: the others' numbers all counted as the lower bound."""
    bounds = {f"x{place}": (0.0, 1.0) for place in range(64)}
    file, flags = as_file(five)
    folder = five.folder / "server"
    wanted = statistics_request(bounds=bounds, secure=True)
    honest = statistics_of_sites(file, flags, folder, wanted)
    server = LyingServer(monkeypatch)

    def far(task: Task) -> Task:
        if not isinstance(task.query, MaskedSumsQuery):
            return task
        return replace(task, query=task.query.model_copy(update={"bounds": ((1e29, 2e29),) * 64}))

    server.show_others(far)
    present = None
    with suppress(PiebaldError):  # where the server got no sum; else the others gave shares, and it is noise
        present = statistics_of_sites(file, flags, folder, wanted).numbers["x20"].present
    rows = honest.numbers["x20"].present
    assert present in (None, 0.0) or present > rows  # noise below zero is written as no rows
    assert all(abs(float(total.view("<i8")[0])) > rows * 2.0**30 for total in server.totals)


def test_others_whose_thresholds_count_nothing(five: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the counts of which thresholds are made were those of the victim's rows."""
    pytest.importorskip("xgboost", reason="needs the extra: pip install '.[trees]'")
    table = {"secure": True, "form": "histogram", "rounds": 1, "max_depth": 1, "max_bin": 4}
    file, flags = as_file(five, trees=table)
    server, true = LyingServer(monkeypatch), list[int]()

    def nothing(task: Task) -> Task:
        if "thresholds" not in task.vectors:
            return task
        true.append(len(server.totals))
        return replace(task, vectors={**task.vectors, "thresholds": torch.full_like(task.vectors["thresholds"], -1e30)})

    server.show_others(nothing)
    with suppress(PiebaldError):  # where the server got no sum; else the others gave shares, and it is noise
        trees_of_experiment.trees_of_sites(file, flags, five.folder / "server", compare=False)
    assert len(true) >= 4
    for total in server.totals[: true[0]]:  # of the rows of each class, about which nobody was told a lie
        assert 0 < total.view("<i8").sum() < 300
    for total in server.totals[true[0] :]:
        assert np.abs(total.view("<i8").astype(float)).max() > 2.0**50


# ---------------------------------------------------------------------------------------------------- honest servers


def test_masked_runs_repeat_to_the_bit_and_are_the_simulation(five: Sites) -> None:
    """Whole numbers are summed, and each is rounded by what its client was shown: whoever is first changes nothing.

    Before, sites rounded at random, and a unit that was nearly dead turned the last bit of a round into steps of 1e-4.
    """
    made = described(rounds=3)
    runs = [carry_out(made, credentials=str(five.folder / "server"), **PATIENT) for _ in range(2)]
    assert torch.equal(runs[0].cluster_models[0], runs[1].cluster_models[0])
    assert torch.equal(runs[0].cluster_models[0], carry_out(made).cluster_models[0])


@pytest.mark.long
def test_a_server_that_resumes_goes_on_with_sums(five: Sites, tmp_path: Path) -> None:
    made = settings({**RECIPE, "cohort": 4}, rounds=6, partition=FIVE, **SMALL)
    flags = {"kind": "federation", **PATIENT}
    made = ExperimentSettings.of_table(made.table() | {"runtime": flags}, "the test's settings")
    server = Server(made, five.folder / "server", tmp_path / "run")
    try:
        for version in (1, 3):
            until(lambda least=version: server.version() >= least)  # type: ignore[misc]
            server.kill_and_resume()
        until(server.over)
    finally:
        server.close()
    said = server.log.read_text()
    assert "was shown something else" not in said
    assert server.version() == 6


@pytest.mark.long
def test_private_numbers_that_the_server_chose_for_one_are_not_begun_with(
    five: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first private layers of the others, dead, would leave the victim alone in the sum."""
    recipe = {"name": "hdafl", "transforms": [{"kind": "secure_aggregation"}]}
    made = settings(recipe, rounds=1, partition=FIVE, **SMALL)
    honest = carry_out(made, credentials=str(five.folder / "server"), **PATIENT)
    assert torch.equal(honest.cluster_models[0], carry_out(made).cluster_models[0])
    server = LyingServer(monkeypatch)

    def other(task: Task) -> Task:
        if "private" not in task.vectors:
            return task
        return replace(task, vectors={**task.vectors, "private": torch.zeros_like(task.vectors["private"])})

    server.show_others(other)
    with pytest.raises(PiebaldError):
        carry_out(made, credentials=str(five.folder / "server"), **PATIENT)
    assert "the private numbers that came are not those of the run's terms" in five.log("site-1")
