"""Pretrained networks of transformers by name, and low-rank adapters in them (LoRA, Hu et al. 2022, through peft)."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from piebald.core.arguments import Count, PathLike, Seed, Share, checked, checked_class
from piebald.core.errors import TOKENS, SettingError, import_extra, shown, unknown
from piebald.core.model_settings import bounded_build
from piebald.core.randomness import key, torch_seed
from piebald.methods.training.checkpointing import enable_own
from piebald.models.weights_folder import MISSING, WeightsFolder, find, mapped_tensors, read_config, weight_bytes

NetworkTask = Literal["sequence_classification", "token_classification", "causal_lm", "image_classification"]
_TASKS: dict[str, tuple[str, str | None]] = {  # the networks of each task in transformers, and peft's word for it
    "sequence_classification": ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", "SEQ_CLS"),
    "token_classification": ("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING", "TOKEN_CLS"),
    "causal_lm": ("MODEL_FOR_CAUSAL_LM_MAPPING", "CAUSAL_LM"),
    "image_classification": ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", None),
}
_LORA_RANK = 8
# A network has no more numbers and names than its files have bytes for, and those of adapters and of a new head.
_TENSORS, _WIDEST, _NEW_HEAD = 100_000, 1 << 16, 1 << 27


@checked_class
class PretrainedNetwork(nn.Module):
    """A network of transformers that maps rows to scores.

    Its frozen parameters are mapped from their file: all copies that a run makes share them, also those of worker
    processes, so they must not be changed.  They have the precision of the file, what is trained has float32.

    Attributes:
        network: the network, or peft's with adapters around it.
        source: where its weights come from.
    """

    def __init__(self, network: nn.Module, source: WeightsFolder, reads: str, padding: int | None) -> None:
        super().__init__()
        self.network, self.source = network, source
        self._reads, self._padding = reads, padding
        self._adapted = hasattr(network, "peft_config")

    def forward(self, x: Tensor | None = None, **inputs: Tensor) -> Tensor:
        """Token ids [n, length] or images [n, channels, height, width] to logits [n, outputs], or of each token.

        Inputs may also come by the names that transformers gives them, such as `input_ids` and `attention_mask`.
        Without a mask, tokens with the padding id of the network's configuration are masked.
        """
        # `x` is what engines pass, and the name that the network reads it by is transformers'
        if x is not None:
            inputs[self._reads] = x
        images = inputs.get("pixel_values")
        if images is not None and self._adapted:
            inputs["pixel_values"] = images.to(self.network.get_base_model().dtype)  # type: ignore[operator]
        ids = inputs.get("input_ids")
        if ids is not None:
            if ids.dtype.is_floating_point:
                raise SettingError(f"this network reads token ids, which are whole numbers, got {ids.dtype}: {TOKENS}")
            inputs["input_ids"] = ids.long()
            # transformers attends to padding unless a mask says otherwise
            if self._padding is not None and "attention_mask" not in inputs:
                inputs["attention_mask"] = (ids != self._padding).long()
        logits: Tensor = self.network(**inputs).logits
        return logits.float()  # a frozen network of half precision computes in it, losses do not

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Buffers but those that no state dict holds: constants, like rotary embeddings', which need not travel."""
        # non-persistent buffers are computed from the configuration, so each side has them already
        held = self.state_dict(prefix=f"{prefix}." if prefix else "").keys()
        for name, buffer in super().named_buffers(prefix, recurse, remove_duplicate):
            if name in held or not buffer.is_floating_point():
                yield name, buffer

    def activation_checkpointing_enable(self, activation_checkpointing_kwargs: Mapping[str, Any] | None = None) -> None:
        """Checkpoint the network's blocks from now on, in training; the arguments are those of transformers."""
        from peft import PeftModel

        network = self.network
        enable_own(
            network.get_base_model() if isinstance(network, PeftModel) else network,
            # the reentrant form needs an input with a gradient, which frozen embeddings do not give
            activation_checkpointing_kwargs or {"use_reentrant": False},
        )

    def save_pretrained(self, save_directory: Path) -> None:
        """Write the folder that transformers reads, or peft's with the adapters and the head."""
        network: Any = self.network
        # peft writes the configured rank, and a model cut to a lower one could not be loaded with it
        with _quiet(), _own_rank(network):
            network.save_pretrained(save_directory)


