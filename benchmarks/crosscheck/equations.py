"""Methods that no maintained program has as their papers say: what Piebald and plain PyTorch are given, and ours.

Only NumPy is needed to import this.  The network is that of personal.py; batches are all rows of a client.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from inputs import CLIENTS, ROWS, TRAINING, USUAL, Arrays

Q, TILT, LAMBDA_LR = 1.5, 2.0, 0.3
RHO, DECORRELATION, APFL = 0.2, 0.5, {"alpha": 0.4}
PER_FEDAVG_HF = {"alpha": 0.1, "delta": 0.05}
FEDPROTO = {"lam": 0.7}
PROX, DITTO, FEDDYN = 0.3, 0.4, 0.1
FEDMD = {"digest_steps": 3, "digest_lr": 0.05}
REGIONS, REGION_ROUNDS, REGIONS_RUN = ((0, 1, 2, 3), (4, 5)), 2, 4
STEPS, MOMENTUM = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9), 0.6  # of the clients that FedNova averages
NEIGHBOURS = {"k": 5, "lam": 0.4, "scale": 1.5}
SHARE, RANK = 0.2, 1
QSGD = {"bits": 3, "bucket": 16, "draws": 400}
PACKED: dict[str, dict[str, Any]] = {
    "top-k": {"kind": "top_k", "share": SHARE},
    "random-k": {"kind": "random_k", "share": SHARE},
    "sign": {"kind": "sign"},
    "low rank": {"kind": "low_rank", "rank": RANK},
}


def results(given: Arrays) -> Arrays:
    """What Piebald makes of them; "events" are draws that another program cannot make, and is told."""
    import ours
    import personal

    from piebald import recipes

    rounds = int(TRAINING["rounds"])
    differences = recipes.per_fedavg(alpha=PER_FEDAVG_HF["alpha"], hessian="differences", **USUAL)
    made = {
        "q-FedAvg": recipes.qfedavg(q=Q, **USUAL),
        "TERM": recipes.term(t=TILT, **USUAL),
        "AFL": recipes.afl(lambda_lr=LAMBDA_LR, **USUAL),
        "FedProx": recipes.fedprox(mu=PROX, **USUAL),
        "FedDyn": recipes.feddyn(alpha=FEDDYN, **USUAL),
        "FedSAM": recipes.fedsam(rho=RHO, **USUAL),
        "FedDecorr": recipes.feddecorr(beta=DECORRELATION, **USUAL),
        "SCAFFOLD, option I": recipes.scaffold(option="I", **USUAL),
        "Per-FedAvg, Hessian-free": differences.with_(training={**differences.training.table(), **PER_FEDAVG_HF}),
    }
    found = {
        name: ours.flat(ours.trained(recipe, given, rounds, model=personal.network())) for name, recipe in made.items()
    }
    regions = recipes.hierfavg(regions=REGIONS, region_rounds=REGION_ROUNDS, **USUAL)
    found["HierFAVG"] = ours.flat(ours.trained(regions, given, REGIONS_RUN, model=personal.network()))
    found |= _own_models(given) | _packed(given)
    return found | {
        "FedNova": normalized(given, given["examples"].tolist(), MOMENTUM),
        "kNN-Per": _neighbours(given),
        "QSGD, draws": _rounded(given),
    }


def normed(given: Arrays) -> Any:
    """A network with a batch norm, from the same parameters."""
    import torch
    from personal import network, start
    from torch import nn

    plain, body = network(), start()["body weight"]
    with torch.no_grad():
        return nn.Sequential(plain.base[0], nn.BatchNorm1d(len(body)), nn.Tanh(), plain.head)


def all_numbers(model: Any) -> np.ndarray[Any, Any]:
    """Parameters and running statistics of a module, without counts of batches."""
    state = [value for name, value in model.state_dict().items() if not name.endswith("num_batches_tracked")]
    made: np.ndarray[Any, Any] = np.concatenate([one.numpy().ravel() for one in state])
    return made


def _own_models(given: Arrays) -> Arrays:
    """Of methods that give clients models of their own: that of the first client."""
    import ours
    import personal
    import torch

    import piebald
    from piebald import recipes
    from piebald.contracts import Rows

    clients = ours.federation(given)
    public = Rows(torch.from_numpy(given["x"][-1, :10]), torch.from_numpy(given["y"][-1, :10]))
    sharing = piebald.data.partition.PooledClients(
        clients.x, clients.y, {"train": clients.lists("train")}, classes=clients.classes, common=clients.common,
        public_rows=public,
    )  # fmt: skip
    made = {
        "Ditto": (recipes.ditto(lam=DITTO, personal_epochs=USUAL["epochs"], **USUAL), clients, personal.network()),
        "LG-FedAvg": (recipes.lg_fedavg(**USUAL), clients, personal.network()),
        "APFL": (recipes.apfl(**APFL, **USUAL), clients, personal.network()),
        "FedProto": (recipes.fedproto(**FEDPROTO, inference="classifier", **USUAL), clients, personal.network()),
        "FedMD": (recipes.fedmd(digest_batch=len(public), **FEDMD, **USUAL), sharing, personal.network()),  # type: ignore[arg-type]
        "SiloBN": (recipes.silobn(**USUAL), clients, normed(given)),
        "FedBN": (recipes.fedbn(**USUAL), clients, normed(given)),
    }
    found = {}
    for name, (recipe, held, model) in made.items():
        with ours.kept(recipe, held, model) as run:
            found[f"{name}, client 0"] = all_numbers(run.model(0))
    return found


def _packed(given: Arrays) -> Arrays:
    """FedAvg with packed updates and error feedback, with the places and the first basis that were drawn."""
    import ours
    import personal

    from piebald import recipes
    from piebald.methods.transforms.compression import WireContext
    from piebald.methods.transforms.low_rank import BASIS, LowRank
    from piebald.methods.transforms.random_k import RandomK

    found, rounds = {}, int(TRAINING["rounds"])
    for name, transform in PACKED.items():
        run = ours.trained(
            recipes.fedavg(**USUAL).with_(transforms=[transform]), given, rounds, model=personal.network()
        )
        found[f"FedAvg, {name}"] = ours.flat(run)
        work = run.work
    drawn = [
        [RandomK(share=SHARE).sent_places(WireContext(work.layout, work.seed, client, version)) for client in
         range(CLIENTS)] for version in range(rounds)
    ]  # fmt: skip
    basis = LowRank(rank=RANK).initial_state(work)[BASIS].numpy()
    return found | {"events, random-k": np.array(drawn), "events, low rank": basis}


def normalized(given: Arrays, examples: list[int], momentum: float) -> np.ndarray[Any, Any]:
    """FedNova's average of changes that took unequal numbers of steps."""
    import torch

    from piebald.contracts import Cohort, Update
    from piebald.methods.aggregation import Normalized

    nothing: Any = None  # it asks the server nothing
    matrix = torch.from_numpy(given["updates"])
    updates = [
        Update({"model": row}, rows, steps, {}, float(row.norm()))
        for row, rows, steps in zip(matrix, examples, STEPS, strict=True)
    ]
    step = Cohort(list(range(len(matrix))), [0] * len(matrix), updates, matrix, 0)
    made: np.ndarray[Any, Any] = Normalized(momentum=momentum).aggregate(step, nothing)[0].numpy()
    return made


