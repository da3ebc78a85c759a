"""The routes of template builds, as callers and as the official SDK use them."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import pytest
from e2b import Template
from e2b.exceptions import BuildException
from test_api_errors import assert_contract_error

from agentenv.core.model import Context
from agentenv.testing.fake_orchestrator import FakeOrchestrator

HASH = "c" * 64


async def request(client: httpx.AsyncClient, name: str = "mine", **body: object) -> dict:
    response = await client.post("/v3/templates", json={"name": name, **body})
    assert response.status_code == 202, response.text
    return response.json()


async def start(client: httpx.AsyncClient, job: dict, status: int = 202, **body: object) -> httpx.Response:
    plan = {"fromTemplate": "base", "force": False, "steps": []} | body
    response = await client.post(f"/v2/templates/{job['templateID']}/builds/{job['buildID']}", json=plan)
    assert response.status_code == status, response.text
    return response


async def ended(client: httpx.AsyncClient, job: dict) -> dict:
    while True:
        response = await client.get(f"/templates/{job['templateID']}/builds/{job['buildID']}/status")
        assert response.status_code == 200
        if response.json()["status"] in ("ready", "error"):
            return response.json()
        await asyncio.sleep(0.005)


async def test_a_request_is_answered_in_the_contracts_words(client: httpx.AsyncClient):
    job = await request(client, "Mine:v1", tags=["stable"], cpuCount=2, memoryMB=1024, minFreeDiskMb=100)
    assert re.fullmatch("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", job["buildID"])
    assert {key: value for key, value in job.items() if key not in ("templateID", "buildID")} == {
        "public": False,
        "names": ["local/mine"],
        "tags": ["v1", "stable"],
        "aliases": ["mine"],
    }
    again = await request(client, "mine", alias="ignored")
    assert again["templateID"] == job["templateID"]
    assert (await request(client, None, alias="other"))["aliases"] == ["other"]


async def test_the_older_request(client: httpx.AsyncClient):
    response = await client.post("/v2/templates", json={"alias": "mine", "cpuCount": 2, "memoryMB": 1024, "teamID": "x"})
    assert response.status_code == 202
    body = response.json()
    assert (body["aliases"], body["cpuCount"], body["memoryMB"], body["buildStatus"]) == (["mine"], 2, 1024, "waiting")
    await start(client, body)
    assert (await ended(client, body))["status"] == "ready"


@pytest.mark.parametrize(
    "body", [{}, {"name": ""}, {"name": 5}, {"name": "a b"}, {"name": "x", "tags": "v1"}, {"name": "x", "cpuCount": "2"}]
)
async def test_requests_that_are_refused(client: httpx.AsyncClient, body: dict):
    assert_contract_error(await client.post("/v3/templates", json=body), 400, "invalid_input")


async def test_from_request_to_ready(client: httpx.AsyncClient, orchestrator: FakeOrchestrator):
    orchestrator.workshop.answers_to = lambda command: (0, "said")
    job = await request(client)
    waiting = (await client.get(f"/templates/{job['templateID']}/builds/{job['buildID']}/status")).json()
    assert waiting == {"templateID": job["templateID"], "buildID": job["buildID"], "status": "waiting", "logs": [], "logEntries": []}
    assert (await client.get("/templates/aliases/mine")).status_code == 404
    with orchestrator.workshop.hold("make") as reached:
        reply = await start(client, job, steps=[{"type": "RUN", "args": ["make"], "force": None, "filesHash": None}])
        assert reply.content == b""
        await reached.wait()
        going_on = (await client.get(f"/templates/mine/builds/{job['buildID']}/status")).json()
        assert (going_on["status"], "reason" in going_on) == ("building", False)
    done = await ended(client, job)
    assert done["status"] == "ready"
    entries = done["logEntries"]
    assert {tuple(sorted(entry)) for entry in entries} == {("level", "message", "step", "timestamp"), ("level", "message", "timestamp")}
    assert [entry["message"] for entry in entries if entry.get("step") == "1"] == ["[1/1] RUN make", "[stdout] said"]
    url = f"/templates/{job['templateID']}/builds/{job['buildID']}/status"
    assert (await client.get(url, params={"logsOffset": 2, "limit": 1})).json()["logEntries"] == entries[2:3]
    assert (await client.get(url, params={"logsOffset": len(entries)})).json()["logEntries"] == []
    assert (await client.get(url, params={"level": "error"})).json()["logEntries"] == []
    found = (await client.get("/templates/aliases/mine")).json()
    assert found["templateID"] == job["templateID"]
    assert (await client.get("/templates/mine")).json()["builds"][0]["buildID"] == job["buildID"]


async def test_a_failure_says_why_and_where(client: httpx.AsyncClient, orchestrator: FakeOrchestrator):
    orchestrator.workshop.answers_to = lambda command: (2, "no rule") if command == "make" else (0, "")
    job = await request(client)
    await start(client, job, steps=[{"type": "ENV", "args": ["A", "1"]}, {"type": "RUN", "args": ["make", "root"]}])
    reason = (await ended(client, job))["reason"]
    assert reason == {"message": "failed to run command 'make': exit status 2\nno rule", "step": "2", "logEntries": []}


async def test_logs_from_a_time_on_or_back_from_it(client: httpx.AsyncClient):
    job = await request(client)
    await start(client, job, steps=[{"type": "RUN", "args": [str(n)]} for n in range(5)])
    entries = (await ended(client, job))["logEntries"]
    url = f"/templates/{job['templateID']}/builds/{job['buildID']}/logs"
    assert (await client.get(url)).json() == {"logs": entries}
    assert (await client.get(url, params={"direction": "backward", "limit": 2})).json()["logs"] == entries[:-3:-1]
    assert (await client.get(url, params={"cursor": 1, "direction": "backward"})).json()["logs"] == []
    assert (await client.get(url, params={"cursor": 2**52})).json()["logs"] == []
    assert (await client.get(url, params={"level": "warn", "source": "persistent"})).json()["logs"] == []
    for wrong in ({"direction": "up"}, {"limit": 101}, {"cursor": -1}, {"level": "loud"}):
        assert_contract_error(await client.get(url, params=wrong), 400, "invalid_input")


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, {"fromTemplate": ""}),
        (400, {"fromImage": "x"}),
        (404, {"fromTemplate": "nothing"}),
        (400, {"steps": [{"type": "ADD", "args": ["x"]}]}),
        (400, {"steps": [{"args": ["x"]}]}),
        (400, {"steps": [{"type": "RUN", "args": [1]}]}),
        (400, {"fromTemplate": "", "fromImage": "x", "fromImageRegistry": {"type": "registry", "username": "u"}}),
        (400, {"fromTemplate": "", "fromImage": "x", "fromImageRegistry": {"type": "unheard"}}),
    ],
)
async def test_starts_that_are_refused(client: httpx.AsyncClient, status: int, body: dict):
    job = await request(client)
    await start(client, job, status, **body)
    await start(client, job)
    await start(client, job, 409)
    await ended(client, job)


async def test_registry_credentials_reach_the_image_and_no_log(client: httpx.AsyncClient, orchestrator: FakeOrchestrator):
    job = await request(client)
    registry = {"type": "registry", "username": "u", "password": "very secret"}
    await start(client, job, fromTemplate=None, fromImage="private/x", fromImageRegistry=registry)
    done = await ended(client, job)
    ((reference, given),) = orchestrator.images.asked
    assert (reference, given.kind, given.settings) == ("private/x", "registry", {"username": "u", "password": "very secret"})
    assert "very secret" not in repr(given) + str(done)


@pytest.mark.parametrize("path", ["/templates/nothing/builds/x/status", "/templates/nothing/builds/x/logs"])
async def test_builds_nobody_knows(client: httpx.AsyncClient, path: str):
    assert_contract_error(await client.get(path), 404, "not_found")
    job = await request(client)
    assert_contract_error(await client.get(f"/templates/other/builds/{job['buildID']}/status"), 404, "not_found")


async def test_files_are_uploaded_once(client: httpx.AsyncClient, stranger: httpx.AsyncClient):
    job = await request(client)
    url = f"/templates/{job['templateID']}/files/{HASH}"
    asked = await client.get(url)
    assert (asked.status_code, asked.json()["present"]) == (201, False)
    assert asked.json()["url"].startswith("http://api.test/template-files/")
    assert (await stranger.put(asked.json()["url"], content=b"archive")).status_code == 200
    again = (await client.get(url)).json()
    assert again["present"] is True
    assert (await stranger.put(again["url"], content=b"forced anew")).status_code == 200


async def test_the_uploads_url_is_where_the_caller_reaches_the_node(client: httpx.AsyncClient):
    headers = {"Host": "api.sbx.test:8443", "X-Forwarded-Proto": "https"}
    asked = await client.get(f"/templates/mine/files/{HASH}", headers=headers)
    assert asked.json()["url"].startswith(f"https://api.sbx.test:8443/template-files/{HASH}?ticket=")


@pytest.mark.parametrize("ticket", ["0" * 64, "x", "ä", "", None])
async def test_uploads_need_a_ticket(stranger: httpx.AsyncClient, ticket: str | None):
    params = {} if ticket is None else {"ticket": ticket}
    reply = await stranger.put(f"/template-files/{HASH}", params=params, content=b"x")
    assert_contract_error(reply, 403, "permission_denied")


@pytest.mark.parametrize("name", ["..%2F..%2Fetc", "a%20b", "x" * 129])
async def test_hashes_that_are_none(client: httpx.AsyncClient, name: str):
    assert_contract_error(await client.get(f"/templates/mine/files/{name}"), 400, "invalid_input")


async def test_deleting_a_template_ends_its_builds(client: httpx.AsyncClient, orchestrator: FakeOrchestrator):
    job = await request(client)
    with orchestrator.workshop.hold("slow") as reached:
        await start(client, job, steps=[{"type": "RUN", "args": ["slow"]}])
        await reached.wait()
        assert (await client.delete(f"/templates/{job['templateID']}")).status_code == 204
    done = await ended(client, job)
    assert (done["status"], "deleted" in done["reason"]["message"]) == ("error", True)
    assert (await client.delete(f"/templates/{job['templateID']}")).status_code == 404


def sdk(port: int, key: str) -> dict[str, str]:
    return {"api_key": key, "api_url": f"http://127.0.0.1:{port}"}


def test_the_official_client_builds(live_port: int, live_orchestrator: FakeOrchestrator, key: str, tmp_path: Path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "a.txt").write_text("A")
    live_orchestrator.workshop.answers_to = lambda command: (0, "\n".join(map(str, range(250))) if command == "talk" else "")
    template = (
        Template(file_context_path=str(tmp_path))
        .from_template("base")
        .copy("app", "/srv/app", user="root", mode=0o755)
        .set_envs({"A": "1"})
        .set_workdir("/srv")
        .run_cmd("talk")
    )
    lines: list[str] = []
    info = Template.build(
        template, "sdk:v1", tags=["stable"], on_build_logs=lambda entry: lines.append(entry.message), **sdk(live_port, key)
    )
    assert (info.name, info.tags) == ("sdk:v1", ["v1", "stable"])
    assert "Uploaded 'app'" in lines
    assert [line for line in lines if line.startswith("[stdout]")] == [f"[stdout] {n}" for n in range(250)]
    assert [Template.exists(name, **sdk(live_port, key)) for name in ("sdk", "sdk:v1", "sdk:v9", "nothing")] == [True, True, False, False]
    assert {tag.tag for tag in Template.get_tags(info.template_id, **sdk(live_port, key))} == {"v1", "stable"}
    again: list[str] = []
    Template.build(template, "sdk:v2", on_build_logs=lambda entry: again.append(entry.message), **sdk(live_port, key))
    assert "Skipping upload of 'app', already cached" in again
    assert len([line for line in again if "CACHED" in line]) == 4


def test_the_official_client_points_at_the_failing_line(live_port: int, live_orchestrator: FakeOrchestrator, key: str):
    live_orchestrator.workshop.answers_to = lambda command: (1, "") if command == "false" else (0, "")
    template = Template().from_template("base").run_cmd("true")
    template = template.run_cmd("false")  # this line
    with pytest.raises(BuildException, match="failed to run command 'false': exit status 1") as failure:
        Template.build(template, "sdk", **sdk(live_port, key))
    lines = Path(__file__).read_text().splitlines()
    assert any("# this line" in lines[entry.lineno] for entry in failure.traceback if entry.path.name == Path(__file__).name)


def test_the_official_client_builds_in_the_background(live_port: int, live_orchestrator: FakeOrchestrator, key: str):
    with live_orchestrator.workshop.hold("slow"):
        info = Template.build_in_background(Template().from_template("base").run_cmd("slow"), "sdk", **sdk(live_port, key))
        status = Template.get_build_status(info, **sdk(live_port, key))
        assert (status.status.value, status.build_id, status.reason) == ("building", info.build_id, None)


SECRET = "c2VjcmV0LW9mLW1pbmU="


@pytest.mark.parametrize(
    "dockerfile",
    [
        {"secrets": {"a/b": SECRET}},
        {"secrets": {"a": [SECRET]}},
        {"secrets": {"a": f"!{SECRET}"}},
        {"registries": {"r.test": {"type": "registry", "username": SECRET}}},
        {"registries": {"r.test": {"type": "what", "password": SECRET}}},
        {"registries": {"r.test": SECRET}},
    ],
)
async def test_a_refusal_never_shows_a_secret(client: httpx.AsyncClient, dockerfile: dict):
    reply = await start(client, await request(client), 400, dockerfile={"text": "FROM scratch", **dockerfile})
    assert SECRET not in reply.text
    assert SECRET not in repr(reply.json())


async def test_secrets_and_accounts_of_a_dockerfile(client: httpx.AsyncClient, orchestrator: FakeOrchestrator):
    orchestrator.images.contexts["r.test/a"] = Context()
    account = {"type": "registry", "username": "me", "password": "pass"}
    text = "FROM r.test/a\nRUN --mount=type=secret,id=x,env=X show\n"
    job = await request(client)
    await start(
        client, job, fromTemplate="", dockerfile={"text": text, "secrets": {"x": SECRET}, "registries": {"https://r.test/v2/": account}}
    )
    assert (await ended(client, job))["status"] == "ready"
