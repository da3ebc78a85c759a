"""Which volumes a sandbox mounts where: checking what a caller asks for (contract section 2.2, `volumeMounts`)."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence

from agentenv.core.errors import InvalidInput
from agentenv.core.model import VolumeMount
from agentenv.volume.registry import Volumes

MOUNTS_MAX = 16
_PATH_MAX_BYTES = 1024
_OF_THE_SYSTEM = ("/", "/proc", "/sys", "/dev", "/run")


def resolve(volumes: Volumes, asked: Sequence[tuple[str, str]]) -> tuple[VolumeMount, ...]:
    """The mounts of `asked`, pairs of a volume's name and a path in the guest. InvalidInput naming everything that is wrong."""
    if len(asked) > MOUNTS_MAX:
        raise InvalidInput(f"volumeMounts: {len(asked)} are more than {MOUNTS_MAX}")
    found: list[VolumeMount] = []
    wrong: list[str] = []
    for number, (name, path) in enumerate(asked):
        volume = volumes.named(name)
        reasons = [] if volume else [f"volume '{name[:80]}' not found"]
        reasons += _problems(path)
        if any(path == other for _, other in asked[:number]):
            reasons.append(f"path '{path[:80]}' is used twice")
        if volume and not reasons:
            found.append(VolumeMount(volume.volume_id, name, path))
        wrong += [f"volume mount #{number}: {reason}" for reason in reasons]
    if wrong:
        raise InvalidInput("invalid mounts:\n\t- " + "\n\t- ".join(wrong))
    return tuple(found)


def _problems(path: str) -> list[str]:
    if not path.startswith("/"):
        return ["path must be absolute"]
    if "\0" in path or len(path.encode()) > _PATH_MAX_BYTES:
        return [f"path must be at most {_PATH_MAX_BYTES} bytes without NUL"]
    if posixpath.normpath(path) != path or path.startswith("//"):
        return ["path must be without '.', '..', double and trailing slashes"]
    if path in _OF_THE_SYSTEM or path.startswith(tuple(f"{top}/" for top in _OF_THE_SYSTEM[1:4])):
        return [f"path '{path[:80]}' is the system's own"]
    return []
