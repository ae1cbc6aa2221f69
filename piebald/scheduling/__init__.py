"""When the server requests training, and when it steps."""

from piebald.scheduling.asynchronous import Asynchronous, Buffered
from piebald.scheduling.deadline import Deadline
from piebald.scheduling.synchronous import Synchronous

__all__ = [
    "Asynchronous",
    "Buffered",
    "Deadline",
    "Synchronous",
]
