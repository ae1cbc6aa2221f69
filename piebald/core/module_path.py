"""The path on which Python finds modules, without the current folder, in which a stranger's archive may lie."""

from __future__ import annotations

import os
import site
import sys


def forget_current_folder() -> None:
    """Take the current folder from the path of this process and of those that it starts.

    `python -m`, and an empty entry of PYTHONPATH, put it there; any import of an optional package would then run what
    lies in it under that name.  Called before anything else is imported, so it uses what Python itself has imported.
    """
    current = os.path.realpath(os.curdir)
    installed = [os.path.dirname(os.__file__), *site.getsitepackages(), site.getusersitepackages()]
    if current not in map(os.path.realpath, installed):  # somebody may look around there
        sys.path[:] = [place for place in sys.path if os.path.realpath(place) != current]
    os.environ["PYTHONSAFEPATH"] = "1"
    named = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(place)]
    if named:
        os.environ["PYTHONPATH"] = os.pathsep.join(named)
    else:
        os.environ.pop("PYTHONPATH", None)
