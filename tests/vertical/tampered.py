"""A channel whose owner attacks."""

from __future__ import annotations

from collections.abc import Callable

from piebald.vertical.channel import Channel


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
