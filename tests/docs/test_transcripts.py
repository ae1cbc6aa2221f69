"""What the pages about federations show is what a server and three hospitals print, each a process of its own."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from piebald.cli import main

sys.path.insert(0, str(Path(__file__).parent))
import pages
from transcripts import missing, transcripts

from tests import processes

HOWTO = pages.ROOT / "docs" / "howto"
FEDERATION, OPERATE, KEEP = (transcripts(HOWTO / f"{name}.md") for name in ("federation", "operate", "keep-running"))
SITES = ("north", "south", "east")
RARE = (  # lines of logs that need 20 seconds without a word, private layers, a site that does not stay, or a full disk
    "<time> waiting for ",
    "<time> this site goes on with the state",
    "the run is over",
    "hdafl (seed <n>): server step",
    "<time> the number of updates ",
    "<time> the status ",
    "<time> credentials/north cannot be written",
    "<time> results cannot be taken",
    "server step <n> could not be recorded",
)
# Commands of these pages that are not run here, and what compares their output instead.
ELSEWHERE = {
    "piebald status credentials/server": "tests/federation/test_status.py",
    "piebald up --local": "test_extend.py, test_examples.py",
    "piebald server credentials/server more.toml": "test_a_site_that_asks_and_a_run_that_goes_on",
    "piebald server credentials/server experiment.toml --set": "tests/federation/test_provisioning.py",
    "piebald approve": "test_a_site_that_asks_and_a_run_that_goes_on",
    "piebald client credentials/south --data hospitals.csv": "tests/federation/test_site_rows.py",
    "piebald run secure.toml": "test_pages.py",
    "piebald report run": "test_pages.py",
}


CHECK = "piebald client credentials/north --data north.csv --target diagnosis --check"


class Federation:
    """A server and its sites on a port of their own, with the logs of their processes."""

    def __init__(self, folder: Path, ports: tuple[int, int]) -> None:
        self.folder, self.ports = folder, dict(zip(("8477", "8478"), map(str, ports), strict=True))
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.done: set[str] = set()  # commands of the pages
        self.unlike: list[str] = []

    def here(self, text: str) -> str:
        """Text of a page with this federation's ports."""
        return re.sub("847[78]", lambda found: self.ports[found[0]], text)

    def write(self, page: str, name: str) -> None:
        """A file that a page shows."""
        (block,) = [one for one in pages.blocks(HOWTO / page) if one.text.startswith(f"# {name}\n")][:1]
        (self.folder / name).write_text(self.here(block.text), "utf-8")

    def start(self, name: str, command: str, *more: str) -> None:
        """Start a command of a page as a process; it ends with the test at the latest."""
        self.done.add(command)
        words = [*shlex.split(self.here(command).removeprefix("piebald ")), *more]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = processes.Popen(
                processes.command(*words), stdout=log, stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text("utf-8", "replace")

    def wait(self, name: str, text: str) -> None:
        """Wait until the log of a process has this text, and fail if the process ends before."""
        until = time.monotonic() + 240
        while not re.search(text, self.log(name)):
            assert self.running[name].poll() is None, self.log(name)
            assert time.monotonic() < until, f"{name} does not print {text!r}:\n{self.log(name)}"
            time.sleep(0.05)

    def say(self, command: str, process: bool = False) -> str:
        """Run a short command of a page to its end; returns what it printed."""
        self.done.add(command)
        words = shlex.split(self.here(command).removeprefix("piebald "))
        if process:
            return processes.run(
                processes.command(*words), capture_output=True, text=True, timeout=240, check=False
            ).stdout
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            main(words)
        return out.getvalue()

    def check(
        self, shown: dict[str, list[str]], command: str, nth: int = 0, *, process: bool = False, numbers: bool = False
    ) -> None:
        """A command prints the lines that its page shows at the first or a later time; `numbers` may differ."""
        self.compare(shown[command][nth], self.say(command, process), command, numbers)

    def compare(self, shown: str, printed: str, what: str, numbers: bool = False) -> None:
        """Note the lines of a page that are not printed."""
        printed += printed.replace(f"{self.folder}/", "")  # a page may show either
        if lost := [line for line in missing(self.here(shown), printed, numbers) if not line.startswith(RARE)]:
            self.unlike.append(f"{what} does not print {lost}, but\n{printed}")

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()


@pytest.fixture
def hospitals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Federation]:
    from piebald.federation.hub.local_federation import free_port

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")  # tables have the columns that fit, as on the pages
    made = Federation(tmp_path, (free_port(), free_port()))
    yield made
    made.close()


