"""Sources of ADD that are fetched: files by HTTP, and git repositories. Which is which goes by the URL alone, as in BuildKit."""

from __future__ import annotations

import posixpath
import re
from urllib.parse import unquote, urlsplit

from agentenv.core.errors import InvalidInput
from agentenv.template.dockerfile.actions import Remote
from agentenv.template.dockerfile.scope import UNKNOWN

UNNAMED = "__unnamed__"
"""What a fetched file is called whose URL names none, as in BuildKit."""
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://|git@", re.IGNORECASE)
_CHECKSUM = re.compile(r"sha256:([0-9a-f]{64})")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_remote(source: str) -> bool:
    """Whether a source of ADD is no path of the context."""
    return _REMOTE.match(source) is not None


def parse_remote(url: str, checksum: str, keeps_git: bool) -> Remote:
    """What is to be fetched. InvalidInput for what this node does not speak."""
    if UNKNOWN in url + checksum:
        return Remote(url, "file")
    if url.startswith("git@") or url.startswith("ssh://"):
        raise InvalidInput(f"{url[:200]!r} needs a key, and a build has none", "use the repository's https:// address")
    try:
        place = urlsplit(url)
        has_host = bool(place.hostname) and place.port != 0
    except ValueError as error:
        raise InvalidInput(f"{url[:200]!r} is no URL: {error}") from error
    if place.scheme not in ("http", "https") or not has_host:
        raise InvalidInput(f"{url[:200]!r}: ADD fetches by http and https", "use the address with https://")
    if place.username or place.password:
        raise InvalidInput("a URL with a password would be part of the template", "fetch it in a RUN with --mount=type=secret")
    if not place.path.endswith(".git"):
        if keeps_git:
            raise InvalidInput(f"--keep-git-dir: {url[:200]!r} is no git repository", "its path ends with .git")
        return Remote(url.partition("#")[0], "file", _digest(checksum))
    if checksum and not _COMMIT.fullmatch(checksum):
        raise InvalidInput(f"--checksum={checksum[:80]}: of a git repository it is the commit, 40 hex digits")
    return Remote(url, "git", checksum, keeps_git)


def file_name(url: str) -> str:
    """What a file from there is called."""
    name = posixpath.basename(unquote(urlsplit(url).path))
    return name if name not in ("", ".", "..") and "/" not in name and "\0" not in name else UNNAMED


def host_and_port(url: str) -> tuple[str, int]:
    """Where a URL leads."""
    place = urlsplit(url)
    return place.hostname or "", place.port or (443 if place.scheme == "https" else 80)


def _digest(checksum: str) -> str:
    if not checksum:
        return ""
    found = _CHECKSUM.fullmatch(checksum)
    if found is None:
        raise InvalidInput(f"--checksum={checksum[:80]}: it is sha256: and 64 hex digits")
    return found[1]
