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

from fedgraft.core.errors import FedgraftError, MissingExtra

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Slice:
    """One frame of a DICOM file or slice of a volume; the path alone stands for the first."""

    path: Path
    number: int


Source: TypeAlias = "Path | Slice | bytes | Image | np.ndarray"
"""An image before decoding: a file, a slice of one, encoded bytes, a Pillow image or an array."""
Window: TypeAlias = "tuple[float, float] | None"
"""The grey values of a deep image that become black and white; None: values are taken as they are."""
MAX_PIXELS = 89_478_485  # Pillow's own mark for a decompression bomb: 358 MB decoded
# Formats that carry photographs. Others are left out on purpose: EPS starts a program, containers lie about sizes.
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
_MAX_BYTES_PER_PIXEL = 8  # nothing honest needs more: 16-bit RGBA, not compressed
_STRIP_PIXELS = 1 << 20  # of a deep image that are handed to NumPy at a time


class Unreadable(FedgraftError):
    """One image that cannot be used; `reason` is the sentence without its place."""

    def __init__(self, reason: str, where: str = "this image") -> None:
        super().__init__(
            "E-DATA-UNREADABLE", f"{where} cannot be used: {reason}", "repair it or leave it out", where=where
        )
        self.reason = reason


def decode_image(source: Source, window: Window = None, max_pixels: int = MAX_PIXELS) -> Image:
    """Return the upright RGB image of a source of at most `max_pixels`, or raise `Unreadable` with the reason.

    `window` maps these two grey values of a deep image (16-bit, 32-bit, float) to black and white; without one, values
    are taken as they are and all above 255 are white, as `transformers` does. The brightest value that was cut off so
    is in the result's `info["grey_peak"]`. DICOM and NIfTI files say themselves how their values are seen.
    """
    from fedgraft.data.pixels.scans import is_scan, read_scan

    where = "this image"
    if isinstance(source, Path):
        where = str(source)
    elif isinstance(source, Slice):
        where = f"frame {source.number} of {source.path}"
    try:
        if is_scan(source):
            return read_scan(source, window, max_pixels).convert("RGB")
        return _to_rgb(_open_upright(source, max_pixels), window)
    except Unreadable as error:
        raise Unreadable(error.reason, where) from error
    except MissingExtra:
        raise
    except Exception as error:  # a damaged or hostile file makes Pillow raise almost anything; each means unreadable
        raise Unreadable(_reason(error), where) from error


def open_original(source: Source) -> Image:
    """Return the upright image in its own mode, before it is made RGB, or raise `Unreadable`."""
    try:
        return _open_upright(source, MAX_PIXELS)
    except Unreadable:
        raise
    except Exception as error:  # as in `decode`
        raise Unreadable(_reason(error)) from error


