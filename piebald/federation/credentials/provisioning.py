"""Credentials of the parties of a federation: one folder each, with a certificate, a key and settings.

    <folder>/
      federation.json        the description that the credentials were made from
      authority/             the authority's own key, which makes further credentials: keep it in a safe place
      server/, site-1/, ...  authority.pem, certificate.pem, key.pem, credentials.json; sites also have site.toml
      ann/, ...              the same of people, who call the server from elsewhere (`operate.remote`)

Keys are created in their party's folder and are stored nowhere else. Only the owner can read the files (mode 0600).
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from ipaddress import ip_address
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from piebald.core.errors import SettingError, shown, unknown
from piebald.core.files import UnfitFile, read_bytes, read_json, settings_text
from piebald.core.private_files import write_private
from piebald.core.reading import DAMAGE, tar_members
from piebald.federation.credentials.revocation import read_revoked, write_revoked
from piebald.federation.credentials.slots import slot_of
from piebald.federation.link.messaging import SERVER
from piebald.settings.toml_document import Document, of_document

if TYPE_CHECKING:
    from piebald.federation.credentials.certificates import Authority


FORMAT = 1  # of the files that are written here
_CREDENTIALS, _DESCRIPTION = "credentials.json", "federation.json"
_SITES, _PEOPLE = "sites.json", "people.json"
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


def _findable(host: str) -> str:
    """A name or an IP address, as certificates have them."""
    try:
        ip_address(host)
    except ValueError:
        if not _HOST.fullmatch(host):
            raise ValueError(
                f"host must be a name or an IP address, without http:// and port, got {shown(host)}"
            ) from None
    return host


Role = Literal["researcher", "operator", "administrator"]


class Description(BaseModel):
    """Description of a federation, as in `federation.toml`.

    Attributes:
        name: of the federation.
        host, port: address of the server, as sites see it: a name, or an IP address.
        days: how long certificates are valid.
        sites: names of the sites, in the order of their client numbers.
        people: who may call the server from elsewhere, by name: a "researcher" submits experiments, and reads, stops
            and fetches its own; an "operator" reads and stops all; an "administrator" of a site sees how they go.

    Examples:
        >>> plan = Description(host="hub.example.org", sites=["north", "south"])
        >>> plan.port, plan.days, plan.sites.index("south")
        (8400, 365, 1)
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = "federation"
    host: Annotated[str, AfterValidator(_findable)] = "localhost"
    port: int = Field(default=8400, ge=1, le=65535)
    days: int = Field(default=365, ge=1, le=3650)
    sites: list[str] = Field(min_length=1, max_length=1000)
    people: dict[str, Role] = Field(default={}, max_length=1000)

    @property
    def parties(self) -> tuple[str, ...]:
        """All that have credentials."""
        return SERVER, *self.sites, *self.people


@dataclass(frozen=True, slots=True)
class Credentials:
    """A party's credentials.

    Attributes:
        folder: where the files are.
        federation: the federation's name.
        party: the party's name.
        host, port: address of the server.
        expires: when the certificate expires.
    """

    folder: Path
    federation: str
    party: str
    host: str
    port: int
    expires: datetime

    @property
    def log(self) -> str:
        """A name of the party's audit log, which credentials of another federation do not have."""
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        authority = x509.load_pem_x509_certificate(read_bytes(self.folder / "authority.pem"))
        # its key, since its certificate is renewed
        key = authority.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        name = f"{self.federation}/{self.party}/{hashlib.sha256(key).hexdigest()[:16]}"
        slot = slot_of(self.folder)  # whose log is one of its own
        return f"{name}/{slot}" if slot else name

    def sites(self) -> list[str]:
        """The names of the sites, as listed in the server's credentials; empty for those of a site."""
        return _sites(self.folder)

    def people(self) -> dict[str, str]:
        """The roles of people by name, as listed in the server's credentials; empty for those of others."""
        return {str(name): str(role) for name, role in _listed(self.folder / _PEOPLE, {}).items()}


def _sites(server: Path) -> list[str]:
    return [str(name) for name in _listed(server / _SITES, [])]


def _listed(path: Path, otherwise: Any) -> Any:
    try:
        return read_json(path)
    except FileNotFoundError:
        return otherwise


def describe(path: Path) -> Description:
    """Read a federation's description.

    Raises:
        SettingError: it cannot be read, or a value in it is not allowed.
    """
    document = Document(settings_text(path), str(path))
    try:
        description = Description.model_validate(document.values)
    except ValidationError as error:
        raise of_document(error, document, Description) from None
    _check_names(path, [*description.sites, *description.people])
    return description


