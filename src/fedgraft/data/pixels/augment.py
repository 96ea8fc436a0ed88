"""Training augmentations on batches: each sample draws its own numbers, and no step loops over images.

Images are float32 (B, 3, H, W) in [0, 1]; random numbers come only from the `generator` argument. It belongs to the
CPU, so that the numbers repeat whatever device the images are on; they go there once for each operation.
"""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from fedgraft.core.device import Device, constant

PAD = 4  # pixels by which `crop` may shift an image
JITTER = (0.4, 0.4, 0.4, 0.1)  # brightness, contrast, saturation, hue
_GREY = (0.299, 0.587, 0.114)
_TRIES = 10  # boxes drawn per image, of which the first that fits is used


def random_uniform(low: float, high: float, count: int, generator: Generator) -> Tensor:
    """Return `count` random numbers between low and high."""
    return low + (high - low) * torch.rand(count, generator=generator)


def draw_flips(count: int, generator: Generator) -> Tensor:
    """Return which samples are mirrored, drawn at random, bool (count,); the feature cache draws its views here too."""
    return torch.rand(count, generator=generator) < 0.5


def flip(images: Tensor, mirrored: Tensor) -> Tensor:
    """Return the images, with those marked in `mirrored` (B,) mirrored left to right."""
    mirrored = Device(images.device).put(mirrored)
    return torch.where(mirrored.view(-1, 1, 1, 1), images.flip(3), images)


def crop(images: Tensor, generator: Generator, pad: int = PAD) -> Tensor:
    """Return each image shifted by up to `pad` pixels: zero padding, then a random window of the old size."""
    count, _, height, width = images.shape
    down, right = Device(images.device).put(torch.randint(0, 2 * pad + 1, (2, count), generator=generator))
    padded = F.pad(images, (pad, pad, pad, pad)).permute(0, 2, 3, 1)  # (B, H + 2 pad, W + 2 pad, 3)
    sample = torch.arange(count, device=images.device).view(-1, 1, 1)
    row = (down.view(-1, 1) + torch.arange(height, device=images.device)).unsqueeze(2)  # (B, H, 1)
    column = (right.view(-1, 1) + torch.arange(width, device=images.device)).unsqueeze(1)  # (B, 1, W)
    return padded[sample, row, column].permute(0, 3, 1, 2)


