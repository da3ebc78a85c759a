"""`aenv gc`: free space on the node's disk."""

from __future__ import annotations

from collections import Counter

import click

from agentenv.cli.output import busy, info, print_json, print_table, size, when
from agentenv.cli.verb import json_option, verb


@verb("gc", section="Node")
@click.option("--all", "everything", is_flag=True, help="Empty the caches, however much room there is.")
@click.option("--dry-run", is_flag=True, help="Change nothing; tell what would go.")
@json_option
def command(everything: bool, dry_run: bool, as_json: bool) -> None:
    """Free space on the node's disk.

    What nothing reaches goes, and so do kernels, QEMUs and root file systems of earlier versions that nothing needs; then, if
    the disk is fuller than storage.low_percent, of the caches (disks of build steps, uploads, cache mounts and downloads of
    builds, blobs of images) what was used longest ago. Sandboxes, templates and snapshots are never touched, images only if
    storage.images_unused_days says so. The node does the same by itself above storage.high_percent. What has gone is printed.
    """
    from agentenv.cli.api import Api

    with Api() as api, busy("freeing space"):
        done = api.collect(everything, dry_run)
    if as_json:
        print_json(done)
        return
    if done["evicted"]:
        rows = [(item["kind"], item["name"], when(item["usedAt"]), size(item["sizeBytes"])) for item in done["evicted"]]
        print_table(("WHAT", "NAME", "LAST USED", "SIZE"), rows)
    counts = Counter(item["kind"] for item in done["evicted"])
    told = ", ".join(f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in counts.items()) or "nothing"
    disk = done["disk"]
    info(f"{'would free' if dry_run else 'freed'} {size(done['freedBytes'])}; of caches {told}")
    info(f"the disk has {size(disk['freeBytes'])} free of {size(disk['usedBytes'] + disk['freeBytes'])}")
