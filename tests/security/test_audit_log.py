"""An audit log that somebody edits, cuts, reorders or writes anew; and a site that cannot write its own."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from piebald.cli import main
from piebald.contracts import Checkpoint
from piebald.core.errors import SettingError
from piebald.federation.credentials import audit
from piebald.federation.credentials.audit import FILE, HEAD, AuditLog, knows, missing, verify
from piebald.federation.link.wire_format import digest
from piebald.storage.store import RunStore
from tests.federation.conftest import provisioned
from tests.federation.test_policy import prepared
from tests.federation.test_site_choice import site


def written(folder: Path, lines: int = 6) -> Path:
    log = AuditLog(folder)
    log.write("started", party="north")
    for number in range(lines - 1):
        log.write("sent", run="ab", task=number, bytes=number, body=f"{number:032x}", tensors={"model": [10]})
    return folder / FILE


def edited(lines: list[bytes]) -> list[bytes]:
    return [line.replace(b'"bytes":2', b'"bytes":9') for line in lines]


def edited_with_its_digest(lines: list[bytes]) -> list[bytes]:
    """The attacker computes the line's digest again, but not those of all lines after it."""
    changed = {**json.loads(lines[3]), "bytes": 9}
    del changed["digest"]
    text = json.dumps(changed, separators=(",", ":")).encode()
    own = hashlib.sha256(text).hexdigest()
    return [*lines[:3], text[:-1] + f',"digest":"{own}"}}\n'.encode(), *lines[4:]]


