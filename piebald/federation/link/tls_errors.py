"""What a handshake that failed means for whoever runs this end, in words."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime

_NOT_YET, _EXPIRED = 9, 10  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL
_ALERTS = {
    "CERTIFICATE_EXPIRED": "this end's certificate has expired: ask for new credentials, or set both clocks",
    "UNKNOWN_CA": "this end's certificate is of another federation: compare the credentials of both",
    "BAD_CERTIFICATE": "this end's certificate is not valid there: compare the credentials and the clocks of both",
    "CERTIFICATE_UNKNOWN": "this end's certificate is not accepted there: compare the credentials of both",
}


def refusal(who: str, error: ssl.SSLError) -> str:
    """The sentence about a handshake that failed.

    Args:
        who: the other end.
        error: how it failed.
    """
    if any((error.reason or "").endswith(f"ALERT_{alert}") for alert in _ALERTS):
        return f"{who} does not accept this end: {reason(error)}"
    return f"{who} did not prove that it belongs to this federation: {reason(error)}"


def reason(error: ssl.SSLError) -> str:
    """Why the other end did not prove that it belongs to the federation, or does not let this one in."""
    here = f"this machine's clock says {datetime.now(UTC):%Y-%m-%d}"
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code == _EXPIRED:
            return f"its certificate has expired ({here})"
        if error.verify_code == _NOT_YET:
            return f"its certificate is not valid yet ({here}): set both clocks"
        return error.verify_message
    if isinstance(error, ssl.SSLEOFError):
        return "the connection broke off"
    name = error.reason or ""
    for alert, told in _ALERTS.items():
        if name.endswith(f"ALERT_{alert}"):
            return told
    return name or "the connection broke off"
