"""The nouns that all stages pass around: data, assignments, arrivals, updates, and the seam to a runtime.

Shapes: `p` numbers in a whole model, `s` of them shared (they come first, see `parameters.Layout`), `n` updates in a
cohort, `c` clients in a stack.  Client code is written for ONE client with plain arithmetic on the last axis; an engine
may hand it a stack of clients, so vectors carry a leading axis of `c` (1 where clients run one after another).
"""

from piebald.contracts.data import CENTRE, Clients, Device, Fleet, Rows, Split
from piebald.contracts.messages import ONE_WAY, SEALING, Arrival, Assignment, Pool, Pooled, Query, Update
from piebald.contracts.runtime import Checkpoint, Runtime
from piebald.contracts.secrets import SIGNATURE, Secrets, Signer
from piebald.contracts.server import Centre, Cohort, Meeting, Question, Recorder
from piebald.contracts.training import Descended, Descent, Learned, Local, Privacy, Start

__all__ = [
    "CENTRE",
    "ONE_WAY",
    "SEALING",
    "SIGNATURE",
    "Arrival",
    "Assignment",
    "Centre",
    "Checkpoint",
    "Clients",
    "Cohort",
    "Descended",
    "Descent",
    "Device",
    "Fleet",
    "Learned",
    "Local",
    "Meeting",
    "Pool",
    "Pooled",
    "Privacy",
    "Query",
    "Question",
    "Recorder",
    "Rows",
    "Runtime",
    "Secrets",
    "Signer",
    "Split",
    "Start",
    "Update",
]
