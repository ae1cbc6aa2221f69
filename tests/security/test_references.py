"""Text from outside names registered components and what is defined in listed modules; no other object is found."""

from __future__ import annotations

import importlib
import json
import pkgutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import piebald
from piebald import models, recipes
from piebald.cli import main
from piebald.contracts import Task
from piebald.contracts.component import Component, build
from piebald.core import references
from piebald.core.errors import SettingError
from piebald.core.references import NOBODY, USERS, Outside, Reference
from piebald.experiments.file import ExperimentSettings
from piebald.federation.hub import server_runtime
from piebald.federation.hub.server_runtime import FederationServer
from piebald.federation.link.wire_format import task_body, unpack_task
from piebald.methods.catalog import registry
from piebald.settings.plugins import objective_named
from tests import processes
from tests.federation.conftest import ENVIRONMENT, Sites, provisioned, settings, until

from .server_entry import PATIENT, prepared

LISTED = '''
"""A module of the owner's, which imports what every module imports."""
import os
import subprocess
import functools
import numpy as np
import torch
import piebald
from os import system
from pathlib import Path
from subprocess import Popen
from torch import nn
from piebald.models import pretrained
from piebald.methods.training import Sgd

run = functools.partial(subprocess.run)
loaded = nn.Identity()
bound = Path.cwd
ready = piebald.recipes.fedavg(lr=0.3)
_hidden = 3

class Net(nn.Linear):
    """Its attributes are reached by dots."""
    shell = staticmethod(os.system)
    tools = subprocess
    def __init__(self, input_shape, outputs, scale: float = 1.0):
        super().__init__(input_shape[-1], outputs)
        self.scale = scale
    @staticmethod
    def small(input_shape, outputs):
        return nn.Linear(input_shape[-1], outputs)

class Steady(Sgd):
    """A component."""

def falling(version):
    return 1 / (1 + version)
'''
DEFINED = {"Net", "Net.forward", "Net.small", "Steady", "falling", "ready"}

