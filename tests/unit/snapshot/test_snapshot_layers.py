from __future__ import annotations

from pathlib import Path

from agentenv.core.paths import NodePaths
from agentenv.snapshot import capture
from agentenv.snapshot.layers import LayerStore


def test_names_of_files(tmp_path: Path) -> None:
    layers = LayerStore(tmp_path / "layers")
    layer = layers.new_id()
    assert layers.id_of(layers.path(layer)) == layer
    upper = layers.upper(layer)
    assert (upper.data, upper.index.parent) == (layers.path(layer), tmp_path / "layers")
    assert layers.paths([layer, "b"]) == [layers.path(layer), layers.path("b")]


def test_a_layer_with_its_index_goes_as_one_and_only_when_nobody_needs_it(tmp_path: Path) -> None:
    layers = LayerStore(tmp_path / "layers")
    for layer in ("kept", "announced", "gone"):
        layers.path(layer).write_bytes(b"x" * 8192)
        layers.upper(layer).index.write_bytes(b"x")
    (tmp_path / "layers" / "gone.lsmt.tmp").write_bytes(b"half written by a server that was killed")
    with layers.announced("announced"):
        doomed = layers.unneeded(layers.files(), {"kept"})
        assert {path.name for path in doomed} == {"gone.lsmt", "gone.index", "gone.lsmt.tmp"}
        assert layers.delete(doomed) >= 8192
        assert layers.delete(doomed) == 0
    assert {path.name for path in layers.unneeded(layers.files(), {"kept"})} == {"announced.lsmt", "announced.index"}
    assert layers.used_bytes() >= 16384


def test_an_announcement_counts_those_who_make_it(tmp_path: Path) -> None:
    layers = LayerStore(tmp_path / "layers")
    layers.path("a").touch()
    with layers.announced("a", "b"):
        with layers.announced("a"):
            pass
        assert layers.unneeded(layers.files(), set()) == []
    assert layers.unneeded(layers.files(), set()) == [layers.path("a")]


def test_removing_a_snapshot_twice_is_fine(tmp_path: Path) -> None:
    paths = NodePaths(tmp_path / "home", tmp_path / "run")
    assert capture.snapshot_ids(paths) == []
    state = capture.state_file(paths, "s1")
    state.parent.mkdir(parents=True)
    state.touch()
    assert capture.snapshot_ids(paths) == ["s1"]
    for _ in range(2):
        capture.remove(paths, "s1")
    assert capture.snapshot_ids(paths) == []
