"""The verdict on a run's release, as `fedgraft release` wrote it into the run's folder, and each rule."""

from __future__ import annotations

import json
from pathlib import Path

from fedgraft.report.run_record import damaged_json
from fedgraft.report.sections import Grid, Section, Texts

FILE = "release/release.json"
_COLUMNS = ("verdict", "rule", "site", "measured", "required")


def release_sections(folder: Path) -> list[Section]:
    """Return the section of the verdict and the rules of the run in `folder`; none if nobody asked for a release."""
    path = folder / FILE
    if not path.is_file():
        return []
    try:
        release = json.loads(path.read_text(encoding="utf-8"))
        verdict = str(release["verdict"])
        rows = []
        for check in release["checks"]:
            rows.append({column: str(check[column]) for column in _COLUMNS})
        notes = [str(note) for note in release["notes"]]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise damaged_json(path, error) from error
    return [Section(f"Release: {verdict}", [Grid(rows), Texts(notes, "list")], tab="release")]