@pytest.mark.long
@pytest.mark.full
def test_three_hospitals(hospitals: Federation) -> None:
    prepare(hospitals)
    train(hospitals)
    operate(hospitals)
    keep_running(hospitals)
    assert hospitals.unlike == [], "\n".join(hospitals.unlike)
    commands = {one for page in (FEDERATION, OPERATE, KEEP) for one in page if one.startswith("piebald ")}
    assert {one for one in commands - hospitals.done if not one.startswith(tuple(ELSEWHERE))} == set()


def prepare(world: Federation) -> None:
    """The files of the guide, credentials, and the checks before a server is there."""
    (tables, *_) = [block for block in pages.blocks(HOWTO / "federation.md") if block.language == "python"]
    exec(compile(tables.text, "federation.md", "exec"), {})
    world.write("federation.md", "federation.toml")
    world.check(FEDERATION, "piebald provision federation.toml --out credentials")
    listed = FEDERATION["ls -l credentials/north"][0].split()
    assert {file.name for file in (world.folder / "credentials" / "north").iterdir()} == set(listed[8::9])
    (site,) = [one for one in pages.blocks(HOWTO / "federation.md") if one.text.startswith("[data]\nsource")]
    settings = site.text.replace("/data/north.csv", str(world.folder / "north.csv"))
    (world.folder / "credentials" / "north" / "site.toml").write_text(settings, "utf-8")
    (world.folder / "my_data.py").write_text(FEDERATION["cat my_data.py"][0], "utf-8")
    world.write("operate.md", "experiment.toml")
    world.check(OPERATE, "piebald server credentials/server experiment.toml --out run --check")
    world.check(OPERATE, CHECK, process=True)
    world.check(OPERATE, "piebald client credentials/north --data nort.csv --target diagnosis")


def train(world: Federation) -> None:
    """The run of the guide, from a site's last check to its end; the sites stay for the next one."""
    shutil.copy("experiment.toml", "long.toml")
    world.write("federation.md", "experiment.toml")
    command = "piebald server credentials/server experiment.toml --out run"
    world.start("first", command)
    world.wait("first", "listening on port")
    world.check(OPERATE, CHECK, 1, process=True)
    starts = [one for one in FEDERATION if one.startswith("piebald client") and "hospitals.csv" not in one]
    for name, start in zip(SITES, starts, strict=True):
        world.start(name, start, "--stay")
    assert world.running["first"].wait(240) == 0, world.log("first")
    world.compare(FEDERATION[command][0], world.log("first"), command)
    world.check(FEDERATION, "piebald status run", numbers=True)
    shutil.move("run", "first")


def operate(world: Federation) -> None:
    """A long run, while it goes on."""
    shutil.move("long.toml", "experiment.toml")
    world.start("server", "piebald server credentials/server experiment.toml --out run --status-port 8478")
    world.wait("server", "step 3/2000")
    shown, until = world.here(OPERATE["piebald status run"][0]), time.monotonic() + 60
    while missing(shown, world.say("piebald status run"), True) and time.monotonic() < until:
        time.sleep(0.2)  # the status is written now and then, at first without numbers of a site's tasks
    world.check(OPERATE, "piebald status run", numbers=True)


def keep_running(world: Federation) -> None:
    """Backups, the audit log, renewed and revoked certificates, and a server that is killed."""
    for command in ("piebald backup run backup.tar", "piebald restore backup.tar again"):
        world.check(KEEP, command, numbers=True)
    world.check(KEEP, "piebald audit credentials/server", numbers=True)
    edited = Path(shutil.copytree("credentials/north", "edited")) / "audit.jsonl"
    world.check(KEEP, next(one for one in KEEP if one.startswith("piebald audit edited --head")))
    lines = edited.read_text("utf-8").splitlines(keepends=True)
    lines[18] = re.sub(r'"at":"2\d', '"at":"19', lines[18])
    edited.write_text("".join(lines), "utf-8")
    world.check(KEEP, "piebald audit edited")
    text = Path("federation.toml").read_text("utf-8")
    Path("federation.toml").write_text(text.replace('"east"]', '"east", "west"]'), "utf-8")
    world.check(KEEP, "piebald provision federation.toml --out credentials")
    world.check(KEEP, "piebald provision federation.toml --out credentials --renew --party south")
    world.wait("south", "was renewed: it is valid until")
    world.check(KEEP, "piebald provision federation.toml --out credentials --revoke south")
    world.wait("server", "south is shut out")
    world.running["server"].kill()
    world.wait("north", "it is tried again every second")
    said = "".join(world.log(name) for name in ("first", "server", *SITES))
    for page in ("federation.md", "operate.md", "keep-running.md"):
        logs = [block.text for block in pages.blocks(HOWTO / page) if re.match(r"\d{4}-\d\d-\d\d ", block.text)]
        world.compare("".join(logs), said, f"the log of {page}", numbers=True)


