"""Bad calls of everything public: python benchmarks/robustness/api_fuzzer.py --count 1000

Subjects are found, not listed: what `__all__` of the public packages names, every component, and the methods of a few
values.  Arguments that a good call needs are found by their names, or else by their types.  Then one argument is
replaced by a hostile value.  Calls are made in a child process, so that a crash is seen.
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

import hostile
import torch
from good_arguments import good_arguments
from rows import Row, command, tallied

import piebald
from piebald.contracts.component import Component

PACKAGES = (
    "piebald", "piebald.data", "piebald.models", "piebald.data.partition", "piebald.privacy.accounting",
    "piebald.experiments.preview",
    "piebald.methods.catalog.recipes", "piebald.runtimes", "piebald.vertical",
    "piebald.data.measures.heterogeneity",
    "piebald.advice",
    "piebald.advice.tuning", "piebald.methods.attacks", "piebald.methods.training",
    "piebald.privacy.secure_aggregation.security",
)  # fmt: skip
# They need machines, or files that others publish, are made by runs and searches alone, or are checked when they are
# fitted, as scikit-learn asks.
LEFT_OUT = {
    "piebald.FederatedClassifier",
    "piebald.FederatedRegressor",
    *(
        f"piebald.privacy.accounting.{one}" for one in ("composed_epsilon", "NoisySteps", "LossAccountant")
    ),  # of a policy
    *(  # of numbers and statistics that the measures have computed
        f"piebald.data.measures.heterogeneity.{one}"
        for one in (
            "embedding",
            "frechet",
            "frechet_to_rest",
            "gini",
            "speed_ratio",
            "total_variation",
            "union",
            "without",
        )
    ),
    "piebald.Run",
    "piebald.privacy.accounting.PrivacyBudget",
    "piebald.Ray",
    "piebald.runtimes.Ray",
    "piebald.runtimes.Simulation",
    "piebald.federation.Federation",
    *(f"piebald.advice.tuning.{one}" for one in ("Cost", "Trial", "Tuning")),
    *(f"piebald.advice.{one}" for one in ("Advice", "Look")),
    "piebald.methods.training.RuleOptimizer",
    *(f"Run.{one}" for one in ("threshold", "at_thresholds")),  # of two classes; the run has ten
    "Budget.has_room",  # of what runs have cost, which nobody but a search counts
}
# They need the files of others, or a transfer's folder, so their good calls are refused where these are missing.
NEEDS_FILES = {
    "piebald.models.PretrainedNetwork", "piebald.models.pretrained", "piebald.data.partition.NonIid",
}  # fmt: skip
# Those that are done at once: a good call of the others trains.
QUICK = (
    "piebald.models.", "piebald.data.partition.", "piebald.statistics", "piebald.glm", "piebald.Ledger",
    "piebald.advice.tuning.",
    "piebald.privacy.", "piebald.methods.attacks.", "piebald.methods.training.Learner",
    "piebald.methods.training.Parameter",
    "Run.",
    "Comparison.", "PooledClients.", "LazyClients.", "FederatedStatistics.", "SearchSpace.", "Budget.", "Ledger.",
)  # fmt: skip
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
        hints = typing.get_type_hints(target, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}
    unpacked = [typing.get_args(hint)[0] for hint in hints.values() if typing.get_origin(hint) is typing.Unpack]
    for table in unpacked:
        hints |= typing.get_type_hints(table, include_extras=True)
    return hints


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
    if open_ended and name.startswith("piebald.methods.catalog.recipes.") and not name.endswith("make"):
        own |= {"lr": float, "batch": int, "epochs": int, "momentum": float, "clip": float | None}
    return Subject(name, call, arguments, own) if own else None


def _needed(name: str, argument: str, good: Mapping[str, Any], hints: Mapping[str, Any]) -> Any:
    for known in (f"{name}.{argument}", argument):
        if known in good:
            return good[known]
    return _by_type(hints.get(argument))


def subjects(folder: Path) -> Iterator[Subject]:
    """Everything public that can be called, in a fixed order."""
    good = good_arguments(folder)
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
    for value in good["values"]:
        yield from _methods(value, good)
    recipe = good["recipe"]
    yield Subject("Recipe.with_", recipe.with_, {}, dict.fromkeys(recipe.axes, Any))


def _methods(value: Any, good: Mapping[str, Any]) -> Iterator[Subject]:
    """The public methods of a value that users get."""
    owner = type(value).__name__
    for name in sorted(one for one in dir(type(value)) if not one.startswith("_")):
        full, found = f"{owner}.{name}", inspect.getattr_static(type(value), name)
        if full in LEFT_OUT or not (inspect.isfunction(found) or isinstance(found, classmethod | staticmethod)):
            continue
        if made := _subject(full, getattr(value, name), good):
            yield made


def _no_value(call: Any) -> bool:
    """Whether a class is one of errors, a protocol or the base of an axis, which nobody makes."""
    if not inspect.isclass(call):
        return False
    base = issubclass(call, Component) and not call.kind
    return base or issubclass(call, Exception) or typing.Protocol in call.__bases__


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
    sys.exit(command(__doc__, run, count=1000, seed=0, only=""))
