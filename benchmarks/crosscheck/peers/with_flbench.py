"""FL-bench: its clients of FedAvg, FedBN, FedPer, Ditto and FedDyn, fine-tuning, average, and its server of CFL.

Its sources lie in the folder FL-bench beside this environment's bin.  Servers are made without their files and logs.
FedPer is HDAFL with the classifier private.  FedDyn's clients leave the proximal term to the optimizer's decay, which
is given, and CFL's server uses complete linkage, where the paper's algorithm 1 uses single linkage.  Its LG-FedAvg
shares the first layers, where the paper shares the last ones, and its APFL takes the gradient of the global model's
step a second time, so both are left out.  Its data sets and the networks of torchvision are not used, so it needs no
torchvision.
"""

import sys
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import authors
import equations
import frameworks
import numpy as np
import personal
import torch
from inputs import ROWS, TRAINING, folder_of
from omegaconf import OmegaConf

for unused in ("torchvision", "torchvision.models", "data", "data.utils", "data.utils.datasets"):
    sys.modules[unused] = MagicMock()
sys.path.insert(0, str(Path(sys.executable).parents[1] / "FL-bench"))
from src.client.ditto import DittoClient
from src.client.fedavg import FedAvgClient
from src.client.fedbn import FedBNClient
from src.client.feddyn import FedDynClient
from src.client.fedper import FedPerClient
from src.server.cfl import CFLServer
from src.server.fedavg import FedAvgServer
from src.server.feddyn import FedDynServer
from src.utils.models import DecoupledModel

given, out = folder_of(sys.argv)
COUNT = len(given["x"])


class Network(DecoupledModel):
    """The network to start from, in the two parts that FL-bench asks a model for."""

    def __init__(self):
        super().__init__()
        whole = personal.network()
        self.base, self.classifier = whole.base, whole.head


class Normed(DecoupledModel):
    """The same with a batch norm, which FL-bench knows by its name."""

    def __init__(self):
        super().__init__()
        linear, norm, bend, head = equations.normed(given)
        self.base, self.classifier = torch.nn.Sequential(OrderedDict(linear=linear, bn=norm, bend=bend)), head


class Rows(torch.utils.data.Dataset):
    """The rows of all clients."""

    def __init__(self, y):
        self.x, self.y = torch.from_numpy(given["x"]).flatten(0, 1), torch.from_numpy(y).flatten()

    def __getitem__(self, place):
        return self.x[place], self.y[place]

    def train(self):
        """For training."""

    def eval(self):
        """For evaluating."""


def client_of(kind, y=given["y"], decay=0.0, sends_changes=False, model=Network, buffers="global"):
    """The worker that plays all clients of one kind."""
    args = OmegaConf.create({
        "common": {
            "buffers": buffers, "batch_size": ROWS, "local_epoch": TRAINING["epochs"],
            "client_side_evaluation": False, "reset_optimizer_on_global_epoch": True,
            "test": {"client": {
                "finetune_epoch": frameworks.FINE_TUNED["tune_epochs"], "train": False, "val": False, "test": False,
            }},
        },
        "ditto": {"pers_epoch": TRAINING["epochs"], "lamda": equations.DITTO},
        "feddyn": {"alpha": equations.FEDDYN, "max_grad_norm": float("inf")},
    })  # fmt: skip
    own = [{"train": list(range(k * ROWS, (k + 1) * ROWS)), "val": [], "test": []} for k in range(COUNT)]

    def sgd(params):
        return torch.optim.SGD(params, lr=TRAINING["lr"], weight_decay=decay)

    return kind(
        model=model(), optimizer_cls=sgd, lr_scheduler_cls=None, args=args, dataset=Rows(y), data_indices=own,
        device=torch.device("cpu"), return_diff=sends_changes,
    )  # fmt: skip


def package_of(client, model, own, **more):
    """What a server hands to a client."""
    return {
        "client_id": client, "local_epoch": TRAINING["epochs"], "optimizer_state": {}, "lr_scheduler_state": {},
        "regular_model_params": model, "personal_model_params": own, **more,
    }  # fmt: skip


def parameters(model=Network):
    """Those to start from, by name."""
    return OrderedDict((name, value.detach().clone()) for name, value in model().named_parameters())


def flat(numbers):
    """All of them in one vector."""
    return torch.cat([value.flatten() for value in numbers.values()]).numpy()


