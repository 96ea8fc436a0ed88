"""Image files listed in a CSV table, with columns of findings (0, 1 or empty) or of classes beside each.

Scans (DICOM, NIfTI) may be listed beside images or instead of them; see `scan_rows`.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from fedgraft.core.errors import FedgraftError
from fedgraft.data.labelled import findings_of_columns
from fedgraft.data.pixels.scans import Frames
from fedgraft.data.sources.assemble import Dataset, SourceOptions, SourcePart, assemble
from fedgraft.data.sources.parquet import add_site_and_group, image_column, pick_column
from fedgraft.data.sources.scan_rows import ScanRule, is_tag, number_columns, scan_rows

_LONGEST_TABLE = 1 << 30  # bytes of a CSV file


def table(
    path: str | Path,
    image: str = "image",
    label: str = "label",
    findings: Sequence[str] | None = None,
    site: str | None = None,
    group: str | None = None,
    split: str = "split",
    classes: Sequence[str] | None = None,
    frames: Frames = "first",
    **options: Unpack[SourceOptions],
) -> Dataset:
    """Return a dataset of the images that a CSV file names, one row each, by paths from the folder of that file.

    Args:
        path: the CSV file, or a folder with a `labels.csv`.
        image, label: names of columns.
        site, group: names of columns, or `tag:` and the name of a DICOM tag; without either, the patient that DICOM
            files name groups their rows.
        findings: columns with 1 where a finding is present, 0 where it is absent and nothing where that is unknown;
            None: each image has one class, in the column `label`.
        split: column that says `test` of the rows of the test set, if there is one.
        classes: names of the classes in their order.
        frames: which frames of a scan are images: "first", "middle" or "all".
    """
    tags = {name: column for name, column in (("group", group), ("site", site)) if is_tag(column)}
    rule = ScanRule(frames, tags.get("group"), tags.get("site"))
    file = Path(path).expanduser()
    if file.is_dir():
        file = file / "labels.csv"
    columns = _read_csv(file)
    names = {"image": image, "label": label, "site": site, "group": group}
    for name in tags:
        names[name] = None
    images = columns.pop(image_column(columns, names, str(file)))
    if findings is None:
        labels = columns.pop(pick_column(columns, (label,), str(file)))
        if (labels == "").any():
            raise FedgraftError(
                "E-DATA-LABEL-MISSING", f"{file} has rows without a label", "fill or drop them", path=str(file)
            )
    else:
        classes = tuple(findings)
        labels = findings_of_columns({name: columns.pop(name) for name in findings if name in columns}, findings, file)
    columns = add_site_and_group(columns, names, str(file))
    paths = np.array([str(file.parent / name) for name in images])
    is_test = np.zeros(len(paths), dtype=bool)
    if split in columns:
        is_test = columns.pop(split) == "test"
    chosen = [~is_test]
    if is_test.any():
        chosen.append(is_test)
    parts = []
    for listed in chosen:
        owner_of_file = _owner_of_file(columns, listed)
        scans = scan_rows(paths[listed].tolist(), rule, "table", owner_of_file)
        rows = np.flatnonzero(listed)[scans.file_of_row]
        own = {name: values[rows] for name, values in columns.items()}
        from_tags = dict(scans.columns)
        if "group" in columns and "group" not in tags:  # a column says it
            from_tags.pop("group", None)
        parts.append(SourcePart(scans.content, labels[rows], {**own, **from_tags}))
    number_columns([part.columns for part in parts], {"group", *tags} - (set(columns) - set(tags)))
    return assemble("table", parts, classes, **options)


def _owner_of_file(columns: dict[str, Any], listed: np.ndarray) -> Callable[[int], str]:
    """Return the owner, by the column `site` (empty without one), of a file by its place among the `listed` rows."""
    if "site" not in columns:
        return lambda place: ""
    owners = columns["site"][listed]
    return lambda place: str(owners[place])


def _read_csv(path: Path) -> dict[str, Any]:
    """Return the columns of a CSV file with a header, as arrays of text."""
    try:
        if path.stat().st_size > _LONGEST_TABLE:
            raise ValueError("it is larger than a gigabyte")
        with path.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.reader(lines, strict=True)
            header = next(reader, [])
            rows = [row for row in reader if row]
    except (OSError, ValueError, csv.Error) as error:
        raise FedgraftError(
            "E-DATA-TABLE", f"{path} cannot be read as a CSV table ({error})", "give a CSV file", path=str(path)
        ) from error
    if len(set(header)) != len(header) or not rows or any(len(row) != len(header) for row in rows):
        raise FedgraftError(
            "E-DATA-TABLE",
            f"{path} is not a table: it needs a header of different names and rows of as many cells",
            "repair it",
            path=str(path),
        )
    cells = np.array(rows, dtype=str)
    return {name: cells[:, number] for number, name in enumerate(header)}
