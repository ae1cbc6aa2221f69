"""Honest terms, run folders, tasks and queue entries, each text of which becomes a reference, under Python's audit.

    python -m tests.security.mutated_texts FOLDER

Prints what was tried, and what was started, opened or imported that a text named.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import piebald
from piebald.cli.app import SharedOptions
from piebald.cli.queueing import _settings
from piebald.contracts import Task
from piebald.contracts.component import build
from piebald.core.errors import PiebaldError
from piebald.core.references import USERS, list_file
from piebald.experiments.file import ExperimentSettings
from piebald.experiments.run_settings import RunSettings
from piebald.federation.credentials.provisioning import Credentials
from piebald.federation.hub.run_terms import terms
from piebald.federation.link.wire_format import task_body, unpack_task
from piebald.federation.operate.experiment_queue import Queued
from piebald.federation.site.site_process import SiteSettings, SiteWork
from piebald.runs.prepare import prepare
from piebald.runs.run import opened
from piebald.settings.toml_document import dumps

SITES = ["site-1", "site-2"]
HONEST: dict[str, Any] = {
    "rounds": 1,
    "seed": 1,
    "measure": "none",
    "plugins": [],
    "data": {"name": "digits"},
    "loss": {"name": "classification", "label_smoothing": 0.1},
    "partition": {"kind": "iid", "clients": 2, "validation": 0.1, "limit": 60, "sizes": {"kind": "power_law"}},
    "model": {"name": "mlp", "hidden": [4]},
    "recipe": {
        "name": "fedavg",
        "lr": 0.1,
        "optimizer": {"kind": "adam"},
        "lr_schedule": {"kind": "step_decay", "every": 1},
        "augmentation": [{"kind": "gaussian_noise"}],
        "transforms": [{"kind": "gaussian", "clip": 1.0, "noise": 0.1, "where": "client"}],
    },
    "evaluate": {"every": 1, "metrics": ["accuracy", "auc"]},
}
# places that the honest texts do not have, by the table that they are put into
MORE: tuple[tuple[tuple[str, ...], Any], ...] = (
    (("data",), {"source": "{}"}),
    (("data",), {"public": "{}"}),
    (("model",), {"name": "pretrained", "weights": "{}"}),
    (("extractor",), "{}"),
    (("loss",), "{}"),
    (("plugins",), ["{}"]),
    (("trackers",), ["{}"]),
    (("trackers",), [{"kind": "{}"}]),
    (("keep",), {"kind": "{}"}),
    (("label",), "{}"),
    (("partition", "changes"), ["{}"]),
    (("fleet",), {"kind": "{}"}),
    (("model",), {"name": "mlp", "clients": {"*": "{}"}}),
    (("model",), {"name": "{}", "command": "touch MARK"}),
    (("model",), {"name": "{}", "args": ["touch", "MARK"]}),
    (("recipe", "aggregation"), "{}"),
    (("recipe", "training"), {"kind": "{}"}),
    (("recipe", "lr_schedule"), "{}"),
    (("recipe", "augmentation"), ["{}"]),
    (("recipe", "lr_schedule"), {"kind": "function", "function": "{}"}),
)

PATHS = 3  # of these places hold paths


STARTS = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "pty.spawn")


class Watch:
    """What Python's audit tells while the watch is on: programs, files of the secret folder, and the canary."""

    def __init__(self, secret: Path) -> None:
        self.secret, self.on, self.seen = str(secret), False, list[str]()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, given: tuple[Any, ...]) -> None:
        if not self.on:
            return
        starts = event in STARTS
        opens = event in ("open", "os.listdir", "os.scandir") and self.secret in os.fsdecode(_text(given[0]))
        imports = event == "import" and str(given[0]).partition(".")[0] == "canary"
        calls = event in ("os.remove", "os.rename", "socket.connect", "shutil.rmtree")
        if starts or opens or imports or calls:
            self.seen.append(f"{event} {given!r}"[:200])


def _text(path: Any) -> Any:
    return path if isinstance(path, str | bytes) else ""


def replaced(value: Any, text: str) -> Iterator[Any]:
    """Yield a value with each of its texts in turn as another one; of long lists, with the first three."""
    if isinstance(value, str):
        yield text
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from ({**value, name: made} for made in replaced(inner, text))
    elif isinstance(value, list):
        for number, inner in enumerate(value[:3]):
            yield from ([*value[:number], made, *value[number + 1 :]] for made in replaced(inner, text))


