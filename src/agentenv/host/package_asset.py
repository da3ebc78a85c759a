"""Assets made from one Debian package: the newest one in the cache, else fetched and made.

Invariant: once cached, an asset is used without any look at the network, so that snapshots made with it stay restorable.
An asset's facts say under `wanted` which suite and package it answers to.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from agentenv.host.asset_cache import Asset, AssetCache, Facts
from agentenv.host.command import Progress
from agentenv.host.debian import PrivateApt

Recipe = tuple[str, Callable[[Path], Facts]]
"""The version of the package, and what makes the asset in an empty folder and returns its facts."""


def package_asset(
    cache: Path,
    kind: str,
    package: str,
    suite: str,
    recipe: Callable[[PrivateApt], Recipe],
    *,
    apt: PrivateApt | None,
    refresh: bool,
    verify: bool,
    progress: Progress,
) -> Asset:
    """The asset `<kind>-<version>` of `package` from `suite`; `recipe` is asked once apt knows what there is.

    `refresh` looks for a newer version first, `verify` compares full checksums of cached files. Raises HostNotReady (no
    mirror), Unavailable (network), NotFound (no such package), and what the recipe raises.
    """
    assets = AssetCache(cache)
    wanted = [suite, package]
    if not refresh:
        for asset in assets.candidates(f"{kind}-"):
            if asset.facts.get("wanted") == wanted and (found := assets.find(asset.path.name, verify=verify)):
                return found
    apt = apt or PrivateApt.for_suite(cache / "apt", suite)
    apt.update(progress)
    version, make = recipe(apt)
    name = f"{kind}-{version.replace('~', '-').replace(':', '-')}"
    return assets.ensure(name, lambda folder: {"wanted": wanted, **make(folder)}, verify=verify)
