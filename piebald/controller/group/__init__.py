"""Who is averaged with whom."""

from piebald.controller.group.together import Together

__all__ = ["Together"]
