"""The files in deploy/: units of systemd, the container file, and the examples for Compose and Kubernetes."""

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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from typer.core import TyperGroup

from piebald.cli.app import app
from piebald.deploy.page_server import token_of
from piebald.experiment_file import ExperimentSettings
from piebald.runtimes.federation.provisioning import describe, provision, read

DEPLOY = Path(__file__).parents[1] / "deploy"
UNITS = sorted(DEPLOY.glob("systemd/*.service"))
MANIFESTS = sorted(DEPLOY.glob("kubernetes/*.yaml"))
VERSIONS = ("1.35", "1.37")  # of Kubernetes, the oldest and the newest that the schemas are looked up for

# systemd.unit(5), systemd.service(5), systemd.exec(5), systemd.resource-control(5), systemd.kill(5): what is used, and
# which values it takes
YES = "yes|no"
DIRECTIVES = {
    "Unit": {
        **dict.fromkeys(("Description", "After", "Wants"), ".+"),
        "StartLimitIntervalSec": r"\d+(s|min|h)?",
        "StartLimitBurst": r"\d+",
    },
    "Install": {"WantedBy": r"[\w.-]+\.target"},
    "Service": {
        "Type": "exec|simple|notify",
        "ExecStart": r"/\S+( \S+)*",
        **dict.fromkeys(("User", "Group", "StateDirectory"), r"[a-z][a-z0-9-]*"),
        "StateDirectoryMode": "0700",
        "WorkingDirectory": r"/var/lib/[\w-]+",
        "UMask": "0077",
        "Environment": r"\w+=\S+( \w+=\S+)*",
        "Restart": "on-failure",
        **dict.fromkeys(("RestartSec", "TimeoutStopSec"), r"\d+(s|min)?"),
        **dict.fromkeys(("RestartPreventExitStatus", "SuccessExitStatus"), r"\d+( \d+)*"),
        "KillMode": "mixed|control-group",
        **dict.fromkeys(("CapabilityBoundingSet", "AmbientCapabilities"), ""),
        "ProtectSystem": "strict",
        "ProtectProc": "invisible",
        "RestrictAddressFamilies": r"AF_\w+( AF_\w+)*",
        "SystemCallArchitectures": "native",
        "SystemCallFilter": r"@system-service",
        "SystemCallErrorNumber": "E[A-Z]+",
        **dict.fromkeys(
            ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "PrivateDevices", "ProtectClock", "ProtectControlGroups",
             "ProtectHostname", "ProtectKernelLogs", "ProtectKernelModules", "ProtectKernelTunables",
             "RestrictNamespaces", "RestrictRealtime", "RestrictSUIDSGID", "RemoveIPC", "LockPersonality"), YES,
        ),
    },
}  # fmt: skip


def of_unit(path: Path) -> dict[str, dict[str, str]]:
    """The directives of a unit, by section; a line that is none, or that comes twice, is an error."""
    found: dict[str, dict[str, str]] = {}
    section = ""
    for line in path.read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
            found[section] = {}
        elif line and not line.startswith("#"):
            name, equals, value = line.partition("=")
            assert equals, line
            assert name not in found[section], line
            found[section][name] = value
    return found


