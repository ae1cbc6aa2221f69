"""A real federation: sites in processes of their own, connected to the server by mutual TLS (extra `federation`).

    federation_settings  settings of the runtime
    provisioning         credentials: one folder for each party, with certificate, key and settings
    audit                the log of who joined and what left, as a chain of digests
    certificates         the federation's certificate authority
    expiry               warnings before a certificate expires
    revocation           sites that the server admits no more
    tls                  connections with certificates of the federation's authority on both ends
    flare_link           messages over NVIDIA FLARE's cells, filtered by sender, receiver, topic and length
    messages             message types: declared fields, checked, never unpickled
    wire_format          serialization of tasks and updates
    transfer             sending of long bodies in pieces
    signing              signatures of sites on the keys of secure aggregation
    run_terms            terms of a run, from which a site rebuilds its work
    policy               what a site allows
    consent              an experiment that waits for a person at the site
    task_runner          tasks at a site: training and queries
    client_store         a site's files: client state, and results until the server has saved them
    client_session       a site's part in a run: tasks it has, results to deliver
    client_runtime       a site: its threads and its messages
    deliveries           delivery of a site's results
    client_log           what a site writes into its log about its work
    timeouts             how long the server waits
    member_list          sites as the server knows them
    server_state         the server's tasks and results
    server_messages      messages of the server
    server_runtime       the runtime: `contracts.Runtime`
    local_federation     a federation on one machine
    waiting              what the server and a site wait for, in words
    heartbeat            writes that into the log whenever nothing else was written for a while
    presence             signs of life of a site whose own thread is busy for long
    frame_queue          frames that have come, and the memory that they take

Nothing here imports NVIDIA FLARE before a connection is made.
"""

from piebald.federation.hub.settings import Federation

__all__ = ["Federation"]
