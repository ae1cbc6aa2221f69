"""Adapters beside a bare PEFT loop: python benchmarks/adapters/run.py

Fine-tunes a small DistilBERT with LoRA at several clients, with Piebald's sequential engine and with a plain loop of
transformers, peft and torch.optim, on one thread.  Both are timed in turns, in processor seconds, so that other
programs on the machine matter less; memory is the peak of a process of its own for each.  Writes RESULTS.md next to
this file, or into --out.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

from shared.measured import apart, megabytes, ratios
from shared.options import reader
from shared.stored import with_notes

LR, BATCH, ROWS, LENGTH, WORDS, RANK, CLIENTS = 0.05, 16, 64, 32, 4000, 8, 8
SIZES: dict[str, dict[str, int]] = {
    "small": {"dim": 64, "n_layers": 2, "n_heads": 2, "hidden_dim": 256},
    "medium": {"dim": 128, "n_layers": 3, "n_heads": 4, "hidden_dim": 512},
}
Held = Mapping[str, tuple[Tensor, Tensor]]


def weights(size: str) -> Path:
    """A folder with a DistilBERT of this size, without dropout, so that both programs compute the same."""
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    torch.manual_seed(0)
    off = dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), 0.0)
    config = DistilBertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **SIZES[size], **off)
    folder = Path(tempfile.mkdtemp(prefix="adapters-")) / size
    DistilBertForSequenceClassification(config).save_pretrained(folder)
    return folder


def held(clients: int) -> Held:
    """Token ids and classes of each client: whether most words have low numbers."""
    numbers = torch.Generator().manual_seed(1)
    x = torch.randint(1, WORDS, (clients, ROWS, LENGTH), generator=numbers)
    return {f"c{place}": (one, ((one < WORDS / 2).sum(1) > LENGTH / 2).long()) for place, one in enumerate(x)}


class Bare:
    """FedAvg as one would write it: one module, its trained tensors set for each client, and a mean."""

    def __init__(self, folder: Path, rows: Held) -> None:
        from piebald import models  # the same start: adapters and head of one seed

        self.network: Any = models.pretrained(folder, outputs=2, adapter="lora", rank=RANK).network
        self.rows = rows
        self.trained = {name: one for name, one in self.network.named_parameters() if one.requires_grad}
        self.start = {name: one.detach().clone() for name, one in self.trained.items()}

    def round(self) -> None:
        ends: list[dict[str, Tensor]] = []
        for x, y in self.rows.values():
            with torch.no_grad():
                for name, one in self.trained.items():
                    one.copy_(self.start[name])
            optimizer = torch.optim.SGD(self.trained.values(), lr=LR)
            self.network.train()
            for batch in torch.randperm(len(x)).split(BATCH):
                ids = x[batch]
                logits = self.network(input_ids=ids, attention_mask=(ids != 0).long()).logits
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(logits, y[batch]).backward()
                optimizer.step()
            ends.append({name: one.detach().clone() for name, one in self.trained.items()})
        self.start = {name: torch.stack([end[name] for end in ends]).mean(0) for name in self.start}


def ours(folder: Path, rows: Held, rounds: int) -> list[float]:
    """Processor seconds of each round but the first."""
    import piebald
    from piebald import models, recipes
    from piebald.report import callbacks
    from piebald.runtimes import Simulator

    class Noted(callbacks.Callback):
        def __init__(self) -> None:
            self.times: list[float] = []

        def on_server_step(self, *_: Any, **__: Any) -> None:
            self.times.append(time.process_time())

    clock = Noted()
    piebald.run(
        recipes.fedavg(lr=LR, batch=BATCH, epochs=1),
        piebald.clients_from(rows, tokens=True),
        models.pretrained(folder, outputs=2, adapter="lora", rank=RANK),
        rounds=rounds,
        evaluate_every=0,
        runtime=Simulator(engine="sequential", workers=0),
        callbacks=[clock],
    )
    return [after - before for before, after in itertools.pairwise(clock.times)]


def bare(folder: Path, rows: Held, rounds: int) -> list[float]:
    """The same of the plain loop."""
    loop, times = Bare(folder, rows), []
    for _ in range(rounds):
        loop.round()
        times.append(time.process_time())
    return [after - before for before, after in itertools.pairwise(times)]


def pairs(folder: Path, repeats: int, rounds: int) -> Iterator[tuple[float, float]]:
    """Median processor seconds of a client's task, of the plain loop and of Piebald, in turns."""
    rows = held(CLIENTS)
    for _ in range(repeats):
        yield tuple(statistics.median(run(folder, rows, rounds)) / CLIENTS for run in (bare, ours))  # type: ignore[misc]