def parse(words: Sequence[str]) -> dict[str, Any]:
    """Parse the words after `piebald` with the package's own command line, without running the command."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("piebald", list(words[:1]))
    while isinstance(command, TyperGroup):
        command = command.commands[words[0]]
        words = words[1:]
    return dict(command.make_context("piebald", list(words), parent=context).params)


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_holds_known_directives_and_a_command_that_there_is(path: Path, tmp_path: Path) -> None:
    found = of_unit(path)
    for section, table in found.items():
        for name, value in table.items():
            assert re.fullmatch(DIRECTIVES[section][name], value), f"{name}={value}"
    assert set(found) == set(DIRECTIVES)
    service = found["Service"]
    assert set(service) == set(DIRECTIVES["Service"])  # none of the hardening has been left out
    assert not {name for name in service if DIRECTIVES["Service"][name] == YES and service[name] != "yes"}
    program, *words = shlex.split(service["ExecStart"])
    assert program.endswith("/bin/piebald")
    given = parse(words)
    assert str(given["credentials"]) == f"/var/lib/{service['StateDirectory']}" == service["WorkingDirectory"]
    assert given.get("file") is None  # a server takes its queue up where it was: the same command again and again
    assert given.get("stay", True)
    if shutil.which("systemd-analyze") is None:
        pytest.skip("the directives are as listed; systemd-analyze, which knows them all, is not here")
    unit = tmp_path / path.name
    unit.write_text(path.read_text().replace(program, sys.executable))
    said = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert (said.returncode, said.stderr) == (0, "")
    command = [
        "systemd-analyze",
        "security",
        "--offline=yes",
        "--no-pager",
        "--threshold=20",
        unit,
    ]  # 100: no protection
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_the_units_have_a_user_of_their_own() -> None:
    (line,) = [line for line in (DEPLOY / "systemd" / "piebald.conf").read_text().splitlines() if line[0] != "#"]
    kind, user, *_ = shlex.split(line)
    assert (kind, {of_unit(path)["Service"]["User"] for path in UNITS}) == ("u", {user})


# -- the container file


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a container file."""
    lines = re.sub(r"\\\n", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines if line]


INSTRUCTIONS = instructions((DEPLOY / "Containerfile").read_text())
LAST = dict(INSTRUCTIONS[max(number for number, (name, _) in enumerate(INSTRUCTIONS) if name == "FROM") :])


def health() -> list[str]:
    """The words of the health check."""
    words: list[str] = json.loads(LAST["HEALTHCHECK"].partition("CMD ")[2])
    return words


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
    assert parse(health()[1:]) == {"folder": Path("/data"), "check": True, "as_json": False}
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


@pytest.mark.full
def test_the_commands_of_the_container_in_an_empty_environment(tmp_path: Path) -> None:
    """The sdist holds what the image is made of, and the image starts, is healthy, and stops when it is told to."""
    pytest.importorskip("nvflare")
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
def test_an_engine_builds_and_runs_the_image() -> None:
    for engine in ("docker", "podman"):
        if shutil.which(engine) and subprocess.run([engine, "info"], capture_output=True, check=False).returncode == 0:
            break
    else:
        pytest.skip("no container engine answers: the commands are run without one instead")
    build = [engine, "build", "-q", "-f", str(DEPLOY / "Containerfile"), "-t", "piebald-test", str(DEPLOY.parent)]
    made = subprocess.run(build, capture_output=True, text=True, check=False, timeout=850)
    if made.returncode and "download" in (made.stderr + made.stdout).lower():
        pytest.skip("the engine cannot download what the image is made of")
    assert made.returncode == 0, made.stderr
    run = [engine, "run", "--rm", "--read-only", "--tmpfs", "/tmp", "--cap-drop=ALL", "--network=none", "piebald-test"]
    assert subprocess.run([*run, "--version"], check=True, capture_output=True, text=True).stdout.startswith("piebald")


# -- Compose


def test_the_compose_file_is_a_federation_without_rights() -> None:
    folder = DEPLOY / "compose"
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    federation = describe(folder / "federation.toml")
    experiment = ExperimentSettings.load(folder / "experiment.toml")
    assert list(services) == ["server", *federation.sites]
    assert federation.host == "server"
    assert len(experiment.plan().clients) == len(federation.sites)
    for name, service in services.items():
        assert (service["read_only"], service["cap_drop"], service["tmpfs"]) == (True, ["ALL"], ["/tmp"])
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["user"].startswith("${PIEBALD_USER:-10001:10001")
        written = [volume for volume in service["volumes"] if not volume.endswith(":ro")]
        assert written == [f"./credentials/{name}:/data"]
        assert service.get("ports", []) == ([f"{federation.port}:{federation.port}"] if name == "server" else [])
        given = parse(service["command"])
        assert given["credentials"] == Path("/data")
        assert given.get("stay", True)
    commands = re.findall(r"piebald ((?:provision|queue) .*)$", (folder / "compose.yaml").read_text(), re.MULTILINE)
    assert [parse(shlex.split(one)) for one in commands]
    assert len(commands) == 3


# -- Kubernetes