def draw_boxes(count: int, height: int, width: int, generator: Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random crop boxes (top, left, height, width), (count,) each: 8-100 % of the area, an aspect of 3/4-4/3.

    Of ten draws the first that fits is used; if none fits (a very long image), the largest centred box of a permitted
    aspect.
    """
    area = height * width * random_uniform(0.08, 1.0, _TRIES * count, generator)
    aspect = torch.exp(random_uniform(math.log(3 / 4), math.log(4 / 3), _TRIES * count, generator))
    widths = (area * aspect).sqrt().round().view(count, _TRIES)
    heights = (area * (1 / aspect)).sqrt().round().view(count, _TRIES)
    fits = (widths <= width) & (heights <= height) & (widths > 0) & (heights > 0)
    first = fits.int().argmax(dim=1, keepdim=True)
    any_fits = fits.any(dim=1)
    fallback_height = min(height, round(width * 4 / 3))
    fallback_width = min(width, round(height * 4 / 3))
    box_height = torch.where(any_fits, heights.gather(1, first)[:, 0], torch.tensor(float(fallback_height)))
    box_width = torch.where(any_fits, widths.gather(1, first)[:, 0], torch.tensor(float(fallback_width)))
    position = torch.rand(2, count, generator=generator)  # of the box within the free room, 0 to 1
    position = torch.where(any_fits, position, torch.tensor(0.5))
    top = (position[0] * (height - box_height + 1)).floor()
    left = (position[1] * (width - box_width + 1)).floor()
    return top, left, box_height, box_width


def bicubic_weights(start: Tensor, length: Tensor, source: int, target: int) -> Tensor:
    """Return antialiased bicubic weights (B, target, source) that resize [start, start + length) to `target` pixels.

    `start` and `length` (B,) are the box of each image along one side, of `source` pixels.
    """
    scale = (length / target).view(-1, 1, 1)
    centre = start.view(-1, 1, 1) + (torch.arange(target, device=start.device).view(1, -1, 1) + 0.5) * scale
    pixel = torch.arange(source, device=start.device).view(1, 1, -1)
    x = ((pixel + 0.5 - centre) / scale.clamp(min=1)).abs()
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    weight = torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros(())))
    begin = start.view(-1, 1, 1)
    end = (start + length).view(-1, 1, 1)
    weight = weight * ((pixel >= begin) & (pixel < end))  # pixels outside the box do not count
    return weight / weight.sum(dim=2, keepdim=True)


def resized_crop(images: Tensor, size: int, generator: Generator) -> Tensor:
    """Return a random box of each image, resized to `size` pixels a side."""
    count, _, height, width = images.shape
    boxes = torch.stack(draw_boxes(count, height, width, generator))
    top, left, box_height, box_width = Device(images.device).put(boxes)
    rows = bicubic_weights(top, box_height, height, size).unsqueeze(1)  # (B, 1, S, H)
    columns = bicubic_weights(left, box_width, width, size).unsqueeze(1)  # (B, 1, S, W)
    return (rows @ images @ columns.transpose(2, 3)).clamp(0, 1)


def grey(images: Tensor) -> Tensor:
    """Return the luma of each pixel, (B, 1, H, W)."""
    return torch.einsum("bchw,c->bhw", images, constant(_GREY, images.device)).unsqueeze(1)


def blend(images: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    """Return `factor` (B,) times the image plus the rest of `other`, clipped: 0 gives `other`, 1 the image."""
    f = factor.view(-1, 1, 1, 1)
    return (f * images + (1 - f) * other).clamp(0, 1)


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Return the images blended with black; `factor` (B,) below 1 is darker, above 1 brighter."""
    return blend(images, torch.zeros(()), factor)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Return the images blended with each image's mean grey; `factor` (B,) below 1 is flatter."""
    return blend(images, grey(images).mean(dim=(2, 3), keepdim=True), factor)


def saturation(images: Tensor, factor: Tensor) -> Tensor:
    """Return the images blended with their grey version; `factor` (B,) below 1 is paler."""
    return blend(images, grey(images), factor)


def hue(images: Tensor, turn: Tensor) -> Tensor:
    """Return the images with their hue turned by `turn` (B,), a fraction of the colour circle."""
    top = images.amax(dim=1)  # (B, H, W)
    bottom = images.amin(dim=1)
    chroma = top - bottom
    safe = torch.where(chroma > 0, chroma, torch.ones(()))
    red, green, blue = images.unbind(1)
    sector = torch.where(
        top == red, (green - blue) / safe, torch.where(top == green, (blue - red) / safe + 2, (red - green) / safe + 4)
    )
    angle = (sector + 6 * turn.view(-1, 1, 1)) % 6
    # Each channel follows the same trapezoid over the circle, shifted: f(n) = v - c * clip(min(k, 4 - k), 0, 1).
    channels = []
    for shift in (5, 3, 1):
        k = (shift + angle) % 6
        channels.append(top - chroma * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.stack(channels, dim=1)


def jitter(images: Tensor, generator: Generator, strength: tuple[float, float, float, float] = JITTER) -> Tensor:
    """Return the images with brightness, contrast, saturation and hue changed by amounts drawn for each sample.

    `strength` holds the largest change of each of the four.
    """
    count = len(images)
    drawn = [random_uniform(1 - amount, 1 + amount, count, generator) for amount in strength[:3]]
    drawn.append(random_uniform(-strength[3], strength[3], count, generator))
    *factors, turn = Device(images.device).put(torch.stack(drawn))
    for change, factor in zip((brightness, contrast, saturation), factors, strict=True):
        images = change(images, factor)
    return hue(images, turn)
