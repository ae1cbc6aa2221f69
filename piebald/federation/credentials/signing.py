"""Signatures of sites on messages that they exchange through the server, made with the key of their credentials.

A signature carries the site's certificate, which the federation's authority has signed, so a server that is not the
authority cannot replace a site's keys by its own.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from piebald.contracts import SIGNATURE
from piebald.core.errors import SettingError
from piebald.core.files import read_bytes

_SIGN = ec.ECDSA(hashes.SHA256())


class SignatureCheck:
    """Checks signatures of the sites in one run.

    Args:
        folder: the credentials of a party.
        sites: the site of each client, by number.
        run: the run, outside of which signatures are not valid.
        terms: digest of its terms, likewise.

    Raises:
        SettingError: a site is named twice, so that it could sign for several clients.
    """

    def __init__(self, folder: Path, sites: Sequence[str], run: str, terms: str = "") -> None:
        if len({*sites}) < len(sites):
            raise SettingError("the server names one site for several clients")
        self._sites, self._about = list(sites), [run.encode(), terms.encode()]
        self._authority = x509.load_pem_x509_certificate(read_bytes(folder / "authority.pem"))

    def check(self, client: int, text: bytes, signature: bytes) -> bool:
        """Return whether the site of a client has signed a text."""
        try:
            (length,) = struct.unpack_from("<H", signature)
            certificate = x509.load_der_x509_certificate(signature[2 : 2 + length])
            (size,) = struct.unpack_from("<H", signature, 2 + length)
            key = certificate.public_key()
            if not self._is_of(certificate, client) or not isinstance(key, ec.EllipticCurvePublicKey):
                return False
            key.verify(signature[4 + length : 4 + length + size], self._message(text), _SIGN)
        # the bytes are another site's, and whatever is wrong with them makes them no signature
        except (ValueError, TypeError, struct.error, InvalidSignature, UnsupportedAlgorithm, x509.ExtensionNotFound):
            return False
        return True

    def name(self, client: int) -> str:
        """Return a client in words: its number, and its site."""
        return f"client {client} ({self._sites[client]})" if client < len(self._sites) else f"client {client}"

    def _is_of(self, certificate: x509.Certificate, client: int) -> bool:
        """Return whether a certificate is that of a client's site, issued by this authority and valid today."""
        certificate.verify_directly_issued_by(self._authority)
        # the server's certificate, of the same authority, must not stand for a client
        use = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        names = [name.value for name in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        today = certificate.not_valid_before_utc <= datetime.now(UTC) <= certificate.not_valid_after_utc
        names_match = 0 <= client < len(self._sites) and names == [self._sites[client]]
        return today and names_match and ExtendedKeyUsageOID.CLIENT_AUTH in use

    def _message(self, text: bytes) -> bytes:
        # with lengths, so that no other run and terms give the same bytes
        context = b"".join(struct.pack("<I", len(part)) + part for part in self._about)
        # the prefix keeps a signature from being taken for one of another protocol with the same key
        return b"piebald: keys of a secure aggregation\0" + context + text


class CertificateSigner(SignatureCheck):
    """Signs for one site in one run, and checks signatures of the others (`contracts.Signer`).

    Args, errors: as of `SignatureCheck`; the credentials are the site's.
    """

    def __init__(self, folder: Path, sites: Sequence[str], run: str, terms: str = "") -> None:
        super().__init__(folder, sites, run, terms)
        self._folder = folder
        self._key, self._certificate = _identity(folder)

    def sign(self, text: bytes) -> bytes:
        """Return a signature of `SIGNATURE` bytes, with the present key and certificate: they may be renewed."""
        with suppress(OSError, ValueError):  # they are being replaced: those before are still valid
            self._key, self._certificate = _identity(self._folder)
        parts = (self._certificate, self._key.sign(self._message(text), _SIGN))
        signature = b"".join(struct.pack("<H", len(part)) + part for part in parts)
        if len(signature) > SIGNATURE:
            raise SettingError(f"the site's certificate is too long: {len(signature)} bytes with a signature")
        # DER signatures differ in length by a few bytes, and the contract has one length for all
        return signature.ljust(SIGNATURE, b"\0")


def _identity(folder: Path) -> tuple[ec.EllipticCurvePrivateKey, bytes]:
    """Return the key of a party, and its certificate in DER.

    Raises:
        ValueError: they do not belong together, or are no key and no certificate.
    """
    key = serialization.load_pem_private_key(read_bytes(folder / "key.pem"), None)
    certificate = x509.load_pem_x509_certificate(read_bytes(folder / "certificate.pem"))
    if not isinstance(key, ec.EllipticCurvePrivateKey) or certificate.public_key() != key.public_key():
        raise ValueError("the key is not that of the certificate")
    return key, certificate.public_bytes(serialization.Encoding.DER)
