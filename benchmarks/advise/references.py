"""Reference values of unlikeness, for plain words: written to piebald/advice/references.json."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from federations import BY_NAME, FEDERATIONS, Federation

from piebald.advice.unlikeness import KINDS, unlikeness
from piebald.contracts import Fleet
from piebald.data.partition import FastSlow, LogNormal

COMMAND = "python benchmarks/advise/run.py references"
FLEETS: dict[str, Fleet] = {  # of ten clients that are alike
    "devices within a factor of 1.3": LogNormal(sigma=0.25),
    "devices within a factor of 2.7": LogNormal(sigma=1.0),
    "one device in ten five times as slow": FastSlow(share_slow=0.1, slow_factor=5.0),
    "one device in ten twenty times as slow": FastSlow(share_slow=0.1, slow_factor=20.0),
}


def write() -> str:
    """Measure all federations and write the file."""
    path = Path(str(files("piebald.advice").joinpath("references.json")))
    found = [*(_row(federation) for federation in FEDERATIONS), *(_fleet(*item) for item in FLEETS.items())]
    rows = ",\n".join("    " + json.dumps(row) for row in found)
    path.write_text(f'{{\n  "command": "{COMMAND}",\n  "federations": [\n{rows}\n  ]\n}}\n', encoding="utf-8")
    return path.read_text("utf-8")


def _row(federation: Federation) -> dict[str, Any]:
    """A federation's name and values; 0 where chance explains the number, None where it is not known."""
    found = {one.kind: one for one in unlikeness(federation.clients(), federation.fleet())}
    values = {kind: None if found[kind].value is None else 0.0 if found[kind].word == "none"
              else round(found[kind].value, 3) for kind in KINDS}  # fmt: skip
    return {"name": federation.words, **values}


def _fleet(name: str, fleet: Fleet) -> dict[str, Any]:
    """A reference for speeds alone."""
    speed = unlikeness(BY_NAME["digits-iid"].clients(), fleet)[-1]
    return {"name": name, **dict.fromkeys(KINDS), "speed": round(speed.value or 0.0, 3)}
