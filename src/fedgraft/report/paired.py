"""Tables of two models compared on the same images: AUROC by finding, and accuracy, with corrected p-values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedgraft.core.text import markdown_cell

Comparisons = Mapping[str, Mapping[str, Any]]
"""Comparisons as plain values (`Comparison.table`), by the name of the site."""


def comparison_tables(models: Sequence[str], sites: Comparisons) -> list[str]:
    """Return the lines of Markdown tables: of AUROCs by site and finding, and of shares of right answers by site.

    `models` are the names of both. A table without rows is left out.
    """
    first, second = models
    areas = []
    shares = []
    for site, comparison in sites.items():
        for test in comparison["areas"]:
            areas.append(_area_row(site, test))
        accuracy = comparison["accuracy"]
        if accuracy is not None:
            shares.append(_share_row(site, accuracy))
        for test in comparison["by_finding"]:
            shares.append(_share_row(site, test))
    lines: list[str] = []
    if areas:
        header = ["site", "finding", f"AUROC {first}", f"AUROC {second}", "difference (95 %)", "p", "p (Holm)", "sites"]
        lines += [*_table([*header, "p of heterogeneity"], areas), ""]
    if shares:
        header = ["site", "right answers", f"only {first}", f"only {second}", "images", "difference", "p", "p (Holm)"]
        lines += _table(header, shares)
    return lines


def _area_row(site: str, test: Mapping[str, Any]) -> list[str]:
    """Return the cells of DeLong's test of one finding."""
    heterogeneity = ""
    if test["heterogeneity"] is not None:
        heterogeneity = _p(test["heterogeneity"])
    gap = f"{test['difference']:+.4f} ({test['low']:+.4f} to {test['high']:+.4f})"
    numbers = [f"{test['first']:.4f}", f"{test['second']:.4f}", gap, _p(test["p"]), _p(test["p_holm"])]
    return [site, test["finding"], *numbers, str(test["sites"]), heterogeneity]


def _share_row(site: str, test: Mapping[str, Any]) -> list[str]:
    """Return the cells of McNemar's test."""
    counts = [str(test["only_first"]), str(test["only_second"]), str(test["images"])]
    return [site, test["name"], *counts, f"{test['difference']:+.4f}", _p(test["p"]), _p(test["p_holm"])]


def _p(value: float) -> str:
    """Return a p-value with three digits behind the point, or that it is smaller."""
    if value < 0.001:
        return "< 0.001"
    return f"{value:.3f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = []
    for row in [header, ["---"] * len(header), *rows]:
        lines.append(f"| {' | '.join(markdown_cell(cell) for cell in row)} |")
    return lines
