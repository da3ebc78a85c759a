"""Run in a guest before its capture, as a program of its own: lets every language do once what nearly every session does first.

The pages that this reads are then in the template's memory. It works in contexts of its own and removes them, so that the
default contexts stay as new; and not in the home folder, so that the worker that was started in advance stays, too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any
from urllib.request import Request, urlopen

_SERVER = "http://127.0.0.1:49999"
_DEADLINE_S = 600.0
_PYTHON = """
import matplotlib.pyplot as plt, numpy as np, pandas as pd
plt.plot([1, 2], label="x")
plt.title("x")
plt.legend()
plt.show()
display(pd.DataFrame({"a": [1, 2]}))
!true
"""
CELLS = {
    "python": _PYTHON,
    "javascript": "await import('fs'); console.log([1])",
    "typescript": "const a: number = 1; a",
    "bash": "true",
}


def call(path: str, body: dict[str, Any] | None = None, method: str = "POST") -> bytes:
    """One call of the server's API."""
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(_SERVER + path, data, method=method), timeout=_DEADLINE_S) as reply:
        found: bytes = reply.read()
        return found


def main() -> None:
    """Run each cell; the first that fails ends this with what it said."""
    for language, code in CELLS.items():
        context = json.loads(call("/contexts", {"language": language, "cwd": "/"}))["id"]
        said = call("/execute", {"context_id": context, "code": code})
        if b'"type": "error"' in said:
            sys.exit(f"the {language} cell failed: {said.decode()[-1000:]}")
        call(f"/contexts/{context}", method="DELETE")
    subprocess.run(["sync"], check=True)


if __name__ == "__main__":
    main()