def documents() -> Iterator[dict[str, Any]]:
    for path in MANIFESTS:
        yield from yaml.safe_load_all(path.read_text())


def pods() -> Iterator[dict[str, Any]]:
    yield from (one["spec"]["template"]["spec"] for one in documents() if one["kind"] in ("StatefulSet", "Deployment"))


def test_the_manifests_have_the_form_that_kubernetes_takes() -> None:
    kinds = [one["kind"] for one in documents()]
    assert kinds == [
        "Service", "StatefulSet", "NetworkPolicy", "PersistentVolumeClaim", "Deployment", "NetworkPolicy",
    ]  # fmt: skip
    schemas = pytest.importorskip("kubernetes_validate", reason="needs pip install kubernetes-validate")
    for version in VERSIONS:
        for one in documents():
            schemas.validate(one, version, strict=True)
        with pytest.raises(schemas.ValidationError):
            schemas.validate({**one, "specs": {}}, version, strict=True)


def test_pods_keep_to_the_restricted_standard_of_kubernetes() -> None:
    """The Pod Security Standard `restricted`, with a read-only root file system besides."""
    for pod in pods():
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] == int(LAST["USER"].split(":")[0])
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        kinds = {kind for volume in pod["volumes"] for kind in set(volume) - {"name"}}
        assert kinds <= {"secret", "emptyDir", "persistentVolumeClaim"}
        names = {volume["name"] for volume in pod["volumes"]} | {"data"}
        for container in [*pod["initContainers"], *pod["containers"]]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {mount["name"] for mount in container["volumeMounts"]} <= names


def test_pods_run_commands_that_there_are_and_probe_what_they_serve() -> None:
    server, site = pods()
    (serving,) = server["containers"]
    given = parse(serving["args"])
    ports = {port["name"]: port["containerPort"] for port in serving["ports"]}
    assert (given["credentials"], given["status_port"], given["file"]) == (Path("/data"), ports["status"], None)
    assert given["status_host"] == "0.0.0.0"  # the page is HTTPS then
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert serving[probe]["httpGet"] == {"path": "/healthz", "port": "status", "scheme": "HTTPS"}
    (training,) = site["containers"]
    assert parse(training["args"])["stay"]
    for probe in ("startupProbe", "livenessProbe"):
        program, *words = training[probe]["exec"]["command"]
        assert (program, parse(words)["check"]) == ("piebald", True)
    service, stateful, policy, *_ = documents()
    assert stateful["spec"]["replicas"] == 1
    assert service["spec"]["selector"] == stateful["spec"]["template"]["metadata"]["labels"]
    federation = describe(DEPLOY / "compose" / "federation.toml")
    (port,) = service["spec"]["ports"]
    assert (port["port"], ports[port["targetPort"]]) == (federation.port, federation.port)
    assert policy["spec"]["ingress"] == [{"ports": [{"port": federation.port, "protocol": "TCP"}]}]
    *_, closed = documents()
    assert closed["spec"]["ingress"] == []  # nobody connects to a site


def test_credentials_of_a_secret_are_copied_as_they_must_be(tmp_path: Path) -> None:
    """Files of a Secret are links that others can read; those of the volume are the owner's, also at the next start."""
    provision(describe(DEPLOY / "compose" / "federation.toml"), tmp_path / "made")
    secret, data = tmp_path / "credentials", tmp_path / "data"
    for folder in (secret, data):
        folder.mkdir()
    for file in (tmp_path / "made" / "north").iterdir():
        file.chmod(0o644)
        (secret / file.name).symlink_to(file)
    (data / "audit.jsonl").write_text("kept")
    for pod in pods():
        (copying,) = pod["initContainers"]
        shell, option, script = copying["command"]
        for path in (secret, data):
            script = re.sub(rf"(?<![\w/])/{path.name}", str(path), script)
        for _ in range(2):
            subprocess.run([shell, option, script], check=True)
            (data / "key.pem").chmod(0o660)  # as a change of the volume's group does
        subprocess.run([shell, option, script], check=True)
    assert read(data).party == "north"
    assert not (data / "key.pem").is_symlink()
    assert (data / "audit.jsonl").read_text() == "kept"
    assert token_of(data)
