"""The papers' equations in plain PyTorch, without any framework: methods that no maintained program has so."""

import sys

import equations
import numpy as np
import personal
import torch
from inputs import ROWS, TRAINING, folder_of
from torch.nn.functional import cross_entropy

given, out = folder_of(sys.argv)
x, y = torch.from_numpy(given["x"]), torch.from_numpy(given["y"])
LR, EPOCHS, ROUNDS, CLIENTS = TRAINING["lr"], TRAINING["epochs"], TRAINING["rounds"], len(given["x"])
network = personal.network()
START = torch.from_numpy(personal.flat(network))


def outputs(w, rows):
    """A row's logits and features under the parameters w."""
    shapes = [one.shape for one in network.parameters()]
    parts = w.split([shape.numel() for shape in shapes])
    body, shift, head, bias = (part.view(shape) for part, shape in zip(parts, shapes, strict=True))
    features = torch.tanh(rows @ body.T + shift)
    return features @ head.T + bias, features


def loss_of(w, client):
    """The mean loss of a client's rows."""
    return cross_entropy(outputs(w, x[client])[0], y[client])


def slope(w, client, loss=loss_of):
    """Its gradient."""
    w = w.clone().requires_grad_()
    return torch.autograd.grad(loss(w, client), w)[0]


def trained(w, client, loss=loss_of, correction=0.0):
    """A client's steps."""
    for _ in range(EPOCHS):
        w = w - LR * (slope(w, client, loss) + correction)
    return w


def federated(step, rounds=ROUNDS):
    """Rounds of a step, from the model to the next one."""
    w = START
    for number in range(rounds):
        w = step(w, number)
    return w.numpy()


def mean(models):
    """Of equally many rows each."""
    return torch.stack(models).mean(0)


def q_fair(w, number):
    """Li et al. 2020, algorithm 2, with L = 1 / lr."""
    loss = [float(loss_of(w, client)) for client in range(CLIENTS)]
    steps = [(w - trained(w, client)) / LR for client in range(CLIENTS)]
    up = [value**equations.Q * one for value, one in zip(loss, steps, strict=True)]
    down = [
        equations.Q * value ** (equations.Q - 1) * float(one.square().sum()) + value**equations.Q / LR
        for value, one in zip(loss, steps, strict=True)
    ]
    return w - sum(up) / sum(down)


def tilted(w, number):
    """Li et al. 2021, lemma 1: clients as groups."""
    weights = torch.stack([(equations.TILT * loss_of(w, client)).exp() for client in range(CLIENTS)])
    return (weights / weights.sum()) @ torch.stack([trained(w, client) for client in range(CLIENTS)])


mixture = np.full(CLIENTS, 1 / CLIENTS)


def agnostic(w, number):
    """Mohri et al. 2019: weights that climb, projected onto the simplex by bisection."""
    global mixture
    made = sum(float(share) * trained(w, client) for client, share in enumerate(mixture))
    point = mixture + equations.LAMBDA_LR * np.array([float(loss_of(w, client)) for client in range(CLIENTS)])
    low, high = point.min() - 1, point.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(point - middle, 0).sum() > 1 else (low, middle)
    mixture = np.maximum(point - low, 0)
    return made


def sharp(w, number):
    """Foret et al. 2021, eq. 2 and 3."""
    models = []
    for client in range(CLIENTS):
        own = w
        for _ in range(EPOCHS):
            g = slope(own, client)
            own = own - LR * slope(own + equations.RHO * g / g.norm(), client)
        models.append(own)
    return mean(models)


def near(center, mu, loss=loss_of):
    """A loss with mu / 2 |w - center|^2 added."""
    return lambda w, client: loss(w, client) + mu / 2 * (w - center).square().sum()


def proximal(w, number):
    """Li et al. 2020, eq. 2."""
    return mean([trained(w, client, near(w, equations.PROX)) for client in range(CLIENTS)])


