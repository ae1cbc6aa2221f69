"""Processes that tests start are what Python would have started (`tests.processes`)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere Python is started as usual")

SEEN = """
import json, os, sys
main = sys.modules["__main__"]
found = [sys.argv, sys.path, os.getcwd(), __name__, main.__dict__ is globals(), sys.stdin.read(), sys.stdout.isatty()]
found += [sys.stdout.encoding, sys.stderr.errors, dict(os.environ), len(os.listdir("/proc/self/fd"))]
found += [os.getppid(), os.getsid(0) == os.getpid(), "piebald" in sys.modules]
print(json.dumps(found))
print("an error", file=sys.stderr)
sys.exit(7)
"""


@pytest.mark.parametrize("how", ["code", "file", "module"])
def test_a_program_sees_what_it_sees_in_a_new_python(how: str, tmp_path: Path) -> None:
    (tmp_path / "seen.py").write_text(SEEN)
    program = {"code": ["-c", SEEN], "file": [str(tmp_path / "seen.py")], "module": ["-m", "seen"]}[how]
    words = [sys.executable, *program, "a", "--b"]
    options = {
        "cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": "lib", "ONE": "1"}, "capture_output": True, "text": True,
        "start_new_session": how == "code",
    }  # fmt: skip
    new = subprocess.run(words, stdin=subprocess.DEVNULL, **options)
    forked = processes.run(words, stdin=subprocess.DEVNULL, **options)
    assert (forked.returncode, forked.stdout, forked.stderr) == (7, new.stdout, new.stderr)
    assert new.returncode == 7


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_signals_end_it(how: int) -> None:
    code = "import time; print('here', flush=True); time.sleep(1000)"
    with processes.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        assert process.poll() is None
        process.send_signal(how)
        errors = process.communicate()[1]
    assert process.returncode == -how
    assert (b"KeyboardInterrupt" in errors) == (how == signal.SIGINT)


@pytest.mark.full
def test_an_error_is_printed_and_a_loader_serves_again() -> None:
    for _ in range(2):
        done = processes.run([sys.executable, "-c", "1 / 0"], capture_output=True, text=True)
        assert done.returncode == 1
        assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
