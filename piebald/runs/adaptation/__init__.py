"""Adaptation of a finished run to clients that took no part in its training.

Clients are held out until the end, or come later with a file; each of them tries several methods and keeps one.  The
choices of clients that took part are here as well, and the rules of choosing are those of `methods.choice`.
"""

from typing import TYPE_CHECKING

from piebald.core.discovery import lazy_names

if TYPE_CHECKING:
    from piebald.runs.adaptation.held_out import check_newcomers as check_newcomers
    from piebald.runs.adaptation.held_out import from_file as from_file
    from piebald.runs.adaptation.held_out import from_table as from_table
    from piebald.runs.adaptation.held_out import hold_out as hold_out
    from piebald.runs.adaptation.methods import EPOCHS as EPOCHS
    from piebald.runs.adaptation.methods import Adaptation as Adaptation
    from piebald.runs.adaptation.methods import AdaptationMethod as AdaptationMethod
    from piebald.runs.adaptation.methods import fit as fit

__getattr__, __dir__ = lazy_names(__name__)
