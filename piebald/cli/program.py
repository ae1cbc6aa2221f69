"""The commands together, and how their errors end."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import typer
import typer.main

from piebald.cli.app import app
from piebald.core.errors import PiebaldError
from piebald.core.files import UnfitFile
from piebald.core.plain_text import printable
from piebald.core.progress import line_clock

# importing a module registers its commands, in the order of `piebald --help`
from piebald.cli import train  # noqa: F401  # isort: skip
from piebald.cli import transfer  # noqa: F401  # isort: skip
from piebald.cli import predicting  # noqa: F401  # isort: skip
from piebald.cli import choose  # noqa: F401  # isort: skip
from piebald.cli import federate  # noqa: F401  # isort: skip
from piebald.cli import queueing  # noqa: F401  # isort: skip
from piebald.cli import show  # noqa: F401  # isort: skip
from piebald.cli import statistics  # noqa: F401  # isort: skip
from piebald.cli import regression  # noqa: F401  # isort: skip


_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)  # what an operator can mend
_PLACE = (PermissionError, NotADirectoryError, FileExistsError, FileNotFoundError, IsADirectoryError)  # and a user


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, see `piebald.cli.main`."""
    words = list(sys.argv[1:] if argv is None else argv)
    line_clock.reset()  # a process may run several commands, which tell nothing about each other
    try:
        code = _command()(words or ["--help"], prog_name="piebald", standalone_mode=False)
        # inside the block, so that a reader that has gone is noticed here and not when Python ends
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); without this, Python would fail again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except PiebaldError as error:
        return _fail(str(error), error.exit_code)
    except typer.TyperException as error:
        return _fail(_usage(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", 130)
    except UnfitFile as error:
        return _fail(": ".join(filter(None, (error.filename, str(error)))), 2)
    except OSError as error:
        if error.errno not in _DISK and not (isinstance(error, _PLACE) and error.filename):
            return _unexpected(error)
        path, reason = error.filename or "a file", (error.strerror or "").lower()
        remedy = "make room or mend it" if error.errno in _DISK else "name another place"
        remedy = "change its permissions" if isinstance(error, PermissionError) else remedy
        return _fail(f"{path} cannot be written or read ({reason}): {remedy}, and run the command again", 2)
    except Exception as error:
        return _unexpected(error)
    finally:
        if argv is None and threading.current_thread() is threading.main_thread():
            # what there was to save is saved: a second Ctrl-C ends the process without a traceback of its exit
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if code == 130:
        return _fail("interrupted", 130)
    return code if isinstance(code, int) else 0


def _usage(error: typer.TyperException) -> str:
    """Return what is wrong with the options; those that are keys of an experiment file are given by --set."""
    from piebald.core.arguments import plain
    from piebald.data.clients.table_files import is_table
    from piebald.experiments.recipes import ExperimentFields
    from piebald.experiments.run_settings import KEYS
    from piebald.methods.training import Sgd

    context: Any = getattr(error, "ctx", None)
    message = plain(error.format_message())
    if message.startswith("Usage:"):  # a group alone, whose help is not one sentence
        return f"{context.command_path} needs a command: {', '.join(context.command.list_commands(context))}"
    if message.startswith("Got unexpected extra argument"):
        further = [Path(word) for word in message.rpartition("(")[2].rstrip(")").split()]
        if further and all(map(is_table, further)):
            table = further[0]
            return (
                f"{context.command_path} takes one FILE: of several tables a pattern in quotes, such as "
                f"'{table.with_name('*' + table.suffix)}' or '*/{table.name}', which the shell leaves as it is"
            )
    option = str(getattr(error, "option_name", "")).lstrip("-").replace("-", "_")
    keys = {name: f"recipe.{name}" for name in Sgd.model_fields} | {
        name: name for name in ExperimentFields.model_fields
    }
    keys |= {name: ".".join(key) for name, key in KEYS.items()}
    if option in keys and message.startswith("No such option"):
        return f"there is no option --{option}: write --set {keys[option]}=VALUE"
    return message


@cache
def _command() -> Callable[..., Any]:
    """Return the command line as an object, which reads the signatures of all commands once a process."""
    return typer.main.get_command(app)


def _unexpected(error: Exception) -> int:
    hint = "set PIEBALD_DEBUG=1 for a traceback"
    return _fail(f"unexpected error: {type(error).__name__}: {error} ({hint})", 1)


def _fail(message: str, code: int) -> int:
    if os.environ.get("PIEBALD_DEBUG") and code != 130:
        traceback.print_exc()
    print(printable(message), file=sys.stderr)
    return code
