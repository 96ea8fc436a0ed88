"""Preflight: facts of each site's data before anybody trains, as counts and sums, and the problems they show.

`site_facts` runs where the images are and returns plain numbers: classes (small counts are hidden), images that cannot
be read or are duplicated, sizes, channels, depth, intensities, versions, free disk. It also returns the digests of
single images, which are never sent in the clear: two sites compare them (`shared_images`; between machines under a key
that only these two know, `deploy.preflight`). `site_faults.findings` compares the sites and names each problem.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from fedgraft.config.federate import federate, open_data
from fedgraft.config.options import Config
from fedgraft.consortium.site_faults import Finding, SiteFacts, findings
from fedgraft.consortium.small_counts import hide_small
from fedgraft.core.files import nearest_existing
from fedgraft.core.progress import counted
from fedgraft.core.store import write_text
from fedgraft.core.text import markdown_cell
from fedgraft.data.cache_limit import cache_dir
from fedgraft.data.pixels.rule import FORMATS, Slice, Source, Unreadable, Window, decode_image, open_original
from fedgraft.data.pixels.scans import is_scan, scan_facts
from fedgraft.data.pixels.store import ImageStore
from fedgraft.data.sources.assemble import Dataset
from fedgraft.report import html
from fedgraft.report.preflight_view import preflight_sections, range_text
from fedgraft.runs.environment import PACKAGES, installed

MINIMUM = 5
"""Counts below this are hidden; only that there are some is reported."""
_BITS = {"I": 32, "F": 32, "I;16": 16, "I;16B": 16, "I;16L": 16, "1": 1}
_CHANNELS = {"1": 1, "L": 1, "P": 3, "RGB": 3, "RGBA": 4, "LA": 2, "CMYK": 4, "PA": 4}


@dataclass(frozen=True)
class ImageFacts:
    """The facts of one readable image."""

    label: str
    test: bool
    size: tuple[int, int]
    channels: int
    bits: int
    mean: float
    """Mean grey value, from 0 to 1."""
    std: float
    """Standard deviation of the grey values."""
    colours: np.ndarray
    """Means of red, green and blue."""
    transparent: bool
    cmyk: bool
    several_pages: bool
    digest: bytes
    """Digest of size and pixels."""
    group: str = ""
    """What rows are never separated by, such as a patient; empty: unknown."""
    modality: str = ""
    """Of a DICOM file; empty for other images."""
    window: str = ""
    """Where the window of a DICOM file or a volume comes from; empty for other images."""


@dataclass(frozen=True)
class UnreadableImage:
    """An image that cannot be read, and why."""

    label: str
    test: bool
    reason: str


def site_facts(
    site: str,
    dataset: Dataset,
    rows: Sequence[Iterable[int]],
    minimum: int = MINIMUM,
    rules: Mapping[str, str] | None = MappingProxyType({}),
    window: Window = None,
) -> tuple[dict[str, Any], list[bytes]]:
    """Return the facts of one site's data as plain numbers, and the digests of its images, which must stay secret.

    Args:
        site: its name.
        rows: its training rows, and its test rows, in the stores of `dataset`.
        minimum: counts below this are hidden (None), and with them what they would follow from.
        rules: the rules of the owner's policy by name; None: there is no policy.
        window: grey values that become black and white in deep images.
    """
    readable: list[ImageFacts] = []
    unreadable: list[UnreadableImage] = []
    for is_test, store, own_rows in zip((False, True), (dataset.train, dataset.test), rows, strict=True):
        if not isinstance(store, ImageStore):
            continue
        for result in _inspect(store, own_rows, window, is_test):
            if isinstance(result, UnreadableImage):
                unreadable.append(result)
            else:
                readable.append(result)
    everything: list[ImageFacts | UnreadableImage] = [*readable, *unreadable]
    test_images = 0
    classes: Counter[str] = Counter()
    for inspected in everything:
        test_images += inspected.test
        classes[inspected.label] += 1
    digests: Counter[bytes] = Counter()
    channels: Counter[str] = Counter()
    bits: Counter[str] = Counter()
    modalities: Counter[str] = Counter()
    windows: Counter[str] = Counter()
    widths = []
    heights = []
    for image in readable:
        digests[image.digest] += 1
        channels[str(image.channels)] += 1
        bits[str(image.bits)] += 1
        if image.modality:
            modalities[image.modality] += 1
            windows[image.window] += 1
        width, height = image.size
        widths.append(width)
        heights.append(height)

    def hide(counts: Mapping[str, int]) -> dict[str, int | None]:
        """Return the counts, which have no known total, with those below the minimum hidden."""
        return {name: count if count >= minimum else None for name, count in sorted(counts.items())}

    unreadable_counts = hide(Counter(failure.reason for failure in unreadable))
    # What is hidden of them must not follow from the number of images minus the readable ones.
    hidden_unreadable = len(unreadable) - sum(count or 0 for count in unreadable_counts.values())
    other_files = sum(owner in ("", site) for owner in dataset.other_files)
    facts = {
        "site": site,
        "images": len(everything),
        "test_images": test_images,
        "classes": hide_small(classes, minimum),
        "minimum": minimum,
        "faults": hide(_fault_counts(readable, digests, other_files)),
        "unreadable": unreadable_counts,
        "width": _range(widths),
        "height": _range(heights),
        "channels": hide_small(channels, minimum, hidden_unreadable),
        "bits": hide_small(bits, minimum, hidden_unreadable),
        "modalities": hide_small(modalities, minimum),
        "windows": hide_small(windows, minimum),
        **_brightness(readable),
        "versions": _versions(),
        "disk_gb": round(shutil.disk_usage(nearest_existing(cache_dir())).free / 1e9, 1),
        "policy": rules is not None,
        "rules": dict(rules or {}),
    }
    return facts, sorted(digests)


def _fault_counts(readable: Sequence[ImageFacts], digests: Counter[bytes], other_files: int) -> dict[str, int]:
    """Return the number of faulty images by the name of the fault (a key of `site_faults.FAULTS`), without zeros.

    `digests` counts the readable images by content; `other_files` is the number of files in formats that are not read.
    """
    labels: dict[bytes, set[str]] = {}
    train_digests = set()
    test_digests = set()
    counts: Counter[str] = Counter()
    for image in readable:
        counts["blank"] += image.std < 1e-3
        counts["transparent"] += image.transparent
        counts["cmyk"] += image.cmyk
        counts["pages"] += image.several_pages
        labels.setdefault(image.digest, set()).add(image.label)
        if image.test:
            test_digests.add(image.digest)
        else:
            train_digests.add(image.digest)
    counts["duplicates"] = len(readable) - len(digests)
    counts["contradictory"] = sum(len(names) > 1 for names in labels.values())
    counts["leaked"] = len(test_digests & train_digests)
    counts["other"] = other_files
    counts["split_groups"] = _groups_in_both_parts(readable)
    return {fault: count for fault, count in counts.items() if count}


def _groups_in_both_parts(readable: Sequence[ImageFacts]) -> int:
    """Return the number of images whose group (their patient) has training and test images."""
    parts: dict[str, set[bool]] = {}
    for image in readable:
        if image.group:
            parts.setdefault(image.group, set()).add(image.test)
    return sum(bool(image.group) and len(parts[image.group]) > 1 for image in readable)


def _brightness(readable: Sequence[ImageFacts]) -> dict[str, Any]:
    """Return intensity (mean and standard deviation over images), mean colours, and mean contrast."""
    if not readable:
        return {"intensity": [], "colours": [], "contrast": 0.0}
    level = np.array([image.mean for image in readable])
    colours = np.array([image.colours for image in readable])
    contrast = np.mean([image.std for image in readable])
    return {
        "intensity": [round(float(level.mean()), 4), round(float(level.std()), 4)],
        "colours": [round(float(colour), 4) for colour in colours.mean(0)],
        "contrast": round(float(contrast), 4),
    }


def _versions() -> dict[str, str]:
    """Return the versions of installed packages that matter."""
    versions = {}
    for name in PACKAGES:
        version = installed(name)
        if version:
            versions[name] = version
    return versions


def shared_images(digests: Mapping[str, Sequence[bytes]]) -> dict[tuple[str, str], int]:
    """Return how many images two sites have in common, by the pair of their names, without zeros.

    `digests` are those of the images of each site.
    """
    shared = {}
    for a, b in combinations(digests, 2):
        count = len(set(digests[a]) & set(digests[b]))
        if count:
            shared[a, b] = count
    return shared


def _inspect(
    store: ImageStore, rows: Iterable[int], window: Window, is_test: bool
) -> Iterator[ImageFacts | UnreadableImage]:
    """Decode each image of these rows and yield its facts, or why it cannot be read.

    `window` are the grey values of deep images that become black and white, `is_test` marks test images in the facts.
    """
    for row in counted("inspecting images", rows, unit="images"):
        label = _label_of(store, row)
        source = _source(store, row)
        try:
            pixels = np.asarray(decode_image(source, window))
            kind = _kind_of_scan(source) if is_scan(source) else _kind_of_picture(source)
        except Unreadable as error:
            yield UnreadableImage(label, is_test, _without_numbers(error.reason))
            continue
        grey = pixels.mean(2) / 255
        height, width = grey.shape
        content = repr((width, height)).encode() + pixels.tobytes()
        group = ""
        if store.groups is not None:
            group = str(store.groups[row])
        yield ImageFacts(
            label=label,
            test=is_test,
            size=(width, height),
            mean=float(grey.mean()),
            std=float(grey.std()),
            colours=pixels.mean((0, 1)) / 255,
            digest=hashlib.blake2b(content, digest_size=16).digest(),
            group=group,
            **kind,
        )


def _label_of(store: ImageStore, row: int) -> str:
    """Return the class of a row, or its findings joined by "+"."""
    if store.findings is None:
        return store.classes[int(store.labels[row])]
    present = []
    for name, value in zip(store.classes, store.findings[row].tolist(), strict=True):
        if value == 1:
            present.append(name)
    return "+".join(present) or "no finding"


def _kind_of_picture(source: Source) -> dict[str, Any]:
    """Return the fields of `ImageFacts` that say what kind of picture this is."""
    raw = open_original(source)
    return {
        "channels": _CHANNELS.get(raw.mode, 1),
        "bits": _BITS.get(raw.mode, 8),
        "transparent": raw.mode in ("RGBA", "LA", "PA") or "transparency" in raw.info,
        "cmyk": raw.mode == "CMYK",
        "several_pages": _pages(source) > 1,
    }


def _kind_of_scan(source: Source) -> dict[str, Any]:
    """Return the fields of `ImageFacts` that say what kind of scan this is; of no tag more than a code."""
    facts = scan_facts(source)
    return {
        "channels": facts.channels,
        "bits": facts.bits,
        "transparent": False,
        "cmyk": False,
        "several_pages": facts.frames > 1 and not isinstance(source, Slice),
        "modality": facts.modality,
        "window": facts.window,
    }


def _source(store: ImageStore, row: int) -> Source:
    """Return the original of one row: its file, its bytes, or its array."""
    place = int(row)
    if store.rows is not None:
        place = int(store.rows[row])
    if isinstance(store.content, np.ndarray):
        return store.content[place]
    return store.originals.read(place, place + 1)[0]


def _pages(source: Source) -> int:
    """Return how many pictures a file has, as far as they can be counted; the first one is used."""
    from PIL import Image

    file: Path | io.BytesIO
    if isinstance(source, Path):
        file = source
    elif isinstance(source, bytes):
        file = io.BytesIO(source)
    else:
        return 1
    with suppress(Exception), Image.open(file, formats=FORMATS) as image:
        return int(getattr(image, "n_frames", 1))
    return 1  # damaged behind its first picture, in any way a format allows


def _without_numbers(reason: str) -> str:
    """Return a reason without its numbers, which belong to a single file."""
    return re.sub(r"\d[\d,.]*", "#", reason)[:80]


def _range(values: Sequence[int]) -> list[int]:
    """Return minimum, median and maximum; nothing without values."""
    if not values:
        return []
    return [int(np.min(values)), int(np.median(values)), int(np.max(values))]


def rows_by_site(dataset: Dataset) -> tuple[list[str], list[list[np.ndarray]]]:
    """Return the names of the sites, and the training and test rows of each; without names it is one site."""
    if dataset.train.sites is None:
        return ["all"], [[np.arange(len(dataset.train.labels)), np.arange(len(dataset.test.labels))]]
    columns = []
    for store in (dataset.train, dataset.test):
        if store.sites is None:
            columns.append(np.zeros(0, str))
        else:
            columns.append(store.sites.astype(str))
    names = sorted({str(name) for name in np.concatenate(columns)})
    rows = []
    for name in names:
        rows.append([np.flatnonzero(column == name) for column in columns])
    return names, rows


def run_preflight(config: Config) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Inspect the data of a config and return the facts of every site (or client), and the problems."""
    dataset = open_data(config, check=False)
    names, rows = rows_by_site(dataset)
    if len(names) == 1 and config.partition.clients > 1 and config.partition.kind != "by_site":
        data = federate(config)
        names = [f"client {name}" for name in data.client_names]
        rows = []
        for client in range(data.clients):
            rows.append([data.rows(client).numpy(), data.test_rows(client).numpy()])
    sites = []
    digests = {}
    for name, own_rows in zip(names, rows, strict=True):
        facts, digests[name] = site_facts(name, dataset, own_rows, window=config.data.grey_window)
        sites.append(facts)
    return sites, findings(sites, config.data.image_size, shared_images(digests))