def extended(
    table: Mapping[str, Any], text: str, places: Sequence[tuple[tuple[str, ...], Any]] = MORE
) -> Iterator[Any]:
    """Yield a table of settings with something at each of these places in turn."""
    for keys, value in places:
        inner = json.loads(json.dumps(value).replace("{}", text))
        yield {**table, keys[0]: {**table.get(keys[0], {}), keys[1]: inner} if len(keys) == 2 else inner}


def main(folder: Path) -> None:
    """Try all, and print what was seen."""
    secret = folder / "secret"
    secret.mkdir()
    (secret / "rows.csv").write_text("a,b\n1,0\n")
    (folder / "modules").mkdir()
    (folder / "modules" / "canary.py").write_text("raise SystemExit('imported')\n")
    os.chdir(folder)
    list_file(folder / "modules" / "canary.py")
    texts = [
        "canary:run", "canary.py:run", "piebald.federation.operate.status:os.system",
        "torch.utils.cpp_extension:subprocess.Popen",
        str(secret), str(secret / "rows.csv"),
    ]  # fmt: skip
    settings = ExperimentSettings.of_table(HONEST, "the honest settings", USERS)
    plan = settings.plan()
    recipe = next(iter(plan.recipes.values()))
    objective: dict[str, Any] = {"loss": settings.loss, "metrics": settings.evaluate.metrics}
    ready = prepare(recipe, plan.clients, plan.model, RunSettings.of_keywords({"seed": 1, **objective}))
    honest = json.loads(terms(ready.work, settings.table(), SITES, SITES, plan.clients.classes))
    site = SiteWork(cast(Credentials, SimpleNamespace(party="site-1", folder=folder)), SiteSettings(), folder)
    assert len(site(honest).clients) == 2  # so that refusals are about the changed text
    out = folder / "run"
    piebald.run(
        recipe, plan.clients, plan.model, rounds=1, out=out, measure="none", settings=settings.table(),
        evaluate_every=0, seed=1, **objective,
    ).close()  # fmt: skip
    opened(out).close()
    with closing(sqlite3.connect(out / "run.db")) as database, database:
        meta = {key: json.loads(value) for key, value in database.execute("SELECT key, value FROM meta")}
    told = {name: meta[name] for name in ("settings", "recipe", "loss", "metrics", "runtime", "trackers", "plugins")}
    query = build("query", "evaluate")
    task = bytes(task_body(Task(1, 0, 0, {"model": ready.work.initial}, query)))  # type: ignore[arg-type]
    watch, tried = Watch(secret), 0

    def attempt(call: Callable[[], Any]) -> None:
        nonlocal tried
        tried, watch.on = tried + 1, True
        try:
            call()
        except (PiebaldError, ValueError, TypeError, KeyError, AttributeError, AssertionError):
            pass
        finally:
            watch.on = False

    def folder_with(values: Mapping[str, Any]) -> None:
        with closing(sqlite3.connect(out / "run.db")) as database, database:
            for key, value in values.items():
                database.execute("UPDATE meta SET value = ? WHERE key = ?", (json.dumps(value), key))
        attempt(lambda: opened(out).close())

    for text in texts:
        named = not text.startswith("/")  # the rows and weights of a user's own run lie where its settings say
        for values in [*replaced(honest, text), *({**honest, "experiment": one} for one in extended(HONEST, text))]:
            attempt(lambda values=values: site(values))  # type: ignore[misc]
        for values in replaced(told, text):
            folder_with(values)
        for table in extended(told["settings"], text, MORE if named else MORE[PATHS:]):
            folder_with({**told, "settings": table})
        for head in replaced(values_of(task), text):
            attempt(lambda head=head: unpack_task(bytearray(with_values(task, head))))  # type: ignore[misc]
        for table in [*replaced(HONEST, text), *extended(HONEST, text)] if named else []:
            attempt(lambda table=table: queued(table))  # type: ignore[misc]
    print(json.dumps({"tried": tried, "seen": watch.seen}))


def values_of(task: bytes) -> Any:
    """The values in front of the tensors of a task."""
    return json.loads(task[4 : 4 + int.from_bytes(task[:4], "little")])


def with_values(task: bytes, values: Any) -> bytes:
    """A task with other values."""
    text = json.dumps(values).encode()
    return len(text).to_bytes(4, "little") + text + task[4 + int.from_bytes(task[:4], "little") :]


def queued(table: Mapping[str, Any]) -> Any:
    """What the server of a queue makes of an experiment."""
    entry = Queued(1, "fedavg", dumps(dict(table)), "run", "", "")
    return _settings(entry, SharedOptions(as_json=True, quiet=True)).plan()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
