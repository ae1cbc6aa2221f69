"""A channel whose owner attacks."""

from __future__ import annotations

import math
from collections.abc import Callable

from piebald.vertical.channel import Channel, InMemoryChannel


class Tampered(Channel):
    """A channel that replaces one of the frames that are sent, and frames it well.

    Args:
        inner: the channel that carries the frames.
        number: which of them is replaced, from 0.
        change: what is sent instead, made of the frames up to this one.
    """

    def __init__(self, inner: Channel, number: int, change: Callable[[list[bytes]], bytes]) -> None:
        super().__init__()
        self.inner, self.number, self.change, self.frames = inner, number, change, []

    def send(self, frame: bytes) -> None:
        self.frames.append(frame)
        self.inner.send(self.change(self.frames) if len(self.frames) == self.number + 1 else frame)

    def receive(self, most: int, timeout: float) -> bytes:
        return self.inner.receive(most, timeout)

    def close(self) -> None:
        self.inner.close()


class Killed(BaseException):
    """The end of a process at once: nothing more is sent, nobody is told."""


class Mortal(InMemoryChannel):
    """A channel whose owner dies after so many messages, sent or received."""

    life = math.inf
    partner = "the other party"

    def _live(self) -> None:
        self.life -= 1
        if self.life < 0:
            raise Killed

    def send(self, frame):
        self._live()
        super().send(frame)

    def receive(self, most, timeout):
        frame = super().receive(most, timeout)
        self._live()
        return frame
