"""The attacks on the commit before: python benchmarks/robustness/before.py

Unpacks the commit that the audit read into a temporary folder and runs short programs there, each an attack of a line
of `tests/security/README.md`.  They print what they got; the tests of that line show that it is not to be had any more.
Other lines are shown in the tests themselves, which run the same attack with the defence taken out, and succeed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = tomllib.loads(Path(__file__).with_name("before.toml").read_text("utf-8"))


def main() -> None:
    """Run all programs on the old commit."""
    with tempfile.TemporaryDirectory() as folder:
        packed = subprocess.run(["git", "archive", PROGRAMS["commit"]], cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", folder], input=packed.stdout, check=True)
        environment = os.environ | {"PYTHONPATH": folder, "PYTHONWARNINGS": "ignore"}
        for attack in PROGRAMS["attacks"]:
            program = PROGRAMS["site"] * attack.get("site", False) + attack["program"]
            command = [sys.executable, "-c", program]
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            said = done.stdout.strip().splitlines() or done.stderr.strip().splitlines()[-1:]
            print(attack["name"], *(f"    {line}" for line in said), sep="\n", flush=True)


if __name__ == "__main__":
    main()
