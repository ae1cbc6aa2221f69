"""Flower 1.41 on Ray with two actors of one core: python with_flower.py W1, or W1 3 for three rounds after the first"""

import os
import sys
import time

import torch
from flwr.clientapp import ClientApp
from flwr.app import ArrayRecord, MetricRecord, RecordDict, Message
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from shapes import BATCH, RATE, SHAPES, kept, seconds_a_round, torch_network

name = sys.argv[1]
shape = SHAPES[name]
rounds = int(sys.argv[2]) if len(sys.argv) > 2 else shape.rounds
client_app, server_app = ClientApp(), ServerApp()
times: list[float] = []


@client_app.train()
def train(message, context):
    """One local epoch."""
    inputs, labels, model = kept(name)
    x, y = (part[context.node_config["partition-id"]] for part in (inputs, labels))
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    for batch in torch.randperm(len(x)).split(BATCH):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimiser.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(x)})}
    return Message(content=RecordDict(content), reply_to=message)


class Timed(FedAvg):
    """FedAvg that notes when each round ended."""

    def aggregate_train(self, server_round, replies):
        """Average, then look at the clock."""
        made = super().aggregate_train(server_round, replies)
        times.append(time.perf_counter())
        return made


@server_app.main()
def main(grid, context):
    """All rounds."""
    strategy = Timed(
        fraction_train=shape.cohort / shape.clients, fraction_evaluate=0.0, min_available_nodes=shape.clients
    )
    strategy.start(grid=grid, initial_arrays=ArrayRecord(torch_network(name).state_dict()), num_rounds=rounds + 1)


os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
run_simulation(
    server_app,
    client_app,
    shape.clients,
    backend_config={"client_resources": {"num_cpus": 1.0}, "init_args": {"address": "local", "num_cpus": 2}},
)
print(seconds_a_round(times))
