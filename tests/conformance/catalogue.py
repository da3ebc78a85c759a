"""What is tried with which client: the one list of scenarios, and the releases of the official clients.

A scenario is a name and a sentence; each client's own script implements it under that name, as far as the release can do it.
Releases are pinned: the oldest that still installs, about one per half year, and the newest. `fast` ones are part of `make test`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

EVERYTHING = os.environ.get("AENV_CONFORMANCE") == "all"  # every client, and results for the docs; else the fast ones

SCENARIOS: dict[str, str] = {
    "create_and_kill": "create with a timeout, answer, kill; killed twice is told",
    "command_result": "output, errors and exit code of a command; its folder, user and variables",
    "background_command": "start, list, follow and kill a command",
    "standard_input": "feed a running command, and end its input",
    "reattach": "follow a running command from a second client",
    "command_timeout": "a command over its time is ended, the sandbox is not",
    "big_output": "two million bytes of output arrive whole",
    "environment": "variables of the sandbox and of one command",
    "file_contents": "write and read text, bytes and streams; parents are made; odd names",
    "many_files": "several files in one call",
    "file_tree": "make, list, look up, rename and remove; what is missing is told",
    "file_details": "mode, owner, size, links; user metadata on files",
    "compressed_files": "the same bytes with gzip both ways",
    "watch_folder": "changes in a folder are told, in sub-folders too when asked",
    "terminal": "a terminal: size, input, resize, end",
    "terminal_reattach": "a terminal goes on for a second client",
    "git": "a repository's life: init, commit, branches, remote, clone, push, pull",
    "connect": "a second client reaches the sandbox by its id; its life is only extended",
    "list_and_filter": "lists by metadata and state, page by page",
    "details": "what the API tells of a sandbox",
    "set_timeout": "a new timeout counts from now; zero ends it",
    "pause_and_resume": "memory, processes, id and token survive; while paused nothing answers",
    "pause_disk_only": "files survive, processes do not, and the kernel starts anew",
    "pause_at_timeout": "at its timeout it pauses and can be brought back",
    "auto_resume": "a paused sandbox wakes when it is used",
    "fork": "copies go on from the same instant and diverge",
    "snapshot": "a named snapshot: create from it, list it, delete it twice",
    "metrics": "what it used, within half a minute",
    "network_settings": "settings are kept, shown and replaced",
    "ports": "a server in the sandbox is reached by host or header; a closed port is told",
    "file_urls": "signed links up and down, without any header; an expired one is refused",
    "kill_during_command": "who waits for a command is told that the sandbox ended",
    "idempotent_create": "a creation asked for twice under one key is made once",
    "errors": "a wrong key, an unknown template and an unknown sandbox are told apart",
    "templates": "whether a template exists, and its tags",
    "volumes": "a volume is filled from outside, mounted into two sandboxes, and outlives them",
    "secrets": "a secret is stored, listed and replaced; its value never comes back",
}

# What the code interpreter's clients are tried with, in the template `code-interpreter-v1`.
INTERPRETER_SCENARIOS: dict[str, str] = {
    "code_results": "values, tables, html, markdown and pictures of a cell; which one is the main result; variables stay",
    "code_charts": "line, scatter, bar, pie and box charts as data; several axes",
    "code_languages": "Python, JavaScript, TypeScript and bash; another one is refused",
    "code_errors": "an error's name, text and traceback; the context goes on",
    "code_streaming": "output, results and errors are told as they come",
    "code_contexts": "make, list, use, restart and remove contexts; they do not see each other",
    "code_variables": "variables of the sandbox and of one cell",
    "code_timeout": "a cell over its time is interrupted, its context is not",
    "code_lives": "variables survive a pause; forks go on with them and diverge",
}

# What the command line client is tried with.
CLI_SCENARIOS: dict[str, str] = {
    "cli_sandboxes": "create, list, info, pause, resume and kill",
    "cli_exec": "run a command: its output, exit code, folder, user, variables and piped input",
    "cli_logs_and_metrics": "logs and metrics of a sandbox",
    "cli_terminal": "connect a terminal, type, leave",
    "cli_snapshots": "create, list and delete a snapshot",
    "cli_templates": "list, publish, unpublish and delete templates",
}

Kind = Literal["python", "python-async", "javascript", "cli"]


@dataclass(frozen=True, slots=True)
class Client:
    """One release of one official client.

    `domain` ones are tried through a domain with TLS: the first, and the code interpreter's before 2.9, know no other way, and 2.20
    leaves the sandbox's id out of what it sends to a sandbox that it connected to by `E2B_SANDBOX_URL`.
    """

    kind: Kind
    package: str
    version: str
    fast: bool = False
    domain: bool = False
    along: tuple[str, ...] = ()  # what else is installed: a package of its time that it needs

    @property
    def name(self) -> str:
        """As the results and the tests call it."""
        return f"{self.package} {self.version}{_SUFFIX[self.kind]}"

    @property
    def scenarios(self) -> dict[str, str]:
        """What it is tried with."""
        if self.kind == "cli":
            return CLI_SCENARIOS
        if self.is_interpreter:
            return INTERPRETER_SCENARIOS
        if self.kind == "javascript" and not EVERYTHING:
            return {name: SCENARIOS[name] for name in FAST_JAVASCRIPT}
        return SCENARIOS

    @property
    def is_interpreter(self) -> bool:
        """Whether it is a client of the code interpreter."""
        return self.package.endswith("code-interpreter")

    @property
    def folder(self) -> str:
        """Where it is installed, below the folder of clients; both Python kinds share one."""
        ecosystem = "npm" if self.kind in ("javascript", "cli") else "pypi"
        return f"{ecosystem}-{self.package.replace('@', '').replace('/', '-')}-{self.version}"


_SUFFIX: dict[Kind, str] = {
    "python": " (Python)",
    "python-async": " (Python, async)",
    "javascript": " (JavaScript)",
    "cli": "",
}

NEWEST_PYTHON = "2.63.0"
NEWEST_JAVASCRIPT = "2.51.0"

# The newest come first: a run that is broken off has told most.
CLIENTS: tuple[Client, ...] = (
    Client("python", "e2b", NEWEST_PYTHON, fast=True),
    Client("javascript", "e2b", NEWEST_JAVASCRIPT, fast=True),
    Client("python-async", "e2b", NEWEST_PYTHON),
    Client("cli", "@e2b/cli", "2.19.0"),
    Client("python", "e2b-code-interpreter", "2.11.5"),
    Client("javascript", "@e2b/code-interpreter", "2.8.0"),
    Client("python-async", "e2b-code-interpreter", "2.11.5"),
    Client("python", "e2b-code-interpreter", "2.4.1", domain=True, along=("e2b==2.7.0",)),  # it uses inner parts of that e2b
    Client("python", "e2b", "2.45.1"),
    Client("javascript", "e2b", "2.45.0"),
    Client("python", "e2b", "2.20.3", domain=True),
    Client("python", "e2b", "1.0.0", domain=True),
    Client("python", "e2b", "1.5.6", domain=True),
    Client("python", "e2b", "2.3.6", domain=True),
    Client("python-async", "e2b", "2.45.1"),
)

# What a release cannot do against any current server, and why: (client, scenario).
KNOWN_LIMITS: dict[tuple[str, str], str] = {
    ("e2b 1.0.0 (Python)", scenario): "this release refuses answers with fields it does not know, and entries have had more since"
    for scenario in ("file_tree", "watch_folder")
}

# Of these, introspection tells whether every public method is called.
NEWEST_CLIENTS = tuple(client for client in CLIENTS if client.package == "e2b" and client.version in (NEWEST_PYTHON, NEWEST_JAVASCRIPT))

# What `make test` tries with JavaScript: one scenario of each kind of call.
FAST_JAVASCRIPT = (
    "create_and_kill",
    "command_result",
    "standard_input",
    "file_contents",
    "watch_folder",
    "terminal",
    "connect",
    "list_and_filter",
    "pause_and_resume",
    "fork",
    "kill_during_command",
    "errors",
)
