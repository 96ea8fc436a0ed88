"""What both checks share, in plain PyTorch and without fedgraft: CIFAR-100 from parquet, a ViT folder, partitions.

Nothing here is copied from the package: pixels are enlarged by PIL's bicubic, the network is that of `transformers`,
and randomness is numpy's. Results are to agree within seed noise, not to the bit.
"""

from __future__ import annotations

import argparse
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch import Tensor, nn


def arguments(doc: str | None, **defaults: float) -> argparse.Namespace:
    """The command line: where data and network are, how many images, and the numbers of the setting."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--data", type=Path, required=True, help="folder with cifar100-train.parquet and -test.parquet")
    parser.add_argument("--model", required=True, help="folder of a ViT in transformers format")
    parser.add_argument("--limit", type=int, default=0, help="use only so many training and test images")
    parser.add_argument("--kept", type=Path, help="folder where what enters the last block is kept (2.4 GB) and found")
    parser.add_argument("--seeds", type=int, default=1, help="how many: 1, 2, ...")
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    return parser.parse_args()


def images(path: Path, limit: int) -> tuple[list[bytes], Tensor]:
    """Encoded images and their fine labels."""
    table = pq.read_table(path, columns=["img", "fine_label"])
    table = table.slice(0, limit) if limit else table
    return [row["bytes"] for row in table["img"].to_pylist()], torch.tensor(table["fine_label"].to_pylist())


def pixels(encoded: Sequence[bytes], size: int) -> Tensor:
    """A batch as the network wants it: enlarged, scaled to [-1, 1]."""
    opened = [
        Image.open(io.BytesIO(one)).convert("RGB").resize((size, size), Image.Resampling.BICUBIC) for one in encoded
    ]
    stacked = torch.from_numpy(np.stack([np.asarray(one) for one in opened]).copy())
    return stacked.permute(0, 3, 1, 2).float() / 127.5 - 1  # (B, 3, size, size)


def vit(folder: str) -> nn.Module:
    """The backbone in single precision, in evaluation mode: it has no dropout."""
    from transformers import ViTModel

    return ViTModel.from_pretrained(folder, dtype=torch.float32, add_pooling_layer=False).eval()


@torch.no_grad()
def tokens(net: nn.Module, encoded: Sequence[bytes], size: int, file: Path | None) -> Tensor:
    """What enters the last block, (n, tokens, D), positions interpolated to the size; from `file` where it is there."""
    if file is not None and file.exists():
        return torch.from_numpy(np.load(file))
    found = []
    for i in range(0, len(encoded), 64):
        batch = pixels(encoded[i : i + 64], size)
        states = net(pixel_values=batch, interpolate_pos_encoding=True, output_hidden_states=True).hidden_states
        found.append(states[-2])
        if i // 64 % 50 == 0:
            print(f"{i} of {len(encoded)} images", flush=True)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.save(file, torch.cat(found).numpy())
    return torch.cat(found)


def last_block(net: nn.Module) -> nn.Module:
    """The block after which only the norm and the head come."""
    return next(part for name, part in net.named_modules() if name in ("layers", "encoder.layer"))[-1]


def class_tokens(net: nn.Module, inputs: Tensor) -> Tensor:
    """The class token of each image after the last block and the norm, (B, D)."""
    out = last_block(net)(inputs)
    return net.layernorm(out[0] if isinstance(out, tuple) else out)[:, 0]


@torch.no_grad()
def applied(function: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """A function of many rows, in batches."""
    return torch.cat([function(part) for part in inputs.split(512)])


@dataclass(frozen=True)
class Data:
    """What enters the last block of a network, and the labels."""

    net: nn.Module
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


def read(a: argparse.Namespace) -> Data:
    """Network and data of the command line."""
    net, made = vit(a.model), []
    for part in ("train", "test"):
        encoded, labels = images(a.data / f"cifar100-{part}.parquet", a.limit)
        file = a.kept / f"{part}-{a.size}-{len(encoded)}.npy" if a.kept else None
        made += [tokens(net, encoded, a.size, file), labels]
    return Data(net, *made)


def report(results: Sequence[float]) -> None:
    """The test accuracy of every seed, with mean and standard deviation."""
    spread = f" ± {np.std(results, ddof=1):.2f}" if len(results) > 1 else ""
    print(f"test: {', '.join(f'{x:.2f}' for x in results)} %; mean {np.mean(results):.2f}{spread}")


def held_out(labels: Tensor, share: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Rows to train on and rows for validation, the same share of every class."""
    train, held = [], []
    for label in labels.unique().tolist():
        rows = rng.permutation(np.flatnonzero(labels.numpy() == label))
        cut = round(share * len(rows))
        held.append(rows[:cut])
        train.append(rows[cut:])
    return np.concatenate(train), np.concatenate(held)


def by_classes(
    labels: Tensor, rows: np.ndarray, clients: int, classes: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Rows of so many classes for every client: each class is cut in equal pieces, and no client gets it twice."""
    names = labels[rows].unique().tolist()
    pieces = clients * classes // len(names)
    order = [names[i] for _ in range(pieces) for i in rng.permutation(len(names))]
    parts = {name: iter(np.array_split(rng.permutation(rows[labels[rows].numpy() == name]), pieces)) for name in names}
    dealt = [order[k * classes : (k + 1) * classes] for k in range(clients)]
    _repair(dealt, rng)
    return [np.concatenate([next(parts[name]) for name in mine]) for mine in dealt]


def _repair(dealt: list[list[int]], rng: np.random.Generator) -> None:
    """Swap classes between clients until nobody holds one twice."""
    while bad := [k for k, mine in enumerate(dealt) if len(set(mine)) < len(mine)]:
        k, other = bad[0], int(rng.integers(len(dealt)))
        twice = next(i for i, name in enumerate(dealt[k]) if name in dealt[k][:i])
        spot = int(rng.integers(len(dealt[other])))
        mine, theirs = dealt[k][twice], dealt[other][spot]
        if theirs not in dealt[k] and mine not in dealt[other]:
            dealt[k][twice], dealt[other][spot] = theirs, mine


def evenly(rows: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Rows shuffled and cut in equal parts."""
    return list(np.array_split(rng.permutation(rows), clients))


def batches(rows: np.ndarray, size: int, steps: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """So many batches, shuffled anew in every pass; a batch is not cut at the end of a pass."""
    left = np.empty(0, dtype=np.int64)
    for _ in range(steps):
        while len(left) < size:
            left = np.concatenate([left, rng.permutation(rows)])
        yield left[:size]
        left = left[size:]


def cosine(rate: float, round: int, total: int) -> float:
    """The rate of a round (counted from 0) on a cosine from `rate` to 0."""
    return rate * 0.5 * (1 + math.cos(math.pi * round / total))


def gain(steps: int, momentum: float) -> float:
    """How much further momentum reaches over some steps from rest than plain steps do."""
    return sum(sum(momentum**i for i in range(step + 1)) for step in range(steps)) / steps


def accuracy(scores: Tensor, labels: Tensor) -> float:
    """In percent."""
    return 100 * float((scores.argmax(1) == labels).float().mean())
