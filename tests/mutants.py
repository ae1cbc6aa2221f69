"""Mutants: small faults that are put into a copy of the package one at a time, and that its tests must find.

`make mutants` copies the project, runs the quick tests of each room once and records which lines each of them reaches
(kept in build/mutants.json until the package or the test changes).  Then, for each mutant, it writes one file of the
copy anew and runs the tests that reach the mutant's line, the quickest first, until one fails.  A mutant whose tests
all pass has survived: no test says what that line is for.  This is a tool for developers, no part of CI; it takes an
hour.

Which mutants: of each room in `QUOTAS`, all that the operators below make inside functions are put in the order of
the hashes of their names, and the first ones are taken, at most two of a function.  So the choice is nobody's, and it
stays the same when other code or whole rooms move.  `KNOWN` lists further ones that reviewers saw survive.  A name is
`file.Class.method:operator:number`, the number counting this operator's places in the function.

Which tests: those of the files that `TESTS` names for the room.  Rooms, and files of tests, are found by their names
wherever they lie.

    bound       < for <=, > for >=, == for !=, and the reverse
    swap        + for -, * for /, and the reverse; min for max
    term        a + b, a - b -> a
    factor      a * b, a / b, a ** b -> a
    clamp       min(a, b), x.clamp(...) -> a, x
    constant    0, 1, 2 -> 1, 2, 3 in arithmetic and comparisons
    logic       and for or, and the reverse
    negation    not a -> a
    update      a += b -> nothing
    early       an early return is not taken

No mutant changes messages, assertions, types or defaults; `LEFT_OUT` names the files that only draw, and those of the
run folder, whose tests damage and kill.

A test that needs another process is not recorded as reaching what runs there.  Tests that together take longer than
`PATIENCE` seconds are cut off there, the quickest first.  A mutant that takes `SLOWER` times as long as the code does,
and 20 seconds more, counts as killed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import queue
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "piebald"
MEASURED = ROOT / "build" / "mutants.json"  # which test reaches which lines, and how long it takes
SEED = "piebald"
QUOTAS = {  # rooms are found by the names of their folders, wherever these lie in the package
    "aggregation": 28,
    "server": 22,
    "scheduling": 14,
    "privacy": 24,
    "report": 26,
    "vertical": 20,
    "transforms": 16,
}
LEFT_OUT = re.compile(
    r"charts?|figures|plotly_chart|markup|notebook|page|palette|\w+_section|\w+_page|"
    r"backup|chosen_models|lock|run_folder|run_meta|schema|store|tensor_files"
)
TESTS = {
    "aggregation": "adapter_ranks aggregation defences fairness fednova heterofl metis trained_parameters",
    "server": "aggregation best_version central_noise classes heterofl hostile_results large_models lineage metis "
    "averaged_statistics budgets_at_sites client_choice lone_clients naive scheduling server_loop sizes spending "
    "stalled",
    "scheduling": "metis accounting recipes scheduling server_loop stalled",
    "privacy": "accounting central_noise federated_statistics hidden_at_sites lying_members question_budget "
    "secure_aggregation several_runs spending spent_budgets sum_protocol sum_security",
    "report": "client_gaps export headline measures paired participation row_noise score tables units",
    "vertical": "backends files kernels leakage messages networks protocol secured transfer_bombs transfer_messages "
    "transfer_privacy transfer_secrets",
    "transforms": "compression gaussian noise packed_updates accounting",
    "clustering": "clustering distribution_knowledge cluster_evidence regions",
    "partition": "dirichlet partitions",
    "choice": "best_for_each guard",
}
PATIENCE, SLOWER = 60.0, 5.0
ALLOWED = 0.05  # of the mutants may survive

KNOWN = [  # file, function, what stands there once, and what is put in its place
    ("norm_clipping", "NormClipping.merge", ".clamp(max=1.0)", ""),
    ("normalized", "Normalized._rows", " if update.steps else 0", ""),
    ("agnostic", "Agnostic.aggregate", " * context.known / len(losses)", ""),
    ("distfl", "Distfl._pre_aggregated", "/ len(rows)", "/ (len(rows) + 1)"),
    ("distfl", "Distfl._search", "<= self.far", "<= math.inf"),
    ("regions", "Regions.join", ".get(str(number), 0.0) + weight", ".get(str(number), 0.0) * 0 + weight"),
    ("cluster_state", "ModelCache.drop", "self.whole -= before", "pass"),
    ("stopping", "StoppingCriteria.measures", " or ", " and "),
    ("asynchronous", "NonBlockingScheduler.reject_reason", "> self.max_staleness", ">= self.max_staleness"),
    ("compression", "Compressor.decompress", "8 * context.layout.shared", "800 * context.layout.shared"),
    ("by_class", "Dirichlet._divided", "<= stock.sum()", "< stock.sum()"),
    ("by_class", "Dirichlet._by_class", ">= least", "> least"),
    ("kernels", "PolynomialKernel.moments", "second - unit", "second"),
    ("kernels", "GaussianKernel.moments", "width + second - 1 if unit", "width + second if unit"),
    ("kernels", "PolynomialKernel.sensitivity", "2**0.5 * longest**2", "longest**2"),
    ("verdict", "_all_pairs", "methods * (methods - 1) // 2 + extra", "1"),
    ("crossed_effects", "_errors", " - of_rest", ""),
    ("crossed_effects", "_errors", "np.maximum(of_seeds, of_clients)", "of_clients"),
    ("row_noise", "row_difference", " - float((shares**2 * by_seeds).sum())", ""),
    ("chart", "band_of", "seed[max(seed)]", "seed[min(seed)]"),
    ("candidates", "ClientCandidates.__init__", "self.shared - 1", "self.shared"),
    ("candidates", "ClientCandidates.__init__", "max(self.shared - 1, 0)", "self.shared - 1"),
]

REASONS = {  # by the names of mutants that survive and may: most are the same program in other words
    "positions._from_gaps:swap:2": "a body that is too short has too few ones, which is refused two lines later",
    "candidates.ClientCandidates.__init__:max(self.shared - 1, 0)": "where nothing is shared there is one model, "
    "and the last is the first",
    "party.Party.share:bound:0": "labels are 1 and -1",
    "bfv.BfvBackend.announced:swap:0": "a limit with room to spare: one key for rotations has a prime less",
    "irls.shared_ranks:swap:0": "the last place is the end of its equals, so what fills the others is never the least",
    "cluster_state.with_capped_examples:constant:0": "a share of 1 caps nothing, whichever way it is computed",
}


@dataclass(frozen=True)
class Mutant:
    """One fault: bytes `start` to `stop` of a file replaced by `after`."""

    file: Path
    name: str
    line: int
    start: int
    stop: int
    after: str

    @property
    def room(self) -> str:
        """The folder whose tests are to find it."""
        return next(folder.name for folder in self.file.parents if folder.name in TESTS)

    def source(self, text: bytes) -> bytes:
        """The whole file, mutated."""
        return text[: self.start] + self.after.encode() + text[self.stop :]

    def __str__(self) -> str:
        before = self.file.read_bytes()[self.start : self.stop].decode()
        shown = " ".join(f"{before or 'nothing'} -> {self.after or 'nothing'}".split())
        return f"{self.name}  {self.file.relative_to(ROOT)}:{self.line}  {shown}"


# -- operators

Change = tuple[str, ast.expr | ast.stmt, ast.AST]  # operator, what is replaced, and by what
BOUNDS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
SWAPS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult}
BOUNDING = {"min", "max", "clamp", "clip", "minimum", "maximum"}
FOLDER = re.compile(r"(folder|path|root|directory|home|here)s?(\(\))?$")


def changes(node: ast.AST) -> Iterator[Change]:
    """What the operators make of one node."""
    match node:
        case ast.Compare():
            for place, kind in enumerate(map(type, node.ops)):
                if kind in BOUNDS:
                    ops = [*node.ops[:place], BOUNDS[kind](), *node.ops[place + 1 :]]
                    yield "bound", node, ast.Compare(node.left, ops, node.comparators)
                    yield from constants(node.left, node.comparators[place])
        case ast.BinOp() if is_arithmetic(node):
            if type(node.op) in SWAPS:
                yield "swap", node, ast.BinOp(node.left, SWAPS[type(node.op)](), node.right)
                coefficient = isinstance(node.left, ast.Constant) and isinstance(node.op, ast.Mult)
                operator = "term" if isinstance(node.op, ast.Add | ast.Sub) else "factor"
                yield operator, node, node.right if coefficient else node.left
            yield from constants(node.left, node.right)
        case ast.BoolOp():
            yield "logic", node, ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        case ast.UnaryOp(op=ast.Not()):
            yield "negation", node, node.operand
        case ast.AugAssign() if not isinstance(node.value, ast.List | ast.JoinedStr | ast.ListComp):
            yield "update", node, ast.Pass()
            yield from constants(node.value)
        case ast.Call(func=ast.Attribute(value=object, attr=name)) if name in BOUNDING:
            if not (isinstance(object, ast.Name) and object.id in ("np", "torch")):
                if name in ("clamp", "clip"):
                    yield "clamp", node, object
            else:
                yield from clamps(node)
        case ast.Call(func=ast.Name(id=name)) if name in BOUNDING:
            if len(node.args) > 1:
                yield from clamps(node)
            else:
                yield "swap", node.func, ast.Name("max" if name == "min" else "min")


def clamps(node: ast.Call) -> Iterator[Change]:
    """A call of `min`, `max` or their like without its bound: the constant one, if one is."""
    variable = [side for side in node.args if not isinstance(side, ast.Constant | ast.Starred)]
    if variable:
        yield "clamp", node, variable[0]
    yield from constants(*node.args)


def constants(*nodes: ast.expr) -> Iterator[Change]:
    for node in nodes:
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value in (0, 1, 2):
            yield "constant", node, ast.Constant(node.value + 1)


def is_arithmetic(node: ast.BinOp) -> bool:
    """Whether numbers are computed, as far as the text shows: not texts, lists, paths or sets of types."""
    for side in (node.left, node.right):
        if isinstance(side, ast.JoinedStr | ast.List | ast.Tuple | ast.Set | ast.Dict | ast.ListComp | ast.DictComp):
            return False
        if isinstance(side, ast.Constant) and isinstance(side.value, str | bytes):
            return False
        if isinstance(node.op, ast.Div) and FOLDER.search(ast.unparse(side)):
            return False
        if isinstance(side, ast.BinOp) and not is_arithmetic(side):
            return False
    return isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div | ast.Pow | ast.FloorDiv | ast.Mod)


def early_returns(body: Sequence[ast.stmt]) -> Iterator[Change]:
    """Returns under an `if` by themselves, before the end of what they are in."""
    for statement in body[:-1]:
        if isinstance(statement, ast.If) and len(statement.body) == 1 and isinstance(statement.body[0], ast.Return):
            yield "early", statement.body[0], ast.Pass()


SILENT = ast.Raise | ast.Assert | ast.JoinedStr  # messages, and what types know


def mutants_of(file: Path) -> Iterator[Mutant]:
    """All mutants of one file's functions."""
    text = file.read_bytes()
    begins = [0]
    for line in text.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    counts: Counter[str] = Counter()

    def mutant(function: str, operator: str, old: ast.expr | ast.stmt, new: ast.AST) -> Mutant:
        assert old.end_lineno is not None
        assert old.end_col_offset is not None
        start, stop = begins[old.lineno - 1] + old.col_offset, begins[old.end_lineno - 1] + old.end_col_offset
        name = f"{file.stem}.{function}:{operator}"
        counts[name] += 1
        code = ast.unparse(new)
        after = f"({code})" if isinstance(new, ast.BinOp | ast.BoolOp | ast.Compare | ast.IfExp) else code
        return Mutant(file, f"{name}:{counts[name] - 1}", old.lineno, start, stop, after)

    def walk(node: ast.AST, scope: tuple[str, ...], inside: bool) -> Iterator[Mutant]:
        if isinstance(node, SILENT):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            scope, inside = (*scope, node.name), not isinstance(node, ast.ClassDef)
            for statement in node.body:  # neither decorators nor defaults
                yield from walk(statement, scope, inside)
            if inside:
                yield from (mutant(".".join(scope), *change) for change in early_returns(node.body))
            return
        if inside:
            yield from (mutant(".".join(scope), *change) for change in changes(node))
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and name not in ("annotation", "returns"):
                    yield from walk(child, scope, inside)

    yield from walk(ast.parse(text), (), False)


