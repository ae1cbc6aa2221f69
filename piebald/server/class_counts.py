"""Right and wrong answers by class, which clients are asked for at the version that a run ends with."""

from __future__ import annotations

from collections.abc import Sequence

from piebald.contracts import Clients, Personalizes, Result, Split
from piebald.core.errors import SettingError
from piebald.methods.client_work import ClientWork
from piebald.methods.queries.confusion import Confusion, counted
from piebald.server.records import TableRow

MOST_CLASSES = 100
MOST_CLIENTS = 1_000


def class_query(
    wanted: bool | None, work: ClientWork, clients: Clients, split: Split, asked: int, simulates: bool
) -> Confusion | None:
    """The query, None where nothing is to be counted.

    Args:
        wanted: True or False as the user says; None counts in simulations, as far as it costs little.
        work, clients: what is trained, by whom.
        split: the rows that models are judged by.
        asked: how many clients are evaluated, 0 for none.
        simulates: whether all rows are on this machine; else each site's policy must name the query.

    Raises:
        SettingError: counts are wanted and there can be none.
    """
    if wanted is False or (wanted is None and not simulates):
        return None
    classes, why = len(clients.classes or ()), None
    if not asked:
        why = "needs evaluations: set evaluate_every to 1 or more"
    elif not work.objective.classifies or not classes or tuple(work.outputs) != (classes,):
        why = "needs classes, and a model with an output for each"
    elif not simulates and work.choice is not None:
        why = f"does not fit keep = {work.choice.kind!r} in a federation, whose sites tell nobody what they chose"
    elif not 2 <= classes <= MOST_CLASSES:
        why = f"is for 2 to {MOST_CLASSES} classes, there are {classes}"
    elif asked > MOST_CLIENTS:
        why = f"is for at most {MOST_CLIENTS:,} clients, {asked:,} are evaluated: set evaluate_clients"
    if why is None:
        return Confusion(split=split, classes=classes)
    if wanted:
        raise SettingError(f"per_class {why}, or leave it out")
    return None


def confusion_rows(answers: Sequence[Result], version: int, work: ClientWork) -> list[TableRow]:
    """Answers to the query as rows of the table `confusion`."""
    model = "personal" if isinstance(work.trainer, Personalizes) or work.layout.private else "global"
    return [
        row
        for one in answers
        if one.update is not None and isinstance(one.task.query, Confusion)
        for row in counted(version, one.task.client, model, one.task.query.split, one.update.vectors["confusion"])
    ]