def peak(program: str, folder: Path, clients: int) -> float:
    """Peak memory in MB of a process that runs two rounds."""
    return float(apart(__file__, "child", program, folder, clients))


def child(program: str, folder: Path, clients: int) -> None:
    (ours if program == "ours" else bare)(folder, held(clients), 2)
    print(json.dumps(megabytes("VmHWM")))  # rusage would also count the process that started this one


def sizes(folder: Path, **settings: Any) -> tuple[float, float]:
    """Megabytes of an update, and of all weights."""
    from piebald import models
    from piebald.core.parameters import Layout

    model = models.pretrained(folder, outputs=2, **settings)
    return 4 * Layout.of(model).size / 1e6, 4 * sum(one.numel() for one in model.parameters()) / 1e6


def report(repeats: int, rounds: int) -> Iterator[str]:
    yield "# Adapters beside a bare PEFT loop\n"
    yield f"`python benchmarks/adapters/run.py --repeats {repeats} --rounds {rounds}`, one thread of 2 CPU cores.\n"
    yield "| DistilBERT | weights, MB | update without adapters, MB | update with LoRA of rank 8, MB |"
    yield "|---|---|---|---|"
    folders = {size: weights(size) for size in SIZES}
    for size, folder in folders.items():
        (whole, everything), (update, _) = sizes(folder), sizes(folder, adapter="lora", rank=RANK)
        yield f"| {size} | {everything:.2f} | {whole:.2f} | {update:.2f} |"
    yield f"\nA client's task of {ROWS // BATCH} steps of {BATCH} rows with {LENGTH} tokens, in processor milliseconds"
    yield "(medians of runs in turns), and the ratio of the two (median, least, most of the pairs):\n"
    yield "| DistilBERT | bare loop | Piebald | ratio |"
    yield "|---|---|---|---|"
    for size, folder in folders.items():
        found = list(pairs(folder, repeats, rounds))
        plain, mine = zip(*found, strict=True)
        both = " | ".join(f"{1000 * statistics.median(column):.1f}" for column in (plain, mine))
        yield f"| {size} | {both} | {{:.2f}} ({{:.2f}} to {{:.2f}}) |".format(*ratios(mine, plain))
    yield "\nPeak memory of a process, in MB; rows included:\n"
    yield f"| DistilBERT | bare loop, {CLIENTS} clients | Piebald, {CLIENTS} clients | Piebald, {8 * CLIENTS} clients |"
    yield "|---|---|---|---|"
    size, folder = list(folders.items())[-1]
    few, own = peak("bare", folder, CLIENTS), peak("ours", folder, CLIENTS)
    yield f"| {size} | {few:.0f} | {own:.0f} | {peak('ours', folder, 8 * CLIENTS):.0f} |"


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["child"]:  # a process of its own
        program, folder, clients = sys.argv[2:]
        child(program, Path(folder), int(clients))
        return
    given = reader(__doc__, repeats=5, rounds=6, out=Path(__file__).parent).parse_args()
    lines = []
    for line in report(given.repeats, given.rounds):
        print(line, flush=True)
        lines.append(line)
    with_notes(given.out / "RESULTS.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
