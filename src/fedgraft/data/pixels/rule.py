"""The pixel rule: how a file, an encoded image or an array becomes the pixels a network sees, the same everywhere.

`decode` gives exactly the RGB image that `transformers.image_utils.load_image`, and so `pipeline`, makes of the same
file: turned upright as EXIF says, alpha dropped, grey repeated. `PixelRule` then resizes and crops as the slow (Pillow)
image processors of `transformers` do. docs/decisions/14-one-pixel-rule.md says why, and what happens to 16-bit grey.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from fedgraft.core.errors import FedgraftError

if TYPE_CHECKING:
    from PIL.Image import Image

Source: TypeAlias = "Path | bytes | Image | np.ndarray"
Window: TypeAlias = "tuple[float, float] | None"
MOST_PIXELS = 89_478_485  # Pillow's own mark for a decompression bomb: 358 MB decoded
# Formats that carry photographs. Others are left out on purpose: EPS starts a program, containers lie about sizes.
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
_BYTES_PER_PIXEL = 8  # nothing honest needs more: 16-bit RGBA, not compressed


class Unreadable(FedgraftError):
    """One image that cannot be used; `reason` is the sentence without its place."""

    def __init__(self, reason: str, where: str = "this image") -> None:
        super().__init__(f"{where} cannot be used: {reason}; repair it or leave it out.")
        self.reason = reason


def decode(source: Source, window: Window = None, most_pixels: int = MOST_PIXELS) -> Image:
    """The upright RGB image of a source, or a `FedgraftError` that says why there is none.

    `window` maps these two grey values of a deep image (16-bit, 32-bit, float) to black and white; without one, values
    are taken as they are and all above 255 are white, as `transformers` does. What was cut off so is told in the
    result's `info["grey_peak"]`.
    """
    where = str(source) if isinstance(source, Path) else "this image"
    try:
        return _to_rgb(_opened(source, most_pixels), window)
    except Unreadable as error:
        raise Unreadable(error.reason, where) from error
    except Exception as error:  # a damaged or hostile file makes Pillow raise almost anything; each means unreadable
        raise Unreadable(" ".join(str(error).split()) or type(error).__name__, where) from error


def original(source: Source) -> Image:
    """The upright image in its own mode, before it is made RGB; what `decode` refuses must not be asked for here."""
    try:
        return _opened(source, MOST_PIXELS)
    except Unreadable:
        raise
    except Exception as error:  # as in `decode`
        raise Unreadable(" ".join(str(error).split()) or type(error).__name__) from error


def _opened(source: Source, most_pixels: int) -> Image:
    """The upright image in its own mode, in memory and ours alone."""
    from PIL import ImageOps

    if isinstance(source, np.ndarray):
        return _from_array(source, most_pixels)
    if not isinstance(source, Path | bytes):
        _check_pixels(source.size, most_pixels)
        return ImageOps.exif_transpose(source)  # a copy: the caller's image stays as it is
    with _header(source, most_pixels) as image:
        _check_pixels(image.size, most_pixels)  # before anything is decoded
        ImageOps.exif_transpose(image, in_place=True)
        _check_pixels(image.size, most_pixels)  # a format may find its true size only now
    return image


def _header(source: Path | bytes, most_pixels: int) -> Image:
    from PIL import Image, UnidentifiedImageError

    if isinstance(source, Path) and not source.is_file():
        raise Unreadable("there is no such file")
    weight = len(source) if isinstance(source, bytes) else source.stat().st_size
    if weight > _BYTES_PER_PIXEL * most_pixels:
        raise Unreadable(f"it has {weight:,} bytes, more than an image of {most_pixels:,} pixels can need")
    Image.init()
    known = [name for name in FORMATS if name in Image.OPEN]
    try:
        return Image.open(source if isinstance(source, Path) else BytesIO(source), formats=known)
    except UnidentifiedImageError as error:
        raise Unreadable(f"it is not, or no longer, an image in one of the formats {', '.join(known)}") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise Unreadable(f"it declares more than {most_pixels:,} pixels, the limit") from error


def _check_pixels(size: tuple[int, int], most_pixels: int) -> None:
    if size[0] * size[1] > most_pixels:
        raise Unreadable(f"it has {size[0]:,} x {size[1]:,} pixels, more than the limit of {most_pixels:,}")
    if not min(size):
        raise Unreadable("it has no pixels")


def _from_array(array: np.ndarray, most_pixels: int) -> Image:
    from PIL import Image

    flat = array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array
    colour = flat.dtype == np.uint8 and (flat.ndim == 2 or (flat.ndim == 3 and flat.shape[2] in (2, 3, 4)))
    deep = flat.ndim == 2 and flat.dtype in (np.uint16, np.int32, np.float32)
    if not (colour or deep):
        raise Unreadable(
            f"an array of {array.dtype} {array.shape} is no image, give uint8 (height, width) or (height, width, 1 to "
            "4), or deep grey (height, width) as uint16, int32 or float32"
        )
    _check_pixels((flat.shape[1], flat.shape[0]), most_pixels)
    return Image.fromarray(np.ascontiguousarray(flat))


def _to_rgb(image: Image, window: Window) -> Image:
    """Exactly `convert("RGB")`, unless a deep grey image is to be seen through a window."""
    image.info.pop("transparency", None)  # plays no part in RGB; only makes Pillow warn
    if image.mode != "F" and not image.mode.startswith("I"):
        return image if image.mode == "RGB" else image.convert("RGB")  # ours already: no second copy of a large one
    if window is not None:
        return _windowed(image, *window).convert("RGB")
    peak = max(float(np.fmax.reduce(values, axis=None)) for _, values in _strips(image))  # fmax passes over NaN
    rgb = image.convert("RGB")
    if peak > 255:
        rgb.info["grey_peak"] = peak
    return rgb


def _windowed(image: Image, low: float, high: float) -> Image:
    from PIL import Image as factory

    grey = factory.new("L", image.size)
    for top, values in _strips(image):
        shown = (np.nan_to_num(values.astype(np.float32), nan=low) - low) * np.float32(255 / (high - low))
        grey.paste(factory.fromarray(np.rint(shown.clip(0, 255)).astype(np.uint8)), (0, top))
    return grey


def _strips(image: Image) -> Iterator[tuple[int, np.ndarray]]:
    """A deep image in strips of rows: Pillow copies thrice what it hands to NumPy, so never a large one whole."""
    rows = max(1, (1 << 20) // image.width)
    for top in range(0, image.height, rows):
        yield top, np.asarray(image.crop((0, top, image.width, min(top + rows, image.height))))


@dataclass(frozen=True)
class PixelRule:
    """How an RGB image becomes uint8 (size, size, 3): resize to `edge` pixels, then cut the middle out.

    "crop" resizes the shorter side to `edge` and keeps the aspect; "squash" makes both sides `edge`. `edge` is `size`
    unless given. `resample` is Pillow's number of the filter (2 bilinear, 3 bicubic); `window` is `decode`'s.
    """

    size: int
    resize: str = "crop"
    edge: int = 0
    resample: int = 3
    window: Window = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "edge", self.edge or self.size)
        if self.resize not in ("crop", "squash"):
            raise FedgraftError(f"there is no way to resize called {self.resize!r}; choose crop or squash.")
        if not 1 <= self.size <= self.edge:
            raise FedgraftError(f"the image size must be between 1 and {self.edge} pixels, but it is {self.size}.")
        if self.resample not in range(6):
            raise FedgraftError(f"there is no resampling filter {self.resample}; Pillow's are numbered 0 to 5.")
        if self.window is not None and not self.window[0] < self.window[1]:
            raise FedgraftError(f"the grey window must rise, but it is {self.window[0]} to {self.window[1]}.")

    @cached_property
    def digest(self) -> str:
        """Identity of the rule."""
        text = repr(("pixels", 1, self.size, self.resize, self.edge, self.resample, self.window))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def read(self, source: Source) -> np.ndarray:
        """The pixels of one source, uint8 (size, size, 3)."""
        return self.fit(decode(source, self.window))

    def fit(self, image: Image) -> np.ndarray:
        """An RGB image as uint8 (size, size, 3)."""
        from PIL.Image import Resampling

        width, height = self._resized(*image.size)
        left, top = (width - self.size) // 2, (height - self.size) // 2
        resized = image.resize((width, height), Resampling(self.resample))
        return np.array(resized.crop((left, top, left + self.size, top + self.size)))

    def fit_batch(self, images: np.ndarray) -> np.ndarray:
        """Small images kept at their own size, uint8 (B, H, W, 3), as (B, size, size, 3)."""
        from PIL import Image

        if images.shape[1:3] == (self.size, self.size) and self.edge == self.size:
            return images  # to resize it to itself would change nothing
        out = np.empty((len(images), self.size, self.size, 3), dtype=np.uint8)
        for place, image in enumerate(images):
            out[place] = self.fit(Image.fromarray(image))
        return out

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        new = (self.edge, self.edge)
        if self.resize == "crop":
            long = int(self.edge * max(width, height) / min(width, height))  # rounded down, as transformers does
            new = (self.edge, long) if width <= height else (long, self.edge)
        # A picture of 1 x 10,000,000 pixels is small until one side grows, and Pillow widens before it shortens.
        if new[0] * max(height, new[1]) > MOST_PIXELS // 4:
            raise Unreadable(f"its sides of {width:,} and {height:,} pixels are too unequal to be resized")
        return new

    @staticmethod
    def from_preprocessor(config: Mapping[str, Any], size: int) -> PixelRule:
        """The rule of a network's own preprocessor_config.json, brought to `size` pixels."""
        name = str(config.get("image_processor_type") or config.get("feature_extractor_type") or "")
        kind = re.sub(r"(ImageProcessor(Fast|Pil)?|FeatureExtractor)$", "", name)
        if kind not in _KNOWN:
            raise FedgraftError(f"the preprocessing {name!r} is not known; choose with: data.resize = crop or squash.")
        full = {**_KNOWN[kind], **{key: value for key, value in config.items() if value is not None}}
        _check_plain(full, name)
        square, edge = _edge(full["size"], full["square"], name)
        window = tuple(full["grey_window"]) if "grey_window" in full else None
        if kind == "ConvNext":
            if size >= 384:  # the class itself squashes from here on
                return PixelRule(size, "squash", size, full["resample"], window)
            return PixelRule(size, "crop", int(size / full["crop_pct"]), full["resample"], window)
        cut = _edge(full["crop_size"], True, name)[1] if full["do_center_crop"] else edge
        if cut > edge:
            raise FedgraftError(f"the preprocessing {name!r} cuts {cut} pixels out of {edge}; that is not supported.")
        wide = size if cut == edge else round(edge * size / cut)
        return PixelRule(size, "squash" if square else "crop", wide, full["resample"], window)

    def to_preprocessor(self, mean: Sequence[float], std: Sequence[float]) -> dict[str, Any]:
        """What preprocessor_config.json must say for `AutoImageProcessor` to make these very pixels."""
        cropped = self.resize == "crop" or self.edge > self.size
        kind = "Bit" if self.resize == "crop" else "DeiT" if cropped else "ViT"
        square = {"height": self.edge, "width": self.edge}
        said: dict[str, Any] = {
            "image_processor_type": f"{kind}ImageProcessor",
            "do_resize": True,
            "size": {"shortest_edge": self.edge} if self.resize == "crop" else square,
            "resample": self.resample,
            "do_center_crop": cropped,
            "do_convert_rgb": False,  # `load_image` did it; the processors would lay transparent colours on white
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(mean),
            "image_std": list(std),
        }
        if cropped:
            said["crop_size"] = {"height": self.size, "width": self.size}
        if self.window is not None:
            said["grey_window"] = list(self.window)
        return said


