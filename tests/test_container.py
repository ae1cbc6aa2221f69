"""The container file in deploy/: what it may do, and its commands, which are run without an engine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
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


def sources(of: str, folder: Path) -> tuple[Path, Path]:
    """A container file and what it is built from: that of a startup kit lies beside a wheel, as its first lines say."""
    if of == "deploy":
        return DEPLOY / "Containerfile", DEPLOY.parent
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=DEPLOY.parent, check=True, capture_output=True)
    return Path(startup_kit.__file__).parent / "kit" / "Containerfile", folder


@pytest.mark.full
@pytest.mark.parametrize("of", ["deploy", "a startup kit"])
def test_an_engine_builds_and_runs_the_image(of: str, tmp_path: Path) -> None:
    for engine in ("docker", "podman"):
        if shutil.which(engine) and subprocess.run([engine, "info"], capture_output=True, check=False).returncode == 0:
            break
    else:
        pytest.skip("no container engine answers: buildah or the commands without an engine are tried instead")
    file, context = sources(of, tmp_path)
    build = [engine, "build", "-q", "-f", str(file), "-t", "piebald-test", str(context)]
    made = subprocess.run(build, capture_output=True, text=True, check=False, timeout=850)
    if made.returncode and any(word in (made.stderr + made.stdout).lower() for word in ("download", "registry")):
        pytest.skip("the engine cannot download what the image is made of")
    assert made.returncode == 0, made.stderr
    run = [engine, "run", "--rm", "--read-only", "--tmpfs", "/tmp", "--cap-drop=ALL", "--network=none", "piebald-test"]
    assert subprocess.run([*run, "--version"], check=True, capture_output=True, text=True).stdout.startswith("piebald")


class Buildah:
    """Buildah with a storage of its own, in which this Python stands for the image that others are made from.

    Packages that would be downloaded are seen from this environment instead.
    """

    def __init__(self, folder: Path) -> None:
        self._storage = ["--root", str(folder / "storage"), "--runroot", str(folder / "run"), "--storage-driver", "vfs"]
        base = self("from", "scratch")
        self("add", "-q", base, str(self._root(folder / "root")), "/")
        here = {"PYTHONPATH": "/needed", "LD_LIBRARY_PATH": "/usr/local/lib", "PATH": "/usr/local/bin:/usr/bin:/bin"}
        here |= {"PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1", "PIP_IGNORE_INSTALLED": "1"}
        self("config", *(f"--env={name}={value}" for name, value in here.items()), base)
        self("commit", "-q", base, dict(INSTRUCTIONS)["FROM"].split()[0])
        self._needed = ["-v", f"{sysconfig.get_path('purelib')}:/needed:ro"]

    def __call__(self, command: str, *words: str) -> str:
        done = subprocess.run(
            ["buildah", *self._storage, command, *words],
            env={**os.environ, "BUILDAH_ISOLATION": "chroot"}, capture_output=True, text=True, timeout=850, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def build(self, file: Path, context: Path) -> str:
        """Build an image, and return the name of a container of it."""
        self("bud", "-q", "--pull-never", *self._needed, "-f", str(file), "-t", "piebald-test", str(context))
        return self("from", "--pull-never", "piebald-test")

    def run(self, container: str, *words: str) -> str:
        return self("run", *self._needed, container, "--", *words)

    @staticmethod
    def _root(folder: Path) -> Path:
        """This Python in /usr/local, a shell, and the libraries that both need."""
        (folder / "tmp").mkdir(parents=True)
        (folder / "tmp").chmod(0o1777)
        (folder / "bin").symlink_to("usr/bin")
        prefix, local = Path(sys.base_prefix), folder / "usr/local"
        unused = shutil.ignore_patterns("test", "idlelib", "__pycache__", "site-packages", "*.a")
        shutil.copytree(prefix / "lib", local / "lib", symlinks=True, ignore=unused)
        for path in prefix.glob("lib/python3*/site-packages/pip*"):
            shutil.copytree(path, local / path.relative_to(prefix))
        (local / "bin").mkdir()
        for path in prefix.glob("bin/python*"):
            shutil.copy(path, local / "bin", follow_symlinks=False)
        (local / "bin/pip").write_text('#!/bin/sh\nexec python3 -m pip "$@"\n')
        (local / "bin/pip").chmod(0o755)
        programs = [shutil.which(name) or name for name in ("sh", "mkdir", "chown")]
        needing = [*programs, sys.executable, *Path(sys.base_prefix).glob("lib/python3*/lib-dynload/*.so")]
        needing.append(next(Path(sysconfig.get_path("purelib")).glob("torch/_C*.so")))
        said = subprocess.run(["ldd", *map(str, needing)], capture_output=True, text=True, check=False).stdout
        needed = {word for line in said.splitlines() for word in line.split() if word.startswith("/") and ".so" in word}
        for path in {*programs, *(word for word in needed if word.rstrip(":") == word)}:
            if not Path(path).is_relative_to(sys.base_prefix) and not Path(path).is_relative_to(sys.prefix):
                to = folder / path.removeprefix("/")
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, to)
        return folder


@pytest.mark.long
@pytest.mark.parametrize("of", ["deploy", "a startup kit"])
def test_buildah_builds_and_runs_the_image(of: str, tmp_path: Path) -> None:
    if shutil.which("buildah") is None or os.getuid() != 0:
        pytest.skip("needs buildah, as root")
    buildah = Buildah(tmp_path / "buildah")
    (tmp_path / "context").mkdir()
    container = buildah.build(*sources(of, tmp_path / "context"))
    try:
        assert buildah.run(container, *json.loads(LAST["ENTRYPOINT"]), "--version").startswith("piebald ")
        user = buildah.run(container, "python", "-c", "import os; print(os.getuid())")
        assert user == (LAST["USER"].split(":")[0] if of == "deploy" else "0")
    finally:
        buildah("rm", "--all")
