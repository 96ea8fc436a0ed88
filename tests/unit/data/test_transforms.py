"""Transforms against simple per-image references: slices, PIL and colorsys."""

from __future__ import annotations

import colorsys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from tests.support.errors import raises
from tests.support.transforms import make_transform
from torch import Tensor

from fedgraft.data.examples import FeatureExamples, ImageExamples
from fedgraft.data.pixels import augment, randaugment
from fedgraft.data.pixels.store import make_store
from fedgraft.data.pixels.transforms import OPERATIONS, STATISTICS, Transform


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(count: int, height: int = 20, width: int = 20) -> np.ndarray:
    """Smooth random colour images, uint8 (B, H, W, 3)."""
    rng = np.random.default_rng(1)
    small = rng.integers(0, 256, (count, 5, 5, 3), dtype=np.uint8)
    return np.stack([np.asarray(Image.fromarray(s).resize((width, height), Image.Resampling.BICUBIC)) for s in small])


def floats(images: np.ndarray) -> Tensor:
    return torch.from_numpy(images.copy()).permute(0, 3, 1, 2).float() / 255


def bytes_of(image: Tensor) -> np.ndarray:
    return np.asarray((image * 255).round().permute(1, 2, 0).to(torch.uint8))


PLAIN = Transform(20, (), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def test_one_normalisation_for_training_and_evaluation() -> None:
    images = torch.from_numpy(pictures(3))
    for name, (mean, std) in STATISTICS.items():
        transform = make_transform(20, (), name)
        expected = (floats(pictures(3)) - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
        torch.testing.assert_close(transform(images), expected)
        assert torch.equal(transform(images, generator()), transform(images))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_evaluation_never_augments_and_training_does(operation: str) -> None:
    images = torch.from_numpy(pictures(16))
    transform = make_transform(20, (operation,))
    assert torch.equal(transform(images), make_transform(20)(images))
    first = transform(images, generator(3))
    assert torch.equal(first, transform(images, generator(3)))
    assert not torch.equal(first, transform(images)) and not torch.equal(first, transform(images, generator(4)))
    assert first.shape == (16, 3, 20, 20) and first.isfinite().all()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_only_the_given_generator_is_used(operation: str) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    make_transform(20, (operation,))(torch.from_numpy(pictures(4)), generator())
    assert torch.equal(before, torch.get_rng_state())


def test_pixels_of_another_size_are_refused() -> None:
    with raises("E-DATA-TRANSFORM-SHAPE", size=24, shape=(20, 20, 3)):
        make_transform(24)(torch.from_numpy(pictures(2)))


def test_flip_is_exact_and_half_of_them() -> None:
    images = floats(pictures(8))
    mirrored = torch.tensor([True, False] * 4)
    flipped = augment.flip(images, mirrored)
    assert torch.equal(flipped[0], images[0].flip(2)) and torch.equal(flipped[1], images[1])
    assert 450 < int(augment.draw_flips(1000, generator()).sum()) < 550


def test_the_two_views_are_what_flip_makes() -> None:
    images = torch.from_numpy(pictures(64))
    transform = make_transform(20, ("flip",))
    mirrored = augment.draw_flips(64, generator(9))
    views = torch.stack([transform.view(images, torch.full((64,), one)) for one in (False, True)])
    assert torch.equal(transform(images, generator(9)), transform.view(images, mirrored))
    assert torch.equal(transform(images, generator(9)), views[mirrored.long(), torch.arange(64)])
    assert torch.equal(views[0], transform(images))


def test_crop_is_a_slice_of_the_padded_image() -> None:
    images = floats(pictures(32, 12, 15))
    down, right = torch.randint(0, 9, (2, 32), generator=generator(2))
    cropped = augment.crop(images, generator(2))
    assert len(set(zip(down.tolist(), right.tolist(), strict=True))) > 20  # every sample has its own window
    for image, out, y, x in zip(images, cropped, down, right, strict=True):
        padded = torch.zeros(3, 20, 23)
        padded[:, 4:16, 4:19] = image
        assert torch.equal(out, padded[:, y : y + 12, x : x + 15])


@pytest.mark.parametrize("size", [9, 28])
def test_resized_crop_is_pils_crop_and_resize(size: int) -> None:
    images = pictures(16, 24, 18)
    top, left, high, wide = (t.int().tolist() for t in augment.draw_boxes(16, 24, 18, generator(7)))
    ours = augment.resized_crop(floats(images), size, generator(7))
    for n, image in enumerate(images):
        box = (left[n], top[n], left[n] + wide[n], top[n] + high[n])
        theirs = Image.fromarray(image).crop(box).resize((size, size), Image.Resampling.BICUBIC)
        assert np.abs(bytes_of(ours[n]).astype(int) - np.asarray(theirs)).max() <= 1


def test_boxes_lie_inside_and_have_the_right_area() -> None:
    top, left, high, wide = augment.draw_boxes(2000, 32, 32, generator())
    assert (top >= 0).all() and (left >= 0).all() and (top + high <= 32).all() and (left + wide <= 32).all()
    area, aspect = high * wide / 1024, wide / high
    assert area.min() > 0.05 and area.max() <= 1 and 0.45 < area.mean() < 0.6
    assert aspect.min() > 0.6 and aspect.max() < 1.7
    _, _, high, wide = augment.draw_boxes(50, 4, 400, generator())  # no box of that area fits: the centred one
    assert (wide <= 400).all() and (high <= 4).all() and (wide >= 1).all()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (augment.brightness, ImageEnhance.Brightness),
        (augment.contrast, ImageEnhance.Contrast),
        (augment.saturation, ImageEnhance.Color),
    ],
)
def test_colour_changes_are_pils(ours: Callable[[Tensor, Tensor], Tensor], theirs: type) -> None:
    images, factors = pictures(5), torch.tensor([0.6, 0.8, 1.0, 1.2, 1.4])
    for image, out, factor in zip(images, ours(floats(images), factors), factors, strict=True):
        expected = np.asarray(theirs(Image.fromarray(image)).enhance(float(factor)))
        assert np.abs(bytes_of(out).astype(int) - expected).max() <= 2  # PIL rounds its grey to whole levels