REFERENCES = (
    "piebald.federation.operate.status:os.system",
    "piebald.federation.operate.status:os.abort",
    "torch.utils.cpp_extension:subprocess.Popen",
    "piebald.settings.plugins:importlib.import_module",
    "piebald.models:pretrained",
    "piebald.models.pretrained:pretrained",
    "piebald:experiment.resume",
    "piebald.methods.aggregation:Krum",
    "piebald.cli:main",
    "torch:load",
    "torch.nn:Linear",
    "torch:nn.Linear",
    "numpy:load",
    "os:system",
    "posix:system",
    "subprocess:Popen",
    "builtins:eval",
    "importlib:import_module",
    "__main__:main",
    "{listed}:os.system",
    "{listed}:system",
    "{listed}:subprocess.Popen",
    "{listed}:Popen",
    "{listed}:np.load",
    "{listed}:torch",
    "{listed}:torch.load",
    "{listed}:nn.Linear",
    "{listed}:run",
    "{listed}:loaded",
    "{listed}:bound",
    "{listed}:pretrained",
    "{listed}:Sgd",
    "{listed}:piebald.cli.main",
    "{listed}:Net.shell",
    "{listed}:Net.tools.Popen",
    "{listed}:Net.__init__.__globals__",
    "{listed}:Net.load_state_dict",
    "{listed}:_hidden",
    "{listed}:__builtins__",
    "{listed}:",
    "{listed}::Net",
    " {listed}:Net",
    "{listed}:Net ",
    "{listed}\n:Net",
    "{listed}.py:Net",
    "./{listed}.py:Net",
    "{listed}.os:system",
    "{listed}_more:Net",
    "{listed}.__main__:Net",
    "{listed}:N\u0435t",
    "{listed}:\u2115et",
    "\uff4cisted:Net",
    "canary:run",
    "canary.py:run",
    "/tmp/canary.py:run",
    ":Net",
    ":",
)


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that can be imported, beside one that must not be."""
    name = f"listed_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(LISTED)
    (tmp_path / f"{name}_more.py").write_text("class Net: pass\n")
    (tmp_path / "canary.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.setattr(references, "_files", {})
    monkeypatch.syspath_prepend(tmp_path)  # as if they were installed
    yield name
    for module in [module for module in sys.modules if module.startswith(name)]:
        del sys.modules[module]
    Component.registry["training"].pop("steady", None)


@pytest.mark.parametrize("reference", REFERENCES)
def test_no_other_reference_is_found(reference: str, listed: str) -> None:
    """Before, what `piebald` had imported was found whatever was allowed, and what a listed module had, too."""
    text = reference.replace("{listed}", listed)
    for modules in ([], [listed], [listed, "piebald", "os", "subprocess", "builtins", "importlib", "posix"]):
        author = Outside(modules, "list it")
        with pytest.raises(SettingError) as raised:
            author.find(text, "model")
        assert "\n" not in str(raised.value)
    assert "canary" not in sys.modules
    assert f"{listed}_more" not in sys.modules


def test_what_a_listed_module_defines_is_found(listed: str) -> None:
    author = Outside([listed], "list it")
    marked = author.mark
    assert models.networks.network(marked(f"{listed}:Net"), (3,), 2, scale=2.0).out_features == 2
    assert models.networks.network(marked(f"{listed}:Net.small"), (3,), 2).out_features == 2
    assert build("training", marked({"kind": f"{listed}:Steady", "lr": 0.2})).kind == "steady"
    made = build("training", marked({"kind": "steady", "lr_schedule": f"{listed}:falling"}))
    assert json.loads(json.dumps(made.table()))["lr_schedule"] == {"kind": "function", "function": f"{listed}:falling"}
    assert build("training", author.mark(json.loads(json.dumps(made.table())))) == made
    assert registry.lookup(marked(f"{listed}:ready"), author).make().training == recipes.fedavg(lr=0.3).training


def test_settings_are_checked_against_the_signature_before_anything_is_called(listed: str) -> None:
    author = Outside([listed], "list it")
    for setting, value in (("depth", 3), ("scale", "wide"), ("scale", True), ("args", 1), ("kwargs", {})):
        with pytest.raises(SettingError, match=setting):
            models.networks.network(author.mark(f"{listed}:Net"), (3,), 2, **{setting: value})


def _attributes(reference: str, holder: Any, seen: set[int], levels: int) -> Iterator[str]:
    """Yield every reference to a public attribute, through modules and classes, each holder once."""
    if id(holder) in seen or not isinstance(holder, ModuleType | type):
        return
    seen.add(id(holder))
    for name, value in list(vars(holder).items()):
        if name.isidentifier() and not name.startswith("_"):
            own = f"{reference}.{name}" if reference.count(":") and not reference.endswith(":") else reference + name
            yield own
            if levels:
                yield from _attributes(own, value, seen, levels - 1)


@pytest.mark.long
def test_a_walk_through_everything_finds_what_is_listed_and_nothing_else(listed: str) -> None:
    """Every module of the package and every attribute that the syntax reaches, three levels deep, torch's as well."""
    packages = [name for _, name, _ in pkgutil.walk_packages(piebald.__path__, "piebald.") if "__main__" not in name]
    walked, seen = 0, set[int]()
    for author in (NOBODY, Outside(["piebald", "torch.nn.modules"], "list it")):
        for package in packages:
            try:
                module = importlib.import_module(package)
            except ImportError:  # of an extra that is not here
                continue
            for reference in _attributes(f"{package}:", module, seen if author is NOBODY else set(), 1):
                walked += 1
                with pytest.raises(SettingError):
                    author.find(reference, "model")
    assert walked > 10_000
    author, module = Outside([listed], "list it"), importlib.import_module(listed)
    found = set()
    for reference in _attributes(f"{listed}:", module, set(), 2):
        walked += 1
        try:
            author.find(reference, "model")
            found.add(reference.removeprefix(f"{listed}:"))
        except SettingError:
            continue
    assert {name for name in found if name.split(".")[0] in {"Net", "falling", "ready", "Steady"}} >= {"Net", "falling"}
    assert all(name.split(".")[0] in {one.split(".")[0] for one in DEFINED} for name in found), found


def test_only_the_front_door_gives_text_the_rights_of_the_user() -> None:
    """What serves a site, a server or a run folder never marks text so."""
    place = Path(piebald.__file__).parent
    uses = {str(path.relative_to(place)) for path in place.rglob("*.py") if "USERS" in path.read_text()}
    assert uses == {
        "core/references.py", "settings/plugins.py", "methods/recipe.py", "methods/catalog/registry.py",
        "models/networks.py", "data/embeddings.py", "data/sets/named.py", "runs/run.py",
        "runs/adaptation.py", "experiments/file.py", "experiments/preview.py",
        "experiments/run_settings.py", "cli/show.py",
        "advice/tuning/space.py", "federation/site/site_rows.py",
        "federation/site/site_process.py", "testing/components.py",
    }  # fmt: skip


