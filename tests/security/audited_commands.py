"""A process that runs commands in a folder of a stranger and writes down which Python code of that folder it touches.

The current folder is first on its path, as with `python -m`.  What is written down is reported by Python itself, in
this process and in those forked from it: code that runs, and files of code that are opened.
"""

from __future__ import annotations

import json
import os
import sys


def watch(folder: str, log: int) -> None:
    """Write each piece of Python code in a folder that runs or is opened to an open file."""

    def hook(event: str, given: tuple[object, ...]) -> None:
        if event == "exec":
            path = getattr(given[0], "co_filename", "")
        elif event == "open" and isinstance(given[0], str | bytes):
            path = os.fsdecode(given[0])
        else:
            return
        if (
            path.endswith((".py", ".pyc", ".so", ".pth"))
            and os.path.abspath(path).startswith(folder)
            and "<" not in path
        ):
            os.write(log, f"{event} {path}\n".encode())

    sys.addaudithook(hook)


def main() -> None:
    """Run the commands on standard input, and print the exit code of each."""
    sys.path.insert(0, "")
    watch(os.getcwd() + os.sep, os.open(os.environ["SEEN"], os.O_WRONLY | os.O_APPEND | os.O_CREAT))
    codes = []
    for words in json.loads(sys.stdin.read()):
        sys.argv = ["piebald", *words]
        from piebald.cli import main as piebald

        codes.append(piebald())
    print(json.dumps(codes))


if __name__ == "__main__":
    main()
