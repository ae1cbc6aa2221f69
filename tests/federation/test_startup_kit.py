"""Startup kits: what a site is sent in one archive, and how it starts from it."""

from __future__ import annotations

import io
import re
import sys
import tarfile
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

import pytest

from piebald.cli import main
from piebald.core.errors import SettingError
from piebald.federation.credentials import certificates, provisioning
from piebald.federation.credentials.provisioning import unpack_kit, write_kit
from tests import processes

from .conftest import ENVIRONMENT, Server, provisioned, settings, until


def kit_of(folder: Path, site: str = "north", name: str = "oncology") -> Path:
    credentials = provisioned(folder / "credentials", [site, "south"], name=name)
    return write_kit(provisioning.read(credentials / site), folder / "kits")


def test_provision_makes_a_kit_for_each_site_that_nobody_else_can_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("federation.toml").write_text(
        'name = "oncology"\nhost = "127.0.0.1"\nport = 8400\nsites = ["north", "south"]\n'
    )
    assert main(["provision", "federation.toml"]) == 0
    assert "piebald site up KIT" in capsys.readouterr().out
    kits = sorted(Path("credentials/kits").iterdir())
    assert [kit.name for kit in kits] == ["north.tar.gz", "south.tar.gz"]
    assert all(kit.stat().st_mode & 0o777 == 0o600 for kit in kits)
    folder = unpack_kit(kits[0])
    assert provisioning.read(folder).party == "north"
    there = {path.name for path in folder.iterdir()}
    assert {"README.md", "Containerfile", "piebald-site.service", "site.toml", "key.pem"} <= there
    assert all(path.stat().st_mode & 0o77 == 0 for path in folder.iterdir())
    unit = (folder / "piebald-site.service").read_text()
    installed = re.findall(r"^#     (?:cp|install -o .* 600) (.*) /(?:etc|var)", unit, re.MULTILINE)
    assert len(installed) == 2, unit
    assert all(list(folder.glob(pattern)) for files in installed for pattern in files.split())


def test_a_renewed_kit_replaces_what_has_expired_and_an_old_one_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Past(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return datetime.now(tz) - timedelta(days=800)

    with monkeypatch.context() as past:
        past.setattr(certificates, "datetime", Past)
        past.setattr(provisioning, "datetime", Past)
        old = kit_of(tmp_path)
        folder = unpack_kit(old, tmp_path / "site")
    with pytest.raises(SettingError, match=r"the certificate of north in .*north.tar.gz expired on"):
        unpack_kit(old, folder)
    assert not list(folder.glob(".new*"))
    values = {"name": "oncology", "host": "127.0.0.1", "port": provisioning.read(folder, connects=False).port}
    description = provisioning.Description.model_validate({**values, "sites": ["north", "south"]})
    (renewed,) = provisioning.renew(description, tmp_path / "credentials", ["north"])
    for kit in (write_kit(renewed, tmp_path / "again"), old):
        assert provisioning.read(unpack_kit(kit, folder)).expires == renewed.expires


def test_a_kit_leaves_what_the_site_has_changed_and_brings_renewed_credentials(tmp_path: Path) -> None:
    kit = kit_of(tmp_path)
    folder = unpack_kit(kit, tmp_path / "site")
    (folder / "site.toml").write_text('device = "cpu"\n')
    key = (folder / "key.pem").read_bytes()
    description = provisioning.Description.model_validate(
        {"name": "oncology", "host": "127.0.0.1", "port": provisioning.read(folder).port, "sites": ["north", "south"]}
    )
    (renewed,) = provisioning.renew(description, tmp_path / "credentials", ["north"])
    assert unpack_kit(write_kit(renewed, tmp_path / "again"), folder) == folder
    assert (folder / "site.toml").read_text() == 'device = "cpu"\n'
    assert (folder / "key.pem").read_bytes() != key
    assert unpack_kit(kit, folder) == folder  # the older kit once more
    assert provisioning.read(folder).expires == renewed.expires
    assert unpack_kit(folder) == folder.resolve()


def test_the_kit_of_another_site_or_federation_replaces_nothing(tmp_path: Path) -> None:
    folder = unpack_kit(kit_of(tmp_path / "a"), tmp_path / "site")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for other in (kit_of(tmp_path / "b", "east"), kit_of(tmp_path / "c", name="cardiology")):
        with pytest.raises(SettingError, match="unpack it elsewhere, with --into FOLDER"):
            unpack_kit(other, folder)
        assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("name", ["../../outside", "/outside", "north/../../outside"])
def test_a_kit_writes_nothing_beside_its_folder(name: str, tmp_path: Path) -> None:
    kit = kit_of(tmp_path)
    with tarfile.open(kit) as archive:
        contents = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    hostile = tmp_path / "deep" / "north.tar.gz"
    hostile.parent.mkdir()
    with tarfile.open(hostile, "w:gz") as archive:
        for member_name, content in {**contents, name: b"x", f"{name}/key.pem": contents["north/key.pem"]}.items():
            member = tarfile.TarInfo(member_name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("north/site.toml")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    folder = unpack_kit(hostile)
    assert not (tmp_path / "outside").exists()
    assert not (folder / "site.toml").is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"credentials", "kits", "deep"}


@pytest.mark.parametrize(("content", "says"), [(None, "there is no kit"), (b"no archive", "cannot be read as a kit")])
def test_what_is_no_kit_is_one_sentence(
    content: bytes | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kit = tmp_path / "north.tar.gz"
    if content is not None:
        kit.write_bytes(content)
    assert main(["site", "up", str(kit)]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.long
def test_sites_that_start_from_their_kits_train_a_model(tmp_path: Path) -> None:
    folder = provisioned(tmp_path / "credentials")
    names = provisioning.read(folder / "server").sites()
    kits = [write_kit(provisioning.read(folder / name), tmp_path / "kits") for name in names]
    started = [
        processes.Popen([sys.executable, "-m", "piebald.cli", "site", "up", str(kit)], env=ENVIRONMENT) for kit in kits
    ]
    server = Server(
        settings({"name": "fedavg"}, rounds=2, runtime={"kind": "federation"}), folder / "server", tmp_path / "run"
    )
    try:
        until(server.over)
        assert server.version() == 2
        for site in started:
            site.terminate()
        assert [site.wait(60) for site in started] == [130] * len(started)
    finally:
        server.close()
        for site in started:
            site.kill()
            site.wait()