def _reason(error: Exception) -> str:
    """Return the text of an error in one line, or its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def _open_upright(source: Source, max_pixels: int) -> Image:
    """Return the upright image in its own mode, in memory and independent of the source."""
    from PIL import ImageOps

    if isinstance(source, np.ndarray):
        return _from_array(source, max_pixels)
    if isinstance(source, Slice):
        raise Unreadable("it is a slice of a scan, which has no mode of its own")
    if not isinstance(source, Path | bytes):
        _check_pixels(source.size, max_pixels)
        return ImageOps.exif_transpose(source)  # a copy: the caller's image stays as it is
    with _open_header(source, max_pixels) as image:
        _check_pixels(image.size, max_pixels)  # before anything is decoded
        ImageOps.exif_transpose(image, in_place=True)
        _check_pixels(image.size, max_pixels)  # some formats know their true size only after decoding
    return image


def _open_header(source: Path | bytes, max_pixels: int) -> Image:
    """Return a file or encoded image opened by Pillow, of a permitted format and size; nothing is decoded yet."""
    from PIL import Image, UnidentifiedImageError

    if isinstance(source, Path):
        if not source.is_file():
            raise Unreadable("there is no such file")
        file: Path | BytesIO = source
        size = source.stat().st_size
    else:
        file = BytesIO(source)
        size = len(source)
    if size > _MAX_BYTES_PER_PIXEL * max_pixels:
        raise Unreadable(f"it has {size:,} bytes, more than an image of {max_pixels:,} pixels can need")
    Image.init()
    formats = [name for name in FORMATS if name in Image.OPEN]
    try:
        return Image.open(file, formats=formats)
    except UnidentifiedImageError as error:
        raise Unreadable(f"it is not, or no longer, an image in one of the formats {', '.join(formats)}") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise Unreadable(f"it declares more than {max_pixels:,} pixels, the limit") from error


def _check_pixels(size: tuple[int, int], max_pixels: int) -> None:
    """Refuse an image (width, height) without pixels or with too many."""
    width, height = size
    if width * height > max_pixels:
        raise Unreadable(f"it has {width:,} x {height:,} pixels, more than the limit of {max_pixels:,}")
    if not min(size):
        raise Unreadable("it has no pixels")


def _from_array(array: np.ndarray, max_pixels: int) -> Image:
    """Return an array as an image: uint8 with 1 to 4 channels, or deep grey."""
    from PIL import Image

    flat = array
    if array.ndim == 3 and array.shape[2] == 1:
        flat = array[..., 0]
    is_plain = flat.dtype == np.uint8 and (flat.ndim == 2 or (flat.ndim == 3 and flat.shape[2] in (2, 3, 4)))
    is_deep = flat.ndim == 2 and flat.dtype in (np.uint16, np.int32, np.float32)
    if not (is_plain or is_deep):
        raise Unreadable(
            f"an array of {array.dtype} {array.shape} is no image, give uint8 (height, width) or (height, width, 1 to "
            "4), or deep grey (height, width) as uint16, int32 or float32"
        )
    _check_pixels((flat.shape[1], flat.shape[0]), max_pixels)
    return Image.fromarray(np.ascontiguousarray(flat))


def _to_rgb(image: Image, window: Window) -> Image:
    """Return exactly `convert("RGB")`, unless a deep grey image is seen through a window. May change `image`."""
    image.info.pop("transparency", None)  # plays no part in RGB; only makes Pillow warn
    if image.mode == "RGB":
        return image  # independent of the source already: no second copy of a large one
    if image.mode != "F" and not image.mode.startswith("I"):
        return image.convert("RGB")
    if window is not None:
        return _apply_window(image, *window).convert("RGB")
    peak = max(float(np.fmax.reduce(values, axis=None)) for _, values in _strips(image))  # fmax passes over NaN
    rgb = image.convert("RGB")
    if peak > 255:
        rgb.info["grey_peak"] = peak
    return rgb


def _apply_window(image: Image, low: float, high: float) -> Image:
    """Return a deep image as 8-bit grey, with `low` as black and `high` as white; NaN is black."""
    from PIL import Image as factory

    grey = factory.new("L", image.size)
    for top, values in _strips(image):
        grey.paste(factory.fromarray(window_grey(values, low, high)), (0, top))
    return grey


def window_grey(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Return grey values as uint8, with `low` as black and `high` as white; NaN is black."""
    scaled = (np.nan_to_num(values.astype(np.float32), nan=low) - low) * np.float32(255 / (high - low))
    return np.rint(scaled.clip(0, 255)).astype(np.uint8)


def _strips(image: Image) -> Iterator[tuple[int, np.ndarray]]:
    """Yield a deep image in strips (first row, values).

    Pillow makes three copies of an image that it hands to NumPy, so a large one is never handed over whole.
    """
    rows = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        yield top, np.asarray(image.crop((0, top, image.width, min(top + rows, image.height))))


