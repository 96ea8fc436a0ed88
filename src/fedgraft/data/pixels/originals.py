"""The originals that pixels are made from: image files, encoded images in parquet, or arrays, read in runs of rows."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from fedgraft.core.errors import FedgraftError
from fedgraft.core.progress import phase
from fedgraft.data.pixels.rule import Slice, Source

_MAX_BYTES = 2 << 30  # of one parquet row group in memory


@dataclass(frozen=True)
class Originals:
    """Images in a fixed order that can be read in runs of rows; `from_files` and others make it.

    `identity` (plain data) tells one state of them from another.
    """

    name: str
    identity: Any
    count: int
    read: Callable[[int, int], Sequence[Source]]
    """Return the sources of the rows start..stop."""
    where: Callable[[int], str]
    """Return how a person finds a row again, for example the path of its file."""
    side: int = 0
    """All images are squares of this side; 0: unknown."""
    by_row: bool = True
    """One row can be read without reading its neighbours (files); else only runs of rows are quick (parquet)."""


def file_identity(files: Iterable[Path]) -> list[list[Any]]:
    """Return what tells one state of these files from another without reading them: path, size and time of change."""
    identity: list[list[Any]] = []
    for path in files:
        resolved = path.resolve()
        stat = path.stat()
        identity.append([str(resolved), stat.st_size, stat.st_mtime_ns])
    return identity


def from_files(
    files: Sequence[str | Path], name: str = "folder", frames: Sequence[int | None] | None = None
) -> Originals:
    """Return image files as originals, in this order; looks at their size and time of change, opens none.

    `frames` are the numbers of the frames that rows are of (None: the file is one image, or its first frame is meant);
    without it all files are such.
    """
    paths = [str(path) for path in files]  # a hundred thousand texts take a fifth of the memory of as many paths
    numbers = list(frames or [None] * len(paths))
    hasher = hashlib.blake2b(digest_size=16)
    with phase("looking at files", len(paths), "files") as progress:
        for path, number in zip(paths, numbers, strict=True):
            identity: list[Any] = file_identity([Path(path)])
            if number is not None:
                identity.append(number)
            hasher.update(json.dumps(identity).encode())
            progress.advance()

    def read(start: int, stop: int) -> Sequence[Source]:
        """Return the files of these rows; they are not opened."""
        sources: list[Source] = []
        for path, number in zip(paths[start:stop], numbers[start:stop], strict=True):
            if number is None:
                sources.append(Path(path))
            else:
                sources.append(Slice(Path(path), number))
        return sources

    def where(row: int) -> str:
        if numbers[row] is None:
            return paths[row]
        return f"{paths[row]}, frame {numbers[row]}"

    return Originals(name, hasher.hexdigest(), len(paths), read, where)


def from_arrays(images: np.ndarray | Sequence[Any], name: str = "arrays") -> Originals:
    """Return arrays or Pillow images, one per image or all in one (N, H, W, C), as originals.

    Their identity is a digest of their content.
    """
    hasher = hashlib.blake2b(digest_size=16)
    for image in images:
        if getattr(image, "mode", "") in ("P", "PA"):
            array = np.asarray(image.convert("RGBA"))
        else:
            array = np.asarray(image)
        hasher.update(repr((array.dtype.str, array.shape)).encode())
        hasher.update(np.ascontiguousarray(array).data)

    def read(start: int, stop: int) -> Sequence[Source]:
        return list(images[start:stop])

    def where(row: int) -> str:
        return f"image {row} of the arrays"

    return Originals(name, hasher.hexdigest(), len(images), read, where)


def take_rows(whole: Originals, rows: np.ndarray) -> Originals:
    """Return these rows of other originals, in this order, as originals of their own."""

    def read(start: int, stop: int) -> list[Source]:
        """Return the sources of these rows; neighbouring rows of the whole are read together."""
        selected = rows[start:stop]
        sources: list[Source] = []
        for run in np.split(selected, np.flatnonzero(np.diff(selected) != 1) + 1):  # neighbours are read together
            if len(run):
                sources += whole.read(int(run[0]), int(run[-1]) + 1)
        return sources

    def where(row: int) -> str:
        return whole.where(int(rows[row]))

    identity = [whole.identity, hashlib.blake2b(rows.tobytes(), digest_size=16).hexdigest()]
    return Originals(whole.name, identity, len(rows), read, where, by_row=whole.by_row)


def joined(parts: Sequence[Originals]) -> Originals:
    """Return several originals as one, their rows one after the other."""
    ends = [0, *accumulate(part.count for part in parts)]  # ends[i]: rows before part i

    def locate(row: int) -> tuple[Originals, int]:
        """Return the part that has this row, and the row's number in it."""
        number = bisect_right(ends, row) - 1
        return parts[number], row - ends[number]

    def read(start: int, stop: int) -> list[Source]:
        """Return the sources of these rows, part after part."""
        sources: list[Source] = []
        while start + len(sources) < stop:
            part, first = locate(start + len(sources))
            missing = stop - start - len(sources)
            sources += part.read(first, min(part.count, first + missing))
        return sources

    def where(row: int) -> str:
        part, place = locate(row)
        return part.where(place)

    identity = [part.identity for part in parts]
    by_row = all(part.by_row for part in parts)
    return Originals("joined", identity, ends[-1], read, where, by_row=by_row)


