"""`aenv template build` and what belongs to it: what is sent, what is shown, how it ends, and that leaving ends nothing."""

import base64
import json
import os
import signal
import subprocess
import sys

import pytest
from aenv_runner import Screen, process_environment, wait_for

from agentenv.core.images import ImageConfig
from agentenv.core.model import Context


@pytest.fixture
def workshop(server):
    orchestrator = server.orchestrator
    orchestrator.images.contexts["debian"] = Context("user", "/home/user")
    orchestrator.images.configs["debian"] = ImageConfig(cmd=("bash",))
    return orchestrator.workshop


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "My Project"
    (folder / "app").mkdir(parents=True)
    (folder / "app" / "main.py").write_text("print(1)\n")
    (folder / "app" / "junk.log").write_text("x" * 100_000)
    (folder / ".dockerignore").write_text("*.log\n**/*.log\n")
    (folder / "Dockerfile").write_text("FROM debian\nARG WHO=me\nCOPY app /srv/app\nRUN make $WHO\n")
    return folder


def template(server, name):
    return next((one for one in server.orchestrator._book.templates() if name in one.aliases), None)


def test_a_folder_becomes_a_template(aenv, server, workshop, project):
    workshop.answers_to = lambda command: (0, "built it") if command.startswith("make") else (0, "")
    done = aenv("template", "build", str(project))
    assert (done.exit_code, done.stdout) == (0, "local/my-project\n"), done.stderr
    assert template(server, "my-project").kind == "built"
    lines = done.stderr.splitlines()
    assert "#1 [stage-0 1/2] COPY app /srv/app" in lines
    assert "#2 [stage-0 2/2] RUN make $WHO" in lines
    assert "#2 built it" in lines
    assert next(command for command in workshop.ran if command.argv[-1] == "make $WHO").env_vars == {"WHO": "me"}
    again = aenv("tpl", "bd", str(project / "Dockerfile"), "--name", "other:v1", "--build-arg", "WHO=you")
    assert (again.exit_code, again.stdout) == (0, "local/other:v1\n")
    assert again.stderr.splitlines().count("#1 CACHED") == 1
    assert "send the files" not in again.stderr, "the node has them"
    assert workshop.ran[-2].argv[-1] == "make $WHO" or any(c.env_vars == {"WHO": "you"} for c in workshop.ran)


def test_only_what_is_used_and_not_ignored_is_sent(aenv, server, workshop, project):
    (project / "unused").write_bytes(os.urandom(200_000))
    assert aenv("template", "build", str(project)).exit_code == 0
    sizes = [path.stat().st_size for path in server.orchestrator.builds.files._folder.iterdir()]
    assert len(sizes) == 1
    assert sizes[0] < 1000


def test_a_failing_line_is_told_with_its_output(aenv, server, workshop, project):
    workshop.answers_to = lambda command: (2, "no rule to make target") if command.startswith("make") else (0, "")
    done = aenv("template", "build", str(project))
    assert (done.exit_code, done.stdout) == (1, "")
    told = done.stderr[done.stderr.index("error: ") :].splitlines()
    shown = str(project / "Dockerfile")
    assert told[:3] == [
        f"error: {shown}:4: failed to run 'make $WHO': exit status 2",
        "  4 | RUN make $WHO",
        "no rule to make target",
    ]
    assert told[3].startswith("hint: `aenv template logs ")
    assert template(server, "my-project") is None
    workshop.answers_to = lambda command: (0, "")
    assert "#1 CACHED" in aenv("template", "build", str(project)).stderr


