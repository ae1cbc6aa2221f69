"""Activation checkpointing on an engine's module, with the dropout masks of the first pass."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from piebald.core.errors import SettingError
from piebald.engines.keyed_dropout import KeyedDropout
from piebald.methods.training.checkpointing import AUTO, checkpointed_layers, enable_own


class Checkpointing:
    """Layers of a module that are checkpointed from now on, whenever the module trains inside `steps`.

    Args:
        module: the module.
        patterns: as in `training.checkpointing`.
        random: whether the layers draw from torch's own generators, whose state is then kept with each of them.
    """

    def __init__(self, module: nn.Module, patterns: Sequence[str], random: bool) -> None:
        # torch's reentrant form takes no context_fn, and gives no gradient where no input needs one
        self._options: dict[str, Any] = {
            "use_reentrant": False,
            "preserve_rng_state": random,
            "context_fn": self._contexts,
        }
        self._dropout: KeyedDropout | None = None
        self._active, self._ran = False, set[str]()
        self._layers = [] if tuple(patterns) == (AUTO,) else checkpointed_layers(module, patterns)
        if not self._layers:  # a module of transformers, whose layers look themselves whether they train
            enable_own(module, self._options)
        for name in self._layers:
            layer = module.get_submodule(name)
            layer.__dict__["forward"] = self._checkpointed(name, layer.forward)

    @contextlib.contextmanager
    def steps(self, dropout: KeyedDropout | None) -> Iterator[None]:
        """The steps of one client; `dropout` is the active mode, or None.

        Raises:
            SettingError: none of the layers was run, so that nothing was saved.
        """
        self._dropout, self._active = dropout, True
        try:
            yield
        finally:
            self._active = False
        if self._layers and not self._ran:
            raise SettingError(
                f"checkpointing names {', '.join(self._layers)}, which the model never calls: name layers that it does"
            )

    def _checkpointed(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*inputs: Any, **named: Any) -> Any:
            if not self._active:
                return forward(*inputs, **named)
            self._ran.add(name)
            return checkpoint(functools.partial(forward, **named), *inputs, **self._options)

        return run

    def _contexts(self) -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
        """The contexts of a layer's first pass and of its second one, which draws the masks of the first."""
        if self._dropout is None:
            return contextlib.nullcontext(), contextlib.nullcontext()
        again = KeyedDropout()
        again.start(self._dropout.key)
        again.call = self._dropout.call
        return contextlib.nullcontext(), again
