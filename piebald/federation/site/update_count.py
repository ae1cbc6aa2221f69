"""How many updates of its own training a site has sent, over all runs: each one spends some of its privacy budget."""

from __future__ import annotations

from pathlib import Path

from piebald.core.errors import RuntimeFault
from piebald.core.private_files import write_private
from piebald.core.reading.files import read_text


class UpdateCount:
    """A number in a file of the site.

    The same update delivered again is no new one.  An update for the same version is, since it has noise of its own.

    Args:
        path: the file; without it nothing was sent.

    Attributes:
        sent: how many updates may have left.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self.sent = int(read_text(path)) if path.exists() else 0
        except (OSError, ValueError):
            raise RuntimeFault(f"{path} holds no number: restore it from a backup") from None

    def add(self) -> None:
        """Count an update, on disk before it can leave: a crash between the two counts one too many, never too few."""
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        write_private(self._path, str(self.sent + 1))
        self.sent += 1

    def reject_reason(self, most: int | None) -> str | None:
        """Why no further update may leave where `most` may, or None."""
        if most is None or self.sent < most:
            return None
        return f"this site has sent {self.sent} updates in all runs and sends at most {most}"
