"""The workloads: those of benchmarks/simulator, and networks that need a GPU; tiny ones for the CPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.extend([str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "simulator")])

from shared.networks import CharacterLstm, LoraEncoder, seeded, with_group_norm
from workloads import GENERAL, W1, W2, Encoder, Workload, bare_loop, registered_clients

from piebald.models import build_model

PICTURE = (3, 32, 32)


def resnet(width: int = 64) -> Workload:
    """ResNet-18 with group norm on pictures like CIFAR-10's."""
    return Workload(
        "ResNet-18, group norm", 100, 10, 500, 3, PICTURE, 10,
        lambda: with_group_norm(build_model("resnet18", PICTURE, 10, 0, width=width)),
    )  # fmt: skip


VGG = replace(next(work for work in GENERAL if work.name == "VGG-11"), clients=100, cohort=20, rows=200, rounds=3)
TRANSFORMER = next(work for work in GENERAL if work.name == "transformer")
LSTM = Workload("LSTM", 100, 20, 100, 3, (32,), 90, lambda: seeded(CharacterLstm, 90, 90), tokens=90)
LORA = Workload("LoRA on a frozen transformer", 100, 20, 100, 3, (32,), 10, lambda: seeded(LoraEncoder), tokens=256)
# At most this share of the bare loop's seconds on the same GPU.
TARGETS = {
    "W1": 0.04, "W2": 0.17, "ResNet-18, group norm": 0.40, "VGG-11": 0.26, "LSTM": 0.40, "transformer": 0.18,
    "LoRA on a frozen transformer": 0.17,
}  # fmt: skip

NAMES = {  # of the workloads as parts
    "W1": "W1", "W2": "W2", "resnet18": "ResNet-18, group norm", "vgg11": "VGG-11", "lstm": "LSTM",
    "transformer": "transformer", "lora": "LoRA on a frozen transformer",
}  # fmt: skip
FULL = {work.name: work for work in (W1, W2, resnet(), VGG, LSTM, TRANSFORMER, LORA)}
_SMALL = {
    "W1": {},
    "W2": {"make": lambda: build_model("small_cnn", (1, 28, 28), 62, 0)},
    "ResNet-18, group norm": {"make": resnet(4).make},
    "VGG-11": {"make": lambda: build_model("vgg11", PICTURE, 10, 0, width=4)},
    "LSTM": {"make": lambda: seeded(CharacterLstm, 90, 90, 8)},
    "transformer": {"make": lambda: seeded(Encoder)},
    "LoRA on a frozen transformer": {"make": lambda: seeded(LoraEncoder, 16, 1, 2)},
}
TINY = {
    name: replace(work, clients=6, cohort=4, rows=20, rounds=1, **_SMALL[name])  # type: ignore[arg-type]
    for name, work in FULL.items()
}
__all__ = ["Workload", "bare_loop", "registered_clients"]  # of benchmarks/simulator, for measures.py
SCALES = {"full": FULL, "tiny": TINY}
COHORTS = {"full": (10, 100, 1000), "tiny": (2, 4)}
REGISTERED = {"full": (100, 10_000, 1_000_000), "tiny": (10, 100)}
STACKS = {"full": (1, 8, 32, 128, 512, 2048), "tiny": (1, 4)}
SHARING = {"full": (2, 4, 8), "tiny": (2,)}  # processes on one device
