"""What runs on the same rows tell together: over seeds, settings and methods, in the page, the terminal and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import piebald
from piebald import data, models, partition, recipes
from piebald.cli import main
from piebald.cli.comparing import print_comparison
from piebald.privacy import accounting
from piebald.privacy.spending import NOT_COVERED, together, told_together
from piebald.report.page.report_page import render

dp_accounting = pytest.importorskip("dp_accounting", reason="needs the extra: pip install '.[privacy]'")
HERE = {"kind": "simulator", "workers": 0, "engine": "sequential", "stack": 1}


def meta(*epsilons: float | None, unit: str = "row", **more: Any) -> dict[str, Any]:
    budget = {"delta": 1e-6, "meaning": "", "unit": unit}
    return {"privacy": [{**budget, "epsilon_pld": one, "epsilon_rdp": one} for one in epsilons], **more}


def test_budgets_add_up_over_runs() -> None:
    [found] = together([meta(1.0), meta(2.5), meta(0.5)])
    assert (found["unit"], found["runs"], found["epsilon"]) == ("row", 3, 4.0)
    assert found["delta"] == pytest.approx(3e-6)
    assert "in all 3 runs on the same rows together" in found["meaning"]
    assert NOT_COVERED in found["meaning"]
    assert "at delta 1e-06 in this run." in together([meta(1.0)])[0]["meaning"]
    assert "in all 2 runs" in together([meta(1.0), meta(1.0)])[0]["meaning"]
    assert together([{}, {"privacy": []}, {"privacy": None}]) == []


def test_a_run_without_noise_on_the_same_rows_leaves_nothing_hidden() -> None:
    for other in ({}, meta(), meta(None), meta(1.0, unit="client")):
        found = {one["unit"]: one for one in together([meta(1.0), other])}
        assert found["row"]["epsilon"] is None
        assert "1 of 2 runs hide nothing" in found["row"]["meaning"]


@pytest.mark.full
def test_deltas_that_add_up_to_one_promise_nothing() -> None:
    assert together([meta(1.0)] * 1000)[0]["epsilon"] == pytest.approx(1000)
    assert together([meta(0.1)] * 1_000_000)[0]["epsilon"] is None


def test_units_are_added_apart_and_what_came_before_is_named() -> None:
    runs = [{"privacy": [*meta(1.0)["privacy"], *meta(3.0, unit="client")["privacy"]], "lineage": {"run": "x"}}] * 2
    found = together(runs)
    assert [(one["unit"], one["epsilon"]) for one in found] == [("client", 6.0), ("row", 2.0)]
    assert all("comes on top" in one["meaning"] for one in found)


@pytest.mark.full
@pytest.mark.parametrize(("noise", "share", "steps", "runs"), [(1.0, 0.1, 40, 5), (2.0, 0.5, 10, 3), (8.0, 1.0, 20, 6)])
def test_the_sum_is_at_least_what_dp_accounting_says_of_all_together(
    noise: float, share: float, steps: int, runs: int
) -> None:
    """The referee composes the mechanisms themselves; the sum may only be larger."""
    from dp_accounting.pld.pld_privacy_accountant import PLDAccountant

    budget = accounting.rows(noise, share, steps, 1e-6).plain()
    [found] = together([{"privacy": [budget]}] * runs)
    event = dp_accounting.PoissonSampledDpEvent(share, dp_accounting.GaussianDpEvent(noise))
    whole = PLDAccountant().compose(dp_accounting.SelfComposedDpEvent(event, steps * runs))
    exact = whole.get_epsilon(found["delta"])
    assert exact <= found["epsilon"]
    assert found["epsilon"] > budget["epsilon_pld"] * (runs - 0.01)
    assert exact > budget["epsilon_pld"]  # so that what was said of one run is too little for all


def test_a_run_that_goes_on_says_the_same_sum() -> None:
    own, before = meta(1.0)["privacy"], {"privacy": meta(2.0)["privacy"]}
    told = told_together(own, before)
    assert told is not None
    assert "epsilon is at most 3 at delta 2e-06" in told[0]["meaning"]


# -------------------------------------------------------------------------------------------------- where it is said


def federation() -> Any:
    return partition.Iid(clients=3, limit=90, validation=0.2).split(data.digits())


def noisy() -> Any:
    return recipes.dp_sgd(noise=4.0, clip=1.0, batch=8, lr=0.05)


def model() -> Any:
    return models.build_model("logistic", (1, 8, 8), 10)


def one_run(folder: Path) -> Mapping[str, Any]:
    history = piebald.run(noisy(), federation(), model(), rounds=1, out=folder, runtime=HERE)
    budgets = list(history.meta["privacy"])
    history.close()
    return budgets[0]


@pytest.mark.full
def test_a_comparison_says_what_all_seeds_and_methods_spent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before, the page stated one run's epsilon for five seeds on the same rows."""
    once = one_run(tmp_path / "one")["epsilon_pld"]
    found = piebald.compare(
        {"a": noisy(), "b": noisy()}, federation(), model(), seeds=(0, 1, 2), rounds=1, runtime=HERE
    )
    [budget] = found.privacy
    assert budget["runs"] == 6
    assert budget["epsilon"] == pytest.approx(6 * once)
    print_comparison(found, wide=False)
    printed = " ".join(capsys.readouterr().out.split())
    assert f"epsilon is at most {6 * once:.4g}" in printed
    assert NOT_COVERED in printed
    page = render(found)
    assert "all 6 runs" in page
    assert f"epsilon is at most {6 * once:.4g}" in page
    assert NOT_COVERED in page


