"""What is wrong at a site or between sites, by name, from the facts that `preflight` tells of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedgraft.data.sources.class_map import slips

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, or might be: its name, where, a sentence, and whether nobody should train yet."""

    kind: str
    site: str
    text: str
    stops: bool = False

    def __str__(self) -> str:
        return f"{'STOP' if self.stops else 'look'}  {self.kind:20} {self.site}: {self.text}"


def findings(
    sites: Sequence[Facts], size: int | None = None, shared: Mapping[tuple[str, str], int] | None = None
) -> list[Finding]:
    """Everything that is wrong at a site or between sites; `size`: pixels that the network sees."""
    found = [one for facts in sites for one in _alone(facts, size)]
    found += _site_names([f["site"] for f in sites])
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
    "transparent": ("transparency", "{} have transparency, which is dropped", False),
    "cmyk": ("cmyk", "{} have the colours of a printer (CMYK), which are converted roughly", False),
    "pages": ("several_pictures", "{} hold several pictures each, of which the first is used", False),
    "other": ("not_images", "{} are in a format that is not read, such as DICOM, and are left out", False),
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
        yield Finding(
            "deep",
            site,
            f"{some(*deep)} have more than 8 bits and are cut at 255, unless data.grey_window says more: [0, 65535]",
        )
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


def _site_names(names: Sequence[str]) -> Iterator[Finding]:
    """Sites whose names differ by a slip: one owner that would count as two."""
    for one, other, kind in slips(names):
        if kind != "class_similar":
            yield Finding("site_names", f"{one}, {other}", f"{one!r} and {other!r} look like one owner", True)


def _class_names(sites: Sequence[Facts]) -> Iterator[Finding]:
    """Names that differ by a slip, at one site or between two; a site that has both by a letter means two classes."""
    where: dict[str, list[str]] = {}
    for facts in sites:
        for name in facts["classes"]:
            where.setdefault(name, []).append(facts["site"])
    found, unclear = slips(list(where)), set[str]()
    for pair in found:
        one, other = sorted(pair[:2], key=lambda name: -len(where[name]))  # the name that most sites use is kept
        kind, both = pair[2], set(where[one]) & set(where[other])
        stops = kind != "class_similar" or not both  # horse and house, at one place, are no slip
        unclear |= {one, other} if stops else set()
        text = f"{one!r} ({', '.join(where[one])}) and {other!r} ({', '.join(where[other])})"
        settled = f'{{"{other}" = "{one}"}}'
        yield Finding(kind, "classes", f"{text} look like one; if they are: data.class_map = {settled}", stops)
    everywhere = [f["site"] for f in sites]
    for name, held in where.items():
        if name in unclear:  # whether it is missing is known when the names are settled
            continue
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


DOMINATES = 0.8
"""Share of all images from which on one site decides alone."""


def _outliers(sites: Sequence[Facts]) -> Iterator[Finding]:
    """Sites whose images are of another size, shape, brightness or colour than the median site's, or nearly all."""
    if len(sites) < 2:
        return

    def usual(of: Callable[[Facts], float]) -> float:
        return float(np.median([of(f) for f in sites]))

    def shape(f: Facts) -> float:
        return float(f["width"][1] / f["height"][1])

    def warmth(f: Facts) -> float:
        return float(f["colours"][0] - f["colours"][2])

    side, form, level, warm = usual(lambda f: f["width"][1]), usual(shape), usual(_level), usual(warmth)
    images = sum(f["images"] for f in sites)
    for f in sites:
        if not 0.5 <= f["width"][1] / side <= 2:
            yield Finding("size_differs", f["site"], f"images are {f['width'][1]} pixels wide, elsewhere {side:g}")
        if not 2 / 3 <= shape(f) / form <= 1.5:
            text = f"images are {shape(f):.2f} times as wide as high, elsewhere {form:.2f}: rotated, or cut otherwise"
            yield Finding("shape_differs", f["site"], text)
        if abs(_level(f) - level) > 0.2:
            text = f"mean intensity {_level(f):.2f}, elsewhere {level:.2f}: another device, or inverted"
            yield Finding("intensity_differs", f["site"], text)
        if abs(warmth(f) - warm) > 0.2:
            text = f"red minus blue is {warmth(f):+.2f}, elsewhere {warm:+.2f}: another light, or channels exchanged"
            yield Finding("colour_differs", f["site"], text)
        if len(sites) > 2 and f["images"] > DOMINATES * images:
            text = f"it has {f['images']:,} of {images:,} images; algorithm.weighting=uniform lets all count alike"
            yield Finding("dominates", f["site"], text)


def _level(f: Facts) -> float:
    return float(f["intensity"][0])