def dynamic():
    """Acar et al. 2021, algorithm 1, with all devices."""
    own, h, alpha = [torch.zeros_like(START) for _ in range(CLIENTS)], torch.zeros_like(START), equations.FEDDYN

    def step(w, number):
        nonlocal h
        models = [trained(w, client, near(w, alpha), -own[client]) for client in range(CLIENTS)]
        own[:] = [one - alpha * (model - w) for one, model in zip(own, models, strict=True)]
        h = h - alpha * (mean(models) - w)
        return mean(models) - h / alpha

    return federated(step)


def ditto():
    """Li et al. 2021, algorithm 1: a model beside the global one, drawn towards it."""
    w, own = START, START
    for _ in range(ROUNDS):
        own = trained(own, 0, near(w, equations.DITTO))
        w = mean([trained(w, client) for client in range(CLIENTS)])
    return own.numpy()


def head_shared():
    """Liang et al. 2020, algorithm 1: representations stay, the head is averaged."""
    models, body = [START] * CLIENTS, sum(one.numel() for one in network.base.parameters())
    for _ in range(ROUNDS):
        models = [trained(w, client) for client, w in enumerate(models)]
        head = mean([w[body:] for w in models])
        models = [torch.cat([w[:body], head]) for w in models]
    return models[0].numpy()


def decorrelated(w, client):
    """The loss with the squared Frobenius norm of the features' correlation matrix, over its size."""
    logits, features = outputs(w, x[client])
    correlation = torch.corrcoef(features.T)
    return (
        cross_entropy(logits, y[client]) + equations.DECORRELATION * correlation.square().sum() / len(correlation) ** 2
    )


def scaffold():
    """Karimireddy et al. 2020, algorithm 1 with option I."""
    own, common = [torch.zeros_like(START) for _ in range(CLIENTS)], torch.zeros_like(START)

    def step(w, number):
        nonlocal common
        models = [trained(w, client, correction=common - own[client]) for client in range(CLIENTS)]
        fresh = [slope(w, client) for client in range(CLIENTS)]
        common = common + mean([one - old for one, old in zip(fresh, own, strict=True)])
        own[:] = fresh
        return mean(models)

    return federated(step)


def hessian_free(w, number):
    """Fallah et al. 2020, algorithm 1 with the differences of section 5."""
    alpha, delta, models = equations.PER_FEDAVG_HF["alpha"], equations.PER_FEDAVG_HF["delta"], []
    for client in range(CLIENTS):
        own = w
        for _ in range(EPOCHS):
            g = slope(own - alpha * slope(own, client), client)
            curved = (slope(own + delta * g, client) - slope(own - delta * g, client)) / (2 * delta)
            own = own - LR * (g - alpha * curved)
        models.append(own)
    return mean(models)


def hierarchical():
    """Liu et al. 2020, algorithm 1: kappa_2 rounds within regions."""
    models = [START for _ in equations.REGIONS]
    for number in range(equations.REGIONS_RUN):
        models = [
            mean([trained(w, client) for client in members])
            for w, members in zip(models, equations.REGIONS, strict=True)
        ]
        if (number + 1) % equations.REGION_ROUNDS == 0:
            sizes = torch.tensor([float(len(members)) for members in equations.REGIONS])
            models = [(sizes / sizes.sum()) @ torch.stack(models)] * len(models)
    return models[0].numpy()


def mixed():
    """Deng et al. 2020, algorithm 1, with the weight learned at the first step of a task."""
    w, own, weights = START, [START] * CLIENTS, [equations.APFL["alpha"]] * CLIENTS
    for _ in range(ROUNDS):
        models = []
        for client in range(CLIENTS):
            shared, v, a = w, own[client], weights[client]
            for step in range(EPOCHS):
                g = slope(a * v + (1 - a) * shared, client)
                learned = a if step else min(max(a - LR * float((v - shared) @ g), 0.0), 1.0)
                shared, v, a = shared - LR * slope(shared, client), v - LR * a * g, learned
            own[client], weights[client] = v, a
            models.append(shared)
        w = mean(models)
    return (weights[0] * own[0] + (1 - weights[0]) * w).numpy()


