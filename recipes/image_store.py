"""Images decoded once, and a teacher's tokens computed once.

Decoding JPEGs and running a teacher in every pass would cost more than the student itself.  Both are
done one time here and kept as plain ``.npy`` arrays that are memory-mapped afterwards.

Run alone to fill the token cache with several one-thread workers, which on a few cores is faster than
one worker with several threads::

    python recipes/image_store.py --images train --store work/train --teacher vit-tiny --worker 0 --workers 2 &
    python recipes/image_store.py --images train --store work/train --teacher vit-tiny --worker 1 --workers 2
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
EXTENSIONS = {".jpeg", ".jpg", ".png", ".bmp", ".webp"}
CHUNK = 320
GRID = 5


def list_images(root: Path) -> tuple[list[Path], list[int], list[str]]:
    """Return files, labels and class names of a folder with one directory per class (nested files count)."""
    classes = sorted(p.name for p in root.iterdir() if p.is_dir())
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(p for p in (root / name).rglob("*") if p.suffix.lower() in EXTENSIONS)
        files += found
        labels += [label] * len(found)
    if not files:
        raise ValueError(f"no images below {root}: one directory per class is expected")
    return files, labels, classes


def build_store(root: Path, store: Path, size: int = 64, seed: int = 0) -> None:
    """Decode every image to ``size`` pixels, in a shuffled order, into ``store``.

    The order is shuffled so that any prefix is a fair sample: a half-finished token cache is usable.
    The metadata is written last, so its presence means that the arrays are complete.
    """
    if (store / "store.json").exists():
        return
    files, labels, classes = list_images(root)
    order = np.random.default_rng(seed).permutation(len(files))
    store.mkdir(parents=True, exist_ok=True)
    shape = (len(files), 3, size, size)
    images = np.lib.format.open_memmap(store / "images.npy", mode="w+", dtype=np.uint8, shape=shape)
    for row, index in enumerate(order):
        with Image.open(files[index]) as handle:
            picture = handle.convert("RGB")
        side = min(picture.size)
        left, top = (picture.width - side) // 2, (picture.height - side) // 2
        if (side, side) != picture.size:
            picture = picture.crop((left, top, left + side, top + side))
        if side != size:
            picture = picture.resize((size, size), Image.Resampling.BICUBIC, reducing_gap=3.0)
        images[row] = np.asarray(picture).transpose(2, 0, 1)
    images.flush()
    np.save(store / "labels.npy", np.asarray(labels, dtype=np.int64)[order])
    (store / "store.json").write_text(json.dumps({"images": len(files), "size": size, "classes": classes}))


def open_store(store: Path) -> tuple[Tensor, Tensor, int]:
    """Return the memory-mapped images (N, 3, S, S) as uint8, the labels and the number of classes."""
    meta = json.loads((store / "store.json").read_text())
    images = np.load(store / "images.npy", mmap_mode="c")
    return torch.from_numpy(images), torch.from_numpy(np.load(store / "labels.npy")), len(meta["classes"])


def normalise(images: Tensor) -> Tensor:
    """Scale uint8 RGB to [0, 1] and apply the ImageNet mean and deviation."""
    mean = torch.tensor(IMAGENET_MEAN).view(1, 3, 1, 1)
    std = torch.tensor(IMAGENET_STD).view(1, 3, 1, 1)
    return images.float().div_(255).sub_(mean).div_(std)


class TeacherTokens(nn.Module):
    """A ``transformers`` ViT classifier reduced to what a student is shown of it.

    First the class token after the final norm, which the classifier reads.  Then the patch tokens that the
    last block attends to (their own way through the last block is never trained), averaged to ``GRID`` x ``GRID``.
    """

    def __init__(self, folder: Path, side: int) -> None:
        super().__init__()
        from transformers import ViTForImageClassification

        self.vit = ViTForImageClassification.from_pretrained(folder, dtype=torch.float32).eval().vit
        self.side = side
        look = json.loads((folder / "preprocessor_config.json").read_text())
        self.register_buffer("mean", torch.tensor(look["image_mean"]).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(look["image_std"]).view(1, 3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        pixels = F.interpolate(images.float().div(255), size=self.side, mode="bicubic").clamp(0, 1)
        seen = self.vit((pixels - self.mean) / self.std, interpolate_pos_encoding=True, output_hidden_states=True)
        patches = seen.hidden_states[-2][:, 1:].transpose(1, 2)  # (B, C, n * n)
        square = patches.unflatten(2, (math.isqrt(patches.shape[2]), -1))
        pooled = F.adaptive_avg_pool2d(square, GRID).flatten(2).transpose(1, 2)  # (B, GRID * GRID, C)
        return torch.cat([seen.last_hidden_state[:, :1], pooled], dim=1)


def open_tokens(store: Path, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the memory-mapped tokens and the flags of the finished chunks; both follow running workers."""
    names = store / f"teacher{side}.npy", store / f"teacher{side}.done.npy"
    return np.load(names[0], mmap_mode="r+"), np.load(names[1], mmap_mode="r+")


def fill_tokens(
    store: Path, teacher: Path, side: int = 160, batch: int = 16, worker: int = 0, workers: int = 1
) -> None:
    """Compute the teacher's tokens of every stored image, continuing where an earlier run stopped.

    Each chunk has a flag which is set after its rows are written.  Workers take every ``workers``-th chunk,
    so they never write the same rows.
    """
    images, _, _ = open_store(store)
    total, chunks = len(images), -(-len(images) // CHUNK)
    rows, flags = store / f"teacher{side}.npy", store / f"teacher{side}.done.npy"
    while worker and not flags.exists():  # the first worker makes the files
        time.sleep(1)
    if not flags.exists():
        width = int(json.loads((teacher / "config.json").read_text())["hidden_size"])
        shape = (total, 1 + GRID * GRID, width)
        np.lib.format.open_memmap(rows, mode="w+", dtype=np.float16, shape=shape).flush()
        np.save(flags, np.zeros(chunks, dtype=np.uint8))
    tokens, done = open_tokens(store, side)
    todo = [c for c in range(worker, chunks, workers) if not done[c]]
    if not todo:
        return
    run = TeacherTokens(teacher, side)
    begin = time.monotonic()
    for position, chunk in enumerate(todo):
        stop = min((chunk + 1) * CHUNK, total)
        for start in range(chunk * CHUNK, stop, batch):
            end = min(start + batch, stop)
            with torch.inference_mode():
                tokens[start:end] = run(images[start:end]).half().numpy()
        tokens.flush()
        done[chunk] = 1
        done.flush()
        if position % 10 == 0:
            rate = (position + 1) * CHUNK / (time.monotonic() - begin)
            print(f"teacher worker {worker}: {position + 1}/{len(todo)} chunks, {rate:.1f} images/s", flush=True)


def main() -> None:
    """Fill the store and, with ``--teacher``, this worker's share of the token cache."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--images", type=Path, required=True, help="folder with one directory per class")
    parser.add_argument("--store", type=Path, required=True, help="folder for the decoded arrays")
    parser.add_argument("--size", type=int, default=64, help="stored side in pixels")
    parser.add_argument("--teacher", type=Path, help="folder of a transformers ViTForImageClassification")
    parser.add_argument("--teacher-side", type=int, default=160, help="side the teacher sees")
    parser.add_argument("--worker", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))
    build_store(args.images, args.store, args.size)
    if args.teacher:
        fill_tokens(args.store, args.teacher, args.teacher_side, worker=args.worker, workers=args.workers)


if __name__ == "__main__":
    main()
