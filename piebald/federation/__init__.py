"""A real federation: sites in processes of their own, connected to the server by mutual TLS.

    credentials/  certificates, revocation, signatures, the audit log, and the files of a party's folder
    link/         connections, frames, and messages of declared fields, which are never unpickled
    site/         a site: its rows, its policy and consent, its tasks and results
    hub/          the server: its settings, its members, the terms of a run, and the runtime (`contracts.Runtime`)
    operate/      status, page, metrics, logs, the queue of experiments, and checks of machines

Training itself belongs to `piebald.engines` and
`piebald.server`, which a federation uses as a simulation does.
"""

from typing import TYPE_CHECKING

from piebald.core.discovery import lazy_names

if TYPE_CHECKING:
    from piebald.federation.hub.settings import Federation as Federation

# so that a look at a federation's files, as of a health check, does not wait for PyTorch
__getattr__, __dir__ = lazy_names(__name__)
