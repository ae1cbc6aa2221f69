"""Credentials: keys are in one folder only, sites can be added, and errors are reported in one sentence."""

from __future__ import annotations

import json
import os
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store

from piebald.cli import main
from piebald.core.errors import SettingError
from piebald.federation.credentials import provisioning
from piebald.federation.credentials.provisioning import Description, provision, write_kit
from piebald.federation.hub.member_list import sites_of

from .conftest import provisioned


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_keys_are_in_one_folder_only_and_readable_by_their_owner_only(tmp_path: Path) -> None:
    found = contents(provisioned(tmp_path / "credentials"))
    keys = {name: data for name, data in found.items() if name.endswith("key.pem")}
    assert sorted(keys) == [
        "authority/key.pem",
        *(f"{party}/key.pem" for party in ("server", "site-1", "site-2", "site-3")),
    ]
    for name, key in keys.items():
        assert [other for other, data in found.items() if key in data] == [name]
    for name in found:
        assert stat.S_IMODE((tmp_path / "credentials" / name).stat().st_mode) == 0o600, name


def test_certificates_say_who_they_are_of_and_for_how_long(tmp_path: Path) -> None:
    folder = provisioned(tmp_path / "credentials")
    authority = x509.load_pem_x509_certificate((folder / "site-1" / "authority.pem").read_bytes())
    certificate = x509.load_pem_x509_certificate((folder / "site-1" / "certificate.pem").read_bytes())
    verifier = PolicyBuilder().store(Store([authority])).build_client_verifier()
    assert verifier.verify(certificate, []).subjects is not None
    assert certificate.subject.rfc4514_string() == "CN=site-1"
    assert provisioning.read(folder / "site-1").expires == certificate.not_valid_after_utc
    assert timedelta(days=1) < certificate.not_valid_after_utc - datetime.now(UTC) <= timedelta(days=2)


def test_a_site_is_added_later_and_the_rest_is_kept(tmp_path: Path) -> None:
    folder = provisioned(tmp_path / "credentials", ["a", "b"], port=8400)
    before = contents(folder)
    provisioned(folder, ["a", "b", "c"], port=8400)
    after = contents(folder)
    changed = {name for name in before if after[name] != before[name]}
    assert changed == {"federation.json", "server/sites.json"}
    assert provisioning.read(folder / "server").sites() == ["a", "b", "c"]
    assert provisioning.read(folder / "c").party == "c"


def test_an_interrupted_call_is_gone_on_with_from_wherever_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = Description(name="two", sites=["a", "b"])

    def provide(folder: Path) -> None:
        provision(described, folder, lambda site: write_kit(site, folder / "kits"))

    provide(tmp_path / "whole")
    whole, replace = contents(tmp_path / "whole").keys(), os.replace  # by which each of these files comes into being
    assert len(whole) > 15
    for written in range(len(whole)):
        left, folder = iter(range(written)), tmp_path / str(written)

        def interrupted(*paths: Path) -> None:
            if next(left, None) is None:  # noqa: B023 - called before the next turn
                raise KeyboardInterrupt
            replace(*paths)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", interrupted)
            with pytest.raises(KeyboardInterrupt):
                provide(folder)
        kept = contents(folder)
        provide(folder)
        assert contents(folder).keys() == whole
        assert provisioning.read(folder / "server").sites() == ["a", "b"]
        for party in ("server", "a", "b"):
            if f"{party}/credentials.json" in kept:  # what was whole stays as it is
                assert kept[f"{party}/key.pem"] == (folder / party / "key.pem").read_bytes()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"port": 8401}, "made with port = 8400"),
        ({"sites": ["b", "a"]}, "list these first"),
        ({"sites": ["a"]}, "list these first"),
        ({"name": "other"}, "made with name"),
    ],
    ids=str,
)
def test_two_federations_do_not_mix(change: dict[str, object], says: str, tmp_path: Path) -> None:
    given = {"host": "localhost", "port": 8400, "sites": ["a", "b"]}
    provision(Description.model_validate(given), tmp_path / "credentials")
    with pytest.raises(SettingError, match=says):
        provision(Description.model_validate(given | change), tmp_path / "credentials")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sites = []", "sites"),
        ("sites = ['a', 'A']", "the same name"),
        ("sites = ['server']", "not server"),
        ("sites = ['a.b']", "named by letters"),
        ("sites = ['a']\nprot = 1", "prot"),
        ("sites = ['a']\nport = 70000", "port"),
        ("sites = [", "not TOML"),
    ],
)
def test_a_wrong_description_is_refused_in_one_sentence(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "federation.toml").write_text(text)
    assert main(["provision", str(tmp_path / "federation.toml"), "--out", str(tmp_path / "credentials")]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert not (tmp_path / "credentials").exists()


def test_the_command_prints_when_certificates_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "federation.toml").write_text("host = 'example.org'\ndays = 30\nsites = ['north', 'south']\n")
    assert main(["provision", str(tmp_path / "federation.toml"), "--out", str(tmp_path / "credentials")]) == 0
    said = capsys.readouterr().out
    for party in ("server", "north", "south"):
        assert f"{provisioning.read(tmp_path / 'credentials' / party).expires:%Y-%m-%d}" in said


def test_expired_open_and_missing_credentials_are_refused(tmp_path: Path) -> None:
    folder = provisioned(tmp_path / "credentials") / "site-1"
    (folder / "key.pem").chmod(0o644)
    with pytest.raises(SettingError, match="chmod 600"):
        provisioning.read(folder)
    about = json.loads((folder / "credentials.json").read_text())
    (folder / "credentials.json").write_text(json.dumps(about | {"expires": "2020-01-01T00:00:00+00:00"}))
    with pytest.raises(SettingError, match="expired on 2020-01-01"):
        provisioning.read(folder)
    with pytest.raises(SettingError, match="holds no credentials"):
        provisioning.read(tmp_path)


def test_a_key_without_rights_is_not_to_be_copied_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    provisioning.provision(provisioning.Description(sites=["north"]), tmp_path)

    def refused(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(provisioning, "read_bytes", refused)
    with pytest.raises(SettingError, match="cannot be read: PermissionError: let this user read them"):
        provisioning.read(tmp_path / "north")


def test_clients_of_which_one_is_no_site_are_not_matched_by_order(tmp_path: Path) -> None:
    credentials = provisioning.read(provisioned(tmp_path, ["north", "south", "east"]) / "server")

    class Named:
        def __init__(self, *names: str) -> None:
            self.names = names

        def __len__(self) -> int:
            return len(self.names)

    assert sites_of(credentials, Named("east", "north")) == ["east", "north"]
    assert sites_of(credentials, Named("a", "b")) == ["north", "south"]
    with pytest.raises(SettingError, match=r"there is no site in .* for the client 'est': did you mean 'east'\?"):
        sites_of(credentials, Named("south", "north", "est"))
