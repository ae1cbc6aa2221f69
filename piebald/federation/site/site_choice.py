"""A site's choice among models when its run has ended: made at the site, and told to nobody.

What it needs is written to the site's disk first.  So a site that is stopped meanwhile makes the choice when it is
started again, to the same bits, whether or not its server is still there.

    <credentials>/state/<run>/choice.safetensors   what is left to do: the models that the site received last
    <credentials>/model.safetensors                the model that it has chosen
    <credentials>/model.json                       the terms of its run, which say what model it is
    <credentials>/best-for-each.json               what was chosen and why, and what each candidate scored; or
                  knn-per.json                     the neighbours that count beside the model, see `choice.KnnPer`
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from piebald.contracts import OwnChoice
from piebald.core.private_files import write_private
from piebald.core.reading import opened_tensors
from piebald.federation.link.wire_format import file_of
from piebald.federation.site.client_store import ClientStore
from piebald.federation.site.task_runner import TaskRunner

LEFT, WEIGHTS, DESCRIPTION = "choice.safetensors", "model.safetensors", "model.json"

log = logging.getLogger("piebald.federation")


def describe_model(folder: Path, terms: bytes, version: int, threshold: Mapping[str, Any] | None = None) -> None:
    """Write what a model in a folder of credentials is, beside it.

    Args:
        folder: the site's credentials.
        terms: of the run.
        version: server steps made.
        threshold: from which probability of the second of two classes a row is taken for it, and by which criterion.
    """
    description = {"version": version, "threshold": threshold, "terms": json.loads(terms)}
    write_private(folder / DESCRIPTION, json.dumps(description))


def leave(store: ClientStore, terms: bytes, version: int, models: Mapping[str, Tensor]) -> None:
    """Write down that a run's choice is to be made.

    Args:
        store: the site's files in the run.
        terms: the run's terms.
        version: server steps made.
        models: "model" [s], the last model of the site's cluster, and "global" [s] where there are other clusters.
    """
    metadata = {"terms": terms.decode(), "version": str(version)}
    write_private(store.folder / LEFT, file_of(models, metadata))


def pending_choices(folder: Path) -> list[Path]:
    """The choices that are to be made; `folder` has a folder for each run."""
    return sorted(folder.glob(f"*/{LEFT}"))


def terms_of(path: Path) -> dict[str, Any]:
    """The terms of the run whose choice is to be made."""
    with opened_tensors(path) as file:
        return dict(json.loads(file.metadata()["terms"]))


def record_file(choice: OwnChoice) -> str:
    """The name of the file that says what was chosen."""
    return f"{choice.kind.replace('_', '-')}.json"


def make(path: Path, runner: TaskRunner, folder: Path) -> None:
    """Make a choice that is to be made.

    Args:
        path: what is left to do.
        runner: of the run.
        folder: the site's credentials, where the model goes.
    """
    with opened_tensors(path) as file:
        version, terms = int(file.metadata()["version"]), file.metadata()["terms"].encode()
        models = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    store, choice = ClientStore(path.parent), runner.work.choice
    assert choice is not None
    chosen, record = runner.choose(version, models, store.state(before=1 << 53), store.trained)
    target = folder / WEIGHTS
    runner.work.layout.save(chosen, target)
    describe_model(folder, terms, version)
    write_private(folder / record_file(choice), json.dumps({"version": version, **record}, indent=2))
    # last: after a crash the choice is made once more, from the same models
    path.unlink()
    log.info("the model after step %d is in %s: %s", version, target, record["why"])
