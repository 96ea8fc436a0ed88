"""Preflight counts what is there: test images, copies, and copies under two labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedgraft.consortium.preflight import site_facts
from fedgraft.consortium.site_faults import findings
from fedgraft.data.sources.folder import folder


def save(path: Path, seed: int, shape: tuple[int, ...] = (8, 8, 3)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, shape, dtype=np.uint8)
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


@pytest.mark.parametrize(("width", "named"), [(34, False), (45, False), (20, True), (66, True)])
def test_a_site_of_other_proportions_is_named(tmp_path: Path, width: int, named: bool) -> None:
    """Up to half as wide again, or two thirds as wide, as the others' images is no fault."""
    facts = []
    for number, site in enumerate(("east", "north", "south")):
        for i in range(10):
            columns = width if site == "south" else 40
            save(tmp_path / site / ("cat", "dog")[i % 2] / f"{i}.png", seed=100 * number + i, shape=(40, columns, 3))
        dataset = folder(tmp_path / site, test_share=0.2)
        rows = (range(len(dataset.train)), range(len(dataset.test)))
        facts.append(site_facts(site, dataset, rows, minimum=1)[0])
    faults = {(problem.kind, problem.site) for problem in findings(facts)}
    assert (("shape_differs", "south") in faults) == named
    assert not {("shape_differs", "east"), ("shape_differs", "north")} & faults
