"""Pretrained weights at a site: its own folder, or this machine's cache of the Hub, by the name in a run's terms."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from piebald.core.errors import SettingError, shown
from piebald.federation.hub.run_terms import RunTerms
from piebald.models.weights_folder import cached

log = logging.getLogger("piebald.federation")


def with_own_weights(terms: RunTerms, weights: Mapping[str, str], folder: Path) -> tuple[RunTerms, Path | None]:
    """The terms with this site's own folder in place of the weights that the experiment names, and that folder.

    A site opens no path that a server gives it, and downloads nothing at its word.

    Args:
        terms: the run's terms.
        weights: the site's folders, by the experiment's name of the weights.
        folder: what they are relative to.

    Raises:
        SettingError: the site has no such weights.
    """
    model = terms.experiment.get("model")
    if not isinstance(model, Mapping) or model.get("name") != "pretrained":
        return terms, None
    name, revision = model.get("weights"), model.get("revision")
    if isinstance(name, str) and name in weights:
        own = (folder / weights[name]).resolve()
    else:
        found = cached(name, revision) if isinstance(name, str) and isinstance(revision, str | None) else None
        if found is None:
            at = "" if revision is None else f" of revision {shown(revision)}"
            raise SettingError(
                f"this site does not have the weights {shown(name)}{at}: name their folder in [weights] of its "
                "site.toml, or put them into the Hugging Face Hub's cache"
            )
        own = found.path.resolve()
    changed = {key: value for key, value in model.items() if key != "revision"} | {"weights": str(own)}
    return terms.model_copy(update={"experiment": {**terms.experiment, "model": changed}}), own


def told(why: str, own: Path | None) -> str:
    """What the server is told about an error: no path of this site."""
    if own is None or str(own) not in why:
        return why
    log.warning("the weights cannot be used: %s", why)
    return "its own weights cannot be used for this run; the site's own log says why"
