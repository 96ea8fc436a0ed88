"""Rows of listed files: frames of scans as rows of their own, and groups and owners from their tags.

A DICOM file's `PatientID` groups its rows unless another rule is chosen, so that no patient is both trained and tested
on. Values of tags are hashed under the site's key where they are read (`site_key`), kept so in the cache, and become
numbers in the order of the rows: neither a value nor its hash is in a data set.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from fedgraft.core.errors import FedgraftError
from fedgraft.core.progress import phase
from fedgraft.core.store import replacing, write_all
from fedgraft.data.cache_limit import cache_dir, close_to_others
from fedgraft.data.labelled import short_digest
from fedgraft.data.pixels.dicom import GROUPING_TAGS
from fedgraft.data.pixels.originals import Originals, file_identity, from_files
from fedgraft.data.pixels.rule import Unreadable
from fedgraft.data.pixels.scans import Frames, chosen_frames, may_be_scan, scan_facts
from fedgraft.data.site_key import keyed_hash, site_key

TAG = "tag:"
"""What stands before the name of a DICOM tag where a column may stand as well."""
FOLDER = "folder"
"""Rows are grouped by the folder of their file, such as one of a slide's tiles."""
DEFAULT_GROUP = "tag:PatientID"
_PREFIXES = {"group": "g", "site": "site-"}


@dataclass(frozen=True)
class ScanRule:
    """Which frames of scans are rows, and what groups rows and gives them to owners."""

    frames: Frames = "first"
    group: str | None = None
    """`tag:` and a name in `GROUPING_TAGS`, or "folder"; None: the patient of a scan, nothing else."""
    site: str | None = None
    """`tag:` and a name in `GROUPING_TAGS`; None: no owners."""

    def __post_init__(self) -> None:
        """Refuse frames, tags and rules that do not exist."""
        if self.frames not in get_args(Frames):
            raise FedgraftError(
                "E-DATA-FRAMES",
                f"frames must be one of {', '.join(get_args(Frames))}, but it is {self.frames!r}",
                "choose one of them",
                frames=self.frames,
            )
        if self.group not in (None, FOLDER):
            tag_name(str(self.group))
        if self.site is not None:
            tag_name(self.site)


@dataclass(frozen=True)
class FileRecord:
    """What is kept of one listed scan: the number of its frames, and hashes of its tags by their names."""

    frames: int
    hashes: dict[str, str]


@dataclass(frozen=True)
class ScanRows:
    """The rows of listed files."""

    content: Originals
    file_of_row: list[int]
    """The place of each row's file in the list."""
    columns: dict[str, list[str]]
    """`group` and `site`, where the rule gives them, not numbered yet."""


def is_tag(rule: str | None) -> bool:
    """Return whether this text names a DICOM tag rather than a column."""
    return rule is not None and rule.startswith(TAG)


def tag_name(rule: str) -> str:
    """Return the name of the tag in `tag:NAME`; raise if there is no such rule."""
    name = rule.removeprefix(TAG)
    if not rule.startswith(TAG) or name not in GROUPING_TAGS:
        raise FedgraftError(
            "E-DATA-TAG",
            f"rows cannot be grouped or divided by {rule!r}",
            f"write {FOLDER!r} (groups of image folders), or {TAG} and one of {', '.join(GROUPING_TAGS)}",
            rule=rule,
        )
    return name


def scan_rows(
    files: Sequence[str], rule: ScanRule, name: str = "folder", owner_of_file: Callable[[int], str] = lambda file: ""
) -> ScanRows:
    """Return the rows of listed files, opening the headers of the scans among them, and of nothing else.

    Args:
        files: paths of images and scans.
        rule: which frames are rows, and what groups them.
        name: of the originals.
        owner_of_file: the owner of a listed file by its place: two owners may number their patients alike.
    """
    scans = [place for place, file in enumerate(files) if may_be_scan(file)]
    records = dict(zip(scans, _records([files[place] for place in scans]), strict=True))
    paths: list[str] = []
    frame_numbers: list[int | None] = []
    file_of_row: list[int] = []
    for place, file in enumerate(files):
        record = records.get(place)
        frames: list[int | None] = [None]
        if record is not None and record.frames > 1 and rule.frames != "first":
            frames = [*chosen_frames(record.frames, rule.frames)]
        for frame in frames:
            paths.append(file)
            frame_numbers.append(frame)
            file_of_row.append(place)
    columns: dict[str, list[str]] = {}
    owners = [owner_of_file(place) for place in range(len(files))]
    if rule.site is not None:
        owners = _owners(files, records, tag_name(rule.site))
        columns["site"] = [owners[place] for place in file_of_row]
    if records or rule.group not in (None, DEFAULT_GROUP):
        groups = _groups(files, records, rule.group or DEFAULT_GROUP)
        columns["group"] = [f"{owners[place]}/{groups[place]}" for place in file_of_row]
    return ScanRows(from_files(paths, name, frame_numbers), file_of_row, columns)