# -- which mutants


def stated() -> list[Mutant]:
    """The mutants that are run: those that the rule chooses, and those of `KNOWN`."""
    return [*chosen(), *(named(*entry) for entry in KNOWN)]


def chosen() -> list[Mutant]:
    """Of each room its quota, by the hashes of names."""
    mutants = []
    for room, quota in QUOTAS.items():
        folders = [folder for folder in PACKAGE.rglob(room) if folder.is_dir()]
        files = sorted(file for folder in folders for file in folder.rglob("*.py"))
        everything = [mutant for file in files if not LEFT_OUT.fullmatch(file.stem) for mutant in mutants_of(file)]
        of_function: Counter[str] = Counter()
        for mutant in sorted(everything, key=lambda mutant: hashlib.sha256((SEED + mutant.name).encode()).digest()):
            function = mutant.name.partition(":")[0]
            if of_function.total() < quota and of_function[function] < 2:
                of_function[function] += 1
                mutants.append(mutant)
    return mutants


def named(stem: str, function: str, before: str, after: str) -> Mutant:
    """An entry of `KNOWN` as a mutant."""
    for file in sorted(PACKAGE.rglob(f"{stem}.py")):
        nodes: list[Any] = [ast.parse(file.read_bytes())]
        for name in function.split("."):
            inside = [child for node in nodes for child in getattr(node, "body", [])]
            nodes = [child for child in inside if getattr(child, "name", None) == name]
        text = file.read_text("utf-8")
        lines = text.splitlines(keepends=True)
        for node in nodes:
            begin, end = ("".join(lines[:count]) for count in (node.lineno - 1, node.end_lineno))
            if text.count(before, len(begin), len(end)) == 1:
                place = text.index(before, len(begin))
                start, line = len(text[:place].encode()), text.count("\n", 0, place) + 1
                return Mutant(
                    file, f"{stem}.{function}:{before.strip()}", line, start, start + len(before.encode()), after
                )
    raise SystemExit(f"KNOWN: {stem}.py has no function {function} with {before!r} once: name the place as it is now")


