"""Advice for clients that are not alike: should they train together, how, and what does each of them gain?"""

from piebald.advice.look import Look, look

__all__ = ["Look", "look"]