def _check_names(path: Path, sites: Sequence[str]) -> None:
    for name in sites:
        # sites are folders beside those of the server and the authority
        if not _NAME.fullmatch(name) or name in (SERVER, "authority"):
            raise SettingError(
                f"{path}: sites and people are named by letters, digits, - and _, at most 63, not server or authority, "
                f"got {name!r}"
            )
    # names are folders, and some file systems do not tell cases apart
    if len({name.lower() for name in sites}) < len(sites):
        raise SettingError(f"{path}: two sites or people have the same name: give each its own")


HandOut = Callable[[Credentials], object]


def provision(description: Description, out: Path, hand_out: HandOut | None = None) -> list[Credentials]:
    """Create the credentials that do not exist yet, and leave existing ones as they are.

    Where it is interrupted, the next call makes what is missing.

    Args:
        description: of the federation.
        out: the folder for the credentials.
        hand_out: called with the credentials of each site, before the server knows it, to write its kit.

    Returns:
        The new credentials, and those that an interrupted call has not handed out.

    Raises:
        SettingError: the folder holds credentials of another federation.
    """
    authority = _authority(description, out)
    known = _sites(out / SERVER)
    credentials = []
    for party in description.parties:
        there = (out / party / _CREDENTIALS).exists()
        if not there or (party in description.sites and party not in known):
            credentials.append(read(out / party) if there else _issue(authority, description, out, party))
    _finish(description, out, credentials, hand_out)
    return credentials


def renew(
    description: Description, out: Path, parties: Sequence[str] = (), hand_out: HandOut | None = None
) -> list[Credentials]:
    """Make new keys and certificates, which processes that are running take up without a stop.

    Earlier certificates are accepted until they expire, unless their site is revoked.  Settings of sites are left as
    they are.

    Args:
        description: of the federation.
        out: the folder for the credentials, with its authority.
        parties: whose; all by default.
        hand_out: see `provision`.

    Returns:
        The new credentials.

    Raises:
        SettingError: the folder holds credentials of another federation, or a party is unknown.
    """
    parties_of_file = description.parties
    for party in parties:
        if party not in parties_of_file:
            raise unknown("party", party, parties_of_file)
    _check_authority(out)
    authority = _authority(description, out)
    authority.renew(out / "authority", description.days)
    credentials = [_issue(authority, description, out, party) for party in parties or parties_of_file]
    _finish(description, out, credentials, hand_out)
    return credentials


def revoke(description: Description, out: Path, sites: Sequence[str]) -> dict[str, datetime]:
    """Have the server refuse all certificates that sites were given up to now; returns when each site was revoked.

    Raises:
        SettingError: the folder holds credentials of another federation, or a site is unknown.
    """
    for site in sites:
        if site not in description.parties[1:]:
            raise unknown("site", site, description.parties[1:])
    _check_authority(out)
    _check_same(description, out)
    return write_revoked(out / SERVER, list(sites))


def _check_authority(out: Path) -> None:
    for path in (out / "authority" / "key.pem", out / SERVER / _CREDENTIALS):
        if not path.exists():
            raise SettingError(f"{path} is missing: give the folder that piebald provision made, with --out")


def _authority(description: Description, out: Path) -> Authority:
    """The authority of the federation in a folder, made where there is none."""
    from piebald.federation.credentials.certificates import Authority

    _check_same(description, out)
    out.mkdir(parents=True, exist_ok=True)
    # first: a folder without it is taken for somebody else's
    write_private(out / _DESCRIPTION, json.dumps({"format": FORMAT, **description.model_dump()}) + "\n")
    return Authority.at(out / "authority", description.name, description.days)


def _issue(authority: Authority, description: Description, out: Path, party: str) -> Credentials:
    """Make the credentials of a party, in place of those that it has."""
    folder = out / party
    folder.mkdir(mode=0o700, exist_ok=True)
    revoked = read_revoked(out / SERVER).get(party)
    expires = authority.issue(folder, party, description.host, description.days, revoked)
    values = {"format": FORMAT, "federation": description.name, "party": party, "host": description.host}
    values |= {"port": description.port, "expires": expires.isoformat()}
    if party in description.sites and not (folder / "site.toml").exists():
        write_private(folder / "site.toml", SITE_TOML)
    # written last: where this file exists, the credentials are complete
    write_private(folder / _CREDENTIALS, json.dumps(values) + "\n")
    return read(folder)