def from_parquet(files: Sequence[Path], column: str, name: str = "parquet") -> Originals:
    """Return the encoded images in one column of parquet files as originals.

    A cell holds bytes, or a struct with `bytes` as `datasets` writes it. One row group is in memory at a time.
    """
    cached: dict[tuple[Path, int], list[bytes]] = {}
    groups: list[Originals] = []
    for path in files:
        groups += _row_groups(path, column, cached)
    return replace(joined(groups), name=name, identity=[column, file_identity(files)])


def _row_groups(path: Path, column: str, cached: dict[tuple[Path, int], list[bytes]]) -> list[Originals]:
    """Return the row groups of a file, each as originals of the images in `column`; reads the file's metadata.

    `cached` holds the cells of the one row group that was read last, whichever file it is of.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            metadata = file.metadata
            names = file.schema_arrow.names
    except (pa.ArrowException, OSError) as error:
        raise FedgraftError(
            "E-DATA-PARQUET-UNREADABLE",
            f"{path} is not a readable parquet file ({error})",
            "fetch it again",
            path=str(path),
        ) from error
    if column not in names:
        raise FedgraftError(
            "E-DATA-NO-IMAGE-COLUMN",
            f"{path} has the columns {', '.join(names)}, but no column {column!r} of images",
            "name the column of the images",
            path=str(path),
            column=column,
        )
    groups = []
    start = 0
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        if group.total_byte_size > _MAX_BYTES:
            raise FedgraftError(
                "E-DATA-ROW-GROUP-SIZE",
                f"{path} has a row group of more than {_MAX_BYTES >> 30} GiB",
                "write it with smaller ones",
                path=str(path),
            )
        if group.num_rows:
            groups.append(_row_group(path, index, start, group.num_rows, column, cached))
        start += group.num_rows
    return groups


def _row_group(
    path: Path, index: int, start: int, count: int, column: str, cached: dict[tuple[Path, int], list[bytes]]
) -> Originals:
    """Return the row group `index` of a file as originals: `count` images in `column`, from row `start` of the file.

    `cached` as in `_row_groups`.
    """

    def read(first: int, stop: int) -> list[bytes]:
        """Return the encoded images of these rows of the group, which is loaded in place of the one in memory."""
        if (path, index) not in cached:
            cached.clear()  # one row group in memory, whatever the size of the file
            cached[path, index] = _read_row_group(path, index, count, column)
        return cached[path, index][first:stop]

    def where(row: int) -> str:
        return f"{path}, row {start + row}"

    return Originals("parquet", [str(path), index], count, read, where, by_row=False)


def _read_row_group(path: Path, index: int, count: int, column: str) -> list[bytes]:
    """Return the encoded images in `column` of the row group `index`; b"" where a cell holds no bytes.

    Raises unless there are `count` of them.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            cells = parquet_cells(file, [column], path, [index])[column]
    except (pa.ArrowException, OSError) as error:
        raise FedgraftError(
            "E-DATA-PARQUET-DAMAGED", f"{path} is damaged ({error})", "fetch it again", path=str(path)
        ) from error
    if len(cells) != count:
        raise FedgraftError(
            "E-DATA-PARQUET-DAMAGED",
            f"{path} declares {count} rows where it holds {len(cells)}",
            "fetch it again",
            path=str(path),
        )
    images = []
    for cell in cells:
        encoded = cell.get("bytes") if isinstance(cell, dict) else cell
        images.append(encoded if isinstance(encoded, bytes) else b"")
    return images


def parquet_cells(file: Any, columns: list[str], path: Path, groups: list[int] | None = None) -> dict[str, list[Any]]:
    """Return the cells of these columns by name, from the row groups in `groups` (None: all) of an open parquet file.

    They are read a few rows at a time and counted, since a file of kilobytes may repeat one value a million times;
    `path` names the file in the error.
    """
    batch_rows = 16 if groups else 4096
    cells: dict[str, list[Any]] = {name: [] for name in columns}
    size = 0
    for batch in file.iter_batches(batch_rows, row_groups=groups, columns=columns):
        size += batch.nbytes
        if size > _MAX_BYTES:
            raise FedgraftError(
                "E-DATA-PARQUET-SIZE",
                f"{path} unpacks to more than {_MAX_BYTES >> 20} MiB",
                "write smaller row groups",
                path=str(path),
            )
        for name in columns:
            cells[name] += batch.column(name).to_pylist()
    return cells
