"""What commands do with an experiment file: load it, name its folder, and say how to go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piebald.cli.app import Interrupted
from piebald.core.errors import SettingError

if TYPE_CHECKING:
    from piebald.experiments.file import ExperimentSettings
    from piebald.experiments.plan import Plan


def load_settings(
    file: Path | None,
    sets: list[str] | None,
    out: str | None,
    runtime: str | None = None,
    deterministic: bool = False,
    kind: type[ExperimentSettings] | None = None,
) -> ExperimentSettings:
    """The settings of a file, or of the built-in experiment, with the flags of the command line."""
    from piebald.experiments.file import ExperimentSettings

    flags = list(sets or ())
    if deterministic:
        place = [] if runtime is None else [f"runtime.kind={runtime}"]  # so that --runtime keeps what is set below it
        flags = [*place, *flags, "runtime.deterministic=true"]
    return (kind or ExperimentSettings).load(file, flags, out=out, runtime=runtime)


def common_options(settings: ExperimentSettings, plan: Plan) -> dict[str, Any]:
    """The options that a run and a comparison share."""
    return {
        "rounds": settings.rounds,
        "stop": plan.stop,
        "runtime": plan.runtime,
        "evaluate_every": settings.evaluate.every,
        "evaluate_clients": settings.evaluate.clients,
        "evaluate_split": settings.evaluate.split,
        "per_class": settings.evaluate.per_class,
        "loss": settings.loss,
        "metrics": settings.evaluate.metrics,
        "keep": settings.keep,
        "unseen": settings.unseen,
        "checkpoint_every": settings.checkpoint_every,
        "measure": settings.measure,
        "max_examples": settings.max_examples,
        "max_weight": settings.max_weight,
        "trackers": settings.trackers,
        "settings": settings.table(),
        **({} if settings.longest_step is None else {"longest_step": settings.longest_step}),
    }


def out_folder(settings: ExperimentSettings, name: str | None = None) -> Path:
    """The folder to write to: as given, or the first free name under runs/."""
    if settings.out is not None:
        return Path(settings.out)
    name = name or settings.label or (settings.recipe.name if settings.recipe else "comparison")
    stem = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)
    folder = Path("runs") / stem
    number = 1
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{stem}-{number}"
    return folder


@contextmanager
def guarded(folder: Path, again: str, settings: ExperimentSettings | None = None) -> Iterator[None]:
    """Print how to continue after Ctrl-C, and add the place in the settings to an error about a setting."""
    try:
        yield
    except KeyboardInterrupt:
        if not folder.exists():
            raise Interrupted("interrupted before anything was written") from None
        raise Interrupted(f"interrupted; completed server steps are saved, continue with: {again}") from None
    except SettingError as error:
        raise (settings.located(error) if settings else error) from None
