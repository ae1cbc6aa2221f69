"""A lease: one holder at a time, and none of what a holder that lost it writes is seen."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from piebald.federation.credentials.audit import AuditLog
from piebald.storage import lease
from piebald.storage.lease import Lease
from piebald.storage.lock import RunLock
from piebald.storage.store import RunStore
from tests.processes import Popen


@pytest.fixture(autouse=True)
def none_held() -> Iterator[None]:
    yield
    Lease.current = None


def test_of_many_that_take_it_one_gets_it_and_tokens_grow(tmp_path: Path) -> None:
    tokens = [0]
    for _ in range(20):
        seen, begin = lease.newest(tmp_path), threading.Barrier(8)
        taken = list[Lease]()

        def take(found: lease.HeldLease | None, begin: threading.Barrier, taken: list[Lease]) -> None:
            begin.wait()
            if (held := Lease.take(tmp_path, found)) is not None:
                taken.append(held)

        threads = [threading.Thread(target=take, args=(seen, begin, taken)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # each has renamed the file, or none has been quick enough before it was taken again
        tokens += [held.token for held in taken]
        assert sum(held.held() for held in taken) == 1
    assert tokens == sorted(set(tokens))
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(("call", "takes"), [("os.open", 0), ("pathlib.Path.rename", 1)])
def test_who_hangs_before_it_takes_it_finds_it_taken(
    call: str, takes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two others took it meanwhile, one from the other, so that the name that it was about to use was free again."""
    for _ in range(takes):
        Lease.take(tmp_path, lease.newest(tmp_path))
    seen, others = lease.newest(tmp_path), list[Lease | None]()
    real: Any = {"os.open": os.open, "pathlib.Path.rename": Path.rename}[call]

    def hangs(*given: Any, **more: Any) -> Any:
        monkeypatch.setattr(call, real)
        others.extend(Lease.take(tmp_path, lease.newest(tmp_path)) for _ in range(2))
        return real(*given, **more)

    monkeypatch.setattr(call, hangs)
    assert Lease.take(tmp_path, seen) is None
    assert [other is not None and other.held() for other in others] == [False, True]
    assert [path.name for path in tmp_path.iterdir()] == [f"lease-{takes + 2}"]


def test_it_is_held_until_it_is_taken_or_given_back(tmp_path: Path) -> None:
    first = Lease.take(tmp_path, None)
    assert first is not None
    before = lease.newest(tmp_path)
    first.beat()
    after = lease.newest(tmp_path)
    assert before is not None
    assert after is not None
    assert before != after
    assert before.token == after.token == 1
    assert f"process {os.getpid()}" in after.holder
    second = Lease.take(tmp_path, before)  # whatever its holder has written since
    assert second is not None
    assert (first.held(), second.held()) == (False, True)
    second.give_back()
    assert lease.newest(tmp_path) is None
    assert not second.held()
    third = Lease.take(tmp_path, None)
    assert third is not None
    assert third.token == 3


