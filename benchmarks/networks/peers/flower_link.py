"""Flower's SuperLink and a SuperNode on a link: the programs of benchmarks/federation/peers, over the bad network.

Without TLS and with Flower's defaults.  A SuperNode polls for messages and starts a process for each of them, which
imports torch, before anything is trained.  The first message is sent before the link is made bad.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "federation" / "peers")]

from bad_link import BadLink, Conditions
from links import WIDTHS, links
from links import Watched
from with_flower import measured as with_programs


def measured(link: str, size: str, interpreter: Path | None) -> dict[str, Any]:
    """Measure in the environment of Flower."""
    command = [str(interpreter), str(Path(__file__)), link, size]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:200]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """One message with a model and its answer."""
    link, size = links()[sys.argv[1]], sys.argv[2]
    made, watched = list[BadLink](), list[Watched]()

    def through(port: int) -> int:
        made.append(BadLink(("127.0.0.1", port)))
        return made[0].port

    def warm() -> None:
        watched.append(Watched(link, made[0]))

    try:
        hidden = ",".join(map(str, WIDTHS[size]))
        found = with_programs(hidden=hidden, sites=1, repeats=1, seconds=0.0, through=through, warm=warm)
        print(json.dumps(watched[0].found() | {"seconds": found["median"], "lost": 0}))
    finally:
        for one in made:
            one.conditions = Conditions()
            one.close()


if __name__ == "__main__":
    main()
