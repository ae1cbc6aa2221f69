"""FedAvg: the average of the clients' models."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from piebald.server_optimizer.base import Step


class ToAverage(Step):
    """To the average of the clients' models: w <- w + average change (McMahan et al. 2017)."""

    def move(self, model: Tensor, average: Tensor, state: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return model + average, {}