def _finish(description: Description, out: Path, credentials: Sequence[Credentials], hand_out: HandOut | None) -> None:
    """Hand out the credentials of sites, and then write down whom the server knows."""
    for issued in credentials:
        if hand_out is not None and issued.party in description.sites:
            hand_out(issued)
    write_private(out / SERVER / _PEOPLE, json.dumps(description.people) + "\n")
    write_private(out / SERVER / _SITES, json.dumps(list(description.sites)) + "\n")


def _check_same(description: Description, out: Path) -> None:
    """Refuse to mix two federations, or to renumber clients."""
    try:
        before = read_json(out / _DESCRIPTION)
        _check_format(out, before)
    except FileNotFoundError:
        if out.exists() and any(out.iterdir()):
            raise SettingError(f"{out} is not empty and holds no credentials: choose a new folder") from None
        return
    now = description.model_dump()
    for name in ("name", "host", "port"):
        if before[name] != now[name]:
            raise SettingError(
                f"the credentials in {out} were made with {name} = {before[name]!r}, now it is {now[name]!r}: "
                "choose a new folder, since every site needs new credentials"
            )
    if now["sites"][: len(before["sites"])] != before["sites"]:
        raise SettingError(
            f"the credentials in {out} are of the sites {', '.join(before['sites'])}: list these first, in this order, "
            "and new ones after them, since the order numbers the clients"
        )


def read(folder: Path, connects: bool = True) -> Credentials:
    """Read the credentials in a folder.

    Args:
        folder: where they are.
        connects: whether certificate and key will be used; else they may be missing, or have expired.

    Raises:
        SettingError: there are none, they are from a later version, the certificate has expired, the key does not
            belong to it, or others can read the key.
    """
    none = SettingError(f"{str(folder)!r} holds no credentials: give a folder that piebald provision made")
    try:
        values: dict[str, Any] = dict(read_json(folder / _CREDENTIALS))
    except (OSError, ValueError, TypeError):
        raise none from None
    _check_format(folder, values)
    try:
        credentials = Credentials(
            folder.resolve(), values["federation"], values["party"], values["host"], int(values["port"]),
            datetime.fromisoformat(values["expires"]),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError):
        raise none from None
    if not connects:
        return credentials
    if credentials.expires < datetime.now(UTC):
        raise SettingError(
            f"the certificate of {credentials.party} in {folder} expired on {credentials.expires:%Y-%m-%d}: make a new "
            "one with piebald provision --renew, and copy it here"
        )
    _check_pair(folder)
    key = folder / "key.pem"
    if key.stat().st_mode & 0o077:  # a copied folder often lost its modes
        raise SettingError(f"{key} can be read by others: chmod 600 {key}")
    return credentials


def _check_format(folder: Path, values: Mapping[str, Any]) -> None:
    """Refuse what another version of Piebald wrote."""
    if values.get("format") != FORMAT:
        raise SettingError(
            f"the credentials in {folder} have format {shown(values.get('format'))}, this Piebald reads {FORMAT}: "
            "install the Piebald that made them"
        )


def _check_pair(folder: Path) -> None:
    """Refuse a certificate beside the key of another one, which a renewal that was copied in part leaves."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        certificate = x509.load_pem_x509_certificate(read_bytes(folder / "certificate.pem"))
        key = load_pem_private_key(read_bytes(folder / "key.pem"), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        remedy = "let this user read them" if isinstance(error, PermissionError) else "copy them again"
        raise SettingError(f"the credentials in {folder} cannot be read: {type(error).__name__}: {remedy}") from None
    if certificate.public_key() != key.public_key():
        raise SettingError(
            f"certificate.pem and key.pem in {folder} do not belong together: copy all files of the renewed credentials"
        )


SITE_TOML = """\
# Settings of this site.  Nothing in this file leaves the site.

# device = "cpu"          # or "cuda"

# [data]                  # without it, the site's rows are those that the experiment's partition gives it
# source = "patients.csv" # .csv, .tsv, .parquet, .npz (arrays x and y), a folder, "my_data.py:load" or "mylab:load"
# target = "diagnosis"    # the column of a table to predict
# client = "hospital"     # if it has rows of others, too: the column that says whose; only the site's own are taken
# features = ["age"]      # the columns to predict from, all others by default
# test = 0.2              # share of the rows held out for testing
# validation = 0.1        # share of the rows held out for validation

