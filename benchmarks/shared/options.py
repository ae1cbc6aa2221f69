"""The command lines of benchmarks: an option of one name has one meaning in all of them."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HELP = {
    "budget_seconds": "begin and go on with nothing after so many seconds",
    "cases": "only cases whose names contain one of these texts",
    "device": "cuda, cuda:1, mps, cpu, or auto",
    "dry_run": "print the conditions or the runs, and run nothing",
    "federations": "only these",
    "jobs": "number of runs beside one another, one thread each",
    "methods": "only these methods",
    "minutes": "start no run after so many minutes",
    "only": "only these parts, by default all",
    "out": "folder of what is measured",
    "pairs": "alternations of each measurement",
    "repeats": "measurements of each, in turns",
    "results": "where the results are written",
    "scale": "how much is run; full is what the papers print",
    "seeds": "seeds of the runs",
    "tables": "only write the results of what has been measured",
    "times": "measurements of each, in turns",
}


def reader(doc: str | None, hidden: Iterable[str] = (), /, **options: Any) -> argparse.ArgumentParser:
    """Return a parser with options of these names.

    Args:
        doc: the program's docstring, whose lines stay as they are.
        hidden: options with a text each that only the program itself passes to its processes.
        options: the default by name, whose type the option has: False makes a switch, a list or None takes several
            values (whole numbers for `seeds`), a tuple holds the choices, of which the first is the default of `scale`
            and all are that of others.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in options.items():
        taken: dict[str, Any] = {"default": default, "help": HELP.get(name)}
        if default is False:
            taken |= {"action": "store_true"}
        elif isinstance(default, tuple) and name == "scale":
            taken |= {"choices": default, "default": default[0]}
        elif isinstance(default, tuple):
            taken |= {"choices": default, "nargs": "+"}
        elif default is None or isinstance(default, list):
            known = type(default[0]) if default else int if name == "seeds" else str
            taken |= {"nargs": "+", "type": known}
        else:
            taken |= {"type": type(default) if not isinstance(default, Path) else Path}
        parser.add_argument(f"--{name.replace('_', '-')}", **taken)
    for name in hidden:
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    return parser
