"""The graph above and below an artifact: every edge once, nearest first."""

from __future__ import annotations

from pathlib import Path

from nemotron_steps.artifacts.lineage import lineage
from nemotron_steps.artifacts.models import Edge, Producer
from nemotron_steps.artifacts.store import ArtifactStore


def commit(store: ArtifactStore, name: str, *edges: tuple[str, str]) -> None:
    with store.staging() as folder:
        (folder / "tree").mkdir()
        (folder / "tree" / "train.jsonl").write_text(f'{{"name": "{name}"}}\n')
        inputs = [Edge(port, store.find(parent).digest, store.find(parent).ref) for port, parent in edges]
        producer = Producer(f"make/{name}", "out", f"run-{name}") if edges else None
        store.commit(folder / "tree", "training_jsonl", name=name, inputs=inputs, producer=producer)


def test_edges_are_told_nearest_first_and_one_for_each_port(store: ArtifactStore, tmp_path: Path) -> None:
    commit(store, "z")
    commit(store, "y", ("rows", "z"))
    commit(store, "x", ("rows", "y"), ("base", "y"))
    commit(store, "w", ("rows", "x"), ("first", "z"))
    commit(store, "a", ("rows", "w"))
    above = [(link.parent, link.child, link.port) for link in lineage(store, store.find("a")).ancestors]
    assert above == [
        ("w:v1", "a:v1", "rows"),
        ("x:v1", "w:v1", "rows"),
        ("z:v1", "w:v1", "first"),
        ("y:v1", "x:v1", "rows"),
        ("y:v1", "x:v1", "base"),
        ("z:v1", "y:v1", "rows"),
    ]
    below = lineage(store, store.find("z")).descendants
    assert [(link.parent, link.child) for link in below] == [
        ("z:v1", "w:v1"),
        ("z:v1", "y:v1"),
        ("w:v1", "a:v1"),
        ("y:v1", "x:v1"),
        ("y:v1", "x:v1"),
        ("x:v1", "w:v1"),
    ]
    assert {(link.step, link.run) for link in below if link.child == "x:v1"} == {("make/x", "run-x")}
