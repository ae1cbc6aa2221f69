"""A real federation: sites in processes of their own, mutual TLS between them and the server (extra `federation`).

    credentials         one folder a site: its certificate, its key, its settings
    tls          connections: both ends show a certificate of the federation's own authority
    cell         messages over NVIDIA FLARE's cells, guarded: who may say what to whom, and how long it may be
    messages     what is said: declared fields, checked, never unpickled
    parcels      tasks and updates as bytes
    store        a site's own disk: what it remembers, and finished work until the server has it safe
    policy        what a site agrees to at the most
    site         one client: takes work, trains, answers, delivers
    coordinator  the server's end of the seam: `contracts.Runtime`
    local        a whole federation on one machine, to try it

Nothing here imports NVIDIA FLARE before a connection is made.
"""

from piebald.runtimes.federation.federation_settings import Federation

__all__ = ["Federation"]