def towards(common):
    """The loss with FedProto's term, the mean squared difference of a row's features from those of its class."""

    def loss(w, client):
        logits, features = outputs(w, x[client])
        term = 0.0 if common is None else (features - common[y[client]]).square().mean()
        return cross_entropy(logits, y[client]) + equations.FEDPROTO["lam"] * term

    return loss


def prototypes():
    """Tan et al. 2022, algorithm 1."""
    models, common = [START] * CLIENTS, None
    for _ in range(ROUNDS):
        models = [trained(w, client, towards(common)) for client, w in enumerate(models)]
        told = []
        for client, w in enumerate(models):
            features = outputs(w, x[client])[1]
            told.append(torch.stack([features[y[client] == label].mean(0) for label in range(int(y.max()) + 1)]))
        common = torch.stack(told).mean(0)
    return models[0].numpy()


def digested(w, public, consensus):
    """Steps along the mean absolute difference from the consensus."""
    for _ in range(equations.FEDMD["digest_steps"]):
        g = slope(w, 0, lambda v, _: (outputs(v, public)[0] - consensus).abs().mean())
        w = w - equations.FEDMD["digest_lr"] * g
    return w


def distilled():
    """Li and Wang 2019, algorithm 1: digest the consensus, revisit the own rows, communicate."""
    public, models, consensus = x[-1, :10], [START] * CLIENTS, None
    for _ in range(ROUNDS):
        if consensus is not None:
            models = [digested(w, public, consensus) for w in models]
        models = [trained(w, client) for client, w in enumerate(models)]
        consensus = torch.stack([outputs(w, public)[0] for w in models]).mean(0)
    return models[0].numpy()


