"""Images at the size a network needs, made once from the originals by one `PixelRule` and memory-mapped ever after.

An entry of the cache belongs to one state of the originals and one rule: `images.npy` (N, S, S, 3), `store.json` once
it is complete, and until then `ledger.jsonl`, which says which stretches are done, so that a stopped build goes on
where it was. An entry whose files changed since is checked against its digests and rebuilt if it is damaged.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedgraft.core.errors import FedgraftError
from fedgraft.core.progress import phase
from fedgraft.data.pixels.originals import Originals
from fedgraft.data.pixels.rule import PixelRule, Source, Unreadable, decode

CHUNK = 128  # images per stretch: what a stop can lose
_OLD = 7 * 86_400  # seconds after which a build that nobody went on with is removed


@dataclass(frozen=True, eq=False)
class Pixels:
    """Pixels of all originals; `digest` is that of the pixels alone, wherever they came from."""

    images: np.ndarray  # uint8 (N, S, S, 3), memory-mapped; black where an original cannot be read
    bad: dict[int, str]  # the rows that cannot be read, and why
    clipped: int  # grey images that were cut off at white
    peak: float  # the brightest value of those
    digest: str


def pixels_digest(images: np.ndarray) -> str:
    """The digest of pixels (N, S, S, 3), read in chunks."""
    return _whole_digest(images.shape, _chunk_digests(images))


def open_pixels(originals: Originals, rule: PixelRule, cache: Path) -> Pixels:
    """The pixels of these originals under this rule, from the cache or else made now."""
    if not originals.count:
        raise FedgraftError(f"there are no images in {originals.name}; give at least one.")
    key = _digest(json.dumps([originals.identity, originals.count, rule.digest, CHUNK]).encode())
    entry = cache / "pixels" / f"{originals.name}-{key}"
    seal = _sealed(entry)
    if seal is None:
        try:
            _sweep(entry.parent)
            entry.mkdir(parents=True, exist_ok=True)
            with _locked(entry):
                seal = _sealed(entry) or _repaired(entry) or _build(entry, originals, rule)
        except OSError as error:
            raise FedgraftError(
                f"the images cannot be stored in {entry} ({error.strerror}); "
                "make room there, or set FEDGRAFT_CACHE to another folder."
            ) from error
    images = np.load(entry / "images.npy", mmap_mode="r", allow_pickle=False)
    return Pixels(images, dict(seal["bad"]), seal["clipped"], seal["peak"], seal["digest"])


def _sealed(entry: Path) -> dict[str, Any] | None:
    """What a complete entry says of itself, if its images have not been touched since."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        seal: dict[str, Any] = json.loads((entry / "store.json").read_text())
        if seal["stamp"] == _stamp(entry):
            return seal
    return None


def _repaired(entry: Path) -> dict[str, Any] | None:
    """The seal of an entry that was touched but is whole; a damaged one is cleared away, with a word."""
    if not (entry / "store.json").exists():
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        seal = json.loads((entry / "store.json").read_text())
        if pixels_digest(np.load(entry / "images.npy", mmap_mode="r", allow_pickle=False)) == seal["digest"]:
            return _write_seal(entry, seal)
    warnings.warn(f"the stored images in {entry} are damaged; making them anew.", stacklevel=4)
    for left in entry.iterdir():
        left.unlink()
    return None


def _build(entry: Path, originals: Originals, rule: PixelRule) -> dict[str, Any]:
    images = _blank(entry / "images.npy", (originals.count, rule.size, rule.size, 3))
    done = _ledger(entry, images)
    rest = originals.count - sum(min(CHUNK, originals.count - start) for start in done)
    with (
        ThreadPoolExecutor(os.cpu_count()) as pool,
        (entry / "ledger.jsonl").open("a") as ledger,
        phase(f"reading images at {rule.size} px", rest, "images") as told,
    ):
        for start in range(0, originals.count, CHUNK):
            stop = min(start + CHUNK, originals.count)
            if start not in done:
                made = list(pool.map(partial(_make, rule, originals.side), originals.read(start, stop)))
                if len(made) != stop - start:
                    raise FedgraftError(
                        f"{originals.name} gave {len(made)} images where {stop - start} were announced."
                    )
                done[start] = _fill(images, start, made)
                ledger.write(json.dumps(done[start]) + "\n")
                ledger.flush()
                told.advance(stop - start)
    images.flush()
    return _seal(entry, images, [done[start] for start in sorted(done)])


