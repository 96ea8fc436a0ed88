"""The pixel rule against `transformers` itself, for every odd kind of image and every kind of preprocessing."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.support.errors import raises
from tests.support.odd_images import bombs, noise, odd_images, png_header

from fedgraft.core.errors import FedgraftError
from fedgraft.data.pixels.rule import MAX_PIXELS, PixelRule, Unreadable, decode_image
from fedgraft.data.pixels.transforms import Transform, rule_for
from fedgraft.models.backbones import load_network

HALF = (0.5, 0.5, 0.5)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_COMMON = {"do_rescale": True, "rescale_factor": 0.00392156862745098, "image_mean": list(MEAN), "image_std": list(STD)}
CONFIGS: dict[str, tuple[dict[str, Any], PixelRule]] = {
    "vit": (
        {"image_processor_type": "ViTImageProcessor", "size": {"height": 48, "width": 48}, "resample": 2},
        PixelRule(48, "squash", resample=2),
    ),
    "vit, older": ({"feature_extractor_type": "ViTFeatureExtractor", "size": 32}, PixelRule(32, "squash", resample=2)),
    "deit": (
        {"image_processor_type": "DeiTImageProcessor", "size": {"height": 64, "width": 64}, "crop_size": 56},
        PixelRule(56, "squash", 64),
    ),
    "bit": (
        {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 55}, "crop_size": 48, "resample": 1},
        PixelRule(48, "crop", 55, 1),
    ),
    "clip": ({"image_processor_type": "CLIPImageProcessor", "size": 33, "crop_size": 33}, PixelRule(33)),
    "dinov2": (
        {
            "image_processor_type": "BitImageProcessor",
            "size": {"shortest_edge": 64},
            "crop_size": {"height": 56, "width": 56},
            "do_center_crop": True,
            "resample": 3,
        },
        PixelRule(56, "crop", 64),
    ),
    "resnet": (
        {"feature_extractor_type": "ConvNextFeatureExtractor", "size": 42, "crop_pct": 0.875, "resample": 3},
        PixelRule(42, "crop", 48),
    ),
    "convnext": (
        {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 50}, "crop_pct": 0.9},
        PixelRule(50, "crop", 55),
    ),
    "convnext, large": (
        {"image_processor_type": "ConvNextImageProcessorFast", "size": {"shortest_edge": 384}},
        PixelRule(384, "squash"),
    ),
}


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return odd_images(tmp_path_factory.mktemp("odd"))


def processor(config: dict[str, Any]) -> Any:
    from transformers import AutoImageProcessor

    with TemporaryDirectory() as folder:
        Path(folder, "preprocessor_config.json").write_text(json.dumps(config))
        return AutoImageProcessor.from_pretrained(folder)


def loaded(path: Path) -> Image.Image:
    from transformers.image_utils import load_image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's word on palettes with transparency
        return load_image(str(path))


def ours(rule: PixelRule, path: Path, mean: Any = MEAN, std: Any = STD) -> torch.Tensor:
    return Transform(rule.size, (), mean, std)(torch.from_numpy(rule.read(path)[None]))


def theirs(config: dict[str, Any], image: Image.Image) -> torch.Tensor:
    return processor(config)(images=image, return_tensors="pt")["pixel_values"]


def test_every_kind_is_the_image_that_transformers_loads(odd: dict[str, Path]) -> None:
    for kind, path in odd.items():
        expected = np.asarray(loaded(path))
        for source in (path, path.read_bytes()):
            assert np.array_equal(np.asarray(decode_image(source)), expected), kind
        with Image.open(path) as image:
            image.load()
            mode, info = image.mode, dict(image.info)
            assert np.array_equal(np.asarray(decode_image(image)), expected), kind
            assert (image.mode, dict(image.info)) == (mode, info), kind  # the caller's image is left alone


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_networks_own_preprocessing_is_followed_to_the_bit(name: str, odd: dict[str, Path]) -> None:
    config, expected = CONFIGS[name]
    rule = PixelRule.from_preprocessor(config, expected.size)
    assert rule == expected
    reference = processor({**config, **_COMMON})
    for kind, path in odd.items():
        image = loaded(path)
        image.info.pop("transparency", None)  # some classes would lay that colour on white, others not
        assert torch.equal(ours(rule, path), reference(images=image, return_tensors="pt")["pixel_values"]), kind


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_exported_makes_the_same_pixels(name: str, odd: dict[str, Path]) -> None:
    rule = CONFIGS[name][1]
    exported = rule.to_preprocessor(MEAN, STD)
    assert PixelRule.from_preprocessor(json.loads(json.dumps(exported)), rule.size) == rule
    reference = processor(exported)
    for kind, path in odd.items():
        pixels = reference(images=loaded(path), return_tensors="pt")["pixel_values"]
        assert torch.equal(ours(rule, path), pixels), kind


def test_the_pipeline_sees_the_same_pixels(odd: dict[str, Path]) -> None:
    from transformers import ViTConfig, ViTForImageClassification, pipeline

    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model = ViTForImageClassification(ViTConfig(**small, image_size=32, patch_size=16))
    rule = PixelRule(32, "crop", 36)
    pipe = pipeline("image-classification", model=model, image_processor=processor(rule.to_preprocessor(HALF, HALF)))
    for kind, path in odd.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert torch.equal(pipe.preprocess(str(path))["pixel_values"], ours(rule, path, HALF, HALF)), kind


def test_a_wrong_rule_is_noticed(odd: dict[str, Path]) -> None:
    """The comparisons above can fail: another crop, filter or edge, torch's resize, or colours laid on white."""
    rule, path = PixelRule(32, "crop", 36), odd["wide.png"]
    wanted = rule.read(path)
    for other in (PixelRule(32, "squash", 36), PixelRule(32, "crop", 36, 2), PixelRule(32)):
        assert not np.array_equal(other.read(path), wanted)
        assert other.digest != rule.digest
    square = torch.from_numpy(np.array(decode_image(odd["square.png"]))).permute(2, 0, 1)[None].float()
    resized = torch.nn.functional.interpolate(square, (32, 32), mode="bicubic", antialias=True)
    assert not np.array_equal(resized[0].permute(1, 2, 0).round().clamp(0, 255), PixelRule(32).read(odd["square.png"]))
    laid = {**rule.to_preprocessor(MEAN, STD), "do_convert_rgb": True}
    assert not torch.equal(theirs(laid, loaded(odd["colour_key.png"])), ours(rule, odd["colour_key.png"]))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 40), st.integers(0, 9), st.sampled_from([0, 1, 2, 3]))
