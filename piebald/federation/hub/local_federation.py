"""A federation on one machine, to try it: with real credentials, processes and connections."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from piebald.contracts.component import Component
from piebald.core.errors import RuntimeFault
from piebald.core.files import read_bytes, read_text
from piebald.core.private_files import make_private, write_private
from piebald.core.references import files
from piebald.federation.credentials.provisioning import SITE_TOML, Description, provision, read
from piebald.federation.link.messaging import SERVER
from piebald.privacy.ledger import Withheld

log = logging.getLogger("piebald.federation")

_SPLITS = "splits = ['train', 'validation', 'test']\n"
_BUDGET = "budget = { epsilon = 50, delta = 1e-6 }\n"  # nobody is hidden from whoever has all rows
_PORTS = range(20_000, 32_000)
_tried = itertools.count()


class LocalFederation:
    """The sites of a federation on this machine.

    Attributes:
        processes: their processes, once `open` has started them.
    """

    def __init__(self, folder: Path, sites: list[str], temporary: bool) -> None:
        self._folder, self._sites, self._temporary = folder, sites, temporary
        self.processes: list[subprocess.Popen[bytes]] = []

    @classmethod
    def start(cls, sites: int, folder: str | None) -> LocalFederation:
        """Create credentials, or take existing ones.  The processes start with `open`."""
        root = Path(tempfile.mkdtemp(prefix="piebald-")) if folder is None else Path(folder)
        names = [f"site-{number + 1}" for number in range(sites)]
        port = read(root / SERVER).port if (root / SERVER).exists() else free_port()
        provision(Description(name="local", host="127.0.0.1", port=port, days=365, sites=names), root)
        for name in names:  # all rows are on this machine, so scores are shown beside noise and sums, too
            settings = root / name / "site.toml"
            # only what nobody has touched: a folder that is used again may have settings of its user
            if read_text(settings) == SITE_TOML:
                kinds = Component.registry["query"]
                queries, modules = sorted(kinds), {kind.__module__ for kind in kinds.values()}
                plugins = sorted(module for module in modules if not module.startswith("piebald."))
                counts = ", ".join(f'{kind} = "any"' for kind in queries)
                limits = f"questions = {{ {counts} }}\n{_SPLITS}{_BUDGET}accept_split = true\naccept_cleaning = true\n"
                # they share this machine with whoever says what a run needs
                machine = "jobs = { gpus = 1024, gigabytes = 1e6 }\n"
                allowed = f"queries = {queries}\nplugins = {plugins}\n{machine}"
                write_private(settings, f"{SITE_TOML}\n[policy]\n{allowed}{limits}")
        return cls(root, names, folder is None)

    @property
    def server(self) -> Path:
        """The server's credentials."""
        return self._folder / SERVER

    def open(self) -> None:
        """Start a process for each site.  They end with this process, however it ends."""
        # sites share this machine's cores, and each would begin a thread for every one of them
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        command = [sys.executable, "-P", "-m", "piebald.cli", "site", "up"]
        plugins = [word for file in files() for word in ("--plugin-file", str(file))]
        for name in self._sites:
            credentials = self._folder / name
            make_private(log_file := credentials / "log.txt")
            with log_file.open("ab") as output:
                # a session of its own: Ctrl-C reaches this process alone, which then ends the sites in order
                process = subprocess.Popen(
                    [*command, str(credentials), "--with-parent", str(os.getpid()), *plugins],
                    stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True,
                )  # fmt: skip
            self.processes.append(process)

    def check(self) -> None:
        """Raise a `RuntimeFault` where the process of a site has failed."""
        for name, process in zip(self._sites, self.processes, strict=True):
            if process.poll() not in (None, 0):
                lines = (
                    read_bytes(self._folder / name / "log.txt", most=None).decode(errors="replace").strip().splitlines()
                )
                raise RuntimeFault(f"{name} ended before the run began: {lines[-1] if lines else process.returncode}")

    def wait(self, most: float | None = None) -> None:
        """Wait until the sites, which know that the run has ended, have ended as well; Ctrl-C ends the waiting.

        Args:
            most: seconds, None for no limit.
        """
        until = None if most is None else time.monotonic() + most
        try:
            for process in self.processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(None if until is None else max(until - time.monotonic(), 0.0))
        except KeyboardInterrupt:
            log.warning(
                "sites had not finished choosing their models: piebald client FOLDER with the credentials of a site "
                "in %s goes on with it", self._folder,
            )  # fmt: skip

    def close(self) -> None:
        """End the sites."""
        # all are told before any is waited for, so that they end side by side
        until = time.monotonic() + 5
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                # the last ones get a moment as well, where the first have used up the time
                process.wait(max(until - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        # the sites are this user's own, who may read which column they told nothing about
        for name in self._sites:
            with contextlib.suppress(OSError):
                lines = read_bytes(self._folder / name / "log.txt", most=None).decode(errors="replace").splitlines()
                kept = (line.partition(Withheld.sentence) for line in lines)
                for column in dict.fromkeys(after for _, sentence, after in kept if sentence and after):
                    log.warning("the log of %s: %s%s", name, Withheld.sentence, column)
        if self._temporary:
            shutil.rmtree(self._folder, ignore_errors=True)


def free_port() -> int:
    """A port of this machine that nothing listens on.

    It lies below those that systems give to outgoing connections, and processes begin their search at different places:
    so it is still free when it is used a moment later.
    """
    for _ in _PORTS:
        # a prime, so that processes with neighbouring ids begin far from each other
        port = _PORTS[(os.getpid() * 97 + next(_tried)) % len(_PORTS)]
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise RuntimeFault("no port of this machine is free")
