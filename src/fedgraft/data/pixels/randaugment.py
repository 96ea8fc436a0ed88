"""RandAugment (Cubuk et al. 2020) on batches: `LAYERS` random operations per sample, all of one strength.

Operations take images (b, 3, H, W) in [0, 1] and a sign of +1 or -1 for each, and return new images.
Each operation works on the subset of the batch that drew it, so the loop is over operations, not over images.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from fedgraft.data.pixels.augment import brightness, contrast, saturation

LAYERS = 2
STRENGTH = 0.3  # magnitude 9 of 30


def _warp(images: Tensor, matrices: Tensor) -> Tensor:
    """Return images warped by affine matrices (b, 2, 3) in [-1, 1] coordinates; pixels from outside are black."""
    grid = F.affine_grid(matrices, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False).clamp(0, 1)


def _matrix(count: int, **entries: Tensor | float) -> Tensor:
    """Return `count` identity matrices (2, 3) with these entries; `m01` is row 0, column 1."""
    matrices = torch.eye(2, 3).repeat(count, 1, 1)
    for name, value in entries.items():
        matrices[:, int(name[1]), int(name[2])] = value
    return matrices


def rotate(images: Tensor, sign: Tensor) -> Tensor:
    """Return the images turned by 30 degrees times the strength."""
    angle = sign * math.radians(30 * STRENGTH)
    cos = angle.cos()
    sin = angle.sin()
    return _warp(images, _matrix(len(images), m00=cos, m01=-sin, m10=sin, m11=cos))


def shear_x(images: Tensor, sign: Tensor) -> Tensor:
    """Return the images sheared along x."""
    return _warp(images, _matrix(len(images), m01=sign * 0.3 * STRENGTH))


def shear_y(images: Tensor, sign: Tensor) -> Tensor:
    """Return the images sheared along y."""
    return _warp(images, _matrix(len(images), m10=sign * 0.3 * STRENGTH))


def translate_x(images: Tensor, sign: Tensor) -> Tensor:
    """Return the images shifted along x by 45 % of the width times the strength."""
    return _warp(images, _matrix(len(images), m02=sign * 0.9 * STRENGTH))


def translate_y(images: Tensor, sign: Tensor) -> Tensor:
    """Return the images shifted along y by 45 % of the height times the strength."""
    return _warp(images, _matrix(len(images), m12=sign * 0.9 * STRENGTH))


def sharpen(images: Tensor, sign: Tensor) -> Tensor:
    """Return each image moved away from its smoothed copy (sign +1) or towards it (sign -1); border pixels stay."""
    kernel = torch.tensor([[1.0, 1, 1], [1, 5, 1], [1, 1, 1]]).div(13).expand(3, 1, 3, 3)
    smooth = images.clone()
    smooth[:, :, 1:-1, 1:-1] = F.conv2d(images, kernel, groups=3)
    factor = (1 + 0.9 * STRENGTH * sign).view(-1, 1, 1, 1)
    return (factor * images + (1 - factor) * smooth).clamp(0, 1)


def posterize(images: Tensor, sign: Tensor) -> Tensor:
    """Return the images with only the upper bits of each channel."""
    step = 2 ** round(4 * STRENGTH)
    return (_levels(images) // step * step).float() / 255


def solarize(images: Tensor, sign: Tensor) -> Tensor:
    """Return the images with pixels inverted that are brighter than a threshold."""
    return torch.where(images >= 1 - STRENGTH, 1 - images, images)


def autocontrast(images: Tensor, sign: Tensor) -> Tensor:
    """Return the images with each channel stretched to the full range."""
    low = images.amin(dim=(2, 3), keepdim=True)
    high = images.amax(dim=(2, 3), keepdim=True)
    return torch.where(high > low, (images - low) / (high - low).clamp(min=1e-6), images)


def equalize(images: Tensor, sign: Tensor) -> Tensor:
    """Return the images with the histogram of each channel flattened."""
    flat = _levels(images).flatten(2)  # (b, 3, H * W)
    counts = torch.zeros(*flat.shape[:2], 256, dtype=torch.long).scatter_add_(2, flat, torch.ones_like(flat))
    brightest = 255 - (counts.flip(2) > 0).int().argmax(dim=2, keepdim=True)
    step = (flat.shape[2] - counts.gather(2, brightest)) // 255  # (b, 3, 1)
    table = (counts.cumsum(2) - counts + step // 2) // step.clamp(min=1)
    table = torch.where(step > 0, table.clamp(0, 255), torch.arange(256))
    return table.gather(2, flat).view_as(images).float() / 255


def _levels(images: Tensor) -> Tensor:
    """Return images in [0, 1] as whole numbers from 0 to 255."""
    return (images * 255).round().long()


def _identity(images: Tensor, sign: Tensor) -> Tensor:
    """Return the images unchanged."""
    return images


def _blended(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return an operation that calls `change` with a factor above or below 1, depending on the sign."""
    return lambda images, sign: change(images, 1 + 0.9 * STRENGTH * sign)


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "identity": _identity,
    "rotate": rotate,
    "shear_x": shear_x,
    "shear_y": shear_y,
    "translate_x": translate_x,
    "translate_y": translate_y,
    "brightness": _blended(brightness),
    "contrast": _blended(contrast),
    "colour": _blended(saturation),
    "sharpen": sharpen,
    "posterize": posterize,
    "solarize": solarize,
    "autocontrast": autocontrast,
    "equalize": equalize,
}


def randaugment(images: Tensor, generator: Generator) -> Tensor:
    """Return the images after `LAYERS` random operations each, drawn for each sample and layer."""
    for _ in range(LAYERS):
        chosen = torch.randint(len(OPERATIONS), (len(images),), generator=generator)
        sign = torch.randint(0, 2, (len(images),), generator=generator).float() * 2 - 1
        images = images.clone()
        for number, operation in enumerate(OPERATIONS.values()):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                images[rows] = operation(images[rows], sign[rows])
    return images
