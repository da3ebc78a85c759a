"""The HTTP side: contexts, refusals, streams, slow and absent clients, the processes behind."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from interpreter_rig import DEADLINE_S, Interpreter, interpreter

from agentenv.interpreter.limits import CONTEXTS_MAX


def contexts(server: Interpreter) -> list[dict[str, str]]:
    found: list[dict[str, str]] = server.http.get("/contexts").json()
    return found


def test_default_context_is_there_and_listed(server: Interpreter) -> None:
    first = contexts(server)[0]
    assert (first["language"], first["cwd"]) == ("python", str(server.home))
    server.run("shared = 1")
    assert server.value("shared", context_id=first["id"]) == "1"
    assert server.value("shared", language="py") == "1"


def test_context_is_made_listed_last_restarted_and_removed(server: Interpreter) -> None:
    made = server.http.post("/contexts", json={"language": "Python", "cwd": "/"}).json()
    assert (made["language"], made["cwd"]) == ("python", "/")
    assert contexts(server)[-1] == made
    assert server.value("import os; x = 1; os.getcwd()", context_id=made["id"]) == "/"
    restarted = server.http.post(f"/contexts/{made['id']}/restart")
    assert restarted.is_success
    assert server.error("x", context_id=made["id"])["value"] == "name 'x' is not defined"
    assert server.value("import os; os.getcwd()", context_id=made["id"]) == "/"
    assert contexts(server)[-1] == made
    assert server.http.delete(f"/contexts/{made['id']}").is_success
    assert made not in contexts(server)
    for reply in (
        server.http.delete(f"/contexts/{made['id']}"),
        server.http.post(f"/contexts/{made['id']}/restart"),
        server.raw("1", context_id=made["id"]),
    ):
        assert (reply.status_code, reply.text) == (404, f"Context {made['id']} not found")
        assert reply.headers["content-type"].startswith("text/plain")


def test_contexts_do_not_see_each_other(server: Interpreter) -> None:
    made = server.http.post("/contexts", json={}).json()["id"]
    server.run("mine = 1")
    assert server.error("mine", context_id=made)["name"] == "NameError"


def test_default_context_that_was_removed_is_made_again(server: Interpreter) -> None:
    server.run("gone = 1", language="bash")
    bash = next(context["id"] for context in contexts(server) if context["language"] == "bash")
    server.http.delete(f"/contexts/{bash}")
    assert server.output("echo ${gone:-anew}", language="bash") == "anew\n"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "code is missing"),
        (b"{", "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"code": 1}', "code is not a string"),
        (b'{"code": "1", "language": "r"}', "language 'r' is not available in this template; it has python, javascript, typescript, bash"),
        (b'{"code": "1", "language": "java"}', "'java' is not available"),
        (b'{"code": "1", "language": []}', "language is not a string"),
        (b'{"code": "1", "language": "python", "context_id": "x"}', "Only one of context_id or language can be provided"),
        (b'{"code": "1", "env_vars": []}', None),
        (b'{"code": "1", "env_vars": ["a"]}', "env_vars is not an object"),
        (b'{"code": "1", "env_vars": {"a=b": "x"}}', "'a=b' is not a name"),
        (b'{"code": "1", "env_vars": {"A": 1}}', "the value of A"),
        (b'{"code": "1", "env_vars": {"A": "\\u0000"}}', "the value of A"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_what_cannot_work_is_refused_in_plain_text(server: Interpreter, body: bytes, said: str | None) -> None:
    reply = server.http.post("/execute", content=body)
    if said is None:
        assert reply.status_code == 200
        return
    assert reply.status_code == 400
    assert said in reply.text
    assert reply.headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize(("body", "said"), [({"cwd": "/no/such"}, "'/no/such'"), ({"language": "r"}, "'r'"), ({"cwd": 1}, "cwd is not")])
def test_context_that_cannot_be_is_refused(server: Interpreter, body: dict[str, object], said: str) -> None:
    before = contexts(server)
    reply = server.http.post("/contexts", json=body)
    assert reply.status_code == 400
    assert said in reply.text
    assert contexts(server) == before


def test_null_fields_are_absent_ones(server: Interpreter) -> None:
    assert server.value("1", context_id=None, language=None, env_vars=None) == "1"


def test_cors_for_any_page(server: Interpreter) -> None:
    asked = server.http.options("/execute", headers={"Origin": "http://x", "Access-Control-Request-Headers": "x-access-token"})
    assert asked.status_code == 204
    assert asked.headers["access-control-allow-headers"] == "x-access-token"
    assert server.http.get("/health").headers["access-control-allow-origin"] == "*"


def test_lines_come_as_they_are_written_and_silence_is_kept_alive(server: Interpreter) -> None:
    release = server.home / "release"
    code = f"import os, time\nprint('first')\nwhile not os.path.exists({str(release)!r}): time.sleep(0.05)\nprint('second')"
    seen = []
    with server.http.stream("POST", "/execute", json={"code": code}) as reply:
        for line in reply.iter_lines():
            seen.append(json.loads(line))
            if seen[-1]["type"] == "keepalive":
                release.touch()
    kinds = [line.get("text", line["type"]) for line in seen]
    assert kinds.index("first\n") < kinds.index("keepalive") < kinds.index("second\n")


def test_cells_of_one_context_wait_their_turn(server: Interpreter) -> None:
    server.run("order = []")
    release = server.home / "release-turn"
    first = f"import os, time\nwhile not os.path.exists({str(release)!r}): time.sleep(0.02)\norder.append(1)"
    threads = [threading.Thread(target=server.run, args=(code,)) for code in (first, "order.append(2)")]
    for thread in threads:
        thread.start()
        time.sleep(0.3)
    assert server.output("echo on", language="bash") == "on\n"  # another context is not held up
    release.touch()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert server.value("order") == "[1, 2]"


def test_restart_ends_a_cell_that_runs(server: Interpreter) -> None:
    made = server.http.post("/contexts", json={}).json()["id"]
    seen: list[list[dict[str, object]]] = []
    thread = threading.Thread(target=lambda: seen.append(server.run("print('on')\nwhile True: pass", context_id=made)))
    thread.start()
    time.sleep(0.5)
    assert server.http.post(f"/contexts/{made}/restart").is_success
    thread.join(DEADLINE_S)
    assert seen[0][-1]["name"] == "ContextRestarting"
    assert server.value("1", context_id=made) == "1"


def test_slow_client_holds_the_cell_and_no_memory_grows(server: Interpreter) -> None:
    def resident_mb() -> int:
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) >> 10

    before = resident_mb()
    progress = server.home / "progress"
    code = f"for i in range(100): print('x' * 1_000_000)\nopen({str(progress)!r}, 'w').close()"
    with server.http.stream("POST", "/execute", json={"code": code}) as reply:
        lines = reply.iter_lines()
        next(lines)
        time.sleep(3)
        assert not progress.exists()
        assert resident_mb() < before + 40
        size = sum(len(json.loads(line).get("text", "")) for line in lines)
    assert size == 100 * 1_000_001
    assert progress.exists()


def test_contexts_are_limited() -> None:
    with interpreter() as server:
        made = [server.http.post("/contexts", json={"language": "bash"}) for _ in range(CONTEXTS_MAX - len(contexts(server)))]
        assert all(reply.is_success for reply in made)
        refused = server.http.post("/contexts", json={"language": "bash"})
        assert refused.status_code == 400
        assert str(CONTEXTS_MAX) in refused.text
        server.http.delete(f"/contexts/{made[0].json()['id']}")
        assert server.http.post("/contexts", json={"language": "bash"}).is_success


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(entry.joinpath("stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, ValueError):
            continue
        if parent == pid:
            found |= {int(entry.name)} | descendants(int(entry.name))
    return found


@pytest.mark.parametrize("victim", ["server", "spawner"])
def test_all_processes_end_together(victim: str) -> None:
    with interpreter() as server:
        server.run("true", language="bash")
        family = descendants(server.process.pid)
        assert len(family) >= 3
        (spawner,) = [
            pid for pid in family if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1] == str(server.process.pid)
        ]
        os.kill(server.process.pid if victim == "server" else spawner, signal.SIGKILL)
        assert server.process.wait(DEADLINE_S) != 0
        end = time.monotonic() + DEADLINE_S
        while any(Path(f"/proc/{pid}").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text() for pid in family):
            assert time.monotonic() < end
            time.sleep(0.05)
