"""What `aenv template build` is given: a folder, a Dockerfile, or the name of an image or template; and what of it the node needs."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from agentenv.cli.exits import CliError, Exit

if TYPE_CHECKING:
    from agentenv.cli.api import Api
    from agentenv.template.dockerfile.context import BuildContext
    from agentenv.template.dockerfile.stages import Dockerfile

_CHUNK_BYTES = 1 << 18
_NOT_IN_NAMES = re.compile(r"[^a-z0-9_.-]+")
Report = Callable[[str, int | None, int | None], object]


@dataclass(frozen=True, slots=True)
class DockerfileSource:
    """A Dockerfile and its context. `shown` is how errors call the file."""

    path: Path
    shown: str
    root: Path

    @property
    def default_name(self) -> str:
        """Of the template: that of the context's folder."""
        return _as_name(self.root.resolve().name)


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image or a template that is built from as it is."""

    reference: str

    @property
    def default_name(self) -> str:
        """Of the template: the last part of the image's name."""
        plain = self.reference.removeprefix("template://").partition("@")[0]
        return _as_name(plain.rpartition("/")[2].partition(":")[0])


def find_source(given: str, dockerfile: Path | None) -> DockerfileSource | ImageSource:
    """What is meant by `given`. CliError when it looks like a path and is none."""
    path = Path(given)
    if path.is_dir():
        chosen = dockerfile or path / "Dockerfile"
        if not chosen.is_file():
            hint = "name it with --file" if dockerfile is None else "paths of --file are those of the current folder"
            raise CliError(f"there is no Dockerfile at {chosen}", hint, Exit.USAGE)
        return DockerfileSource(chosen, str(chosen), path)
    if dockerfile is not None:
        raise CliError(f"--file goes with a folder, and {given!r} is none", "give the folder that COPY copies from", Exit.USAGE)
    if path.is_file():
        return DockerfileSource(path, str(path), path.parent)
    if given.startswith((".", "/", "~")) or given.endswith("/") or given == "Dockerfile":
        raise CliError(f"there is no file or folder {given!r}", "give a folder with a Dockerfile, a Dockerfile, or an image", Exit.USAGE)
    return ImageSource(given)


class Upload:
    """The part of a build request that says what is built, once its files are on the node."""

    def __init__(self, source: DockerfileSource, arguments: dict[str, str], target: str) -> None:
        """Reads the Dockerfile. DockerfileError names its line."""
        from agentenv.template.dockerfile.context import BuildContext
        from agentenv.template.dockerfile.document import parse
        from agentenv.template.dockerfile.stages import read

        try:
            self._text = source.path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise CliError(f"{source.path} cannot be read: {error}", "is it a Dockerfile?", Exit.USAGE) from error
        self._source, self._arguments, self._target = source, arguments, target
        self.on_build: dict[int, list[str]] = {}
        """What ONBUILD of base images adds, by line, once the node has said so."""
        self.dockerfile: Dockerfile = read(parse(self._text, source.shown), arguments, target)
        self._context: BuildContext = BuildContext.open(source.root, source.path)

    def send(self, api: Api, template_id: str, report: Report) -> dict[int, str]:
        """Send the files that the node lacks; returns the archive of every line that needs one. DockerfileError, CliError."""
        from agentenv.core.errors import AgentEnvError
        from agentenv.template.dockerfile.context import hash_of, write_archive
        from agentenv.template.dockerfile.needs import needs

        hashes: dict[int, str] = {}
        for need in needs(self.dockerfile, self.on_build):
            try:
                entries = self._context.entries(need)
                hashes[need.line] = files_hash = hash_of(entries)
                place = api.build_file(template_id, files_hash)
                if place["present"]:
                    continue
                with tempfile.TemporaryFile() as archive:
                    write_archive(entries, archive)
                    size_bytes = archive.tell()
                    archive.seek(0)
                    api.send_build_file(
                        place["url"], _chunks(archive, size_bytes, f"send the files of line {need.line}", report), size_bytes
                    )
            except AgentEnvError as error:
                raise self.dockerfile.document.error(need.line, error.message, error.hint) from error
        return hashes

    def body(self, files: dict[int, str], start: bool) -> dict[str, Any]:
        """For the request that starts the build."""
        return {
            "text": self._text,
            "name": self._source.shown,
            "buildArgs": self._arguments,
            "target": self._target,
            "files": {str(line): files_hash for line, files_hash in files.items()},
            "start": start,
        }


def _chunks(content: IO[bytes], size_bytes: int, step: str, report: Report) -> Iterator[bytes]:
    done = 0
    while chunk := content.read(_CHUNK_BYTES):
        yield chunk
        done += len(chunk)
        report(f"{step} (bytes)", done, size_bytes)


def _as_name(text: str) -> str:
    return _NOT_IN_NAMES.sub("-", text.lower()).strip("-._") or "template"
