"""Predictions for raw rows: a table becomes a model's inputs, and the model's outputs become answers with names."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from piebald.contracts import Rows
from piebald.core import pytree
from piebald.core.arguments import checked_class
from piebald.core.errors import SettingError, shown
from piebald.core.objective import Objective
from piebald.core.reading import read_arrays
from piebald.core.targets import IGNORED
from piebald.data.clients.client_tables import is_table, numbers_of, read_table
from piebald.data.clients.convert import floats, input_arrays
from piebald.data.clients.owner import is_frame
from piebald.data.clients.prepared import Standardisation
from piebald.data.clients.table_files import KINDS_OF_FILES
from piebald.data.embeddings import embedding
from piebald.data.preparation import Preparation
from piebald.data.preparation.preparation import NumberTarget, Tell, warn
from piebald.data.preparation.tokens import tokenizer_json
from piebald.report.export.raw_rows import Scoring
from piebald.storage.run_folder import TOKENIZER

if TYPE_CHECKING:
    import pandas as pd

_log = logging.getLogger("piebald.models")
BLOCK = 2048  # rows in a forward pass
HOTTEST = 20.0  # temperatures lie between this and its inverse
AnswerKind = Literal["classes", "labels", "values", "rates", "risk", "places"]


@checked_class
@dataclass(frozen=True, slots=True, eq=False)
class OutputMeaning:
    """The meaning of a model's outputs.

    Attributes:
        kind: "classes" have one probability each, which sum to 1; "labels" have one each by themselves; "values" are
            numbers in the target's unit; "rates" are counts for one unit of exposure; a "risk" is the logarithm
            of a hazard, relative to that of other rows; "places" of a sequence have the name of a class each.
        names: of the columns of the answers, or of the classes of places.
        temperature: by which scores of classes and labels are divided (Guo et al. 2017), above 0.
        mean, deviation: of values, where the model predicts their standard scores; of each where there are several.
    """

    kind: AnswerKind
    names: tuple[str, ...]
    temperature: float = 1.0
    mean: float | tuple[float, ...] = 0.0
    deviation: float | tuple[float, ...] = 1.0

    @classmethod
    def of(
        cls, objective: Objective, outputs: Sequence[int], classes: Sequence[str] | None,
        target: str | Sequence[str] | None,
    ) -> Self:  # fmt: skip
        """Return the meaning of outputs of this shape under an objective.

        Raises:
            SettingError: outputs are no answers, as those of a language model.
        """
        width = math.prod(outputs)
        # before all others: a vocabulary has a width like classes, and would pass for them
        if objective.name == "language_modelling":
            raise SettingError(
                "a language model's outputs are tokens and no predictions of rows: call run.model(...) and generate"
            )
        if objective.name == "survival":
            return cls("risk", ("risk",))
        if objective.name == "counts":
            return cls("rates", ("rate",) if target is None or not isinstance(target, str) else (target,))
        name = target if isinstance(target, str) else "target"
        numbered = (name,) if width == 1 else tuple(f"{name}{number}" for number in range(width))
        if target is not None and not isinstance(target, str) and len(target) == width:
            numbered = tuple(target)
        if objective.name == "multilabel":
            return cls("labels", tuple(classes) if classes is not None and len(classes) == width else numbered)
        if objective.name == "token_classification":
            return cls("places", tuple(classes or map(str, range(outputs[-1]))))
        # without names, or with one output for several classes, there is no softmax to read
        if classes is None or not objective.classifies or len(outputs) > 1 or width < min(len(classes), 2):
            return cls("values", numbered)
        spare = (f"output {number}" for number in range(len(classes), width))
        return cls("classes", (*classes, *spare))

    def in_unit_of(self, preparation: Preparation) -> Self:
        """Return the same meaning, with values in the unit of the target that a preparation has scaled."""
        target = preparation.target
        if not isinstance(target, NumberTarget) or self.kind != "values":
            return self
        mean, deviation = target.constants
        return replace(self, mean=mean, deviation=deviation)

    def answers(self, outputs: Tensor) -> Tensor:
        """Return the numbers [n, names] that outputs [n, ...] mean, float64."""
        # float64, since probabilities near 1 lose their difference from it in float32
        flat = (outputs.flatten(1) if outputs.dim() > 1 else outputs[:, None]).double()
        if self.kind == "classes":
            return functional.softmax(flat / self.temperature, dim=1)
        if self.kind == "labels":
            return torch.sigmoid(flat / self.temperature)
        if self.kind == "rates":
            return flat.exp()
        if self.kind != "values":
            return flat
        return flat * torch.tensor(self.deviation, dtype=flat.dtype) + torch.tensor(self.mean, dtype=flat.dtype)

    def table(self, outputs: Tensor) -> dict[str, NDArray[Any]]:
        """Return the answers of outputs [n, ...], by the names of columns."""
        if self.kind == "places":
            names = np.array(self.names, dtype=object)
            return {f"place {index}": names[column] for index, column in enumerate(outputs.argmax(-1).T.numpy())}
        return dict(zip(self.names, self.answers(outputs).numpy().T, strict=True))

    def calibrated(self, outputs: Tensor, targets: Tensor) -> Self:
        """Return the same meaning with the temperature of the lowest loss on labelled rows.

        Args:
            outputs: [n, ...].
            targets: class numbers [n], or labels [n, labels]; those that are not known count nowhere.

        Raises:
            SettingError: outputs are no scores, or no row has a target.
        """
        from scipy.optimize import minimize_scalar

        if self.kind not in ("classes", "labels"):
            raise SettingError("calibrate divides scores of classes by a temperature, and this model has none")
        # class numbers are missing as a number, and labels also as NaN
        known = (targets != IGNORED) & ~torch.isnan(targets.double())
        if not bool(known.any()):
            raise SettingError("calibrate needs validation rows with a target, and there are none")
        scores, labels = (outputs.double()[known], targets[known]) if self.kind == "classes" else (
            outputs.double().reshape(targets.shape)[known], targets[known].double())  # fmt: skip
        measure: Any = (
            functional.cross_entropy if self.kind == "classes" else functional.binary_cross_entropy_with_logits
        )
        # in the logarithm, so that a temperature stays above 0, and halving is as far as doubling
        edge = float(np.log(HOTTEST))
        best = minimize_scalar(
            lambda power: float(measure(scores / np.exp(power), labels)), bounds=(-edge, edge), method="bounded"
        )
        return replace(self, temperature=float(np.exp(best.x)))


@checked_class
@dataclass(frozen=True, slots=True, eq=False)
class RawInputs:
    """The way from rows as a source has them to a model's inputs.

    Attributes:
        like: no rows of the inputs that the model reads, for their form.
        features: the columns of a table, in the order of inputs; None where they have no names.
        preparation: how the columns of a table become inputs, None where they are numbers already.
        standardisation: constants of standard scores, or None.
        extractor: the frozen extractor before the model, by its name or reference, or None.
        client: whose rows they are, where a preparation harmonises numbers.
    """

    like: Any
    features: tuple[str, ...] | None = None
    preparation: Preparation | None = None
    standardisation: Standardisation | None = None
    extractor: str | None = None
    client: str | None = None

    def read(self, rows: Any, tell: Tell = warn) -> Any:
        """Return the inputs [n, ...] of rows.

        Args:
            rows: a pandas DataFrame, whose columns are found by their names; the path of a table or of an .npz file
                with an array x; or inputs as arrays or tensors.
            tell: takes sentences about how rows were cleaned, and how they are unlike those of training.

        Raises:
            SettingError: a column or a number is missing, or inputs have another form.
        """
        if isinstance(rows, str | Path):
            rows = self.in_file(Path(rows))
        tokens = any(leaf.dtype == torch.int64 for leaf in pytree.leaves(self.like))
        if self.preparation is not None:
            # an array has no names, so its columns are taken to be in the order of training
            frame = rows if is_frame(rows) else self._frame(rows)
            frame = self.preparation.cleaned(frame, self.client, tell)
            return self._checked(torch.from_numpy(self.preparation.transform(frame, self.client)))
        if is_frame(rows):
            if self.features is None:
                raise SettingError(
                    "the run has no names of columns, so that a table cannot be read: give arrays of inputs instead"
                )
            rows = numbers_of(rows, self.features, tokens)
        x = floats(pytree.mapped(torch.from_numpy, input_arrays(rows, "rows to predict", tokens)))
        # in the order of training: features first, as standard scores are those of features
        if self.extractor is not None:
            x = embedding(self.extractor, x)
        if self.standardisation is not None:
            x = self.standardisation.applied(x)
        return self._checked(x)

    def in_file(self, path: Path) -> Any:
        """Return the rows in a file: a table, whose columns are read as those of training, or the array x."""
        if is_table(path):
            return read_table(path, None, () if self.preparation is None else self.preparation.as_written)
        if path.suffix != ".npz":
            raise SettingError(f"rows to predict must be in a table ({KINDS_OF_FILES}) or .npz file, got {shown(path)}")
        arrays = read_arrays(path)
        if "x" not in arrays:
            raise SettingError(f"{path} must hold an array x, got {', '.join(arrays) or 'none'}")
        return arrays["x"]

    def _frame(self, rows: Any) -> pd.DataFrame:
        """Return an array of the columns that are prepared, in their order, as a table."""
        import pandas as pd

        assert self.preparation is not None
        values, columns = np.asarray(rows), self.preparation.names_in
        if values.ndim != 2 or values.shape[1] != len(columns):
            raise SettingError(f"rows must be a table, or [n, {len(columns)}] in its order, got {list(values.shape)}")
        return pd.DataFrame(values, columns=columns)

    def _checked(self, x: Any) -> Any:
        if pytree.kinds(x) != pytree.kinds(self.like):
            raise SettingError(
                f"rows must be {pytree.rows_of(self.like)}, as those of the run, got {pytree.rows_of(x)}"
            )
        return x


@checked_class
@dataclass(frozen=True, slots=True, eq=False)
class Predictor:
    """A trained model with the way from raw rows to its inputs, and from its outputs to answers.

    Attributes:
        module: the model.
        inputs: how rows become inputs.
        meaning: what its outputs mean.
        threshold: the probability of the second of two classes from which a row is taken for it, before any
            temperature; None where predictions name no class.
        criterion: what the threshold is the best for, and on which rows, in words.
    """

    module: nn.Module
    inputs: RawInputs
    meaning: OutputMeaning
    threshold: float | None = None
    criterion: str = ""

    @property
    def naming(self) -> str:
        """The way in which predictions name the class, in words; empty where they name none."""
        if self.threshold is None:
            return ""
        shown = "" if self.meaning.temperature == 1 else " before calibration"
        return f"class: {self.meaning.names[1]} above a probability of {self.threshold:.3g}{shown}, {self.criterion}"

    def predict(self, rows: Any, tell: Tell = warn) -> pd.DataFrame:
        """Return predictions for rows, one row for each of them.

        Args:
            rows, tell: see `RawInputs.read`.

        Returns:
            A column for the probability of each class by its name, or for each number to predict, and with a threshold
            the class, as "class".  A table's row labels are kept.

        Raises:
            SettingError: see `RawInputs.read`.
        """
        import pandas as pd

        if isinstance(rows, str | Path):
            rows = self.inputs.in_file(Path(rows))
        # before the rows become inputs, which have no labels
        index = rows.index if is_frame(rows) else None
        outputs = self.outputs(self.inputs.read(rows, tell))
        table = self.meaning.table(outputs)
        if self.threshold is not None:
            # logits, as the threshold was chosen: calibration divides scores, which would move it
            is_second = (outputs[:, 1] - outputs[:, 0]).double() > math.log(self.threshold / (1 - self.threshold))
            table["class"] = np.array(self.meaning.names, dtype=object)[is_second.long().numpy()]
        return pd.DataFrame(table, index=index)

    def scoring(self) -> Scoring:
        """Return what a program must know to score rows with the exported module alone."""
        raw = self.inputs
        agreed = None if raw.preparation is None else raw.preparation.for_client(raw.client)
        text = None if agreed is None else agreed.text
        preparation = None if raw.preparation is None else raw.preparation.model_dump(mode="json")
        if preparation is not None and agreed is not None and agreed.cleaning is not None:
            preparation["cleaned"] = agreed.cleaning.as_table(raw.client)
        if preparation is not None and text is not None:
            preparation["columns"][0]["tokenizer"] = TOKENIZER  # which is exported beside it
        features = None if raw.features is None else list(raw.features)
        meaning = {**asdict(self.meaning), "names": list(self.meaning.names), "features": features}
        return Scoring(
            {**meaning, "client": raw.client},
            preparation,
            None if agreed is None or text is not None else agreed.transformer,
            self.meaning.answers,
            None if text is None else tokenizer_json(text),
        )

    def outputs(self, x: Any) -> Tensor:
        """Return the model's scores [n, ...] of inputs [n, ...]."""
        count = pytree.count(x)
        with torch.no_grad():
            blocks = [
                pytree.logits(pytree.run(self.module, pytree.take(x, slice(at, at + BLOCK))))
                # one pass even without rows, for an empty result of the right width
                for at in range(0, max(count, 1), BLOCK)
            ]
        return torch.cat(blocks).float()

    def calibrated(self, parts: Iterable[Rows]) -> Self:
        """Return the same predictor with a temperature, see `OutputMeaning.calibrated`.

        Args:
            parts: rows with inputs as the model reads them, and with targets.
        """
        # a client without validation rows must not stop the others
        labelled = [part for part in parts if len(part)]
        if not labelled:
            raise SettingError(
                "calibrate needs validation rows, and there are none here: train with validation = 0.1 in [partition]"
            )
        outputs = torch.cat([self.outputs(part.x) for part in labelled])
        targets = torch.cat([pytree.single(part.y, "calibrate") for part in labelled])
        return replace(self, meaning=self.meaning.calibrated(outputs, targets))


