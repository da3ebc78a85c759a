"""Runs scenarios with the installed release of `e2b` and tells the outcome of each as one line of JSON.

    python main.py [--asynchronous] [--interpreter] [--record] SCENARIO...

Outcomes: `pass`; `fail` with the end of the traceback; `absent` when the release has no such call. With `--record` the last line
names every public method of the SDK and which of them were called. With `--interpreter` the client is `e2b-code-interpreter`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
import traceback

import commands
import files
import interpreter
import recorder
import sandboxes
import services
from sdk import Absent, Sdk, resolve_locally

SCENARIOS = {function.__name__: function for module in (commands, files, interpreter, sandboxes, services) for function in module.SCENARIOS}


async def outcome_of(name, sdk):
    """Run one scenario."""
    began = time.monotonic()
    try:
        await SCENARIOS[name](sdk)
        outcome, detail = "pass", ""
    except Absent as reason:
        outcome, detail = "absent", str(reason)
    except Exception:  # noqa: BLE001 - whatever a scenario ends with is its outcome
        outcome, detail = "fail", traceback.format_exc()[-3000:]
    return {"scenario": name, "outcome": outcome, "detail": detail, "took_ms": round(1000 * (time.monotonic() - began))}


async def main():
    """All that were asked for, in order."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--interpreter", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("scenarios", nargs="*")
    arguments = parser.parse_args()
    if suffix := os.environ.get("CONFORMANCE_LOCAL_SUFFIX"):
        resolve_locally(suffix)
    sdk = Sdk(arguments.asynchronous, arguments.interpreter)
    record = recorder.Recorder(sdk) if arguments.record else None
    for name in arguments.scenarios:
        if name not in SCENARIOS:
            result = {"scenario": name, "outcome": "absent", "detail": "not part of this client", "took_ms": 0}
        else:
            result = await outcome_of(name, sdk)
        print(json.dumps(result), flush=True)
    if record is not None:
        print(json.dumps(record.stop()), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
    sys.stdout.flush()
    os._exit(0)  # an SDK's left-over thread must not hold the end up
