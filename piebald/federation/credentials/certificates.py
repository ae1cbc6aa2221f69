"""Certificate authority of a federation: ECDSA P-256, X.509.

Signatures of sites on messages that they exchange through the server, made with the key of their credentials.

A signature carries the site's certificate, which the federation's authority has signed, so a server that is not the
authority cannot replace a site's keys by its own.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from piebald.contracts import SIGNATURE
from piebald.core.errors import SettingError
from piebald.core.files import read_bytes
from piebald.core.private_files import write_private
from piebald.federation.credentials.revocation import EARLY
from piebald.federation.link.messaging import SERVER

_PEM = serialization.Encoding.PEM


class Authority:
    """A certificate authority, which signs the certificates of one federation."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate, self._key = certificate, key

    @classmethod
    def at(cls, folder: Path, name: str, days: int) -> Self:
        """Load the authority from a folder, or create a new one there."""
        if (folder / "authority.pem").exists():
            certificate = x509.load_pem_x509_certificate(read_bytes(folder / "authority.pem"))
            key = serialization.load_pem_private_key(read_bytes(folder / "key.pem"), None)
            assert isinstance(key, ec.EllipticCurvePrivateKey)
            return cls(certificate, key)
        folder.mkdir(mode=0o700, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(f"{name} authority")
        constraints = x509.BasicConstraints(ca=True, path_length=0)  # a party cannot issue certificates of its own
        certificate = (
            _builder(subject, subject, key.public_key(), _expiry(days))
            .add_extension(constraints, critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        # the certificate last: `at` takes an authority for complete where it is
        write_private(folder / "key.pem", _key_bytes(key))
        write_private(folder / "authority.pem", certificate.public_bytes(_PEM))
        return cls(certificate, key)

    def renew(self, folder: Path, days: int) -> None:
        """Replace the authority's certificate by one of the same key that is valid from now; old ones fit beside it.

        Args:
            folder: where the authority is.
            days: how long it is valid.
        """
        if _expiry(days) <= self._certificate.not_valid_after_utc:
            return
        # the same key and extensions, so that certificates which it has issued stay valid beside the new one
        builder = _builder(self._certificate.subject, self._certificate.subject, self._key.public_key(), _expiry(days))
        for extension in self._certificate.extensions:
            builder = builder.add_extension(extension.value, critical=extension.critical)
        self._certificate = builder.sign(self._key, hashes.SHA256())
        write_private(folder / "authority.pem", self._certificate.public_bytes(_PEM))

    def issue(self, folder: Path, party: str, host: str, days: int, revoked: datetime | None = None) -> datetime:
        """Create a key and a certificate in a party's credentials folder.

        Args:
            folder: the folder.
            party: the party's name.
            host: where sites find the server.
            days: how long the certificate is valid.
            revoked: when earlier certificates of this party were revoked; this one counts as issued later.

        Returns:
            When the certificate expires, which is no later than the authority's own.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        expires = min(_expiry(days), self._certificate.not_valid_after_utc)
        names: x509.GeneralName = x509.DNSName(party)
        if party == SERVER:
            names = _host(host)
        # the certificate of a site cannot serve, so that no site can pretend to be the server
        use = ExtendedKeyUsageOID.SERVER_AUTH if party == SERVER else ExtendedKeyUsageOID.CLIENT_AUTH
        issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        # certificates are dated in whole seconds, and one of the second of the revocation counts as revoked
        issued = max(datetime.now(UTC), (revoked or datetime.min.replace(tzinfo=UTC)) + timedelta(seconds=1))
        certificate = (
            _builder(_name(party), self._certificate.subject, key.public_key(), expires, issued)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([use]), critical=False)
            .add_extension(x509.SubjectAlternativeName([names]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(issuer_key, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        # a reader between these writes finds a pair that does not fit, and keeps the one before
        write_private(folder / "key.pem", _key_bytes(key))
        write_private(folder / "certificate.pem", certificate.public_bytes(_PEM))
        write_private(folder / "authority.pem", self._certificate.public_bytes(_PEM))
        return expires


def _expiry(days: int) -> datetime:
    return (datetime.now(UTC) + timedelta(days=days)).replace(microsecond=0)


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])  # X.520 allows no more


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, expires: datetime,
    issued: datetime | None = None,
) -> x509.CertificateBuilder:  # fmt: skip
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    begins = (issued or datetime.now(UTC)) - EARLY
    return builder.serial_number(x509.random_serial_number()).not_valid_before(begins).not_valid_after(expires)


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        # TLS 1.3 does nothing but sign with the key of a certificate, so a party's is good for nothing else
        digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _key_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


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