def test_text_that_nobody_marked_names_nothing(listed: str) -> None:
    """Constructors, recipes and tables that come without their author find no module at all."""
    name = f"{listed}:falling"
    for make in (
        lambda: build("training", {"kind": f"{listed}:Steady"}),
        lambda: build("training", {"kind": "sgd", "lr_schedule": name}),
        lambda: build("training", {"kind": "sgd", "lr_schedule": {"kind": "function", "function": name}}),
        lambda: build("training", {"kind": "sgd", "augmentation": [name]}),
        lambda: models.networks.network(f"{listed}:Net", (3,), 2),
        lambda: objective_named(None, name, None),
        lambda: recipes.rebuild({**recipes.fedavg().model_dump(), "training": {"kind": f"{listed}:Steady"}}),
        lambda: ExperimentSettings.of_table(
            settings({"name": "fedavg"}).table() | {"model": {"name": f"{listed}:Net"}}, "a table"
        ).plan(),
    ):
        with pytest.raises(SettingError):
            make()
    assert listed not in sys.modules


def test_a_reference_keeps_its_author(listed: str) -> None:
    import copy
    import pickle

    author = Outside([], "list it")
    given = author.mark({"a": [f"{listed}:Net", "plain"], "b": ("x:y",)})
    for made in (copy.deepcopy(given), pickle.loads(pickle.dumps(given)), USERS.mark(given)):
        assert made == given
        assert isinstance(made["a"][0].resolver, Outside)
        with pytest.raises(SettingError, match="is not allowed here: list it"):
            made["a"][0].resolved("model")
    assert not isinstance(given["a"][1], Reference)


# ------------------------------------------------------------------------------------------------------ real processes


class Liar:
    """A server whose terms are changed before they are sent; its connections are real."""

    def __init__(self, folder: Path, change: Callable[[dict[str, Any]], None], monkeypatch: pytest.MonkeyPatch) -> None:
        honest = server_runtime.terms

        def lying(*given: Any) -> bytes:
            values = json.loads(honest(*given))
            change(values)
            return json.dumps(values).encode()

        monkeypatch.setattr(server_runtime, "terms", lying)
        plan, table = prepared(json.dumps({"name": "fedavg"}))
        self.server = FederationServer(folder, PATIENT, table, plan.work, plan.clients, None)
        self.server.shared.started = True  # as by a first task, which waits for all sites

    def refused(self, site: str) -> str:
        """Why a site does not take part, "" as long as it has not said so."""
        return next(one.refused for one in self.server.shared.members if one.name == site)


STRICT = """
[policy]
plugins = []
queries = []
accept = ["fedavg"]
updates = 1
splits = []
uploads = ["model"]
carry = false
"""


@pytest.mark.long
def test_terms_run_no_command_at_any_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, a site with the default policy, one with the strictest, and one that only looked, all ran it."""
    folder, mark = provisioned(tmp_path / "credentials"), tmp_path / "mark"

    def change(values: dict[str, Any]) -> None:
        values["experiment"]["model"] = {
            "name": "piebald.federation.operate.status:os.system",
            "command": f"id >> {mark}",
        }

    (folder / "site-2" / "site.toml").write_text(STRICT)
    (folder / "site-3" / "site.toml").write_text('[policy]\naccept = ["ask"]\n')
    liar, sites = Liar(folder / "server", change, monkeypatch), Sites(folder)
    try:
        for site in ("site-1", "site-2"):
            sites.start(site)
        words = processes.command("client", folder / "site-3", "--check")
        looked = processes.run(words, capture_output=True, env=ENVIRONMENT, timeout=300)
        for site in ("site-1", "site-2"):
            why = until(lambda site=site: liar.refused(site) or mark.exists())
            assert not mark.exists()
            assert "is a module of Piebald itself, whose parts have names without a module" in why
    finally:
        sites.close()
        liar.server.close()
    assert b"it waits for approval: piebald approve" in looked.stdout
    assert not mark.exists()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of an experiment file."""
    folder = tmp_path_factory.mktemp("run")
    made = settings({"name": "fedavg"}, rounds=1, measure="none", model={"name": "logistic"})
    (folder / "e.toml").write_text(made.text())
    assert main(["run", str(folder / "e.toml"), "--out", str(folder / "run"), "--quiet"]) == 0
    return folder / "run"


def changed(run: Path, folder: Path, **values: Any) -> Path:
    """A copy of a run folder with other values in its description."""
    import shutil

    made = Path(shutil.copytree(run, folder / "stranger"))
    with closing(sqlite3.connect(made / "run.db")) as database, database:
        for key, value in values.items():
            database.execute("UPDATE meta SET value = ? WHERE key = ?", (json.dumps(value), key))
    return made


