"""Reply bodies of images and layers. Pure functions of the model."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from typing_extensions import TypedDict

from agentenv.core.clock import rfc3339
from agentenv.core.images import Image
from agentenv.image.push import Pushed
from agentenv.orchestrator.layer_uses import LayerUse
from agentenv.orchestrator.verify import Verified


class ImageLayerView(TypedDict):
    """One layer of an image; `diffID` is empty for the file system that all images begin with."""

    layerID: str
    diffID: str
    sizeBytes: int


class ImageView(TypedDict):
    """An image of the node. `sizeBytes` counts layers that it shares with others, too."""

    digest: str
    names: list[str]
    platform: str
    sizeBytes: int
    imported: bool
    createdAt: str
    usedAt: str
    config: dict[str, Any]
    layers: list[ImageLayerView]


class LayerUseView(TypedDict):
    """A layer and what uses it, each as `<kind> <name>`."""

    layerID: str
    sizeBytes: int
    users: list[str]


class PushedView(TypedDict):
    """An image that was pushed. Its layers are overlaybd's."""

    reference: str
    digest: str
    sizeBytes: int
    layers: list[dict[str, Any]]


def pushed_view(pushed: Pushed) -> PushedView:
    """What a registry has now."""
    return {
        "reference": pushed.reference,
        "digest": pushed.digest,
        "sizeBytes": sum(layer.size_bytes for layer in pushed.layers),
        "layers": [{"digest": layer.digest, "sizeBytes": layer.size_bytes} for layer in pushed.layers],
    }


def image_view(image: Image) -> ImageView:
    """Everything that is recorded of an image."""
    config = {key: value for key, value in asdict(image.config).items() if value and key != "diff_ids"}
    return {
        "digest": image.digest,
        "names": list(image.names),
        "platform": str(image.platform),
        "sizeBytes": image.size_bytes,
        "imported": image.imported,
        "createdAt": rfc3339(image.created_at_ms),
        "usedAt": rfc3339(image.used_at_ms),
        "config": {_CONFIG_NAMES[key]: value for key, value in config.items()},
        "layers": [{"layerID": layer.layer_id, "diffID": layer.diff_id, "sizeBytes": layer.size_bytes} for layer in image.layers],
    }


_CONFIG_NAMES = {
    "env": "Env",
    "entrypoint": "Entrypoint",
    "cmd": "Cmd",
    "user": "User",
    "working_dir": "WorkingDir",
    "exposed_ports": "ExposedPorts",
    "labels": "Labels",
    "stop_signal": "StopSignal",
    "shell": "Shell",
    "volumes": "Volumes",
}
"""The fields of a configuration as image configurations themselves call them."""


def layer_use_view(layer: LayerUse) -> LayerUseView:
    """A layer as lists show it."""
    return {"layerID": layer.layer_id, "sizeBytes": layer.size_bytes, "users": list(layer.users)}


class VerifiedView(TypedDict):
    """A layer that was compared: `intact`, `noted` (for the first time), `remote`, `written`, `damaged` or `mended`."""

    layerID: str
    state: str
    message: str
    users: list[str]


def verified_view(verified: Verified) -> VerifiedView:
    """What was found."""
    return {"layerID": verified.layer_id, "state": verified.state, "message": verified.told, "users": list(verified.users)}