# policy = "noise"              # recommended, above all sections: what is answered has noise; or say what is allowed:
# [policy]                      # what this site allows; recipes that would share more are refused
# private = ["classifier"]      # layers that must stay at this site
# clip = 1.0                    # updates must be clipped to at most this norm
# noise = 0.5                   # the least noise, in clips, added here from random numbers that only this site knows
# uploads = ["model"]           # the vectors that an update may carry
# queries = ["evaluate"]        # the queries that are answered, besides training; beside noise and sums else none
# splits = ["test"]             # the rows that answers may depend on
# questions = { evaluate = 300 } # how many questions of a kind are answered about the same rows, in all runs
# least_rows = 10               # answers are about so many rows at least; scores have noise
# models_per_version = 1        # how many models of one version the server may have examined on the same rows
# secure_aggregation = 3        # updates leave only inside secure aggregation of at least this many clients
# accept = ["fedavg", "ask"]    # the recipes that this site takes part in; others are refused, or wait for approval
# accept_split = false          # runs whose terms say how rows are divided are refused; true takes part beside noise
# accept_cleaning = false       # runs with rules of cleaning are refused; true takes part beside noise; or a digest
# carry = false                 # runs that go on from an earlier one begin without the private layers kept here
"""


SUFFIX = ".tar.gz"
_OF_SITE = ("credentials.json", "authority.pem", "certificate.pem", "key.pem", "site.toml")
_OF_ALL = ("README.md", "Containerfile", "piebald-site.service")


def write_kit(credentials: Credentials, folder: Path) -> Path:
    """Write the kit of a site, an archive that only its owner can read.

    Args:
        credentials: the site's.
        folder: where it is written, with the site's name.

    Returns:
        The archive.
    """
    shared = resources.files(__package__) / "kit"
    contents = {name: (shared / name).read_bytes() for name in _OF_ALL}
    contents |= {name: read_bytes(credentials.folder / name) for name in _OF_SITE}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"{credentials.party}/{name}")
            # owner and time of each file stay 0: a kit tells nothing of the users of the machine that made it
            member.size, member.mode = len(content), 0o600
            archive.addfile(member, io.BytesIO(content))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{credentials.party}{SUFFIX}"
    write_private(path, packed.getvalue())
    return path


def unpack_kit(kit: Path, folder: Path | None = None) -> Path:
    """Unpack a site's kit; what a folder has already of the same site is left as it is, but for renewed credentials.

    Args:
        kit: the archive, or a folder that was unpacked before.
        folder: where its files go, by default a folder beside it with its name.

    Returns:
        The folder of the site's credentials.

    Raises:
        SettingError: it is no kit, or the folder holds the credentials of another party.
    """
    if kit.is_dir():
        return read(kit).folder
    try:
        contents = tar_members(kit, (*_OF_SITE, *_OF_ALL))
    except FileNotFoundError:
        raise SettingError(
            f"there is no kit {kit}: give the archive that piebald provision made for this site"
        ) from None
    except (UnfitFile, *DAMAGE) as error:
        raise SettingError(f"{kit} cannot be read as a kit: {error}: ask for it again") from None
    if missing := [name for name in _OF_SITE if name not in contents]:
        raise SettingError(f"{kit} is no kit of a site: it lacks {', '.join(missing)}")
    folder = kit.with_name(kit.name.removesuffix(SUFFIX)) if folder is None else folder
    before = read(folder, connects=False) if (folder / "credentials.json").exists() else None  # it may have expired
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # inside the folder: `replace` is one step only within a file system
    with TemporaryDirectory(prefix=".new-", dir=folder) as unpacked:
        fresh = Path(unpacked)
        for name in _OF_SITE:
            write_private(fresh / name, contents[name])
        renewed = read(fresh, connects=False)
        if before is not None and (before.federation, before.party) != (renewed.federation, renewed.party):
            raise SettingError(
                f"{folder} is of {before.party} in {before.federation!r}, and the kit of {renewed.party} in "
                f"{renewed.federation!r}: unpack it elsewhere, with --into FOLDER"
            )
        # a kit of earlier days must not take the place of credentials that were renewed since
        if before is None or renewed.expires >= before.expires:
            try:
                read(fresh)  # nothing of the folder is replaced before these are known to be sound
            except SettingError as error:
                raise SettingError(str(error).replace(unpacked, str(kit))) from None
            # credentials.json last, so that a folder that was filled in part is not taken for credentials
            for name in _OF_SITE[1:4] + _OF_SITE[:1]:
                (fresh / name).replace(folder / name)
    for name in ("site.toml", *_OF_ALL):
        if name in contents and not (folder / name).exists():  # the site has changed its own
            write_private(folder / name, contents[name])
    return folder