@pytest.mark.long
@pytest.mark.full
def test_a_site_that_asks_and_a_run_that_goes_on(hospitals: Federation) -> None:
    """With fewer rounds than on the page."""
    world, approve = hospitals, "piebald approve credentials/east"
    for page, name in (("federation.md", "federation.toml"), ("keep-running.md", "first.toml")):
        world.write(page, name)
    (adapt,) = [one for one in KEEP if one.startswith("sed 's/rounds")]
    subprocess.run(adapt, shell=True, check=True)
    for name, before, after in (("first", "rounds = 40", "rounds = 4"), ("more", "rounds = 60", "rounds = 6")):
        file = Path(f"{name}.toml")
        file.write_text(file.read_text("utf-8").replace(before, after).replace("every = 20", "every = 2"), "utf-8")
    world.say("piebald provision federation.toml --out credentials")
    (policy,) = [one.text for one in pages.blocks(HOWTO / "keep-running.md") if one.text.startswith("# site.toml of")]
    Path("credentials/east/site.toml").write_text(policy, "utf-8")

    world.start("first", "piebald server credentials/server first.toml --out run")
    for site in SITES:
        world.start(site, f"piebald client credentials/{site}", "--stay")
    world.compare(KEEP[approve][0], asked(world, "east"), approve, numbers=True)
    (said,) = [one for one in KEEP if one.startswith(f"{approve} ")]
    digest = asked(world, "east").split()[-1]
    world.compare(KEEP[said][0], world.say(f"{approve} {digest}"), said)
    assert world.running["first"].wait(240) == 0, world.log("first")

    text = Path("federation.toml").read_text("utf-8")
    Path("federation.toml").write_text(text.replace('"east"]', '"east", "west"]'), "utf-8")
    world.check(KEEP, "piebald provision federation.toml --out credentials")
    command = "piebald server credentials/server more.toml --from run --out longer"
    world.start("more", command)
    world.start("west", "piebald client credentials/west")
    world.say(f"{approve} {asked(world, 'east', digest).split()[-1]}")  # other terms, another question
    assert world.running["more"].wait(240) == 0, world.log("more")
    world.compare(KEEP[command][0], world.log("more"), command, numbers=True)
    (went,) = [one.text for one in pages.blocks(HOWTO / "keep-running.md") if "this site goes on with" in one.text]
    world.compare(went[:24] + went[24:].strip(), world.log("north"), "the log of north", numbers=True)
    assert hospitals.unlike == [], "\n".join(hospitals.unlike)


def asked(world: Federation, site: str, before: str = "nothing") -> str:
    """What waits for approval at a site, once something does."""
    until = time.monotonic() + 240
    while True:
        told = world.say(f"piebald approve credentials/{site}")
        if not told.startswith("nothing waits") and before not in told:
            return told
        assert time.monotonic() < until, world.log(site)
        time.sleep(0.1)


@pytest.mark.long
@pytest.mark.full
def test_rounding_grows_with_the_number_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines of the simulator, after the 26,000 steps of which the page tells."""
    text = " ".join((HOWTO.parent / "explanation" / "how-it-works.md").read_text("utf-8").split())
    monkeypatch.chdir(tmp_path)
    found = []
    for engine in ("sequential", "batched"):
        told = ["--set", "rounds=12", "--set", "recipe.epochs=60", "--set", f"runtime.engine={engine}"]
        assert main(["run", *told, "--out", engine, "--quiet"]) == 0
        found.append(load_file(f"{engine}/vectors-12.safetensors"))
    first, second = found
    apart = max(float((vector - second[name]).abs().max()) for name, vector in first.items() if name.endswith("model"))
    (told,) = re.findall(r"after 26,000 steps two engines of the simulator differ by (\d+e-\d+)", text)
    assert float(told) / 20 < apart < float(told) * 20  # rounding is another one on another machine


@pytest.mark.long
@pytest.mark.full
def test_one_file_in_three_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)
    partition = 'partition = { kind = "dirichlet", clients = 3, alpha = 0.3 }'
    file = f'rounds = 10\ndata = {{ name = "digits" }}\nmodel = {{ name = "mlp" }}\n{partition}\n'
    Path("experiment.toml").write_text(f'{file}recipe = {{ name = "hdafl", cohort = 1.0, lr = 0.1 }}\n', "utf-8")
    found = {}
    for place in ("simulator", "ray", "federation"):
        words = ["run", "experiment.toml", "--runtime", place, "--out", place, "--quiet"]
        subprocess.run([sys.executable, "-m", "piebald.cli", *words], check=True, timeout=600)
        found[place] = load_file(f"{place}/vectors-10.safetensors")["cluster/0/model"]
    assert max(float((model - found["simulator"]).abs().max()) for model in found.values()) < 1e-5
