"""The report of one run: its view as a static page that opens offline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedgraft.core.files import json_ready
from fedgraft.core.store import write_atomic
from fedgraft.report import html as page
from fedgraft.report.run_record import RunRecord
from fedgraft.report.run_view import Card, Holdings, RunView, view_run


def write_report(
    run: RunRecord | Path | str, *, partition: Any = None, classes: Sequence[object] = (), clients: Sequence[str] = ()
) -> Path:
    """Write a run's `report.html` from the files of its folder; return its path.

    Args:
        partition: training images by client and class, (K, C); None: as the run recorded them.
        classes: names of the classes.
        clients: names of the clients.
    """
    if isinstance(run, RunRecord):
        folder = run
    else:
        folder = RunRecord.open(run)
    holdings = None
    if partition is not None:
        holdings = Holdings(json_ready(partition), classes, clients)
    return write_view(view_run(folder, holdings=holdings), folder.report)


def write_view(view: RunView, path: Path) -> Path:
    """Write the view of a run as a page to `path`; return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, [page_text(view).encode()])
    return path


def page_text(view: RunView) -> str:
    """Return the view of a run as a page that needs no other file."""
    info = view.info
    top = page.header(info.name, info.status, f"{info.name}.csv", page.metrics_csv(view.lines), view.about)
    reasons = []
    if view.reason:
        reasons.append(view.reason)
    parts = [page.notices(reasons), _cards(view.cards, view.has_result)]
    parts += map(page.render, view.sections)
    return page.render_page(info.name, top, parts, page.charts_of(view.sections))


def _cards(cards: Sequence[Card], has_result: bool) -> str:
    """Return the cards in a row as HTML, the first of them large if it is a result."""
    parts = []
    for name, number, evidence in cards:
        name = page.safe(name)
        number = page.safe(number)
        evidence = page.safe(evidence)
        parts.append(f'<div class="card"><span>{name}</span><b>{number}</b><small>{evidence}</small></div>')
    style = "cards"
    if has_result:
        style = "cards with-result"
    return f'<div class="{style}">{"".join(parts)}</div>'
