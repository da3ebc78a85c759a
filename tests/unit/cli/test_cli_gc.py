"""`aenv gc`: says what would go, lets it go, and says what has gone."""

from __future__ import annotations

import json
import os


def make_upload(server):
    path = server.orchestrator.builds.files.cache.folder / ("b" * 64)
    path.write_bytes(b"x" * 5000)
    os.utime(path, (1_700_000_000, 1_700_000_000))
    return path


def test_freeing_space(aenv, server):
    upload = make_upload(server)
    assert "freed 0 B; of caches nothing" in aenv("gc").stderr
    told = aenv("gc", "--all", "--dry-run")
    assert told.exit_code == 0
    assert "build upload  " + "b" * 64 + "  2023-11-14 22:13:20 UTC  4.9 KiB" in told.stdout
    assert "would free 4.9 KiB; of caches 1 build upload" in told.stderr
    assert "the disk has 1.0 GiB free of 2.0 GiB" in told.stderr
    assert upload.exists()
    done = json.loads(aenv("gc", "--all", "--json").stdout)
    assert (done["freedBytes"], len(done["evicted"])) == (5000, 1)
    assert not upload.exists()
