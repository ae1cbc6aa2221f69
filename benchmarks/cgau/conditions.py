"""The paper's conditions beside those of a run, for `run.py --dry-run`; the latter are read from the settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import settings
import xor
from shared.conditions import LEGEND, beside, filled


def printed(scale: str) -> str:
    """Return the conditions of a scale, as text."""
    full = scale == "full"
    tasks = {
        "images": settings.PAPER_IMAGE_TASK if full else settings.IMAGE_TASK,
        "rare": settings.PAPER_RARE_TASK if full else settings.RARE_TASK,
    }
    here: dict[str, Any] = {"settings": settings, "models": len(xor.MODELS), "starts": xor.STARTS, **tasks}
    for name, task in tasks.items():
        here[f"{name}_steps"] = next(iter(task.local.values()), "one epoch")
        here[f"{name}_rates"] = " and ".join(f"{rate:g}" for rate in dict.fromkeys(task.rates.values()))
    here |= {
        "rows": "all: 50,000 and the published test part" if full else f"{settings.MORE_ROWS:,} (and 8,000)",
        "image_seeds": len(settings.PAPER_IMAGE_SEEDS if full else settings.MORE_SEEDS),
        "rare_seeds": len(settings.PAPER_RARE_SEEDS if full else settings.RARE_SEEDS),
        "levels": ", ".join(f"{one:g}" for one in sorted(settings.SHUFFLES if full else settings.MORE_SHUFFLES)),
        "validation": "20 %" if full else f"{settings.VALIDATION:.0%}",
    }
    lines = []
    for title, rows in filled(Path(__file__).with_name("conditions.toml"), **here):
        lines += ["", title, f"  {'':14} {'paper':36} here", *beside(rows, 14, 36)]
    return "\n".join([*lines[1:], *LEGEND])
