"""Variables in the arguments of steps, as Dockerfiles have them: `$NAME`, `${NAME}`, `${NAME:-word}` and its like, and `\\$`.

`:-`, `:+`, `:?`, the same without the colon, `#`, `##`, `%`, `%%`, `/` and `//` are BuildKit's. Quotes and other backslashes are plain
text: whoever made the step has dealt with them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from e2b_dockerfile_utils import ShellLex

from agentenv.core.errors import InvalidInput

_REFERENCE = re.compile(r"\\\$|\$(?:(?P<plain>[A-Za-z_][A-Za-z0-9_]*)|\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<more>\}|:?[-+?]|[#%/]))")


def names_in(text: str) -> set[str]:
    """The variables that `text` refers to, those in words of `${NAME:-word}` included."""
    return {name for match in _REFERENCE.finditer(text) if (name := match["plain"] or match["name"])}


def expand(text: str, variables: Mapping[str, str]) -> str:
    """`text` with its variables replaced; one that is not set is empty. What is no reference stays as it is. InvalidInput (`:?`)."""
    expanded, at = "", 0
    while match := _REFERENCE.search(text, at):
        expanded, end = expanded + text[at : match.start()], match.end()
        if match[0] == "\\$":
            expanded += "$"
        elif match["more"] in (None, "}"):
            expanded += variables.get(match["plain"] or match["name"], "")
        elif (closed := _end_of(text, match.end())) is None:
            expanded += match[0]
        else:
            end = closed
            expanded += _modified(text[match.start() : end], variables)
        at = end
    return expanded + text[at:]


def _end_of(text: str, at: int) -> int | None:
    """Where the braces end that are open at `at`."""
    depth = 1
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text.startswith("${", at):
            depth, at = depth + 1, at + 1
        elif text[at] == "}":
            depth -= 1
            if not depth:
                return at + 1
        at += 1
    return None


def _modified(reference: str, variables: Mapping[str, str]) -> str:
    try:
        return ShellLex("\\", skip_process_quotes=True, env=variables, skip_unset_env=False).process_word(reference)
    except ValueError as error:
        raise InvalidInput(str(error)) from error
