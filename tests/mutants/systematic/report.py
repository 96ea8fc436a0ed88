"""The score of a sample by folder, as a section of `docs/mutants.md`, survivors listed."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence

from tests.mutants.__main__ import PAGE, ROOT, SYSTEMATIC
from tests.mutants.systematic.sample import FOLDERS, code_lines, folder_of, shares

EQUIVALENTS = ROOT / "tests" / "mutants" / "equivalents.toml"


def equivalents() -> dict[str, str]:
    """Return the mutants that no test can notice, with the reason."""
    return {row["id"]: row["reason"] for row in tomllib.loads(EQUIVALENTS.read_text()).get("mutant", [])}


def _status(row: dict, equivalent: dict[str, str]) -> str:
    if row["status"] in ("survived", "uncovered"):
        return "equivalent" if row["id"] in equivalent else "survived"
    return row["status"]


def table(rows: Sequence[dict]) -> str:
    """Return the score by folder; equivalents do not count."""
    equivalent = equivalents()
    lines = [
        "| folder | mutants | killed | timeout | equivalent | survived | percent |",
        "|---|---|---|---|---|---|---|",
    ]
    for folder in (*FOLDERS, "all"):
        of_folder = [row for row in rows if folder in ("all", folder_of(row["id"]))]
        statuses = [_status(row, equivalent) for row in of_folder]
        counts = {status: statuses.count(status) for status in ("killed", "timeout", "equivalent", "survived")}
        judged = len(of_folder) - counts["equivalent"]
        percent = 100 * (counts["killed"] + counts["timeout"]) / max(judged, 1)
        numbers = " | ".join(str(count) for count in counts.values())
        lines.append(f"| {folder} | {len(of_folder)} | {numbers} | {percent:.1f} |")
    return "\n".join(lines)


def survivors(rows: Sequence[dict]) -> list[dict]:
    """Return the rows that nobody noticed and that are not equivalent."""
    equivalent = equivalents()
    return sorted((row for row in rows if _status(row, equivalent) == "survived"), key=lambda row: row["id"])


def section(rows: Sequence[dict], size: int) -> str:
    """Return the section of the page."""
    noticed = sum(row["first"] in ("killed", "timeout") for row in rows)
    lines = [
        SYSTEMATIC,
        "",
        f"{len(rows)} of a sample of {size} mutants made by rule (`tests/mutants/systematic`), drawn in proportion to",
        "the lines of each folder; each met tests that execute its line, at most 40 at first. Running out of time or",
        "memory counts as noticed. Equivalents (`tests/mutants/equivalents.toml`) do not count.",
        "Made by `make mutants-systematic`.",
        "",
        f"At first sight {noticed} of the {len(rows)} were noticed. Tests were then written for survivors, so",
        "the table flatters the suite: only a sample with another seed measures it anew.",
        "",
        table(rows),
        "",
        "Survivors (those that no test met so far executes are marked *not executed*):",
        "",
    ]
    for row in survivors(rows):
        mark = " *not executed*" if row["status"] == "uncovered" else ""
        change = row["change"].replace("`", "'")
        lines.append(f"- `{change[:300]}`{mark} (`{row['id']}`)")
    return "\n".join([*lines, ""])


def write(rows: Sequence[dict], size: int) -> None:
    """Replace the section at the end of the page."""
    head = PAGE.read_text().partition(f"\n{SYSTEMATIC}")[0].rstrip("\n")
    PAGE.write_text(f"{head}\n\n{section(rows, size)}")


def stratified(rows: Sequence[dict], size: int) -> list[dict]:
    """Return `size` rows, the quickest of each folder in proportion to its code, filled up with the quickest of all."""
    counts = shares(size, [code_lines(folder) for folder in FOLDERS])
    quickest = sorted(rows, key=lambda row: row["seconds"])
    chosen: list[dict] = []
    for folder, count in zip(FOLDERS, counts, strict=True):
        chosen += [row for row in quickest if folder_of(row["id"]) == folder][:count]
    chosen += [row for row in quickest if row not in chosen][: size - len(chosen)]
    return sorted(chosen, key=lambda row: row["id"])
