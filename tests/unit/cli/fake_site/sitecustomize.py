"""Put on PYTHONPATH, this makes `agentenv.wiring` the fake beside it, in every Python process a test starts.

FAKE_HOST=fit skips the checks of the host in `aenv up`, which have tests of their own; `bare` has no programs.
"""

import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path


class FakeWiring(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname != "agentenv.wiring":
            return None
        return importlib.util.spec_from_file_location(fullname, Path(__file__).with_name("fake_wiring.py"))


sys.meta_path.insert(0, FakeWiring())
if os.environ.get("FAKE_HOST") == "fit":
    import agentenv.host.doctor

    agentenv.host.doctor.host_checks = lambda config: []
if os.environ.get("FAKE_HOST") == "bare":
    import agentenv.host.requirements

    agentenv.host.requirements.find_program = lambda name: None
