"""The command line under a wall clock that another process sets: python stepped.py FILE ARGUMENTS

FILE holds the seconds by which the clock is ahead; without the file it is right.  What is set is what Python's
`time.time` returns: OpenSSL and `datetime` read the true time.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path


def follow(clock: Path) -> None:
    """Have this process read the wall clock that a file sets."""
    true = time.time

    def stepped() -> float:
        try:
            return true() + float(clock.read_text() or 0)
        except FileNotFoundError:
            return true()

    time.time = stepped


if __name__ == "__main__":
    follow(Path(sys.argv[1]))
    from piebald.cli import main

    raise SystemExit(main(sys.argv[2:]))