def mean_outputs(outputs: Sequence[Tensor], kind: AnswerKind, weights: Tensor | None = None) -> Tensor:
    """Return outputs whose answers are the mean of those of several models.

    Args:
        outputs: [n, ...] of each model for the same rows.
        kind: of the answers; of classes, labels and places probabilities are averaged, and of rates these.
        weights: how much each model counts [models], above 0; all the same by default.

    Examples:
        >>> sure, unsure = torch.tensor([[0.0, 3.0]]), torch.tensor([[0.0, 0.0]])
        >>> mean_outputs([sure, unsure], "classes").softmax(1).numpy().round(2).tolist()
        [[0.27, 0.73]]
    """
    stack = torch.stack(list(outputs)).double()
    shares = torch.ones(len(stack), dtype=torch.float64) if weights is None else weights
    shares = (shares / shares.sum()).reshape(-1, *[1] * (stack.dim() - 1))
    if kind in ("classes", "places"):
        return (stack.log_softmax(-1) + shares.log()).logsumexp(0)
    if kind == "rates":
        return (stack + shares.log()).logsumexp(0)
    # a mean of logits would not be the logit of the mean probability
    mean = ((torch.sigmoid(stack) if kind == "labels" else stack) * shares).sum(0)
    return mean.logit() if kind == "labels" else mean
