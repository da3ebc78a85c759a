"""Variables of a Dockerfile: who gives them, which one wins, and words with them replaced.

ENV wins over ARG. An ARG has the value that the caller gives, else its own, else that of the same name before the first FROM.
The platform's are known before the first FROM; those of proxies need no ARG, and never make a cached step useless.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from e2b_dockerfile_utils import ShellLex

from agentenv.core.errors import InvalidInput

PLATFORM = "linux/amd64"
PLATFORM_ARGUMENTS: Mapping[str, str] = {
    **{f"{side}PLATFORM": PLATFORM for side in ("TARGET", "BUILD")},
    **{f"{side}OS": "linux" for side in ("TARGET", "BUILD")},
    **{f"{side}ARCH": "amd64" for side in ("TARGET", "BUILD")},
    **{f"{side}VARIANT": "" for side in ("TARGET", "BUILD")},
}
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""What programs have where nothing sets PATH (`native/crates/envd/src/process/spawn.rs`): ENV goes on from it."""
UNKNOWN = "\0"
"""Around the name of a variable in a word that nobody can know yet: no Dockerfile holds it."""
PROXY_ARGUMENTS = frozenset(
    name for plain in ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY") for name in (plain, plain.lower())
)


@dataclass(frozen=True, slots=True)
class Scope:
    """What words of one stage see. `given` are the caller's arguments, `outer` those before the first FROM."""

    escape: str
    given: Mapping[str, str]
    outer: Mapping[str, str]
    env: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, str] = field(default_factory=dict)
    unset: frozenset[str] = frozenset()  # arguments without a value
    is_guess: bool = False  # the base's own variables are not known

    def argument(self, name: str, default: str | None) -> str | None:
        """The value that `ARG name` or `ARG name=default` gives; None: it stays unset."""
        if name in self.given:
            return self.given[name]
        return self.outer.get(name) if default is None else default

    def proxies(self) -> dict[str, str]:
        """What the caller gives of the arguments that need no ARG."""
        return {name: value for name, value in self.given.items() if name in PROXY_ARGUMENTS}

    def variables(self) -> dict[str, str]:
        """All that a word sees."""
        known = {**self.proxies(), **self.arguments, **self.env}
        return _Guessed(known, self.unset) if self.is_guess else {"PATH": DEFAULT_PATH, **known}

    def word(self, text: str) -> str:
        """A word without its quotes and escapes, its variables replaced. InvalidInput."""
        return _lexed(ShellLex(self.escape, env=self.variables(), skip_unset_env=False), text)

    def heredoc(self, text: str) -> str:
        """The text of a heredoc with its variables replaced; quotes are plain text there. InvalidInput."""
        return _lexed(ShellLex("\\", skip_process_quotes=True, env=self.variables(), skip_unset_env=False), text)


class _Guessed(dict[str, str]):
    """Variables of which some are the base's, which is not known: they are marked instead of left out."""

    def __init__(self, known: Mapping[str, str], unset: frozenset[str]) -> None:
        super().__init__(known)
        self._unset = unset

    def get(self, key: str, default: object = None) -> str | None:  # type: ignore[override]
        """The value, a mark, or None for what is known to have none."""
        return super().get(key, None if key in self._unset else f"{UNKNOWN}{key}{UNKNOWN}")


def _lexed(lexer: ShellLex, text: str) -> str:
    try:
        return lexer.process_word(text)
    except ValueError as error:
        raise InvalidInput(str(error)) from error
