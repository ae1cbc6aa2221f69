"""The path on which Python finds modules, without the current folder, in which a stranger's archive may lie."""

from __future__ import annotations

import os
import sys


def forget_current_folder() -> None:
    """Take the current folder from the path of this process and of those that it starts.

    `python -m`, and an empty entry of PYTHONPATH, put it there; any import of an optional package would then run what
    lies in it under that name.  What its user has installed from there, or named with its whole path, stays.  Called
    before anything else is imported, so it uses what Python itself has imported.
    """
    named = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(place)]
    current, standard = os.path.realpath(os.curdir), os.path.dirname(os.__file__)
    # what stands behind Python's own modules is installed, also where somebody works in the folder of such a package
    installed = sys.path.index(standard) if standard in sys.path else len(sys.path)
    sys.path[:installed] = [
        place for place in sys.path[:installed] if os.path.realpath(place) != current or place in named
    ]
    os.environ["PYTHONSAFEPATH"] = "1"
    if named:
        os.environ["PYTHONPATH"] = os.pathsep.join(named)
    else:
        os.environ.pop("PYTHONPATH", None)
