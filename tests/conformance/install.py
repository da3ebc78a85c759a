"""Installs releases of the official clients, each into a folder of its own that is kept between runs.

    python tests/conformance/install.py [--all]

The folder of clients is `AENV_TEST_CLIENTS`, or `clients` in the test home. A folder is complete once its stamp is there, so an
interrupted installation is done again. Python releases get a virtual environment, the others a private npm project.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from catalogue import CLIENTS, Client

INSTALL_DEADLINE_S = 900
_STAMP = ".complete"
_NODE_HINT = "install Node.js 20 or newer with npm (Debian: apt-get install nodejs npm)"


def clients_folder() -> Path:
    """Where all clients are kept."""
    home = Path(os.environ.get("AENV_TEST_HOME", "/var/lib/agentenv-test"))
    return Path(os.environ.get("AENV_TEST_CLIENTS", home / "clients"))


def node_program(name: str = "node") -> str:
    """The path of `node` or `npm`. RuntimeError with a next step when it is missing."""
    path = shutil.which(name)
    if path is None:
        raise RuntimeError(f"{name} is not installed\n  hint: {_NODE_HINT}")
    return path


def installed(client: Client) -> Path:
    """The client's folder, installed unless it is there already. RuntimeError says what could not be installed."""
    folder = clients_folder() / client.folder
    if (folder / _STAMP).exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if client.folder.startswith("npm-"):
        kind = {} if client.kind == "cli" else {"type": "module"}
        (folder / "package.json").write_text(json.dumps({"private": True, **kind}))
        _run(client, [node_program("npm"), "install", "--no-audit", "--no-fund", f"{client.package}@{client.version}"], folder)
    else:
        venv.create(folder, with_pip=True)
        _run(
            client,
            [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", f"{client.package}=={client.version}", *client.along],
            folder,
        )
    (folder / _STAMP).touch()
    return folder


def _run(client: Client, command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_DEADLINE_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{client.package} {client.version} cannot be installed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def main() -> None:
    """Install the fast ones, or with --all every one."""
    for client in CLIENTS:
        if client.fast or "--all" in sys.argv[1:]:
            print(f"{client.name}: {installed(client)}", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:
        sys.exit(str(error))
