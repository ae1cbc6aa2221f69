"""Random-k sparsification: a few numbers of an update, at places that both ends know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from piebald.core.parameters import Layout
from piebald.core.randomness import generator
from piebald.methods.transforms.bit_fields import Bytes, Whole
from piebald.methods.transforms.compression import Numbers, WireContext, WithErrorFeedback, as_bytes, as_floats
from piebald.methods.transforms.top_k import count_of


class RandomK(WithErrorFeedback):
    """Send some numbers of an update, drawn anew for each task (Stich et al. 2018).

    Of t trained parameters, k = share * t are sent, rounded and at least one, as float32.  Their positions follow from
    the run's seed, the client and the version, which the server knows, so none is sent: k numbers take fewer bytes than
    with `top_k`, and tell less.

    With error feedback the numbers are sent as they are, which Karimireddy et al. 2019 need.  Without it they are sent
    t / k times as large, so that their expectation is the update (Wangni et al. 2018).

    With positions = "common" all clients of a round send the same numbers.  Then masked updates can be added
    (`secure_aggregation`), and only these numbers are masked and sent; but errors of clients do not cancel in the mean,
    so "own" positions learn faster.

    Attributes:
        share: of the trained parameters that are sent, above 0 and up to 1.
        positions: drawn for each client by itself ("own"), or for all clients of a round ("common").
    """

    why_not_summed: ClassVar[str] = (
        "each client of random_k sends other numbers of its update: set its positions = 'common', or"
    )
    remedy: ClassVar[str] = ""

    share: float = Field(default=0.01, gt=0, le=1)
    positions: Literal["own", "common"] = "own"

    @property
    def same_for_all(self) -> bool:
        return self.positions == "common"

    def sent_numbers(self, layout: Layout) -> int:
        return count_of(self.share, layout.shared_trained) + layout.shared - layout.shared_trained

    def sent_places(self, context: WireContext) -> Whole:
        return np.concatenate([self._places(context), np.arange(context.trained, context.layout.shared)])

    @property
    def keeps_clip(self) -> bool:
        return False  # with memory or scaled up, what is sent may be longer

    def encode(
        self, wanted: Numbers, state: Mapping[str, Tensor], context: WireContext
    ) -> tuple[Bytes, Mapping[str, Tensor]]:
        places = self._places(context)
        factor = 1.0 if self.error_feedback else context.trained / len(places)
        return as_bytes(wanted[places] * np.float32(factor)), {}

    def decode(self, body: Bytes, context: WireContext) -> Numbers:
        values, places, change = as_floats(body), self._places(context), np.zeros(context.trained, dtype=np.float32)
        if len(values) != len(places):
            raise ValueError(f"{len(values):,} values, where {len(places):,} are due")
        change[places] = values
        return change

    def _places(self, context: WireContext) -> Whole:
        count = count_of(self.share, context.trained)
        if count == context.trained:
            return np.arange(count)
        # clients may have been asked before in this round, or not
        round_number = str(context.version).partition(".")[0]
        owner = ("common", int(round_number)) if self.same_for_all else (context.client, context.version)
        draw = generator("random_k", context.seed, *owner)
        return np.sort(draw.choice(context.trained, count, replace=False))
