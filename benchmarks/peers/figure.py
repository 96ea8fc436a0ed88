"""The figure of docs/benchmarks.md, drawn from the page's own tables, so that it says what they say."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.peers.page import NAMES


def plot(text: str, file: Path) -> bool:
    """Times faster than each peer, and where the time goes, from the page's tables; False where there are none."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ratios, shares = faster(text), spent(text)
    if not ratios:
        return False
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 7.2), layout="constrained")
    names, place = [], 0.0
    for work, found in ratios.items():
        for peer, times in found.items():
            shown = min(times, 16.0)
            left.barh(place, shown, color="#475569" if times >= 1 else "#c2410c")
            left.text(shown + 0.1, place, f"{times:.1f}", va="center", fontsize=8)
            names.append((place, f"{work}: {peer}"))
            place += 1
        place += 0.6
    left.set_yticks([at for at, _ in names], [name for _, name in names], fontsize=8)
    left.axvline(1, color="#c2410c", linewidth=1)
    left.set(xlim=(0, 17.5), xlabel="times faster than ... (a round; from images: the whole run)")
    left.invert_yaxis()
    for work, parts in shares.items():
        total, begin = sum(parts.values()), 0.0
        for i, (name, value) in enumerate(parts.items()):
            right.barh(work, 100 * value / total, left=begin, color=pyplot.cm.Pastel1(i), edgecolor="white")
            words = {"ha": "center", "va": "center", "fontsize": 7, "rotation": 0 if value > 0.18 * total else 90}
            right.text(begin + 50 * value / total, work, f"{name} {value:g}", **words)
            begin += 100 * value / total
    right.set(xlim=(0, 100), xlabel="where the time goes, %")
    right.tick_params(labelsize=8)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
    return True


def faster(text: str) -> dict[str, dict[str, float]]:
    """By workload and peer: how many times as long it takes, as the tables say; a frozen backbone by whole runs."""
    found: dict[str, dict[str, float]] = {}
    for part in re.split(r"(?m)^### ", text)[1:]:
        name = part.partition(":")[0]
        for line in part.split("\n"):
            cells = [cell.strip() for cell in line.split("|")]
            if len(cells) > 9 and cells[1] in NAMES.values() and cells[1] not in ("fedgraft", NAMES["bare"]):
                ratio = cells[5 if name.startswith("frozen") else 3]
                if ratio:
                    found.setdefault(name, {})[cells[1]] = float(ratio)
    return found | _job(text)


def _job(text: str) -> dict[str, dict[str, float]]:
    """The same of the real job, by what trains: a round once images were met; of the head the seconds to 60 %."""
    part = text.partition("\n## The real job")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.split("\n") if line.startswith("| ")]
    found: dict[str, dict[str, float]] = {}
    took: dict[str, float] = {}
    for kind, tool, _, _, times, to, *_ in rows[1:]:
        seconds = float(to.replace(",", "")) if re.match(r"\d", to) else None
        if tool.startswith("fedgraft"):
            took |= {kind: min(seconds, took.get(kind, seconds))} if seconds is not None else {}
        elif kind == "head" and seconds is not None and kind in took:
            found.setdefault("real job, head to 60 %", {})[tool] = seconds / took[kind]
        elif kind != "head":
            found.setdefault(f"real job, {kind}", {})[tool] = float(times.split()[0])
    return found


def spent(text: str) -> dict[str, dict[str, float]]:
    """By row of the table `Where the time goes`: its parts, each a name and a number."""
    part = text.partition("\n## Where the time goes\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.split("\n") if line.startswith("| ")]
    return {
        row[0]: {cell.rpartition(" ")[0]: float(cell.rpartition(" ")[2]) for cell in row[1:] if cell}
        for row in rows
        if re.search(r"\d$", row[1])
    }
