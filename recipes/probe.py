"""Frozen-feature figures of a ViT folder: what its class token is worth before any fine-tuning.

CIFAR-100 with 5,000 of the training images held out (stratified, seeded): a linear probe and a ridge head.
The settings of both are fixed, so the validation images choose between models and nothing else.  The test
images are read only with ``--test``, once, for the card.  The digits of scikit-learn, enlarged, show
how far the features reach beyond photographs::

    python recipes/probe.py --model nano --train cifar100-train.parquet [--test cifar100-test.parquet]
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from image_store import normalise
from PIL import Image
from torch import Tensor
from transformers import ViTModel


def read_parquet(path: Path) -> tuple[Tensor, Tensor]:
    """Images (N, 3, 32, 32) as uint8 and fine labels of a CIFAR-100 parquet file."""
    import pyarrow.parquet as parquet

    table = parquet.read_table(path, columns=["img", "fine_label"])
    pictures = [np.asarray(Image.open(io.BytesIO(row["bytes"])).convert("RGB")) for row in table["img"].to_pylist()]
    labels = torch.tensor(table["fine_label"].to_numpy())
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous(), labels


def held_out(labels: Tensor, count: int, seed: int = 0) -> Tensor:
    """A mask with the same number of rows of every class, ``count`` in all."""
    generator = torch.Generator().manual_seed(seed)
    classes = int(labels.max()) + 1
    mask = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(classes):
        rows = (labels == label).nonzero().flatten()
        mask[rows[torch.randperm(len(rows), generator=generator)[: count // classes]]] = True
    return mask


@torch.inference_mode()
def class_tokens(vit: ViTModel, images: Tensor, batch: int = 500) -> Tensor:
    """The class token after the final norm, for uint8 images of the model's size."""
    return torch.cat([vit(normalise(part)).last_hidden_state[:, 0] for part in images.split(batch)]).clone()


def linear_probe(x: Tensor, y: Tensor, classes: int, decay: float = 1e-5, steps: int = 200) -> tuple[Tensor, Tensor]:
    """Softmax regression by L-BFGS on standardised features.  Full batches: no learning rate to choose."""
    weight = torch.zeros(classes, x.shape[1], requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)
    solver = torch.optim.LBFGS([weight, bias], max_iter=steps, history_size=20, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        solver.zero_grad()
        loss = F.cross_entropy(F.linear(x, weight, bias), y) + decay * weight.square().sum()
        loss.backward()
        return loss

    solver.step(closure)
    return weight.detach(), bias.detach()


def ridge_head(x: Tensor, y: Tensor, classes: int, strength: float = 1.0) -> tuple[Tensor, Tensor]:
    """Least squares on one-hot targets in closed form, as a federated ridge head would solve it."""
    x, target = x.double(), F.one_hot(y, classes).double()
    centre, level = x.mean(0), target.mean(0)
    gram = (x - centre).T @ (x - centre) + strength * torch.eye(x.shape[1], dtype=torch.float64)
    weight = torch.linalg.solve(gram, (x - centre).T @ (target - level)).T
    return weight.float(), (level - weight @ centre).float()


def score(head: tuple[Tensor, Tensor], x: Tensor, y: Tensor) -> float:
    """Share of right answers."""
    return float((F.linear(x, *head).argmax(1) == y).float().mean())


def digits(vit: ViTModel) -> float:
    """Ridge head on scikit-learn's digits enlarged to 32 px: a quarter of each class is the test part."""
    from sklearn.datasets import load_digits

    data = load_digits()
    grey = torch.from_numpy(data.images).float().unsqueeze(1).div(16).mul(255)
    images = F.interpolate(grey, size=32, mode="bilinear").round().byte().expand(-1, 3, -1, -1)
    labels = torch.from_numpy(data.target).long()
    test = held_out(labels, 440)
    x = class_tokens(vit, images)
    return score(ridge_head(x[~test], labels[~test], 10), x[test], labels[test])


def probe(model: Path, train: Path, test: Path | None = None, limit: int | None = None) -> dict[str, float]:
    """All figures of one model folder.  ``limit`` takes a part of the fitting images for a quick look."""
    vit = ViTModel.from_pretrained(model, dtype=torch.float32, add_pooling_layer=False).eval()
    images, labels = read_parquet(train)
    mask = held_out(labels, 5000)
    fit = (~mask).nonzero().flatten()[:limit]
    x, x_val = class_tokens(vit, images[fit]), class_tokens(vit, images[mask])
    mean, std = x.mean(0), x.std(0)
    x, x_val = (x - mean) / std, (x_val - mean) / std
    linear, ridge = linear_probe(x, labels[fit], 100), ridge_head(x, labels[fit], 100)
    figures = {"linear_val": score(linear, x_val, labels[mask]), "ridge_val": score(ridge, x_val, labels[mask])}
    figures["digits_ridge"] = digits(vit)
    if test:
        images, labels = read_parquet(test)
        x_test = (class_tokens(vit, images) - mean) / std
        figures |= {"linear_test": score(linear, x_test, labels), "ridge_test": score(ridge, x_test, labels)}
    return {name: round(value, 4) for name, value in figures.items()}


def main() -> None:
    """Print the figures of a model as one line of JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--train", type=Path, required=True, help="CIFAR-100 training parquet")
    parser.add_argument("--test", type=Path, help="CIFAR-100 test parquet: only for the final figures")
    parser.add_argument("--limit", type=int, help="use only so many fitting images, for a quick look")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(json.dumps(probe(args.model, args.train, args.test, args.limit)))


if __name__ == "__main__":
    main()