REFUSED = [
    ("FROM debian\nFOO bar\n", (), "Dockerfile:2: unknown instruction: FOO\n  2 | FOO bar"),
    ("FROM debian\nRUN --mount=type=ssh x\n", (), "Dockerfile:2: RUN: --mount of type 'ssh' is not supported"),
    ("FROM debian\n", ("--secret", "id=a,src=/none/there"), "the file /none/there of the secret 'a' cannot be read"),
    ("FROM debian\n", ("--secret", "id=a,env=NO_SUCH_VARIABLE"), "the variable NO_SUCH_VARIABLE of the secret 'a' is not set"),
    ("FROM debian\n", ("--secret", "src=x"), "write id=NAME,src=FILE"),
    ("FROM debian\n", ("--secret", "id=a,what=x"), "'what' is not understood"),
    ("FROM debian\n", ("--registry", "r.test"), "--registry goes with --username"),
    ("FROM debian\n", ("--username", "me"), "--username and --password-stdin go together"),
    ("FROM debian\nCOPY none /x\n", (), "Dockerfile:2: the context has no 'none'\n  2 | COPY none /x"),
    ("FROM debian\nCOPY app/junk.log /x\n", (), "Dockerfile:2: 'app/junk.log' is left out by the ignore file"),
    ("FROM debian\n", ("--target", "x"), "has no stage 'x'"),
    ("FROM debian\n", ("--build-arg", "A"), "KEY=VALUE"),
    ("FROM debian\n", ("--cpu", "99"), "99"),
    ("FROM debian\n", ("--name", "a b"), "a b"),
]


@pytest.mark.parametrize(("text", "options", "message"), REFUSED)
def test_what_is_wrong_is_told_before_anything_is_built(aenv, server, workshop, project, text, options, message):
    (project / "Dockerfile").write_text(text)
    done = aenv("template", "build", str(project), *options)
    assert done.exit_code in (2, 3), done.stderr
    assert done.stdout == ""
    assert message in done.stderr
    assert workshop.opened == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("./none", "there is no file or folder './none'"),
        ("Dockerfile", "there is no file or folder 'Dockerfile'"),
        (".", "there is no Dockerfile at Dockerfile"),
    ],
)
def test_sources_that_are_none(aenv, tmp_path, monkeypatch, source, message):
    monkeypatch.chdir(tmp_path)
    done = aenv("template", "build", source)
    assert done.exit_code == 2
    assert message in done.stderr


def test_a_dockerfile_elsewhere(aenv, server, workshop, project, tmp_path):
    other = tmp_path / "other.Dockerfile"
    other.write_text("FROM debian\nCOPY app/main.py app/junk.log /x/\n")
    other.with_name("other.Dockerfile.dockerignore").write_text("unrelated\n")
    done = aenv("template", "build", str(project), "-f", str(other))
    assert done.exit_code == 0, done.stderr
    assert aenv("template", "build", str(other), "-f", str(other)).exit_code == 2


def test_images_and_templates_as_they_are(aenv, server, workshop):
    done = aenv("template", "build", "debian", "--cpu", "2", "--memory", "1024")
    assert (done.exit_code, done.stdout) == (0, "local/debian\n"), done.stderr
    made = template(server, "debian").builds[0]
    assert (made.machine.vcpu_count, made.machine.memory_mb, made.service) == (2, 1024, None)
    done = aenv("template", "build", "template://debian", "--name", "copy:v2")
    assert (done.exit_code, done.stdout) == (0, "local/copy:v2\n"), done.stderr
    assert aenv("template", "build", "none:latest").exit_code == 1
    assert aenv("template", "build", "debian", "--target", "x").exit_code == 2


def test_json_is_a_document_a_line(aenv, workshop, project):
    done = aenv("template", "build", str(project), "--json")
    documents = [json.loads(line) for line in done.stdout.splitlines()]
    assert documents[-1]["status"] == "ready"
    assert documents[-1]["names"] == ["local/my-project"]
    assert [entry["step"] for entry in documents[:-1] if "RUN make" in entry["message"]] == ["2"]
    assert "#1" not in done.stderr


def test_no_cache_runs_everything(aenv, workshop, project):
    for options, count in (((), 1), ((), 1), (("--no-cache",), 2)):
        assert aenv("template", "build", str(project), *options).exit_code == 0
        assert sum(command.argv[-1] == "make $WHO" for command in workshop.ran) == count


