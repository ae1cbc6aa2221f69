"""Flower's SuperLink and SuperNodes on the task of speed.py: python with_flower.py [--sizes tiny] [--crowds 2 4]

Prints one JSON object.  It needs flwr==1.41.0 and torch in its own environment, and starts one SuperLink, one SuperNode
for each site, and one run; without TLS, since that is what its guide for one machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

LONGEST = 1200  # seconds that a run may take
BIN = Path(sys.executable).parent
APP = """
[project]
name = "speed"
version = "1.0.0"
dependencies = []

[tool.flwr.app]
publisher = "piebald"

[tool.flwr.app.components]
serverapp = "flower_app:server_app"
clientapp = "flower_app:client_app"

[tool.flwr.app.config]
hidden = "16"
sites = 1
repeats = 10
seconds = 0.0
out = ""
gate = ""
"""
CONNECTION = """
[superlink]
default = "here"

[superlink.here]
address = "127.0.0.1:{control}"
insecure = true
"""


def main() -> None:
    """Each size with one site, then each crowd with the tiny model."""
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--sizes", nargs="*", default=["tiny", "4 MB", "200 MB"])
    reader.add_argument("--crowds", nargs="*", type=int, default=[2, 4, 8, 16])
    given = reader.parse_args()
    widths, repeats = {"tiny": "16", "4 MB": "970,970", "200 MB": "7000,7000"}, {"tiny": 5, "4 MB": 5, "200 MB": 3}
    found = {"speed": [], "crowd": []}
    for size in given.sizes:
        made = measured(hidden=widths[size], sites=1, repeats=repeats[size], seconds=0.0)
        found["speed"].append({"size": size, **made})
        print(found["speed"][-1], file=sys.stderr, flush=True)
    for sites in given.crowds:
        found["crowd"].append({"sites": sites, **measured(hidden="16", sites=sites, repeats=0, seconds=30.0)})
        print(found["crowd"][-1], file=sys.stderr, flush=True)
    print(json.dumps(found))


def measured(
    hidden: str,
    sites: int,
    repeats: int,
    seconds: float,
    through: Callable[[int], int] | None = None,
    warm: Callable[[], None] | None = None,
) -> dict[str, float]:
    """What one run over a federation of its own came to.

    Args:
        hidden: widths of the model's hidden layers.
        sites: how many there are.
        repeats: messages that are timed after the first.
        seconds: how long a crowd is counted, 0 for single messages.
        through: the port that SuperNodes connect to, for that of the SuperLink.
        warm: called after the first message.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        ports = free_ports(1 + sites)
        (folder / "home").mkdir()
        (folder / "home" / "config.toml").write_text(CONNECTION.format(control=ports[0]))
        app = folder / "app"
        app.mkdir()
        (app / "pyproject.toml").write_text(APP)
        (app / "flower_app.py").write_text((Path(__file__).parent / "flower_app.py").read_text())
        here = {**os.environ, "FLWR_HOME": str(folder / "home"), "FLWR_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1"}
        here["PATH"] = f"{BIN}{os.pathsep}{here['PATH']}"
        running = [superlink(folder, here, ports)]
        entrance = ports[0] if through is None else through(ports[0])
        running += [supernode(folder, here, entrance, ports[1 + site], site) for site in range(sites)]
        try:
            time.sleep(5)
            out, gate = folder / "out.json", folder / "gate"
            config = f'hidden="{hidden}" sites={sites} repeats={repeats} seconds={seconds} out="{out}"'
            config += "" if warm is None else f' gate="{gate}"'
            command = [BIN / "flwr", "run", app, "here", "--stream", "--run-config", config]
            running.append(begin(command, folder / "run.log", here))
            until = time.monotonic() + LONGEST
            while not out.exists() and running[-1].poll() is None and time.monotonic() < until:
                if warm is not None and gate.exists():
                    warm()
                    gate.unlink()
                    until = time.monotonic() + LONGEST
                time.sleep(0.5)
            if not out.exists():
                raise SystemExit("\n".join(file.read_text()[-3000:] for file in folder.glob("*.log")))
            return json.loads(out.read_text())
        finally:
            for process in running:
                with suppress(ProcessLookupError):  # it has ended with its group
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def superlink(folder: Path, here: dict[str, str], ports: list[int]) -> subprocess.Popen[bytes]:
    """The server's side."""
    words = ["--insecure", "--disable-runtime-dependency-installation", "--host", "127.0.0.1", "--port", ports[0]]
    return begin([BIN / "flower-superlink", *words], folder / "superlink.log", here)


def supernode(folder: Path, here: dict[str, str], entrance: int, port: int, site: int) -> subprocess.Popen[bytes]:
    """A site."""
    words = ["--insecure", "--superlink", f"127.0.0.1:{entrance}", "--node-config", f"partition-id={site}"]
    place = ["--host", "127.0.0.1", "--port", port]
    return begin([BIN / "flower-supernode", *words, *place], folder / f"supernode-{site}.log", here)


def begin(command: list[object], log: Path, here: dict[str, str]) -> subprocess.Popen[bytes]:
    """A process in a group of its own, with the processes that it starts."""
    with log.open("wb") as output:
        words = [str(word) for word in command]
        return subprocess.Popen(words, stdout=output, stderr=output, env=here, start_new_session=True)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


if __name__ == "__main__":
    main()
