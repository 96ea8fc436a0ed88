"""Looking before anybody trains: what each site holds, as counts and sums, and what would go wrong.

`site_facts` runs where the images are and returns plain numbers: classes (counts below a minimum are hidden), images
that cannot be read or are there twice, sizes, channels, depth, intensities, versions, free disk. The digests of single
images that it returns beside them are never told: two sites compare them (`shared_images`; between machines under a key
that only these two know, `deploy.preflight`). `findings` compares the sites and names each fault.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from fedgraft.config.federate import federate, open_data
from fedgraft.config.options import Config
from fedgraft.data.images.rule import Unreadable, decode, original
from fedgraft.data.images.store import ImageStore, cache_dir
from fedgraft.data.sources.assemble import Dataset
from fedgraft.data.sources.class_map import slips
from fedgraft.report import figures
from fedgraft.runs.environment import PACKAGES, installed
from fedgraft.runs.files import write_text

MINIMUM = 5
"""Counts below this are not told, only that there are some."""
Facts = Mapping[str, Any]
_DEEP = {"I": 32, "F": 32, "I;16": 16, "I;16B": 16, "I;16L": 16, "1": 1}
_CHANNELS = {"1": 1, "L": 1, "P": 3, "RGB": 3, "RGBA": 4, "LA": 2, "CMYK": 4, "PA": 4}


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, or might be: its name, where, a sentence, and whether nobody should train yet."""

    kind: str
    site: str
    text: str
    stops: bool = False

    def __str__(self) -> str:
        return f"{'STOP' if self.stops else 'look'}  {self.kind:20} {self.site}: {self.text}"


def site_facts(
    site: str, dataset: Dataset, rows: Sequence[Iterable[int]], minimum: int = MINIMUM, policy: bool = True
) -> tuple[dict[str, Any], list[bytes]]:
    """What may be told of one site's training and test rows, and the digests of its images, which may not."""
    seen: list[dict[str, Any]] = []
    for part, (store, own) in enumerate(zip((dataset.train, dataset.test), rows, strict=True)):
        if isinstance(store, ImageStore):
            seen += [{**one, "test": part == 1} for one in _looked_at(store, own)]
    good = [one for one in seen if "reason" not in one]
    counts = Counter(one["label"] for one in seen)
    digests = Counter(one["digest"] for one in good)
    labels: dict[str, set[str]] = {}
    for one in good:
        labels.setdefault(one["digest"], set()).add(one["label"])
    held_out = {one["digest"] for one in good if one["test"]}
    level = np.array([one["mean"] for one in good])

    def hidden(counts: Mapping[str, int]) -> dict[str, int | None]:
        return {name: n if n >= minimum else None for name, n in sorted(counts.items())}

    faults = {
        "duplicates": sum(n - 1 for n in digests.values()),
        "contradictory": sum(len(names) > 1 for names in labels.values()),
        "leaked": len(held_out & {one["digest"] for one in good if not one["test"]}),
        "blank": sum(one["std"] < 1e-3 for one in good),
    }
    facts = {
        "site": site, "images": len(seen), "test_images": sum(one["test"] for one in seen),
        "classes": hidden(counts), "minimum": minimum, "faults": hidden({k: n for k, n in faults.items() if n}),
        "unreadable": hidden(Counter(one["reason"] for one in seen if "reason" in one)),
        "width": _spread([one["size"][0] for one in good]), "height": _spread([one["size"][1] for one in good]),
        "channels": hidden(Counter(str(one["channels"]) for one in good)),
        "bits": hidden(Counter(str(one["bits"]) for one in good)),
        "intensity": [round(float(level.mean()), 4), round(float(level.std()), 4)] if len(good) else [],
        "contrast": round(float(np.mean([one["std"] for one in good])), 4) if good else 0.0,
        "versions": {name: found for name in PACKAGES if (found := installed(name))},
        "disk_gb": round(shutil.disk_usage(_existing(cache_dir())).free / 1e9, 1), "policy": policy,
    }  # fmt: skip
    return facts, sorted(digests)


