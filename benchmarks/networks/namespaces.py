"""The quickstart between network namespaces, with delay and loss: python benchmarks/networks/namespaces.py

A server and three sites, each in a namespace of its own with an address of its own, and a link that delays and loses
packets: by `tc netem` where this kernel has it, else by the switch in this program, which passes packets from one TUN
device to the other.  TCP, its retransmissions and its reaction to loss are the kernel's either way.  Needs the right to
make namespaces: run it as root, or by `unshare --user --map-root-user --net --mount`.  Writes namespaces.json.

--delay 0 50 50   milliseconds each way, of the cases; --loss 0 1 5   per cent of the packets, of the same
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

import piebald
from piebald.core.references import USERS
from piebald.experiments.file import ExperimentSettings
from piebald.federation.credentials import provisioning
from piebald.report.tables import History

HERE = Path(__file__).parent
NAMES = ["server", "site-1", "site-2", "site-3"]
ROUNDS, PORT = 20, 8477
_NETWORK_NAMESPACE, _TUNSETIFF, _TUN, _NO_INFORMATION = 0x40000000, 0x400454CA, 0x0001, 0x1000
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def ran(*words: str) -> str:
    """What a command prints; the program ends where the system refuses it."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)} is refused here ({done.stderr.strip()}): run this where namespaces can be made")
    return done.stdout


