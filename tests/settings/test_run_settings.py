"""A setting of a run is one field of `RunSettings`, and every door has it."""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import piebald
from piebald import Simulator
from piebald.cli import main
from piebald.core.objective import METRICS
from piebald.experiments.file import ExperimentSettings
from piebald.experiments.recipes import ExperimentFields
from piebald.experiments.reference import meanings, schema
from piebald.experiments.run_settings import (
    KEYS,
    ComparedKeywords,
    Evaluation,
    RunKeywords,
    RunSettings,
    SearchKeywords,
)
from piebald.experiments.sections import AdviseSection, TuneSection, file_text
from piebald.models import build_model
from piebald.report.callbacks import Tracker
from piebald.server import StoppingCriteria

# values that differ from the defaults, as a file writes them; of a new setting the default, until it has one here
OTHERS: dict[str, Any] = RunSettings().keywords() | {
    "rounds": 3, "stop": {"seconds": 60.0}, "seed": 4, "runtime": {"kind": "simulator", "engine": "sequential"},
    "loss": "classification", "evaluate_every": 2, "evaluate_clients": 5, "evaluate_split": "validation",
    "per_class": False, "metrics": ["auc"], "threshold": "f1", "keep": {"kind": "knn_per", "k": [5]}, "unseen": 2,
    "checkpoint_every": 2, "measure": "none", "label": "mine", "longest_step": 10.0, "max_examples": 20,
    "max_weight": 0.5, "trackers": [{"kind": "tensorboard"}],
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_a_field_and_its_keyword_have_one_type(name: str) -> None:
    *sections, field = KEYS[name]
    keywords, fields = (
        get_type_hints(model, include_extras=True) for model in (RunKeywords, Evaluation if sections else RunSettings)
    )
    assert keywords[name] == fields[field]


def test_every_field_is_a_keyword_and_there_is_no_other() -> None:
    assert KEYS.keys() == RunKeywords.__annotations__.keys()
    fields = RunSettings.model_fields.keys() - {"evaluate"}
    assert {key for key in KEYS.values() if len(key) == 1} == {(field,) for field in fields}
    assert {key[1] for key in KEYS.values() if len(key) == 2} == Evaluation.model_fields.keys()


@pytest.mark.parametrize(
    ("function", "keywords"),
    [
        (piebald.run, RunKeywords),
        (piebald.compare, ComparedKeywords),
        (piebald.tune, SearchKeywords),
        (piebald.advise, SearchKeywords),
    ],
)
def test_functions_show_the_settings_that_they_take(function: Callable[..., Any], keywords: Any) -> None:
    shown, usual = inspect.signature(function).parameters, RunSettings()
    assert {name: shown[name].default for name in keywords.__annotations__} == usual.keywords(keywords)


def test_a_file_has_every_setting() -> None:
    given = {name: value for name, value in OTHERS.items() if value is not None}
    flags = [f"{'.'.join(KEYS[name])}={written(value)}" for name, value in given.items()]
    settings = ExperimentSettings.load(None, flags)
    read = settings.keywords()
    assert read["runtime"].model_dump() == OTHERS["runtime"]
    assert read | {"runtime": OTHERS["runtime"]} == OTHERS
    assert ExperimentFields.model_fields.keys() > RunSettings.model_fields.keys()


def test_a_record_has_every_setting_and_gives_the_same_settings() -> None:
    settings = RunSettings.of_keywords(OTHERS, {"model": {"name": "mlp"}})
    again = RunSettings.of_folder(settings.record(), {})
    assert (again, again.experiment) == (settings, settings.experiment)
    assert RunSettings.of_folder(RunSettings().record(), {}) == RunSettings(rounds=10)


def test_what_python_alone_has_is_recorded_as_plain_values() -> None:
    class Mine(Tracker):
        package = None

    given = {
        "loss": lambda outputs, targets: outputs,
        "metrics": {"own": METRICS["auc"]},
        "stop": StoppingCriteria(updates=3),
    }
    record = RunSettings.of_call({**given, "trackers": [Mine()], "unseen": ("a",)}).record()
    assert (record["loss"], record["metrics"], record["stop"], record["unseen"]) == (None, None, {"updates": 3}, ["a"])
    assert record["trackers"] == [{"kind": "mine"}]


@pytest.mark.full
def test_a_run_records_every_setting() -> None:
    clients = piebald.partition.Iid(clients=3, limit=60, validation=0.2).split(piebald.data.digits())
    options = OTHERS | {"unseen": 0, "keep": "best", "threshold": None, "trackers": [], "runtime": Simulator()}
    run = piebald.run("fedavg", clients, build_model("logistic", (1, 8, 8), 10), **options | {"rounds": 1})
    named = {name: options[name] for name in KEYS if name not in ("runtime", "rounds") and "evaluate_" not in name}
    assert {name: run.meta[name] for name in named} == named
    assert run.meta["evaluate"] == [2, 5, "validation"]


@pytest.mark.parametrize("command", ["run", "compare", "tune", "advise", "server"])
def test_help_names_every_key(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    listed = capsys.readouterr().out.partition("Keys of the file")[2]
    for key, meaning in meanings().items():
        assert re.search(rf"^  {re.escape(key)} +\w", listed, re.MULTILINE), key
        assert meaning


def test_the_schema_has_every_key_with_its_meaning_and_takes_files_that_are_right() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    table = schema()
    for key in KEYS.values():
        properties = table["properties"]
        if len(key) == 2:
            properties = table["$defs"]["Evaluation"]["properties"]
        assert properties[key[-1]]["description"]
    checks = jsonschema.Draft202012Validator(table)
    right = tomllib.loads(file_text(None))
    assert not list(checks.iter_errors(right))
    for wrong in ({"rounds": 0}, {"rounds": 1.5}, {"roundz": 1}, {"evaluate": {"evry": 1}}, {"keep": "bestt"}):
        assert list(checks.iter_errors(right | wrong)), wrong


def test_a_new_file_names_the_schema_and_all_settings_that_have_a_default(tmp_path: Path) -> None:
    assert main(["new", str(tmp_path / "new")]) == 0
    text = (tmp_path / "new" / "experiment.toml").read_text("utf-8")
    name = re.match(r"#:schema \./(.+)\n", text)
    assert name is not None
    assert json.loads((tmp_path / "new" / name[1]).read_text("utf-8")) == schema()
    usual, given = RunSettings(), tomllib.loads(text)
    for keyword, key in KEYS.items():
        assert key[0] in given or usual.value(keyword) in (None, []) or f"# {'.'.join(key)}" in text
    uncommented = re.sub(r"^# (?=[\w.]+ = )", "", text, flags=re.MULTILINE)
    read = RunSettings.model_validate(
        {name: value for name, value in tomllib.loads(uncommented).items() if name in RunSettings.model_fields}
    )
    assert read == RunSettings(rounds=given["rounds"], runtime={"kind": "simulator"})


def test_the_page_of_settings_has_every_key() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "settings.md").read_text("utf-8")
    for name, key in KEYS.items():
        assert f"- `{name} = " in page
        assert len(key) == 1 or f"`{'.'.join(key)}` in a file" in page


def written(value: Any) -> str:
    """A value as TOML has it."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {written(inner)}" for name, inner in value.items()) + " }"
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    return str(value).lower() if isinstance(value, bool) else repr(value)


@pytest.mark.parametrize(
    ("section", "function"), [(TuneSection, piebald.tune), (AdviseSection, piebald.advise)], ids=["tune", "advise"]
)
def test_a_section_of_a_search_has_settings_of_its_function(section: Any, function: Callable[..., Any]) -> None:
    assert section.model_fields.keys() < inspect.signature(function).parameters.keys()