def test_leaving_does_not_end_the_build(aenv, server, workshop, project):
    with workshop.hold("make $WHO"):
        left = aenv("template", "build", str(project), "--detach")
        build_id = left.stdout.strip()
        assert left.exit_code == 0
        assert f"aenv template logs {build_id}" in left.stderr
        listed = json.loads(aenv("template", "builds", "--json").stdout)
        assert [(job["buildID"], job["name"], job["status"]) for job in listed] == [(build_id, "my-project", "building")]
    for words in ((build_id,), (build_id[:8],), ("my-project",)):
        followed = aenv("template", "logs", *words)
        assert followed.exit_code == 0, followed.stderr
        assert "#2 [stage-0 2/2] RUN make $WHO" in followed.stderr
    assert "my-project" in aenv("template", "builds").stdout
    assert template(server, "my-project")
    missing = aenv("template", "logs", "none")
    assert missing.exit_code == 3


def test_ctrl_c_leaves_and_says_how_to_come_back(aenv, server, workshop, project):
    with workshop.hold("make $WHO"):
        process = subprocess.Popen(
            [sys.executable, "-m", "agentenv.cli", "template", "build", str(project)],
            env=process_environment(server.environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            wait_for(lambda: any(command.argv[-1] == "make $WHO" for command in workshop.ran))
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=20)
        finally:
            process.kill()
        assert (process.returncode, out) == (130, "")
        build_id = server.orchestrator.builds.recent(1)[0].build_id
        assert f"the build goes on: `aenv template logs {build_id}` follows it" in err
    assert aenv("template", "logs", build_id).exit_code == 0
    assert template(server, "my-project")


def test_on_a_terminal_every_step_is_a_bar(server, workshop, project):
    screen = Screen(server.environment, "template", "build", str(project), columns=120)
    try:
        screen.wait_for("local/my-project")
        code, restored = screen.end()
    finally:
        screen.close()
    assert (code, restored) == (0, True)
    assert "[stage-0 2/2] RUN make $WHO" in screen.shown
    assert "━" in screen.shown or "✓" in screen.shown


# --- secrets, registries, ONBUILD


def test_secrets_go_with_the_build(aenv, server, workshop, project, tmp_path, monkeypatch):
    (tmp_path / "token").write_bytes(b"first\nsecret")
    monkeypatch.setenv("MY_TOKEN", "second secret")
    (project / "Dockerfile").write_text(
        "FROM debian\nRUN --mount=type=secret,id=a,env=A --mount=type=secret,id=b,env=B --mount=type=secret,id=MY_TOKEN,env=C show\n"
    )
    workshop.answers_to = lambda command: (0, "second secret") if command == "show" else (0, "")
    given = ("--secret", f"id=a,src={tmp_path / 'token'}", "--secret", "type=env,id=b,src=MY_TOKEN", "--secret", "id=MY_TOKEN")
    done = aenv("template", "build", str(project), *given)
    assert done.exit_code == 0, done.stderr
    (ran,) = (command for command in workshop.ran if command.argv[-1] == "show")
    assert ran.env_vars == {"A": "first\nsecret", "B": "second secret", "C": "second secret"}
    assert "#1 ***" in done.stderr.splitlines()
    assert "second secret" not in done.stderr


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """A docker config with a login in it, and a credential helper for the rest."""
    (tmp_path / "bin").mkdir()
    helper = tmp_path / "bin" / "docker-credential-test"
    helper.write_text(
        "#!/bin/sh\nread server\n"
        'case $server in helped.test) echo \'{"Username": "h", "Secret": "s3cret"}\';; broken.test) echo no such luck; exit 1;;\n'
        "*) echo credentials not found in native keychain; exit 1;; esac\n"
    )
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    auth = base64.b64encode(b"me:pass:word").decode()
    auths = {"plain.test": {"auth": auth}, "https://index.docker.io/v1/": {"auth": auth}, "other.test": {"auth": auth}}
    (tmp_path / "docker").mkdir()
    config = tmp_path / "docker" / "config.json"
    config.write_text(json.dumps({"auths": auths, "credsStore": "test", "credHelpers": {"absent.test": "not-there"}}))
    monkeypatch.setenv("DOCKER_CONFIG", str(config.parent))
    return config


def asked(server):
    """User and password that each image was asked for with."""
    found = server.orchestrator.images.asked
    return {name: account and (account.settings["username"], account.settings["password"]) for name, account in found}


def test_logins_of_docker_go_with_the_build(aenv, server, workshop, project, docker):
    images = ("plain.test/a", "helped.test/b", "broken.test/c", "absent.test/d", "none.test/e")
    server.orchestrator.images.contexts |= {name: Context() for name in images}
    workshop.stage_files = {"x": b"x"}
    text = "FROM debian\n" + "".join(f"COPY --from={name} /x /x\n" for name in images)
    (project / "Dockerfile").write_text(text)
    done = aenv("template", "build", str(project))
    assert done.exit_code == 0, done.stderr
    assert asked(server) == {
        "debian": ("me", "pass:word"),
        "plain.test/a": ("me", "pass:word"),
        "helped.test/b": ("h", "s3cret"),
        "broken.test/c": None,
        "absent.test/d": None,
        "none.test/e": None,
    }
    assert "docker-credential-test did not give the login for broken.test: no such luck" in done.stderr
    assert "'docker-credential-not-there', which is not there" in done.stderr
    for secret in ("pass:word", "s3cret"):
        assert secret not in done.stderr


def test_an_account_of_ones_own(aenv, server, workshop, project, docker):
    server.orchestrator.images.contexts |= {"plain.test/a": Context(), "two.test/b": Context()}
    (project / "Dockerfile").write_text("FROM plain.test/a\n")
    done = aenv("template", "build", str(project), "--username", "you", "--password-stdin", input="mine\n")
    assert done.exit_code == 0, done.stderr
    assert asked(server) == {"plain.test/a": ("you", "mine")}
    done = aenv("template", "build", "two.test/b", "--username", "you", "--password-stdin", input="mine\n")
    assert asked(server)["two.test/b"] == ("you", "mine")
    (project / "Dockerfile").write_text("FROM plain.test/a AS a\nFROM two.test/b\nCOPY --from=a /x /x\n")
    done = aenv("template", "build", str(project), "--username", "you", "--password-stdin", input="mine\n")
    assert (done.exit_code, "say which with --registry" in done.stderr) == (2, True)
    workshop.stage_files = {"x": b"x"}
    more = ("--registry", "two.test", "--username", "you", "--password-stdin")
    done = aenv("template", "build", str(project), *more, input="mine\n")
    assert asked(server) == {"plain.test/a": ("me", "pass:word"), "two.test/b": ("you", "mine")}, done.stderr


def test_files_for_triggers_of_a_base_image_are_sent(aenv, server, workshop, project):
    server.orchestrator.images.configs["debian"] = ImageConfig(on_build=("COPY app /srv", "RUN make all"))
    (project / "Dockerfile").write_text("FROM debian\nRUN last\n")
    done = aenv("template", "build", str(project))
    assert (done.exit_code, done.stdout) == (0, "local/my-project\n"), done.stderr
    assert "(ONBUILD): build again" in done.stderr
    assert [command.argv[-1] for command in workshop.ran if command.argv[-1] in ("make all", "last")] == ["make all", "last"]
    server.orchestrator.images.configs["debian"] = ImageConfig(on_build=("COPY none /srv",))
    done = aenv("template", "build", str(project))
    assert done.exit_code == 2
    assert "Dockerfile:1: the context has no 'none'" in done.stderr