@checked
def pretrained(
    weights: PathLike,
    outputs: Count | None = None,
    *,
    adapter: Literal["lora"] | None = None,
    rank: Count | None = None,
    alpha: Count | None = None,
    dropout: Share | None = None,
    targets: str | Sequence[str] | None = None,
    task: NetworkTask = "sequence_classification",
    dtype: Literal["auto", "float32"] = "auto",
    revision: str | None = None,
    seed: Seed = 0,
) -> PretrainedNetwork:
    """A pretrained network of transformers: all of it is trained, or only adapters and the head.

    With adapters, the weights of the network are frozen.  They are mapped from their file, once for all processes of a
    machine, and neither kept for a client nor sent; only adapters and head are trained, travel and are counted.

    The network's code is that of transformers.  No other code is run, and pickled weights are never read.  Needs
    `pip install '.[hf]'`.

    Args:
        weights: a folder with a config.json and safetensors, or the name of a model on the Hugging Face Hub, which is
            downloaded unless it is in the Hub's cache on this machine.
        outputs: number of classes, or of numbers to predict; by default that of the weights.  A head for another
            number begins with random numbers, as does one that the weights do not have.  A "causal_lm" has as many as
            its vocabulary, which is the most that `outputs` may be.
        adapter: "lora" for low-rank adapters (Hu et al. 2022), None to train the whole network.
        rank: of the adapters; 8 by default.
        alpha: the adapters' output is multiplied by alpha / rank; the rank by default.
        dropout: of the adapters' input; 0 by default.
        targets: the layers with adapters: "attention" (projections of queries and values, the default), "all" linear
            layers, or names of layers, e.g. ["q_lin", "lin1"].
        task: "sequence_classification", "token_classification" (logits [n, length, outputs], for
            loss = "token_classification") and "causal_lm" (logits [n, length, vocabulary], for
            loss = "language_modelling"; its head is frozen with the rest where there are adapters) read token ids,
            "image_classification" reads images.
        dtype: of the frozen weights beside adapters: "auto" for the one that they are stored in, if it is one for all,
            so that bfloat16 takes half the memory and is mapped from its file; "float32" converts them at loading.
            What is trained has float32.
        revision: branch, tag or commit on the Hub.
        seed: seed of the adapters and of a new head.

    Raises:
        SettingError: transformers or peft is missing; there is no such folder or it holds no model; the network needs
            code of its own, or is none for this task; or the adapters do not fit it.
    """
    adapter_settings = {"rank": rank, "alpha": alpha, "dropout": dropout, "targets": targets}
    # None means "not given": a default there could not be told from a setting without effect
    setting = next((name for name, value in adapter_settings.items() if value is not None), None)
    if adapter is None and setting is not None:
        raise SettingError(f"{setting} belongs to adapters but adapter is None: set adapter = 'lora', or leave it out")
    transformers = _installed()
    source = find(weights, revision)
    stored = weight_bytes(source.path)
    # Twice the stored bytes: weights of half precision become float32.
    most, tensors = 2 * stored + (outputs or 0) * _WIDEST + _NEW_HEAD, min(stored // 20, _TENSORS) + 1000
    bounded = bounded_build(f"the network in {source.path}", most, tensors)
    with torch_seed(key(seed, "model", "pretrained") >> 1), _quiet(), bounded:
        network = _network(transformers, source, task, outputs, as_stored=adapter is not None and dtype == "auto")
        reads, padding = network.main_input_name, network.config.to_dict().get("pad_token_id")
        if adapter is not None:
            options = (rank or _LORA_RANK, alpha or rank or _LORA_RANK, dropout or 0.0, targets or "attention")
            network = with_lora(network, _head(network), _TASKS[task][1], *options)
            _train_in_float32(network)
            _name_base(network, source)
    return PretrainedNetwork(network.train(), source, reads, padding)


def _installed() -> Any:
    import_extra("peft", "hf", MISSING)
    return import_extra("transformers", "hf", MISSING)


def _network(transformers: Any, source: WeightsFolder, task: str, outputs: int | None, *, as_stored: bool) -> Any:
    """The network with the weights of a folder, as stored or in float32; on the meta device, without them."""
    values = read_config(source.path)
    kind = values.pop("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise unknown("architecture of transformers called", kind, transformers.CONFIG_MAPPING)
    if task == "causal_lm":
        vocabulary = values.get("vocab_size")
        if outputs is not None and isinstance(vocabulary, int) and outputs > vocabulary:
            raise SettingError(f"targets have {outputs} tokens but the network's vocabulary has {vocabulary}")
    # two is the default of transformers; names of classes are kept where their number fits
    elif outputs is not None and outputs != len(values.get("id2label", (0, 1))):
        for name in ("id2label", "label2id", "num_labels"):
            values.pop(name, None)
        values["num_labels"] = outputs
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(values)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise SettingError(f"the configuration in {source.path} does not fit {kind!r}: {error}") from None
    able = {name: getattr(transformers, classes) for name, (classes, _) in _TASKS.items()}
    # for all tasks, so that the error can say which one would do
    able = {name: classes[type(config)] for name, classes in able.items() if type(config) in classes}
    if task not in able:
        hint = f"set task = {next(iter(able))!r}" if able else "choose another model"
        raise SettingError(f"transformers has no network {kind!r} for task {task!r}: {hint}")
    network_class = able[task]
    # only shapes are asked for, and reading gigabytes of weights would fill no tensor
    if torch.get_default_device().type == "meta":
        return network_class(config)
    return _loaded(network_class, config, source, as_stored=as_stored)


def _loaded(network_class: Any, config: Any, source: WeightsFolder, *, as_stored: bool) -> Any:
    tensors = mapped_tensors(source.path)
    stored = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    try:
        network, report = network_class.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=stored.pop() if as_stored and len(stored) == 1 else torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except SettingError:
        raise
    except Exception as error:  # what transformers' own classes raise for a configuration that makes no network
        message = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise SettingError(f"{source.path} cannot be loaded as {network_class.__name__}: {message[:200]}") from None
    head = _head(network)
    absent = [*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])]
    # a new head may lack weights, the body may not: it would silently begin with random numbers
    for name in sorted(absent):
        if not any(name == top or name.startswith(f"{top}.") for top in head):
            raise SettingError(
                f"the weights in {source.path} do not fit their config.json: {name} is missing or has another shape"
            )
    return network


