"""The formats of exported models, and modules in a form that can be recorded.

Each format writes one module, in evaluation mode and on the CPU, to a path that does not exist yet.  Formats that
record a computation (torch.export, ONNX) run the module once on example rows; the first axis stays free, so that the
exported program takes batches of any size.

ONNX graphs that take the columns of a table as they are: the preparation by skl2onnx, then the model.

skl2onnx converts the fitted `ColumnTransformer` of the preparation.  Four of its steps get converters here: skl2onnx
1.20 has none for indicators of gaps and for logarithms, and its encoders know neither gaps among words nor categories
that are none of the agreed ones.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from piebald.core import pytree
from piebald.core.errors import SettingError, import_extra, shown, unknown
from piebald.core.plain_text import errors_alone
from piebald.core.pytree import Tree
from piebald.report.export.score import FALSE, GAPS, TRUE

log = logging.getLogger("piebald.report")

ExportFormat = Literal["safetensors", "state_dict", "torch_export", "onnx", "huggingface"]
FORMATS: tuple[str, ...] = get_args(ExportFormat)
SUFFIXES = {
    "safetensors": ".safetensors",
    "state_dict": ".pt",
    "torch_export": ".pt2",
    "onnx": ".onnx",
    "huggingface": "",
}


@dataclass(frozen=True, slots=True)
class Exported:
    """A module to be exported, with what its format may need.

    Attributes:
        module: the module; parameters and buffers are written, also those that are not trained.
        example: makes a row or more of inputs [n, ...], for formats that record a computation.
        card: makes the model card in Markdown, for "huggingface".
        metadata: text by name, which all formats but "state_dict" keep.
        scoring: makes how raw rows are scored, for folders and ONNX.
    """

    module: nn.Module
    example: Callable[[], Tree]
    card: Callable[[], str]
    metadata: Mapping[str, str]
    scoring: Callable[[], Scoring] | None = None


@runtime_checkable
class SavesItself(Protocol):
    """A module that writes its own folder, as those of transformers and peft do."""

    def save_pretrained(self, save_directory: Path) -> Any:
        """Write configuration and weights to a folder."""


def export_model(exported: Exported, path: Path, file_format: str | None = None) -> Path:
    """Write a module to a file, or to a folder for "huggingface".

    It is written beside its place and moved there when it is complete.

    Args:
        exported: the module, with what its format may need.
        path: where to; its suffix chooses the format unless one is named.
        file_format: one of `FORMATS`.

    Raises:
        SettingError: the format is unknown, the path exists or cannot be written, or the module has no such form.
    """
    write = _WRITERS[_chosen(path, file_format)]
    if path.exists():
        raise SettingError(f"{path} exists already: choose another name, or delete it first")
    # dropout and batch norm of training mode would be recorded into the program
    exported.module.cpu().eval()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # beside the target, so that moving it there is one atomic rename on the same disk
        with tempfile.TemporaryDirectory(prefix=".export-", dir=path.parent) as folder:
            draft = Path(folder) / path.name
            write(exported, draft)
            for file in sorted(Path(folder).iterdir(), key=draft.__eq__):  # what belongs beside it comes first
                for part in (file, *file.rglob("*")):  # libraries and the umask choose other modes
                    part.chmod(0o700 if part.is_dir() else 0o600)
                os.replace(file, path.with_name(file.name))
    except OSError as error:
        raise SettingError(f"{path} cannot be written: {error.strerror or error}") from None
    return path


def _chosen(path: Path, named: str | None) -> str:
    if named is not None:
        if named not in FORMATS:
            raise unknown("format", named, FORMATS)
        return named
    for name, suffix in SUFFIXES.items():
        if path.suffix == suffix:
            return name
    suffixes = ", ".join(suffix for suffix in SUFFIXES.values() if suffix)
    raise SettingError(
        f"{path} does not say its format: end it with one of {suffixes}, or name one of {', '.join(FORMATS)}"
    )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """The state dict, each tensor with memory of its own: safetensors refuses tensors that share some."""
    return {name: tensor.detach().clone().contiguous() for name, tensor in module.state_dict().items()}


def _safetensors(exported: Exported, path: Path) -> None:
    save_file(_tensors(exported.module), str(path), metadata={"format": "pt", **exported.metadata})


def _state_dict(exported: Exported, path: Path) -> None:
    torch.save(_tensors(exported.module), path)


def _torch_export(exported: Exported, path: Path) -> None:
    recorded = Recorded.of(exported.module, exported.example())
    try:
        program = recorded.program()
    except Exception as error:  # torch raises many kinds, for what a module does that cannot be recorded
        raise _unrecorded("torch.export", exported, error) from None
    torch.export.save(program, path, extra_files={"piebald.json": json.dumps(dict(exported.metadata))})


def _onnx(exported: Exported, path: Path) -> None:
    """Write a graph of raw columns where rows are prepared and ONNX can do it, else one of inputs."""
    scoring = exported.scoring() if exported.scoring is not None else None
    if scoring is None or scoring.preparation is None:
        _onnx_of_inputs(exported, path)
        return
    try:
        check_raw_rows(scoring.preparation)
    except SettingError as error:
        beside = path.with_suffix(".preparation.json")
        log.warning("%s takes rows as %s says to prepare them: %s", path.name, beside.name, error)
        _onnx_of_inputs(exported, path)
        preparation = dict(scoring.preparation)
        if scoring.tokenizer is not None:
            words = path.with_suffix(".tokenizer.json")
            words.write_text(scoring.tokenizer, encoding="utf-8")
            preparation["columns"] = [{**column, "tokenizer": words.name} for column in preparation["columns"]]
        beside.write_text(json.dumps(preparation, indent=1) + "\n", encoding="utf-8")
        return
    import onnx

    answering = replace(exported, module=Answering(exported.module, scoring.answers).eval())
    program = _onnx_program(answering)
    model = with_preparation(program.model_proto, scoring.preparation, scoring.transformer)
    onnx.helper.set_model_props(model, {**exported.metadata, "outputs": json.dumps(scoring.outputs)})
    onnx.save(model, path)


def _onnx_of_inputs(exported: Exported, path: Path) -> None:
    program = _onnx_program(exported)
    program.model.metadata_props.update(exported.metadata)
    program.save(path)


def _onnx_program(exported: Exported) -> Any:
    import_extra("onnxscript", "onnx", "onnx and onnxscript are missing")  # which torch.onnx needs
    recorded = Recorded.of(exported.module, exported.example())
    try:
        with _quiet_exporter():
            # torch.onnx cannot call a module with a dict itself
            program = torch.onnx.export(
                recorded.program() if recorded.wrapped else recorded.module,
                () if recorded.wrapped else recorded.inputs,
                dynamo=True,
                dynamic_shapes=None if recorded.wrapped else recorded.dynamic_shapes,
                input_names=recorded.names,
                output_names=["output"],
                verbose=False,
            )
    except Exception as error:  # as above
        raise _unrecorded("torch.onnx", exported, error) from None
    if program is None:
        raise SettingError(f"torch.onnx made no program of {type(exported.module).__name__}")
    return program


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Hide what the exporter says about its inner workings and about packages that the module does not use."""
    with errors_alone("torch.onnx"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _huggingface(exported: Exported, path: Path) -> None:
    path.mkdir()
    if isinstance(exported.module, SavesItself):
        exported.module.save_pretrained(path)
    else:
        _safetensors(exported, path / "model.safetensors")
        config = json.dumps(dict(exported.metadata), indent=2)
        (path / "config.json").write_text(config + "\n", encoding="utf-8")
        if exported.scoring is not None:
            _write_scorer(exported, exported.scoring(), path)
    (path / "README.md").write_text(exported.card(), encoding="utf-8")


def _write_scorer(exported: Exported, scoring: Scoring, folder: Path) -> None:
    """Write a program that scores raw rows, with what it reads, where the module can be recorded."""
    # ONNX runs where torch is not installed, so it is preferred
    has_onnx = find_spec("onnx") is not None and find_spec("onnxscript") is not None
    try:
        if has_onnx:
            _onnx_of_inputs(exported, folder / "model.onnx")
        else:
            _torch_export(exported, folder / "model.pt2")
    # weights and configuration are of use without a program, so the export goes on
    except SettingError as error:
        log.warning("%s has weights and no program that scores rows: %s", folder.name, error)
        return
    for name, values in (("outputs", scoring.outputs), ("preparation", scoring.preparation)):
        if values is not None:
            (folder / f"{name}.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    if scoring.tokenizer is not None:
        (folder / "tokenizer.json").write_text(scoring.tokenizer, encoding="utf-8")
    # a copy, so that the folder scores rows without this package
    shutil.copyfile(Path(__file__).with_name("score.py"), folder / "score.py")


_WRITERS: Mapping[str, Callable[[Exported, Path], None]] = {
    "safetensors": _safetensors,
    "state_dict": _state_dict,
    "torch_export": _torch_export,
    "onnx": _onnx,
    "huggingface": _huggingface,
}


def _unrecorded(exporter: str, exported: Exported, error: Exception) -> SettingError:
    first = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return SettingError(
        f"{exporter} cannot record {type(exported.module).__name__} ({first[:200]}): use safetensors or state_dict"
    )


_ROWS = {0: torch.export.Dim.AUTO}  # the first axis stays free


@dataclass(frozen=True, slots=True)
class Recorded:
    """A module with the example that it is recorded on.

    Attributes:
        module: the module, or one around it that returns its scores alone.
        inputs: its arguments: tensors, or one dict of tensors by name.
        dynamic_shapes: the axes that stay free, for `torch.export`.
        names: of the tensors, in order.
        wrapped: whether `module` is a wrapper around the module.
    """

    module: nn.Module
    inputs: tuple[Any, ...]
    dynamic_shapes: tuple[Any, ...]
    names: tuple[str, ...]
    wrapped: bool = True

    @classmethod
    def of(cls, module: nn.Module, rows: Tree) -> Recorded:
        """A module and a row or more of inputs [n, ...], of which two are taken: torch takes one for a constant."""
        # an axis of one row would be recorded as a constant
        batch = pytree.mapped(lambda leaf: torch.cat([leaf[:1], leaf[:1]]), rows)
        if isinstance(batch, Mapping):
            return cls(_ScoresByName(module), (dict(batch),), (dict.fromkeys(batch, _ROWS),), tuple(batch))
        inputs, _ = pytree.arguments(batch)
        free_axes = tuple(_ROWS for _ in inputs)
        if len(inputs) > 1:
            return cls(_Scores(module), inputs, (free_axes,), tuple(f"input_{place}" for place in range(len(inputs))))
        # a module whose output is a tensor is exported as it is; others, such as those of transformers, need a wrapper
        with torch.no_grad():
            plain = isinstance(pytree.run(module, batch), Tensor)
        if plain:
            return cls(module, inputs, free_axes, ("input",), wrapped=False)
        return cls(_Scores(module), inputs, (free_axes,), ("input",))

    def program(self) -> torch.export.ExportedProgram:
        """The computation; torch raises many kinds of errors, for what a module does that cannot be recorded."""
        return torch.export.export(self.module, self.inputs, dynamic_shapes=self.dynamic_shapes)


class _Scores(nn.Module):
    """A module that takes tensors and returns the scores of another one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Tensor:
        return pytree.logits(self.module(*inputs))


class _ScoresByName(_Scores):
    """The same for a dict of tensors, the arguments by name; `torch.export` reads the signature."""

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:  # type: ignore[override]
        return pytree.logits(self.module(**inputs))


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
        codes = {name: place for place, name in enumerate(kept) if isinstance(name, str)}
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
