"""No image goes through the same frozen blocks twice, whoever needs what they make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedgraft.client.actions.weight_scores import score_weights
from fedgraft.config.load import load
from fedgraft.core.messages import Request
from fedgraft.core.space import select
from fedgraft.data.feature_cache import CachedExamples
from fedgraft.runs.loop import run
from fedgraft.runs.setup import RunSetup, setup_of

KINDS = {
    "last_blocks": ["trainable.kind=last_blocks", "trainable.blocks=1"],
    "sparse": ["trainable.kind=sparse", "trainable.freeze_blocks=5", "trainable.sparse.strategy=random"],
    "scored": ["trainable.kind=sparse", "trainable.freeze_blocks=5", "trainable.sparse.samples=40"],
    "lora": ["trainable.kind=lora", "trainable.freeze_blocks=5"],
}


def words(kind: str, rounds: int = 3) -> list[str]:
    """A head from sums, then rounds that meet all images of two clients."""
    return [
        "data.limit=160",
        "partition.clients=2",
        "rounds.fraction=1.0",
        f"rounds.total={rounds}",
        "rounds.test=false",
        "local.steps=4",
        "local.batch_size=20",
        "workers=1",
        *KINDS[kind],
    ]


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """The places of images that were read as pixels to be kept, but for the one that tells the shape."""
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / "cache"))
    seen: list[int] = []
    plain = CachedExamples._inputs

    def inputs(self: CachedExamples, places: np.ndarray) -> Tensor:
        if len(places) > 1:
            seen.extend(np.unique(places % len(self)).tolist())
        return plain(self, places)

    monkeypatch.setattr(CachedExamples, "_inputs", inputs)
    return seen


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_head_and_the_rounds_share_what_the_frozen_blocks_make(kind: str, met: list[int], tmp_path: Path) -> None:
    run(load(None, words(kind)), tmp_path / "run", console=False)
    assert len(met) == len(set(met)) > 140


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_table_that_both_read_is_built_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, met: list[int]
) -> None:
    built: list[tuple[int, int]] = []
    plain = CachedExamples.__init__

    def watched(self: CachedExamples, images: Any, network: Any, until: int, *rest: Any) -> None:
        built.append((id(images), until))
        plain(self, images, network, until, *rest)

    monkeypatch.setattr(CachedExamples, "__init__", watched)
    run(load(None, words(kind)), tmp_path / "run", console=False)
    assert len(built) == len(set(built)) > 1


def test_a_short_run_keeps_no_tokens_that_it_will_not_meet(met: list[int], tmp_path: Path) -> None:
    overrides = [*words("last_blocks", 1), "local.steps=1", "local.batch_size=4"]
    run(load(None, overrides), tmp_path / "run", console=False)
    assert len(met) - len(set(met)) == 2 * 4 + 144  # what its round meets, and the validation images, a second time


def test_the_guard_notices_two_passes(met: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunSetup, "_reused_images", lambda self: None)
    run(load(None, words("last_blocks")), tmp_path / "run", console=False)
    assert len(met) > len(set(met))


def test_a_head_of_some_clients_looks_at_their_images_and_no_others(met: list[int], tmp_path: Path) -> None:
    """The rest is computed when a round meets it."""
    short = [
        "data.limit=160",
        "partition.clients=4",
        "rounds.fraction=0.25",
        "rounds.total=1",
        "rounds.test=false",
        "local.steps=1",
        "local.batch_size=4",
        "workers=1",
        "trainable.kind=head",
    ]
    run(load(None, [*short, "model.head_clients=0.25"]), tmp_path / "some", console=False)
    some = set(met)
    run(load(None, short), tmp_path / "all", console=False)
    assert some and len(set(met)) - len(some) >= 2 * 36  # the images of two clients at least


@pytest.mark.parametrize(
    ("overrides", "entry"), [([], 5), (['data.augment=["flip"]'], 0), (["data.cache_features=false"], 0)]
)
def test_masks_are_scored_on_what_the_frozen_blocks_made(
    overrides: list[str], entry: int, met: list[int], tmp_path: Path
) -> None:
    assert setup_of(load(None, [*words("scored"), *overrides])).scoring_context.examples.entry == entry


def test_a_mask_is_the_same_from_pixels_and_from_what_is_kept(met: list[int], tmp_path: Path) -> None:
    scores = []
    for cached in ("true", "false"):
        setup = setup_of(load(None, [*words("scored"), f"data.cache_features={cached}"]))
        context = setup.scoring_context
        vector = select(context.network, lambda name: True, buffers=False).gather(context.network)
        names = [name for name, _ in context.network.named_parameters() if "layers.5." in name]
        settings = {"estimator": "per_sample", "labels": "true", "batch": 20, "names": "\n".join(names), "share": 0.5}
        scores.append(
            score_weights(Request("", -1, 0, "scores", "", vector, {}, {**settings, "draw": 0}), context).mean()
        )
    assert scores[0].keys() == scores[1].keys() and scores[0]
    for name, first in scores[0].items():
        assert torch.allclose(first, scores[1][name], rtol=1e-3, atol=1e-12), name
