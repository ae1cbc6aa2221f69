"""The paper's conditions beside those of a run, for `run.py --dry-run`; the latter are read from the settings."""

from __future__ import annotations

import settings
import xor
from settings import TaskSettings


def printed(scale: str) -> str:
    """Return the conditions of a scale, as text."""
    full = scale == "full"
    images, rare = (
        (settings.PAPER_IMAGE_TASK, settings.PAPER_RARE_TASK) if full else (settings.IMAGE_TASK, settings.RARE_TASK)
    )
    image_rows = "all: 50,000 and the published test part" if full else f"{settings.MORE_ROWS:,} (and 8,000)"
    image_seeds = settings.PAPER_IMAGE_SEEDS if full else settings.MORE_SEEDS
    rare_seeds = settings.PAPER_RARE_SEEDS if full else settings.RARE_SEEDS
    levels = settings.SHUFFLES if full else settings.MORE_SHUFFLES
    sections = {
        "Experiment I (Fig. 2a, table 1)": [
            (
                "data",
                "FSD 2018, cough against 40 classes",
                "Speech Commands, one word, where here; or HAR, one activity",
            ),
            ("embedding", "YamNet, 1024", "log-mel, 80; or 90 features of each window"),
            *_task(rare, "64", "1000", "32", "10", "not printed"),
            ("clients", "10, all in each round", f"{settings.CLIENTS}, all in each round"),
            ("shuffled", "0 to 1 by 0.2", "0 to 1 by 0.2"),
            ("repetitions", "12", str(len(rare_seeds))),
            ("validation", "5 %", "5 %"),
        ],
        "Experiment II (Fig. 2b)": [
            ("data", "CIFAR-10", f"CIFAR-10, rows: {image_rows}"),
            ("embedding", "Inception at 299 pixels", f"SqueezeNet at {settings.SIDE} pixels"),
            *_task(images, "128", "500 epochs, read as rounds", "32", "10", "0.01"),
            ("clients", "10, all in each round", f"{settings.CLIENTS}, all in each round"),
            ("shuffled", "0 to 1 by 0.2", ", ".join(f"{level:g}" for level in sorted(levels))),
            ("repetitions", "5", str(len(image_seeds))),
            ("validation", "20 %", "20 %" if full else f"{settings.VALIDATION:.0%}"),
        ],
        "Appendix A (Fig. 3)": [
            ("clients", "up and down: the two half-planes", "the same"),
            ("models", "MLP of two units, one gated unit", f"{len(xor.MODELS)}, these among them"),
            ("starts", "1 (not printed)", str(xor.STARTS)),
        ],
    }
    lines = []
    for title, rows in sections.items():
        lines += ["", title, f"  {'':14} {'paper':36} here"]
        lines += [f"  {name:14} {paper:36} {here}{'' if paper == here else '   *'}" for name, paper, here in rows]
    return "\n".join([*lines[1:], "", "* differs from the paper, or says more than it"])


def _task(task: TaskSettings, units: str, rounds: str, batch: str, steps: str, rate: str) -> list[tuple[str, str, str]]:
    here = "one epoch" if task.steps is None else str(task.steps)
    rates = " and ".join(f"{rate:g}" for rate in dict.fromkeys(task.rates.values()))
    return [
        ("units", f"{units}, two layers", f"{task.units}, two layers"),
        ("dropout", "0.5", "0.5"),
        ("rounds", rounds, str(task.rounds)),
        ("batch", batch, str(task.batch)),
        ("steps a round", f"{steps}, or one epoch if less", here),
        ("learning rate", rate, rates),
        ("momentum", "not printed", f"{settings.MOMENTUM:g}, anew in each round"),
        ("kept", "least validation loss", "least validation loss; the last is reported, too"),
    ]
