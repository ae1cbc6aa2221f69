"""What is measured on a link: a step of a federation, bare TLS, a secure sum, a transfer of two parties."""

from __future__ import annotations

import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bad_link import BadLink, Conditions
from links import WIDTHS, Link, Watched, parameters
from threads import Site, Tasks, provisioned

import piebald
from piebald.experiments.file import ExperimentSettings
from piebald.federation.credentials import provisioning
from piebald.federation.link.tls import context
from piebald.report.callbacks import Callback


def seconds(folder: Path, listening: socket.socket, port: int, size: int) -> float:
    """Seconds to send so many bytes down and up again, one after the other, with a byte of confirmation each.

    The handshake is over before.

    Args:
        folder: credentials of a federation.
        listening: the socket to which the link leads.
        port: the link's.
        size: bytes in each direction.
    """
    server = threading.Thread(target=_serve, args=(folder, listening, size), daemon=True)
    server.start()
    made = context(folder / "site-1", False)
    with made.wrap_socket(socket.create_connection(("127.0.0.1", port))) as secured:
        secured.sendall(b"x")
        began = time.monotonic()
        _take(secured, size)
        secured.sendall(bytes(size))
        _take(secured, 1)
        spent = time.monotonic() - began
    server.join()
    return spent


def _serve(folder: Path, listening: socket.socket, size: int) -> None:
    plain, _ = listening.accept()
    with context(folder / "server", True).wrap_socket(plain, server_side=True) as secured:
        _take(secured, 1)
        secured.sendall(bytes(size))
        _take(secured, size)
        secured.sendall(b"x")
        secured.settimeout(5)
        try:
            secured.recv(1)
        except OSError:
            return


def _take(secured: ssl.SSLSocket, size: int) -> None:
    while size > 0:
        found = len(secured.recv(min(size, 1 << 16)))
        if not found:
            raise OSError("the connection ended")
        size -= found


MASKED_SITES = 3


def settings(size: str, clients: int, **recipe: Any) -> ExperimentSettings:
    """One step of SGD on ten rows, which takes little but the network."""
    table = {
        "rounds": 2,
        "data": {"name": "digits"},
        "model": {"name": "mlp", "hidden": WIDTHS[size]},
        "partition": {"kind": "iid", "clients": clients, "limit": 100},
        "recipe": {"name": "fedavg", "lr": 0.01, "batch": 10, "batches": "exact", "steps": 1, **recipe},
        "evaluate": {"every": 0},
        "runtime": {"kind": "federation", "task_timeout": 7200.0, "patience": 1200.0, "silence": 60.0},
    }
    return ExperimentSettings.of_table(table, "the benchmark's settings")


def step(link: Link, size: str) -> dict[str, Any]:
    """A step with one site: the model goes down, ten rows are trained on, the update comes up."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        provisioned(folder, 1)
        bad = BadLink(("127.0.0.1", provisioning.read(folder / "server").port))
        parties = Tasks(settings(size, 1), folder, [bad.port])
        try:
            parties.step()  # the site has joined, and libraries are loaded
            watched = Watched(link, bad)
            results = parties.step()
            found = watched.found()
        finally:
            bad.conditions = Conditions()
            parties.close()
            bad.close()
        lost = sum(one.update is None for one in results)
        return found | {"nbytes": 4 * parties.ready.work.layout.size, "lost": lost}


def bare(link: Link, size: str) -> dict[str, Any]:
    """As many bytes over bare TLS, down and up again."""
    nbytes = 4 * parameters(size)
    with tempfile.TemporaryDirectory() as place, socket.create_server(("127.0.0.1", 0)) as listening:
        provisioned(Path(place), 1)
        bad = BadLink(("127.0.0.1", listening.getsockname()[1]), link.conditions)
        try:
            return {"seconds": seconds(Path(place), listening, bad.port, nbytes), "nbytes": nbytes}
        finally:
            bad.close()


class _SecondStep(Callback):
    """Measures from the end of the first step to that of the second."""

    def __init__(self, begin: Callable[[], Watched]) -> None:
        self._begin, self._watched = begin, None
        self.found: dict[str, Any] = {}

    def on_server_step(self, step: Mapping[str, Any]) -> None:
        """See `Callback`."""
        if self._watched is None:
            self._watched = self._begin()
        else:
            self.found = self._watched.found() | {"lost": step["failed"]}


def masked(link: Link, size: str) -> dict[str, Any]:
    """A step of three sites whose masked updates are summed; key agreements and shares cross the same link."""
    made = settings(size, MASKED_SITES, transforms=[{"kind": "secure_aggregation", "bits": 64}])
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        names = provisioned(folder, MASKED_SITES)
        bad = BadLink(("127.0.0.1", provisioning.read(folder / "server").port))
        second = _SecondStep(lambda: Watched(link, bad))
        sites = [Site(folder / name, bad.port) for name in names]
        try:
            _run(made, folder, [second], lambda: setattr(bad, "conditions", Conditions()))
        finally:
            bad.conditions = Conditions()
            for site in sites:
                site.client.stop()
            for site in sites:
                site.stop()
            bad.close()
    return second.found | {"nbytes": 4 * parameters(size)}


def _run(made: ExperimentSettings, folder: Path, callbacks: Sequence[Callback], over: Callable[[], None]) -> None:
    runtime = made.table()["runtime"] | {"credentials": str(folder / "server")}
    made = ExperimentSettings.of_table(made.table() | {"runtime": runtime}, "the benchmark's settings")
    plan = made.plan()

    class Over(Callback):
        def on_end(self, history: Any, status: str) -> None:
            over()

    piebald.run(
        next(iter(plan.recipes.values())), plan.clients, plan.model, rounds=made.rounds, runtime=plan.runtime,
        evaluate_every=0, settings=made.table(), callbacks=[*callbacks, Over()],
    )  # fmt: skip


PARTIES = {
    "steps": 5, "batch": 100, "overlap_batch": 50, "data": {"name": "breast_cancer", "overlap": 100},
    "network": {"hidden": [32], "aligned": [16]}, "backend": "fixed",
}  # fmt: skip


def parties(link: Link, size: str) -> dict[str, Any]:
    """A transfer of two parties; a step of five."""
    import torch
    import torch._dynamo  # optimizers import it when first used, which two threads must not do at once

    from piebald.vertical.channel import SocketChannel
    from piebald.vertical.party import Party
    from piebald.vertical.party_data import load
    from piebald.vertical.party_secret import PartySecret
    from piebald.vertical.protocol import ROLES, PartySession
    from piebald.vertical.transfer_settings import TransferSettings

    made = TransferSettings(**PARTIES)
    held = load(made.data, made.seed)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        bad = BadLink(listening.getsockname(), link.conditions)
        connecting = socket.create_connection(("127.0.0.1", bad.port))
        accepted, _ = listening.accept()
    errors = list[str]()

    def act(role: Any, channel: SocketChannel) -> None:
        torch.set_num_threads(1)  # the setting is per thread
        party = Party(role, held[role], made, PartySecret.simulated(made.seed, role))
        session = PartySession(channel, role, timeout=600)
        try:
            with session.closing():
                session.handshake(made.agreed())
                list(party.train(session))
        except Exception as error:
            errors.append(str(error))

    ends = (SocketChannel(connecting), SocketChannel(accepted))
    threads = [threading.Thread(target=act, args=given) for given in zip(ROLES, ends, strict=True)]
    watched = Watched(link, bad)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = watched.found()
    bad.close()
    return found | {"seconds": found["seconds"] / made.steps, "lost": 0, "error": errors[0] if errors else None}
