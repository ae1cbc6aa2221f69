"""Bad calls of everything public: python benchmarks/robustness/api_fuzzer.py --count 1000

Subjects are found, not listed: what `__all__` of the public packages names, every component, and the methods of a few
values.  Arguments that a good call needs are found by their names, or else by their types.  Then one argument is replaced
by a hostile value.  Calls are made in a child process, so that a crash is seen.
"""
# ruff: noqa: E501 - the table of good arguments

from __future__ import annotations

import argparse
import collections.abc
import importlib
import inspect
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import typing
import warnings
import wave
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hostile
import numpy as np
import torch
from PIL import Image
from rows import Row, tallied

import piebald
from piebald import data, models, partition, recipes, vertical
from piebald.component import Component
from piebald.partition.data_source import DataSource

PACKAGES = (
    "piebald", "piebald.data", "piebald.models", "piebald.partition", "piebald.privacy.accounting", "piebald.preview",
    "piebald.recipes", "piebald.runtimes", "piebald.vertical", "piebald.weight_divergence",
)  # fmt: skip
# They need machines, or files that others publish, or are made by `piebald.run` alone.
LEFT_OUT = {
    "piebald.Run",
    "piebald.privacy.accounting.PrivacyBudget",
    "piebald.Ray",
    "piebald.runtimes.Ray",
    "piebald.runtimes.Simulation",
    "piebald.runtimes.Federation",
}
SECONDS, MEMORY = 10, 16 << 30


@dataclass(frozen=True)
class Subject:
    """Something public that can be called.

    Attributes:
        name: how users call it.
        call: the callable.
        good: arguments of a good call.
        hints: the types of its arguments, where they are known.
    """

    name: str
    call: Callable[..., Any]
    good: Mapping[str, Any]
    hints: Mapping[str, Any]


class _TooLong(BaseException):
    """A call that went on, and so was allowed."""


def _good(folder: Path) -> dict[str, Any]:
    """Good arguments by name; those of one callable go by "callable.name"."""
    dataset = data.digits()
    clients = partition.Iid(clients=3, limit=60).split(dataset)
    model = models.build_model("logistic", (1, 8, 8), 10)
    here = {"kind": "simulator", "workers": 0}
    finished = piebald.run("fedavg", clients, model, rounds=1, out=folder / "run", runtime=here)
    rows = clients.rows(0, "train")
    images = folder / "images" / "class"
    images.mkdir(parents=True)
    Image.new("RGB", (9, 9)).save(images / "one.png")
    with wave.open(str(images / "one.wav"), "wb") as sound:
        sound.setparams((1, 2, 16_000, 0, "NONE", ""))
        sound.writeframes(bytes(32_000))
    numbers = np.arange(3)
    party = partition.PartyRows(numbers, torch.zeros(3, 2), None, ("a", "b"))
    holding = {"x": torch.zeros(3, 2), "y": None, "overlap": numbers, "features": ("a", "b"), "test": torch.zeros(0, 2)}
    return {
        "clients": clients, "comparison": piebald.compare(["fedavg"], clients, model, rounds=1), "data": dataset,
        "delta": 1e-5, "fleet": None, "folder": folder / "run", "histories": [finished], "input_shape": (1, 8, 8),
        "known": 10, "methods": ["fedavg"], "model": model, "newcomer": (rows.x, rows.y), "noise": 1.0, "outputs": 10,
        "path": folder / "run", "recipe": recipes.fedavg(), "rounds": 1, "run": finished, "run_paths": [folder / "run"],
        "share": 0.5, "sizes": [10, 20], "source": {"a": (rows.x, rows.y), "b": (rows.x, rows.y)}, "steps": 3,
        "x": rows.x, "y": rows.y, "piebald.run.runtime": here, "piebald.run.rounds": 1, "piebald.compare.rounds": 1,
        "piebald.write_report.out": folder / "report", "piebald.data.load.name": "digits", "piebald.preview.show.source": DataSource(name="digits"),
        "piebald.models.build_model.name": "logistic", "piebald.preview.show.partition": "iid",
        "piebald.preview.show.settings": {"clients": 3}, "piebald.recipes.make.name": "fedavg",
        "piebald.vertical.run.settings": vertical.TransferSettings(steps=1, batch=128, overlap_batch=128),
        "piebald.resume.path": folder / "run", "piebald.resume.clients": clients, "piebald.resume.model": model,
        "piebald.LazyClients.load": lambda number: (rows.x, rows.y), "piebald.data.Owners.codes": numbers,
        "piebald.data.Owners.names": ["a"], "piebald.data.audio_folder.folder": folder / "images",
        "piebald.data.image_folder.folder": folder / "images", "piebald.models.Cnn1d.input_shape": (3, 16),
        "piebald.models.Cnn1dBn.input_shape": (3, 16), "piebald.models.embed.network": torch.nn.Flatten(),
        "piebald.models.embedded.extractor": torch.nn.Flatten(), "piebald.data.Decoded.shape": (2, 2),
        "piebald.data.Decoded.dtype": torch.float32, "piebald.data.Decoded.read": lambda row: np.zeros((2, 2)),
        "piebald.partition.Heterogeneity.rows": np.ones(3), "piebald.partition.Lists.values": numbers,
        "piebald.partition.Lists.starts": numbers, "piebald.partition.Parties.active": party,
        "piebald.partition.Parties.passive": party, "piebald.partition.Parties.overlap": numbers,
        "piebald.partition.PartyRows.ids": numbers, "piebald.partition.PartyRows.y": None,
        "piebald.partition.PartyRows.features": ("a",), "piebald.partition.PooledClients.parts": {"train": clients.lists("train")},
        "piebald.partition.measure.statistics": partition.collect(clients), "piebald.preview.columns.rows": [{"a": 1}],
        "piebald.preview.DataPreview.partition": {}, "piebald.preview.DataPreview.clients": [],
        "piebald.preview.DataPreview.federation": {}, "piebald.preview.DataPreview.units": {},
        "piebald.preview.DataPreview.files": [], "piebald.recipes.rebuild.table": recipes.fedavg().model_dump(),
        "piebald.weight_divergence.measure_heterogeneity.how": "data", "piebald.weight_divergence.measure_heterogeneity.work": finished.work,
        "Run.frame.name": "rounds", "Comparison.paired.base": "fedavg", "clients.rows.client": 0, "piebald.partition.Trace.file": str(folder / "none.csv"),
        "piebald.weight_divergence.Divergence.clients": np.ones(3), "piebald.weight_divergence.Divergence.pooled": None,
        **{f"piebald.vertical.PartyHolding.{name}": value for name, value in holding.items()},
        "piebald.vertical.PartyHolding.test_y": torch.zeros(0), "piebald.Layout.slots": finished.work.layout.slots,
        "piebald.Layout.shared": 650, "piebald.Layout.size": 650,
        **{f"piebald.Recipe.{axis}": getattr(recipes.fedavg(), axis) for axis in recipes.fedavg().axes},
        "partition.sites.clients": ("a",), "piebald.partition.Sites.clients": ("a",),
    }  # fmt: skip


