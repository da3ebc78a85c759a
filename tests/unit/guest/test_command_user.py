"""As whom a command runs, on its way to the guest's agent."""

from __future__ import annotations

import base64

import pytest

from agentenv.guest.commands import Command


@pytest.mark.parametrize(
    ("user", "name", "group"),
    [("root", "root", None), ("1000", "1000", None), ("app:staff", "app", "staff"), ("2000:50", "2000", "50"), ("app:", "app", None)],
)
def test_user_and_group(user: str, name: str, group: str | None):
    headers = Command(("/x",), user).headers()
    scheme, _, encoded = str(headers["Authorization"]).partition(" ")
    assert (scheme, base64.b64decode(encoded).decode()) == ("Basic", f"{name}:")
    assert headers.get("X-User-Group") == group
