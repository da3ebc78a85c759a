"""The languages: their names, what runs them, and how a cell is handed over."""

from __future__ import annotations

import asyncio
import shlex
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .limits import TRANSLATE_DEADLINE_S

_HERE = Path(__file__).parent
_ALIASES = {"": "python", "py": "python", "js": "javascript", "ts": "typescript", "sh": "bash", "shell": "bash"}
LANGUAGES = ("python", "javascript", "typescript", "bash")
_NODE_MODULES = "/usr/share/nodejs"
"""Where Debian keeps packages of node; `acorn` is there, since node itself depends on it."""


class BadRequest(Exception):
    """The caller asked for something that cannot work; the text goes to the client with status 400."""


class CellRefused(Exception):
    """A cell cannot be run; `name` and text become its error."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


def normalize(language: str | None) -> str:
    """The name of a language from what a caller wrote. BadRequest for one that is not offered."""
    name = (language or "").strip().lower()
    name = _ALIASES.get(name, name)
    if name not in LANGUAGES:
        raise BadRequest(f"language {language!r} is not available in this template; it has {', '.join(LANGUAGES)}")
    return name


def argv_of(language: str) -> list[str] | None:
    """What runs cells of a language; None for Python, whose workers are forks of the spawner."""
    if language == "python":
        return None
    if language == "bash":
        return ["bash", "--norc", "--noprofile", str(_HERE / "bash_worker.sh")]
    return ["node", "--no-warnings", str(_HERE / "javascript_worker.js")]


def environment_of(language: str, environment: dict[str, str]) -> dict[str, str]:
    """The variables a worker starts with."""
    if language in ("javascript", "typescript"):
        return {"NODE_PATH": _NODE_MODULES, **environment}
    return environment


@dataclass(frozen=True)
class Cell:
    """A cell with its variables: `set` and `unset` stay, `once` hold for this cell and are reset after it."""

    code: str
    set: dict[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    once: dict[str, str] = field(default_factory=dict)
    reseed: bool = False


async def request_of(language: str, cell: Cell, number: int, folder: Path) -> dict[str, Any] | str:
    """The request that makes a worker run `cell`. `folder` holds the files of the context. CellRefused."""
    if language == "bash":
        return _bash_request(cell, number, folder)
    code = await _without_types(cell.code) if language == "typescript" else cell.code
    return {"code": code, "set": cell.set, "unset": list(cell.unset), "once": cell.once, "reseed": cell.reseed}


def _bash_request(cell: Cell, number: int, folder: Path) -> str:
    if "\0" in cell.code:
        raise CellRefused("SyntaxError", "a bash cell cannot hold a NUL character")
    saved = "".join(f"__aenv_had_{index}=${{{name}+x}}; __aenv_old_{index}=${{{name}-}}\n" for index, name in enumerate(cell.once))
    before = [
        *(f"unset {name}\n" for name in cell.unset),
        *(f"export {name}={shlex.quote(value)}\n" for name, value in cell.set.items()),
        "RANDOM=$(od -An -N2 -tu2 /dev/urandom)\n" if cell.reseed else "",
        saved,
        *(f"export {name}={shlex.quote(value)}\n" for name, value in cell.once.items()),
    ]
    after = [
        f"if [[ $__aenv_had_{index} ]]; then export {name}=$__aenv_old_{index}; else unset {name}; fi\n"
        f"unset __aenv_had_{index} __aenv_old_{index}\n"
        for index, name in enumerate(cell.once)
    ]
    paths = []
    for name, text in (("before", "".join(before)), ("cell", cell.code + "\n"), ("after", "".join(after))):
        path = folder / name
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        paths.append(str(path))
    return " ".join([str(number), *paths])


def new_folder() -> Path:
    """A private folder for the files of one context; its path has no spaces."""
    return Path(tempfile.mkdtemp(prefix="cells-", dir="/tmp"))


async def _without_types(code: str) -> str:
    """TypeScript as JavaScript: types are taken out, nothing is checked. CellRefused."""
    if shutil.which("esbuild") is None:
        raise CellRefused("TypeScriptUnavailable", "TypeScript needs the program esbuild: sudo apt-get install esbuild")
    process = await asyncio.create_subprocess_exec(
        *("esbuild", "--loader=ts", "--target=es2022", "--log-level=error", "--color=false"),
        '--tsconfig-raw={"compilerOptions":{"preserveValueImports":true}}',
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        translated, said = await asyncio.wait_for(process.communicate(code.encode(errors="surrogatepass")), TRANSLATE_DEADLINE_S)
    except TimeoutError as late:
        process.kill()
        await process.wait()
        raise CellRefused("TypeScriptUnavailable", f"the types could not be taken out within {TRANSLATE_DEADLINE_S:g} s") from late
    if process.returncode != 0:
        raise CellRefused("SyntaxError", said.decode(errors="replace").strip())
    return translated.decode()