def _by_type(annotation: Any) -> Any:
    """A good value of a plain type."""
    origin = typing.get_origin(annotation)
    inner = [one for one in typing.get_args(annotation) if one not in (type(None), Ellipsis)]
    if origin is typing.Literal:
        return inner[0]
    if origin in (tuple, list, collections.abc.Sequence):
        return (_by_type(inner[0]),)
    if inner:
        return _by_type(inner[0])
    plain = {int: 2, float: 0.5, str: "a", bool: False}
    return next((value for kind, value in plain.items() if annotation is kind), None)


def _hints(call: Callable[..., Any]) -> dict[str, Any]:
    unwrapped = inspect.unwrap(call)
    if inspect.isclass(call) and issubclass(call, Component):
        return {name: field.rebuild_annotation() for name, field in call.model_fields.items()}
    target = unwrapped.__init__ if inspect.isclass(unwrapped) else unwrapped
    try:
        return typing.get_type_hints(target, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}


def _subject(name: str, call: Callable[..., Any], good: Mapping[str, Any]) -> Subject | None:
    hints = _hints(call)
    if inspect.isclass(call) and issubclass(call, Component):
        needed = {one: _needed(name, one, {}, hints) for one, field in call.model_fields.items() if field.is_required()}
        needed |= {one: good[f"{name}.{one}"] for one in needed if f"{name}.{one}" in good}
        return Subject(name, call, needed, hints) if call.model_fields else None
    try:
        parameters = {one: about for one, about in inspect.signature(call).parameters.items() if one != "self"}
    except (TypeError, ValueError):
        return None
    open_ended = [one for one, about in parameters.items() if about.kind in (about.VAR_KEYWORD, about.VAR_POSITIONAL)]
    arguments = {
        one: _needed(name, one, good, hints)
        for one, about in parameters.items()
        if one not in open_ended and (about.default is inspect.Parameter.empty or f"{name}.{one}" in good)
    }
    own = {one: hints.get(one, Any) for one in parameters if one not in open_ended}
    if open_ended and name.startswith("piebald.recipes.") and not name.endswith("make"):
        own |= {"lr": float, "batch": int, "epochs": int, "momentum": float, "clip": float | None}
    return Subject(name, call, arguments, own) if own else None


def _needed(name: str, argument: str, good: Mapping[str, Any], hints: Mapping[str, Any]) -> Any:
    for known in (f"{name}.{argument}", argument):
        if known in good:
            return good[known]
    return _by_type(hints.get(argument))


