"""Image files listed in a CSV table, with columns of findings (0, 1 or empty) or of classes beside each."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from fedgraft.core.errors import FedgraftError
from fedgraft.data.labelled import findings_of_columns
from fedgraft.data.pixels.originals import from_files
from fedgraft.data.sources.assemble import Dataset, SourceOptions, SourcePart, assemble
from fedgraft.data.sources.parquet import add_site_and_group, image_column, pick_column

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
    **options: Unpack[SourceOptions],
) -> Dataset:
    """Return a dataset of the images that a CSV file names, one row each, by paths from the folder of that file.

    Args:
        path: the CSV file, or a folder with a `labels.csv`.
        image, label, site, group: names of columns.
        findings: columns with 1 where a finding is present, 0 where it is absent and nothing where that is unknown;
            None: each image has one class, in the column `label`.
        split: column that says `test` of the rows of the test set, if there is one.
        classes: names of the classes in their order.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        file = file / "labels.csv"
    columns = _read_csv(file)
    names = {"image": image, "label": label, "site": site, "group": group}
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
    for rows in chosen:
        own = {name: values[rows] for name, values in columns.items()}
        parts.append(SourcePart(from_files(paths[rows].tolist(), "table"), labels[rows], own))
    return assemble("table", parts, classes, **options)


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
