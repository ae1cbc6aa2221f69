"""The files in deploy/ and in startup kits: units of systemd, and the examples for Compose and Kubernetes."""

from __future__ import annotations

import functools
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import piebald
from piebald.experiments.file import ExperimentSettings
from piebald.federation.credentials import provisioning
from piebald.federation.credentials.provisioning import describe, provision, read
from piebald.federation.operate.page_server import token_of
from piebald.federation.operate.run_view import RunView, exposition
from piebald.federation.operate.status import STATES
from tests.deployment_files import DEPLOY, LAST, parse

KIT = Path(provisioning.__file__).parent / "kit"
UNITS = [DEPLOY / "systemd" / "piebald-server.service", KIT / "piebald-site.service"]
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


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_says_how_its_user_is_made(path: Path) -> None:
    (inline,) = re.findall(r"^#     systemd-sysusers --inline '(.*)'$", path.read_text(), re.MULTILINE)
    assert shlex.split(inline)[:2] == ["u", of_unit(path)["Service"]["User"]]


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
        "Service", "Service", "StatefulSet", "NetworkPolicy", "PersistentVolumeClaim", "Deployment", "NetworkPolicy",
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
    service, metrics, stateful, policy, *_ = documents()
    assert stateful["spec"]["replicas"] == 1
    assert service["spec"]["selector"] == stateful["spec"]["template"]["metadata"]["labels"]
    federation = describe(DEPLOY / "compose" / "federation.toml")
    (port,) = service["spec"]["ports"]
    assert (port["port"], ports[port["targetPort"]]) == (federation.port, federation.port)
    (scraped,) = metrics["spec"]["ports"]
    assert (scraped["port"], scraped["targetPort"]) == (ports["status"], "status")
    sites, scraper = policy["spec"]["ingress"]
    assert sites == {"ports": [{"port": federation.port, "protocol": "TCP"}]}
    assert scraper["ports"] == [{"port": ports["status"], "protocol": "TCP"}]
    assert scraper["from"]  # who scrapes, and nobody else
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


# -- Helm


def rendered(template: str, values: Mapping[str, Any], namespace: str = "piebald") -> str:
    """What Helm makes of a template that has nothing but values and one condition around the whole file."""
    inner = re.fullmatch(r"\{\{- if \.Values\.([\w.]+) \}\}\n(.*)\{\{- end \}\}\n", template, re.DOTALL)
    assert inner is not None

    def value(path: str) -> Any:
        return functools.reduce(lambda table, key: table[key], path.split("."), values)

    if not value(inner[1]):
        return ""
    text = inner[2].replace("{{ .Release.Namespace }}", namespace)
    text = re.sub(r"\{\{ \.Values\.([\w.]+) \}\}", lambda match: str(value(match[1])), text)
    assert "{{" not in text
    return text


def chart_values(**enabled: Any) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((DEPLOY / "helm" / "values.yaml").read_text())
    for party, changes in enabled.items():
        values[party] |= changes
    return values


@pytest.mark.parametrize("party", ["server", "site"])
def test_the_chart_makes_the_plain_manifests(party: str) -> None:
    template = (DEPLOY / "helm" / "templates" / f"{party}.yaml").read_text()
    plain = list(yaml.safe_load_all((DEPLOY / "kubernetes" / f"{party}.yaml").read_text()))
    assert rendered(template, chart_values()) == ""
    assert list(yaml.safe_load_all(rendered(template, chart_values(**{party: {"enabled": True}})))) == plain


def test_each_value_of_the_chart_is_used_and_changes_what_it_makes() -> None:
    folder = DEPLOY / "helm"
    text = "".join(path.read_text() for path in sorted(folder.glob("templates/*.yaml")))
    values = chart_values()
    paths = {name for name, value in values.items() if not isinstance(value, dict)}
    paths |= {f"{party}.{name}" for party in ("server", "site") for name in values[party]}
    assert paths == set(re.findall(r"\.Values\.([\w.]+)", text))
    moved = rendered((folder / "templates" / "site.yaml").read_text(),
                     chart_values(site={"enabled": True, "name": "west"}), "elsewhere")  # fmt: skip
    assert {one["metadata"]["name"] for one in yaml.safe_load_all(moved)} == {"west"}
    assert {one["metadata"]["namespace"] for one in yaml.safe_load_all(moved)} == {"elsewhere"}
    chart = yaml.safe_load((folder / "Chart.yaml").read_text())
    assert (chart["apiVersion"], chart["appVersion"]) == ("v2", piebald.__version__)
    if shutil.which("helm") is not None:
        said = subprocess.run(["helm", "lint", "--strict", folder], capture_output=True, text=True, check=False)
        assert said.returncode == 0, said.stdout


# -- Prometheus and Grafana


def metric_names() -> set[str]:
    """The metrics of a server whose run has all that a run can have."""
    site = {
        "site": "a", "state": "ready", "heard": 1.0, "received": 1, "sent": 1, "finished": 1, "late": 0, "refusals": 0,
        "absent": 0, "staleness": 0, "seconds": 1.0, "rows": 3,
    }  # fmt: skip
    view = RunView(
        {"state": "training", "steps": 3, "sites": [site]}, {"rounds": 9, "metric": "accuracy"}, [(1, 0.5)],
        {"global": [(1, 0.5)]}, {0: [(1, 0.5)]}, privacy=({"unit": "client", "epsilon": 1.0, "delta": 1e-5},),
        disk=1, expires=1.0,
    )  # fmt: skip
    return set(re.findall(r"^(\w+)(?:\{| )", exposition(view)[0].decode(), re.MULTILINE)) | {"up"}


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:piebald|process)_\w+|\bup\b", expression))


def test_alerts_and_dashboard_ask_for_metrics_that_there_are(tmp_path: Path) -> None:
    alerts, there = DEPLOY / "monitoring" / "alerts.yaml", metric_names()
    (group,) = yaml.safe_load(alerts.read_text())["groups"]
    for rule in group["rules"]:
        assert metrics_in(rule["expr"])
        assert metrics_in(rule["expr"]) <= there, rule["alert"]
        assert {*rule} <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        states = set(re.findall(r'state="(\w+)"', rule["expr"]))
        assert states <= set(STATES)
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"])
    board = json.loads((DEPLOY / "monitoring" / "dashboard.json").read_text())
    for panel in board["panels"]:
        (target,) = panel["targets"]
        assert metrics_in(target["expr"])
        assert metrics_in(target["expr"]) <= there, panel["title"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    if shutil.which("promtool") is not None:
        said = subprocess.run(["promtool", "check", "rules", alerts], capture_output=True, text=True, check=False)
        assert said.returncode == 0, said.stdout + said.stderr