def federated(worker, alone=False, model=Network, **more):
    """Rounds of a server's average; returns the global model and each client's own numbers."""
    server = SimpleNamespace(public_model_params=parameters(model), return_diff=False, model=model())
    first = {name: value for name, value in model().state_dict().items() if name in worker.personal_params_name}
    own = [first] * COUNT
    for _ in range(TRAINING["rounds"]):
        back = OrderedDict()
        for client in range(COUNT):
            added = {name: each[client] for name, each in more.items()}
            sent = {**server.public_model_params, **own[client]} if alone else server.public_model_params
            back[client] = worker.train(package_of(client, sent, own[client], **added))
            own[client] = back[client]["regular_model_params"] if alone else back[client]["personal_model_params"]
            for name, each in more.items():
                each[client] = back[client][name]
        if not alone:
            FedAvgServer.aggregate_client_updates(server, back)
    return server.public_model_params, own


def normalized():
    """FedBN's first client, without its count of batches."""
    shared, own = federated(client_of(FedBNClient, model=Normed, buffers="local"), model=Normed)
    ended = {**shared, **own[0]}
    return flat({name: ended[name] for name in Normed().state_dict() if not name.endswith("num_batches_tracked")})


def tuned():
    """FedAvg's global model after the first client's own epochs."""
    worker = client_of(FedAvgClient)
    model, own = federated(worker)
    worker.set_parameters(package_of(0, model, own[0]))
    worker.finetune()
    return personal.flat(worker.model)


def dynamic():
    """FedDyn's rounds: with all clients in each, its server's step."""
    worker = client_of(FedDynClient, decay=equations.FEDDYN, sends_changes=True)
    size = len(personal.flat(personal.network()))
    server = SimpleNamespace(
        public_model_params=parameters(), return_diff=True, model=Network(), nabla=torch.zeros(COUNT, size)
    )
    simple = FedDynServer.__new__(FedDynServer)
    simple.__dict__.update(vars(server))
    for _ in range(TRAINING["rounds"]):
        now = torch.from_numpy(flat(simple.public_model_params).copy())
        back = OrderedDict(
            (client, worker.train(package_of(
                client, simple.public_model_params, {}, local_dual_correction=simple.nabla[client] - now
            )))
            for client in range(COUNT)
        )  # fmt: skip
        simple.aggregate_client_updates(back)
    return flat(simple.public_model_params)


def clustered():
    """CFL's rounds by its server; the model of each client."""
    worker = client_of(FedAvgClient, authors.labels(given), sends_changes=True)
    server = CFLServer.__new__(CFLServer)
    server.train_clients = server.selected_clients = list(range(COUNT))
    server.args = OmegaConf.create({"cfl": {
        "eps_1": authors.CFL["eps1"], "eps_2": authors.CFL["eps2"], "min_cluster_size": 2, "start_clustering_round": 1,
    }})  # fmt: skip
    server.clients_model_params_diff, server.client_clusters = [None] * COUNT, [list(range(COUNT))]
    server.public_model_param_names = list(parameters())
    server.clients_personal_model_params = {client: parameters() for client in range(COUNT)}

    def train():
        return {
            client: worker.train(package_of(client, server.clients_personal_model_params[client], {}))
            for client in range(COUNT)
        }

    server.trainer = SimpleNamespace(train=train)
    for server.current_epoch in range(TRAINING["rounds"]):
        server.train_one_round()
    return np.stack([flat(model) for model in server.clients_personal_model_params.values()])


def averaged():
    """Given updates by their numbers of examples."""
    holder = torch.nn.Linear(given["updates"].shape[1], 1, bias=False)
    server = SimpleNamespace(
        public_model_params=OrderedDict(weight=holder.weight.detach().clone()), return_diff=False, model=holder
    )
    rows = zip(torch.from_numpy(given["updates"]), given["examples"].tolist(), strict=True)
    FedAvgServer.aggregate_client_updates(
        server, {k: {"weight": n, "regular_model_params": {"weight": row[None]}} for k, (row, n) in enumerate(rows)}
    )
    return server.public_model_params["weight"].flatten().numpy()


shared, own = federated(client_of(FedPerClient))
personal_models = [parameters() for _ in range(COUNT)]
federated(client_of(DittoClient), personalized_model_params=personal_models)
alone = federated(client_of(FedAvgClient), alone=True)[1]
np.savez(
    out,
    **{
        "weighted mean": averaged(),
        "FedBN, client 0": normalized(),
        "HDAFL, client 0": flat({**shared, **own[0]}),
        "Fine-tuned, client 0": tuned(),
        "Local, client 0": flat(alone[0]),
        "Ditto, client 0": flat(personal_models[0]),
        "FedDyn": dynamic(),
        "CFL, models": clustered(),
    },
)