class Links:
    """Namespaces, and a switch between their devices.

    Args:
        delay: seconds each way.
        loss: share of the packets.
    """

    def __init__(self, delay: float, loss: float) -> None:
        self.names = {name: f"piebald-{os.getpid()}-{name}" for name in NAMES}
        self.addresses = {name: f"10.231.8.{number}" for number, name in enumerate(NAMES, 1)}
        self.passed = self.lost = 0
        self._devices, self._over = dict[bytes, int](), threading.Event()
        self._thread = threading.Thread(target=self._switch, daemon=True)
        try:
            for name in NAMES:
                ran("ip", "netns", "add", self.names[name])
                self._devices[bytes(map(int, self.addresses[name].split(".")))] = self._device(self.names[name])
                ran("ip", "-n", self.names[name], "address", "add", f"{self.addresses[name]}/24", "dev", "link0")
                ran("ip", "-n", self.names[name], "link", "set", "link0", "up")
            self.by = "netem" if (delay or loss) and self._netem(delay, loss) else "the program's switch"
        except BaseException:  # what is made before the system refuses something would stay for ever
            self.close()
            raise
        self._delay, self._loss = (0.0, 0.0) if self.by == "netem" else (delay, loss)
        self._random = random.Random(0)
        self._thread.start()

    def _netem(self, delay: float, loss: float) -> bool:
        """Whether the kernel delays and loses what each device sends."""
        made = [
            subprocess.run(
                ["tc", "-n", name, "qdisc", "add", "dev", "link0", "root", "netem", "delay", f"{1000 * delay:g}ms",
                 "loss", f"{100 * loss:g}%"], capture_output=True,
            ).returncode == 0
            for name in self.names.values()
        ]  # fmt: skip
        return all(made)

    @staticmethod
    def _device(namespace: str) -> int:
        """A TUN device in a namespace, as a file through which its packets go in and out."""
        files = list[int]()

        def make() -> None:
            inside = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
            refused = ctypes.CDLL(None, use_errno=True).setns(inside, _NETWORK_NAMESPACE)
            os.close(inside)
            if refused:
                return
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"link0", _TUN | _NO_INFORMATION))
            files.append(device)

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        if not files:
            sys.exit("no TUN device can be made in a namespace here: run this where it can be")
        return files[0]

    def _switch(self) -> None:
        """Pass packets on, each after the delay, in the order in which they came."""
        waiting, number = list[tuple[float, int, int, bytes]](), 0
        while not self._over.is_set():
            wait = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.5
            for device in select.select([*self._devices.values()], [], [], wait)[0]:
                packet = os.read(device, 1 << 16)
                target = self._devices.get(packet[16:20]) if packet[0] >> 4 == 4 else None
                if target is None:
                    continue
                if self._random.random() < self._loss:
                    self.lost += 1
                    continue
                number, self.passed = number + 1, self.passed + 1
                heapq.heappush(waiting, (time.monotonic() + self._delay, number, target, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, target, packet = heapq.heappop(waiting)
                try:
                    os.write(target, packet)
                except OSError:  # its queue is full: a packet that is lost, as on any link
                    self.lost += 1

    def spawn(self, name: str, log: Path, *words: str) -> subprocess.Popen[bytes]:
        """A process of the command line in a namespace."""
        command = ["ip", "netns", "exec", self.names[name], sys.executable, "-m", "piebald.cli", *words]
        with log.open("ab") as file:
            return subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=ENVIRONMENT)

    def repeated(self) -> int:
        """Segments that TCP has sent again, in all namespaces."""
        total = 0
        for name in self.names.values():
            tcp = [line.split() for line in ran("ip", "netns", "exec", name, "cat", "/proc/net/snmp").splitlines()]
            names, values = (line for line in tcp if line[0] == "Tcp:")
            total += int(values[names.index("RetransSegs")])
        return total

    def close(self) -> None:
        """End the switch, and delete the namespaces, also where some were not made."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        while self._devices:
            os.close(self._devices.popitem()[1])
        for name in self.names.values():
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def experiment(runtime: dict[str, Any]) -> ExperimentSettings:
    """The quickstart's."""
    table = {
        "rounds": ROUNDS, "seed": 1, "data": {"name": "digits"}, "model": {"name": "mlp", "hidden": [512, 512]},
        "recipe": {"name": "hdafl", "lr": 0.05, "epochs": 1}, "evaluate": {"every": 10},
        "partition": {"kind": "dirichlet", "clients": 3, "alpha": 0.5, "limit": 300}, "runtime": runtime,
    }  # fmt: skip
    return ExperimentSettings.of_table(table, "the benchmark", USERS)


def measured(delay: float, loss: float) -> dict[str, Any]:
    """Train over such links, and compare with a simulated run."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, links, processes = Path(temporary), Links(delay, loss), list[subprocess.Popen[bytes]]()
        try:
            about = {"host": links.addresses["server"], "port": PORT, "days": 2, "sites": NAMES[1:]}
            provisioning.provision(provisioning.Description(name="quickstart", **about), folder)  # type: ignore[arg-type]
            (folder / "experiment.toml").write_text(experiment({"kind": "federation", "wait_for": 3}).text())
            for name in NAMES[1:]:
                processes.append(links.spawn(name, folder / f"{name}.log", "client", str(folder / name)))
            words = [str(folder / "server"), str(folder / "experiment.toml"), "--out", str(folder / "run")]
            server = links.spawn("server", folder / "server.log", "server", *words)
            processes.append(server)
            if server.wait(900) != 0:
                sys.exit(f"the server failed: {(folder / 'server.log').read_text()[-2000:]}")
            run, plan = piebald.open(folder / "run"), experiment({"kind": "simulator", "engine": "sequential"}).plan()
            calm = piebald.run(
                next(iter(plan.recipes.values())), plan.clients, plan.model, rounds=ROUNDS, seed=1,
                runtime={"kind": "simulator", "engine": "sequential", "workers": 0}, evaluate_every=10,
            )  # fmt: skip
            steps = History(folder / "run").rounds
            seconds = steps[-1]["wall"] - steps[0]["wall"]
            return {
                "delay_ms": round(1000 * delay), "loss": loss, "by": links.by, "steps": ROUNDS,
                "seconds a step": round(seconds / (ROUNDS - 1), 3), "packets": links.passed, "lost": links.lost,
                "sent again": links.repeated(),
                "updates": sum(row["kind"] == "train" and row["status"] == "ok" for row in run.results),
                "same model": bool(torch.equal(run.cluster_models[0], calm.cluster_models[0])),
            }  # fmt: skip
        finally:
            for process in processes:
                process.send_signal(signal.SIGTERM)
            for process in processes:
                process.wait(60)
            links.close()


def main() -> None:
    """Measure the cases."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--delay", type=float, nargs="+", default=[0, 50, 50])
    words.add_argument("--loss", type=float, nargs="+", default=[0, 1, 5])
    words.add_argument("--out", type=Path, default=HERE / "namespaces.json")
    given = words.parse_args()
    if shutil.which("ip") is None:
        sys.exit("ip is missing: install iproute2")
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that the namespaces are deleted
    rows = []
    for delay, loss in zip(given.delay, given.loss, strict=True):
        rows.append(measured(delay / 1000, loss / 100))
        print(json.dumps(rows[-1]), flush=True)
        given.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
