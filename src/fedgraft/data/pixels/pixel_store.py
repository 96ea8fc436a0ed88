"""Pixels at the size a network needs, made once from the originals by one `PixelRule` and kept in a file.

An entry of the cache belongs to one state of the originals and one rule: `images.npy` (N, S, S, 3), `store.json` (the
seal) once it is complete, and until then `ledger.jsonl`, which lists the finished chunks, so that a stopped build
continues where it was. An entry whose files changed since is checked against its digests and rebuilt if it is damaged.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedgraft.core.errors import FedgraftError
from fedgraft.core.progress import phase
from fedgraft.core.store import digest_of_chunks, locked, replacing, write_all
from fedgraft.data.cache_limit import make_room, note_use
from fedgraft.data.pixels.originals import Originals
from fedgraft.data.pixels.pixel_file import PixelFile, create, open_images
from fedgraft.data.pixels.rule import PixelRule, Source, Unreadable, decode_image

CHUNK = 128  # images that are made and recorded together: what a stop can lose
_ABANDONED_AFTER = 7 * 86_400  # seconds after which an unfinished build is removed


@dataclass(frozen=True, eq=False)
class Pixels:
    """The pixels of a store under one pixel rule, addressed by row: `pixels[rows]` is uint8 (B, S, S, 3)."""

    images: np.ndarray | PixelFile  # uint8 (M, H, W, 3); from the cache memory-mapped, or read by rows if it is large
    digest: str
    """Of the pixels and, where only some rows are addressed, of these rows; not of where they came from."""
    rows: np.ndarray | None = None
    """The place of each row among the images; None: its own number."""
    fit: Callable[[np.ndarray], np.ndarray] | None = None
    """Resizes images that are stored at their own size; None: they have the size of the rule."""
    unreadable: Mapping[int, str] = field(default_factory=dict)
    """The images that cannot be read (black), and why."""
    clipped: int = 0
    """Number of grey images that were cut off at white."""
    peak: float = 0
    """The brightest value of those."""

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        """Return the pixels of these rows, uint8 (B, S, S, 3)."""
        places = rows
        if self.rows is not None:
            places = self.rows[rows]
        images = self.images[places]
        if self.fit is not None:
            images = self.fit(images)
        return images


@dataclass(frozen=True)
class Made:
    """The pixels that one original gave, or None and the reason.

    `peak`: brightest value of a clipped grey image, else 0.
    """

    pixels: np.ndarray | None
    reason: str = ""
    peak: float = 0.0


def pixels_digest(images: np.ndarray | PixelFile) -> str:
    """Return the digest of pixels (N, S, S, 3), read in chunks."""
    digests = []
    for start in range(0, len(images), CHUNK):
        rows = np.arange(start, min(start + CHUNK, len(images)))
        digests.append(_digest(images[rows]))
    return _whole_digest(images.shape, digests)


def open_pixels(originals: Originals, rule: PixelRule, cache: Path) -> Pixels:
    """Return the pixels of these originals under this rule from the cache folder.

    Make and store them if they are missing. Unreadable images become black and are listed in the result.
    """
    if not originals.count:
        raise FedgraftError(
            "E-DATA-NO-IMAGES", f"there are no images in {originals.name}", "give at least one", name=originals.name
        )
    entry = _entry(originals, rule, cache)
    seal = _read_seal(entry)
    if seal is None:
        try:
            _remove_abandoned(entry.parent)
            entry.mkdir(parents=True, exist_ok=True)
            # One of several processes that need the same entry makes it, while the others wait.
            with locked(entry.with_name(f".{entry.name}.lock")):
                seal = _read_seal(entry) or _reseal(entry) or _build(entry, originals, rule)
        except OSError as error:
            raise FedgraftError(
                "E-DATA-CACHE-WRITE",
                f"the images cannot be stored in {entry} ({error.strerror})",
                "make room there, set FEDGRAFT_CACHE to another folder, or store none: data.store=none",
                path=str(entry),
            ) from error
    return _sealed_pixels(entry, seal)


def stored_pixels(originals: Originals, rule: PixelRule, cache: Path) -> Pixels | None:
    """Return the pixels of these originals under this rule if the cache folder has all of them, else None."""
    entry = _entry(originals, rule, cache)
    seal = _read_seal(entry)
    if seal is None:
        return None
    return _sealed_pixels(entry, seal)


def _entry(originals: Originals, rule: PixelRule, cache: Path) -> Path:
    """Return the folder of these originals under this rule in the cache."""
    key = _digest(json.dumps([originals.identity, originals.count, rule.digest, CHUNK]).encode())
    return cache / "pixels" / f"{originals.name}-{key}"


def _sealed_pixels(entry: Path, seal: dict[str, Any]) -> Pixels:
    """Return the pixels of a complete folder of the cache."""
    images = open_images(entry / "images.npy")
    note_use(entry)
    return Pixels(images, seal["digest"], unreadable=dict(seal["bad"]), clipped=seal["clipped"], peak=seal["peak"])


def _read_seal(entry: Path) -> dict[str, Any] | None:
    """Return the seal of a complete cache folder `entry` whose images have not been touched since, else None.

    The seal is the content of store.json: digest of the pixels, unreadable images, size and time of images.npy.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        seal: dict[str, Any] = json.loads((entry / "store.json").read_text())
        if seal["stamp"] == _stamp(entry):
            return seal
    return None