def test_any_size_to_any_size(width: int, height: int, size: int, more: int, resample: int) -> None:
    image = Image.fromarray(noise(height, width).astype(np.uint8))
    for resize in ("crop", "squash"):
        rule = PixelRule(size, resize, size + more, resample)
        tables = {c: theirs_cached(rule)(images=image, return_tensors="np")["pixel_values"][0, c] for c in range(3)}
        fitted = rule.fit(image)
        assert fitted.shape == (size, size, 3)
        for c, table in tables.items():
            assert np.array_equal(np.rint(table * 255), fitted[..., c])
        assert np.array_equal(rule.fit_batch(np.asarray(image)[None])[0], fitted)


@pytest.mark.parametrize(("name", "filter"), [("nearest", 0), ("lanczos", 1), ("bilinear", 2), ("bicubic", 3)])
def test_the_filter_of_the_resizing_is_an_option(name: str, filter: int, tmp_path: Path) -> None:
    """The networks of a config follow it, whatever they were trained with; the pixels are Pillow's."""
    image = Image.fromarray(noise(21, 33).astype(np.uint8))
    image.save(tmp_path / "a.png")
    network = load_network("tiny", 4, image_size=16)
    rule = rule_for(network, "squash", None, name)
    assert np.array_equal(rule.read(tmp_path / "a.png"), np.asarray(image.resize((16, 16), Image.Resampling(filter))))
    assert rule_for(network, "squash").resample == 3


@cache
def theirs_cached(rule: PixelRule) -> Any:
    return processor({**rule.to_preprocessor((0, 0, 0), (1, 1, 1))})


def test_the_rule_follows_the_size_of_the_network() -> None:
    dino = CONFIGS["dinov2"][0]
    assert PixelRule.from_preprocessor(dino, 112) == PixelRule(112, "crop", 128)
    assert PixelRule.from_preprocessor(CONFIGS["vit"][0], 112) == PixelRule(112, "squash", resample=2)
    assert PixelRule.from_preprocessor(CONFIGS["resnet"][0], 384) == PixelRule(384, "squash")


@pytest.mark.parametrize(
    "change",
    [
        {"image_processor_type": "SamImageProcessor"},
        {"image_processor_type": None},
        {"do_resize": False},
        {"do_rescale": False},
        {"rescale_factor": 1 / 127.5},
        {"do_flip_channel_order": True},
        {"do_pad": True},
        {"size": {"height": 10, "width": 20}},
        {"size": {"shortest_edge": 10, "longest_edge": 20}},
        {"crop_size": 500},
    ],
)
def test_preprocessing_that_cannot_be_followed_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(FedgraftError) as caught:
        PixelRule.from_preprocessor({**CONFIGS["dinov2"][0], **change}, 32)
    assert caught.value.code.startswith("E-DATA-PREPROCESSOR-")


@pytest.mark.parametrize("wrong", [{"size": 0}, {"size": 9, "edge": 8}, {"size": 8, "resize": "pad"}])
def test_impossible_rules_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(FedgraftError):
        PixelRule(**wrong)
    with raises("E-DATA-WINDOW", window=(5, 5)):
        PixelRule(8, window=(5, 5))