def _neighbours(given: Arrays) -> np.ndarray[Any, Any]:
    """Probabilities of the second client's rows by the model and the rows of the first."""
    import personal
    import torch

    from piebald.models import NearestNeighbours

    x, y = torch.from_numpy(given["x"]), torch.from_numpy(given["y"])
    asked = NearestNeighbours(personal.network(), x[0], y[0], **NEIGHBOURS)  # type: ignore[arg-type]
    with torch.no_grad():
        made: np.ndarray[Any, Any] = asked(x[1]).exp().numpy()
    return made


def _rounded(given: Arrays) -> np.ndarray[Any, Any]:
    """Many draws of one vector by QSGD, each as `rounding_statistics`."""
    import ours

    from piebald import recipes
    from piebald.methods.transforms.compression import WireContext
    from piebald.methods.transforms.qsgd import Qsgd

    layout = ours.trained(recipes.fedavg(steps=1, batch=ROWS), given, 1).work.layout
    packing = Qsgd(bits=int(QSGD["bits"]), bucket=int(QSGD["bucket"]))
    vector = given["averages"][0, : layout.shared_trained]
    draws = [WireContext(layout, 0, 0, version) for version in range(QSGD["draws"])]
    return np.array([
        rounding_statistics(vector, packing.decode(packing.encode(vector, {}, draw)[0], draw)) for draw in draws
    ])  # fmt: skip


def rounding_statistics(vector: np.ndarray[Any, Any], rounded: np.ndarray[Any, Any]) -> tuple[float, float, float]:
    """What is left of the vector along itself, the squared error over the vector's, and numbers that became 0."""
    wide, made = vector.astype(np.float64), rounded.astype(np.float64)
    length = float(wide @ wide)
    return float(made @ wide) / length, float(np.square(made - wide).sum()) / length, float((made == 0).sum())
