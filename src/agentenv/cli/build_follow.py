"""A build as it is followed: step by step, as lines or as bars, until it ends. Leaving does not end it."""

from __future__ import annotations

import re
import sys
import time
from typing import TYPE_CHECKING, Any

from agentenv.cli.exits import CliError
from agentenv.cli.output import ProgressReport, info, is_fancy, print_json_line, warn

if TYPE_CHECKING:
    from agentenv.cli.api import Api

POLL_S = 0.3
_PAGE = 100  # entries the node gives at once
_STEP = re.compile(r"\[(?P<place>[^\]]*\d+/\d+)\] (?P<cached>CACHED )?(?P<text>.*)", re.DOTALL)
_SHOWN_CHARS = 100  # of a step's text
_OUTPUT = re.compile(r"\[(stdout|stderr)\] ")


class BuildFailed(CliError):
    """The build came to nothing. `on_build`: with files of the context for these instructions of base images it may work, by line."""

    def __init__(self, message: str, hint: str, on_build: dict[int, list[str]]) -> None:
        super().__init__(message, hint)
        self.on_build = on_build


def follow(api: Api, template_id: str, build_id: str, as_json: bool) -> None:
    """Show what a build says until it ends. BuildFailed when it fails; Ctrl-C leaves, and says how to come back."""
    shown = _show_for(as_json)
    offset = 0
    try:
        with shown:
            while True:
                status = api.build_status(template_id, build_id, offset)
                entries = status["logEntries"]
                offset += len(entries)
                for entry in entries:
                    shown.entry(entry)
                if status["status"] in ("ready", "error") and not entries:
                    break
                if len(entries) < _PAGE:
                    time.sleep(POLL_S)
            if status["status"] == "error":
                raise BuildFailed(*_told(status, build_id))
    except KeyboardInterrupt:
        info(f"\nthe build goes on: `aenv template logs {build_id}` follows it")
        raise


def _told(status: dict[str, Any], build_id: str) -> tuple[str, str, dict[int, list[str]]]:
    reason = status.get("reason") or {}
    message = str(reason.get("message") or "the build failed and said nothing")
    hint = f"`aenv template logs {build_id}` shows all it said; a new build goes on from the last step that is cached"
    return message, hint, {int(line): list(held) for line, held in (reason.get("onBuild") or {}).items()}


class _Lines:
    """Plain lines on stderr, numbered by step."""

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def entry(self, entry: dict[str, Any]) -> None:
        """Show one entry."""
        message, step = str(entry["message"]), str(entry.get("step") or "")
        if entry["level"] == "error":
            return  # the failure itself is told in the end
        if entry["level"] == "warn":
            warn(message)
        elif found := _STEP.fullmatch(message):
            info(f"#{step} [{found['place']}] {_short(found['text'])}")
            if found["cached"]:
                info(f"#{step} CACHED")
        else:
            info(f"#{step or '-'} {_OUTPUT.sub('', message)}")


class _Bars:
    """One line for each step with the time it took. What programs print is not shown: a failure brings the end of it."""

    def __init__(self) -> None:
        self._report = ProgressReport()

    def __enter__(self) -> _Bars:
        self._report.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._report.__exit__(kind, error, trace)

    def entry(self, entry: dict[str, Any]) -> None:
        """Show one entry."""
        message = str(entry["message"])
        if found := _STEP.fullmatch(message):
            self._report(f"[{found['place']}] {found['cached'] or ''}{_short(found['text'])}")
        elif entry["level"] != "error" and not _OUTPUT.match(message):
            self._report(_short(message))


class _Json:
    """One JSON document for each entry on stdout."""

    def __enter__(self) -> _Json:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def entry(self, entry: dict[str, Any]) -> None:
        """Show one entry."""
        print_json_line(entry)


def _show_for(as_json: bool) -> _Lines | _Bars | _Json:
    if as_json:
        return _Json()
    return _Bars() if is_fancy(sys.stderr) else _Lines()


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARS else f"{line[:_SHOWN_CHARS]}..."
