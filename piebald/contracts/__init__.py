"""Contracts: what server, clients and runtimes pass to one another, and what components are given.

A contract is a protocol, a frozen value, or the base class of components.  Nothing here trains, sends, or reads a file.

Shapes: `p` numbers in a whole model, `s` of them shared (they come first, see `parameters.Layout`), `n` updates in a
cohort, `c` clients in a stack.  Client code is written for one client with plain arithmetic on the last axis; an engine
may hand it a stack of clients, so vectors carry a leading axis of `c` (1 where clients run one after another).
"""

from piebald.contracts.component import Component as Component
from piebald.contracts.data import SERVER_ID as SERVER_ID
from piebald.contracts.data import Clients as Clients
from piebald.contracts.data import Device as Device
from piebald.contracts.data import Fleet as Fleet
from piebald.contracts.data import HasPublicRows as HasPublicRows
from piebald.contracts.data import HasServerRows as HasServerRows
from piebald.contracts.data import HoldsRows as HoldsRows
from piebald.contracts.data import InMemory as InMemory
from piebald.contracts.data import ModelSpec as ModelSpec
from piebald.contracts.data import Rows as Rows
from piebald.contracts.data import RowsAtSites as RowsAtSites
from piebald.contracts.data import Split as Split
from piebald.contracts.messages import MASKING as MASKING
from piebald.contracts.messages import MOST_REMEMBERED as MOST_REMEMBERED
from piebald.contracts.messages import MOST_ROWS as MOST_ROWS
from piebald.contracts.messages import SUM as SUM
from piebald.contracts.messages import WEIGHT as WEIGHT
from piebald.contracts.messages import Hiding as Hiding
from piebald.contracts.messages import OwnChoice as OwnChoice
from piebald.contracts.messages import PartialSum as PartialSum
from piebald.contracts.messages import Query as Query
from piebald.contracts.messages import Result as Result
from piebald.contracts.messages import ResultForm as ResultForm
from piebald.contracts.messages import SumRequest as SumRequest
from piebald.contracts.messages import Task as Task
from piebald.contracts.messages import Update as Update
from piebald.contracts.messages import WeighsUpdates as WeighsUpdates
from piebald.contracts.messages import count_reason as count_reason
from piebald.contracts.messages import described as described
from piebald.contracts.messages import infinite_reason as infinite_reason
from piebald.contracts.server import LARGEST_MEMBER as LARGEST_MEMBER
from piebald.contracts.server import SHOWN_BYTES as SHOWN_BYTES
from piebald.contracts.server import SIGNATURE as SIGNATURE
from piebald.contracts.server import AsksClients as AsksClients
from piebald.contracts.server import Checkpoint as Checkpoint
from piebald.contracts.server import ChecksSignatures as ChecksSignatures
from piebald.contracts.server import ClientSecrets as ClientSecrets
from piebald.contracts.server import Cohort as Cohort
from piebald.contracts.server import DismissesSites as DismissesSites
from piebald.contracts.server import KeyAgreement as KeyAgreement
from piebald.contracts.server import QueryRequest as QueryRequest
from piebald.contracts.server import RunRecorder as RunRecorder
from piebald.contracts.server import Runtime as Runtime
from piebald.contracts.server import ServerContext as ServerContext
from piebald.contracts.server import Signer as Signer
from piebald.contracts.server import StatesRows as StatesRows
from piebald.contracts.server import StepContext as StepContext
from piebald.contracts.server import SumDemands as SumDemands
from piebald.contracts.server import TakesClientState as TakesClientState
from piebald.contracts.server import TellsAbsences as TellsAbsences
from piebald.contracts.server import shown_digest as shown_digest
from piebald.contracts.server import task_digest as task_digest
from piebald.contracts.training import PLAIN_PASSES as PLAIN_PASSES
from piebald.contracts.training import PLAIN_STEP as PLAIN_STEP
from piebald.contracts.training import Batches as Batches
from piebald.contracts.training import ClientContext as ClientContext
from piebald.contracts.training import Disclosure as Disclosure
from piebald.contracts.training import GroupSettings as GroupSettings
from piebald.contracts.training import LocalLoss as LocalLoss
from piebald.contracts.training import LocalStep as LocalStep
from piebald.contracts.training import LossBatch as LossBatch
from piebald.contracts.training import PassSettings as PassSettings
from piebald.contracts.training import Personalizes as Personalizes
from piebald.contracts.training import Precision as Precision
from piebald.contracts.training import RowOutputs as RowOutputs
from piebald.contracts.training import RowPrivacy as RowPrivacy
from piebald.contracts.training import SgdConfig as SgdConfig
from piebald.contracts.training import SgdOutcome as SgdOutcome
from piebald.contracts.training import Slope as Slope
from piebald.contracts.training import Slopes as Slopes
from piebald.contracts.training import StateVector as StateVector
from piebald.contracts.training import StepFactor as StepFactor
from piebald.contracts.training import StepPoint as StepPoint
from piebald.contracts.training import StepSettings as StepSettings
from piebald.contracts.training import StepsOutcome as StepsOutcome
from piebald.contracts.training import TrainInput as TrainInput
from piebald.contracts.training import TrainOutput as TrainOutput
from piebald.contracts.training import Trains as Trains
from piebald.contracts.training import UpdateRule as UpdateRule
from piebald.contracts.training import VectorStep as VectorStep
