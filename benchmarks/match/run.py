"""Seconds, memory and bytes of a match of keys between two processes: python benchmarks/match/run.py

Each party has so many keys, of which every second one is at the other party as well, and each runs on the same machine,
over the federation's link on loopback.  `--keys 1000000` measures a million (about ten minutes on two cores).  What was
measured is kept in results.json by the number of keys; RESULTS.md is written at the end.  `--spelling` measures instead
how often keys that are spelt differently are found.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

import spelling
from shared import markdown
from shared.measured import apart, machine, megabytes, processor
from shared.options import reader

from piebald import vertical
from piebald.federation.credentials.provisioning import Description, provision
from piebald.federation.hub.local_federation import free_port
from piebald.vertical.key_matching import ristretto

HERE = Path(__file__).parent
PARTIES = ("server", "bank")
GOAL = 25.0  # seconds in which 100,000 keys of each party should be matched on two cores


def bare(keys: int) -> float:
    """Processor seconds of libsodium's own operations in a match of so many keys, from a sample of them."""
    group, sample = ristretto(), 2000
    scalar = group.crypto_core_ristretto255_scalar_random()
    began = time.process_time()
    for _ in range(sample):
        point = group.crypto_core_ristretto255_from_hash(secrets.token_bytes(64))
        group.crypto_scalarmult_ristretto255(scalar, group.crypto_scalarmult_ristretto255(scalar, point))
    return (time.process_time() - began) * keys / sample


def one_party(party: str, keys: int, folder: Path) -> dict[str, float]:
    """Match one party's keys, and return what it took."""
    first = 0 if party == "server" else keys // 2
    frame = pandas.DataFrame({"id": [f"person {first + number:09d}" for number in range(keys)]})
    before = megabytes("VmHWM")
    began, spent = time.perf_counter(), time.process_time()
    found = vertical.match(frame, ["id"], folder / party, folder / f"{party}.csv", timeout=3600.0)
    assert found.size == keys - keys // 2
    return {
        "seconds": round(time.perf_counter() - began, 2),
        "processor seconds": round(time.process_time() - spent, 2),
        "bare": round(bare(keys), 2),
        "MB": round(megabytes("VmHWM")),
        "MB before": round(before),
    }


def both(keys: int) -> dict[str, dict[str, float]]:
    """Measure both parties, each in a process of its own."""
    with TemporaryDirectory() as made, ThreadPoolExecutor(2) as pool:
        folder = Path(made)
        provision(Description(name="two", host="127.0.0.1", port=free_port(), days=2, sites=["bank"]), folder)
        begun = [pool.submit(apart, __file__, "--party", party, "--keys", keys, "--out", made) for party in PARTIES]
        return dict(zip(PARTIES, (one.result() for one in begun), strict=True))


def page(measured: dict[str, Any]) -> str:
    """The results as a page."""
    rows = []
    for keys, parties in sorted(measured["keys"].items(), key=lambda item: int(item[0])):
        slowest = max(one["seconds"] for one in parties.values())
        spent, alone = (sum(one[name] for one in parties.values()) for name in ("processor seconds", "bare"))
        memory = max(one["MB"] for one in parties.values())
        added = max(one["MB"] - one["MB before"] for one in parties.values())
        rows.append(
            [
                f"{int(keys):,}",
                f"{slowest:.1f}",
                f"{spent:.1f}",
                f"{alone:.1f}",
                memory,
                f"{1e6 * added / int(keys):,.0f}",
            ]
        )
    return (
        "# Matching of keys\n\n`python benchmarks/match/run.py`: two processes on one machine over the federation's "
        "link (TLS 1.3), each with so many\nkeys, half of them at both.  The goal for 100,000 is "
        f"{GOAL:g} seconds on two cores that nobody else uses, {2 * GOAL:g} processor seconds\nof both parties "
        "together.  The last column is what the larger process added to a table of keys that was read already.\n\n"
        f"{processor()}, {machine()}.  Other work ran on it meanwhile: the seconds are no\nmeasure then, and processor "
        "seconds are compared with those of libsodium's own operations, measured in the same process\nright "
        "afterwards.\n\n"
        + markdown.table(
            [
                "keys of each",
                "seconds",
                "processor seconds, both",
                "libsodium alone",
                "MB of a party, most",
                "bytes for each key",
            ],
            rows,
        )
        + "\n\n"
        + spelling.section(measured["spelling"])
    )


def main() -> int:
    """Measure, and write the results."""
    options = reader(
        __doc__, ["party"], keys=[10_000, 100_000], seeds=[0, 1, 2, 3, 4], spelling=False, out=HERE
    ).parse_args()
    if options.party:
        print(json.dumps(one_party(options.party, options.keys[0], options.out)))
        return 0
    file = HERE / "results.json"
    measured = json.loads(file.read_text("utf-8")) if file.exists() else {"keys": {}, "spelling": {}}
    if options.spelling:
        measured["spelling"] = spelling.measure(options.seeds)
    for keys in [] if options.spelling else options.keys:
        measured["keys"][str(keys)] = both(keys)
        file.write_text(json.dumps(measured, indent=1) + "\n", "utf-8")
    file.write_text(json.dumps(measured, indent=1) + "\n", "utf-8")
    (HERE / "RESULTS.md").write_text(page(measured), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