def subjects(folder: Path) -> Iterator[Subject]:
    """Everything public that can be called, in a fixed order."""
    good = _good(folder)
    seen: set[int] = set()
    for package in PACKAGES:
        module = importlib.import_module(package)
        named = getattr(module, "__all__", None)
        names = named or [name for name, value in vars(module).items() if getattr(value, "__module__", "") == package]
        for name in sorted(name for name in names if not name.startswith("_")):
            call, full = getattr(module, name), f"{package}.{name}"
            if not callable(call) or full in LEFT_OUT or id(call) in seen or _no_value(call):
                continue
            seen.add(id(call))
            if made := _subject(full, call, good):
                yield made
    for axis, kinds in sorted(Component.registry.items()):
        for kind, component in sorted(kinds.items()):
            if component.__module__.startswith("piebald.") and id(component) not in seen:
                seen.add(id(component))
                if made := _subject(f"{axis}.{kind}", component, good):
                    yield made
    run, recipe, clients = good["run"], good["recipe"], good["clients"]
    methods = {"Run.model": run.model, "Run.start": run.start, "Run.frame": run.frame, "Run.to_target": run.to_target}
    methods |= {"Comparison.paired": good["comparison"].paired, "clients.rows": clients.rows}
    for name, method in methods.items():
        if made := _subject(name, method, good):
            yield made
    yield Subject("Recipe.with_", recipe.with_, {}, dict.fromkeys(recipe.axes, Any))


def _no_value(call: Any) -> bool:
    """Whether a class is one of errors or a protocol, which nobody makes."""
    return inspect.isclass(call) and (issubclass(call, Exception) or typing.Protocol in call.__bases__)


def verdict(subject: Subject, argument: str, value: Any) -> tuple[str, str]:
    """What one bad call ends with, and how to see it again."""
    try:
        shown = repr(value)[:60]
    except Exception:
        shown = f"a {type(value).__name__}"
    example = f"{subject.name}({argument}={shown})"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            subject.call(**{**subject.good, argument: value})
    except piebald.PiebaldError as error:
        text = str(error)
        bad = not text.strip() or "\n" in text or len(text) > 1000
        return ("raw", f"{example}: not one line: {text[:200]!r}") if bad else ("refused", f"{example}: {text}")
    except _TooLong:
        pass
    except Exception as error:
        if inspect.isclass(value) and str(error).startswith(f"{value.__name__}("):  # a callback of the caller's own
            return "accepted", example
        return "raw", f"{example}: {type(error).__name__}: {str(error)[:150]}"
    if hostile.wrong(value, subject.hints.get(argument, Any)):
        return "raw", f"{example}: was allowed"
    return "accepted", example


def _limit(*_: object) -> None:
    raise _TooLong


def _work(cases: list[tuple[Subject, str, int]], start: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    signal.signal(signal.SIGALRM, _limit)
    for number in range(start, len(cases)):
        subject, argument, value = cases[number]
        pipe.send(("begin", number))
        signal.alarm(SECONDS)
        try:
            found = verdict(subject, argument, hostile.VALUES[value]())
        except _TooLong:
            found = ("accepted", "")
        signal.alarm(0)
        pipe.send(("end", found))
    pipe.close()
    os._exit(0)


def _tried(cases: list[tuple[Subject, str, int]]) -> list[tuple[str, str]]:
    """The verdicts on all cases, from children that are replaced when one crashes."""
    context = multiprocessing.get_context("fork")
    verdicts: list[tuple[str, str]] = []
    while len(verdicts) < len(cases):
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_work, args=(cases, len(verdicts), theirs))
        child.start()
        theirs.close()
        begun = False
        try:
            while len(verdicts) < len(cases):
                if not ours.poll(3 * SECONDS):
                    break
                word, what = ours.recv()
                begun = word == "begin"
                if word == "end":
                    verdicts.append(what)
        except EOFError:
            pass
        child.kill()
        child.join()
        if begun or not verdicts:
            subject, argument, value = cases[len(verdicts)]
            verdicts.append(("crashed", f"{subject.name}({argument}=VALUES[{value}])"))
    return verdicts


def run(count: int = 1000, seed: int = 0, only: str = "") -> list[Row]:
    """Try so many bad calls, drawn over all subjects, and tally them by kind of subject."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        before = os.getcwd()
        os.chdir(place)
        try:
            known = [one for one in subjects(Path(place)) if only in one.name]
            pairs = [(one, argument) for one in known for argument in one.hints]
            every = [(one, argument, value) for one, argument in pairs for value in range(len(hostile.VALUES))]
            cases = draw.sample(every, min(count, len(every)))
            verdicts = _tried(cases)
        finally:
            os.chdir(before)
    groups: dict[str, list[tuple[str, str]]] = {}
    for (subject, _, _), found in zip(cases, verdicts, strict=True):
        groups.setdefault(subject.name.rpartition(".")[0] or subject.name, []).append(found)
    return [tallied(f"calls of {name}", found) for name, found in sorted(groups.items())]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    for row in run(options.count, options.seed, options.only):
        print(row.subject, row.tried, row.refused, row.accepted, row.raw, row.crashed)
        for example in row.examples:
            print("   ", example)