def _groups(files: Sequence[str], records: dict[int, FileRecord], rule: str) -> list[str]:
    """Return the group of each file; one without the tag is a group of its own."""
    groups = []
    for place, file in enumerate(files):
        own = f"file {place} {short_digest(file)}"  # two parts of a data set number their files alike
        if rule == FOLDER:
            groups.append(f"folder {Path(file).parent}")
            continue
        digest = ""
        if place in records:
            digest = records[place].hashes.get(tag_name(rule), "")
        groups.append(digest or own)
    return groups


def _owners(files: Sequence[str], records: dict[int, FileRecord], tag: str) -> list[str]:
    """Return for each file the keyed hash of the tag `tag`, by which files of one site (client) are told.

    `records` are what was read of the scans, by position in `files`. A file without the tag is refused.
    """
    owners = []
    for place, file in enumerate(files):
        digest = ""
        if place in records:
            digest = records[place].hashes.get(tag, "")
        if not digest:
            raise FedgraftError(
                "E-DATA-TAG-MISSING",
                f"{file} does not say its owner: the tag {tag} is empty or missing",
                "divide the rows by a column, or by a folder for each owner",
                path=file,
                tag=tag,
            )
        owners.append(digest)
    return owners


def number_columns(parts: Sequence[MutableMapping[str, Any]], names: Collection[str]) -> None:
    """Replace the columns `names` that `scan_rows` gave by numbers in the order of the rows, in all parts, in place.

    So the same data gives the same names whatever the site's key is, and the names say nothing.
    """
    for column in names:
        prefix = _PREFIXES[column]
        numbers: dict[str, int] = {}
        for columns in parts:
            for value in columns.get(column, ()):
                numbers.setdefault(value, len(numbers))
        width = len(str(max(len(numbers) - 1, 0)))
        for columns in parts:
            if column in columns:
                columns[column] = [f"{prefix}{numbers[value]:0{width}}" for value in columns[column]]


# ---- what is kept of headers -----------------------------------------------------------------------------------------


def _records(files: Sequence[str]) -> list[FileRecord]:
    """Return the records of these scans: from the cache, else from their headers, which are then cached."""
    if not files:
        return []
    key = site_key()
    listed = []
    for file in files:
        with suppress(OSError):  # a file that is gone: reading it will say so
            listed.append(file_identity([Path(file)]))
    entry = cache_dir() / "tags" / f"{short_digest(json.dumps([files, listed]), keyed_hash(key, 'cache', b''))}.json"
    cached = _read_records(entry, len(files))
    if cached is not None:
        return cached
    records = []
    with phase("reading headers of scans", len(files), "files") as progress:
        for file in files:
            records.append(_record(Path(file), key))
            progress.advance()
    _write_records(entry, records)
    return records


def _record(file: Path, key: bytes) -> FileRecord:
    """Return the record of one scan; of one that cannot be read nothing: reading its pixels will say why."""
    try:
        facts = scan_facts(file)
    except (Unreadable, OSError):
        return FileRecord(1, {})
    hashes = {}
    for name, value in facts.tags.items():
        if value:
            hashes[name] = keyed_hash(key, name, value)
    return FileRecord(facts.frames, hashes)


def _read_records(entry: Path, count: int) -> list[FileRecord] | None:
    """Return the records of a file in the cache; None where it is missing or damaged."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        records = []
        for frames, hashes in json.loads(entry.read_text()):
            if not (isinstance(frames, int) and frames > 0):
                raise ValueError("no number of frames")
            for name, digest in hashes.items():
                if name not in GROUPING_TAGS or not re.fullmatch("[0-9a-f]{32}", digest):
                    raise ValueError("no hash of a tag")
            records.append(FileRecord(frames, hashes))
        if len(records) == count:
            return records
    return None


def _write_records(entry: Path, records: Sequence[FileRecord]) -> None:
    """Write records into the cache, readable by their owner alone; a full disk costs time only."""
    lines = [[record.frames, record.hashes] for record in records]
    with suppress(OSError):
        close_to_others()
        entry.parent.mkdir(parents=True, exist_ok=True)
        with replacing(entry, 0o600, durable=False) as descriptor:
            write_all(descriptor, json.dumps(lines).encode())