def _reseal(entry: Path) -> dict[str, Any] | None:
    """Return a new seal for a cache folder whose images were touched but are intact; None where there is no seal.

    The files of a damaged one are removed, with a warning.
    """
    if not (entry / "store.json").exists():
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        seal = json.loads((entry / "store.json").read_text())
        if pixels_digest(PixelFile(entry / "images.npy")) == seal["digest"]:
            return _write_seal(entry, seal)
    warnings.warn(f"the stored images in {entry} are damaged; making them anew.", stacklevel=4)
    for path in entry.iterdir():
        path.unlink()
    return None


def _build(entry: Path, originals: Originals, rule: PixelRule) -> dict[str, Any]:
    """Make the pixels that are still missing, in threads, record each chunk in the ledger, and return the seal.

    A build that was stopped before continues after the chunks in its ledger.
    """
    shape = (originals.count, rule.size, rule.size, 3)
    if not (entry / "images.npy").exists():  # its place is reserved when a build begins
        make_room(int(np.prod(shape)))
    images = _open_array(entry / "images.npy", shape)
    records = _read_ledger(entry, images)
    missing = originals.count - sum(min(CHUNK, originals.count - start) for start in records)
    make = partial(make_pixels, rule, originals.side)
    label = f"reading images at {rule.size} px"
    if rule.size == 1:  # only whether each can be read is wanted
        label = "checking whether images can be read"
    with (
        ThreadPoolExecutor(os.cpu_count()) as pool,
        (entry / "ledger.jsonl").open("a") as ledger,
        phase(label, missing, "images") as progress,
    ):
        for start in range(0, originals.count, CHUNK):
            if start in records:
                continue
            stop = min(start + CHUNK, originals.count)
            made = list(pool.map(make, originals.read(start, stop)))
            if len(made) != stop - start:
                raise FedgraftError(
                    "E-DATA-IMAGE-COUNT",
                    f"{originals.name} gave {len(made)} images where {stop - start} were announced",
                    "check that the source did not change while it was read",
                    name=originals.name,
                )
            records[start] = _store_chunk(images, start, made)
            ledger.write(json.dumps(records[start]) + "\n")
            ledger.flush()
            progress.advance(stop - start)
    images.flush()
    return _seal(entry, images, [records[start] for start in sorted(records)])


def make_pixels(rule: PixelRule, side: int, source: Source) -> Made:
    """Return the pixels of one source; `side` is the side that the image must have, 0: any."""
    try:
        image = decode_image(source, rule.window)
        if side and image.size != (side, side):
            raise Unreadable(f"it has {image.width} x {image.height} pixels instead of {side} x {side}")
        return Made(rule.fit(image), peak=float(image.info.get("grey_peak", 0)))
    except Unreadable as error:
        return Made(None, error.reason)


