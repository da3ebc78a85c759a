"""Limits of a process, in processes of their own: a limit once lowered would stay with the test run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, resource, sys
from agentenv.host.process_limits import raise_open_files
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


SIZES = """
import os, resource, subprocess, sys
from agentenv.core.errors import HostNotReady
from agentenv.host.process_limits import lift_file_size
soft, hard, user = (int(a) << 20 if i < 2 and int(a) > 0 else int(a) for i, a in enumerate(sys.argv[1:]))
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
if user:
    os.setuid(user)
try:
    lift_file_size(64 << 20)
except HostNotReady as error:
    print("refused", error.message)
else:  # a child inherits it; one that any user may run
    said = subprocess.run(["/bin/cat", "/proc/self/limits"], capture_output=True, text=True, check=True).stdout
    soft = next(line.split()[3] for line in said.splitlines() if line.startswith("Max file size"))
    print(soft if soft == "unlimited" else int(soft) >> 20)
"""


@pytest.mark.parametrize(
    ("soft", "hard", "user", "expected"),
    [
        (-1, -1, 65534, "unlimited"),
        (16, -1, 65534, "unlimited"),
        (16, 128, 65534, "128"),
        (16, 32, 65534, "refused files may be 32 MiB at most here"),
        (16, 32, 0, "unlimited" if MAY_RAISE else "refused"),
    ],
)
def test_files_may_grow_to_the_size_of_a_disk(root, soft, hard, user, expected):
    """E13: the limit of the shell that starts the node must not end the disks of its guests."""
    done = subprocess.run([sys.executable, "-c", SIZES, str(soft), str(hard), str(user)], capture_output=True, text=True, check=True)
    assert done.stdout.strip().startswith(expected)
