"""Install the wheel in empty environments and do what README says: python tests/release_check.py DIST.

One environment for each Python from 3.11 to 3.13 that is on this machine; at least one must be.  What pip installs is
chosen by constraints.txt.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
VERSIONS = ("3.11", "3.12", "3.13")


def main(dist: Path) -> int:
    """Check the wheel in a folder; returns the exit code."""
    (wheel,) = dist.glob("*.whl")
    checked = [version for version in VERSIONS if _is_checked(version, wheel.resolve())]
    print(f"checked {wheel.name} on Python {', '.join(checked) or 'none'}")
    missing = [version for version in VERSIONS if version not in checked]
    if missing:
        print(f"not on this machine: Python {', '.join(missing)}: check there before a release")
    return 0 if checked else 1


def _is_checked(version: str, wheel: Path) -> bool:
    """Install the wheel and run it; False where this Python is not here."""
    name = shutil.which(f"python{version}")
    if name is None or subprocess.run([name, "-c", ""], capture_output=True, check=False).returncode:
        return False
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        _run([name, "-m", "venv", folder / "env"], folder)
        python = folder / "env" / "bin" / "python"
        _run([python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel], folder)
        piebald = folder / "env" / "bin" / "piebald"
        _run([piebald, "--version"], folder)
        _run([python, ROOT / "examples" / "demo.py", "--help"], folder)
        for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL):
            if language == "python":
                _run([python, "-c", text], folder)
            elif language == "toml":
                (folder / text.split()[1]).write_text(text, "utf-8")
            elif language == "console":
                for command in text.splitlines():
                    _run([folder / "env" / "bin" / command.split()[1], *shlex.split(command)[2:]], folder)
    return True


def _run(command: list[str | Path], folder: Path) -> None:
    print("+", *command, flush=True)
    subprocess.run([*map(str, command)], cwd=folder, check=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