# -- which tests


@dataclass(frozen=True)
class Reached:
    """What the pass without a mutant has shown: tests by file and line, and the seconds that each takes."""

    tests: dict[str, dict[int, list[str]]]
    seconds: dict[str, float]

    def of(self, mutant: Mutant) -> list[str]:
        """The tests of a mutant, the quickest first."""
        lines = self.tests.get(str(mutant.file.relative_to(ROOT)), {})
        last = mutant.line + mutant.file.read_bytes()[mutant.start : mutant.stop].count(b"\n")
        tests = {test for line in range(mutant.line, last + 1) for test in lines.get(line, ())}
        ordered = sorted(tests, key=lambda test: (self.seconds.get(test, 0.0), test))
        until = itertools.accumulate(self.seconds.get(test, 0.0) for test in ordered)
        return ordered[:1] + [test for test, end in zip(ordered, until, strict=True) if end <= PATIENCE][1:]


def digest_of(files: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in sorted(files))).hexdigest()


def tests_of(rooms: Iterable[str]) -> list[str]:
    """The files of tests of rooms, relative to the project."""
    stems = {f"test_{stem}" for room in rooms for stem in TESTS[room].split()}
    files = {file.stem: file for file in sorted((ROOT / "tests").rglob("test_*.py"))}
    if missing := stems - files.keys():
        raise SystemExit(f"TESTS: there is no {', '.join(sorted(missing))}: name the files as they are now")
    return sorted(str(files[stem].relative_to(ROOT)) for stem in stems)


