"""CFL's authors' program: its clients, lengths, cosines, cut and means, in the loop of its notebook.

Its sources lie in the folder clustered-federated-learning beside this environment's bin. It uses complete linkage,
where the paper's algorithm 1 uses single linkage: the same cut of two separate groups, another one of noise. Its
clients take a hundredth from the learning rate in each round, which is undone, and keep a fifth of the rows for tests.
"""

import sys
from pathlib import Path

import authors
import numpy as np
import personal
import torch
from inputs import ROWS, TRAINING, folder_of
from sklearn.cluster import AgglomerativeClustering
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(sys.executable).parents[1] / "clustered-federated-learning"))
import fl_devices

given, out = folder_of(sys.argv)


def renamed(affinity, linkage):
    """As scikit-learn now calls it."""
    return AgglomerativeClustering(metric=affinity, linkage=linkage)


def sgd(parameters):
    """The client's optimizer."""
    return torch.optim.SGD(parameters, lr=TRAINING["lr"])


fl_devices.AgglomerativeClustering = renamed
x, y = torch.from_numpy(given["x"]), torch.from_numpy(authors.labels(given))
clients = [
    fl_devices.Client(personal.network, sgd, TensorDataset(*rows), number, batch_size=ROWS, train_frac=1.0)
    for number, rows in enumerate(zip(x, y, strict=True))
]
server, clusters, measured = fl_devices.Server(personal.network, []), [np.arange(len(clients))], []
for number in range(TRAINING["rounds"]):
    for client in clients:
        client.optimizer.param_groups[0]["lr"] = TRAINING["lr"] / 0.99
        client.compute_weight_update(epochs=TRAINING["epochs"])
        client.reset()
    alike, fresh = server.compute_pairwise_similarities(clients), []
    for members in clusters:
        those = [clients[member] for member in members]
        mean, longest = server.compute_mean_update_norm(those), server.compute_max_update_norm(those)
        if number and mean < authors.CFL["eps1"] and longest > authors.CFL["eps2"]:
            halves = [members[half] for half in server.cluster_clients(alike[members][:, members])]
            measured += [mean, longest, alike[halves[0]][:, halves[1]].max()]
            fresh += halves
        else:
            fresh.append(members)
    clusters = fresh
    server.aggregate_clusterwise([[clients[member] for member in members] for members in clusters])

found = {
    "CFL, models": np.stack([personal.flat(client.model) for client in clients]),
    "CFL, lengths and cosine of the cut": np.array(measured),
}
for name, matrix in authors.updates(given).items():
    angles = fl_devices.pairwise_angles([{"all": torch.from_numpy(row)} for row in matrix])
    found[f"CFL, cut of {name}"] = authors.sides(len(matrix), server.cluster_clients(angles)[1])
np.savez(out, **found)
