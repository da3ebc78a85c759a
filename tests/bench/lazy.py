"""What starting from an image in a registry costs: read as needed beside downloaded whole, in turn, in one run.

`.venv/bin/python tests/bench/lazy.py`, with no node up; with an `AENV_NODE_HOME` in which no earlier run has left layers that
build steps keep for a while, or fewer bytes are counted. Needs root, docker-registry and skopeo (`tools/setup.sh tests`), 6 GiB of disk and
some minutes: a template with `AENV_BENCH_LAZY_MB` (default 1024) of bytes that do not compress is made and pushed to a registry on
loopback. Then it is built from, twice, from the same registry: the time is that from the call to the answer of the first
command in the guest, the bytes are those that the registry says it sent until then. Exits 1 when a bound is broken.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "image"))

import bounds
from registry_rig import RealRegistry, real_registry
from rich.console import Console

from local_node import AENV, node

IMAGE_MB = int(os.environ.get("AENV_BENCH_LAZY_MB", "1024"))
NAME, FROM = "bench-lazy", "bench-lazy-from"
FIRST = "the first command answers"
PUSH_DEADLINE_S = 1800.0
BOUNDS = {
    "bytes read before the first command, % of the image": (15.0, "at most"),
    "time to the first command, ratio to downloading whole": (1.0, "at most"),
}
err = Console(stderr=True)


@dataclass
class Start:
    """One start from the registry."""

    seconds: float = 0.0
    sent_bytes: int = 0


def sent_bytes(place: RealRegistry) -> int:
    """What the registry says it has sent of blobs."""
    lines = (line for line in place.log.read_text().splitlines() if "http.request.method=GET" in line and "/blobs/" in line)
    return sum(int(found[1]) for line in lines if (found := re.search(r"http\.response\.written=(\d+)", line)))


def aenv(*words: str) -> str:
    """Run the command line client."""
    done = subprocess.run([str(AENV), *words], check=False, capture_output=True, text=True, timeout=PUSH_DEADLINE_S)
    if done.returncode != 0:
        sys.exit(f"aenv {' '.join(words)} ended with {done.returncode}: {done.stderr}")
    return done.stdout


@contextmanager
def fresh_node(**settings: str) -> Iterator[None]:
    """A node with these settings, and without what earlier runs have downloaded."""
    from agentenv.config.load import load

    if subprocess.run([str(AENV), "ls", "--json"], check=False, capture_output=True).returncode == 0:
        sys.exit("a node is up, with settings of its own: `aenv down` first")
    for name in ("blocks", "images"):
        shutil.rmtree(load().node.home / "cache" / name, ignore_errors=True)
    os.environ.update(settings)
    with node() as variables:
        os.environ.update(variables)
        yield


def publish(place: RealRegistry) -> dict[str, Any]:
    """An image of the wanted size in the registry."""
    from e2b import Template

    err.print(f"==> make a template with {IMAGE_MB} MiB that do not compress, and push it", highlight=False)
    fill = f"head -c {IMAGE_MB}M /dev/urandom > /opt/fill && sync"
    Template.build(Template().from_template("base").set_user("root").run_cmd(fill), NAME)
    pushed: dict[str, Any] = json.loads(aenv("image", "push", NAME, f"{place.host}/bench/lazy:1", "--json"))
    aenv("template", "delete", "--yes", NAME)
    return pushed


def start(place: RealRegistry, reference: str) -> Start:
    """Build from the image; what is measured ends when the first command has answered."""
    from e2b import Template

    aenv("gc", "--all")  # layers that build steps of an earlier run have kept
    found, answered = Start(), threading.Event()
    before, began = sent_bytes(place), time.perf_counter()

    def see(entry: Any) -> None:
        if entry.message == f"[stdout] {FIRST}":
            found.seconds = time.perf_counter() - began
            found.sent_bytes = sent_bytes(place) - before
            answered.set()

    Template.build(Template().from_image(reference).run_cmd(f"echo {FIRST}"), FROM, skip_cache=True, on_build_logs=see)
    if not answered.is_set():
        sys.exit("the build ended without the command's answer")
    aenv("template", "delete", "--yes", FROM)
    aenv("image", "remove", reference)
    return found


def measure() -> dict[str, Any]:
    """Both starts, and the size of the image."""
    with tempfile.TemporaryDirectory() as work, real_registry(Path(work) / "registry") as place:
        settings = {"AENV_IMAGES_INSECURE_REGISTRIES": json.dumps([place.host]), "AENV_IMAGES_DOWNLOAD_MB_PER_S": "0"}
        with fresh_node(**settings):
            pushed = publish(place)
        found = {}
        for name, lazy in (("as needed", "true"), ("whole", "false")):
            err.print(f"==> start from the registry, {name}", highlight=False)
            with fresh_node(AENV_IMAGES_LAZY=lazy, **settings):
                found[name] = start(place, pushed["reference"])
        return {"image_bytes": pushed["sizeBytes"]} | {name: vars(one) for name, one in found.items()}


def report(result: dict[str, Any]) -> bool:
    """Print both; False when a bound is broken."""
    out = Console()
    image_bytes, lazy, whole = result["image_bytes"], result["as needed"], result["whole"]
    for name in ("as needed", "whole"):
        seconds, sent = result[name]["seconds"], result[name]["sent_bytes"]
        out.print(f"{name}: first command after {seconds:.1f} s, {sent / 1e6:.0f} of {image_bytes / 1e6:.0f} MB sent", highlight=False)
    found = [100 * lazy["sent_bytes"] / image_bytes, lazy["seconds"] / whole["seconds"]]
    result["bounds"], good = bounds.report(out, "bounds of starting from a registry", BOUNDS, found)
    return good


if __name__ == "__main__":
    bounds.run(measure, report)
