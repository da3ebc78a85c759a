"""RUN --mount: what is mounted where, as BuildKit words it."""

from __future__ import annotations

import csv
import posixpath
import re
from collections.abc import Mapping
from typing import Literal, cast

from agentenv.core.errors import InvalidInput
from agentenv.template.dockerfile.actions import Mount
from agentenv.template.dockerfile.scope import UNKNOWN

SECRETS_FOLDER = "/run/secrets"
_ALIASES = {
    "dst": "target",
    "destination": "target",
    "src": "source",
    "ro": "readonly",
    "rw": "readwrite",
}
_FLAGS = ("readonly", "readwrite", "required")
_TAKES = {
    "bind": ("target", "source", "from", "readonly", "readwrite"),
    "cache": ("target", "source", "from", "readonly", "readwrite", "id", "sharing", "uid", "gid", "mode"),
    "tmpfs": ("target", "size"),
    "secret": ("target", "id", "source", "env", "required", "uid", "gid", "mode"),
}
_SIZE = re.compile(r"(\d{1,12})([kmgt]?)b?", re.IGNORECASE)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_ID = re.compile(r"[A-Za-z0-9._-]{1,200}")


def mount_fields(text: str) -> dict[str, str]:
    """The fields of a mount by their full names; a flag that is only named is `true`. InvalidInput when one is unknown."""
    fields: dict[str, str] = {}
    for part in next(csv.reader([text]), []):
        name, equals, value = part.strip().partition("=")
        name = _ALIASES.get(name.lower(), name.lower())
        if not equals and name in _FLAGS:
            value = "true"
        elif not equals or not value:
            raise InvalidInput(f"--mount: {part[:80]!r} has no value", "write --mount=type=cache,target=/path")
        fields[name] = value
    kind = fields.setdefault("type", "bind")
    if kind == "ssh":
        raise InvalidInput(
            "--mount of type 'ssh' is not supported: the agent of whoever builds cannot be reached from the node",
            "give the key with --mount=type=secret, or fetch what needs it before the build, and COPY it",
        )
    if kind not in _TAKES:
        raise InvalidInput(f"--mount of type {kind[:20]!r} is not supported: {', '.join(_TAKES)} are")
    unknown = sorted(set(fields) - {"type", *_TAKES[kind]})
    if unknown:
        raise InvalidInput(f"--mount=type={kind}: {unknown[0][:80]!r} is not supported", f"it takes {', '.join(_TAKES[kind])}")
    return fields


def parse_mount(text: str, workdir: str, stages: Mapping[str, int], files_hash: str) -> Mount:
    """One mount; `stages` are those that `from` may name, relative targets are below `workdir`. InvalidInput."""
    if UNKNOWN in text:
        return Mount("memory", UNKNOWN)
    fields = mount_fields(text)
    kind = fields["type"]
    if kind == "secret":
        return _secret(fields, workdir)
    target = _target(fields.get("target", ""), workdir)
    if kind == "tmpfs":
        return Mount("memory", target, size_bytes=_size(fields.get("size", "0")))
    stage = stages[fields["from"]] if "from" in fields else None
    source = posixpath.normpath("/" + fields.get("source", "").lstrip("/")).lstrip("/") or "."
    is_read_only = _is_set(fields, "readonly", kind == "bind") and not _is_set(fields, "readwrite", False)
    if kind == "bind":
        return Mount(
            "bind", target, source=source, stage=stage, files_hash="" if stage is not None else files_hash, is_read_only=is_read_only
        )
    if "source" in fields and stage is None:
        raise InvalidInput("--mount=type=cache: source needs from", "name the stage or image whose folder it begins with")
    sharing = fields.get("sharing", "shared")
    if sharing not in ("shared", "private", "locked"):
        raise InvalidInput(f"--mount: sharing is shared, private or locked, not {sharing[:20]!r}")
    return Mount(
        "cache",
        target,
        _mode(fields, "0755"),
        _owner(fields),
        source=source,
        stage=stage,
        name=fields.get("id", target),
        sharing=cast(Literal["shared", "private", "locked"], sharing),
        is_read_only=is_read_only,
    )


def _secret(fields: Mapping[str, str], workdir: str) -> Mount:
    source, target, variable = fields.get("source", ""), fields.get("target", ""), fields.get("env", "")
    name = fields.get("id") or posixpath.basename(source or target)
    if not _SECRET_ID.fullmatch(name):
        raise InvalidInput(f"--mount=type=secret: {name[:80]!r} cannot be the id of a secret", "write --mount=type=secret,id=NAME")
    if variable and not _VARIABLE.fullmatch(variable):
        raise InvalidInput(f"--mount=type=secret: {variable[:80]!r} is not the name of a variable")
    if target or not variable:
        target = _target(target or f"{SECRETS_FOLDER}/{name}", workdir)
    is_required = _is_set(fields, "required", False)
    return Mount("secret", target, _mode(fields, "0400"), _owner(fields), name=name, variable=variable, is_required=is_required)


def _target(given: str, workdir: str) -> str:
    if not given:
        raise InvalidInput("--mount needs a target", "write --mount=type=cache,target=/path")
    path = posixpath.normpath(posixpath.join("/", workdir, given)).replace("//", "/")
    if path == "/":
        raise InvalidInput("--mount cannot have / as its target")
    return path


def _owner(fields: Mapping[str, str]) -> str:
    uid, gid = fields.get("uid", "0"), fields.get("gid", "0")
    if not (uid.isdecimal() and gid.isdecimal() and max(int(uid), int(gid)) < 1 << 32):
        raise InvalidInput("--mount: uid and gid are numbers")
    return f"{uid}:{gid}"


def _mode(fields: Mapping[str, str], default: str) -> int:
    mode = fields.get("mode", default)
    if not re.fullmatch(r"[0-7]{1,5}", mode):
        raise InvalidInput("--mount: mode is one in octal")
    return int(mode, 8) & 0o7777


def _is_set(fields: Mapping[str, str], name: str, default: bool) -> bool:
    value = fields.get(name, "true" if default else "false").lower()
    if value not in ("true", "1", "false", "0"):
        raise InvalidInput(f"--mount: {name} is true or false, not {value[:20]!r}")
    return value in ("true", "1")


def _size(text: str) -> int:
    found = _SIZE.fullmatch(text)
    if found is None:
        raise InvalidInput(f"--mount: size={text[:20]} is no size", "write size=64m")
    return int(found[1]) << 10 * "kmgt".index(found[2].lower()) + 10 if found[2] else int(found[1])
