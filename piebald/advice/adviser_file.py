"""The experiment file of `piebald advise`."""

from __future__ import annotations

from typing import ClassVar

from piebald.experiments.file import ExperimentSettings


class AdviceSettings(ExperimentSettings):
    """An experiment file that needs no recipe: the adviser finds one, and those of the file are raced as well."""

    needs_recipe: ClassVar[bool] = False