def shared_images(digests: Mapping[str, Sequence[bytes]]) -> dict[tuple[str, str], int]:
    """How many images two sites have in common, by the pair of their names."""
    pairs = combinations(digests, 2)
    return {(a, b): n for a, b in pairs if (n := len(set(digests[a]) & set(digests[b])))}


def _looked_at(store: ImageStore, rows: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Each image of these rows: its class, and its shape, depth and pixels' digest, or why it cannot be read."""
    for row in rows:
        place = int(row) if store.rows is None else int(store.rows[row])
        label = store.classes[int(store.labels[row])]
        source = store.originals.read(place, place + 1)[0] if not isinstance(store.content, np.ndarray) else (
            store.content[place])  # fmt: skip
        try:
            raw, pixels = original(source), np.asarray(decode(source))
        except Unreadable as error:
            yield {"label": label, "reason": _plain(error.reason)}
            continue
        grey = pixels.mean(2) / 255
        yield {
            "label": label, "size": raw.size, "channels": _CHANNELS.get(raw.mode, 1), "bits": _DEEP.get(raw.mode, 8),
            "mean": float(grey.mean()), "std": float(grey.std()),
            "digest": hashlib.blake2b(repr(raw.size).encode() + pixels.tobytes(), digest_size=16).digest(),
        }  # fmt: skip


def _plain(reason: str) -> str:
    """A reason without what belongs to one file: its numbers."""
    return re.sub(r"\d[\d,.]*", "#", reason)[:80]


def _spread(values: Sequence[int]) -> list[int]:
    """Least, median and most."""
    return [int(np.min(values)), int(np.median(values)), int(np.max(values))] if values else []


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)


def findings(
    sites: Sequence[Facts], size: int | None = None, shared: Mapping[tuple[str, str], int] | None = None
) -> list[Finding]:
    """Everything that is wrong at a site or between sites; `size`: pixels that the network sees."""
    found = [one for facts in sites for one in _alone(facts, size)]
    found += _class_names(sites)
    found += _between(sites)
    for (a, b), n in (shared or {}).items():
        found.append(Finding("duplicates_across", f"{a} and {b}", f"{n} images are at both"))
    return sorted(found, key=lambda one: (not one.stops, one.kind, one.site))


FAULTS = {
    "contradictory": ("contradictory_labels", "{} have two different classes", True),
    "leaked": ("train_and_test", "{} are for training and for testing", True),
    "duplicates": ("duplicates", "{} are there more than once", False),
    "blank": ("blank", "{} have one single colour", False),
}
"""Counts of faulty images: the name, the sentence, whether it stops."""


def _alone(f: Facts, size: int | None) -> Iterator[Finding]:
    site, classes = f["site"], f["classes"]
    if not f["images"]:
        yield Finding("no_images", site, "it has no images", True)
        return

    def some(*counts: int | None) -> str:
        known = sum(n or 0 for n in counts)
        return f"{known} images" if known else f"fewer than {f['minimum']} images"

    for reason, count in f["unreadable"].items():
        yield Finding("unreadable", site, f"{some(count)} cannot be read: {reason}", True)
    if len(classes) == 1:
        yield Finding("one_class", site, f"all images are of the class {next(iter(classes))!r}", True)
    for name, count in f["faults"].items():
        kind, text, stops = FAULTS[name]
        yield Finding(kind, site, text.format(some(count)), stops)
    if deep := [n for bits, n in f["bits"].items() if int(bits) > 8]:
        yield Finding("deep", site, f"{some(*deep)} have more than 8 bits; set data.grey_window")
    if alpha := [n for channels, n in f["channels"].items() if channels in ("2", "4")]:
        yield Finding("transparency", site, f"{some(*alpha)} have transparency, which is dropped")
    if size and f["width"] and min(f["width"][0], f["height"][0]) < size / 2:
        small = f"{f['width'][0]} x {f['height'][0]}"
        yield Finding("small_images", site, f"some have {small} pixels, and the network sees {size}")
    if rare := [name for name, count in classes.items() if count is None]:
        yield Finding("rare_class", site, f"fewer than {f['minimum']} images of: {', '.join(rare)}")
    if not f["test_images"]:
        yield Finding("no_test_images", site, "nothing is left to test on")
    if f["disk_gb"] < 2:
        yield Finding("disk", site, f"{f['disk_gb']} GB are free; pixels and features need a few")
    if not f["policy"]:
        yield Finding("no_policy", site, "no policy limits what its node answers")


