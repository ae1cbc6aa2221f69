"""Startup kits: an archive for each site, with its credentials, settings, instructions, a unit, a container file."""

from __future__ import annotations

import io
import tarfile
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory

from piebald.core.errors import SettingError
from piebald.core.private_files import write_private
from piebald.core.reading import DAMAGE, UnfitFile, read_bytes, tar_members
from piebald.federation.credentials.provisioning import Credentials, read

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
