"""Long bodies in pieces: sending them, and fetching the terms of a run."""

from __future__ import annotations

from collections.abc import Callable

from piebald.runtimes.federation.flare_link import Link
from piebald.runtimes.federation.messages import Piece, Refused, Reply, TermsRequest, decode
from piebald.runtimes.federation.wire_format import Assembly, digest, piece_at

TERMS = 16 << 20  # bytes of a run's terms, at most
_RESTARTS = 3  # times that a body is sent from its first byte, at most


def send_body(
    link: Link,
    target: str,
    topic: str,
    head: Piece,
    body: bytes,
    *,
    timeout: float,
    wanted: Callable[[], bool] = lambda: True,
) -> str | None:
    """Send a body piece by piece.

    Args:
        link: the connection.
        target: name of the receiver.
        topic: topic of the messages.
        head: the head of the first piece.
        body: the whole body.
        timeout: seconds to wait for each reply.
        wanted: asked before each piece, whether to go on.

    Returns:
        The status of the receiver's last reply ("done", "known", "not wanted" or "refused"), None where the body was
        not received.
    """
    start = restarts = 0
    while restarts < _RESTARTS and wanted():
        data = piece_at(body, start)
        if not data:
            return None  # all of it was sent, and the receiver asks for more
        answer = link.request(target, topic, head.model_copy(update={"start": start}), data, timeout=timeout)
        if answer is None:
            return None
        try:
            status = decode(Reply, answer)[0].status
        except Refused as error:
            link.report(f"{target} answered with {error}")
            return None
        if status == "go on":
            start += len(data)
        elif status == "again":
            start, restarts = 0, restarts + 1
        else:
            return status
    return None


def fetch_terms(
    link: Link, server: str, known_by: str, *, timeout: float, wanted: Callable[[], bool] = lambda: True
) -> bytearray | None:
    """Fetch the terms of a run.

    Args:
        link: the connection.
        server: name of the server.
        known_by: digest of the terms.
        timeout: seconds to wait for each reply.
        wanted: asked before each piece, whether to go on.

    Returns:
        The terms, None where they did not come, or are others than those of the digest.
    """
    assembly, start = Assembly(), 0
    while wanted():
        answer = link.request(server, "terms", TermsRequest(start=start), timeout=timeout)
        if answer is None:
            return None
        try:
            piece, data = decode(Piece, answer)
            _, body = assembly.take(piece, data, TERMS)
        except Refused as error:
            link.report(f"the server sent {error}")
            return None
        if body is not None:
            return body if digest(body) == known_by else None
        start += len(data)
        if not data:
            return None
    return None