WRITER = """
import sys
from pathlib import Path
from piebald.storage import lease, schema
from piebald.storage.store import RunStore

folder, place = Path(sys.argv[1]), sys.argv[2]
held = lease.Lease.take(folder, None)
store = RunStore.create(folder / "run", {"recipe": {"name": "fedavg"}})
store.commit({"version": 1, "arrived": 1}, [])
end = schema.end

def hang(db):
    if place == "after":
        end(db)
    print("hangs", flush=True)
    sys.stdin.readline()
    if place == "before":
        end(db)

schema.end = hang
store.commit({"version": 2, "arrived": 2}, [])
print("told others of it", flush=True)
"""


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_holder_that_hangs_in_a_transaction_neither_hinders_the_next_one_nor_writes_to_its_files(
    place: str, tmp_path: Path
) -> None:
    """Its step is there as a whole where it was committed before, and not at all where it was not."""
    (tmp_path / "writer.py").write_text(WRITER)
    writer = Popen(
        [sys.executable, str(tmp_path / "writer.py"), str(tmp_path), place],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert writer.stdout is not None
    assert writer.stdout.readline() == "hangs\n"
    seen = lease.newest(tmp_path)
    assert Lease.take(tmp_path, seen) is not None
    lease.seize(tmp_path / "run")
    committed = int(place == "after")
    with RunStore.open(tmp_path / "run") as store:
        assert store.version == 1 + committed
        store.commit({"version": 2 + committed, "arrived": 9}, [])
        said, why = writer.communicate("go on\n", timeout=60)
        assert (writer.returncode, said) == (1, "")
        assert why.count("has taken the lease") == 1
        assert "Traceback" not in why
        store.commit({"version": 3 + committed, "arrived": 9}, [])
    with RunStore.open_read_only(tmp_path / "run") as store:
        assert [row["arrived"] for row in store.rows("step")] == [1, *([2] * committed), 9, 9]
        assert store.query("PRAGMA integrity_check")[0]["integrity_check"] == "ok"


REPLACER = """
import os, sys
from pathlib import Path
from piebald.federation.credentials.audit import AuditLog
from piebald.federation.operate.experiment_queue import ExperimentQueue
from piebald.federation.operate.status import give_sign
from piebald.storage import lease

folder, call, place = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
held = lease.Lease.take(folder, None)
queue, audit = ExperimentQueue(folder), AuditLog(folder)
entry = queue.add("a", "", folder / "run")
real = getattr(os, place)

def hangs(*given, **more):
    if place == "replace" or str(given[0]).endswith(".part"):
        setattr(os, place, real)
        print("hangs", flush=True)
        sys.stdin.readline()
    return real(*given, **more)

setattr(os, place, hangs)
exec(call)
print("told others of it", flush=True)
"""


@pytest.mark.parametrize(
    ("call", "file"),
    [
        ("queue.change(entry, state='failed')", "queue/0001.state.json"),
        ("give_sign(folder)", "status.json"),
        ("audit.write('joined')", "audit.head"),
    ],
)
@pytest.mark.parametrize("place", ["open", "replace"])
@pytest.mark.full
def test_a_holder_that_hangs_while_it_replaces_a_file_does_not_replace_that_of_the_next_one(
    call: str, file: str, place: str, tmp_path: Path
) -> None:
    """It hangs before it has written beside the file, or after its last look at the lease."""
    writer = Popen(
        [sys.executable, "-c", REPLACER, str(tmp_path), call, place],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert writer.stdout is not None
    assert writer.stdout.readline() == "hangs\n"
    assert Lease.take(tmp_path, lease.newest(tmp_path)) is not None
    for folder in (tmp_path, tmp_path / "queue"):
        lease.seize(folder)
    lease.write(tmp_path / file, "of the next one")
    said, why = writer.communicate("go on\n", timeout=60)
    assert (writer.returncode, said, why.count("has taken the lease")) == (1, "", 1), why
    assert (tmp_path / file).read_text() == "of the next one"


UNCLOSED = """
import sys
from pathlib import Path
from piebald.storage import lease
from piebald.storage.store import RunStore

folder = Path(sys.argv[1])
held = lease.Lease.take(folder, None)
store = RunStore.create(folder / "run", {"recipe": {"name": "fedavg"}})
print("hangs", flush=True)
sys.stdin.readline()
"""


@pytest.mark.full
def test_a_holder_that_ends_without_closing_its_run_leaves_the_journal_of_the_next_one(tmp_path: Path) -> None:
    writer = Popen(
        [sys.executable, "-c", UNCLOSED, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "hangs\n"
    assert Lease.take(tmp_path, lease.newest(tmp_path)) is not None
    lease.seize(tmp_path / "run")
    with RunStore.open(tmp_path / "run") as store:
        store.commit({"version": 1, "arrived": 1}, [])
        writer.communicate("end\n", timeout=60)
        assert (tmp_path / "run" / "run.db-wal").exists()
        assert writer.returncode == 1


CLOSING = """
store.commit({"version": 1, "arrived": 1}, [])

def hang(statement):
    if "wal_checkpoint" in statement:
        print("hangs", flush=True)
        sys.stdin.readline()

store._db.set_trace_callback(hang)
store.close()
print("told others of it", flush=True)
"""


@pytest.mark.full
def test_a_holder_that_hangs_while_it_closes_its_run_leaves_the_journal_of_the_next_one(tmp_path: Path) -> None:
    program = UNCLOSED.partition("print")[0] + CLOSING
    writer = Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "hangs\n"
    assert Lease.take(tmp_path, lease.newest(tmp_path)) is not None
    lease.seize(tmp_path / "run")
    with RunStore.open(tmp_path / "run") as store:
        store.commit({"version": 2, "arrived": 2}, [])
        said, _ = writer.communicate("go on\n", timeout=60)
        assert (writer.returncode, said) == (1, "")
        assert (tmp_path / "run" / "run.db-wal").exists()
        assert store.version == 2


def test_an_audit_log_is_not_rotated_by_who_has_lost_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, audit = Lease.take(tmp_path, None), AuditLog(tmp_path)
    audit.write("started")
    monkeypatch.setattr("piebald.federation.credentials.audit.LONG", 1)
    assert Lease.take(tmp_path, lease.newest(tmp_path)) is not None
    Lease.current = first
    monkeypatch.setattr(Lease, "_end", lambda _: sys.exit(1))
    with pytest.raises(SystemExit):
        audit.write("joined")
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == ["audit.jsonl"]


def test_a_lock_that_is_held_on_the_old_file_keeps_nobody_out(tmp_path: Path) -> None:
    hung = RunLock(tmp_path)
    lease.seize(tmp_path)
    fresh = RunLock(tmp_path)
    hung.release()
    assert (tmp_path / "run.lock").read_text() == str(os.getpid())
    fresh.release()