def reached(copied: Path, wanted: Sequence[str], jobs: int) -> Reached:
    """Run files of tests without a mutant, but for those that were since the package and they have changed."""
    whole = digest_of([*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("conftest.py")])
    before = json.loads(MEASURED.read_text("utf-8")) if MEASURED.exists() else {}
    files = before["files"] if before.get("package") == whole else {}
    digests = {name: digest_of([ROOT / name]) for name in wanted}
    if new := [name for name in wanted if files.get(name, {}).get("digest") != digests[name]]:
        print(f"{len(new)} files of tests are run once without a mutant", flush=True)
        files |= {name: {"digest": digests[name], **entry} for name, entry in measure(copied, new, jobs).items()}
        MEASURED.parent.mkdir(exist_ok=True)
        MEASURED.write_text(json.dumps({"package": whole, "files": files}), "utf-8")
    tests: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for test, spots in (item for name in wanted for item in files[name]["tests"].items()):
        for file, lines in spots.items():
            for line in lines:
                tests[file][line].append(test)
    return Reached(tests, {test: spent for name in wanted for test, spent in files[name]["seconds"].items()})


def measure(copied: Path, files: Sequence[str], jobs: int) -> dict[str, dict[str, dict[str, Any]]]:
    """By file of tests: the lines that each test reaches, and its seconds; without tests that fail as it is."""
    from coverage import CoverageData

    settings, data = copied / ".mutants.ini", copied / ".mutants.coverage"
    settings.write_text(f"[run]\nsource = piebald\ndata_file = {data}\n", "utf-8")
    options = ["--cov", f"--cov-config={settings}", "--cov-context=test", "--cov-report=", "--durations=0", "-vv"]
    _, printed = pytest(copied, [*options, f"--numprocesses={jobs}", "--dist=worksteal", *files], None)
    if not re.search(r"^=+ .*\d passed", printed, re.MULTILINE):
        raise SystemExit(f"no test passes without a mutant:\n{printed[-5000:]}")
    failed = {match[1] for match in re.finditer(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", printed, re.MULTILINE)}
    for test in sorted(failed):
        print(f"left out, since it fails without a mutant: {test}", flush=True)
    entries: dict[str, dict[str, dict[str, Any]]] = {name: {"tests": {}, "seconds": {}} for name in files}
    for seconds, test in re.findall(r"^ *([\d.]+)s (?:setup|call) +(\S.*?) *$", printed, re.MULTILINE):
        times = entries[test.partition("::")[0]]["seconds"]
        times[test] = float(seconds) + times.get(test, 0.0)
    coverage = CoverageData(str(data))
    coverage.read()
    for path in coverage.measured_files():
        name = str(Path(path).relative_to(copied))
        for line, contexts in coverage.contexts_by_lineno(path).items():
            for test in {context.rpartition("|")[0] for context in contexts if context} - failed:
                entries[test.partition("::")[0]]["tests"].setdefault(test, {}).setdefault(name, []).append(line)
    return entries


# -- running


def copied(to: Path) -> Path:
    """A copy of the project's files at a new place."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    return to


FORKS = multiprocessing.get_context("forkserver")
PRELOADED = ["torch", "numpy", "pydantic", "scipy.stats", "sklearn.metrics", "pandas"]  # most of a test's first seconds


def pytest(copied: Path, options: Sequence[str], limit: float | None) -> tuple[int | None, str]:
    """Run tests in a copy of the project, and return the exit code, None after the time limit, and what is printed.

    The limit is in seconds of the processor, so that a busy machine kills nothing, and four times that on the clock.
    """
    printed = copied / ".mutants.txt"
    process = FORKS.Process(target=pytest_here, args=(copied, options, printed, limit))
    process.start()
    assert process.pid is not None
    process.join(4 * limit if limit else None)
    code = None if process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL) else process.exitcode
    with contextlib.suppress(ProcessLookupError):  # what the tests started, too
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return code, printed.read_text("utf-8", errors="replace")


def pytest_here(copied: Path, options: Sequence[str], printed: Path, limit: float | None) -> None:
    """Become a run of pytest in a folder."""
    import pytest

    os.setsid()
    if limit:
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit), math.ceil(limit) + 5))
    os.chdir(copied)
    with printed.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.path.insert(0, str(copied))  # before the package that is installed
    os.environ["PYTHONPATH"] = str(copied)  # of processes that tests start
    quiet = ["-q", "-p", "no:randomly", "-p", "no:cacheprovider", "--no-header", "-m", "not full and not long"]
    code = pytest.main([*quiet, *options])
    sys.stdout.flush()
    os._exit(int(code))


def outcome(mutant: Mutant, tests: Sequence[str], seconds: float, copied: Path) -> str:
    """What becomes of a mutant: "killed by" a test, "timeout" or "survived"."""
    if not tests:
        return "survived: no test reaches it"
    file = copied / mutant.file.relative_to(ROOT)
    compiled = Path(importlib.util.cache_from_source(str(file)))
    original = file.read_bytes()
    try:
        file.write_bytes(mutant.source(original))
        compiled.unlink(missing_ok=True)  # it is not renewed where size and second are the same
        code, printed = pytest(copied, ["-x", "-n", "0", *tests], SLOWER * seconds + 20)
    finally:
        file.write_bytes(original)
        compiled.unlink(missing_ok=True)
    if code is None:
        return "timeout"
    if code == 0:
        return f"survived {len(tests)} tests"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", printed, re.MULTILINE)
    return f"killed by {failed[1].rpartition('::')[2]}" if failed else "killed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", metavar="PATTERN", help="mutants whose line in --list matches")
    parser.add_argument("--list", action="store_true", help="list the mutants and run none")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="run at the same time")
    arguments = parser.parse_args()
    mutants = [mutant for mutant in stated() if re.search(arguments.only, str(mutant))]
    if arguments.list:
        print(*mutants, f"{len(mutants)} mutants; seed {SEED!r}", sep="\n")
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # as in tests/conftest.py, before PyTorch is loaded
    FORKS.set_forkserver_preload(PRELOADED)
    began, fates = time.monotonic(), {}
    with tempfile.TemporaryDirectory(prefix="piebald-mutants-") as temporary:
        workplaces: queue.Queue[Path] = queue.Queue()
        for job in range(arguments.jobs):
            workplaces.put(copied(Path(temporary) / f"{job}"))
        reach = reached(Path(temporary) / "0", tests_of({mutant.room for mutant in mutants}), arguments.jobs)

        def run(mutant: Mutant) -> str:
            copied, tests = workplaces.get(), reach.of(mutant)
            try:
                return outcome(mutant, tests, sum(reach.seconds.get(test, 0.0) for test in tests), copied)
            finally:
                workplaces.put(copied)

        with ThreadPoolExecutor(arguments.jobs) as pool:
            futures = {pool.submit(run, mutant): mutant for mutant in mutants}
            try:
                for future in as_completed(futures):
                    fates[futures[future]] = future.result()
                    print(f"{future.result():40} {futures[future]}", flush=True)
            except KeyboardInterrupt:  # those that are run come to an end
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    alive = [mutant for mutant in mutants if fates[mutant].startswith("survived")]
    excused = [mutant for mutant in alive if mutant.name in REASONS]
    survivors = [mutant for mutant in alive if mutant.name not in REASONS]
    late = sum(fate == "timeout" for fate in fates.values())
    share = len(survivors) / max(1, len(mutants))
    print(
        f"\n{len(mutants)} mutants, chosen by seed {SEED!r}, in {(time.monotonic() - began) / 60:.0f} minutes: "
        f"{len(mutants) - len(alive)} killed ({late} by time), {len(excused)} survived for a reason, {len(survivors)} "
        f"without one ({share:.1%}, at most {ALLOWED:.0%} may)"
    )
    print(*(f"{mutant}\n    {REASONS[mutant.name]}" for mutant in excused), *survivors, sep="\n")
    if needless := sorted(REASONS.keys() & {mutant.name for mutant in mutants if mutant not in alive}):
        print("have a reason and were killed:", *needless, sep="\n")
    sys.exit(share > ALLOWED)


if __name__ == "__main__":
    main()