@pytest.mark.full
def test_a_search_says_what_all_trials_spent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before, `tune` stated none for six."""
    once = one_run(tmp_path / "one")["epsilon_pld"]
    space = {"lr": [0.01, 0.05, 0.1]}
    found = piebald.tune(
        {"a": noisy()}, federation(), model(), space=space, sampler="grid", rounds=1, rungs=1, seeds=(0, 1),
        budget=6, runtime=HERE, out=tmp_path / "search",
    )  # fmt: skip
    [budget] = found.privacy
    assert budget["runs"] == len(list((tmp_path / "search").rglob("run.db"))) == 6
    assert math.isclose(budget["epsilon"], 6 * once)
    assert json.loads((tmp_path / "search" / "tuning.json").read_text())["privacy"] == [dict(budget)]


@pytest.mark.full
def test_the_command_prints_what_a_search_spent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "e.toml").write_text(
        'rounds = 1\n[data]\nname = "digits"\n[partition]\nkind = "iid"\nclients = 3\nlimit = 90\nvalidation = 0.2\n'
        '[model]\nname = "logistic"\n[recipe]\nname = "dp_sgd"\nnoise = 4.0\nclip = 1.0\nbatch = 8\n'
        '[tune]\nsampler = "grid"\nrungs = 1\nbudget = { rounds = 2 }\n[tune.space]\nrecipe.lr = [0.01, 0.1]\n'
    )
    words = ["tune", str(tmp_path / "e.toml"), "--out", str(tmp_path / "search")]
    assert main(words) == 0
    assert NOT_COVERED in " ".join(capsys.readouterr().out.split())
    assert main([*words, "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["privacy"][0]["runs"] == 2


@pytest.mark.full
def test_advice_says_that_baselines_without_noise_hide_nothing(tmp_path: Path) -> None:
    found = piebald.advise(
        federation(), model(), methods={"noisy": noisy()}, families=[], rounds=1, seeds=(0,), budget=10,
        more_data=False, runtime=HERE,
    )  # fmt: skip
    [budget] = [one for one in found.privacy if one["unit"] == "row"]
    assert budget["epsilon"] is None
    assert "runs hide nothing" in found.text().replace("\n", " ")
    assert found.plain()["privacy"] == [dict(one) for one in found.privacy]