def normed(private):
    """FedAvg of a network with a batch norm, whose numbers with these names stay at each client."""
    model = equations.normed(given)
    names = [name for name in model.state_dict() if not name.endswith("num_batches_tracked")]
    states = [{name: model.state_dict()[name].clone() for name in names} for _ in range(CLIENTS)]
    for _ in range(ROUNDS):
        for client in range(CLIENTS):
            model.load_state_dict(states[client], strict=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            for _ in range(EPOCHS):
                optimizer.zero_grad()
                cross_entropy(model(x[client]), y[client]).backward()
                optimizer.step()
            states[client] = {name: model.state_dict()[name].clone() for name in names}
        for name in names:
            if not private(name):
                shared = torch.stack([state[name] for state in states]).mean(0)
                for state in states:
                    state[name] = shared
    return torch.cat([states[0][name].flatten() for name in names]).numpy()


def packed(pack):
    """FedAvg whose clients keep what `pack` leaves out and add it to their next change (Stich et al. 2018)."""
    kept = [torch.zeros_like(START) for _ in range(CLIENTS)]

    def step(w, number):
        sent = []
        for client in range(CLIENTS):
            wanted = trained(w, client) - w + kept[client]
            sent.append(pack(wanted, client, number))
            kept[client] = wanted - sent[-1]
        return w + mean(sent)

    return federated(step)


def count():
    """How many numbers a share is."""
    return round(equations.SHARE * len(START))


def top(wanted, client, number):
    """The largest numbers."""
    made = torch.zeros_like(wanted)
    places = wanted.abs().topk(count()).indices
    made[places] = wanted[places]
    return made


def at_random(wanted, client, number):
    """The numbers at the places that were drawn."""
    made, places = torch.zeros_like(wanted), torch.from_numpy(given["events, random-k"][number, client])
    assert len(places) == len(places.unique()) == count()
    made[places] = wanted[places]
    return made


def by_tensor(change, of):
    """A function of each tensor of the network."""
    shapes = [one.shape for one in network.parameters()]
    parts = change.split([shape.numel() for shape in shapes])
    return torch.cat([of(part.view(shape)).flatten() for part, shape in zip(parts, shapes, strict=True)])


def signs(wanted, client, number):
    """Karimireddy et al. 2019, algorithm 1, for each tensor."""
    return by_tensor(wanted, lambda one: one.abs().mean() * torch.where(one >= 0, 1.0, -1.0))


bases = {}


def low_rank(wanted, client, number):
    """Vogels et al. 2019, algorithm 1, of one client's own change: P = M Q, orthogonal; Q = M' P."""
    drawn = iter(torch.from_numpy(given["events, low rank"]).split([personal.FEATURES, personal.HIDDEN]))
    place = 0

    def product(one):
        nonlocal place
        if one.dim() < 2:
            return one
        q, place = bases.get((client, place), next(drawn).view(-1, equations.RANK)), place + 1
        p = one @ q
        p = p / p.norm()
        bases[client, place - 1] = one.T @ p
        return p @ bases[client, place - 1].T

    return by_tensor(wanted, product)


def normalized():
    """Wang et al. 2020, eq. 7, with the a_i of momentum as the sum of a gradient's later shares."""
    rows = given["examples"] / given["examples"].sum()
    a = np.array([
        sum(sum(equations.MOMENTUM**later for later in range(steps - one)) for one in range(steps))
        for steps in equations.STEPS
    ])  # fmt: skip
    directions = given["updates"].astype(np.float64) / a[:, None]
    return (rows @ a) * (rows @ directions)


def neighbours():
    """Marfoq et al. 2022, eq. 7: votes of the nearest rows beside the model's probabilities."""
    (_, memory), (logits, asked) = outputs(START, x[0]), outputs(START, x[1])
    made = []
    for row, features in zip(logits.softmax(1), asked, strict=True):
        apart = (memory - features).square().sum(1).sqrt()
        near = apart.argsort()[: equations.NEIGHBOURS["k"]]
        votes = (-apart[near] / equations.NEIGHBOURS["scale"]).exp()
        shares = torch.stack([votes[y[0][near] == label].sum() for label in range(len(row))]) / votes.sum()
        made.append(equations.NEIGHBOURS["lam"] * shares + (1 - equations.NEIGHBOURS["lam"]) * row)
    return torch.stack(made).numpy()


def rounded():
    """Alistarh et al. 2017, section 3.1, with draws of its own."""
    draw = np.random.default_rng(3)
    vector = given["averages"][0, : given["weight"].size + given["bias"].size].astype(np.float64)
    levels = 2 ** (equations.QSGD["bits"] - 1) - 1
    found = []
    for _ in range(equations.QSGD["draws"]):
        made = []
        for bucket in np.split(vector, range(equations.QSGD["bucket"], len(vector), equations.QSGD["bucket"])):
            length = np.sqrt(np.square(bucket).sum())
            part = levels * np.abs(bucket) / length
            up = draw.random(len(bucket)) < part - np.floor(part)
            made.append(length * np.sign(bucket) * (np.floor(part) + up) / levels)
        found.append(equations.rounding_statistics(vector, np.concatenate(made)))
    return np.array(found)


def averaged(loss):
    """FedAvg with another loss."""
    return federated(lambda w, number: mean([trained(w, client, loss) for client in range(CLIENTS)]))


assert x.shape[1] == ROWS
found = {
    "q-FedAvg": federated(q_fair),
    "TERM": federated(tilted),
    "AFL": federated(agnostic),
    "FedProx": federated(proximal),
    "FedDyn": dynamic(),
    "FedSAM": federated(sharp),
    "FedDecorr": averaged(decorrelated),
    "SCAFFOLD, option I": scaffold(),
    "Per-FedAvg, Hessian-free": federated(hessian_free),
    "HierFAVG": hierarchical(),
    "Ditto, client 0": ditto(),
    "LG-FedAvg, client 0": head_shared(),
    "APFL, client 0": mixed(),
    "FedProto, client 0": prototypes(),
    "FedMD, client 0": distilled(),
    "SiloBN, client 0": normed(lambda name: "running" in name),
    "FedBN, client 0": normed(lambda name: name.startswith("1.")),
    "FedAvg, top-k": packed(top),
    "FedAvg, random-k": packed(at_random),
    "FedAvg, sign": packed(signs),
    "FedAvg, low rank": packed(low_rank),
    "FedNova": normalized(),
    "kNN-Per": neighbours(),
    "QSGD, draws": rounded(),
}
np.savez(out, **{name: np.asarray(value) for name, value in found.items()})