# What the classes of transformers do where a configuration is silent.
_KNOWN: dict[str, dict[str, Any]] = {
    "ViT": {"size": 224, "square": True, "do_center_crop": False, "crop_size": 224, "resample": 2},
    "DeiT": {"size": 256, "square": True, "do_center_crop": True, "crop_size": 224, "resample": 3},
    "Beit": {"size": 224, "square": True, "do_center_crop": False, "crop_size": 224, "resample": 3},
    "Bit": {"size": 224, "square": False, "do_center_crop": True, "crop_size": 224, "resample": 3},
    "CLIP": {"size": 224, "square": False, "do_center_crop": True, "crop_size": 224, "resample": 3},
    "ConvNext": {"size": 384, "square": False, "do_center_crop": False, "crop_pct": 224 / 256, "resample": 3},
}
_PLAIN = {"do_resize": True, "do_rescale": True, "do_pad": False, "do_flip_channel_order": False}


def _check_plain(config: Mapping[str, Any], name: str) -> None:
    for key, usual in _PLAIN.items():
        if config.get(key, usual) != usual:
            raise FedgraftError(f"the preprocessing {name!r} has {key} = {config[key]}, which is not supported.")
    if abs(config.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-9:
        raise FedgraftError(f"the preprocessing {name!r} must divide pixels by 255, but multiplies by another factor.")


def _edge(size: int | Mapping[str, int], square: bool, name: str) -> tuple[bool, int]:
    """Whether both sides are given, and the side."""
    if isinstance(size, int):
        return square, size
    if set(size) == {"shortest_edge"}:
        return False, size["shortest_edge"]
    if set(size) == {"height", "width"} and size["height"] == size["width"]:
        return True, size["height"]
    raise FedgraftError(f"the preprocessing {name!r} makes images of {dict(size)}; only square ones are supported.")