def _class_names(sites: Sequence[Facts]) -> Iterator[Finding]:
    """Names that differ by a slip, at one site or between two."""
    where: dict[str, list[str]] = {}
    for facts in sites:
        for name in facts["classes"]:
            where.setdefault(name, []).append(facts["site"])
    for one, other, kind in slips(list(where)):
        text = f"{one!r} ({', '.join(where[one])}) and {other!r} ({', '.join(where[other])})"
        settled = f'{{"{other}" = "{one}"}}'
        yield Finding(kind, "classes", f"{text} look like one; if they are: data.class_map = {settled}", True)
    everywhere = [f["site"] for f in sites]
    for name, held in where.items():
        if absent := [site for site in everywhere if site not in held]:
            yield Finding("missing_class", ", ".join(absent), f"no image of the class {name!r}, which others have")


def _between(sites: Sequence[Facts]) -> Iterator[Finding]:
    there = [f for f in sites if f["bits"]]
    for key, kind, text in (
        ("channels", "channels", "its images have {} channels and most sites' {}"),
        ("bits", "depth", "its images have {} bits and most sites' {}"),
    ):
        usual = {f["site"]: max(f[key], key=lambda k: f[key][k] or 0) for f in there}
        most = Counter(usual.values()).most_common(1)[0][0] if usual else ""
        for site, mine in usual.items():
            if mine != most:
                yield Finding(kind, site, text.format(mine, most))
    yield from _outliers(there)
    packages = {f["site"]: f["versions"] for f in sites}
    for name in ("fedgraft", "torch", "transformers", "pillow"):
        if len({versions.get(name) for versions in packages.values()}) > 1:
            told = ", ".join(f"{site} {versions.get(name)}" for site, versions in packages.items())
            yield Finding("versions", "all", f"{name} differs: {told}", name == "fedgraft")


def _outliers(sites: Sequence[Facts]) -> Iterator[Finding]:
    """Sites whose images are of another size or brightness than the median site's."""
    if len(sites) < 2:
        return
    side = float(np.median([f["width"][1] for f in sites]))
    level = float(np.median([f["intensity"][0] for f in sites]))
    for f in sites:
        if not 0.5 <= f["width"][1] / side <= 2:
            yield Finding("size_differs", f["site"], f"images are {f['width'][1]} pixels wide, elsewhere {side:g}")
        if abs(f["intensity"][0] - level) > 0.2:
            text = f"mean intensity {f['intensity'][0]:.2f}, elsewhere {level:.2f}: another device, or inverted"
            yield Finding("intensity_differs", f["site"], text)


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
    looked = {name: site_facts(name, dataset, own) for name, own in zip(names, rows, strict=True)}
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
    lines += _table(["site", "images", "test", *classes], [
        [f["site"], f["images"], f["test_images"], *(_count(f, name) for name in classes)] for f in sites])  # fmt: skip
    lines += ["", *_table(["site", "width", "height", "channels", "bits", "mean intensity", "contrast", "free disk"], [
        [f["site"], _three(f["width"]), _three(f["height"]), ", ".join(f["channels"]), ", ".join(f["bits"]),
         " ± ".join(map(str, f["intensity"])), f["contrast"], f"{f['disk_gb']} GB"] for f in sites])]  # fmt: skip
    write_text(folder / "preflight.md", "\n".join(lines) + "\n")
    return folder / "preflight.md"


def _count(f: Facts, name: str) -> str:
    return f"fewer than {f['minimum']}" if f["classes"].get(name, 0) is None else str(f["classes"].get(name, 0))


def _three(values: Sequence[int]) -> str:
    return f"{values[1]} ({values[0]} to {values[2]})" if values else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    made = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(map(str, row))} |" for row in made]
