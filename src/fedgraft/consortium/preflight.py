"""Looking before anybody trains: what each site holds, as counts and sums, and what would go wrong.

`site_facts` runs where the images are and returns plain numbers: classes (counts below a minimum are hidden), images
that cannot be read or are there twice, sizes, channels, depth, intensities, versions, free disk. The digests of single
images that it returns beside them are never told: two sites compare them (`shared_images`; between machines under a key
that only these two know, `deploy.preflight`). `site_faults.findings` compares the sites and names each fault.
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
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from fedgraft.config.federate import federate, open_data
from fedgraft.config.options import Config
from fedgraft.consortium.site_faults import Facts, Finding, findings
from fedgraft.core.files import write_text
from fedgraft.core.progress import counted
from fedgraft.data.pixels.rule import FORMATS, Source, Unreadable, Window, decode, original
from fedgraft.data.pixels.store import ImageStore, cache_dir
from fedgraft.data.sources.assemble import Dataset
from fedgraft.report import figures
from fedgraft.runs.environment import PACKAGES, installed

MINIMUM = 5
"""Counts below this are not told, only that there are some."""
_DEEP = {"I": 32, "F": 32, "I;16": 16, "I;16B": 16, "I;16L": 16, "1": 1}
_CHANNELS = {"1": 1, "L": 1, "P": 3, "RGB": 3, "RGBA": 4, "LA": 2, "CMYK": 4, "PA": 4}


def site_facts(
    site: str,
    dataset: Dataset,
    rows: Sequence[Iterable[int]],
    minimum: int = MINIMUM,
    policy: bool = True,
    window: Window = None,
) -> tuple[dict[str, Any], list[bytes]]:
    """What may be told of one site's training and test rows, and the digests of its images, which may not."""
    seen: list[dict[str, Any]] = []
    for part, (store, own) in enumerate(zip((dataset.train, dataset.test), rows, strict=True)):
        if isinstance(store, ImageStore):
            seen += [{**one, "test": part == 1} for one in _looked_at(store, own, window)]
    good = [one for one in seen if "reason" not in one]
    counts = Counter(one["label"] for one in seen)
    digests = Counter(one["digest"] for one in good)
    labels: dict[str, set[str]] = {}
    for one in good:
        labels.setdefault(one["digest"], set()).add(one["label"])
    held_out = {one["digest"] for one in good if one["test"]}
    level, colours = np.array([one["mean"] for one in good]), np.array([one["colours"] for one in good])

    def hidden(counts: Mapping[str, int]) -> dict[str, int | None]:
        return {name: n if n >= minimum else None for name, n in sorted(counts.items())}

    faults = {
        "duplicates": sum(n - 1 for n in digests.values()),
        "contradictory": sum(len(names) > 1 for names in labels.values()),
        "leaked": len(held_out & {one["digest"] for one in good if not one["test"]}),
        "blank": sum(one["std"] < 1e-3 for one in good),
        "transparent": sum(one["transparent"] for one in good),
        "cmyk": sum(one["cmyk"] for one in good),
        "pages": sum(one["pages"] for one in good),
        "other": sum(owner in ("", site) for owner in dataset.other_files),
    }
    facts = {
        "site": site,
        "images": len(seen),
        "test_images": sum(one["test"] for one in seen),
        "classes": hidden(counts),
        "minimum": minimum,
        "faults": hidden({k: n for k, n in faults.items() if n}),
        "unreadable": hidden(Counter(one["reason"] for one in seen if "reason" in one)),
        "width": _spread([one["size"][0] for one in good]),
        "height": _spread([one["size"][1] for one in good]),
        "channels": hidden(Counter(str(one["channels"]) for one in good)),
        "bits": hidden(Counter(str(one["bits"]) for one in good)),
        "intensity": [round(float(level.mean()), 4), round(float(level.std()), 4)] if len(good) else [],
        "colours": [round(float(c), 4) for c in colours.mean(0)] if len(good) else [],
        "contrast": round(float(np.mean([one["std"] for one in good])), 4) if good else 0.0,
        "versions": {name: found for name in PACKAGES if (found := installed(name))},
        "disk_gb": round(shutil.disk_usage(_existing(cache_dir())).free / 1e9, 1),
        "policy": policy,
    }
    return facts, sorted(digests)


def shared_images(digests: Mapping[str, Sequence[bytes]]) -> dict[tuple[str, str], int]:
    """How many images two sites have in common, by the pair of their names."""
    pairs = combinations(digests, 2)
    return {(a, b): n for a, b in pairs if (n := len(set(digests[a]) & set(digests[b])))}


