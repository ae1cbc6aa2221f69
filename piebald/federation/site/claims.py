"""What the runs of a site need of its machine, and that all of them at once need no more than its policy says it has.

<credentials>/needs.json, <credentials>/jobs/<slot>/needs.json    of the run that the process of this slot takes part in
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from piebald.core.files import read_json
from piebald.core.private_files import held_alone, write_private
from piebald.federation.credentials.slots import FOLDER, slot_of
from piebald.federation.link.wire_messages import Needs
from piebald.federation.operate.status import running_process
from piebald.federation.site.policy import Jobs

_FILE = "needs.json"


def claim(folder: Path, jobs: Jobs, needs: Needs) -> str | None:
    """Note what a run needs, beside those of the site's other processes; return why it is too much, or None.

    Args:
        folder: of the slot.
        jobs: what the site has.
        needs: of the run; those of the run before it are given back, also where this one is refused.

    Raises:
        OSError: it cannot be noted.
    """
    whole = folder.parent.parent if slot_of(folder) else folder
    with held_alone(whole / _FILE):
        others = [place for place in (whole, *(whole / FOLDER).glob("[0-9]*")) if place.resolve() != folder.resolve()]
        beside = [_read(place) for place in others if running_process(place) is not None]
        reason = jobs.reject_reason(needs, beside)
        write_private(folder / _FILE, (Needs() if reason else needs).model_dump_json(), lasting=False)
    return reason


def _read(folder: Path) -> Needs:
    try:
        values: Any = read_json(folder / _FILE)
        return Needs.model_validate(values)
    except (OSError, ValueError):
        return Needs()
