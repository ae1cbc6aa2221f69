"""The container file in deploy/: what it may do, and its commands, which are run without an engine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from piebald.federation.credentials import startup_kit
from tests.deployment_files import DEPLOY, INSTRUCTIONS, LAST, health, parse


def test_the_container_has_no_rights_and_one_volume() -> None:
    assert {name for name, _ in INSTRUCTIONS} <= set(
        [
            "FROM",
            "ARG",
            "COPY",
            "RUN",
            "USER",
            "ENV",
            "WORKDIR",
            "VOLUME",
            "STOPSIGNAL",
            "HEALTHCHECK",
            "ENTRYPOINT",
            "CMD",
        ]
    )
    assert LAST["USER"].split(":")[0].isdecimal()  # Kubernetes can tell that it is not root
    assert int(LAST["USER"].split(":")[0]) > 0
    assert LAST["VOLUME"] == LAST["WORKDIR"] == "/data"
    assert LAST["STOPSIGNAL"] == "SIGTERM"
    assert json.loads(LAST["ENTRYPOINT"]) == health()[:1] == ["piebald"]
    assert parse(health()[1:]) == {"folder": Path("/data"), "check": True, "as_json": False, "wide": False}
    for name, words in INSTRUCTIONS:
        if name == "COPY" and "--from" not in words:
            assert [one for one in words.split()[:-1] if not (DEPLOY.parent / one).exists()] == []


class Container:
    """What the container file makes, in a folder: its commands are run as they are there, with other paths.

    Packages that it would download are seen from this environment instead.
    """

    def __init__(self, folder: Path, context: Path) -> None:
        self.places = {"/opt/piebald": f"{folder}/opt", "/source": f"{folder}/source", "/data": f"{folder}/data"}
        self.folder, self.environment = folder, {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
        (folder / "source").mkdir()
        for name, words in INSTRUCTIONS:
            if name == "COPY" and "--from" not in words:
                *sources, target = words.split()
                for source in sources:
                    to = Path(self.here(target)) / (source if target.endswith("/") else "")
                    copy = shutil.copytree if (context / source).is_dir() else shutil.copy
                    copy(context / source, to)
            elif name == "RUN":
                self.run(["sh", "-c", self.here(words)])
                if " -m venv " in words:
                    self.see_packages()
        self.environment = {"OMP_NUM_THREADS": "1"}
        self.environment |= dict(word.split("=", 1) for word in self.here(LAST["ENV"]).split())

    def here(self, text: str) -> str:
        for there, place in self.places.items():
            text = text.replace(there, place)
        return text.replace("10001:10001", f"{os.getuid()}:{os.getgid()}")

    def see_packages(self) -> None:
        import torch

        (place,) = (self.folder / "opt" / "lib").glob("python*/site-packages")
        (place / "needed.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
        self.environment |= {"PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1"}
        self.environment |= {"TORCH": "https://nowhere.invalid", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

    def command(self, words: Sequence[str], volume: Path) -> list[str]:
        """Run the image with this volume; as root with a read-only root file system and without capabilities."""
        program = shutil.which("piebald", path=self.environment["PATH"])
        assert program is not None
        if not read_only_works():
            return [program, *(word.replace("/data", str(volume)) for word in words)]
        script = 'mount --bind "$0" /mnt && mount -t tmpfs none /var/tmp && mount -o remount,bind,ro / && exec "$@"'
        drop = ["setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
        inside = [program, *(word.replace("/data", "/mnt") for word in words)]
        return ["unshare", "--mount", "sh", "-c", script, str(volume), *drop, *inside]

    def run(self, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            words, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done


def read_only_works() -> bool:
    """Whether this user may make a read-only view of the file system."""
    if shutil.which("unshare") is None or shutil.which("setpriv") is None:
        return False
    script = "mount -t tmpfs none /mnt && mount -o remount,bind,ro / && ! touch /here"
    return subprocess.run(["unshare", "--mount", "sh", "-c", script], capture_output=True, check=False).returncode == 0


@pytest.mark.long
def test_the_commands_of_the_container_in_an_empty_environment(tmp_path: Path) -> None:
    """The sdist holds what the image is made of, and the image starts, is healthy, and stops when it is told to."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(build, cwd=DEPLOY.parent, check=True, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as sdist:
        sdist.extractall(tmp_path / "sdist", filter="data")
    (context,) = (tmp_path / "sdist").iterdir()
    for path in DEPLOY.rglob("*"):
        assert (context / path.relative_to(DEPLOY.parent)).exists(), f"the sdist has no {path}"
    image = Container(tmp_path, context)
    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700
    image.environment["HOME"] = "/var/tmp" if read_only_works() else str(tmp_path)  # /tmp has the test's own files
    said = image.run(image.command(["--version"], tmp_path / "data"))
    assert Path(shutil.which("piebald", path=image.environment["PATH"]) or "").is_relative_to(tmp_path)
    assert said.stdout.startswith("piebald ")
    shutil.copy(DEPLOY / "compose" / "federation.toml", tmp_path / "data")
    made = [*json.loads(LAST["ENTRYPOINT"])[1:], "provision", "/data/federation.toml", "--out", "/data/credentials"]
    image.run(image.command(made, tmp_path / "data"))
    volume = tmp_path / "data" / "credentials" / "server"
    command = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["services"]["server"]["command"]

    def healthy() -> bool:
        check = image.command(health()[1:], volume)
        return subprocess.run(check, env=image.environment, capture_output=True, check=False).returncode == 0

    assert not healthy()
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(image.command(command, volume), env=image.environment, stdout=log, stderr=log)
    try:
        until = time.monotonic() + 300
        while not healthy():
            assert server.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < until, (tmp_path / "log").read_text()
        server.send_signal(signal.Signals[LAST["STOPSIGNAL"]])
        assert server.wait(60) == 130
    finally:
        server.kill()
        server.wait()
    assert "the queue goes on with: piebald server" in (tmp_path / "log").read_text()


@pytest.mark.full
@pytest.mark.parametrize("of", ["deploy", "a startup kit"])
def test_an_engine_builds_and_runs_the_image(of: str, tmp_path: Path) -> None:
    for engine in ("docker", "podman"):
        if shutil.which(engine) and subprocess.run([engine, "info"], capture_output=True, check=False).returncode == 0:
            break
    else:
        pytest.skip("no container engine answers: the commands are run without one instead")
    file, context = DEPLOY / "Containerfile", DEPLOY.parent
    if of != "deploy":  # beside a wheel, as its first lines say
        file, context = Path(startup_kit.__file__).parent / "kit" / "Containerfile", tmp_path
        wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(DEPLOY.parent)]
        subprocess.run(wheel, check=True)
    build = [engine, "build", "-q", "-f", str(file), "-t", "piebald-test", str(context)]
    made = subprocess.run(build, capture_output=True, text=True, check=False, timeout=850)
    if made.returncode and "download" in (made.stderr + made.stdout).lower():
        pytest.skip("the engine cannot download what the image is made of")
    assert made.returncode == 0, made.stderr
    run = [engine, "run", "--rm", "--read-only", "--tmpfs", "/tmp", "--cap-drop=ALL", "--network=none", "piebald-test"]
    assert subprocess.run([*run, "--version"], check=True, capture_output=True, text=True).stdout.startswith("piebald")