@pytest.mark.parametrize("command", ["resume", "export"])
@pytest.mark.parametrize(
    "name", ["piebald.federation.operate.status:os.system", "torch.utils.cpp_extension:subprocess.Popen"]
)
def test_a_folder_of_a_stranger_runs_no_command(
    command: str, name: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "mark"
    given = {"command": f"id > {mark}"} if "system" in name else {"args": ["sh", "-c", f"id > {mark}"]}
    with closing(sqlite3.connect(finished / "run.db")) as database, database:
        kept = json.loads(database.execute("SELECT value FROM meta WHERE key = 'settings'").fetchone()[0])
    status = "finished" if command == "export" else "running"
    run = changed(finished, tmp_path, settings={**kept, "model": {"name": name, **given}}, status=status)
    more = ["--out", str(tmp_path / "model.safetensors")] if command == "export" else []
    for allowed in ([], ["--plugin", "piebald", "--plugin", "torch"]):
        assert main([command, str(run), *more, *allowed]) == 2
        assert capsys.readouterr().err.count("\n") == 1
        assert not mark.exists()


def test_one_sentence_says_what_allows_the_user_s_own_plugin(
    finished: Path, tmp_path: Path, listed: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder in which a module of the same name lies does not replace the user's."""
    monkeypatch.chdir(tmp_path)
    run = changed(finished, tmp_path, plugins=[[listed, "1"]])
    (run / f"{listed}.py").write_text("raise SystemExit('that of the folder')\n")
    monkeypatch.syspath_prepend(str(run))
    out = str(tmp_path / "model.safetensors")
    assert main(["export", str(run), "--out", out]) == 2
    said = capsys.readouterr().err
    assert f"the plugin '{listed}' is not allowed here: allow it with --plugin, or plugins=[...] in Python" in said
    assert main(["export", str(run), "--out", out, "--plugin", listed]) == 2
    assert f"there is no module '{listed}'" in capsys.readouterr().err
    (run / f"{listed}.py").unlink()
    assert main(["export", str(run), "--out", out, "--plugin", listed]) == 0


@pytest.mark.full
def test_rows_of_a_function_in_the_user_s_own_file_are_allowed_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(references, "_files", {})
    (tmp_path / "my_own_rows.py").write_text("from piebald import data\ndef load():\n    return data.digits()\n")
    made = settings({"name": "fedavg"}, rounds=1, measure="none", data={"source": "my_own_rows.py:load"})
    Path("e.toml").write_text(made.text())
    assert main(["run", "e.toml", "--out", "run", "--quiet"]) == 0
    for step, how in enumerate(("my_own_rows", "my_own_rows.py"), 2):
        assert main(["resume", "run", "--rounds", str(step), "--quiet"]) == 2
        assert "'my_own_rows.py' is not allowed here: allow it with --plugin" in capsys.readouterr().err
        assert main(["resume", "run", "--rounds", str(step), "--quiet", "--plugin", how]) == 0
    sys.modules.pop("my_own_rows")


def test_tasks_and_questions_name_registered_kinds_alone(listed: str) -> None:
    plan, _ = prepared(json.dumps({"name": "fedavg"}))
    body = bytes(task_body(Task(1, 0, 0, {"model": plan.work.initial}, build("query", "evaluate"))))  # type: ignore[arg-type]
    for kind in (f"{listed}:Steady", "canary:run", "piebald.federation.operate.status:os.system"):
        kinds = b'"kind": "evaluate"' if b'"kind": "evaluate"' in body else b'"kind":"evaluate"'
        assert kinds in body
        own = body[:4].__class__(body)
        text = own.replace(kinds, kinds.replace(b"evaluate", kind.encode()))
        size = int.from_bytes(own[:4], "little") + len(text) - len(own)
        with pytest.raises(Exception, match="cannot be read"):
            unpack_task(size.to_bytes(4, "little") + text[4:])
    assert listed not in sys.modules
    assert "canary" not in sys.modules


@pytest.mark.long
def test_every_text_of_terms_and_folders_as_a_reference_starts_opens_and_imports_nothing(tmp_path: Path) -> None:
    """In a process of its own, whose starts of programs, opened files and imports Python itself reports."""
    made = subprocess.run(
        [sys.executable, "-B", "-m", "tests.security.mutated_texts", str(tmp_path)],  # compiled files are renamed
        capture_output=True, text=True, env=ENVIRONMENT, timeout=1800, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stdout + made.stderr
    told = json.loads(made.stdout.splitlines()[-1])
    assert told["seen"] == []
    assert told["tried"] > 300
