"""Models of devices: speed, bandwidth, availability and dropout.  Each kind is a `contracts.Fleet`.

Measured devices: a CSV file with one line for each client.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from piebald.contracts import Component, Device
from piebald.core.errors import SettingError, unknown
from piebald.core.files import read_text
from piebald.core.randomness import generator
from piebald.data.partition.split import Bools, Ints


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


COLUMNS = ("client", "seconds_per_step", "down", "up", "latency", "dropout", "on")


_INTERVALS = re.compile(r"[\d.]+-[\d.]+(;[\d.]+-[\d.]+)*")


class Trace(Devices):
    """Speeds, bandwidths and availability from a CSV file, with one line for each client in order.

    Columns: seconds_per_step, and optionally down, up (bytes a second), latency (seconds), dropout (0 to 1), on
    (intervals in seconds, "0-3600;7200-9000") and client (a name, ignored).  An empty cell stands for the
    fleet's own setting.  With more clients than lines, lines are used again from the top.

    Attributes:
        file: the CSV file, read when a device is first asked for.
    """

    file: str

    def device(self, client: int) -> Device:
        """The device of one client."""
        lines = _read(self.file)
        line = lines[client % len(lines)]
        down, up = (line.get(name, getattr(self, name)) for name in ("down", "up"))
        return Device(
            seconds_per_step=line["seconds_per_step"],
            down=math.inf if down is None else down,
            up=math.inf if up is None else up,
            latency=line.get("latency", self.latency),
            dropout=line.get("dropout", self.dropout),
            on=_intervals(self.file)[client % len(lines)],
        )

    def available(self, clients: int, now: float) -> Sequence[int]:
        """Clients that are available now."""
        switches = _switches(self.file)
        return range(clients) if switches is None else Present(switches.on(now), clients)


class Present(Sequence[int]):
    """The clients whose line is on, increasing; whether one is among them is known without a list of all.

    Args:
        lines: whether each line is on [l].
        clients: how many clients there are, on or not.
    """

    def __init__(self, lines: Bools, clients: int) -> None:
        self._lines, self._clients = lines, clients

    def __len__(self) -> int:
        times, rest = divmod(self._clients, len(self._lines))
        return int(times * np.count_nonzero(self._lines) + np.count_nonzero(self._lines[:rest]))

    def __contains__(self, client: object) -> bool:
        return (
            isinstance(client, int) and client in range(self._clients) and bool(self._lines[client % len(self._lines)])
        )

    def __getitem__(self, index: Any) -> Any:
        return self._all[index].tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self._all.tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Ints:
        return np.array(self._all, dtype, copy=bool(copy))

    @cached_property
    def _all(self) -> Ints:
        return np.flatnonzero(np.resize(self._lines, self._clients))


class _Switches:
    """The times at which lines go on and off, in order; moving on in time looks at those in between alone."""

    def __init__(self, intervals: Sequence[tuple[tuple[float, float], ...] | None]) -> None:
        ends = [(end, line, step) for line, pairs in enumerate(intervals) for pair in pairs or ()
                for end, step in zip(pair, (1, -1), strict=True)]  # fmt: skip
        times, lines, steps = (np.array(column) for column in zip(*ends, strict=True))
        order = np.argsort(times, kind="stable")
        self._times, self._lines, self._steps = times[order], lines[order], steps[order]
        self._always = np.array([pairs is None for pairs in intervals], dtype=np.int64)
        self._count, self._done = self._always.copy(), 0  # intervals that each line is in, after so many switches
        self._on: Bools = self._count > 0

    def on(self, now: float) -> Bools:
        """Return whether each line is on [l] at a time."""
        done = int(np.searchsorted(self._times, now, side="right"))
        if done < self._done:
            self._count, self._done = self._always.copy(), 0
        if done != self._done or not done:
            passed = slice(self._done, done)
            np.add.at(self._count, self._lines[passed], self._steps[passed])
            self._on, self._done = self._count > 0, done
        return self._on


@lru_cache(maxsize=8)
def _rows(file: str) -> tuple[Mapping[str, str], ...]:
    try:
        reader = csv.DictReader(read_text(file).splitlines(keepends=True))
        rows, names = list(reader), [name.strip() for name in reader.fieldnames or ()]
    except FileNotFoundError:
        raise SettingError(f"there is no file {file}: a trace is a CSV file with a line for each client") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SettingError(f"{file} cannot be read as CSV: {error}") from None
    if not names:
        raise SettingError(f"{file} cannot be read as CSV: it is empty")
    if "seconds_per_step" not in names:
        raise SettingError(f"{file} must have a column 'seconds_per_step', got {', '.join(names)}")
    for name in names:
        if name not in COLUMNS:
            raise unknown("column of a trace called", name, COLUMNS)
    if not rows:
        raise SettingError(f"{file} must have a line for at least one client, got none")
    # cells beyond the header are under the key None, and those that a short line lacks are None
    return tuple({key.strip(): (value or "").strip() for key, value in row.items() if key} for row in rows)


@lru_cache(maxsize=8)
def _read(file: str) -> tuple[Mapping[str, float], ...]:
    # the header is line 1
    return tuple(_numbers(row, f"{file}, line {number}") for number, row in enumerate(_rows(file), 2))


def _numbers(row: Mapping[str, str], place: str) -> dict[str, float]:
    numbers = {}
    for name, text in row.items():
        if name in ("client", "on") or (not text and name != "seconds_per_step"):
            continue
        try:
            value = float(text)
        except ValueError:
            raise SettingError(f"{place}: {name} must be a number, got {text!r}") from None
        if not math.isfinite(value) or value < 0 or (name == "dropout" and value > 1):
            limit = "from 0 to 1" if name == "dropout" else "at least 0"
            raise SettingError(f"{place}: {name} must be {limit}, got {text}")
        # a transfer at this speed would never end
        if not value and name in ("down", "up"):
            raise SettingError(f"{place}: {name} must be above 0, got {text}")
        numbers[name] = value
    return numbers


@lru_cache(maxsize=8)
def _intervals(file: str) -> tuple[tuple[tuple[float, float], ...] | None, ...]:
    return tuple(_on(row.get("on", ""), f"{file}, line {number}") for number, row in enumerate(_rows(file), 2))


@lru_cache(maxsize=8)
def _switches(file: str) -> _Switches | None:
    """The switches of a trace, None where all lines are always on."""
    intervals = _intervals(file)
    return None if all(on is None for on in intervals) else _Switches(intervals)


def _on(text: str, place: str) -> tuple[tuple[float, float], ...] | None:
    if not text:
        return None
    message = f"{place}: on must be intervals like 0-3600;7200-9000, got {text!r}"
    if not _INTERVALS.fullmatch(text):
        raise SettingError(message)
    try:
        # the pattern lets through text like 1.2.3, which is no number
        pairs = [tuple(float(end) for end in pair.split("-")) for pair in text.split(";")]
    except ValueError:
        raise SettingError(message) from None
    if any(start >= stop for start, stop in pairs):
        raise SettingError(message)
    return tuple((start, stop) for start, stop in pairs)
