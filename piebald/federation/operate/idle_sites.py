"""What sites have, as they say while no run listens to them.

A run that needs more than a site had when it was heard last waits in the queue.  So somebody must hear of a site that
was started again with more, also where nothing else is at work.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from piebald.federation.credentials.provisioning import Credentials
from piebald.federation.link.messaging import SERVER, Link, Unwelcome
from piebald.federation.link.wire_messages import PROTOCOL, CheckReply, CheckRequest, Hello, encode
from piebald.version import __version__

log = logging.getLogger("piebald.federation")


class IdleSites:
    """Hears sites, and answers none: what a server says of its run is for the process of a run to say.

    Args:
        server: the server's credentials.
        begun: returns whether a run listens by now.

    Attributes:
        link: takes their connections, as `rest` of another link.
        rows: what each has said last, as in a server's status.
    """

    def __init__(self, server: Credentials, begun: Callable[[], bool]) -> None:
        self.rows, self._begun = dict[str, dict[str, Any]](), begun
        self._waiting = set[str]()  # those that have said hello since they were told why none is answered
        address = "", server.port
        self.link = Link(SERVER, address, server.folder, lambda name: name in server.sites(), log.warning)
        self.link.on("hello", Hello, self._on_hello)
        self.link.on("check", CheckRequest, self._on_check)

    def _on_hello(self, origin: str, hello: Hello, body: memoryview) -> None:
        if self._begun():  # it came when the run began, and would wait here for ever
            raise Unwelcome("a run has begun")
        if origin in self._waiting:
            self._waiting.discard(origin)  # another connection of it may have been told meanwhile
            raise Unwelcome("no experiment is at work")
        self._waiting.add(origin)
        row = {"jobs": hello.jobs, "gpus": hello.gpus, "gigabytes": hello.gigabytes}
        self.rows[origin] = {"site": origin, "heard": time.time(), **row}

    def _on_check(self, origin: str, request: CheckRequest, body: memoryview) -> bytes:
        return encode(CheckReply(protocol=PROTOCOL, version=__version__, time=time.time(), terms=""))
