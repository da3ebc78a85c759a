"""The limit of open files, in processes of its own: a limit once lowered would stay with the test run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, resource, sys
from agentenv.host.open_files import raise_open_files
soft, hard, user = (int(a) for a in sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
if user:
    os.setuid(user)
print(raise_open_files(4096), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


CAP_SYS_RESOURCE = 24
MAY_RAISE = int(re.search(r"CapEff:\s+([0-9a-f]+)", Path("/proc/self/status").read_text())[1], 16) >> CAP_SYS_RESOURCE & 1


@pytest.mark.parametrize(
    ("soft", "hard", "user", "expected"),
    [
        (256, 8192, 0, 4096),
        (256, 4096, 65534, 4096),
        (256, 1024, 65534, 1024),  # an ordinary user cannot pass the hard limit
        (256, 1024, 0, 4096 if MAY_RAISE else 1024),  # root can, unless its container says no
        (6000, 8192, 65534, 6000),  # never lowered
        (1024, 1024, 65534, 1024),
    ],
)
def test_open_files_are_raised_as_far_as_allowed(root, soft, hard, user, expected):
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(soft), str(hard), str(user)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(expected)] * 2
    assert ("only" in done.stderr) == (expected < 4096)