def test_hue_is_colorsys() -> None:
    rng = np.random.default_rng(0)
    train_images = rng.random((3, 3, 4, 4)).astype(np.float32)
    train_images[0, :, 0, 0] = 0.5  # a grey pixel has no hue
    turns = torch.tensor([-0.1, 0.0, 0.37])
    out = augment.hue(torch.from_numpy(train_images), turns)
    for n in range(3):
        for y in range(4):
            for x in range(4):
                h, s, v = colorsys.rgb_to_hsv(*train_images[n, :, y, x].tolist())
                expected = colorsys.hsv_to_rgb((h + float(turns[n])) % 1, s, v)
                np.testing.assert_allclose(out[n, :, y, x].numpy(), expected, atol=1e-5)


def test_jitter_of_no_strength_is_nothing_and_a_shared_factor_would_be_noticed() -> None:
    images = floats(pictures(1)).repeat(8, 1, 1, 1)
    torch.testing.assert_close(augment.jitter(images, generator(), (0, 0, 0, 0)), images, atol=1e-6, rtol=0)
    out = augment.jitter(images, generator())
    assert len({round(float(o.mean()), 6) for o in out}) == 8  # eight copies of one image, eight results
    assert out.min() >= 0 and out.max() <= 1


REFERENCES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "posterize": lambda image: ImageOps.posterize(image, 7),
    "autocontrast": ImageOps.autocontrast,
    "equalize": ImageOps.equalize,
    "brightness": lambda image: ImageEnhance.Brightness(image).enhance(1.27),
    "colour": lambda image: ImageEnhance.Color(image).enhance(1.27),
    "contrast": lambda image: ImageEnhance.Contrast(image).enhance(1.27),
    "sharpen": lambda image: ImageEnhance.Sharpness(image).enhance(1.27),
    "solarize": lambda image: ImageOps.solarize(image, 179),
    "identity": lambda image: image,
    "rotate": lambda image: image.rotate(9, Image.Resampling.BILINEAR),
    "translate_x": lambda image: image.transform(image.size, Image.Transform.AFFINE, (1, 0, 2.7, 0, 1, 0), 2),
    "translate_y": lambda image: image.transform(image.size, Image.Transform.AFFINE, (1, 0, 0, 0, 1, 2.7), 2),
}


