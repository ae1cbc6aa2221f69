"""Clients with models of their own in a real federation: what travels and what comes of it is as in the simulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import piebald
from piebald.core.errors import SettingError
from piebald.federation.hub.run_terms import OwnTerms, RunTerms

from .conftest import Sites, carry_out, settings, until
from .in_process import in_process

CASES: dict[str, dict[str, Any]] = {
    "heterofl": {"recipe": {"name": "heterofl", "widths": [1.0, 0.5, 0.25]}},
    "fedproto": {
        "recipe": {"name": "fedproto"},
        "model": {"name": "mlp", "hidden": [32], "clients": {"*[23]": {"name": "mlp", "hidden": [16, 32]}}},
    },
}
CASES["fedmd"] = CASES["fedproto"] | {
    "recipe": {"name": "fedmd", "digest_steps": 3},
    "partition": {"kind": "dirichlet", "clients": 3, "alpha": 0.5, "validation": 0.1, "limit": 300, "public_rows": 20},
}


IN_PROCESS: dict[str, dict[str, Any]] = {
    "flexlora": {
        "plugins": ["tests.federation.in_process"],
        "model": {"name": "tests.federation.in_process:Adapted"},
        "recipe": {"name": "flexlora", "ranks": [4, 2, 1], "optimizer_state": "kept", "momentum": 0.5},
    },
    "static batch norm": {
        "recipe": {"name": "heterofl", "widths": [1.0, 0.5, 0.25], "static_batch_norm": True},
        "model": {"name": "mlp_bn", "hidden": [16]},
    },
    "dynamic": {
        "recipe": {"name": "heterofl", "widths": [1.0, 0.5, 0.25], "static_batch_norm": True, "dynamic": True},
        "model": {"name": "mlp_bn", "hidden": [16]},
    },
}


@pytest.mark.parametrize("case", IN_PROCESS)
def test_sites_work_on_parts_of_the_model_as_the_simulator_does(case: str) -> None:
    made = settings(**IN_PROCESS[case], rounds=2)
    plan = made.plan()
    options: dict[str, Any] = {"rounds": 2, "seed": made.seed}
    recipe = next(iter(plan.recipes.values()))
    runtimes = [in_process(made, policy={"plugins": ["tests"]}), piebald.Simulator(engine="sequential", workers=0)]
    real, simulated = (
        piebald.run(recipe, plan.clients, plan.model, runtime=runtime, **options) for runtime in runtimes
    )
    assert {row["status"] for row in real.results} == {"ok"}
    torch.testing.assert_close(real.start(), simulated.start(), atol=1e-5, rtol=1e-5)
    assert len({row["bytes_up"] for row in simulated.results}) == 3
    theirs, ours = (
        {(row["client"], row["metric"]): row["value"] for row in run.scores if row["client"] is not None}
        for run in (simulated, real)
    )
    assert ours == pytest.approx(theirs, abs=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_a_federation_of_unlike_models_ends_as_the_simulator(case: str, sites: Sites) -> None:
    made = settings(**CASES[case], rounds=2)
    simulated = carry_out(made)
    files = [sites.folder / f"site-{client + 1}" / "model.safetensors" for client in range(3)]
    for file in files:
        file.unlink(missing_ok=True)  # of another test's run
    real = carry_out(made, credentials=str(sites.folder / "server"))
    for name in ("bytes_down", "bytes_up"):
        trained = [[row for row in run.results if row["kind"] == "train"] for run in (simulated, real)]
        sent = [{row["client"]: row[name] for row in rows} for rows in trained]
        assert sent[0] == sent[1]
        assert len({*sent[0].values()}) == (3 if case == "heterofl" else 1)
    assert all(row["status"] == "ok" for row in real.results)
    torch.testing.assert_close(real.start(), simulated.start(), atol=1e-4, rtol=1e-4)
    scores = [{(row["client"], row["metric"]): row["value"] for row in run.scores} for run in (simulated, real)]
    assert scores[1] == pytest.approx(scores[0], abs=1e-3)
    for client, file in enumerate(files):
        until(file.exists)  # a site keeps its model once it has heard that the run has ended
        left = load_file(file)
        wanted = simulated.work.of(client).layout
        assert {name: tuple(one.shape) for name, one in left.items()} == {one.name: one.shape for one in wanted.slots}


def test_a_site_gets_the_terms_of_its_own_model_and_of_no_other() -> None:
    layout = [("w", [3])]
    about: dict[str, Any] = {"piebald": "0", "training": {}, "transforms": [], "private": [], "layout": layout}
    about |= {"objective": "classification", "metrics": [], "seed": 0, "shape": [1], "outputs": [2]}
    models: dict[str, Any] = {"name": "mlp", "clients": {"ward *": {"name": "cnn_bn"}}}
    own = OwnTerms(private=["v"], layout=[("v", [5])])
    made = RunTerms(
        **about, experiment={"model": models}, clients=["home", "ward 1"], sites=["a", "b"], own_models=[own],
        numbers=[None, 0],
    )  # fmt: skip
    assert made.of(0).layout == layout
    assert made.of(0).experiment == {"model": {"name": "mlp"}}
    assert (made.of(1).layout, made.of(1).private) == ([("v", [5])], ["v"])
    assert made.of(1).experiment == {"model": {"name": "cnn_bn"}}
    models["clients"]["ward *"] = {"name": "mlp", "clients": {"*": {"name": "pretrained", "weights": "/etc"}}}
    for odd in (made.model_copy(update={"experiment": {"model": models}}), made.model_copy(update={"numbers": [0, 7]})):
        with pytest.raises(SettingError, match="describe no model for 'ward 1'"):
            odd.of(1)


def test_a_site_with_other_public_rows_takes_no_part() -> None:
    about: dict[str, Any] = {"piebald": "0", "training": {}, "transforms": [], "private": [], "layout": []}
    about |= {"objective": "classification", "metrics": [], "seed": 0, "shape": [1], "outputs": [2], "experiment": {}}
    made = RunTerms(**about, clients=["a"], sites=["a"], public_rows="11")
    made.check_public("11")
    made.model_copy(update={"public_rows": ""}).check_public("11")  # a run that compares nothing
    for digest, found in (("22", "others"), ("", "none")):
        with pytest.raises(SettingError, match=f"rows that all clients have, and this site has {found}"):
            made.check_public(digest)
