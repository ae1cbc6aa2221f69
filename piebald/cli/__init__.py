"""The command line: one file a group of commands, and the options that commands share in `app`.

Heavy packages are imported inside the commands that need them, so `piebald --help` is fast.  Nothing here computes: a
command reads a file and flags, calls what Python users call, and prints.  This file imports nothing of others, so that
`main` can take the current folder from Python's path first.
"""

from __future__ import annotations

from collections.abc import Sequence

from piebald.core.module_path import forget_current_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 (failure), 2 (bad input) or 130 (Ctrl-C).

    Args:
        argv: the words after `piebald`, by default those of this process.
    """
    if argv is None:  # this process is the command's own
        forget_current_folder()
    from piebald.cli.program import main

    return main(argv)
