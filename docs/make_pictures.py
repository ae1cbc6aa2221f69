"""Draw the pictures of docs/images/partitions: partitions, sizes, changes and fleets, on the digits.

python docs/make_pictures.py
python docs/make_pictures.py status-page  # images/status-page.png, of a federation of three sites, by chromium
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from piebald.data import DataSet

FOLDER = Path(__file__).parent / "images" / "partitions"

EXAMPLES = {
    "by_embedding": "ByEmbedding(clients=6)",
    "by_owner": 'ByOwner(owner="person")',
    "class_shares": "ClassShares(shares=[[9 - abs(label - 2 * k) for label in range(10)] for k in range(5)])",
    "dirichlet": "Dirichlet(clients=20, alpha=0.3)",
    "disjoint": "Disjoint(clients=6, classes_each=3, shared_by=2)",
    "iid": "Iid(clients=10, sizes=PowerLaw())",
    "non_iid": 'NonIid(clients=10, classes_each="8x1,4x1,3x8", sizes=PowerLaw())',
    "shards": "Shards(clients=20)",
}
SIZES = ["Uniform()", "Skewed(ratio=8)", "PowerLaw(exponent=1.5)", "Quantity(alpha=0.5)"]
CHANGES = ["Blur(sigma=1)", "Contrast(factor=0.3)", "Noise(sigma=0.2)", "Sensor(gain=0.5, bias=0.3)"]
FLIPS = [
    "FlipPairs(pairs=((0, 4), (1, 5), (2, 6), (3, 7)))",
    "FlipRandom(fraction=0.5)",
    "FlipTo(target=0, source=(7,))",
]
FLEETS = [
    "Homogeneous(seconds_per_step=2)",
    'FastSlow(fast=1, slow_factor=5, first="fast")',
    "LogNormal(seconds_per_step=2, sigma=0.5)",
]
VERTICAL = 'Vertical(features=["pay", "debt", "rent"], overlap=12)'


def main() -> None:
    """Draw all pictures."""
    import numpy as np
    from matplotlib.figure import Figure

    from piebald import data
    from piebald.data.measures import pictures

    stored = data.digits()
    # The digits name no writers; four made-up people of different habits stand in for them.
    people = (np.arange(len(stored)) * 7 // 3 + stored.y.numpy()) % 9 // 2
    owners = {"person": data.Owners.of(people)}
    digits = data.DataSet(stored.name, stored.x, stored.y, stored.classes, owners)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, example in EXAMPLES.items():
        clients = made(example).split(digits)
        figure = Figure(figsize=(10, 3), layout="constrained")
        left, right = figure.subplots(1, 2)
        pictures.heat_map(left, clients)
        if name == "by_embedding":
            pictures.scatter(right, clients, pictures.flat)
        else:
            pictures.sizes(right, clients)
        figure.savefig(FOLDER / f"{name}.png", dpi=80)
    for name, draw in (("sizes", sizes), ("changes", changes), ("flips", flips), ("fleets", fleets)):
        draw(Figure(figsize=(10, 2.8), layout="constrained"), stored).savefig(FOLDER / f"{name}.png", dpi=80)
    vertical(Figure(figsize=(10, 2.8), layout="constrained")).savefig(FOLDER / "vertical.png", dpi=80)


def made(example: str) -> Any:
    """Evaluate the expression that makes a component."""
    from piebald import partition

    names = {name: getattr(partition, name) for name in dir(partition)}  # imported when they are asked for
    return eval(example, names)


def sizes(figure: Figure, digits: DataSet) -> Figure:
    """Rows of each of 12 clients, for each kind of sizes."""
    from piebald import partition
    from piebald.data.measures import pictures

    for ax, example in zip(figure.subplots(1, len(SIZES), sharey=True), SIZES, strict=True):
        pictures.sizes(ax, partition.Iid(clients=12, sizes=made(example), test=0.0).split(digits))
        ax.set_title(example, loc="left", fontsize=9)
    return figure


def changes(figure: Figure, digits: DataSet) -> Figure:
    """Unchanged digits, and the same digits with each change of inputs."""
    from piebald import partition

    shown = ["", *CHANGES]
    for ax, example in zip(figure.subplots(1, len(shown)), shown, strict=True):
        asked = (made(example),) if example else None
        clients = partition.Iid(clients=1, test=0.0, changes=asked).split(digits)
        rows = clients.x[[0, 1, 2, 3], 0].numpy()
        ax.imshow(rows.reshape(2, 2, 8, 8).transpose(0, 2, 1, 3).reshape(16, 16), cmap="gray_r", vmin=0, vmax=1)
        ax.set_title(example or "unchanged", fontsize=9)
        ax.axis("off")
    return figure


def flips(figure: Figure, digits: DataSet) -> Figure:
    """New labels over old ones, for each change of labels."""
    import numpy as np

    from piebald import partition

    label = digits.y.numpy()
    for ax, example in zip(figure.subplots(1, len(FLIPS)), FLIPS, strict=True):
        clients = partition.Iid(clients=1, test=0.0, changes=(made(example),)).split(digits)
        table = np.zeros((10, 10))
        np.add.at(table, (label, clients.y.numpy()), 1)
        ax.imshow(table / table.sum(1, keepdims=True), cmap="Blues", vmin=0, vmax=1)
        ax.set_xticks(range(10))
        ax.set_yticks(range(10))
        ax.set_xlabel("becomes")
        ax.set_ylabel("label")
        ax.set_title(example.replace("pairs=", ""), fontsize=8)
    return figure


def fleets(figure: Figure, digits: DataSet) -> Figure:
    """Seconds of a step on each of 12 devices, for each kind of fleet."""
    from piebald.data.measures import pictures

    for ax, example in zip(figure.subplots(1, len(FLEETS), sharey=True), FLEETS, strict=True):
        pictures.devices(ax, made(example), 12)
        ax.set_title(example, loc="left", fontsize=8)
    return figure


def vertical(figure: Figure) -> Figure:
    """Features and rows of each of two parties."""
    import numpy as np
    import torch
    from matplotlib.colors import ListedColormap

    from piebald import data

    names = ["age", "sex", "town", "pay", "debt", "rent"]
    people = data.DataSet("people", torch.rand(40, 6), torch.arange(40) % 2, ["no", "yes"], features=names)
    parties = made(VERTICAL).split(people)
    table = np.zeros((6, 40))
    for number, party in enumerate((parties.active, parties.passive), 1):
        table[np.ix_([names.index(name) for name in party.features], party.ids)] = number
    order = np.lexsort((table[0] == 0, table[3] == 0))
    ax = figure.subplots()
    ax.imshow(table[:, order], aspect="auto", cmap=ListedColormap(["white", "#2f6db5", "#b5622f"]), vmin=0, vmax=2)
    ax.set_yticks(range(6), names)
    ax.set_xlabel("rows, those of both parties first")
    ax.set_title("blue: the active party, which has the labels; brown: the passive one", loc="left", fontsize=9)
    return figure


FEDERATION = """
name = "three-hospitals"
host = "localhost"
port = 28477
sites = ["north", "south", "east"]
"""
EXPERIMENT = """
rounds = 2000
evaluate = { every = 10 }

