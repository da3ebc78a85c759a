"""Writes the reference pages that are made from the code, so that no fact stands in two places.

    python tools/gen_docs.py            write what is stale
    python tools/gen_docs.py --check    write nothing; exit 1 and name the pages when any is stale

Invariant: the output depends on the code alone (no time, no machine, no terminal), so a check means the same anywhere.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]

import click  # noqa: E402

from agentenv.cli.commands import sandbox  # noqa: E402
from agentenv.cli.exits import EXIT_CODES  # noqa: E402
from agentenv.cli.main import cli  # noqa: E402
from agentenv.cli.verb import SECTIONS, aliases_of, section_of, walk  # noqa: E402
from agentenv.config.reference import default_toml, reference_page  # noqa: E402
from agentenv.core import meetings  # noqa: E402
from agentenv.core.errors import AgentEnvError, all_errors  # noqa: E402
from agentenv.core.lifecycle import TRANSITIONS, VISIBLE, State  # noqa: E402
from conformance_page import conformance_page  # noqa: E402

NOTE = "<!-- Made by `make docs` from the code; edit the code, not this page. -->\n\n"
HELP_WIDTH = 100


def cli_page() -> str:
    """Every command with its help text, by section, and the exit codes."""
    context = click.Context(cli, info_name="aenv")
    verbs = [(path, verb) for path, verb in walk(cli, context) if path[0] != sandbox.command.name]
    parts = [
        "# The `aenv` command\n",
        "Data goes to standard output, messages to standard error. Every command that reads has `--json`.",
        "A sandbox may be named by the beginning of its id as long as only one begins so.",
        "`NO_COLOR` turns colours and live progress bars off.\n",
        "The words are those of the E2B command line, its options and short names included; `sandbox` may be left out:",
        "`aenv sandbox kill ID`, `aenv sbx kl ID` and `aenv kill ID` are the same. JSON has the field names of the API.",
        "There is nothing to log in to: the key of a node is in its home, and the commands read it there.\n",
        "Commands talk to the node of this machine. Where they are set, the variables of the E2B SDKs win:",
        "`E2B_API_URL`, `E2B_SANDBOX_URL`, `E2B_DOMAIN`, `E2B_API_KEY`.\n",
        "## Exit codes\n",
        "| code | meaning |\n|---|---|",
        *(f"| {code.value} | {meaning} |" for code, meaning in EXIT_CODES.items()),
        "\n`aenv exec`, `aenv connect` and `aenv create` end with the exit code of what they ran.",
    ]
    for section in SECTIONS:
        parts.append(f"\n## {section}")
        for path, verb in verbs:
            if section_of(verb) == section:
                parts.append(f"\n### aenv {' '.join(path)}\n{_aliases(path, verb)}\n```text\n{_help(path, verb)}\n```")
    return "\n".join(parts) + "\n"


def _aliases(path: tuple[str, ...], verb: click.Command) -> str:
    words = ["`" + " ".join(("aenv", *path[:-1], alias)) + "`" for alias in aliases_of(verb)]
    return f"\nAlso {', '.join(words)}.\n" if words else ""


def _help(path: tuple[str, ...], verb: click.Command) -> str:
    parent = click.Context(cli, info_name=" ".join(("aenv", *path[:-1])), **cli.context_settings)
    context = click.Context(verb, info_name=path[-1], parent=parent, terminal_width=HELP_WIDTH, max_content_width=HELP_WIDTH)
    return "\n".join(line.rstrip() for line in verb.get_help(context).splitlines())


def lifecycle_page() -> str:
    """The states of a sandbox as a diagram and a table."""
    lines = [
        "# Life of a sandbox\n",
        "Every arrow names the action that makes it; there are no others.\n",
        "```mermaid\nstateDiagram-v2\n    [*] --> creating",
        *(f"    {old} --> {new}: {action}" for (old, new), action in TRANSITIONS.items()),
        f"    {State.KILLED} --> [*]\n```\n",
        "| state | the API says | leads to |\n|---|---|---|",
    ]
    for state in State:
        following = ", ".join(f"`{new}` ({action})" for (old, new), action in TRANSITIONS.items() if old is state)
        lines.append(f"| `{state}` | {VISIBLE.get(state, 'not found')} | {following or 'nothing: it is the end'} |")
    return "\n".join([*lines, *_meetings()]) + "\n"


def _meetings() -> list[str]:
    """The tables of calls that meet at one sandbox."""
    lines = [
        "\n## When calls meet\n",
        *(inspect.getdoc(meetings) or "").splitlines()[2:],
        "\nWhat each does to a sandbox, by what it is when the call's turn comes:\n",
        "| | running | paused | ended |\n|---|---|---|---|",
    ]
    for verb, outcomes in meetings.OUTCOMES.items():
        cells = (_outcome(outcomes[state]) for state in (State.RUNNING, State.PAUSED, State.KILLED))
        lines.append(f"| {verb} | {' | '.join(cells)} |")
    for found in (State.RUNNING, State.PAUSED):
        lines.append(f"\nTwo that meet at one that is {found}: what becomes of the second (column), which comes during the first (row).\n")
        lines.append("| | " + " | ".join(meetings.OUTCOMES) + " |\n|---|" + "---|" * len(meetings.OUTCOMES))
        for first in meetings.OUTCOMES:
            cells = (_outcome(meetings.meeting(found, first, second)) for second in meetings.OUTCOMES)
            lines.append(f"| {first} | {' | '.join(cells)} |")
    lines.append("\n`timeout` is when its time is up, by its policy. `traffic` is that of a sandbox that wakes by it (`autoResume`).")
    return lines


def _outcome(outcome: meetings.Outcome) -> str:
    return outcome.then.value if outcome.answer == "done" else outcome.answer


def errors_page() -> str:
    """Every class of error with its status and code."""
    lines = [
        "# Errors\n",
        'Every error of the API is JSON: `{"code": <HTTP status>, "message": "<cause and next step>", "error_code": "<code>"}`.',
        "The code is stable; decide by it or by the status, never by the text.\n",
        "| code | status | may be repeated as it is | meaning |\n|---|---|---|---|",
    ]
    for cls in all_errors():
        if cls is not AgentEnvError:
            meaning = (cls.__doc__ or "").strip().splitlines()[0].replace("|", "\\|")
            lines.append(f"| `{cls.code}` | {cls.status} | {'yes' if cls.retryable else 'no'} | {meaning} |")
    return "\n".join(lines) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "docs/cli.md": lambda: NOTE + cli_page(),
    "docs/settings.md": lambda: NOTE + reference_page(),
    "docs/lifecycle.md": lambda: NOTE + lifecycle_page(),
    "docs/errors.md": lambda: NOTE + errors_page(),
    "docs/conformance.md": lambda: conformance_page(ROOT / "docs"),
    "src/agentenv/config/default.toml": default_toml,
}


def stale_pages(root: Path = ROOT) -> dict[Path, str]:
    """Path and wanted text of every page below `root` that is absent or differs."""
    wanted = {root / name: make() for name, make in PAGES.items()}
    return {path: text for path, text in wanted.items() if not path.is_file() or path.read_text() != text}


def main() -> int:
    """Write, or with --check only tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit 1 when a page is stale; write nothing")
    arguments = parser.parse_args()
    stale = stale_pages()
    for path, text in stale.items():
        print(f"{'stale' if arguments.check else 'wrote'}: {path.relative_to(ROOT)}", file=sys.stderr)
        if not arguments.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if arguments.check and stale:
        print("hint: `make docs` writes them", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
