"""A federation over a network of a billion frozen parameters: python benchmarks/large_models/billion.py

Makes a decoder of transformers with random weights in bfloat16, gives three clients token ids in a table, and trains
low-rank adapters and the head of classes: by simulation in one process, and with a server and three sites that are
processes of their own.  14 layers are just below the billion parameters that a site allows by default.  Prints what
each process holds at its peak: "anonymous" memory is its own, "file" are the weights' file and those of libraries,
whose pages all processes of a machine share.  Linux only; needs 6 GB of memory and 3 GB of disk.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

from shared.markdown import put, table
from shared.measured import Watch, megabytes, processor
from shared.options import reader

PAGE = Path(__file__).parent / "RESULTS.md"
CLIENTS, ROWS, LENGTH, WORDS = 3, 16, 16, 28_000
SETTINGS = """rounds = 2
measure = "none"
data = {{ source = "{rows}", client = "client", target = "label", tokens = true }}
model = {{ name = "pretrained", weights = "{weights}", adapter = "lora", rank = 8 }}
recipe = {{ name = "fedavg", lr = 0.01, batch = 4, epochs = 1 }}
runtime = {{ kind = "simulator", engine = "sequential", workers = 0 }}
"""


def weights(folder: Path, layers: int) -> int:
    """Write a decoder with random weights in bfloat16; return how many it has."""
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 16}
    config = LlamaConfig(vocab_size=WORDS, num_hidden_layers=layers, pad_token_id=0, num_labels=2, **sizes)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    network = LlamaForSequenceClassification(config)
    network.save_pretrained(folder)
    return sum(one.numel() for one in network.parameters())


def rows(path: Path) -> None:
    """Write a table of token ids; the class is whether most words have low numbers."""
    import numpy as np
    import pandas as pd

    ids = np.random.default_rng(0).integers(1, WORDS, (CLIENTS * ROWS, LENGTH))
    frame = pd.DataFrame(ids, columns=[f"t{number}" for number in range(LENGTH)])
    frame["label"] = ((ids < WORDS / 2).mean(1) > 0.5).astype(int)
    frame["client"] = [f"c{number % CLIENTS}" for number in range(len(frame))]
    frame.to_csv(path, index=False)


def processes(pid: int) -> dict[int, tuple[float, float]]:
    """Anonymous and mapped megabytes of a process and of its children, by their numbers."""
    found = {}
    waiting = [pid]
    for one in waiting:
        try:
            found[one] = megabytes("RssAnon", one), megabytes("RssFile", one)
            for task in Path(f"/proc/{one}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except OSError:  # it has ended
            continue
    return found


def trained(
    folder: Path, experiment: Path, *words: str
) -> tuple[float, list[tuple[float, float]], list[dict[str, float]]]:
    """Run a command; return its seconds, the peaks of its processes in the order of their start, and its rounds."""
    out, began = folder / words[0], time.monotonic()
    command = [sys.executable, "-m", "piebald.cli", *words, str(experiment), "--out", str(out)]
    log = folder / "log.txt"
    with (
        log.open("w") as file,
        subprocess.Popen(command, stdout=file, stderr=file) as process,
        Watch(lambda: processes(process.pid), 0.2) as watch,
    ):
        process.wait()
    if process.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}: {log.read_text()[-2000:]}")
    peaks: dict[int, tuple[float, float]] = {}
    for seen in watch.seen:
        for pid, now in seen.items():
            peaks[pid] = tuple(map(max, peaks.get(pid, (0.0, 0.0)), now))  # type: ignore[assignment]
    import piebald

    return time.monotonic() - began, [peaks[pid] for pid in sorted(peaks)], list(piebald.open(out).rounds)


def main() -> None:
    given = reader(__doc__, ["one"], layers=14).parse_args()
    if given.one:  # in a process of its own, whose memory the others do not inherit
        print(json.dumps(weights(Path(given.one), given.layers)))
        return
    from shared.measured import apart

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        count = apart(__file__, "--one", folder / "weights", "--layers", given.layers)
        rows(folder / "rows.csv")
        file = folder / "experiment.toml"
        file.write_text(SETTINGS.format(rows=folder / "rows.csv", weights=folder / "weights"))
        lines = []
        for name, words in (("simulation", ("run",)), ("federation", ("up", "--local", str(CLIENTS)))):
            seconds, peaks, rounds = trained(folder, file, *words)
            sent = rounds[-1]["bytes_up"] / CLIENTS / 1e6
            sites = [f"site {number}" for number in range(1, len(peaks))]
            roles = ["server", *sites] if name == "federation" else ["one process"]
            for role, (own, mapped) in zip(roles, peaks, strict=True):
                lines.append([name, role, f"{own:.0f}", f"{mapped:.0f}", f"{sent:.2f}", f"{seconds:.0f}"])
                print(*lines[-1], sep=" | ", flush=True)
    heads = ["", "process", "anonymous, MB", "file, MB", "an update, MB", "seconds of the whole command"]
    about = (
        f"`python benchmarks/large_models/billion.py --layers {given.layers}`: {count / 1e9:.2f} billion parameters in "
        f"bfloat16, {2 * count / 1e6:.0f} MB.  {processor()}; other programs used it as well."
    )
    PAGE.write_text(put(PAGE.read_text("utf-8"), "billion", f"{about}\n\n{table(heads, lines)}", append=True), "utf-8")


if __name__ == "__main__":
    main()