@pytest.mark.parametrize(
    ("attack", "says"),
    [
        (edited, "line 4 of .* is not as it was written"),
        (edited_with_its_digest, "line 5 of .* does not follow from the one before"),
        (lambda lines: [*lines[:3], *lines[4:]], "line 4 of .* does not follow"),
        (lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]], "line 3 of .* does not follow"),
        (lambda lines: [*lines[:4], lines[3], *lines[4:]], "line 5 of .* does not follow"),
        (lambda lines: lines[1:], "line 1 of .* does not follow"),
        (lambda lines: [*lines[:-1], lines[-1][:40]], "line 6 of .* has no end"),
        (lambda lines: [*lines[:5], b"{}\n"], "line 6 of .* is not as it was written"),
        (lambda lines: [*lines[:5], b"\xff" * (3 << 20)], "line 6 of .* has no end"),
    ],
)  # fmt: skip
def test_the_first_broken_line_is_named(
    attack: Callable[[list[bytes]], list[bytes]], says: str, tmp_path: Path
) -> None:
    path = written(tmp_path)
    assert verify(path).lines == 6
    path.write_bytes(b"".join(attack(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(SettingError, match=says):
        verify(path)


def test_a_log_that_was_cut_at_its_end_is_found_by_its_head_and_by_the_other_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The chain alone does not show it where the head beside it was cut as well, but a head is never gone."""
    credentials = provisioned(tmp_path / "credentials", ["north"])
    path, head = written(credentials / "north"), verify(credentials / "north" / FILE).head
    server = AuditLog(credentials / "server")
    server.write("started", party="server")
    for number in range(5):
        server.write("received", site="north", run="ab", task=number, body=f"{number:032x}")
    assert main(["audit", str(credentials / "north"), "--head", head, "--against", str(credentials / "server")]) == 0
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    path.with_name(HEAD).unlink()
    capsys.readouterr()
    assert main(["audit", str(credentials / "north")]) == 2
    assert "audit.head beside" in capsys.readouterr().err
    assert not knows(path, [head])
    assert missing(path, server.path) == [
        f"line 6 of {server.path} has a result of north with digest {4:032x}, which {path} has not"
    ]
    for option, value in (("--head", head), ("--against", str(credentials / "server"))):
        assert main(["audit", str(credentials / "north"), option, value]) == 2
        assert "written anew" in capsys.readouterr().err
    with pytest.raises(SettingError, match="must be the logs of a server and of one of its sites"):
        missing(path, path)


@pytest.mark.parametrize("lines", [0, 1, 5])
def test_a_log_that_lost_its_end_is_told_by_the_head_beside_it_for_ever(
    lines: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Before, a log of 0 bytes held with 0 lines, and the next line began another chain."""
    folder = provisioned(tmp_path, ["north"]) / "north"
    path = written(folder)
    whole = path.read_bytes().splitlines(keepends=True)
    assert verify(path).noted
    path.write_bytes(b"".join(whole[:lines]))
    assert main(["audit", str(folder)]) == 2
    says = f"{path} has lost its end: it has {lines} lines, and audit.head beside it tells of line 6"
    assert says in capsys.readouterr().err
    AuditLog(folder).write("started", party="north")  # which does not hide the gap
    assert says in caplog.text
    with pytest.raises(SettingError, match=r"line .* does not follow|cut at its beginning"):
        verify(path)
    path.write_bytes(b"".join([*whole, path.read_bytes().splitlines(keepends=True)[-1]]))  # restored from a backup
    assert verify(path).lines == 7
    caplog.clear()
    AuditLog(folder).write("started", party="north")
    assert verify(path).lines == 8
    assert "lost" not in caplog.text


def test_a_log_that_was_written_anew_beside_its_old_head_is_no_sound_one(tmp_path: Path) -> None:
    path, other = written(tmp_path), tmp_path / "other"
    other.mkdir()
    written(other, 8)
    path.write_bytes((other / FILE).read_bytes())  # times differ, and so all digests
    with pytest.raises(SettingError, match=r"was written anew: its line 6 is not the one that audit.head"):
        verify(path)
    path.with_name(HEAD).write_text("6")
    for look in (verify, lambda _: AuditLog(tmp_path).write("started")):
        with pytest.raises(SettingError, match=r"audit.head holds no number and digest of a line"):
            look(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.with_name(HEAD).write_text(f"6 {lines[5]['digest']}\n")  # its process was killed between the line and its head
    assert verify(path).lines == 8
    AuditLog(tmp_path).write("started", party="north")
    assert verify(path).lines == 9
    assert path.with_name(HEAD).read_text().startswith("9 ")
    (tmp_path / FILE).unlink()
    with pytest.raises(SettingError, match="has lost its end: it has 0 lines"):
        verify(path)


def test_an_empty_log_of_a_party_that_has_run_is_no_sound_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = provisioned(tmp_path, ["north"]) / "north"
    assert main(["audit", str(folder)]) == 0
    assert "Nothing has been written yet" in capsys.readouterr().out
    (folder / "status.json").write_text('{"party": "north"}')
    for _ in range(2):
        assert main(["audit", str(folder)]) == 2
        assert "audit.jsonl is empty or gone, and" in capsys.readouterr().err
        (folder / FILE).touch()


def test_a_server_s_log_has_all_results_that_its_run_has_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run folder tells of a cut even where the head was cut as well."""
    credentials, run = provisioned(tmp_path / "credentials", ["north"]) / "server", tmp_path / "run"
    (tmp_path / "service").mkdir()
    credentials = credentials.rename(tmp_path / "service" / "piebald-server")  # folders have names of their own
    log = AuditLog(credentials)
    log.write("started", party="server")
    meta = {
        "label": "fedavg",
        "seed": 0,
        "rounds": 3,
        "runtime": {"kind": "federation", "credentials": str(credentials)},
    }
    with RunStore.create(run, meta) as store:
        for version in (1, 2, 3):
            rows = [{"id": 2 * version + n, "client": n, "kind": "train", "status": "ok"} for n in range(2)]
            rows += [{"id": 100 + version, "client": 1, "kind": "train", "status": "failed"}]
            for row in rows[:2]:
                log.write("received", site="north", run="ab", task=row["id"], body="c" * 32)
            store.commit({"version": version}, rows, Checkpoint({}, {"runtime": {"run": "ab"}}))
    assert main(["audit", str(run)]) == 0
    assert "whose 6 counted results it has" in capsys.readouterr().out
    assert main(["audit", str(credentials)]) == 0  # which do not name the run
    log.path.write_bytes(b"".join(log.path.read_bytes().splitlines(keepends=True)[:-1]))
    (credentials / HEAD).unlink()
    end = verify(log.path)
    (credentials / HEAD).write_text(f"{end.lines} {end.head}\n")
    assert main(["audit", str(credentials)]) == 0
    capsys.readouterr()
    assert main(["audit", str(run)]) == 2
    assert f"tells of 5 of 6 results that the run in {run} has counted, not of task 7" in capsys.readouterr().err
    (credentials / "run.json").write_text(json.dumps({"folder": str(run)}))
    assert main(["audit", str(credentials)]) == 2


def test_a_line_that_a_killed_process_began_is_no_line_and_the_next_one_follows(tmp_path: Path) -> None:
    path = written(tmp_path)
    with path.open("ab") as file:
        file.write(b'{"line":7,"at":"2026')
    AuditLog(tmp_path).write("started", party="north")
    assert verify(path).lines == 7
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_bytes(path.read_bytes().replace(b'"started"', b'"startet"'))
    with pytest.raises(SettingError, match=r"the last line of .* is not as it was written"):
        AuditLog(tmp_path).write("started", party="north")
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingError, match="is a link, and the log would be written elsewhere"):
        AuditLog(tmp_path).write("started", party="north")
    assert not (tmp_path / "elsewhere").exists()


def test_what_others_send_makes_no_line_that_is_too_long(tmp_path: Path) -> None:
    """Before, terms with a long recipe ended the log of a site: no line after it could be checked or written."""
    recipe = {"name": "a" * (3 << 20)}
    AuditLog(tmp_path).write("declined", recipe=recipe, reason="no", **{f"other{n}": "b" * (1 << 15) for n in range(9)})
    AuditLog(tmp_path).write("started")
    assert verify(tmp_path / FILE).lines == 2
    told = json.loads((tmp_path / FILE).read_text().splitlines()[0])
    assert told["reason"] == "no"
    assert told["recipe"] == {"sha256": hashlib.sha256(json.dumps(recipe).encode()).hexdigest(), "bytes": 3_145_740}


def test_a_rotated_log_stays_one_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "LONG", 1000)
    credentials = provisioned(tmp_path / "credentials", ["north"])
    path, archive = written(credentials / "north", 20), tmp_path / "archive"
    rotated = sorted(path.parent.glob("audit-*.jsonl"))
    assert len(rotated) > 2
    assert max(file.stat().st_size for file in [*rotated, path]) < 1500
    noted = json.loads(rotated[0].read_text().splitlines()[-1])["digest"]
    assert verify(path).lines == 20
    assert knows(path, [noted])
    server = AuditLog(credentials / "server")
    server.write("started", party="server")
    server.write("received", site="north", run="ab", task=0, body=f"{0:032x}")
    assert missing(path, server.path) == []
    archive.mkdir()
    for file in rotated[:2]:
        file.rename(archive / file.name)
    with pytest.raises(SettingError, match=r"line 1 of .* it is line \d+ of the log, so name the folder"):
        verify(path)
    command = ["audit", str(path.parent), "--head", noted, "--against", str(server.path.parent)]
    assert main(command) == 2
    assert main([*command, "--archive", str(archive)]) == 0
    first = json.loads(path.read_text().splitlines()[0])["line"]
    path.rename(path.with_name(f"audit-{first:09d}.jsonl"))  # a process that is killed after that
    AuditLog(path.parent).write("started", party="north")
    assert verify(path, archive).lines == 21
    (archive / rotated[1].name).unlink()
    with pytest.raises(SettingError, match=f"line {rotated[1].stem[-2:].lstrip('0')} of .* does not follow"):
        verify(path, archive)


def test_nothing_leaves_a_site_that_cannot_write_down_what_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = prepared({"name": "fedavg"})
    made = site(provisioned(tmp_path / "credentials"), plan)
    import torch

    from piebald.contracts import Update
    from piebald.federation.link.wire_format import pack_update
    from piebald.federation.site.client_session import Delivery

    body = pack_update(Update({"model": torch.ones(3)}, 5, 2, {"loss": 0.5}), None)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert not made.deliver(Delivery(1, True, body))
    assert made._link.left == []  # type: ignore[attr-defined]
    assert verify(made._audit.path).lines == 0
    monkeypatch.undo()
    assert not made.deliver(Delivery(1, True, body))  # nobody answers, so it is tried again, and noted once
    assert not made.deliver(Delivery(1, True, body))
    assert len(made._link.left) == 2  # type: ignore[attr-defined]
    (line,) = [json.loads(line) for line in made._audit.path.read_text().splitlines()]
    assert (line["event"], line["tensors"], line["numbers"]) == ("sent", {"model": [3]}, ["loss"])
    assert (line["bytes"], line["body"], line["policy"]) == (len(body), digest(body), made._policy.digest)


def test_a_line_that_did_not_fit_leaves_nothing_where_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, what was left of the line was written when the file was closed, behind a hole."""
    kept, truncate = AuditLog(tmp_path), os.truncate
    kept.write("started")
    before, limits = kept.path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)

    def make_room(handle: int, size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        truncate(handle, size)

    monkeypatch.setattr(os, "truncate", make_room)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            kept.write("ended")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert kept.path.read_bytes() == before
    kept.write("ended")
    assert verify(kept.path).lines == 2


def cut(path: Path) -> None:
    """Take the last line of a log away, and what tells of it beside the log."""
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    path.with_name(HEAD).unlink()


def test_the_last_line_and_the_head_cannot_be_removed_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, the log was said to hold; and the line that was written next hid for ever that there was another."""
    folder = provisioned(tmp_path, ["north"]) / "north"
    cut(path := written(folder))
    assert main(["audit", str(folder)]) == 2
    assert "audit.head beside" in capsys.readouterr().err
    for _ in range(2):
        AuditLog(folder).write("started", party="north")
        assert main(["audit", str(folder)]) == 2
        assert f"line 6 of {path} was written where audit.head was gone" in capsys.readouterr().err
    assert verify(path).lines == 7
    assert main(["audit", str(folder), "--head", verify(path).head]) == 0  # whoever kept a head knows better


def test_the_status_tells_of_a_line_that_was_removed_with_a_head_made_to_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = provisioned(tmp_path, ["north"]) / "north"
    path = written(folder)
    end = verify(path)
    (folder / "status.json").write_text(json.dumps({"party": "north", "audit": [end.lines, end.head]}))
    assert main(["audit", str(folder)]) == 0
    assert "the party's status, which tells of no further line" in capsys.readouterr().out
    cut(path)
    shorter = path.read_bytes().splitlines()[-1]
    path.with_name(HEAD).write_text(f"5 {json.loads(shorter)['digest']}\n")
    assert main(["audit", str(folder)]) == 2
    assert "has lost its end: it has 5 lines, and the party's status tells of line 6" in capsys.readouterr().err
    AuditLog(folder).write("started", party="north")  # another line in the place of the one that is gone
    assert main(["audit", str(folder)]) == 2
    assert "was written anew: its line 6 is not the one that the status tells of" in capsys.readouterr().err
