"""A preflight as a page shows it: findings, the sites side by side, their classes, where their policies differ.

The facts of a site are those of `consortium.preflight.site_facts`, from preflight.json or the answers of nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedgraft.report.sections import Charts, Grid, Matrix, Section, Texts

Facts = Mapping[str, Any]
_UNSET = "not set"


def preflight_sections(sites: Sequence[Facts], findings: Sequence[Mapping[str, Any]]) -> list[Section]:
    """Return the sections of a preflight.

    Args:
        sites: the facts of each site.
        findings: `kind`, `site` and `text` of each problem, and whether it `stops` the training.
    """
    rows = []
    for found in findings:
        severity = "error" if found["stops"] else "warning"
        row = {"severity": severity, "kind": found["kind"], "site": found["site"], "": found["text"]}
        rows.append({name: str(value) for name, value in row.items()})
    nothing = Texts([])
    if not rows:
        nothing = Texts(["No problems."])
    sections = [
        Section("Findings of the preflight", [nothing, Grid(rows)]),
        Section("Preflight, side by side", [Grid(_side_by_side(sites))]),
        Section("Images of each class by site", _classes(sites)),
        Section("Where the owners' policies differ", [Grid(policy_differences(sites))]),
    ]
    return [section for section in sections if section]


def policy_differences(sites: Sequence[Facts]) -> list[dict[str, str]]:
    """Return a row for each rule that is not the same at all sites, with its value at each."""
    rules: dict[str, None] = {}
    for site in sites:
        rules |= dict.fromkeys(site["rules"])
    rows = []
    for rule in rules:
        values = {str(site["site"]): str(site["rules"].get(rule, _UNSET)) for site in sites}
        if len(set(values.values())) > 1:
            rows.append({"rule": rule, **values})
    return rows


def _side_by_side(sites: Sequence[Facts]) -> list[dict[str, Any]]:
    """Return the facts of every site, one row for each fact, and the sites as columns."""
    facts: dict[str, Callable[[Facts], object]] = {
        "training images": lambda site: site["images"],
        "test images": lambda site: site["test_images"],
        "width": lambda site: range_text(site["width"]),
        "height": lambda site: range_text(site["height"]),
        "channels": lambda site: ", ".join(site["channels"]),
        "bits": lambda site: ", ".join(site["bits"]),
        "modality": lambda site: ", ".join(site["modalities"]),
        "window": lambda site: ", ".join(site["windows"]),
        "mean intensity": lambda site: " ± ".join(map(str, site["intensity"])),
        "contrast": lambda site: site["contrast"],
        "free disk": lambda site: f"{site['disk_gb']} GB",
        "owner's policy": lambda site: "in force" if site["policy"] else "none",
        "fedgraft": lambda site: site["versions"].get("fedgraft", ""),
        "torch": lambda site: site["versions"].get("torch", ""),
    }
    rows = []
    for name, read in facts.items():
        row = {"fact": name}
        for site in sites:
            row[str(site["site"])] = str(read(site))
        rows.append(row)
    return rows


def range_text(values: Sequence[int]) -> str:
    """Return median, minimum and maximum as text."""
    if not values:
        return ""
    return f"{values[1]} ({values[0]} to {values[2]})"


def _classes(sites: Sequence[Facts]) -> list[Any]:
    """Return the images of each class by site, as bars and as a matrix; a hidden small count is an empty cell."""
    classes: dict[str, None] = {}
    for site in sites:
        classes |= dict.fromkeys(site["classes"])
    if not classes:
        return []
    rows = {}
    series = []
    for site in sites:
        rows[str(site["site"])] = [site["classes"].get(name) or 0 for name in classes]
        series.append({"name": str(site["site"]), "y": [site["classes"].get(name) for name in classes]})
    bars = {"kind": "bars", "title": "Images of each class", "unit": "", "categories": list(classes), "series": series}
    note = Texts(["A small number is hidden by its site: an empty cell, and no bar."])
    return [Charts([bars], "classes"), note, Matrix(rows, list(classes), corner="site")]
