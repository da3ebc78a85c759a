"""F01, F19: a PATH of the template's own holds in the login shells that the SDKs run commands in."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from agentenv.core.model import Context
from agentenv.guest.commands import Command, Ended
from agentenv.template import login_path

PATHS = ("/opt/tool/bin:/usr/bin:/bin", '/opt/it\'s "here" $HOME/`id`:/usr/bin:/bin', "/usr/bin:/bin:/ü")

COMMANDS = (
    ('printf %s "$PATH"', None),
    ("echo one; (exit 0) && echo 'two \"three\"'", 'one\ntwo "three"\n'),
    ("cat <<X\n$((1+1))\nX", "2\n"),
)


class Shells:
    """A bench whose commands run in shells of this machine, with a profile that sets PATH as Debian's does."""

    def __init__(self, folder: Path, has_profile_d: bool) -> None:
        self.drop_ins = folder / "profile.d"
        if has_profile_d:
            self.drop_ins.mkdir()

    async def run(self, command: Command, on_output, deadline_s: float, on_start=lambda: None) -> Ended:
        words = [word.replace("/etc/profile.d", str(self.drop_ins)) for word in command.argv]
        done = _run(words)
        on_output("stderr", done.stderr)
        return Ended(done.returncode, f"exit status {done.returncode}")

    def path_in_a_login_shell(self) -> str:
        profile = f'PATH=/usr/local/bin:/usr/bin:/bin; export PATH; for f in {self.drop_ins}/*.sh; do [ ! -r "$f" ] || . "$f"; done'
        script = f'{profile}; printf %s "$PATH"'
        return subprocess.run(["/bin/sh", "-c", script], capture_output=True, check=True, env={"PATH": "/elsewhere"}).stdout.decode()


def _run(words: list[str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(words, env={"PATH": "/usr/bin:/bin"}, capture_output=True, timeout=60, check=False)


@pytest.mark.parametrize("path", PATHS)
async def test_it_is_what_login_shells_have(path: str, tmp_path: Path):
    shells = Shells(tmp_path, has_profile_d=True)
    await login_path.keep_path(shells, Context(env_vars={"PATH": path}))
    assert shells.path_in_a_login_shell() == path
    await login_path.keep_path(shells, Context(env_vars={"PATH": "/again"}))
    assert shells.path_in_a_login_shell() == "/again"


async def test_without_one_and_without_the_folder_nothing_is_written(tmp_path: Path):
    await login_path.keep_path(Shells(tmp_path, has_profile_d=False), Context(env_vars={"PATH": "/opt"}))
    (tmp_path / "other").mkdir()
    await login_path.keep_path(Shells(tmp_path / "other", has_profile_d=True), Context())
    assert [path.name for path in tmp_path.rglob("*")] == ["other", "profile.d"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shell", ["bash", "sh"])
@pytest.mark.parametrize(("command", "printed"), COMMANDS)
def test_steps_and_services_have_it_too(path: str, shell: str, command: str, printed: str | None):
    made = Command.in_login_shell(command, "root", "/", {"PATH": path})
    assert made.argv[-1] == command
    words = [word.replace("[ -x /bin/bash ]", "true" if shell == "bash" else "false") for word in made.argv]
    done = subprocess.run(words, env={"PATH": path, "HOME": "/nonexistent"}, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (printed if printed is not None else path, "")


def test_a_failing_command_ends_as_it_did():
    for env_vars in ({}, {"PATH": "/usr/bin:/bin"}):
        for command, status in (("exit 7", 7), ("false", 1), ("kill -9 $$", -9), ("if", 2)):
            made = Command.in_login_shell(command, "root", "/", env_vars)
            done = subprocess.run(made.argv, env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}, capture_output=True, check=False)
            assert done.returncode == status, (command, done)
