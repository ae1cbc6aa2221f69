"""One of two simulated parties as a separate process: python -m piebald.vertical.process RUN ROLE PLACE."""

from __future__ import annotations

import sys
from pathlib import Path

from piebald.core.errors import PiebaldError
from piebald.core.plain_text import printable


def main(arguments: list[str]) -> int:
    """Run one party, and print one sentence if it fails."""
    from piebald.vertical.party_store import read_settings
    from piebald.vertical.protocol import ROLES
    from piebald.vertical.transfer_runs import run_party
    from piebald.vertical.transfer_settings import TransferRuntime

    folder, role, place = arguments
    try:
        settings = read_settings(Path(folder))
        connection = {"credentials" if settings.runtime.has_credentials else "address": place}
        runtime = TransferRuntime(kind=settings.runtime.kind, timeout=settings.runtime.timeout, **connection)
        run_party(ROLES[ROLES.index(role)], settings.model_copy(update={"runtime": runtime}), folder, simulated=True)
    except PiebaldError as error:
        print(printable(error), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        # as a shell reports an interrupted process: 128 + SIGINT
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
