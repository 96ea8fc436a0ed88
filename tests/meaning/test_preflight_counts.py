"""Preflight counts what is there: test images, copies, and copies under two labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from fedgraft.consortium.preflight import site_facts
from fedgraft.data.sources.folder import folder


def save(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def test_images_by_split_and_faults_by_kind(tmp_path: Path) -> None:
    for i in range(6):
        save(tmp_path / "train" / "cat" / f"{i}.png", seed=i)
        save(tmp_path / "train" / "dog" / f"{i}.png", seed=100 + i)
    for i in range(4):
        save(tmp_path / "test" / "cat" / f"{i}.png", seed=200 + i)
    save(tmp_path / "train" / "dog" / "copy.png", seed=0)  # also a cat
    save(tmp_path / "train" / "dog" / "again.png", seed=100)  # twice a dog
    save(tmp_path / "test" / "cat" / "leak.png", seed=1)  # also trained on
    dataset = folder(tmp_path)
    facts, digests = site_facts("here", dataset, (range(len(dataset.train)), range(len(dataset.test))), minimum=1)
    assert (facts["images"], facts["test_images"]) == (19, 5)
    assert facts["classes"] == {"cat": 11, "dog": 8}
    assert facts["faults"] == {"contradictory": 1, "duplicates": 3, "leaked": 1}
    assert len(digests) == 16
