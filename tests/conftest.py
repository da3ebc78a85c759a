"""For every test: the signals a person's terminal would give, and the one real node of a run.

The real node is server, blockd, QEMU guests and the official clients, on this machine. It keeps its downloads and its base template
in one home between runs (`AENV_TEST_HOME`), so that only the first run pays for them; with `AENV_TEST_RUN` and `AENV_TEST_POOL_CIDR`
set too, two checkouts can run side by side. A missing prerequisite fails; nothing is skipped. After the last test the machine is
searched for remains.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from e2e_node import HOME, POOL_CIDR, RUN, Node, free_port, remains

# A run started by nohup or in the background ignores some.
signal.signal(signal.SIGINT, signal.default_int_handler)
for _ignored in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(_ignored, signal.SIG_DFL)


@pytest.fixture(scope="session")
def node() -> Iterator[Node]:
    """The node of this run; brought down and searched for remains in the end."""
    assert os.geteuid() == 0, "end-to-end tests need root (namespaces, FUSE, tap devices)"
    port = free_port()
    registries = (f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}")
    environment = os.environ | {
        "AENV_NODE_HOME": str(HOME),
        "AENV_NODE_RUN": str(RUN),
        "AENV_NETWORK_POOL_CIDR": POOL_CIDR,
        "AENV_WARM_SANDBOXES": "0",  # tests count what exists; those of VMs that stand ready say so themselves
        "AENV_LIMITS_LAYERS_IN_CHAIN": "5",  # so that ten cycles meet merged chains, too
        "AENV_IMAGES_INSECURE_REGISTRIES": ",".join(registries),
        "AENV_LIMITS_BUILD_FETCH_PRIVATE": "127.0.0.1",  # where tests serve what ADD fetches
        "NO_COLOR": "1",
    }
    subject = Node(port, environment, {}, registries)
    subject.aenv("down", "--kill", timeout=300)
    assert remains() == {}, "remains of an earlier run could not be removed"
    subject.up()
    subject.variables = json.loads(subject.aenv("env", "--json").stdout)
    yield subject
    subject.aenv("down", "--kill", timeout=300)
    left = remains()
    assert left == {}, f"left on the machine: {left}"
    kept = HOME / "layers"
    assert kept.is_dir()


@pytest.fixture(scope="session")
def interpreter_node(node: Node) -> Node:
    """The node with the template of the code interpreter: made once per home."""
    template = "code-interpreter-v1"
    names = [name for found in json.loads(node.aenv("templates", "--json").stdout) for name in found["aliases"]]
    if template not in names:
        node.aenv("down", timeout=300)
        node.aenv("up", "--detach", "--port", str(node.port), "--template", template, timeout=2400)
    return node


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several workers (`pytest -n 2`) all that needs the node runs in one of them, for there is one node; the rest beside it."""
    from xdist.scheduler import LoadScopeScheduling

    class OneNode(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]  # the tests of a file share what it sets up
            return "node" if path.startswith(("tests/e2e/", "tests/conformance/")) else path

    return OneNode(config, log)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A failed test keeps the last log lines of its nodes' servers and blockds in its report."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.failed and report.when == "call":
        homes = {value.home for value in item.funcargs.values() if isinstance(value, Node)} if isinstance(item, pytest.Function) else set()
        for log in sorted(home / "log" / name for home in homes for name in ("server.log", "blockd.log")):
            if log.exists():
                report.sections.append((f"end of {log}", "\n".join(log.read_text(errors="replace").splitlines()[-60:])))