def _store_chunk(images: PixelFile, start: int, chunk: list[Made]) -> dict[str, Any]:
    """Write the pixels of a chunk to the file, from row `start` on; unreadable images become black.

    Return the chunk's record for the ledger.
    """
    pixels = np.zeros((len(chunk), *images.shape[1:]), dtype=np.uint8)
    unreadable = []
    peaks = []
    for row, made in enumerate(chunk):
        if made.pixels is None:
            unreadable.append([start + row, made.reason])
        else:
            pixels[row] = made.pixels
        if made.peak:
            peaks.append(made.peak)
    images.write(start, pixels)
    digest = _digest(pixels)
    return {"start": start, "digest": digest, "bad": unreadable, "peaks": peaks}


def _open_array(path: Path, shape: tuple[int, ...]) -> PixelFile:
    """Return the file of an earlier attempt, or a new one, whose place on the disk is reserved."""
    with suppress(OSError, ValueError):
        earlier = PixelFile(path, writable=True)
        if earlier.shape == shape:
            return earlier
    return create(path, shape)


def _read_ledger(entry: Path, images: PixelFile) -> dict[int, dict[str, Any]]:
    """Return the records of intact chunks by their first row, and rewrite the ledger with these alone."""
    path = entry / "ledger.jsonl"
    records: dict[int, dict[str, Any]] = {}
    with suppress(FileNotFoundError):
        for line in path.read_text().splitlines():
            with suppress(ValueError, KeyError, TypeError):  # a line cut off by a kill
                record = json.loads(line)
                if _digest(images.read(record["start"], record["start"] + CHUNK)) == record["digest"]:
                    records[record["start"]] = record
    _replace(path, "".join(json.dumps(record) + "\n" for record in records.values()))
    return records


def _seal(entry: Path, images: PixelFile, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Write the seal (store.json) of a complete entry from its chunks' records, remove the ledger, return the seal."""
    unreadable: list[list[Any]] = []
    peaks: list[float] = []
    digests: list[str] = []
    for record in records:
        unreadable += record["bad"]
        peaks += record["peaks"]
        digests.append(record["digest"])
    seal = {
        "digest": _whole_digest(images.shape, digests),
        "bad": unreadable,
        "clipped": len(peaks),
        "peak": max(peaks, default=0),
    }
    (entry / "ledger.jsonl").unlink()
    return _write_seal(entry, seal)


def _write_seal(entry: Path, seal: dict[str, Any]) -> dict[str, Any]:
    """Write the seal into the cache folder `entry`, with the present size and time of its images; return it."""
    seal = {**seal, "stamp": _stamp(entry)}
    _replace(entry / "store.json", json.dumps(seal))
    return seal


def _replace(path: Path, text: str) -> None:
    """Write a text file atomically; whoever writes holds the lock of the entry."""
    with replacing(path, durable=False) as descriptor:
        write_all(descriptor, text.encode())


def _stamp(entry: Path) -> list[int]:
    """Return size and time of change of the images."""
    stat = (entry / "images.npy").stat()
    return [stat.st_size, stat.st_mtime_ns]


def _remove_abandoned(folder: Path) -> None:
    """Remove builds that nobody continued for a week; one that is under way is younger."""
    for entry in folder.glob("[!.]*"):
        with suppress(FileNotFoundError):
            changed = [path.stat().st_mtime for path in (entry, *entry.iterdir())]
            if not (entry / "store.json").exists() and time.time() - max(changed) > _ABANDONED_AFTER:
                shutil.rmtree(entry, ignore_errors=True)


def _whole_digest(shape: tuple[int, ...], chunks: list[str]) -> str:
    """Return the digest of pixels of this shape, from the digests of their chunks."""
    return _digest(json.dumps([list(shape), chunks]).encode())


def _digest(data: bytes | np.ndarray) -> str:
    """Return a digest of bytes or of the content of an array."""
    if isinstance(data, np.ndarray):
        return digest_of_chunks([np.ascontiguousarray(data).data])
    return digest_of_chunks([data])
