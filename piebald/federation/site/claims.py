"""What the runs of a site need of its machine, and that all of them at once need no more than its policy says it has.

<credentials>/needs.json, <credentials>/jobs/<slot>/needs.json    of the run that the process of this slot takes part in
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from piebald.core.files import read_json
from piebald.core.private_files import held_alone, write_private
from piebald.federation.credentials.slots import FOLDER, MOST, slot_of
from piebald.federation.link.wire_format import Needs
from piebald.federation.operate.status import running_process

_FILE = "needs.json"


class Jobs(BaseModel):
    """Runs at once at this site.  The server's queue starts those that fit, and the site takes part in no others.

    Attributes:
        at_once: how many.
        gpus: graphics cards for all of them together.
        gigabytes: memory for all of them together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    at_once: int = Field(default=1, ge=1, le=MOST)
    gpus: int = Field(default=0, ge=0, le=1024)
    gigabytes: float = Field(default=0.0, ge=0, le=1e6)

    def reject_reason(self, needs: Needs, beside: Iterable[Needs] = ()) -> str | None:
        """Return the reason why a run needs more than this site has beside its other runs, or None."""
        others = [*beside]
        for name, what in (("gpus", "graphics cards"), ("gigabytes", "gigabytes of memory")):
            wants, has, taken = getattr(needs, name), getattr(self, name), sum(getattr(one, name) for one in others)
            if wants and wants + taken > has:
                rest = f", of which its other runs have {taken:g}" if taken else ""
                return (
                    f"runtime.needs has {name} = {wants:g}, and this site states {has:g} {what}{rest}: ask for less, "
                    f"or have its owner state more (jobs = {{ {name} = ... }} in its [policy])"
                )
        return None


def claim(folder: Path, jobs: Jobs, needs: Needs) -> str | None:
    """Note what a run needs, beside those of the site's other processes; return why it is too much, or None.

    Args:
        folder: of the slot.
        jobs: what the site has.
        needs: of the run; those of the run before it are given back, also where this one is refused.

    Raises:
        OSError: it cannot be noted.
    """
    site = folder.parent.parent if slot_of(folder) else folder
    with held_alone(site / _FILE):
        others = [path for path in (site, *(site / FOLDER).glob("[0-9]*")) if path.resolve() != folder.resolve()]
        beside = [_read(path) for path in others if running_process(path) is not None]
        reason = jobs.reject_reason(needs, beside)
        write_private(folder / _FILE, (Needs() if reason else needs).model_dump_json(), lasting=False)
    return reason


def _read(folder: Path) -> Needs:
    try:
        values: Any = read_json(folder / _FILE)
        return Needs.model_validate(values)
    except (OSError, ValueError):
        return Needs()
