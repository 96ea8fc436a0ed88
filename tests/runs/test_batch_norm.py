"""Statistics of batch norm outside the edit: one checkpoint tests the same, with any number of workers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.tiny import tensors_of, without_pictures

from fedgraft.config.load import load
from fedgraft.runs.adapted import adapted
from fedgraft.runs.loop import run
from fedgraft.runs.predict import evaluate_run
from fedgraft.runs.setup import setup_of

LONE = [
    "data.source=digits",
    "data.limit=120",
    "data.image_size=8",
    "model.name=resnet18:width=4",
    "rounds.fraction=1.0",
    "rounds.total=2",
    "rounds.evaluate_every=1",
    "engine=reference",
    "trainable.kind=everything",
    "data.validation=0.1",
]
"""Images so small that the last stage of the network sees maps of one pixel."""
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
        summaries = [
            run(load(None, [*RESNET, *words, f"workers={n}"]), tmp_path / str(n), console=False) for n in (1, 2)
        ]
    assert summaries[0]["test"] == summaries[1]["test"]
    ours, theirs = (tensors_of(tmp_path / str(n)) for n in (1, 2))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    again = evaluate_run(tmp_path / "2", None)
    assert (again.accuracy, again.count) == (summaries[0]["test"]["accuracy"], summaries[0]["test"]["count"])
    model = adapted(tmp_path / "1")
    inside = {part.name for part in model.opened.space.buffers}
    untouched = [t for n, t in model.network.named_buffers() if n.endswith("running_var") and n not in inside]
    assert untouched and all(bool((t == 1).all()) for t in untouched)  # as the network was made


@pytest.mark.parametrize(
    "words", [["local.steps=1", "local.batch_size=1"], ["local.epochs=1", "local.batch_size=EPOCH"]]
)
def test_a_batch_of_one_image_trains_where_maps_have_one_pixel(words: list[str], tmp_path: Path) -> None:
    """A client with n images and batches of n - 1 meets its last image alone; so does a batch of one image."""
    config = load(None, [*LONE, "partition.clients=2"])
    images = int(min(setup_of(config).task.data.partition.sizes()))
    words = [word.replace("EPOCH", str(images - 1)) for word in words]
    with without_pictures():
        evaluations = [
            run(load(None, [*LONE, "partition.clients=2", *words, f"workers={n}"]), tmp_path / str(n), console=False)
            for n in (1, 2)
        ]
    assert evaluations[0]["test"] == evaluations[1]["test"]
    ours, theirs = (tensors_of(tmp_path / str(n)) for n in (1, 2))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(bool(tensor.isfinite().all()) for tensor in ours.values() if tensor.is_floating_point())
