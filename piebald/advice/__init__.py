"""Advice for clients that are not alike: should they train together, how, and what does each of them gain?"""

from piebald.advice.adviser import advise
from piebald.advice.answer import Advice
from piebald.advice.look import Look, look

__all__ = ["Advice", "Look", "advise", "look"]
