"""Guests reach the outside through NAT only: never the host's own services, private ranges or each other."""

from __future__ import annotations

import socket
import subprocess
import threading

import pytest
from e2b import Sandbox

CONNECT = (
    'python3 -c "import socket,sys; s=socket.socket(); s.settimeout(3);'
    " r=s.connect_ex((sys.argv[1], int(sys.argv[2]))); print('open' if r == 0 else 'closed')\" {host} {port}"
)


@pytest.fixture
def host_service():
    """A service of the host that listens on every address."""
    accepted: list[str] = []
    listener = socket.create_server(("0.0.0.0", 0))

    def serve() -> None:
        while True:
            try:
                connection, peer = listener.accept()
            except OSError:
                return
            accepted.append(peer[0])
            connection.close()

    threading.Thread(target=serve, daemon=True).start()
    yield listener.getsockname()[1], accepted
    listener.close()


def host_addresses() -> list[str]:
    lines = subprocess.run(["ip", "-4", "-o", "addr"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split()[3].split("/")[0] for line in lines]


def test_host_services_are_out_of_reach(node, sandbox, host_service):
    port, accepted = host_service
    for address in host_addresses():
        if address.startswith("127."):
            continue
        assert sandbox.commands.run(CONNECT.format(host=address, port=port), timeout=30).stdout == "closed\n", address
    assert accepted == []


def test_private_ranges_and_other_sandboxes_are_out_of_reach(node, sandbox):
    other = Sandbox.create("base", timeout=600, **node.options)
    try:
        other.commands.run("exec python3 -m http.server 9000 --bind 0.0.0.0", background=True, timeout=0)
        for address in (
            "10.117.0.0",
            "10.117.0.1",
            "10.117.0.2",
            "10.117.0.4",
            "192.168.1.1",
            "172.16.0.1",
            "169.254.169.254",
            "169.254.0.22",
        ):
            assert sandbox.commands.run(CONNECT.format(host=address, port=9000), timeout=30).stdout == "closed\n", address
    finally:
        other.kill()


def test_the_outside_is_reached_through_nat(node, sandbox):
    """A stand-in for the internet: a public address that lives in a namespace of our own behind the host."""
    public = "203.0.113.10"
    name = "aenv-test-outside"
    commands = [
        f"ip netns add {name}",
        f"ip link add aenvtout type veth peer name out0 netns {name}",
        "ip addr add 203.0.113.9/30 dev aenvtout",
        "ip link set aenvtout up",
        f"ip -n {name} addr add {public}/30 dev out0",
        f"ip -n {name} link set out0 up",
        f"ip -n {name} link set lo up",
    ]
    server = None
    try:
        for command in commands:
            subprocess.run(command.split(), check=True)
        script = f"""
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.client_address[0].encode())
http.server.HTTPServer(("{public}", 8080), Handler).serve_forever()
"""
        server = subprocess.Popen(["ip", "netns", "exec", name, "python3", "-c", script], stderr=subprocess.DEVNULL)
        seen = sandbox.commands.run(
            f"curl -s --retry 20 --retry-connrefused --retry-delay 1 --max-time 30 http://{public}:8080/", timeout=60
        ).stdout
        assert seen == "203.0.113.9", "the guest's traffic was not masqueraded as the host's"
        connect = CONNECT.format(host=public, port=8080)
        for settings, expected in (
            ({"deny_out": ["203.0.113.0/24"]}, "closed\n"),
            ({"deny_out": ["0.0.0.0/0"], "allow_out": [public]}, "open\n"),
            ({"allow_internet_access": False}, "closed\n"),
            ({}, "open\n"),
        ):
            sandbox.update_network(settings)
            assert sandbox.commands.run(connect, timeout=30).stdout == expected, f"under {settings}"
        offline = Sandbox.create("base", timeout=600, allow_internet_access=False, **node.options)
        try:
            assert offline.commands.run(connect, timeout=30).stdout == "closed\n"
        finally:
            offline.kill()
    finally:
        if server is not None:
            server.kill()
            server.wait()
        subprocess.run(["ip", "link", "del", "aenvtout"], check=False)
        subprocess.run(["ip", "netns", "del", name], check=False)