def _looked_at(store: ImageStore, rows: Iterable[int], window: Window) -> Iterator[dict[str, Any]]:
    """Each image of these rows: its class, and its shape, depth and pixels' digest, or why it cannot be read."""
    for row in counted("looking at the images", rows, unit="images"):
        place = int(row) if store.rows is None else int(store.rows[row])
        label = store.classes[int(store.labels[row])]
        source = (
            store.originals.read(place, place + 1)[0]
            if not isinstance(store.content, np.ndarray)
            else (store.content[place])
        )
        try:
            raw, pixels = original(source), np.asarray(decode(source, window))
        except Unreadable as error:
            yield {"label": label, "reason": _plain(error.reason)}
            continue
        grey = pixels.mean(2) / 255
        yield {
            "transparent": raw.mode in ("RGBA", "LA", "PA") or "transparency" in raw.info,
            "cmyk": raw.mode == "CMYK",
            "pages": _pages(source) > 1,
            "colours": pixels.mean((0, 1)) / 255,
            "label": label,
            "size": raw.size,
            "channels": _CHANNELS.get(raw.mode, 1),
            "bits": _DEEP.get(raw.mode, 8),
            "mean": float(grey.mean()),
            "std": float(grey.std()),
            "digest": hashlib.blake2b(repr(raw.size).encode() + pixels.tobytes(), digest_size=16).digest(),
        }


def _pages(source: Source) -> int:
    """How many pictures a file holds that could be read, of which the first is taken; as far as they can be counted."""
    from PIL import Image

    if not isinstance(source, Path | bytes):
        return 1
    file = source if isinstance(source, Path) else io.BytesIO(source)
    with suppress(Exception), Image.open(file, formats=FORMATS) as image:
        return int(getattr(image, "n_frames", 1))
    return 1  # damaged behind its first picture, in any way a format knows


def _plain(reason: str) -> str:
    """A reason without what belongs to one file: its numbers."""
    return re.sub(r"\d[\d,.]*", "#", reason)[:80]


def _spread(values: Sequence[int]) -> list[int]:
    """Least, median and most."""
    return [int(np.min(values)), int(np.median(values)), int(np.max(values))] if values else []


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)


def by_site(dataset: Dataset) -> tuple[list[str], list[list[np.ndarray]]]:
    """The sites that the data names, and the training and test rows of each; without names it is one site."""
    columns = [store.sites for store in (dataset.train, dataset.test)]
    if columns[0] is None:
        return ["all"], [[np.arange(len(dataset.train.labels)), np.arange(len(dataset.test.labels))]]
    names = sorted({str(name) for column in columns if column is not None for name in column})
    none = np.zeros(0, np.int64)
    return names, [[none if c is None else np.flatnonzero(c.astype(str) == name) for c in columns] for name in names]


def preflight(config: Config) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Look at the data of a config: the facts of every site (or client), and what is wrong."""
    dataset = open_data(config, check=False)
    names, rows = by_site(dataset)
    if len(names) == 1 and config.partition.clients > 1 and config.partition.kind != "by_site":
        data = federate(config)
        names = [f"client {name}" for name in data.client_names]
        rows = [[data.rows(k).numpy(), data.test_rows(k).numpy()] for k in range(data.clients)]
    looked = {
        name: site_facts(name, dataset, own, window=config.data.grey_window)
        for name, own in zip(names, rows, strict=True)
    }
    sites = [facts for facts, _ in looked.values()]
    shared = shared_images({name: digests for name, (_, digests) in looked.items()})
    return sites, findings(sites, config.data.image_size, shared)


def write(folder: Path, sites: Sequence[Facts], found: Sequence[Finding]) -> Path:
    """The page of a preflight (Markdown), its picture, and the numbers (JSON); the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    told = {"sites": list(sites), "findings": [asdict(one) for one in found]}
    write_text(folder / "preflight.json", json.dumps(told, indent=2) + "\n")
    counts = {f["site"]: {name: n or 0 for name, n in f["classes"].items()} for f in sites}
    figures.bars(folder / "preflight.png", counts, ylabel="images", title="Images of each class by site")
    classes = list(dict.fromkeys(name for f in sites for name in f["classes"]))
    named = [f"- **{one.kind}** ({one.site}){' STOP' if one.stops else ''}: {one.text}" for one in found]
    lines = [
        "# Preflight",
        "",
        *(named or ["Nothing was found."]),
        "",
        "![images by class](preflight.png)",
        "",
    ]
    lines += _table(
        ["site", "images", "test", *classes],
        [[f["site"], f["images"], f["test_images"], *(_count(f, name) for name in classes)] for f in sites],
    )
    lines += [
        "",
        *_table(
            ["site", "width", "height", "channels", "bits", "mean intensity", "contrast", "free disk"],
            [
                [
                    f["site"],
                    _three(f["width"]),
                    _three(f["height"]),
                    ", ".join(f["channels"]),
                    ", ".join(f["bits"]),
                    " ± ".join(map(str, f["intensity"])),
                    f["contrast"],
                    f"{f['disk_gb']} GB",
                ]
                for f in sites
            ],
        ),
    ]
    write_text(folder / "preflight.md", "\n".join(lines) + "\n")
    return folder / "preflight.md"


def _count(f: Facts, name: str) -> str:
    return f"fewer than {f['minimum']}" if f["classes"].get(name, 0) is None else str(f["classes"].get(name, 0))


def _three(values: Sequence[int]) -> str:
    return f"{values[1]} ({values[0]} to {values[2]})" if values else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    made = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(map(str, row))} |" for row in made]