def write_preflight(folder: Path, sites: Sequence[SiteFacts], problems: Sequence[Finding]) -> Path:
    """Write the page of a preflight as HTML and Markdown, and its numbers as JSON, to `folder`; return the HTML page.

    `sites` are the facts of each site, `problems` the findings about them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = [asdict(finding) for finding in problems]
    record = {"sites": list(sites), "findings": found}
    write_text(folder / "preflight.json", json.dumps(record, indent=2) + "\n")
    lines = ["# Preflight", ""]
    for finding in problems:
        lines.append(f"- {finding.severity}: **{finding.kind}** ({finding.site}): {finding.text}")
    if not problems:
        lines.append("No problems.")
    lines.append("")
    lines += _class_table(sites)
    lines.append("")
    if any(None in facts["classes"].values() for facts in sites):
        smallest = max(facts["minimum"] for facts in sites)
        lines += [f"Hidden are counts below {smallest}, and others from which, with the total, they would follow.", ""]
    lines += _image_table(sites)
    write_text(folder / "preflight.md", "\n".join(lines) + "\n")
    sections = preflight_sections(sites, found)
    status = "finished"
    if any(finding.stops for finding in problems):
        status = "failed"
    numbers = [{"site": facts["site"], **facts["classes"]} for facts in sites]
    top = html.header("Preflight", status, "preflight.csv", html.rows_csv(numbers))
    return html.write_sections(folder / "preflight.html", "Preflight", top, sections)


def _class_table(sites: Sequence[SiteFacts]) -> list[str]:
    """Return the Markdown table of images by site and class."""
    classes: dict[str, None] = {}
    for facts in sites:
        classes |= dict.fromkeys(facts["classes"])
    rows: list[list[object]] = []
    for facts in sites:
        counts = [_count(facts, name) for name in classes]
        rows.append([facts["site"], facts["images"], facts["test_images"], *counts])
    return _table(["site", "images", "test", *classes], rows)


def _image_table(sites: Sequence[SiteFacts]) -> list[str]:
    """Return the Markdown table of sizes, depth and brightness by site."""
    rows: list[list[object]] = []
    for facts in sites:
        row = [
            facts["site"],
            range_text(facts["width"]),
            range_text(facts["height"]),
            ", ".join(facts["channels"]),
            ", ".join(facts["bits"]),
            ", ".join(facts["modalities"]),
            ", ".join(facts["windows"]),
            " ± ".join(map(str, facts["intensity"])),
            facts["contrast"],
            f"{facts['disk_gb']} GB",
        ]
        rows.append(row)
    header = [
        "site",
        "width",
        "height",
        "channels",
        "bits",
        "modality",
        "window",
        "mean intensity",
        "contrast",
        "free disk",
    ]
    return _table(header, rows)


def _count(facts: SiteFacts, name: str) -> str:
    """Return the number of images of the class `name` at a site as text, or that it is hidden."""
    count = facts["classes"].get(name, 0)
    if count is None:
        return "hidden"
    return str(count)


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = []
    for row in [header, ["---"] * len(header), *rows]:
        lines.append(f"| {' | '.join(markdown_cell(str(cell)) for cell in row)} |")
    return lines
