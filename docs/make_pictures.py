"""Draws the pictures of docs/images/partitions: what each kind of partition makes of scikit-learn's digits.

python docs/make_pictures.py
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "images" / "partitions"

EXAMPLES = {
    "by_embedding": "ByEmbedding(clients=6)",
    "by_owner": 'ByOwner(owner="person")',
    "dirichlet": "Dirichlet(clients=20, alpha=0.3)",
    "disjoint": "Disjoint(clients=6, classes_each=3, shared_by=2)",
    "iid": "Iid(clients=10, sizes=PowerLaw())",
    "non_iid": 'NonIid(clients=10, classes_each="8x1,4x1,3x8", sizes=PowerLaw())',
    "shards": "Shards(clients=20)",
}


def main() -> None:
    """Draw them all."""
    import numpy as np
    from matplotlib.figure import Figure

    from piebald import data, partition
    from piebald.partition import pictures

    stored = data.digits()
    # The digits name no writers; four made-up people of different habits stand in for them.
    people = (np.arange(len(stored)) * 7 // 3 + stored.y.numpy()) % 9 // 2
    owners = {"person": data.Owners.of(people)}
    digits = data.DataSet(stored.name, stored.x, stored.y, stored.classes, owners)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, example in EXAMPLES.items():
        clients = eval(example, vars(partition)).split(digits)
        figure = Figure(figsize=(10, 3), layout="constrained")
        left, right = figure.subplots(1, 2)
        pictures.heat_map(left, clients)
        if name == "by_embedding":
            pictures.scatter(right, clients, pictures.flat)
        else:
            pictures.sizes(right, clients)
        figure.savefig(FOLDER / f"{name}.png", dpi=80)


if __name__ == "__main__":
    main()