[partition]
kind = "sites"
clients = ["north", "south", "east"]
inputs = [30]
classes = ["benign", "malignant"]

[model]
name = "mlp"

[recipe]
name = "fedavg"
lr = 0.1
epochs = 1
"""
PAGE = 28478  # port of the status page


def status_page(steps: int = 120) -> None:
    """Take a picture of the status page of a federation that has made so many steps."""
    import numpy as np
    from sklearn.datasets import load_breast_cancer

    measured = load_breast_cancer(as_frame=True)
    table = np.log1p(measured.data)
    table["diagnosis"] = measured.target.map({0: "malignant", 1: "benign"})
    sites = ("north", "south", "east")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "federation.toml").write_text(FEDERATION)
        (folder / "experiment.toml").write_text(EXPERIMENT)
        piebald = [sys.executable, "-m", "piebald.cli"]
        subprocess.run([*piebald, "provision", "federation.toml"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        commands = [["server", "credentials/server", "experiment.toml", "--out", "run", "--status-port", str(PAGE)]]
        for number, site in enumerate(sites):
            table[number::3].to_csv(folder / f"{site}.csv", index=False)
            commands.append(["client", f"credentials/{site}", "--data", f"{site}.csv", "--target", "diagnosis"])
        with (folder / "log.txt").open("wb") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            parties = [
                subprocess.Popen([*piebald, *command], cwd=folder, stdout=log, stderr=log, env=environment)
                for command in commands
            ]
            try:
                while f"step {steps}/".encode() not in (folder / "log.txt").read_bytes():
                    if parties[0].poll() is not None:
                        raise SystemExit((folder / "log.txt").read_text())
                    time.sleep(1)
                picture = FOLDER.parent / "status-page.png"
                flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
                shot = ["--window-size=1400,1400", f"--screenshot={picture}", f"http://localhost:{PAGE}/"]
                subprocess.run(["chromium", *flags, *shot], check=True, stderr=subprocess.DEVNULL, timeout=120)
            finally:
                for party in parties:
                    party.kill()
                    party.wait()


if __name__ == "__main__":
    status_page() if sys.argv[1:] == ["status-page"] else main()
