"""Bad experiment files: python benchmarks/robustness/toml_fuzzer.py --count 1000

A good file is changed in one place: a value by a hostile one, a key by another, a section is doubled, bytes are
flipped, lines are swapped.  Each file is run as `piebald run FILE` runs it, in this process; a sample of them in
processes of their own.  Refused means exit code 2 and one line on standard error.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

from rows import Row, command, tallied

from piebald.cli import main

HERE = Path(__file__).parent
FILES = {name: (HERE / f"{name.replace(' ', '_')}.toml").read_text("utf-8") for name in ("a run", "a comparison")}
# ruff: noqa: E501 - hostile values are long
VALUES = (
    '""', '"x"', '"5"', "true", "-1", "0", "2.5", "nan", "inf", "-inf", "1e308", "1e-320", "9" * 30, "9" * 5000, "0x" + "f" * 400,
    "[]", "[[]]", "{}", "[1, \"a\"]", "[" * 1000 + "]" * 1000, "{ a = " * 300 + "1" + " }" * 300, "1979-05-27", "07:32:00",
    '"a\\u0000b"', '"\\u001b[31m"', '"../../etc"', "'" + "x" * 100_000 + "'", "[nan]", "[-1]", "[0, 0]", '{ kind = "x" }',
    "{ kind = 5 }", '{ kind = "iid", clients = 2 }', '{ name = "x" }', "2147483648", "9223372036854775807", "9223372036854775808",
    '["accuracy", "accuracy"]', '"[red]markup[/red]"', '"{0}%s"', "0.1e1000", "1__0", "", "=", "\"\"\"open", "\udcff",
)  # fmt: skip


def mutated(text: str, draw: random.Random) -> tuple[str, bytes]:
    """What was changed, and the file."""
    lines = text.split("\n")
    places = [number for number, line in enumerate(lines) if "=" in line]
    place = draw.choice(places)
    key, _, value = lines[place].partition("=")
    how = draw.choice(("value",) * 6 + ("key", "section", "twice", "bytes", "swap", "drop", "cut"))
    if how == "value":
        lines[place] = f"{key}= {draw.choice(VALUES)}"
    elif how == "key":
        lines[place] = f"{draw.choice((key.strip() + 'x', '', '5', 'a.b', 'kind', 'name', 'é'))} ={value}"
    elif how == "section":
        lines.insert(
            draw.randrange(len(lines)), draw.choice(("[x]", "[[x]]", "[data]", "[[recipe]]", "[recipe.x.y]", "["))
        )
    elif how == "twice":
        lines.insert(place, lines[place])
    elif how == "swap":
        other = draw.randrange(len(lines))
        lines[place], lines[other] = lines[other], lines[place]
    elif how == "drop":
        del lines[place]
    raw = bytearray("\n".join(lines).encode("utf-8", "surrogateescape"))
    if how == "bytes":
        for _ in range(draw.randrange(1, 4)):
            raw[draw.randrange(len(raw))] = draw.randrange(256)
    if how == "cut":
        del raw[draw.randrange(len(raw)) :]
    return f"{how} at {lines[min(place, len(lines) - 1)][:60]!r}", bytes(raw)


def called(command: str, file: Path) -> tuple[int, str]:
    """The exit code and standard error of a command in this process."""
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        code = main([command, str(file), "--quiet", "--out", str(file.with_suffix(""))])
    return code, errors.getvalue()


def started(command: str, file: Path) -> tuple[int, str]:
    """The same in a process of its own."""
    words = [sys.executable, "-m", "piebald.cli", command, str(file), "--quiet", "--out", str(file.with_suffix(""))]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False, timeout=300)
    return done.returncode, done.stderr


def verdict(code: int, errors: str, what: str) -> tuple[str, str]:
    """What a command ended with."""
    if code == 0:
        return "accepted", what
    if code < 0:
        return "crashed", f"{what}: signal {-code}"
    good = code == 2 and errors.count("\n") == 1 and "Traceback" not in errors and "unexpected error" not in errors
    return ("refused" if good else "raw"), f"{what}: exit code {code}: {errors.strip()[-200:]}"


def run(count: int = 1000, seed: int = 0, processes: int = 20) -> list[Row]:
    """Try so many files, and some more in processes of their own."""
    draw, rows = random.Random(seed), []
    os.environ.pop("PIEBALD_DEBUG", None)
    with tempfile.TemporaryDirectory() as folder:
        for name, call, number in (("in this process", called, count), ("in their own", started, processes)):
            verdicts = []
            for turn in range(number):
                which = draw.choice([*FILES])
                what, raw = mutated(FILES[which], draw)
                file = Path(folder) / f"{name[:2]}-{turn}.toml"
                file.write_bytes(raw)
                code, errors = call("run" if which == "a run" else "compare", file)
                verdicts.append(verdict(code, errors, f"{which}, {what}"))
            rows.append(tallied(f"TOML files, {name}", verdicts))
    return rows


if __name__ == "__main__":
    sys.exit(command(__doc__, run, count=1000, processes=20, seed=0))