def _make(rule: PixelRule, side: int, source: Source) -> tuple[np.ndarray | None, str, float]:
    """Pixels, or None and why not; and the brightest value of a deep image that was cut off."""
    try:
        image = decode(source, rule.window)
        if side and image.size != (side, side):
            raise Unreadable(f"it has {image.width} x {image.height} pixels instead of {side} x {side}")
        return rule.fit(image), "", float(image.info.get("grey_peak", 0))
    except Unreadable as error:
        return None, error.reason, 0.0


def _fill(images: np.ndarray, start: int, made: list[tuple[np.ndarray | None, str, float]]) -> dict[str, Any]:
    for row, (pixels, _, _) in enumerate(made, start):
        images[row] = 0 if pixels is None else pixels
    return {
        "start": start,
        "digest": _digest(images[start : start + len(made)]),
        "bad": [[row, reason] for row, (pixels, reason, _) in enumerate(made, start) if pixels is None],
        "peaks": [peak for _, _, peak in made if peak],
    }


def _blank(path: Path, shape: tuple[int, ...]) -> np.memmap:
    """The array of an earlier attempt, or a new one whose place on the disk is reserved: a map cannot report none."""
    with suppress(OSError, ValueError):
        found: np.memmap = np.load(path, mmap_mode="r+", allow_pickle=False)
        if found.shape == shape and found.dtype == np.uint8:
            return found
    part = path.with_suffix(".part")
    images = np.lib.format.open_memmap(part, mode="w+", dtype=np.uint8, shape=shape)
    try:
        with part.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, part.stat().st_size)
    except OSError:
        part.unlink()
        raise
    part.replace(path)
    return images


def _ledger(entry: Path, images: np.ndarray) -> dict[int, dict[str, Any]]:
    """The stretches that are done and still as they were written; the file is left with these lines alone."""
    path, done = entry / "ledger.jsonl", {}
    with suppress(FileNotFoundError):
        for line in path.read_text().splitlines():
            with suppress(ValueError, KeyError, TypeError):  # a line cut off by a kill
                record = json.loads(line)
                if _digest(images[record["start"] : record["start"] + CHUNK]) == record["digest"]:
                    done[record["start"]] = record
    _replace(path, "".join(json.dumps(record) + "\n" for record in done.values()))
    return done


def _seal(entry: Path, images: np.ndarray, records: list[dict[str, Any]]) -> dict[str, Any]:
    bad = [pair for record in records for pair in record["bad"]]
    peaks = [peak for record in records for peak in record["peaks"]]
    whole = _whole_digest(images.shape, [record["digest"] for record in records])
    seal = {"digest": whole, "bad": bad, "clipped": len(peaks), "peak": max(peaks, default=0)}
    (entry / "ledger.jsonl").unlink()
    return _write_seal(entry, seal)


def _write_seal(entry: Path, seal: dict[str, Any]) -> dict[str, Any]:
    seal = {**seal, "stamp": _stamp(entry)}
    _replace(entry / "store.json", json.dumps(seal))
    return seal


def _replace(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


def _stamp(entry: Path) -> list[int]:
    stat = (entry / "images.npy").stat()
    return [stat.st_size, stat.st_mtime_ns]


@contextmanager
def _locked(entry: Path) -> Iterator[None]:
    """Several processes that need the same entry: one makes it, the others wait."""
    with entry.with_name(f".{entry.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sweep(folder: Path) -> None:
    """Remove builds that were left a week ago; one that is under way is younger."""
    for entry in folder.glob("[!.]*"):
        with suppress(FileNotFoundError):
            files = [path.stat().st_mtime for path in (entry, *entry.iterdir())]
            if not (entry / "store.json").exists() and time.time() - max(files) > _OLD:
                shutil.rmtree(entry, ignore_errors=True)


def _chunk_digests(images: np.ndarray) -> list[str]:
    return [_digest(images[start : start + CHUNK]) for start in range(0, len(images), CHUNK)]


def _whole_digest(shape: tuple[int, ...], chunks: list[str]) -> str:
    return _digest(json.dumps([list(shape), chunks]).encode())


def _digest(data: bytes | np.ndarray) -> str:
    plain = np.ascontiguousarray(data).data if isinstance(data, np.ndarray) else data
    return hashlib.blake2b(plain, digest_size=16).hexdigest()