def test_deep_grey_is_cut_off_as_transformers_does_unless_a_window_is_given(odd: dict[str, Path]) -> None:
    values = np.array([[0, 1000, 2000, 4000, 65_535]], dtype=np.uint16)
    cut = decode_image(values)
    assert np.asarray(cut)[0, :, 0].tolist() == [0, 255, 255, 255, 255]
    assert cut.info["grey_peak"] == 65_535
    shown = decode_image(values, window=(1000, 4000))
    assert np.asarray(shown)[0, :, 1].tolist() == [0, 0, 85, 255, 255]
    assert "grey_peak" not in shown.info and "grey_peak" not in decode_image(odd["deep_low.png"]).info
    floats = np.array([[np.nan, -1, 0.5, 1]], dtype=np.float32)
    assert np.asarray(decode_image(floats, window=(0, 1)))[0, :, 2].tolist() == [0, 0, 128, 255]
    tall = np.arange(3_000_000, dtype=np.int32).reshape(-1, 1)  # seen in several strips
    shown = decode_image(tall, window=(0, 255 << 14))
    assert np.array_equal(np.asarray(shown)[..., 0], np.rint(tall / 2**14))
    assert decode_image(tall).info["grey_peak"] == 2_999_999
    rule = PixelRule(8, window=(0.0, 4095.0))
    said = rule.to_preprocessor(MEAN, STD)
    assert PixelRule.from_preprocessor(said, 8) == rule
    windowed = decode_image(odd["deep.png"], rule.window)  # what a user of the pipeline hands over instead of the path
    assert torch.equal(theirs(said, windowed), ours(rule, odd["deep.png"]))


def test_arrays() -> None:
    colour = noise(5, 7).astype(np.uint8)
    assert np.array_equal(decode_image(colour), colour)
    assert np.array_equal(decode_image(colour[..., :1]), colour[..., :1].repeat(3, 2))
    assert np.array_equal(decode_image(np.dstack([colour, colour[..., 0]])), colour)
    for wrong in (colour.astype(float), colour[None], colour[:0], np.zeros((3, 4), dtype=np.complex64)):
        with pytest.raises(Unreadable):
            decode_image(wrong)


def test_bombs_are_refused_by_their_headers(tmp_path: Path) -> None:
    """In a process of its own, which must not grow by more than 100 MB."""
    for name, data in bombs().items():
        (tmp_path / name).write_bytes(data)
    script = """
import resource, sys, warnings
from pathlib import Path
from fedgraft.data.pixels.rule import Unreadable, decode_image
warnings.simplefilter("ignore")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sorted(Path(sys.argv[1]).iterdir()):
    for source in (path, path.read_bytes()):
        try:
            decode_image(source)
            print(path.name, "was read")
        except Unreadable as error:
            if "limit" not in error.reason:
                print(path.name, error.reason)
if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before > 100_000:
    print("too much memory")
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == ""


def test_limits_are_limits(tmp_path: Path) -> None:
    image = Image.fromarray(noise(10, 11).astype(np.uint8))
    assert decode_image(image, max_pixels=110).size == (11, 10)
    for source in (image, np.asarray(image)):
        with raises("E-DATA-UNREADABLE"):
            decode_image(source, max_pixels=109)
    with raises("E-DATA-UNREADABLE"):
        decode_image(bytes(8 * 100 + 1), max_pixels=100)
    for rule in (PixelRule(224), PixelRule(224, "squash")):  # small, but would grow on the way beyond all bounds
        with raises("E-DATA-UNREADABLE"):
            rule.fit(Image.new("RGB", (1, MAX_PIXELS // 500)))
    assert PixelRule(8).fit(Image.new("RGB", (1, 500))).shape == (8, 8, 3)


def test_files_that_are_no_images(tmp_path: Path, odd: dict[str, Path]) -> None:
    cases = {
        "text.png": b"these are words, not pixels",
        "empty.jpg": b"",
        "lie.png": png_header(3000, 3000) + b"\0" * 50,
        "program.eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n",
    }
    for name in ("photo.jpg", "wide.png", "deep.tiff", "tall.webp", "plain.bmp", "palette.gif"):
        whole = odd[name].read_bytes()
        cases[f"cut_{name}"] = whole[: len(whole) // 2]
    for name, data in cases.items():
        (tmp_path / name).write_bytes(data)
        with raises("E-DATA-UNREADABLE") as caught:
            decode_image(tmp_path / name)
        assert str(caught.value).count("\n") == 0
    for missing in (tmp_path, tmp_path / "missing.png"):
        with raises("E-DATA-UNREADABLE"):
            decode_image(missing)


@pytest.mark.shared
def test_real_images(shared_data: Path) -> None:
    import io

    import pyarrow.parquet as pq

    path = shared_data / "pacs" / "test.parquet"
    if not path.is_file():
        pytest.skip("needs PACS in data/pacs of FEDGRAFT_SHARED")
    cells = pq.read_table(path, columns=["image"])["image"].to_pylist()[::200]
    for rule in (PixelRule(112), PixelRule(112, "squash"), PixelRule(112, "crop", 128)):
        reference = processor(rule.to_preprocessor(MEAN, STD))
        for cell in cells:
            data = cell["bytes"] if isinstance(cell, dict) else cell
            pixels = reference(images=Image.open(io.BytesIO(data)).convert("RGB"), return_tensors="pt")["pixel_values"]
            assert torch.equal(Transform(112, (), MEAN, STD)(torch.from_numpy(rule.read(data)[None])), pixels)