def _train_in_float32(network: nn.Module) -> None:
    """Give a head that is trained on a network of half precision float32, as peft gives its adapters."""
    from peft.utils import ModulesToSaveWrapper

    for layer in network.modules():
        if isinstance(layer, ModulesToSaveWrapper):
            for head in layer.modules_to_save.values():
                head.float().register_forward_pre_hook(_in_float32)


def _in_float32(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(one.float() if isinstance(one, Tensor) and one.is_floating_point() else one for one in inputs)


def _head(network: Any) -> list[str]:
    """Names of the layers on top of the network's body, which belong to its task."""
    # transformers names the body, so what else has parameters belongs to the task
    body = network.base_model_prefix
    head = [name for name, layer in network.named_children() if name != body and any(True for _ in layer.parameters())]
    if not head:
        raise SettingError(
            f"{type(network).__name__} has no head of its own, so nothing but adapters could learn a task"
        )
    return head


def _name_base(network: Any, source: WeightsFolder) -> None:
    """Record in the adapter's configuration which weights it belongs to, so that peft finds them again."""
    for config in network.peft_config.values():
        config.base_model_name_or_path = source.name
        config.revision = source.revision


@contextmanager
def _own_rank(network: Any) -> Iterator[None]:
    """Record the rank that the adapters have, where it is lower than they were made with; alpha / rank stays."""
    from peft import PeftModel

    if not isinstance(network, PeftModel):
        yield
        return
    adapted: Any = network  # whose types know no rank
    before = adapted.peft_config
    # A has as many rows as the rank
    ranks = {len(parameter) for name, parameter in network.named_parameters() if ".lora_A." in name}
    for name, config in before.items():
        if len(ranks) == 1 and config.r not in ranks:
            # a copy, as the configuration itself is put back afterwards
            lowered = copy.copy(config)
            lowered.r, lowered.lora_alpha = min(ranks), config.lora_alpha * min(ranks) / config.r
            adapted.peft_config = {**adapted.peft_config, name: lowered}
    try:
        yield
    finally:
        # also when saving fails: the configuration belongs to the network in use
        adapted.peft_config = before


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide progress bars and reports of transformers: what matters in them is raised as an error here."""
    from transformers.utils import logging as untyped

    logging: Any = untyped
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about what the next version of these packages will change
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


# What architectures call the projections of queries and values, which Hu et al. (section 7.1) found to be enough; some
# have one layer for queries, keys and values.
_ATTENTION = {
    *("q_lin", "v_lin", "query", "value", "q_proj", "v_proj", "query_proj", "value_proj", "q", "v", "q_attn"),
    *("c_attn", "query_key_value", "qkv_proj", "qkv", "Wqkv"),
}


def with_lora(
    network: nn.Module,
    head: Sequence[str],
    task: str | None,
    rank: int,
    alpha: int,
    dropout: float,
    targets: str | Sequence[str],
) -> nn.Module:
    """A network with adapters: W x + (alpha / rank) B A x, with A [rank, inputs] and B [outputs, rank], B = 0 at first.

    Args:
        network: a network of transformers; its own weights are frozen.
        head: names of the layers of its head, which get no adapter and are trained besides, except where the task is
            "CAUSAL_LM": there it has as many weights as the vocabulary, and often the same ones.
        task: what peft calls the task, or None.
        rank, alpha, dropout: as in the paper; dropout is that of the adapters' input.
        targets: the layers that get an adapter, see `targets_in`.

    Raises:
        SettingError: no layer has such a name, or the rank is larger than a side of a layer.
    """
    import peft

    chosen = targets_in(network, head, targets)
    # a rank above the smaller side adds parameters but no matrix that a lower rank could not give
    smallest = min(min(_sides(network.get_submodule(name))) for name in chosen)
    if rank > smallest:
        raise SettingError(
            f"rank must be at most {smallest}, the smaller side of the layers that get adapters, got {rank}"
        )
    config = peft.LoraConfig(
        task_type=task,
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=chosen,
        # a language model's head is as large as its vocabulary, and often its embeddings: too much to train and send
        modules_to_save=[*head] if task != "CAUSAL_LM" else None,
    )
    adapted: nn.Module = peft.get_peft_model(network, config)
    return adapted


def targets_in(network: nn.Module, head: Sequence[str], targets: str | Sequence[str]) -> list[str]:
    """The full names of the layers that get adapters.

    Args:
        network: a network of transformers.
        head: names of its layers that get none.
        targets: "attention" (projections of queries and values), "all" (every linear layer but the head), or names of
            layers, also only their last word ("q_lin") or shell patterns ("*.layer.0.*").
    """
    linear = [
        name
        for name, layer in network.named_modules()
        if _sides(layer) and not any(name == top or name.startswith(f"{top}.") for top in head)
    ]
    if targets == "all":
        return linear
    words = sorted(_ATTENTION) if targets == "attention" else [targets] if isinstance(targets, str) else [*targets]
    chosen = []
    for word in words:
        hits = [name for name in linear if name == word or name.endswith(f".{word}") or fnmatchcase(name, word)]
        # the words for attention are those of many architectures, of which each has only some
        if not hits and targets != "attention":
            raise _unknown(word, linear)
        # patterns may overlap, and a layer gets one adapter
        chosen += [name for name in hits if name not in chosen]
    if not chosen:
        raise _unknown(targets, linear)
    return chosen


def _sides(layer: Any) -> tuple[int, ...]:
    """Inputs and outputs of a linear layer; () for other layers."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    if type(layer).__name__ == "Conv1D":  # transformers' linear layer with its weight transposed, in GPT-2
        return tuple(layer.weight.shape)
    return ()


def _unknown(named: object, linear: Sequence[str]) -> SettingError:
    words = sorted({name.rpartition(".")[2] for name in linear})
    return SettingError(
        f"targets must be 'attention', 'all' or names of linear layers of this network ({', '.join(words[:20])}), "
        f"got {shown(named)}"
    )
