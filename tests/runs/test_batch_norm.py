"""Statistics of batch norm outside the edit: one checkpoint tests the same, with any number of workers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.tiny import tensors_of, without_pictures

from fedgraft.config.load import load
from fedgraft.run.adapted import adapted
from fedgraft.run.loop import run
from fedgraft.run.predict import evaluate_run

RESNET = [
    "data.source=digits",
    "data.limit=120",
    "data.image_size=16",
    "model.name=resnet18:width=4",
    "partition.clients=2",
    "rounds.fraction=1.0",
    "rounds.total=2",
    "rounds.evaluate_every=1",
    "local.steps=2",
    "local.batch_size=8",
    "engine=reference",
]
SPARSE = ["trainable.kind=sparse", "trainable.sparse.samples=16", "trainable.sparse.rounds=1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["trainable.kind=head"], ["trainable.kind=last_blocks", "trainable.blocks=1"], SPARSE]
)
def test_a_checkpoint_tests_the_same_with_one_and_two_workers(words: list[str], tmp_path: Path) -> None:
    with without_pictures():
        found = [run(load(None, [*RESNET, *words, f"workers={n}"]), tmp_path / str(n), console=False) for n in (1, 2)]
    assert found[0]["test"] == found[1]["test"]
    ours, theirs = (tensors_of(tmp_path / str(n)) for n in (1, 2))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    again = evaluate_run(tmp_path / "2", None)
    assert (again.accuracy, again.count) == (found[0]["test"]["accuracy"], found[0]["test"]["count"])
    model = adapted(tmp_path / "1")
    inside = {part.name for part in model.opening.space.buffers}
    untouched = [t for n, t in model.network.named_buffers() if n.endswith("running_var") and n not in inside]
    assert untouched and all(bool((t == 1).all()) for t in untouched)  # as the network was made
