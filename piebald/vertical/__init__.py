"""Vertical transfer learning: two parties with different features of partly the same people train together.

Only encrypted moments leave a party.  Here lie the parties, their messages, the encryption of these and the ledger of
what was disclosed; networks, partitions and the accounting of budgets are in other rooms.

    from piebald import vertical

    settings = vertical.TransferSettings.load("examples/transfer.toml")
    result = vertical.run(settings, out="runs/transfer")
    scores = vertical.predict("runs/transfer", "new.csv")

Modules: `kernels` (MMD in moment form), `encryption` (its backends), `loss_terms` and `transfer_methods` (the loss),
`protocol`, `party_messages` and `channel` (messages and their transport), `party` (one party), `transfer_runs` (a whole
run), `baselines` (what it must beat), `prediction` (the target's scores of new rows), `key_matching` (which rows both
parties have), `spelling` (of keys that are spelt differently) and `raw_tables` (checks before a run, and rows named by
a match).
"""

from typing import TYPE_CHECKING

from piebald.core.discovery import lazy_names

if TYPE_CHECKING:
    from piebald.vertical.key_matching import Matched as Matched
    from piebald.vertical.key_matching import match as match
    from piebald.vertical.party import Party as Party
    from piebald.vertical.party_data import PartyHolding as PartyHolding
    from piebald.vertical.prediction import TransferPredictor as TransferPredictor
    from piebald.vertical.prediction import predict as predict
    from piebald.vertical.transfer_results import TransferComparison as TransferComparison
    from piebald.vertical.transfer_results import TransferResult as TransferResult
    from piebald.vertical.transfer_results import result as result
    from piebald.vertical.transfer_runs import compare as compare
    from piebald.vertical.transfer_runs import resume as resume
    from piebald.vertical.transfer_runs import run as run
    from piebald.vertical.transfer_runs import run_party as run_party
    from piebald.vertical.transfer_settings import TransferSettings as TransferSettings

__getattr__, __dir__ = lazy_names(__name__)