@pytest.mark.parametrize("name", list(REFERENCES))
def test_randaugment_operations_are_pils(name: str) -> None:
    images = pictures(3)
    ours = randaugment.OPERATIONS[name](floats(images), torch.ones(3))
    inner = slice(6, 14) if name in ("rotate", "translate_x", "translate_y") else slice(None)  # not the borders
    for image, our in zip(images, ours, strict=True):
        theirs = np.asarray(REFERENCES[name](Image.fromarray(image)))
        assert np.abs(bytes_of(our).astype(int) - theirs)[inner, inner].max() <= 3


def test_every_randaugment_operation_keeps_range_and_shape() -> None:
    images = floats(pictures(6))
    images[0] = 0.25  # a flat image has no contrast to stretch and no histogram to flatten
    for sign in (-1.0, 1.0):
        for operation in randaugment.OPERATIONS.values():
            out = operation(images, torch.full((6,), sign))
            assert out.shape == images.shape and out.isfinite().all() and out.min() >= 0 and out.max() <= 1


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"size": 0}, "E-DATA-IMAGE-SIZE"),
        ({"size": 8, "train": ("flop",)}, "E-DATA-TRANSFORM-UNKNOWN"),
        ({"size": 8, "train": ("flip", "flip")}, "E-DATA-TRANSFORM-TWICE"),
        ({"size": 8, "train": ("flip", "resized_crop")}, "E-DATA-TRANSFORM-ORDER"),
    ],
)
def test_bad_transforms_are_refused(arguments: dict, code: str) -> None:
    with raises(code):
        make_transform(**arguments)
    with raises("E-DATA-TRANSFORM-STD"):
        Transform(8, (), (0, 0, 0), (1, 0, 1))


def test_digest_and_cacheability() -> None:
    variants = [make_transform(8), make_transform(9), make_transform(8, ("flip",)), make_transform(8, (), "half")]
    assert len({t.digest for t in variants}) == 4 and make_transform(8).digest == variants[0].digest
    assert [make_transform(8, ops).deterministic for ops in ((), ("flip",), ("crop",), ("flip", "jitter"))] == [
        True,
        True,
        False,
        False,
    ]


def test_the_order_of_the_list_is_the_order_of_the_operations() -> None:
    images = torch.from_numpy(pictures(8))
    one = Transform(20, ("crop", "flip"), PLAIN.mean, PLAIN.std)(images, generator(1))
    draws = generator(1)
    by_hand = augment.crop(PLAIN(images), draws)
    by_hand = augment.flip(by_hand, augment.draw_flips(8, draws))
    assert torch.equal(one, by_hand)


def test_image_examples_follow_the_contract() -> None:
    store = make_store(pictures(10), np.arange(10) % 3, "abc")
    examples = ImageExamples(store, make_transform(20, ("flip",)))
    rows = torch.tensor([7, 2, 2])
    assert len(examples) == 10 and examples.entry == 0 and examples.labels.dtype == torch.int64
    assert torch.equal(examples.batch(rows), examples.transform(torch.from_numpy(store.images[[7, 2, 2]])))
    assert examples.batch(torch.tensor([], dtype=torch.int64)).shape == (0, 3, 20, 20)
    for bad in (torch.tensor([10]), torch.tensor([-1])):
        with raises("E-DATA-ROW-RANGE", count=10):
            examples.batch(bad)


def test_feature_examples_follow_the_contract() -> None:
    features = torch.randn(5, 4, generator=generator())
    examples = FeatureExamples(features, torch.arange(5), entry=6)
    assert torch.equal(examples.batch(torch.tensor([3, 0]), generator()), features[[3, 0]]) and examples.entry == 6
    with raises("E-DATA-LABEL-COUNT"):
        FeatureExamples(features, torch.arange(4), 6)


def test_the_encoded_reference_images_are_not_degenerate() -> None:
    """The references above would agree on flat images whatever we did, so the pictures must have detail."""
    assert pictures(4).std() > 30 and len({Image.fromarray(p).tobytes() for p in pictures(4)}) == 4
