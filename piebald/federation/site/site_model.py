"""The model that a site has at the end of a run, ready to predict (`site_choice` says which files it consists of)."""

from __future__ import annotations

from pathlib import Path

import torch

from piebald.contracts import Rows
from piebald.core import pytree
from piebald.core.errors import SettingError
from piebald.core.files import read_json
from piebald.core.metrics import best_on_validation, cross_entropy
from piebald.core.objective import OBJECTIVES, Objective
from piebald.data.clients.prepared import Standardisation
from piebald.data.clients.sites import SiteClients
from piebald.data.preparation import PrepareSettings
from piebald.experiments.file import ExperimentSettings
from piebald.federation.hub.run_terms import RunTerms
from piebald.federation.site.site_choice import DESCRIPTION, WEIGHTS
from piebald.federation.site.site_process import site_work, with_own_tokenizer, with_own_weights
from piebald.models.prediction import OutputMeaning, Predictor, RawInputs

_NEIGHBOURS = "knn-per.json"


def site_predictor(folder: Path) -> Predictor:
    """Return a site's model with the way from raw rows to predictions.

    Args:
        folder: the site's credentials, where its model lies; its rows are not read.

    Raises:
        SettingError: there is no model, its terms need what this site does not have or allow, or it counts on the
            site's own rows.
    """
    if (folder / _NEIGHBOURS).is_file() and "neighbours" in read_json(folder / _NEIGHBOURS):
        raise SettingError(f"the model in {folder} interpolates with the site's own rows, which are not read here")
    site = site_work(folder, None, None)
    try:
        description = read_json(folder / DESCRIPTION)
        terms = RunTerms.read(description["terms"], site.author)
        threshold = description.get("threshold")
        chosen = None if threshold is None else float(threshold["value"])
        if chosen is not None and not 0 < chosen < 1:
            raise ValueError("a threshold is a probability")
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, SettingError):
            raise
        raise SettingError(f"there is no model in {folder}: the site has taken part in no run to its end") from None
    number = terms.sites.index(site.credentials.party)
    terms, _ = with_own_weights(terms.of(number), site.settings.weights, folder)
    terms = with_own_tokenizer(terms, site.settings.weights, folder)
    terms.use_plugins(site.author)
    settings = ExperimentSettings.of_table(terms.experiment, "the run's experiment", site.author)
    settings.use_plugins()
    preparation = settings.prepare.agreed if isinstance(settings.prepare, PrepareSettings) else None
    tokens = settings.data.tokens or (preparation is not None and preparation.text is not None)
    like = _zeros(terms.own_shape, torch.int64 if tokens else torch.float32)
    target = (preparation and preparation.target_columns) or settings.data.target
    together = [len(target)] if isinstance(target, list) else []
    y = torch.zeros(1, *together, dtype=torch.float32 if terms.classes is None else torch.int64)
    clients = SiteClients(terms.clients, Rows(like, y), terms.classes)
    model = terms.model_of(settings, clients)
    model.layout.load(model.model, model.layout.read(folder / WEIGHTS))
    objective = OBJECTIVES.get(terms.objective) or Objective(terms.objective, cross_entropy)
    constants = settings.data.standardise
    meaning = OutputMeaning.of(objective, terms.outputs, terms.classes, target)
    meaning = meaning if preparation is None else meaning.in_unit_of(preparation)
    features = None if settings.data.features is None else tuple(settings.data.features)
    standardisation = constants if isinstance(constants, Standardisation) else None
    inputs = RawInputs(pytree.take(like, slice(0, 0)), features, preparation, standardisation, settings.extractor,
                       terms.clients[number])  # fmt: skip
    best_for = "" if threshold is None else best_on_validation(threshold["criterion"], "the site")
    return Predictor(model.model.eval(), inputs, meaning, chosen, best_for)


def _zeros(form: pytree.Form, dtype: torch.dtype) -> pytree.Tree:
    """Return one blank row of inputs of this form."""
    if pytree.is_single(form):
        return torch.zeros(1, *pytree.shapes(form)[0], dtype=dtype)
    if isinstance(form, dict):
        return {name: torch.zeros(1, *side) for name, side in form.items()}
    return tuple(torch.zeros(1, *side) for side in pytree.shapes(form))
