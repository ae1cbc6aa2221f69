"""ONNX graphs that take the columns of a table as they are: the preparation by skl2onnx, then the model.

skl2onnx converts the fitted `ColumnTransformer` of the preparation.  Four of its steps get converters here: skl2onnx
1.20 has none for indicators of gaps and for logarithms, and its encoders know neither gaps among words nor categories
that are none of the agreed ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from piebald.core import pytree
from piebald.core.errors import SettingError, import_extra, shown
from piebald.report.export.score import FALSE, GAPS, TRUE

_ML = "ai.onnx.ml"


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """How a model scores raw rows.

    Attributes:
        outputs: what the model's outputs mean, as JSON values.
        preparation: how the columns of a table become inputs, as JSON values; None where they are numbers already.
        transformer: the same as a fitted `ColumnTransformer` of the client's table, after values are read.
        answers: turns outputs [n, ...] into predictions [n, names].
        tokenizer: of a column of text, as JSON, which cuts and fills up texts; None where inputs are numbers.
    """

    outputs: Mapping[str, Any]
    preparation: Mapping[str, Any] | None
    transformer: Any
    answers: Callable[[Tensor], Tensor]
    tokenizer: str | None = None


class Answering(nn.Module):
    """A module that returns the predictions of another one, and not its scores."""

    def __init__(self, module: nn.Module, answers: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.module, self.answers = module, answers

    def forward(self, inputs: Tensor) -> Tensor:
        return self.answers(pytree.logits(self.module(inputs))).float()


def check_raw_rows(preparation: Mapping[str, Any]) -> None:
    """Refuse a preparation that has no ONNX graph.

    Raises:
        SettingError: skl2onnx is missing, or there are dates or text.
    """
    import_extra("skl2onnx", "onnx", "skl2onnx is missing")
    if date := next((column["name"] for column in preparation["columns"] if column["kind"] == "date"), None):
        raise SettingError(f"column {shown(date, 40)} has dates, which ONNX has no operator to read")
    if text := next((column["name"] for column in preparation["columns"] if column["kind"] == "text"), None):
        raise SettingError(f"column {shown(text, 40)} has text, of which ONNX makes no token ids")


def with_preparation(model: Any, preparation: Mapping[str, Any], transformer: Any) -> Any:
    """Return an ONNX model of raw columns, each [n, 1] by its name: float32 numbers, and text in all other columns.

    NaN and empty text stand for gaps, and so do the other words of `score.GAPS`.

    Args:
        model: an ONNX model of prepared rows [n, d] float32.
        preparation, transformer: those of `Scoring`.
    """
    from onnx import compose, helper
    from skl2onnx import convert_sklearn, update_registered_converter
    from skl2onnx.common.data_types import FloatTensorType, StringTensorType
    from sklearn.impute import MissingIndicator
    from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, OrdinalEncoder

    empty = GAPS | {*preparation["gaps"]}
    opset = next(version.version for version in model.opset_import if version.domain == "")
    update_registered_converter(MissingIndicator, "PiebaldMissingIndicator", _same_width, _indicators)
    cells = [(column["name"], StringTensorType if column["kind"] == "category" else FloatTensorType)
             for column in preparation["columns"]]  # fmt: skip
    encoder = functools.partial(_codes, empty=empty)
    read = convert_sklearn(
        transformer, "preparation", [(name, kind([None, 1])) for name, kind in cells],
        target_opset={"": opset, _ML: 3},
        custom_conversion_functions={
            FunctionTransformer: _logarithms, OneHotEncoder: encoder, OrdinalEncoder: encoder,
        },
        custom_shape_calculators={
            FunctionTransformer: _same_width, OneHotEncoder: _one_hot_width, OrdinalEncoder: _same_width,
        },
    )  # fmt: skip
    # skl2onnx names the oldest versions that its operators have, and models are merged of one version alone
    read.opset_import.clear()
    read.opset_import.extend([helper.make_opsetid("", opset), helper.make_opsetid(_ML, 3)])
    reader = _reader(preparation["columns"], preparation["gaps"], read)
    read.ir_version = reader.ir_version = model.ir_version
    # a prefix for each part, since a merged graph has every name once
    prepared = compose.merge_models(reader, read, [(f"read {name}", name) for name, _ in cells], prefix2="prepared ")
    inputs = [(prepared.graph.output[0].name, model.graph.input[0].name)]
    return compose.merge_models(prepared, model, inputs, prefix2="model ")


def _reader(columns: Collection[Mapping[str, Any]], gaps: Collection[str], like: Any) -> Any:
    """Return the ONNX model that reads cells: words of booleans as 1 and 0, and gaps that are numbers as NaN."""
    from onnx import TensorProto, helper

    numeric = [float(gap) for gap in gaps if _is_float(gap)]
    # a LabelEncoder compares words as they are, so the usual forms of each are listed
    truths = {form: float(word in TRUE) for word in TRUE | FALSE for form in (word, word.upper(), word.capitalize())}
    nodes, inputs, outputs = [], [], []
    for column in columns:
        name, kind = column["name"], column["kind"]
        value = TensorProto.FLOAT if kind == "number" else TensorProto.STRING
        inputs.append(helper.make_tensor_value_info(name, value, [None, 1]))
        value = TensorProto.STRING if kind == "category" else TensorProto.FLOAT
        outputs.append(helper.make_tensor_value_info(f"read {name}", value, [None, 1]))
        if kind == "boolean":
            nodes.append(helper.make_node(
                "LabelEncoder", [name], [f"read {name}"], domain=_ML, default_float=np.nan,
                keys_strings=[*truths], values_floats=[*truths.values()],
            ))  # fmt: skip
        elif kind == "number" and numeric:
            nodes.append(helper.make_node(
                "LabelEncoder", [name], [f"marked {name}"], domain=_ML, default_float=0.0,
                keys_floats=numeric, values_floats=[np.nan] * len(numeric),
            ))  # fmt: skip
            # a gap's number plus NaN is NaN, and any other number plus 0 stays as it is
            nodes.append(helper.make_node("Add", [name, f"marked {name}"], [f"read {name}"]))
        else:
            nodes.append(helper.make_node("Identity", [name], [f"read {name}"]))
    graph = helper.make_graph(nodes, "cells", inputs, outputs)
    return helper.make_model(graph, opset_imports=like.opset_import)


def _is_float(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _same_width(operator: Any) -> None:
    """Tell skl2onnx how many columns a step returns: as many as it takes."""
    _set_width(operator, operator.raw_operator.n_features_in_)


def _one_hot_width(operator: Any) -> None:
    _set_width(operator, len(operator.raw_operator.get_feature_names_out()))


def _set_width(operator: Any, columns: int) -> None:
    from skl2onnx.common.data_types import FloatTensorType

    operator.outputs[0].type = FloatTensorType([None, columns])


def _indicators(scope: Any, operator: Any, container: Any) -> None:
    from onnx import TensorProto

    missing = scope.get_unique_variable_name("missing")
    container.add_node("IsNaN", [operator.inputs[0].full_name], [missing])
    container.add_node("Cast", [missing], [operator.outputs[0].full_name], to=TensorProto.FLOAT)


def _logarithms(scope: Any, operator: Any, container: Any) -> None:
    """Convert the logarithm of 1 + x, or the identity."""
    from onnx import TensorProto

    (x,), (result,) = operator.inputs, operator.outputs
    if operator.raw_operator.func is None:
        container.add_node("Identity", [x.full_name], [result.full_name])
        return
    unit, larger = scope.get_unique_variable_name("unit"), scope.get_unique_variable_name("larger")
    container.add_initializer(unit, TensorProto.FLOAT, [1], [1.0])
    container.add_node("Add", [x.full_name, unit], [larger])
    container.add_node("Log", [larger], [result.full_name])


def _codes(scope: Any, operator: Any, container: Any, empty: Collection[str]) -> None:
    """Convert an encoder of words: each column's numbers of categories, one-hot or as they are."""
    from onnx import TensorProto

    encoder, parts = operator.raw_operator, list[str]()
    rare = getattr(encoder, "infrequent_categories_", [None] * len(encoder.categories_))
    for column, categories, others in zip(operator.inputs, encoder.categories_, rare, strict=True):
        kept = [name for name in categories if others is None or name not in others]
        codes = {name: index for index, name in enumerate(kept) if isinstance(name, str)}
        one_hot = hasattr(encoder, "infrequent_categories_")
        if len(codes) < len(kept):  # gaps are a category, the last one
            codes |= dict.fromkeys(empty, len(codes) if one_hot else int(encoder.encoded_missing_value))
        code, part = scope.get_unique_variable_name("code"), scope.get_unique_variable_name("part")
        container.add_node(
            "LabelEncoder", [column.full_name], [code], op_domain=_ML, op_version=2, keys_strings=[*codes],
            values_int64s=[*codes.values()], default_int64=len(kept) if one_hot else int(encoder.unknown_value),
        )  # fmt: skip
        parts.append(part)
        if not one_hot:
            container.add_node("Cast", [code], [part], to=TensorProto.FLOAT)
            continue
        depth, values, marks = (scope.get_unique_variable_name(name) for name in ("depth", "values", "marks"))
        # a number beyond the last column, as of unknown words where none is rare, has zeros in all of them
        container.add_initializer(depth, TensorProto.INT64, [1], [len(kept) + (others is not None)])
        container.add_initializer(values, TensorProto.FLOAT, [2], [0.0, 1.0])
        container.add_node("OneHot", [code, depth, values], [marks])
        container.add_node("Flatten", [marks], [part], axis=1)
    container.add_node("Concat", parts, [operator.outputs[0].full_name], axis=1)
