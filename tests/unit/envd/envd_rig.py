"""The real agent as an ordinary process on loopback, in its own mount and host name space with accounts of its own.

Raw HTTP on purpose: these tests look at bytes and order, which a client library would hide.
"""

import base64
import http.client
import json
import os
import re
import shutil
import struct
import subprocess
import threading
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
USER_ID = 4711
APP_ID = 12345
READY_DEADLINE_S = 20

# Everything the agent may write lies in memory of this space: /etc, /run and the home of the test user.
SPACE = """
set -e
mount -t tmpfs tmpfs /run
etc=/run/etc
mkdir "$etc"
cp -a /etc/. "$etc"/ 2>/dev/null || true
printf 'user:x:{user}:{user}::/home/user:/bin/bash\\napp:x:{app}:100::/srv/app:/bin/sh\\n' >> "$etc"/passwd
printf 'user:x:{user}:\\nextra:x:4712:user,app\\nvideo2:x:4713:app\\n' >> "$etc"/group
mount --bind "$etc" /etc
mount -t tmpfs tmpfs /home
mount -t tmpfs tmpfs /srv
mount -t tmpfs -o mode=700 tmpfs /root
mkdir -p /home/user /srv/app
chown {user}:{user} /home/user
chown {app}:100 /srv/app
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
exec "$@"
"""


def find_binary():
    """The newest build, or None."""
    target = REPOSITORY / "native" / "target"
    builds = [target / "x86_64-unknown-linux-gnu" / "release" / "envd", target / "release" / "envd", target / "debug" / "envd"]
    built = [path for path in builds if path.is_file()]
    return max(built, key=lambda path: path.stat().st_mtime, default=None)


def can_make_spaces():
    return os.geteuid() == 0 and subprocess.run(["unshare", "--mount", "--uts", "true"], capture_output=True, check=False).returncode == 0


def frame(message):
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    return struct.pack(">BI", 0, len(body)) + body


def basic(user):
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:".encode()).decode()}


class Envd:
    """One running agent."""

    def __init__(self, binary, *options, default_user="user"):
        script = SPACE.format(user=USER_ID, app=APP_ID)
        command = ["unshare", "--mount", "--uts", "bash", "-c", script, "envd", str(binary), "--no-init", "--port", "0", *options]
        self.child = subprocess.Popen([*command, "--default-user", default_user], stderr=subprocess.PIPE, text=True)
        self.port = None
        self.log = []
        threading.Thread(target=self._read_log, daemon=True).start()
        deadline = time.monotonic() + READY_DEADLINE_S
        while self.port is None:
            assert self.child.poll() is None, f"the agent ended with {self.child.returncode}: {self.log}"
            assert time.monotonic() < deadline, f"the agent did not start: {self.log}"
            time.sleep(0.01)

    def _read_log(self):
        for line in self.child.stderr:
            self.log.append(line)
            if found := re.search(r"serving 127\.0\.0\.1:(\d+)", line):
                self.port = int(found[1])

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def stop(self):
        self.child.terminate()
        try:
            assert self.child.wait(10) == 0
        except subprocess.TimeoutExpired:
            self.child.kill()
            raise

    def rss_bytes(self):
        text = Path(f"/proc/{self.child.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) * 1024

    def path(self, path):
        """A path of the agent's mount space, seen from outside."""
        return Path(f"/proc/{self.child.pid}/root") / path.lstrip("/")

    def request(self, method, path, body=None, headers=None, timeout_s=60):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request(method, path, body, headers or {})
            reply = connection.getresponse()
            return reply.status, dict((name.lower(), value) for name, value in reply.getheaders()), reply.read()
        finally:
            connection.close()

    def init(self, **settings):
        status, headers, body = self.request("POST", "/init", json.dumps(settings))
        assert status == 204, body
        return headers

    def call(self, method, message=None, user=None, headers=None, timeout_s=60):
        """A unary call: status and decoded answer."""
        headers = {"Content-Type": "application/json", **(basic(user) if user else {}), **(headers or {})}
        status, _, body = self.request("POST", f"/{method}", json.dumps(message or {}), headers, timeout_s)
        return status, json.loads(body)

    def open(self, method, message, user=None, headers=None, timeout_s=60):
        return Stream(self.port, method, message, {**(basic(user) if user else {}), **(headers or {})}, timeout_s)

    def start(self, cmd, *args, user=None, headers=None, timeout_s=60, **more):
        """A started process. `stdin` is off unless asked for, as the clients do it."""
        options = {name: more.pop(name) for name in ("pty", "tag") if name in more}
        if "pty" not in options:
            options["stdin"] = more.pop("stdin", False)
        process = {"cmd": cmd, "args": list(args), **more}
        return self.open("process.Process/Start", {"process": process, **options}, user, headers, timeout_s)

    def shell(self, text, **more):
        return self.start("/bin/bash", "-c", text, **more)

    def run(self, text, **more):
        return self.shell(text, **more).result()

    def pids(self):
        return {process["pid"] for process in self.call("process.Process/List")[1]["processes"]}

    def wait_gone(self, pid, limit_s=5):
        deadline = time.monotonic() + limit_s
        while pid in self.pids():
            assert time.monotonic() < deadline, f"{pid} is still listed"
            time.sleep(0.01)


class Stream:
    """The events of one process."""

    def __init__(self, port, method, message, headers, timeout_s):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
        self.connection.request("POST", f"/{method}", frame(message), {"Content-Type": "application/connect+json", **headers})
        self.reply = self.connection.getresponse()
        self.end_frame = None
        self.events = []

    def message(self):
        """The next message, or None after the end frame."""
        head = self._read(5)
        flags, length = struct.unpack(">BI", head)
        message = json.loads(self._read(length))
        if flags & 2:
            self.end_frame = message
            assert self.reply.read() == b"", "bytes after the end frame"
            self.connection.close()
            return None
        return message

    def next(self):
        """The next event, or None after the end frame."""
        message = self.message()
        if message is None:
            return None
        self.events.append(message["event"])
        return message["event"]

    def _read(self, length):
        data = b""
        while len(data) < length:
            piece = self.reply.read(length - len(data))
            assert piece, f"stream cut after {self.events[-3:]}"
            data += piece
        return data

    def pid(self):
        event = self.next()
        assert event is not None, self.end_frame
        return event["start"]["pid"]

    def result(self):
        while self.next() is not None:
            pass
        return Result(self)

    def error(self):
        self.result()
        return self.end_frame["error"]

    def close(self):
        self.connection.close()


class Result:
    """All a process said."""

    def __init__(self, stream):
        self.events = stream.events
        self.error = stream.end_frame.get("error")
        self.kinds = [next(iter(event)) for event in self.events]
        self.end = next((event["end"] for event in self.events if "end" in event), None)
        self.stdout, self.stderr, self.pty = (self._join(name) for name in ("stdout", "stderr", "pty"))

    def _join(self, name):
        return b"".join(base64.b64decode(event["data"][name]) for event in self.events if name in event.get("data", {}))

    @property
    def code(self):
        return self.end.get("exitCode", 0)


def multipart(*parts, boundary="edge"):
    """A body of (disposition, bytes) parts, and its headers."""
    body = b"".join(
        b"--" + boundary.encode() + b"\r\nContent-Disposition: form-data; " + disposition.encode() + b"\r\n\r\n" + data + b"\r\n"
        for disposition, data in parts
    )
    return body + b"--" + boundary.encode() + b"--\r\n", {"Content-Type": f"multipart/form-data; boundary={boundary}"}


def have(program):
    return shutil.which(program) is not None
