"""A site in another Python: it speaks what docs/reference/protocol.md says, by that Python's standard library alone."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
from pathlib import Path

import pytest

from piebald.federation.credentials import provisioning
from piebald.federation.hub.server_runtime import FederationServer
from piebald.federation.link.wire_format import PROTOCOL
from piebald.version import __version__
from tests import processes
from tests.security.server_entry import PATIENT, prepared

from .conftest import provisioned, until

MINORS = ("3.10", "3.11", "3.12", "3.13", "3.14")
SITE = """
import hashlib, json, socket, ssl, struct, sys
folder, port, protocol, version = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
made.check_hostname, made.minimum_version = False, ssl.TLSVersion.TLSv1_3
made.load_verify_locations(folder + "/authority.pem")
made.load_cert_chain(folder + "/certificate.pem", folder + "/key.pem")
secured = made.wrap_socket(socket.create_connection(("127.0.0.1", port)))
secured.settimeout(60)

def read(length):
    data = b""
    while len(data) < length:
        piece = secured.recv(length - len(data))
        assert piece, "the connection was ended"
        data += piece
    return data

def ask(number, topic, head):
    text = json.dumps(head).encode()
    rest = struct.pack("<BQB", 1, number, len(topic)) + topic.encode() + struct.pack("<I", len(text)) + text
    secured.sendall(struct.pack("<I", len(rest)) + rest)
    frame = read(struct.unpack("<I", read(4))[0])
    kind, answered, name = struct.unpack_from("<BQB", frame)
    assert (kind, answered, name) == (2, number, 0), frame[:20]
    (length,) = struct.unpack_from("<I", frame, 10)
    return json.loads(frame[14 : 14 + length]), frame[14 + length :]

secured.sendall(b"piebald\\x01")
assert read(8) == b"piebald\\x01"
hello = {"protocol": protocol, "version": version, "incarnation": "ab"}
welcome, _ = ask(1, "hello", hello)
terms = b""
while True:
    piece, data = ask(len(terms) + 2, "terms", {"start": len(terms)})
    terms += data
    if len(terms) == piece["size"]:
        break
assert hashlib.blake2b(terms, digest_size=32).hexdigest() == piece["digest"] == welcome["terms"]
ask(1 << 40, "hello", {**hello, "run": welcome["run"], "ready": welcome["terms"], "rows": 50})
print(json.dumps({"version": welcome["version"], "sites": json.loads(terms)["sites"]}))
"""


def interpreter(minor: str) -> str:
    """A Python of this minor version; skips where there is none."""
    beside = [str(path) for path in Path.home().glob(f".pyenv/versions/{minor}.*/bin/python")]
    for command in (*filter(None, [shutil.which(f"python{minor}")]), *beside):
        if not subprocess.run([command, "-c", "import ssl"], capture_output=True, check=False).returncode:
            return command
    pytest.skip(f"no Python {minor} was found")


@pytest.mark.parametrize("minor", MINORS)
def test_a_site_of_another_python_joins_and_one_of_another_protocol_is_told_so(
    minor: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command, folder = interpreter(minor), provisioned(tmp_path)
    plan, table = prepared(json.dumps({"name": "fedavg"}))
    caplog.set_level(logging.INFO, "piebald.federation")
    server = FederationServer(folder / "server", PATIENT, table, plan.work, plan.clients, None)
    server.shared.started = True
    try:
        port = str(provisioning.read(folder / "server").port)
        for name, protocol in (("site-1", PROTOCOL), ("site-2", PROTOCOL - 1)):
            arguments = [command, "-I", "-c", SITE, str(folder / name), port, str(protocol), "0.0.9"]
            site = processes.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            said, _ = site.communicate(timeout=120)
            assert json.loads(said) == {"version": __version__, "sites": ["site-1", "site-2", "site-3"]}
        until(lambda: "site-1 joined as client 1 of 3" in caplog.text)
        assert f"site-2 does not take part: it has Piebald 0.0.9 with protocol {PROTOCOL - 1}" in caplog.text
        assert [member.refused != "" for member in server.shared.members] == [False, True, False]
    finally:
        server.close()
