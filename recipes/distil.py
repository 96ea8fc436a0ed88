"""What the student of ``pretrain_nano.py`` learns from: crops, a teacher's cached tokens, and four losses.

The scores are learnt as in Hinton et al. 2015 (arXiv:1503.02531), tokens by cosine after standardising.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from image_store import CHUNK, GRID, normalise, open_tokens
from safetensors.torch import safe_open
from torch import Tensor, nn
from transformers import ViTConfig, ViTModel

SIDE = 32
LOSSES = ("label", "scores", "token", "patches")


def nano_config() -> ViTConfig:
    """The shape of the embedded model: 2,710,080 weights without a pooler."""
    return ViTConfig(
        image_size=SIDE,
        patch_size=8,
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


class Student(nn.Module):
    """The ViT with throw-away heads: labels, the teacher's class scores, its class token and its patch tokens."""

    def __init__(self, vit: ViTModel, classes: int, teacher_classes: int, teacher_width: int) -> None:
        super().__init__()
        width = vit.config.hidden_size
        self.vit = vit
        self.label = nn.Linear(width, classes)
        self.scores = nn.Linear(width, teacher_classes)
        self.token = nn.Linear(width, teacher_width)
        self.patches = nn.Linear(width, teacher_width)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """The class token after the final norm, and the patch tokens that the last block attends to."""
        seen = self.vit(pixels, output_hidden_states=True)
        return seen.last_hidden_state[:, 0], seen.hidden_states[-2][:, 1:]


@dataclass(frozen=True)
class Teacher:
    """A teacher's cached tokens (N, 1 + GRID * GRID, C), their statistics and the teacher's classifier."""

    tokens: np.ndarray
    done: np.ndarray
    mean: Tensor
    std: Tensor
    classifier: tuple[Tensor, Tensor]

    @classmethod
    def open(cls, store: Path, folder: Path, side: int) -> Teacher:
        """Class token and patches are standardised apart, by a sample of rows: plenty for per-column figures."""
        tokens, done = open_tokens(store, side)
        ready = np.repeat(done, CHUNK)[: len(tokens)].nonzero()[0][:5000]
        sample = torch.from_numpy(tokens[ready].astype(np.float32))
        parts = [sample[:, :1].flatten(0, 1), sample[:, 1:].flatten(0, 1)]
        mean = torch.stack([p.mean(0) for p in parts])
        std = torch.stack([p.std(0) for p in parts]).clamp_min(1e-4)
        with safe_open(folder / "model.safetensors", "pt") as file:
            classifier = (file.get_tensor("classifier.weight").float(), file.get_tensor("classifier.bias").float())
        return cls(tokens, done, mean, std, classifier)

    def ready(self) -> Tensor:
        """Numbers of the images whose tokens have been computed by now."""
        return torch.from_numpy(np.repeat(self.done, CHUNK)[: len(self.tokens)].nonzero()[0])

    def look(self, rows: Tensor, theta: Tensor, grid: int) -> tuple[Tensor, Tensor, Tensor]:
        """Class scores, standardised class token, and standardised patch tokens at the places of the crops.

        Extreme values are clipped: they would rule the cosine.
        """
        values = torch.from_numpy(self.tokens[rows.numpy()].astype(np.float32))  # (B, 1 + GRID * GRID, C)
        scores = F.linear(values[:, 0], *self.classifier)
        token = ((values[:, 0] - self.mean[0]) / self.std[0]).clamp_(-4, 4)
        square = ((values[:, 1:] - self.mean[1]) / self.std[1]).clamp_(-4, 4).mT.unflatten(2, (GRID, GRID))
        places = F.affine_grid(theta, [len(rows), 3, grid, grid], align_corners=False)
        patches = F.grid_sample(square, places, padding_mode="border", align_corners=False)
        return scores, token, patches.flatten(2).mT  # patches: (B, grid * grid, C)


def losses(student: Student, teacher: Teacher, batch: tuple[Tensor, ...], temperature: float) -> Tensor:
    """The four losses in the order of ``LOSSES`` for the images, labels, rows and crops of one batch."""
    pixels, labels, rows, theta = batch
    token, patches = student(pixels)
    wanted_scores, wanted_token, wanted_patches = teacher.look(rows, theta, math.isqrt(patches.shape[1]))
    soft = (wanted_scores / temperature).softmax(1)
    return torch.stack(
        [
            F.cross_entropy(student.label(token), labels, label_smoothing=0.1),
            F.cross_entropy(student.scores(token) / temperature, soft) * temperature**2,
            1 - F.cosine_similarity(student.token(token), wanted_token, dim=-1).mean(),
            1 - F.cosine_similarity(student.patches(patches), wanted_patches, dim=-1).mean(),
        ]
    )


def random_crops(count: int, smallest: float, generator: torch.Generator) -> Tensor:
    """Affine maps (N, 2, 3) of random resized crops and flips."""
    area = torch.empty(count).uniform_(smallest, 1.0, generator=generator)
    ratio = torch.empty(count).uniform_(-math.log(4 / 3), math.log(4 / 3), generator=generator).exp()
    width = (area * ratio).sqrt().clamp(max=1.0)
    height = (area / ratio).sqrt().clamp(max=1.0)
    shift = torch.empty(2, count).uniform_(-1.0, 1.0, generator=generator)
    flip = torch.randint(0, 2, (count,), generator=generator) * 2.0 - 1.0
    theta = torch.zeros(count, 2, 3)
    theta[:, 0, 0] = width * flip
    theta[:, 0, 2] = shift[0] * (1 - width)
    theta[:, 1, 1] = height
    theta[:, 1, 2] = shift[1] * (1 - height)
    return theta


def cut(images: Tensor, theta: Tensor) -> Tensor:
    """The crops of a whole batch of uint8 images in one resampling, normalised."""
    grid = F.affine_grid(theta, [len(images), 3, SIDE, SIDE], align_corners=False)
    return F.grid_sample(normalise(images), grid, mode="bilinear", padding_mode="border", align_corners=False)


def whole_images(images: Tensor) -> Tensor:
    """The evaluation view: the whole image, averaged down to the student's size."""
    return F.interpolate(normalise(images), size=SIDE, mode="area")
