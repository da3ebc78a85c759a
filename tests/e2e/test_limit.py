"""What the figures are held against: the bare VMM restores the node's own template and runs a command, with nothing of ours between."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).parents[2] / "tools"
MEASURE = """
import sys
sys.path.insert(0, sys.argv[1])
from agentenv.config.load import load
from limit import for_node, restore_and_run
bare = for_node(load())
try:
    print(restore_and_run(bare, "echo hello"))
finally:
    bare.close()
"""


def test_the_limit_is_measured_beside_a_running_node(node):
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(TOOLS)], env=node.environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0
