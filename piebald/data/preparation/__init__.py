"""One preparation for the tables of all clients: kinds of columns, what clients agree on, and a fitted transformer.

Nothing here trains or sends: `agreement.agree` is given a function that asks clients.
"""

from piebald.data.preparation.columns import KINDS as KINDS
from piebald.data.preparation.columns import Kind as Kind
from piebald.data.preparation.columns import classes_of as classes_of
from piebald.data.preparation.columns import guess_columns as guess_columns
from piebald.data.preparation.preparation import Preparation as Preparation
from piebald.data.preparation.preparation import PrepareSettings as PrepareSettings
