"""Many sites in one process: python sites.py CLOCK CREDENTIALS ROWS PORT NAME [NAME ...]; lines on standard input
command them, and the file CLOCK sets their wall clock (`stepped.py`).

A site is what it is in a process of its own: a `FederationClient` with its credentials, files, rows, and connection.
What makes it light is that it shares the process with others, Python and PyTorch with them, and that it has twenty
rows, which all of them read from one file.

Commands: "stop NAME" (as SIGTERM does), "start NAME".
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "networks"))

import torch
from stepped import follow
from threads import Site


def main() -> None:
    """Run the sites until standard input ends."""
    logging.getLogger("piebald").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    follow(Path(sys.argv[1]))
    folder, rows, port, names = Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5:]
    sites = {name: Site(folder / name, port, rows) for name in names}
    print("started", flush=True)
    for line in sys.stdin:
        command, name = line.split()
        if command == "stop" and name in sites:
            sites.pop(name).stop()
        elif command == "start" and name not in sites:
            sites[name] = Site(folder / name, port, rows)


if __name__ == "__main__":
    main()
