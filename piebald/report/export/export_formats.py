"""The formats of exported models, and modules in a form that can be recorded.

Each format writes one module, in evaluation mode and on the CPU, to a path that does not exist yet.  Formats that
record a computation (torch.export, ONNX) run the module once on example rows; the first axis stays free, so that the
exported program takes batches of any size.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from piebald.core import pytree
from piebald.core.errors import SettingError, import_extra, unknown
from piebald.core.plain_text import errors_alone
from piebald.core.pytree import Tree
from piebald.report.export.raw_rows import Answering, Scoring, check_raw_rows, with_preparation

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
        log.warning("%s takes rows as %s says to clean and prepare them: %s", path.name, beside.name, error)
        _onnx_of_inputs(exported, path)
        preparation = dict(scoring.preparation)
        if scoring.tokenizer is not None:
            words = path.with_suffix(".tokenizer.json")
            words.write_text(scoring.tokenizer, encoding="utf-8")
            preparation["columns"] = [{**column, "tokenizer": words.name} for column in preparation["columns"]]
        beside.write_text(json.dumps(preparation, indent=1) + "\n", encoding="utf-8")
        return
    if "cleaned" in scoring.preparation:
        log.warning("%s takes rows that are clean already: the rules of [prepare] are not in it", path.name)
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
            return cls(_Scores(module), inputs, (free_axes,), tuple(f"input_{index}" for index in range(len(inputs))))
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
