"""How the global model moves, given the averaged change."""

from typing import TYPE_CHECKING, Any

from piebald.discovery import public_classes

_classes = public_classes(__name__)
globals().update(_classes)
__all__ = sorted(_classes)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
