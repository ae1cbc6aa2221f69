"""Methods that FL-bench and FedLab have as their papers say: what Piebald and the programs are given, and ours.

Only NumPy is needed to import this.  The network is that of personal.py; batches are all rows of a client.
"""

from __future__ import annotations

import equations
from inputs import ROWS, TRAINING, USUAL, Arrays

FINE_TUNED = {"tune_epochs": 2}
ONE_STEP = {"q": equations.Q, "lr": TRAINING["lr"]}  # FedLab's losses are those of the last epoch: it has one here
SAME_EXAMPLES = 10  # of each client, in FedLab's FedNova


def results(given: Arrays) -> Arrays:
    """What Piebald makes of them: global models, and the model of the first client."""
    import ours
    import personal

    from piebald import recipes

    rounds, found = int(TRAINING["rounds"]), {}
    one_step = recipes.qfedavg(q=equations.Q, lr=TRAINING["lr"], steps=1, batch=ROWS)
    found["q-FedAvg, one step"] = ours.flat(ours.trained(one_step, given, rounds, model=personal.network()))
    for name, recipe in {
        "HDAFL": recipes.hdafl(**USUAL), "Fine-tuned": recipes.fine_tuned(**FINE_TUNED, **USUAL),
        "Local": recipes.local(**USUAL),
    }.items():  # fmt: skip
        with ours.kept(recipe, ours.federation(given), personal.network()) as run:
            found[f"{name}, client 0"] = personal.flat(run.model(0))
    found["FedNova, equal weights"] = equations.normalized(given, [SAME_EXAMPLES] * len(given["updates"]), momentum=0.0)
    return found
