"""Your own images: a folder with one directory per class, adapted by three clients, exported to `transformers`.

The images here are drawn (discs, squares and stripes of random colour), so that the example runs anywhere.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

import fedgraft

OVERRIDES = [
    "data.source=folder",
    "partition.clients=3",
    "rounds.total=3",
    "rounds.fraction=1.0",
    "trainable.kind=last_blocks",
    "trainable.blocks=1",
    "local.lr=0.002",
    "local.clip=1.0",
]


def draw(kind: str, rng: np.random.Generator, size: int = 32) -> Image.Image:
    """One picture of this kind: a shape in one colour on a darker ground, with noise."""
    y, x = np.mgrid[:size, :size]
    cy, cx, r = rng.uniform(12, 20), rng.uniform(12, 20), rng.uniform(5, 9)
    shapes = {
        "disc": (y - cy) ** 2 + (x - cx) ** 2 < r**2,
        "square": (abs(y - cy) < r) & (abs(x - cx) < r),
        "stripes": (x + y) % 8 < 4,
    }
    colour = np.where(shapes[kind][..., None], rng.uniform(120, 255, 3), rng.uniform(0, 60, 3))
    return Image.fromarray((colour + rng.normal(0, 10, colour.shape)).clip(0, 255).astype(np.uint8))


def make_folder(root: Path, count: int = 60) -> Path:
    """images/disc/0.png, images/square/0.png, ...: the only layout the source `folder` needs."""
    rng = np.random.default_rng(0)
    for kind in ("disc", "square", "stripes"):
        (root / kind).mkdir(parents=True)
        for i in range(count):
            draw(kind, rng).save(root / kind / f"{i}.png")
    return root


def main() -> None:
    """Make a folder, adapt the embedded `nano` ViT to it, export the result and load it without fedgraft."""
    with tempfile.TemporaryDirectory() as scratch:
        images = make_folder(Path(scratch) / "images")
        config = fedgraft.load_config(overrides=[*OVERRIDES, f"data.path={images}"])
        folder = Path(scratch) / "run"
        summary = fedgraft.run_config(config, folder, console=False)
        print(f"test accuracy {100 * summary['test']['accuracy']:.1f} %, {summary['bytes_up']:,} bytes sent up")

        exported = Path(scratch) / "adapted"
        fedgraft.export_run(folder, exported)
        predict(exported, images / "stripes" / "0.png")


def predict(exported: Path, image: Path) -> None:
    """What a user of the exported folder does; nothing of fedgraft is needed for it."""
    import torch
    from transformers import AutoModelForImageClassification

    model = AutoModelForImageClassification.from_pretrained(exported)
    settings = json.loads((exported / "preprocessor_config.json").read_text())
    pixels = np.asarray(Image.open(image), dtype=np.float32) / 255
    inputs = (pixels - settings["image_mean"]) / settings["image_std"]  # (32, 32, 3)
    with torch.no_grad():
        logits = model(pixel_values=torch.tensor(inputs, dtype=torch.float32).permute(2, 0, 1)[None]).logits
    answer = int(logits.argmax())
    print(f"{image.parent.name} is taken for {model.config.id2label[answer]}")


if __name__ == "__main__":
    main()
