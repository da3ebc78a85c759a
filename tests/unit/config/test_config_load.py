from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from agentenv.config.load import load, settings, variable
from agentenv.config.reference import default_toml
from agentenv.config.schema import Config
from agentenv.core.errors import InvalidInput

ROOT = Path(__file__).parents[3]


def _file(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text)
    return path


def test_without_anything_the_defaults_hold() -> None:
    assert load(environ={}) == Config()


def test_a_file_beats_the_default_and_the_environment_beats_the_file(tmp_path: Path) -> None:
    file = _file(tmp_path, "[api]\nport = 4000\nhost = '127.0.0.2'\n")
    config = load(file, {"AENV_API_PORT": "5000"})
    assert (config.api.port, config.api.host) == (5000, "127.0.0.2")
    assert load(environ={"AENV_CONFIG": str(file)}).api.port == 4000


def test_every_setting_can_be_set_by_its_variable() -> None:
    for section, key, field in settings():
        default = getattr(getattr(Config(), section), key)
        raw = ",".join(default) if isinstance(default, tuple) else str(default)
        config = load(environ={variable(section, key): raw})
        assert getattr(getattr(config, section), key) == default, f"{section}.{key} of type {field.annotation}"


def test_lists_come_from_the_environment_with_commas() -> None:
    assert load(environ={"AENV_GUEST_DNS_SERVERS": " 9.9.9.9 , 1.0.0.1,"}).guest.dns_servers == ("9.9.9.9", "1.0.0.1")
    assert load(environ={"AENV_NETWORK_DENIED_CIDRS": ""}).network.denied_cidrs == ()


def test_lists_come_from_the_environment_as_json() -> None:
    assert load(environ={"AENV_IMAGES_DENY": ' ["a/b", "c,d"] '}).images.deny == ("a/b", "c,d")
    assert load(environ={"AENV_IMAGES_DENY": "[]"}).images.deny == ()
    assert load(environ={"AENV_IMAGES_INSECURE_REGISTRIES": "[::1]:5000"}).images.insecure_registries == ("[::1]:5000",)


@pytest.mark.parametrize(
    ("text", "environ", "parts"),
    [
        ("[api]\nport = 0\n", {}, ["api.port", "config.toml"]),
        ("[api]\nport = 1\n", {"AENV_API_PORT": "seventy"}, ["api.port", "environment variable AENV_API_PORT"]),
        ("[api]\nprot = 1\n", {}, ["api.prot", "config.toml"]),
        ("[apl]\nport = 1\n", {}, ["apl", "config.toml"]),
        ("port = 1\n", {}, ["port", "[section]", "config.toml"]),
        ("[api\n", {}, ["config.toml", "TOML"]),
        ("", {"AENV_VMM_ACCELERATOR": "fast"}, ["vmm.accelerator", "AENV_VMM_ACCELERATOR"]),
        ("", {"AENV_IMAGES_DENY": "[1]"}, ["images.deny", "AENV_IMAGES_DENY"]),
        ("", {"AENV_IMAGES_MIRRORS": "docker.io"}, ["images.mirrors", "AENV_IMAGES_MIRRORS"]),
        ("", {"AENV_GUEST_MEMORY_MB": "1"}, ["guest.memory_mb", "AENV_GUEST_MEMORY_MB"]),
    ],
)
def test_errors_name_the_setting_and_where_it_came_from(tmp_path: Path, text: str, environ: dict[str, str], parts: list[str]) -> None:
    with pytest.raises(InvalidInput) as caught:
        load(_file(tmp_path, text), environ)
    for part in parts:
        assert part in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.mkdir(), lambda p: p.write_bytes(b"[api]\nhost = '\xff'\n")])
def test_a_named_file_that_cannot_be_read_is_said(tmp_path: Path, make: object) -> None:
    path = tmp_path / "named.toml"
    make(path)  # type: ignore[operator]
    with pytest.raises(InvalidInput, match=r"named\.toml"):
        load(environ={"AENV_CONFIG": str(path)})


def test_the_default_file_spells_out_the_defaults(tmp_path: Path) -> None:
    assert load(_file(tmp_path, default_toml()), {}) == Config()
    assert {section: set(keys) for section, keys in tomllib.loads(default_toml()).items()} == {
        section: {key for s, key, _ in settings() if s == section} for section in Config.model_fields
    }


def test_generated_pages_are_fresh() -> None:
    """`default.toml` and the pages under docs/ are what the code would write now."""
    environ = {"PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, "tools/gen_docs.py", "--check"], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
