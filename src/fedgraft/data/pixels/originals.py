"""Where pixels are made from: image files, encoded images in parquet, or arrays, read a stretch of rows at a time."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from fedgraft.core.errors import FedgraftError
from fedgraft.data.pixels.rule import Source

_MOST_BYTES = 2 << 30  # of one row group in memory


@dataclass(frozen=True)
class Originals:
    """Images in a fixed order. `identity` (plain data) tells one state of them from another."""

    name: str
    identity: Any
    count: int
    read: Callable[[int, int], Sequence[Source]]  # the sources of the rows start..stop
    where: Callable[[int], str]  # how a person finds a row again
    side: int = 0  # all are squares of this side; 0: unknown


def file_identity(files: Iterable[Path]) -> list[list[Any]]:
    """What tells one state of these files from another without reading them: path, size and time of change."""
    found = [(path.resolve(), path.stat()) for path in files]
    return [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in found]


def from_files(files: Sequence[Path], name: str = "folder") -> Originals:
    """Image files, in the order given."""
    identity = file_identity(files)
    return Originals(name, identity, len(files), lambda start, stop: files[start:stop], lambda row: str(files[row]))


def from_arrays(images: np.ndarray | Sequence[Any], name: str = "arrays") -> Originals:
    """Arrays or Pillow images, one per image or all in one (N, H, W, C); the identity is their content."""
    hasher = hashlib.blake2b(digest_size=16)
    for image in images:
        plain = np.asarray(image.convert("RGBA") if getattr(image, "mode", "") in ("P", "PA") else image)
        hasher.update(repr((plain.dtype.str, plain.shape)).encode())
        hasher.update(np.ascontiguousarray(plain).data)
    read = lambda start, stop: list(images[start:stop])  # noqa: E731
    return Originals(name, hasher.hexdigest(), len(images), read, lambda row: f"image {row} of the arrays")


def chosen(whole: Originals, rows: np.ndarray) -> Originals:
    """Some rows of others, in this order."""

    def read(start: int, stop: int) -> list[Source]:
        wanted = rows[start:stop]
        runs = np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1)
        return [one for run in runs if len(run) for one in whole.read(int(run[0]), int(run[-1]) + 1)]

    identity = [whole.identity, hashlib.blake2b(rows.tobytes(), digest_size=16).hexdigest()]
    return Originals(whole.name, identity, len(rows), read, lambda row: whole.where(int(rows[row])))


def joined(parts: Sequence[Originals]) -> Originals:
    """Several one after the other."""
    ends = list(accumulate(part.count for part in parts))

    def at(row: int) -> tuple[Originals, int]:
        place = bisect_right(ends, row)
        return parts[place], row - (ends[place - 1] if place else 0)

    def read(start: int, stop: int) -> list[Source]:
        found: list[Source] = []
        while start + len(found) < stop:
            part, first = at(start + len(found))
            found += part.read(first, min(part.count, first + stop - start - len(found)))
        return found

    def where(row: int) -> str:
        part, place = at(row)
        return part.where(place)

    return Originals("joined", [part.identity for part in parts], ends[-1] if ends else 0, read, where)


def from_parquet(files: Sequence[Path], column: str, name: str = "parquet") -> Originals:
    """The encoded images in one column of parquet files: bytes, or a struct with `bytes` as `datasets` writes it."""
    groups = [group for path in files for group in _groups(path, column)]
    ends = list(accumulate(group.rows for group in groups))
    held: dict[int, list[bytes]] = {}

    def group_at(row: int) -> tuple[int, int]:
        place = bisect_right(ends, row)
        return place, row - (ends[place - 1] if place else 0)

    def read(start: int, stop: int) -> list[bytes]:
        found: list[bytes] = []
        while start + len(found) < stop:
            place, first = group_at(start + len(found))
            if place not in held:
                held.clear()  # one row group in memory, whatever the size of the file
                held[place] = groups[place].read(column)
            found += held[place][first : first + stop - start - len(found)]
        return found

    def where(row: int) -> str:
        place, first = group_at(row)
        return f"{groups[place].path}, row {groups[place].start + first}"

    return Originals(name, [column, file_identity(files)], ends[-1] if ends else 0, read, where)


def parquet_cells(file: Any, columns: list[str], path: Path, groups: list[int] | None = None) -> dict[str, list[Any]]:
    """The cells of these columns, a few rows at a time: a file of kilobytes may repeat one value a million times."""
    found: dict[str, list[Any]] = {name: [] for name in columns}
    size = 0
    for batch in file.iter_batches(16 if groups else 4096, row_groups=groups, columns=columns):
        size += batch.nbytes
        if size > _MOST_BYTES:
            raise FedgraftError(f"{path} unpacks to more than {_MOST_BYTES >> 20} MiB; write smaller row groups.")
        for name in columns:
            found[name] += batch.column(name).to_pylist()
    return found


@dataclass(frozen=True)
class _Group:
    path: Path
    index: int
    start: int
    rows: int

    def read(self, column: str) -> list[bytes]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(self.path) as file:
                cells = parquet_cells(file, [column], self.path, [self.index])[column]
        except (pa.ArrowException, OSError) as error:
            raise FedgraftError(f"{self.path} is damaged ({error}); fetch it again.") from error
        plain = [cell.get("bytes") if isinstance(cell, dict) else cell for cell in cells]
        if len(plain) != self.rows:
            raise FedgraftError(f"{self.path} declares {self.rows} rows where it holds {len(plain)}; fetch it again.")
        return [cell if isinstance(cell, bytes) else b"" for cell in plain]


def _groups(path: Path, column: str) -> list[_Group]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            meta, names = file.metadata, file.schema_arrow.names
    except (pa.ArrowException, OSError) as error:
        raise FedgraftError(f"{path} is not a readable parquet file ({error}).") from error
    if column not in names:
        raise FedgraftError(f"{path} has the columns {', '.join(names)}, but the images are sought in {column!r}.")
    parts = [meta.row_group(index) for index in range(meta.num_row_groups)]
    if parts and max(part.total_byte_size for part in parts) > _MOST_BYTES:
        raise FedgraftError(f"{path} has a row group of more than {_MOST_BYTES >> 30} GiB; write it with smaller ones.")
    starts = [0, *accumulate(part.num_rows for part in parts)]
    return [_Group(path, index, starts[index], part.num_rows) for index, part in enumerate(parts) if part.num_rows]
