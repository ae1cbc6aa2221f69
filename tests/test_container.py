"""The container file in deploy/: what it may do, and its commands, which are run without an engine."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from piebald.federation.hub.local_federation import free_port
from piebald.storage.store import RunStore
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
    asked = parse(health()[1:])
    assert asked.items() >= {"folder": Path("/data"), "check": True}.items()
    assert asked["status_port"] is None  # it looks, and serves no page
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
                self.run(["sh", "-c", self.here(re.sub(r"^(--\S+ )*", "", words))])
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
        given = dict(words.split("=", 1) for name, words in INSTRUCTIONS if name == "ARG")
        self.environment |= {**given, "TORCH": "https://nowhere.invalid", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

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


BUILD = "PIEBALD_IMAGE_BUILD"  # options of an engine's build, such as --build-arg BASE=IMAGE where no registry answers


class Engine:
    """Podman, Docker or Buildah, whichever answers first.

    Args:
        folder: where what a container prints is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.running = folder, dict[str, subprocess.Popen[bytes]]()
        self.containers: list[str] = []  # of Buildah, which keeps them
        self.options = shlex.split(os.environ.get(BUILD, ""))
        found = (name for name in ("podman", "docker", "buildah") if shutil.which(name))
        self.program = next((name for name in found if not self._call(name, "info").returncode), "")
        if not self.program and self.options:
            pytest.fail(f"{BUILD} is set, and neither podman, docker nor buildah answers")
        if not self.program:
            pytest.skip("neither podman, docker nor buildah answers: the images were not built")

    @staticmethod
    def _call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, capture_output=True, text=True, check=False, timeout=1700)

    def build(self, image: str, file: Path, context: Path) -> None:
        """Build an image; skip where no registry answers and no other base was named."""
        form = [] if self.program == "docker" else ["--format", "docker"]  # OCI's has no health check
        words = [*form, *self.options, "-f", str(file), "-t", image, str(context)]
        done = self._call(self.program, "bud" if self.program == "buildah" else "build", *words)
        told = done.stderr + done.stdout
        base = next(words.partition("=")[2] for name, words in INSTRUCTIONS if name == "ARG")
        if done.returncode and not self.options and base.partition("/")[0] in told:
            pytest.skip(f"{self.program} cannot get {base}: name another base by {BUILD}='--build-arg BASE=IMAGE'")
        assert done.returncode == 0, told

    def start(self, name: str, image: str, volume: Path, *words: str) -> None:
        """Run a command of piebald in a container without rights, as the owner of its volume."""
        owner = f"--user={volume.stat().st_uid}:{volume.stat().st_gid}"
        shared = ["run", "--cap-drop=ALL", owner, "-v", f"{volume}:/data"]
        if self.program == "buildah":  # which knows no entry point, and shares the network of this machine
            container = self._call("buildah", "from", "--pull-never", image).stdout.strip()
            self._call("buildah", "config", "--volume=/data-", container)  # it would hide the one that is given
            self.containers.append(container)
            command = ["buildah", *shared, "--isolation=chroot", container, "--", "piebald", *words]
        else:
            command = [self.program, *shared, "--rm", "--read-only", "--tmpfs=/tmp", "--network=host", image, *words]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def wait(self, name: str) -> str:
        """Wait until a container has ended well, and return what it has printed."""
        process = self.running[name]
        until = time.monotonic() + 300
        while process.poll() is None and time.monotonic() < until:
            if failed := [other for other, run in self.running.items() if run.poll() not in (None, 0)]:
                pytest.fail(f"{failed}: {(self.folder / f'{failed[0]}.log').read_text()}")
            with suppress(subprocess.TimeoutExpired):
                process.wait(1)
        said = (self.folder / f"{name}.log").read_text()
        assert process.poll() == 0, said
        return said

    def close(self) -> None:
        for process in self.running.values():
            process.terminate()
            process.wait(60)
        if self.containers:
            self._call("buildah", "rm", *self.containers)


@pytest.mark.long
@pytest.mark.timeout(3600)  # both images download what they hold
def test_a_server_and_two_sites_train_in_containers_of_the_images_as_they_are(tmp_path: Path) -> None:
    """Both container files are built by an engine; the sites run that of their kits beside the wheel, as it says."""
    engine = Engine(tmp_path)
    engine.build("piebald-test", DEPLOY / "Containerfile", DEPLOY.parent)
    port = free_port()
    folder = tmp_path / "federation"
    folder.mkdir()
    parties = f'name = "trial"\nhost = "localhost"\nport = {port}\ndays = 2\nsites = ["north", "south"]\n'
    (folder / "federation.toml").write_text(parties)
    experiment = (DEPLOY / "compose" / "experiment.toml").read_text()
    (folder / "experiment.toml").write_text(experiment.replace("clients = 3", "clients = 2").replace("= 20", "= 3"))
    if os.getuid() == 0:
        os.chown(folder, 10001, 10001)
    try:
        engine.start("provision", "piebald-test", folder, "provision", "/data/federation.toml", "--out", "/data/made")
        engine.wait("provision")
        for name in ("north", "south"):
            with tarfile.open(folder / "made" / "kits" / f"{name}.tar.gz") as kit:
                kit.extractall(tmp_path, filter="data")
            if os.getuid() == 0:
                for path in (tmp_path / name, *(tmp_path / name).iterdir()):
                    os.chown(path, 10001, 10001)
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "north")]
        subprocess.run(build, cwd=DEPLOY.parent, check=True, capture_output=True)
        engine.build("piebald-test-site", tmp_path / "north" / "Containerfile", tmp_path / "north")
        server = ["server", "/data/made/server", "/data/experiment.toml", "--out", "/data/run"]
        engine.start("server", "piebald-test", folder, *server)
        for name in ("north", "south"):
            engine.start(name, "piebald-test-site", tmp_path / name, "client", "/data")
        assert "finished" in engine.wait("server")
        for name in ("north", "south"):
            assert "the run is over" in engine.wait(name)
            assert (tmp_path / name / "model.safetensors").stat().st_size > 1000
        with RunStore.open_read_only(folder / "run") as store:
            assert (store.meta["status"], store.version) == ("finished", 3)
    finally:
        engine.close()
