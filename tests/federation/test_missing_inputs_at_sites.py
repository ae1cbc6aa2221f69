"""Sites that lack an input which the model takes as optional: what comes of a run is as in the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import piebald
from piebald.core.errors import SettingError
from piebald.core.references import USERS
from piebald.experiments.file import ExperimentSettings
from piebald.federation.hub.run_terms import OwnTerms, RunTerms

from .in_process import in_process

FORMS = {"table": [3], "scan": [1, 4, 4], "sound": [5]}
HELD = {"north": ["table", "sound"], "ward 1": list(FORMS), "ward 2": ["table"], "south": list(FORMS)}
HERE = __name__
SITES = {
    "kind": "sites", "clients": list(HELD), "inputs": FORMS, "classes": ["no", "yes"],
    "lacks": {"north": ["scan"], "*2": ["scan", "sound"]},
}  # fmt: skip


def hospitals() -> dict[str, Any]:
    """The rows of four hospitals, two of which lack inputs."""
    rows: dict[str, Any] = {}
    for place, (name, held) in enumerate(HELD.items()):
        draw, y = np.random.default_rng(place), np.arange(12 + 4 * place) % 2
        x = {
            part: (draw.normal(size=(len(y), *form)) + y.reshape(-1, *[1] * len(form))) for part, form in FORMS.items()
        }
        pair = {part: x[part].astype(np.float32) for part in held}, np.array(["no", "yes"])[y]
        rows[name] = {split: pair for split in ("train", "validation", "test")}
    return rows


class Net(nn.Module):
    """Three inputs, two of which it can do without; batch norm on the way of one of them."""

    def __init__(self, input_shape: Mapping[str, Sequence[int]], outputs: int, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            side = input_shape["scan"][1]
            self.scan = nn.Sequential(nn.Flatten(), nn.Linear(side * side, 4), nn.BatchNorm1d(4))
            self.sound, self.head = nn.Linear(input_shape["sound"][0], 2), nn.Linear(9, outputs)

    def forward(self, table: Tensor, scan: Tensor | None = None, sound: Tensor | None = None) -> Tensor:
        seen = torch.zeros(len(table), 4) if scan is None else self.scan(scan)
        heard = torch.zeros(len(table), 2) if sound is None else self.sound(sound)
        outputs: Tensor = self.head(torch.cat([table, seen, heard], 1))
        return outputs


class Filled(Net):
    """A network that takes zeros for a missing scan."""

    def forward(self, table: Tensor, scan: Tensor | None = None, sound: Tensor | None = None) -> Tensor:
        return super().forward(table, torch.zeros(len(table), 1, 4, 4) if scan is None else scan, sound)


def experiment(recipe: Mapping[str, Any], **fields: Any) -> ExperimentSettings:
    table = {
        "rounds": 3, "seed": 1, "plugins": [HERE], "model": {"name": f"{HERE}:Net"}, "evaluate": {"every": 1},
        "recipe": {"lr": 0.1, "batch": 5, **recipe},
    }  # fmt: skip
    return ExperimentSettings.of_table(table | fields, "the test's settings", USERS)


def carried_out(given: ExperimentSettings, runtime: Any) -> piebald.Run:
    plan = given.plan()
    (recipe,) = plan.recipes.values()
    return piebald.run(recipe, plan.clients, plan.model, runtime=runtime, rounds=given.rounds, seed=given.seed)


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return {"source": f"{HERE}:hospitals"}


RECIPES: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg", "momentum": 0.5},
    "fedbn": {"name": "fedbn"},
    "fedadam": {"name": "fedadam", "scheduling": {"kind": "synchronous", "cohort": 3}},
    "other work": {"name": "fedavg"},
    "named": {"name": "fedavg", "sharing": {"kind": "full", "inputs": {"scan": ["scan"]}}},
}


@pytest.mark.full
@pytest.mark.parametrize("case", RECIPES)
@pytest.mark.parametrize("rows", ["the server's", "the sites'"])
def test_a_federation_ends_as_the_simulator(case: str, rows: str, data: dict[str, Any]) -> None:
    """Also where sites alone have rows, and where single clients have settings of their own."""
    table: dict[str, Any] = {"model": {"name": f"{HERE}:Filled"}} if case == "named" else {}
    if case == "other work":
        table = {"clients": {"north": {"epochs": 2, "share": 0.4}, "*": {"share": 0.2}}}
    given = experiment(RECIPES[case], data=data, **table)
    at_sites = given if rows == "the server's" else experiment(RECIPES[case], partition=SITES, **table)
    site = {"policy": {"plugins": [HERE]}} | ({} if at_sites is given else {"data": data})
    simulated = carried_out(given, piebald.Simulator(engine="sequential", workers=0))
    real = carried_out(at_sites, in_process(at_sites, **site))
    assert {row["status"] for row in real.results} == {"ok"}
    torch.testing.assert_close(real.start(), simulated.start(), atol=1e-5, rtol=1e-5)
    theirs, ours = (
        {
            (row["version"], row["client"], row["metric"]): row["value"]
            for row in run.scores
            if row["client"] is not None
        }
        for run in (simulated, real)
    )
    assert ours == pytest.approx(theirs, abs=1e-5)
    sent = [
        {row["client"]: row["bytes_up"] for row in run.results if row["kind"] == "train"} for run in (simulated, real)
    ]
    assert sent[0].keys() == sent[1].keys()
    if case != "named":
        assert sent[1][2] < sent[1][0] < sent[1][1]  # no numbers of what a site has no input for


def test_a_site_gets_terms_of_its_own_part_and_builds_it() -> None:
    layout = [("scan.1.weight", [4, 16]), ("head.weight", [2, 9])]
    about: dict[str, Any] = {"piebald": "0", "training": {}, "transforms": [], "private": [], "layout": layout}
    about |= {"objective": "classification", "metrics": [], "seed": 0, "outputs": [2], "experiment": {}}
    own = OwnTerms(private=[], layout=layout[1:], lacks=["scan"])
    terms = RunTerms(
        **about, shape={name: list(form) for name, form in FORMS.items()}, clients=["a", "b"], sites=["a", "b"],
        own_models=[own], numbers=[None, 0],
    )  # fmt: skip
    assert (terms.of(0).lacks, terms.of(0).layout, set(terms.of(0).own_shape)) == ([], layout, {*FORMS})
    assert (terms.of(1).lacks, terms.of(1).layout) == (["scan"], layout[1:])
    assert set(terms.of(1).own_shape) == {"table", "sound"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lacks": {"north": ["scent"]}}, "lacks must name inputs, which are table, scan, sound, got 'scent'"),
        ({"lacks": {"west": ["scan"]}}, "lacks has an entry for 'west', but no client has this name"),
        ({"inputs": [3], "lacks": {"north": ["scan"]}}, "lacks must name inputs"),
        ({"lacks": {"*": ["scan"]}}, "every client lacks an input (scan)"),
        ({"lacks": {"north": ["table"]}}, "client 'north' lacks table, and the model cannot do without"),
    ],
)
def test_what_cannot_be_is_said_before_training(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError) as caught:  # noqa: PT012
        given = experiment(RECIPES["fedavg"], partition=SITES | changes)
        carried_out(given, in_process(given))
    assert message in str(caught.value)


def test_a_site_that_has_other_inputs_than_the_run_says_takes_no_part(data: dict[str, Any], tmp_path: Path) -> None:
    given = experiment(RECIPES["fedavg"], partition=SITES | {"lacks": {"north": ["scan"]}})
    with pytest.raises(
        SettingError, match=r"its rows have inputs \{'table': \[3\]\} for classification, the run takes"
    ):
        carried_out(given, in_process(given, data=data, policy={"plugins": [HERE]}))
