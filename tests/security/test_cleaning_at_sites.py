"""A server that chooses the rules by which a site cleans its rows learns of no single row that something protects."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import piebald
from piebald import recipes
from piebald.core.errors import SettingError
from piebald.data.preparation.cleaning import Cleaning
from piebald.data.preparation.preparation import PrepareSettings
from piebald.experiments.run_settings import RunSettings
from piebald.federation.credentials import provisioning
from piebald.federation.hub.run_terms import terms
from piebald.federation.site.policy import Policy
from piebald.federation.site.site_process import SiteSettings, SiteWork
from piebald.runs.prepare import prepare
from tests.federation.test_consent import provisioned

pd = pytest.importorskip("pandas")
NAMES = ["north", "east", "south"]
ORACLE = {"map": {"diagnosis": {"flu": "1", "cold": "1"}}, "parse": {"diagnosis": "number"}}  # what else is there?
COUNT = {"absent": {"ill": ["yes"]}}  # rows without a target are left out, and the server is told how many are left


def rows(rare: bool) -> Any:
    table = pd.DataFrame({"age": range(60), "diagnosis": ["flu", "cold"] * 30, "ill": ["no", "yes", "no"] * 20})
    return table.assign(diagnosis=table.diagnosis.where(table.age != 7, "rare")) if rare else table


@cache
def planned(recipe: str) -> tuple[Any, Any]:
    """Return what clients have agreed on, and a run of theirs."""
    agreed = piebald.clients_from({name: rows(False) for name in NAMES}, target="ill", prepare="federated").preparation
    known = piebald.clients_from(
        {name: rows(False) for name in NAMES}, target="ill", prepare=PrepareSettings(agreed=agreed)
    )
    model = piebald.models.build_model("logistic", (len(agreed.feature_names_out),), 2)
    return agreed, prepare(recipes.make(recipe), known, model, RunSettings(rounds=1)).work


@cache
def credentials(folder: Path) -> Any:
    return provisioning.read(provisioned(folder, NAMES) / "north")


def offered(folder: Path, recipe: str, rules: dict[str, Any], rare: bool, policy: dict[str, Any]) -> str:
    """Return what the server is told after it has offered a run: numbers of rows, or why the site takes no part."""
    agreed, work = planned(recipe)
    inputs = len(agreed.feature_names_out)
    experiment = {
        "model": {"name": "logistic"}, "recipe": {"name": recipe}, "data": {"target": "ill"},
        "prepare": {"agreed": {**agreed.model_dump(mode="json"), "cleaning": rules}},
        "partition": {"kind": "sites", "clients": NAMES, "inputs": [inputs], "classes": ["no", "yes"]},
    }  # fmt: skip
    values = json.loads(terms(work, experiment, NAMES, NAMES, ["no", "yes"]))
    rows(rare).to_csv(folder / "rows.csv", index=False)
    settings = SiteSettings.model_validate({"data": {"source": "rows.csv", "target": "ill"}, "policy": policy})
    try:
        return str(
            [
                SiteWork(credentials(folder / "credentials"), settings, folder)(values).clients.size(0, split)
                for split in ("train", "test")
            ]
        )
    except SettingError as error:
        return str(error)


@pytest.mark.full
@pytest.mark.parametrize("rules", [ORACLE, COUNT])
def test_no_rule_tells_of_a_single_row_that_a_run_protects(tmp_path: Path, rules: dict[str, Any]) -> None:
    told = {offered(tmp_path, "dp_sgd", rules, rare, {}) for rare in (False, True)}
    assert len(told) == 1
    assert "this site takes part if its policy says accept_cleaning = true" in told.pop()


def test_the_owner_may_let_a_run_clean_and_its_rules_then_count(tmp_path: Path) -> None:
    assert offered(tmp_path, "dp_sgd", COUNT, False, {"accept_cleaning": True}) == "[28, 8]"
    assert "takes part in no run whose terms have rules" in offered(
        tmp_path, "fedavg", COUNT, False, {"accept_cleaning": False}
    )


def test_a_value_that_no_rule_reads_is_told_to_nobody_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = offered(tmp_path, "fedavg", ORACLE, True, {})
    assert told == "its rows cannot be used for this run; the site's own log says why"
    assert "column 'diagnosis' must have a number in each row, got 'rare' in row 9" in caplog.text


@pytest.mark.parametrize(
    ("policy", "protects", "refused"),
    [
        ({}, False, False), ({}, True, True), ({"clip": 1.0}, False, True), ({"secure_aggregation": 3}, False, True),
        ({"clip": 1.0, "accept_cleaning": True}, True, False), ({"accept_cleaning": False}, False, True),
    ],
)  # fmt: skip
def test_a_policy_says_whose_rules_clean(policy: dict[str, Any], protects: bool, refused: bool) -> None:
    rules = Cleaning.model_validate(COUNT)
    assert (Policy.model_validate(policy).cleaning_reject_reason(protects, rules) is not None) == refused
    assert Policy.model_validate(policy).cleaning_reject_reason(protects, None) is None


@pytest.mark.full
def test_a_site_takes_only_the_rules_whose_digest_it_has_pinned(tmp_path: Path) -> None:
    """A run with others is refused, also with none, since rows would then be taken in another unit."""
    digest = Cleaning.model_validate(COUNT).sha256
    for pin in (digest, digest[:12]):
        for recipe in ("fedavg", "dp_sgd"):
            assert offered(tmp_path, recipe, COUNT, False, {"accept_cleaning": pin}) == "[28, 8]"
    turned = {"absent": {**COUNT["absent"]}, "duplicates": "keep"}  # the same, written otherwise
    assert offered(tmp_path, "fedavg", turned, False, {"accept_cleaning": digest}) == "[28, 8]"
    for other in ({"absent": {"ill": ["no"]}}, {**COUNT, "duplicates": "drop"}, {}):
        told = offered(tmp_path, "fedavg", other, False, {"accept_cleaning": digest[:12]})
        assert f"cleaned by the rules {digest[:12]} and by no others" in told
    assert "has none" in told
    for odd in (digest[:11], digest.upper(), ""):
        with pytest.raises(ValueError, match="accept_cleaning"):
            Policy.model_validate({"accept_cleaning": odd})
