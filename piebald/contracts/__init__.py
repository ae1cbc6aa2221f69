"""Contracts: what server, clients and runtimes pass to one another, and what components are given.

Shapes: `p` numbers in a whole model, `s` of them shared (they come first, see `parameters.Layout`), `n` updates in a
cohort, `c` clients in a stack.  Client code is written for one client with plain arithmetic on the last axis; an engine
may hand it a stack of clients, so vectors carry a leading axis of `c` (1 where clients run one after another).
"""

from piebald.contracts.data import (
    SERVER_ID,
    Clients,
    Device,
    Fleet,
    HasServerRows,
    HoldsRows,
    InMemory,
    Rows,
    RowsAtSites,
    Split,
)
from piebald.contracts.messages import (
    MASKING,
    PartialSum,
    Query,
    Result,
    SumRequest,
    Task,
    Update,
    WeighsUpdates,
)
from piebald.contracts.result_form import MOST_ROWS, ResultForm, count_reason, described
from piebald.contracts.runtime import Checkpoint, ChecksSignatures, DismissesSites, Runtime, TakesClientState
from piebald.contracts.secrets import SIGNATURE, ClientSecrets, Signer, SumDemands
from piebald.contracts.server import Cohort, KeyAgreement, QueryRequest, RunRecorder, ServerContext, StepContext
from piebald.contracts.training import (
    ClientContext,
    GroupSettings,
    Personalizes,
    RowPrivacy,
    SendsInputMoments,
    SgdConfig,
    SgdOutcome,
    StateVector,
    StepFactor,
    StepSettings,
    TrainInput,
    TrainOutput,
    Trains,
    UpdateRule,
)

__all__ = [
    "MASKING",
    "MOST_ROWS",
    "SERVER_ID",
    "SIGNATURE",
    "Checkpoint",
    "ChecksSignatures",
    "ClientContext",
    "ClientSecrets",
    "Clients",
    "Cohort",
    "Device",
    "DismissesSites",
    "Fleet",
    "GroupSettings",
    "HasServerRows",
    "HoldsRows",
    "InMemory",
    "KeyAgreement",
    "PartialSum",
    "Personalizes",
    "Query",
    "QueryRequest",
    "Result",
    "ResultForm",
    "RowPrivacy",
    "Rows",
    "RowsAtSites",
    "RunRecorder",
    "Runtime",
    "SendsInputMoments",
    "ServerContext",
    "SgdConfig",
    "SgdOutcome",
    "Signer",
    "Split",
    "StateVector",
    "StepContext",
    "StepFactor",
    "StepSettings",
    "SumDemands",
    "SumRequest",
    "TakesClientState",
    "Task",
    "TrainInput",
    "TrainOutput",
    "Trains",
    "Update",
    "UpdateRule",
    "WeighsUpdates",
    "count_reason",
    "described",
]