@dataclass(frozen=True)
class PixelRule:
    """How an RGB image becomes uint8 (size, size, 3): resize to `edge` pixels, then cut the middle out.

    "crop" resizes the shorter side to `edge` and keeps the aspect; "squash" makes both sides `edge`. The default of
    `edge` (0) is `size`. `resample` is Pillow's number of the filter (2 bilinear, 3 bicubic); `window` is `decode`'s.
    """

    size: int
    resize: str = "crop"
    edge: int = 0
    resample: int = 3
    window: Window = None

    def __post_init__(self) -> None:
        """Fill in `edge` and check all values."""
        object.__setattr__(self, "edge", self.edge or self.size)
        if self.resize not in ("crop", "squash"):
            raise FedgraftError(
                "E-DATA-RESIZE",
                f"there is no way to resize called {self.resize!r}",
                "choose crop or squash",
                resize=self.resize,
            )
        if not 1 <= self.size <= self.edge:
            raise FedgraftError(
                "E-DATA-IMAGE-SIZE",
                f"the image size must be between 1 and {self.edge} pixels, but it is {self.size}",
                "choose another size",
                size=self.size,
                edge=self.edge,
            )
        if self.resample not in range(6):
            raise FedgraftError(
                "E-DATA-RESAMPLE",
                f"there is no resampling filter {self.resample}",
                "choose one of Pillow's, which are numbered 0 to 5",
                resample=self.resample,
            )
        if self.window is not None and not self.window[0] < self.window[1]:
            raise FedgraftError(
                "E-DATA-WINDOW",
                f"the grey window must rise, but it is {self.window[0]} to {self.window[1]}",
                "give the darker value first",
                window=self.window,
            )

    @cached_property
    def digest(self) -> str:
        """Identity of the rule."""
        text = repr(("pixels", 1, self.size, self.resize, self.edge, self.resample, self.window))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def read(self, source: Source) -> np.ndarray:
        """Return the pixels of one source, uint8 (size, size, 3)."""
        return self.fit(decode_image(source, self.window))

    def fit(self, image: Image) -> np.ndarray:
        """Return an RGB image as uint8 (size, size, 3)."""
        from PIL.Image import Resampling

        width, height = self._resized(*image.size)
        left = (width - self.size) // 2
        top = (height - self.size) // 2
        resized = image.resize((width, height), Resampling(self.resample))
        return np.array(resized.crop((left, top, left + self.size, top + self.size)))

    def fit_batch(self, images: np.ndarray) -> np.ndarray:
        """Return images stored at their own size, uint8 (B, H, W, 3), as (B, size, size, 3)."""
        from PIL import Image

        if images.shape[1:3] == (self.size, self.size) and self.edge == self.size:
            return images  # to resize it to itself would change nothing
        fitted = np.empty((len(images), self.size, self.size, 3), dtype=np.uint8)
        for place, image in enumerate(images):
            fitted[place] = self.fit(Image.fromarray(image))
        return fitted

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        """Return (width, height) after resizing and before the middle is cut out."""
        new_width = self.edge
        new_height = self.edge
        if self.resize == "crop":
            long_side = int(self.edge * max(width, height) / min(width, height))  # rounded down, as transformers does
            if width <= height:
                new_height = long_side
            else:
                new_width = long_side
        # A picture of 1 x 10,000,000 pixels is small until one side grows, and Pillow widens before it shortens.
        if new_width * max(height, new_height) > MAX_PIXELS // 4:
            raise Unreadable(f"its sides of {width:,} and {height:,} pixels are too unequal to be resized")
        return new_width, new_height

    @staticmethod
    def from_preprocessor(config: Mapping[str, Any], size: int) -> PixelRule:
        """Return the rule of a network's own preprocessor_config.json, adapted to `size` pixels."""
        name = str(config.get("image_processor_type") or config.get("feature_extractor_type") or "")
        kind = re.sub(r"(ImageProcessor(Fast|Pil)?|FeatureExtractor)$", "", name)
        if kind not in _DEFAULTS:
            raise FedgraftError(
                "E-DATA-PREPROCESSOR-KIND",
                f"the preprocessing {name!r} is not known",
                "choose with: data.resize = crop or squash",
                preprocessor=name,
            )
        options = dict(_DEFAULTS[kind])
        for key, value in config.items():
            if value is not None:
                options[key] = value
        _check_supported(options, name)
        is_square, edge = _edge(options["size"], options["square"], name)
        window = None
        if "grey_window" in options:
            window = tuple(options["grey_window"])
        if kind == "ConvNext":
            if size >= 384:  # the class itself squashes from here on
                return PixelRule(size, "squash", size, options["resample"], window)
            return PixelRule(size, "crop", int(size / options["crop_pct"]), options["resample"], window)
        crop_size = edge
        if options["do_center_crop"]:
            _, crop_size = _edge(options["crop_size"], True, name)
        if crop_size > edge:
            raise FedgraftError(
                "E-DATA-PREPROCESSOR-CROP",
                f"the preprocessing {name!r} cuts {crop_size} pixels out of {edge}, which is not supported",
                "choose with: data.resize = crop or squash",
                preprocessor=name,
            )
        new_edge = size
        if crop_size != edge:
            new_edge = round(edge * size / crop_size)
        resize = "squash" if is_square else "crop"
        return PixelRule(size, resize, new_edge, options["resample"], window)

    def to_preprocessor(self, mean: Sequence[float], std: Sequence[float]) -> dict[str, Any]:
        """Return the content of preprocessor_config.json with which `AutoImageProcessor` makes these very pixels.

        `mean` and `std` of the channels are for its normalisation.
        """
        size = {"height": self.edge, "width": self.edge}
        cropped = self.edge > self.size
        if self.resize == "crop":
            kind = "Bit"
            cropped = True
            size = {"shortest_edge": self.edge}
        elif cropped:
            kind = "DeiT"
        else:
            kind = "ViT"
        config: dict[str, Any] = {
            "image_processor_type": f"{kind}ImageProcessor",
            "do_resize": True,
            "size": size,
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
            config["crop_size"] = {"height": self.size, "width": self.size}
        if self.window is not None:
            config["grey_window"] = list(self.window)
        return config


_DEFAULTS: dict[str, dict[str, Any]] = {
    "ViT": {"size": 224, "square": True, "do_center_crop": False, "crop_size": 224, "resample": 2},
    "DeiT": {"size": 256, "square": True, "do_center_crop": True, "crop_size": 224, "resample": 3},
    "Beit": {"size": 224, "square": True, "do_center_crop": False, "crop_size": 224, "resample": 3},
    "Bit": {"size": 224, "square": False, "do_center_crop": True, "crop_size": 224, "resample": 3},
    "CLIP": {"size": 224, "square": False, "do_center_crop": True, "crop_size": 224, "resample": 3},
    "ConvNext": {"size": 384, "square": False, "do_center_crop": False, "crop_pct": 224 / 256, "resample": 3},
}
"""What the image processors of transformers do where a configuration does not say it."""
_REQUIRED = {"do_resize": True, "do_rescale": True, "do_pad": False, "do_flip_channel_order": False}
"""The only supported values of these keys; a missing key has this value."""


def _check_supported(config: Mapping[str, Any], name: str) -> None:
    """Raise for preprocessing with steps that the pixel rule does not have; `name` is the preprocessor's."""
    for key, required in _REQUIRED.items():
        if config.get(key, required) != required:
            raise FedgraftError(
                "E-DATA-PREPROCESSOR-STEP",
                f"the preprocessing {name!r} has {key} = {config[key]}, which is not supported",
                "choose with: data.resize = crop or squash",
                preprocessor=name,
                key=key,
            )
    if abs(config.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-9:
        raise FedgraftError(
            "E-DATA-PREPROCESSOR-SCALE",
            f"the preprocessing {name!r} must divide pixels by 255, but multiplies by another factor",
            "choose with: data.resize = crop or squash",
            preprocessor=name,
        )


def _edge(size: int | Mapping[str, int], square: bool, name: str) -> tuple[bool, int]:
    """Return (whether both sides are given, the side in pixels) from a preprocessor's `size`.

    A bare number means what `square` says; a shape that is not square is refused. `name` is the preprocessor's, for the
    error.
    """
    if isinstance(size, int):
        return square, size
    if set(size) == {"shortest_edge"}:
        return False, size["shortest_edge"]
    if set(size) == {"height", "width"} and size["height"] == size["width"]:
        return True, size["height"]
    raise FedgraftError(
        "E-DATA-PREPROCESSOR-SHAPE",
        f"the preprocessing {name!r} makes images of {dict(size)}, but only square ones are supported",
        "choose with: data.resize = crop or squash",
        preprocessor=name,
    )
