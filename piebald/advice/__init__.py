"""Advice for clients that are not alike: a look before training, a race of methods, and an answer.

Settings of recipes are chosen in `tuning`, which the race uses.  Nothing here trains by itself: runs are those of
`piebald.runs`, and their scores are compared by `piebald.report.paired`.
"""

from piebald.advice.adviser import advise
from piebald.advice.answer import Advice
from piebald.advice.first_look import Look, look

__all__ = ["Advice", "Look", "advise", "look"]
