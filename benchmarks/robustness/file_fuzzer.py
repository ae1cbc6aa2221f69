"""Files of every format, damaged: python benchmarks/robustness/file_fuzzer.py --count 200

A good file is changed: bytes are set to what lengths and counts like least, parts are cut, doubled or moved.  Each is
opened as the package opens it, in a process of its own format that may have 6 GB and two minutes for each file.
Refused means one sentence of the project's own errors, or an OSError that names the reason.
"""

from __future__ import annotations

import gzip
import io
import multiprocessing
import random
import resource
import signal
import sys
import tempfile
import wave
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

from rows import Row, command, tallied

MEMORY = 6 << 30
SECONDS = 120


class Stuck(BaseException):
    """What did not end; no error that anybody explains."""


def mutated(content: bytes, rng: random.Random) -> bytes:
    """A file that differs from a good one in a few places."""
    raw = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 5, 50])):
        place = rng.randrange(len(raw))
        how = rng.randrange(5)
        if how == 0:
            raw[place] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        elif how == 1:
            raw[place : place + 4] = rng.choice([b"\xff\xff\xff\x7f", b"\x7f\xff\xff\xff", b"\0\0\0\0", b"\xff" * 4])
        elif how == 2 and len(raw) > 8:
            del raw[place : place + rng.choice([1, 4, 100, len(raw)])]
            raw = raw or bytearray(b"\0")
        elif how == 3:
            raw[place:place] = raw[: rng.choice([1, 4, 100])]
        else:
            raw[place : place + 8] = rng.randbytes(8)
    return bytes(raw)


def _saved(write: Callable[[Path], Any], suffix: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"x{suffix}")
        write(path)
        return path.read_bytes()


def _image(kind: str) -> bytes:
    from PIL import Image

    raw = io.BytesIO()
    Image.effect_noise((32, 32), 50).convert("RGB").save(raw, kind)
    return raw.getvalue()


def _wav() -> bytes:
    raw = io.BytesIO()
    with wave.open(raw, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(bytes(3200))
    return raw.getvalue()


def _run_db() -> bytes:
    import piebald
    from piebald import data, models, partition

    with tempfile.TemporaryDirectory() as folder:
        clients = partition.Iid(clients=3, limit=60).split(data.digits())
        model = models.build_model("logistic", (1, 8, 8), 10)
        piebald.run("fedavg", clients, model, rounds=1, out=f"{folder}/run", runtime="simulator").close()
        return Path(folder, "run", "run.db").read_bytes()


def formats() -> dict[str, tuple[str, bytes, Callable[[Path], Any]]]:
    """By name: how the file is called, a good one, and how it is opened."""
    import numpy as np
    import pandas
    import torch
    from safetensors.torch import save

    from piebald import models
    from piebald.core.reading import FORMATS, read_arrays
    from piebald.data.clients.client_tables import read_table
    from piebald.data.sets.folders import image_folder, recording
    from piebald.data.sets.formats import read_idx
    from piebald.report import export
    from piebald.settings.toml_document import Document
    from piebald.storage import schema
    from piebald.storage.store import RunStore

    frame = pandas.DataFrame({"a": np.arange(50.0), "b": ["x", "yy"] * 25, "c": [1, 2] * 25})
    module = models.build_model("logistic", (4,), 2)

    def database(path: Path) -> None:
        with RunStore.open_read_only(path.parent) as store:
            _ = store.meta
            for table in schema.TABLES:
                store.rows(table)

    def toml(path: Path) -> None:
        Document(path.read_text("utf-8", errors="replace"), "x.toml")

    text = frame.to_csv(index=False).encode()
    idx = b"\0\0\x08\x02" + (4).to_bytes(4, "big") + (8).to_bytes(4, "big") + bytes(32)
    found: dict[str, tuple[str, bytes, Callable[[Path], Any]]] = {
        "CSV": ("x.csv", text, read_table),
        "CSV in gzip": ("x.csv.gz", gzip.compress(text), read_table),
        "Parquet": ("x.parquet", _saved(frame.to_parquet, ".parquet"), read_table),
        "npz": ("x.npz", _saved(lambda path: np.savez_compressed(path, x=np.eye(5)), ".npz"), read_arrays),
        "IDX": ("x.gz", gzip.compress(idx), read_idx),
        "WAV": ("x.wav", _wav(), lambda path: recording(path, 1600, 16_000)),
        "safetensors": ("x.safetensors", save(module.state_dict()), lambda path: export.load_weights(module, path)),
        "torch": (
            "x.pt",
            _saved(lambda path: torch.save(module.state_dict(), path), ".pt"),
            lambda path: export.load_weights(module, path),
        ),
        "run.db": ("run.db", _run_db(), database),
        "TOML": ("x.toml", b'[a.b]\nc = [1, 2.5, "x"]\nd = """\ny"""\n[[e]]\nf.g = {h = 1}\n', toml),
    }
    for suffix, kind in {kind: suffix for suffix, kind in FORMATS.items()}.items():
        name = f"images/c/x{kind}"
        found[suffix] = (name, _image(suffix), lambda path: image_folder(path.parents[1], side=4))
    return found


def _tried(name: str, count: int, seed: int) -> list[tuple[str, str]]:
    """The verdicts of one format, in a process of its own."""
    from piebald.core.errors import PiebaldError

    def stop(*_: object) -> None:
        raise Stuck

    file, content, opened = formats()[name]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, stop)
    verdicts, rng = [], random.Random(f"{seed} {name}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, file)
        path.parent.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            for beside in path.parent.iterdir():
                beside.unlink()
            path.write_bytes(mutated(content, rng))
            signal.alarm(SECONDS)
            try:
                opened(path)
                verdicts.append(("accepted", ""))
            except PiebaldError as error:
                verdicts.append(("refused" if str(error).isprintable() else "raw", f"{name} {number}: {error}"))
            except BaseException as error:  # also MemoryError, and what did not end
                what = "crashed" if isinstance(error, Stuck) else "raw"
                verdicts.append((what, f"{name} {number}: {type(error).__name__}: {error}"))
            finally:
                signal.alarm(0)
    return verdicts


def run(count: int, seed: int) -> list[Row]:
    """One row for each format."""
    rows = []
    context = multiprocessing.get_context("spawn")
    for name in formats():
        verdicts = [("crashed", f"{name}: the process ended")]
        with context.Pool(1) as pool, suppress(multiprocessing.TimeoutError):
            verdicts = pool.apply_async(_tried, (name, count, seed)).get(count * SECONDS)
        rows.append(tallied(f"files: {name}", verdicts))
    return rows


if __name__ == "__main__":
    sys.exit(command(__doc__, run, count=200, seed=0))
