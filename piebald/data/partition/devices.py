"""Models of devices: speed, bandwidth, availability and dropout.  Each kind is a `contracts.Fleet`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from piebald.contracts import Device
from piebald.contracts.component import Component
from piebald.core.randomness import generator


class Devices(Component):
    """The devices of a federation.

    Attributes:
        down: bandwidth to the client in bytes a second, None for no limit.
        up: bandwidth from the client in bytes a second, None for no limit.
        latency: seconds before each transfer.
        dropout: probability that a task is lost, in [0, 1].
    """

    axis = "fleet"

    down: float | None = Field(default=None, gt=0)
    up: float | None = Field(default=None, gt=0)
    latency: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    dropout: float = Field(default=0.0, ge=0, le=1)

    def device(self, client: int) -> Device:
        """The device of one client, the same at each call."""
        raise NotImplementedError

    def available(self, clients: int, now: float) -> Sequence[int]:
        """Clients out of range(clients) that are available at this time: all of them."""
        return range(clients)

    def _device(
        self, seconds_per_step: float, bandwidth: float = 1.0, on: tuple[tuple[float, float], ...] | None = None
    ) -> Device:
        down, up = (math.inf if limit is None else limit * bandwidth for limit in (self.down, self.up))
        return Device(seconds_per_step, down, up, self.latency, self.dropout, on)


class Homogeneous(Devices):
    """All devices are equal; by default instant, always available and without dropout.

    Attributes:
        seconds_per_step: time of one optimizer step.
        on: (start, stop) intervals in seconds of the runtime's clock when clients are available, None for always.
    """

    seconds_per_step: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    on: tuple[tuple[float, float], ...] | None = None

    @model_validator(mode="after")
    def _check_intervals(self) -> Homogeneous:
        for start, stop in self.on or ():
            if not 0 <= start < stop:
                raise ValueError(f"on must hold intervals (start, stop) with 0 <= start < stop, got ({start}, {stop})")
        return self

    def device(self, client: int) -> Device:
        """The device that all clients have."""
        return self._device(self.seconds_per_step, on=self.on)

    def available(self, clients: int, now: float) -> Sequence[int]:
        """All clients, or none outside the intervals."""
        # a range and no list: this is asked each round, and there may be a million clients
        return range(clients if self.on is None or any(start <= now < stop for start, stop in self.on) else 0)


class FastSlow(Devices):
    """Two kinds of device, as in Metis (fast and slow clients).

    Slow clients are spread evenly over the client numbers, from a random start: among any n neighbours n * share_slow
    are slow, rounded up or down.  Partitions with `sizes` number clients from the largest on, so `first = "fast"` with
    half of them slow gives Metis' order: sorted by size, fast, slow, fast, slow, ...

    Attributes:
        fast: seconds of one optimizer step of a fast device.
        slow_factor: how many times longer a slow device takes.
        share_slow: share of the clients that are slow, in [0, 1].
        first: kind of client 0 (if there are both), or "drawn" for a random start.
        seed: seed of the random start.

    Examples:
        >>> import piebald as pb
        >>> fleet = pb.partition.FastSlow(fast=0.1, slow_factor=5, first="fast")
        >>> [fleet.device(client).seconds_per_step for client in range(4)]
        [0.1, 0.5, 0.1, 0.5]
    """

    fast: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    slow_factor: float = Field(default=5.0, ge=1, allow_inf_nan=False)
    share_slow: float = Field(default=0.5, ge=0, le=1)
    first: Literal["drawn", "fast", "slow"] = "drawn"
    seed: int = 0

    def is_slow(self, client: int) -> bool:
        """Return whether a client is slow."""
        if self.first == "drawn":
            start = float(generator(self.seed, "fast_slow").random())
        else:  # slightly more, so that share_slow + 1 - share_slow is not rounded below 1
            start = (0.0 if self.first == "fast" else 1 - self.share_slow) + 1e-9
        # Bresenham's rule: a client is slow where the running sum of shares passes a whole number.
        return math.floor((client + 1) * self.share_slow + start) > math.floor(client * self.share_slow + start)

    def device(self, client: int) -> Device:
        """The device of one client."""
        return self._device(self.fast * (self.slow_factor if self.is_slow(client) else 1.0))


class LogNormal(Devices):
    """Speeds and bandwidths drawn from log-normal distributions, for each client from (seed, client).

    Attributes:
        seconds_per_step: median time of one optimizer step; `down` and `up` are median bandwidths.
        sigma: standard deviation of the logarithm of a device's time; 0.5 puts two thirds within a factor of 1.65.
        bandwidth_sigma: the same for bandwidth; one draw for both directions.
        seed: seed of the draws.
    """

    seconds_per_step: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    sigma: float = Field(default=0.5, ge=0, le=10)
    bandwidth_sigma: float = Field(default=0.5, ge=0, le=10)
    seed: int = 0

    def device(self, client: int) -> Device:
        """The device of one client."""
        # both are drawn whatever limits are set, so that limits of bandwidth leave speeds as they are
        speed, bandwidth = generator(self.seed, "log_normal", client).standard_normal(2).tolist()
        return self._device(
            self.seconds_per_step * math.exp(self.sigma * speed), math.exp(self.bandwidth_sigma * bandwidth)
        )
