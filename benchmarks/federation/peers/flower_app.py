"""The app that with_flower.py runs: one optimiser step on ten rows, so that there is little but travelling."""

import json
import statistics
import time
from itertools import pairwise
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client_app = ClientApp()
server_app = ServerApp()


def network(hidden):
    """An MLP for rows of 64 numbers and ten classes."""
    widths = [64, *(int(width) for width in hidden.split(",")), 10]
    layers = []
    for inside, out in pairwise(widths):
        layers += [torch.nn.Linear(inside, out), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


@client_app.train()
def train(message, context):
    """One step."""
    torch.set_num_threads(1)
    model = network(message.content["config"]["hidden"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.nn.functional.cross_entropy(model(torch.randn(10, 64)), torch.randint(10, (10,))).backward()
    optimiser.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": 10})}
    return Message(content=RecordDict(content), reply_to=message)


@server_app.main()
def main(grid, context):
    """Time single messages, or count how many all sites answer."""
    config = context.run_config
    model = network(config["hidden"])
    while len(nodes := list(grid.get_node_ids())) < config["sites"]:
        time.sleep(0.1)

    def message(node):
        content = {"arrays": ArrayRecord(model.state_dict()), "config": ConfigRecord({"hidden": config["hidden"]})}
        return Message(content=RecordDict(content), dst_node_id=node, message_type="train")

    if config["seconds"]:
        found = crowd(grid, nodes, message, config["seconds"])
    else:
        found = turns(grid, nodes[0], message, config["repeats"], config["gate"])
    out = Path(config["out"])
    out.with_suffix(".part").write_text(json.dumps(found))
    out.with_suffix(".part").rename(out)


def answers(grid, waiting):
    """Replies that are there; asks again at once."""
    while True:
        came = list(grid.pull_messages(waiting))
        if came:
            return came
        time.sleep(0.002)


def turns(grid, node, message, repeats, gate):
    """Seconds from handing over a model to having the answer; after the first, waits until the gate is gone."""
    spent = []
    for number in range(repeats + 1):
        if number == 1 and gate:
            Path(gate).touch()
            while Path(gate).exists():
                time.sleep(0.1)
        began = time.perf_counter()
        waiting = set(grid.push_messages([message(node)]))
        (reply,) = answers(grid, waiting)
        assert not reply.has_error(), reply.error
        reply.content["arrays"].to_torch_state_dict()
        spent.append(time.perf_counter() - began)
    return {"median": statistics.median(spent[1:]), "longest": max(spent[1:])}


def crowd(grid, nodes, message, seconds):
    """Answers a second where each site has its next message as soon as its answer is there."""
    waiting, count, began = set(grid.push_messages([message(node) for node in nodes])), 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for reply in answers(grid, waiting):
            assert not reply.has_error(), reply.error
            waiting.discard(reply.metadata.reply_to_message_id)
            waiting |= set(grid.push_messages([message(reply.metadata.src_node_id)]))
            count += 1
    return {"updates": count / (time.perf_counter() - began)}
