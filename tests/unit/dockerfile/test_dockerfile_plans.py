"""Dockerfiles and what is done for them: the cases of golden.txt, and those that are refused with their line."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.core.model import Context
from agentenv.template.dockerfile.actions import Become, Copy, MakeFolder, Mount, Run
from agentenv.template.dockerfile.document import DockerfileError, parse
from agentenv.template.dockerfile.evaluate import State, evaluate
from agentenv.template.dockerfile.needs import needs
from agentenv.template.dockerfile.stages import Dockerfile, read

GOLDEN = Path(__file__).with_name("golden.txt").read_text()
CASES = {title: body for title, _, body in (part.partition("\n") for part in re.split(r"^=== ", GOLDEN, flags=re.MULTILINE)[1:])}
BASES = {
    "image": State(Context("root", "/", {"PATH": "/usr/bin:/bin"})),
    "template": State(Context("user", "/home/user")),
    "scratch": State(Context("root", "/")),
}


def dockerfile(text: str, target: str = "", **arguments: str) -> Dockerfile:
    return read(parse(text), arguments, target)


def shown(plan: Dockerfile) -> list[str]:
    """The plan in the words of golden.txt."""
    states: dict[int, State] = {}
    names = {stage.index: str(stage) for stage in plan.stages}
    lines: list[str] = []
    for stage in plan.stages:
        is_stage = stage.base.kind == "stage"
        lines.append(f"{stage} <- {stage.base.kind} {names[stage.base.stage] if is_stage else stage.base.name}".rstrip())
        base = states[stage.base.stage] if is_stage else BASES[stage.base.kind]
        done = evaluate(plan, stage, base, {})
        states[stage.index], context = done.state, base.context
        for action in done.actions:
            lines.append(_shown_action(action, context, names))
            if isinstance(action, Become):
                context = action.applied(context)
            if isinstance(action, MakeFolder):
                context = Context(context.user, action.path, context.env_vars)
        assert context == done.state.context
        lines += [f"start {done.state.start()}"] if done.state.start() else []
        lines += [f"ready {done.state.ready}"] if done.state.ready else []
        lines += [f"label {name}={value}" for name, value in sorted(done.state.labels.items())]
        lines += [f"note {note}" for note in done.notes]
    return lines


def _shown_action(action, context: Context, names: dict[int, str]) -> str:
    if isinstance(action, MakeFolder):
        return f"folder {action.path}"
    if isinstance(action, Become):
        return f"user {action.user}" if action.user else "env " + " ".join(f"{n}={v}" for n, v in action.variables)
    if isinstance(action, Copy):
        parts = ["copy", *map(_word, action.sources), "->", action.destination, action.owner or "as-is"]
        parts += [action.mode] if action.mode else []
        parts += [f"from={names[action.stage]}"] if action.stage is not None else []
        parts += ["but", *action.excludes] if action.excludes else []
        parts += ["unpacks"] if action.unpacks else []
        parts += ["parents"] if action.parents else []
        parts += ["apart"] if action.is_apart else []
        for one in action.remotes:
            parts += ["&", one.kind, one.url, *([one.checksum[:8]] if one.checksum else []), *(["with .git"] if one.keeps_git else [])]
        parts += ["unpacked"] if action.unpacks_remotes else []
        parts += ["|", *(f"{name}={json.dumps(content)}" for name, content in action.inline)] if action.inline else []
        return " ".join(parts)
    assert isinstance(action, Run)
    parts = [f"run {context.user} {context.workdir}", json.dumps(action.argv, separators=(",", ":"))]
    if action.variables or action.unkeyed:
        parts.append(" ".join([*(f"{n}={v}" for n, v in action.variables), *(f"({n}={v})" for n, v in action.unkeyed)]))
    parts += [f"script {json.dumps(action.script[1])}"] if action.script else []
    if action.mounts:
        parts.append(", ".join(_shown_mount(mount, names) for mount in action.mounts))
    return " | ".join(parts)


def _shown_mount(mount: Mount, names: dict[int, str]) -> str:
    if mount.kind == "bind":
        where = "context" if mount.stage is None else names[mount.stage]
        return f"bind {where}:{mount.source} {mount.target}{' ro' if mount.is_read_only else ''}"
    what = f"{mount.kind} {mount.target} {mount.mode:o} {mount.owner}".replace("  ", " ")
    what += f" id={mount.name}" if mount.name not in ("", mount.target) else ""
    what += f" from={names[mount.stage]}:{mount.source}" if mount.stage is not None else ""
    what += f" {mount.sharing}" if mount.sharing != "shared" else ""
    what += f" size={mount.size_bytes}" if mount.size_bytes else ""
    what += f" env={mount.variable}" if mount.variable else ""
    return what + (" ro" if mount.is_read_only else "") + (" required" if mount.is_required else "")


def _word(word: str) -> str:
    return f'"{word}"' if " " in word else word


@pytest.mark.parametrize("title", CASES)
def test_golden(title: str):
    text, _, expected = CASES[title].partition("\n---\n")
    arguments: dict[str, str] = {}
    target = ""
    while match := re.match(r"(args|target) (.*)\n", text):
        text = text[match.end() :]
        if match[1] == "target":
            target = match[2]
        else:
            arguments = dict(word.split("=", 1) for word in shlex.split(match[2]))
    assert shown(read(parse(text + "\n"), arguments, target)) == expected.strip("\n").split("\n")


def test_there_are_about_forty():
    assert len(CASES) >= 40


REFUSED = {
    "": "there is no instruction",
    "# only a comment\n": "there is no instruction",
    "RUN a": "Dockerfile:1: RUN stands before the first FROM",
    "ARG A=1": "there is no FROM",
    "FROM a\nFOO b": "Dockerfile:2: unknown instruction: FOO\n  2 | FOO b",
    "FROM a b": "FROM takes an image",
    "FROM": "FROM takes an image",
    "FROM $NONE": "is no name of an image",
    "FROM template://": "names no template",
    "FROM --platform=linux/arm64 a": "not linux/arm64",
    "FROM a AS 1st": "cannot be the name of a stage",
    "FROM a AS scratch": "cannot be the name of a stage",
    "FROM a AS x\nFROM b AS X": "two stages named 'x'",
    "FROM a\nRUN": "a command is needed",
    "FROM a\nRUN []": "a command is needed",
    "FROM a\nRUN [1]": "Only strings",
    "FROM a\nRUN <<EOF\nx": "unterminated heredoc",
    "FROM a\nRUN --mount=type=ssh make": "Dockerfile:2: RUN: --mount of type 'ssh' is not supported",
    "FROM a\nRUN --mount=type=what,target=/x make": "type 'what' is not supported",
    "FROM a\nRUN --mount=src=x make": "needs a target",
    "FROM a\nRUN --mount=target=/x,from=later make\nFROM b AS later\nCOPY --from=0 /x /y": "not before this one",
    "FROM a\nRUN --mount=target=/x,from=$B make": "variables are not replaced here",
    "FROM a\nRUN --mount=target=/x,ro=maybe make": "readonly is true or false",
    "FROM a\nRUN --mount=target make": "has no value",
    "FROM a\nRUN --mount=type=secret make": "cannot be the id of a secret",
    "FROM a\nRUN --mount=type=secret,id=a/b make": "cannot be the id of a secret",
    "FROM a\nRUN --mount=type=secret,id=a,env=1x make": "not the name of a variable",
    "FROM a\nRUN --mount=type=cache,target=/x,source=y make": "source needs from",
    "FROM a\nRUN --mount=type=cache,target=/x,sharing=none make": "shared, private or locked",
    "FROM a\nRUN --mount=type=cache,target=/x,uid=root make": "uid and gid are numbers",
    "FROM a\nRUN --mount=type=tmpfs,target=/x,size=much make": "is no size",
    "FROM a\nRUN --mount=type=cache make": "needs a target",
    "FROM a\nRUN --mount=type=cache,target=/ make": "cannot have / as its target",
    "FROM a\nRUN --mount=type=tmpfs,target=/x,readonly make": "'readonly' is not supported",
    "FROM a\nRUN --network=none make": "--network=none is not supported",
    "FROM a\nRUN --security=x make": "sandbox or insecure",
    "FROM a\nRUN --foo make": "unknown flag --foo",
    "FROM a\nCOPY a": "a source and a destination",
    "FROM a\nCOPY a b c": "must end with /",
    "FROM a\nCOPY $NONE /x": "is empty",
    "FROM a\nCOPY a $NONE": "the destination is empty",
    "FROM a\nCOPY --chown a /x": "--chown needs a value",
    "FROM a\nCOPY --chown=a:b:c a /x": "user or user:group",
    "FROM a\nCOPY --chown=$NONE a /x": "user or user:group",
    "FROM a\nCOPY --chmod=u+q a /x": "neither octal nor symbolic",
    "FROM a\nCOPY --chmod=98 a /x": "neither octal nor symbolic",
    "FROM a\nCOPY --chmod=u a /x": "neither octal nor symbolic",
    "FROM a\nCOPY --chown=a --chown=b a /x": "given twice",
    "FROM a\nCOPY --link=maybe a /x": "true or false",
    "FROM a\nCOPY --from=0 a /x": "not before this one",
    "FROM a AS x\nCOPY --from=x a /x": "not before this one",
    "FROM a\nCOPY --from=later a /x\nFROM b AS later\nCOPY --from=0 a /x": "not before this one",
    "FROM a\nCOPY --from=7 a /x": "no stage of that number",
    "FROM a\nCOPY --from=$X a /x": "variables are not replaced here",
    "FROM a\nCOPY --from=scratch a /x": "nothing in it",
    "FROM a AS x\nFROM b\nCOPY --from=x <<E /x\nE": "does not go with a heredoc",
    "FROM a\nCOPY --exclude=[ a /x": "--exclude",
    "FROM a\nCOPY <<E <<F\nE\nF": "a heredoc cannot be the destination",
    "FROM a\nADD git@example.com:x.git /x": "needs a key",
    "FROM a\nADD ssh://git@example.com/x.git /x": "needs a key",
    "FROM a\nADD ftp://example.com/x /x": "fetches by http and https",
    "FROM a\nADD git://example.com/x.git /x": "fetches by http and https",
    "FROM a\nADD https://user:pass@example.com/x /x": "would be part of the template",
    "FROM a\nADD https:///x /x": "fetches by http and https",
    "FROM a\nADD https://[x /x": "is no URL",
    "FROM a\nADD --checksum=sha256:1 https://example.com/x /x": "sha256: and 64 hex digits",
    "FROM a\nADD --checksum=md5:1 https://example.com/x.git /x": "40 hex digits",
    "FROM a\nADD --checksum=sha256:1 a /x": "goes with one source, which is fetched",
    "FROM a\nADD --keep-git-dir https://example.com/x /x": "no git repository",
    "FROM a\nADD --from=b a /x": "not supported: --from",
    "FROM a\nENV": "a name and a value",
    "FROM a\nENV A": "must have two arguments",
    "FROM a\nENV A=1 B": "can't find = in",
    "FROM a\nENV =1": "not the name of a variable",
    "FROM a\nENV A=${B": "missing '}'",
    "FROM a\nENV A=${B:?must be set}": "must be set",
    "FROM a\nARG": "a name is needed",
    "FROM a\nARG =1": "not NAME or NAME=VALUE",
    "FROM a\nWORKDIR": "a path is needed",
    "FROM a\nWORKDIR $NONE": "the path is empty",
    "FROM a\nUSER": "a user",
    "FROM a\nUSER a b": "is not user or user:group",
    "FROM a\nUSER $NONE": "is not user or user:group",
    "FROM a\nSHELL bash": "list of words in JSON",
    "FROM a\nEXPOSE http": "is not a port",
    "FROM a\nEXPOSE": "an argument is needed",
    "FROM a\nHEALTHCHECK": "NONE, or CMD",
    "FROM a\nHEALTHCHECK CMD": "NONE, or CMD",
    "FROM a\nHEALTHCHECK NONE x": "takes no arguments",
    "FROM a\nHEALTHCHECK --every=1 CMD x": "unknown flag --every",
    "FROM a AS b\nONBUILD FROM x\nFROM b": "not allowed in ONBUILD",
    "FROM a AS b\nONBUILD ONBUILD RUN x\nFROM b": "not allowed in ONBUILD",
    "FROM a AS b\nONBUILD\nFROM b": "ONBUILD needs an instruction",
    "# escape=x\nFROM a": "invalid escape token",
    "FROM a\0b": "a NUL",
}


@pytest.mark.parametrize("text", REFUSED, ids=repr)
def test_what_is_wrong_is_refused(text: str):
    with pytest.raises(DockerfileError) as failure:
        shown(dockerfile(text))
    assert REFUSED[text] in failure.value.message


@pytest.mark.parametrize(
    ("wrong", "shows"),
    [
        ("ENV A=${B", "  4 | ENV A=${B"),
        ("NOTHING x", "  4 | NOTHING x"),
        ("RUN a && \\\n  b && \\\n  --x <<E", "  4 | RUN a && \\"),
        ("COPY --from=9 a \\\n  # why\n  b", "  4 | COPY --from=9 a \\"),
        ("  EXPOSE  " + "x" * 500, "  4 |   EXPOSE  " + "x" * 190),
    ],
)
def test_errors_name_the_line_and_show_it(wrong: str, shows: str):
    text = f"# escape=\\\n\nFROM a\n{wrong}\n"
    with pytest.raises(DockerfileError) as failure:
        shown(read(parse(text, "sub/my.Dockerfile"), {}))
    first, second = failure.value.message.split("\n")
    assert first.startswith("sub/my.Dockerfile:4: ")
    assert second == shows


def test_a_target_that_there_is_not():
    with pytest.raises(DockerfileError, match="no stage 'x'") as failure:
        dockerfile("FROM a AS one\nFROM b", "x")
    assert failure.value.hint == "its stages: one, stage-1"


def test_arguments_that_nobody_uses_are_said():
    plan = dockerfile("FROM a\nARG A", A="1", TYPO="2", HTTP_PROXY="x")
    assert plan.warnings == ("Dockerfile: no ARG uses the build argument TYPO",)


def test_a_stage_that_is_not_needed_is_not_looked_at():
    assert len(dockerfile("FROM a AS x\nRUN --mount=type=ssh b\nFROM b").stages) == 1


# --- what is uploaded

LONG = """FROM a AS one
ARG SRC=src
COPY $SRC *.txt /x/
COPY --from=b /y /y
COPY <<END /z
END
ADD a.tar /
FROM c AS unused
COPY never /
FROM one
ENV SUB=$SRC/sub
COPY $SUB ${DEEP:-deep} ./
"""


def wanted(text: str, **arguments: str) -> list[tuple[int, tuple[str, ...]]]:
    return [(need.line, need.sources) for need in needs(dockerfile(text, **arguments))]


def test_what_a_build_needs_of_its_context():
    assert wanted(LONG.replace("ENV SUB", "ARG DEEP\nENV SUB"), SRC="mine") == [
        (3, ("mine", "*.txt")),
        (7, ("a.tar",)),
        (13, ("mine/sub", "deep")),
    ]


def test_sources_that_only_the_node_could_know():
    with pytest.raises(DockerfileError, match=r"Dockerfile:12: .*\$DEEP"):
        wanted(LONG)
    with pytest.raises(DockerfileError, match=r"Dockerfile:3: .*\$PATH, which is set neither by ARG nor by ENV"):
        wanted("FROM a\nENV A=$PATH/x\nCOPY $A /x")
    assert wanted("FROM a\nENV A=$PATH/x\nCOPY a $A/x") == [(3, ("a",))]


# --- anything at all

TOKENS = st.sampled_from(
    [
        *(
            "FROM a\n",
            "FROM a AS b\n",
            "FROM b\n",
            "RUN ",
            "COPY ",
            "ADD ",
            "ENV ",
            "ARG ",
            "--from=b ",
            "--chown=$A ",
            "<<E ",
            "E\n",
            "\\\n",
        ),
        *(
            "ONBUILD ",
            "SHELL ",
            "HEALTHCHECK ",
            "CMD ",
            "LABEL ",
            "USER ",
            "WORKDIR ",
            '["a"]',
            "$A",
            "${A:-",
            "}",
            "'",
            '"',
            "=",
            " ",
            "\n",
        ),
        *(
            "--mount=type=cache,target=",
            "# escape=`\n",
            "`",
            "\t",
            "é",
            "\r\n",
            "[",
            "*",
            "EXPOSE ",
            "80",
            "#",
            "a",
            "/",
            "\x0b",
            "${",
            "<",
        ),
    ]
)


@settings(max_examples=400, deadline=None)
@given(st.lists(TOKENS, max_size=40).map("".join), st.booleans())
def test_any_text_is_a_plan_or_an_error_of_ours(text: str, has_base: bool):
    try:
        plan = dockerfile("FROM a\n" + text if has_base else text)
        assert shown(plan)
        needs(plan)
    except DockerfileError as error:
        told = error.message
    else:
        told = ""
    assert len(told) < 5000
