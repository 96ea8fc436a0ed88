"""Images in folders are matched with the model's classes by name, not by their number in the folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tests.support.tiny import Open, tiny

from fedgraft.runs.predict import Predictor


def test_a_folder_of_some_classes_is_measured_by_their_names(tmp_path: Path) -> None:
    opened = Open(tiny("trainable.kind=head"))
    network = opened.network
    with torch.no_grad():  # every image is a seven
        network.head.weight.zero_()
        network.head.bias.zero_()
        network.head.bias[7] = 5.0
    for place, (name, count) in enumerate({"3": 1, "7": 3}.items()):
        folder = tmp_path / "images" / name
        folder.mkdir(parents=True)
        for i in range(count):
            pixels = np.full((16, 16, 3), 20 * (place * 4 + i), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{i}.png")
    found = Predictor(network, tuple("0123456789"), opened.task.transform).evaluate(tmp_path / "images")
    assert found.count == 4
    assert found.accuracy == 0.75
