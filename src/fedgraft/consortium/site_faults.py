"""Problems of the data at a site or between sites, by name, from the facts that `preflight` collects of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedgraft.data.sources.class_map import similar_names

SiteFacts = Mapping[str, Any]
"""The facts of one site, as `preflight.site_facts` returns them."""


@dataclass(frozen=True)
class Finding:
    """A problem or a suspicion: its name, where it is, a sentence, and whether training should wait for it."""

    kind: str
    site: str
    text: str
    stops: bool = False
    """True for an error, False for a warning."""

    @property
    def severity(self) -> str:
        """`error` or `warning`."""
        if self.stops:
            return "error"
        return "warning"

    def __str__(self) -> str:
        return f"{self.severity:7}  {self.kind:20} {self.site}: {self.text}"


def findings(
    sites: Sequence[SiteFacts], size: int | None = None, shared: Mapping[tuple[str, str], int] | None = None
) -> list[Finding]:
    """Return all problems at a site or between sites, errors first.

    `size` is the side of the network's input in pixels, `shared` the number of common images by pair of sites.
    """
    problems: list[Finding] = []
    for facts in sites:
        problems += _at_site(facts, size)
    problems += _site_names([facts["site"] for facts in sites])
    problems += _class_names(sites)
    problems += _between(sites)
    for (a, b), count in (shared or {}).items():
        problems.append(Finding("duplicates_across", f"{a} and {b}", f"{count} images are at both"))
    return sorted(problems, key=lambda finding: (not finding.stops, finding.kind, finding.site))


FAULTS = {
    "contradictory": ("contradictory_labels", "{} have two different classes", True),
    "leaked": ("train_and_test", "{} are for training and for testing", True),
    "split_groups": ("split_groups", "{} are of patients with training and with test images", True),
    "duplicates": ("duplicates", "{} are there more than once", False),
    "blank": ("blank", "{} have one single colour", False),
    "transparent": ("transparency", "{} have transparency, which is dropped", False),
    "cmyk": ("cmyk", "{} have the colours of a printer (CMYK), which are converted roughly", False),
    "pages": ("several_pictures", "{} hold several pictures each, of which the first is used", False),
    "other": ("not_images", "{} are in a format that is not read, and are left out", False),
}
"""Counts of faulty images: the name of the finding, its sentence, whether it is an error."""


def _at_site(facts: SiteFacts, size: int | None) -> Iterator[Finding]:
    """Yield the problems of one site; `size` is the side of the network's input in pixels (None: unknown)."""
    site = facts["site"]
    classes = facts["classes"]
    minimum = facts["minimum"]
    if not facts["images"]:
        yield Finding("no_images", site, "it has no images", True)
        return

    def count_text(*counts: int | None) -> str:
        """Return the sum of these counts as text; "fewer than ..." where all are hidden."""
        known = sum(count or 0 for count in counts)
        if known:
            return f"{known} images"
        return f"fewer than {minimum} images"

    def some_text(*counts: int | None) -> str:
        """Return the sum of these counts of a table whose small ones hide others; "some images" if one is hidden."""
        if None in counts:
            return "some images"
        return count_text(*counts)

    for reason, count in facts["unreadable"].items():
        yield Finding("unreadable", site, f"{count_text(count)} cannot be read: {reason}", True)
    if len(classes) == 1:
        yield Finding("one_class", site, f"all images are of the class {next(iter(classes))!r}", True)
    for name, count in facts["faults"].items():
        kind, text, stops = FAULTS[name]
        yield Finding(kind, site, text.format(count_text(count)), stops)
    deep = [count for bits, count in facts["bits"].items() if int(bits) > 8]
    if deep and not facts["modalities"]:  # scans say themselves how their values are seen
        text = "have more than 8 bits and are clipped at 255 without a wider data.grey_window such as [0, 65535]"
        yield Finding("deep", site, f"{some_text(*deep)} {text}")
    if "none" in facts["windows"] and facts["modalities"] and len(deep) > 0:
        text = "say no window, and all values their bits can have are shown; data.grey_window says a narrower one"
        yield Finding("no_window", site, f"{some_text(facts['windows']['none'])} {text}")
    if len(facts["modalities"]) > 1:
        yield Finding("modalities", site, f"its images are of several modalities: {', '.join(facts['modalities'])}")
    if size and facts["width"]:
        width = facts["width"][0]
        height = facts["height"][0]
        if min(width, height) < size / 2:
            yield Finding("small_images", site, f"some have {width} x {height} pixels, and the network sees {size}")
    rare = [name for name, count in classes.items() if count is None]
    if rare:
        least = f"fewer than {minimum} images" if len(rare) == 1 else f"fewer than {minimum} images of at least one"
        yield Finding("rare_class", site, f"{least} of: {', '.join(rare)}")
    if not facts["test_images"]:
        yield Finding("no_test_images", site, "there are no images to test on")
    if facts["disk_gb"] < 2:
        yield Finding("disk", site, f"{facts['disk_gb']} GB are free; pixels and features need a few")
    if not facts["policy"]:
        yield Finding("no_policy", site, "no policy limits the requests that its node answers")


def _site_names(names: Sequence[str]) -> Iterator[Finding]:
    """Yield sites whose names differ by a slip: one owner that would count as two."""
    for name, other, kind in similar_names(names):
        if kind != "class_similar":
            yield Finding("site_names", f"{name}, {other}", f"{name!r} and {other!r} look like one owner", True)


def _class_names(sites: Sequence[SiteFacts]) -> Iterator[Finding]:
    """Yield class names that differ by a slip, and classes that a site lacks.

    Names that differ by a letter at one and the same site are taken for two classes, such as horse and house.
    """
    sites_of: dict[str, list[str]] = {}
    for facts in sites:
        for name in facts["classes"]:
            sites_of.setdefault(name, []).append(facts["site"])
    unclear: set[str] = set()
    for *pair, kind in similar_names(list(sites_of)):
        common, other = sorted(pair, key=lambda name: -len(sites_of[name]))  # suggest the name that more sites use
        at_one_site = set(sites_of[common]) & set(sites_of[other])
        stops = kind != "class_similar" or not at_one_site
        if stops:
            unclear |= {common, other}
        names = f"{common!r} ({', '.join(sites_of[common])}) and {other!r} ({', '.join(sites_of[other])})"
        class_map = f'{{"{other}" = "{common}"}}'
        text = f"{names} look like one class; if they are: data.class_map = {class_map}"
        yield Finding(kind, "classes", text, stops)
    for name, present in sites_of.items():
        if name in unclear:  # whether it is missing is known once the names are settled
            continue
        absent = [facts["site"] for facts in sites if facts["site"] not in present]
        if absent and len(present) == 1:
            yield Finding(
                "lone_class",
                present[0],
                f"it alone has the class {name!r}: a secure sum does not hide what it adds to it; clipping and noise "
                "of the clients do (privacy.dp with privacy.dp.noise_source=distributed)",
            )
        if absent:
            yield Finding("missing_class", ", ".join(absent), f"no image of the class {name!r}, which others have")


def _between(sites: Sequence[SiteFacts]) -> Iterator[Finding]:
    """Yield differences between the sites: channels, bit depth, outliers, package versions."""
    with_images = [facts for facts in sites if facts["bits"]]
    yield from _unusual(with_images, "channels", "channels", "its images have {} channels and most sites' {}")
    yield from _unusual(with_images, "bits", "depth", "its images have {} bits and most sites' {}")
    with_scans = [facts for facts in sites if facts["modalities"]]
    yield from _unusual(with_scans, "modalities", "modality", "its images are of the modality {} and most sites' {}")
    yield from _outliers(with_images)
    for name in ("fedgraft", "torch", "transformers", "pillow"):
        versions = {facts["site"]: facts["versions"].get(name) for facts in sites}
        if len(set(versions.values())) > 1:
            listed = ", ".join(f"{site} {version}" for site, version in versions.items())
            yield Finding("versions", "all", f"{name} differs: {listed}", name == "fedgraft")


def _unusual(sites: Sequence[SiteFacts], key: str, kind: str, text: str) -> Iterator[Finding]:
    """Yield a finding of this kind for every site whose most frequent value of the fact `key` is not that of most.

    `text` has two places: the site's value and the usual one.
    """
    frequent = {}
    for facts in sites:
        counts = facts[key]
        frequent[facts["site"]] = max(counts, key=lambda value, counts=counts: counts[value] or 0)  # type: ignore[misc]
    if not frequent:
        return
    usual = Counter(frequent.values()).most_common(1)[0][0]
    for site, value in frequent.items():
        if value != usual:
            yield Finding(kind, site, text.format(value, usual))


DOMINATES = 0.8
"""Share of all images from which on one site dominates the federation."""


def _outliers(sites: Sequence[SiteFacts]) -> Iterator[Finding]:
    """Yield sites whose size, shape, brightness or colour is far from the median site's, or with nearly all images."""
    if len(sites) < 2:
        return
    usual_width = _median(sites, _width)
    usual_shape = _median(sites, _shape)
    usual_level = _median(sites, _level)
    usual_warmth = _median(sites, _warmth)
    images = sum(facts["images"] for facts in sites)
    for facts in sites:
        site = facts["site"]
        if not 0.5 <= _width(facts) / usual_width <= 2:
            text = f"images are {_width(facts)} pixels wide, elsewhere {usual_width:g}"
            yield Finding("size_differs", site, text)
        if not 2 / 3 <= _shape(facts) / usual_shape <= 1.5:
            text = f"images are {_shape(facts):.2f} times as wide as high, elsewhere {usual_shape:.2f}"
            yield Finding("shape_differs", site, f"{text}: rotated, or cropped otherwise")
        if abs(_level(facts) - usual_level) > 0.2:
            text = f"mean intensity {_level(facts):.2f}, elsewhere {usual_level:.2f}: another device, or inverted"
            yield Finding("intensity_differs", site, text)
        if abs(_warmth(facts) - usual_warmth) > 0.2:
            text = f"red minus blue is {_warmth(facts):+.2f}, elsewhere {usual_warmth:+.2f}"
            yield Finding("colour_differs", site, f"{text}: another light, or channels exchanged")
        if len(sites) > 2 and facts["images"] > DOMINATES * images:
            text = f"it has {facts['images']:,} of {images:,} images"
            yield Finding("dominates", site, f"{text}; algorithm.weighting=uniform gives all sites the same weight")


def _median(sites: Sequence[SiteFacts], value: Callable[[SiteFacts], float]) -> float:
    """Return the median of a number over the sites."""
    return float(np.median([value(facts) for facts in sites]))


def _width(facts: SiteFacts) -> int:
    """Return the median width in pixels."""
    return int(facts["width"][1])


def _shape(facts: SiteFacts) -> float:
    """Return the median width over the median height."""
    return float(facts["width"][1] / facts["height"][1])


def _level(facts: SiteFacts) -> float:
    """Return the mean intensity."""
    return float(facts["intensity"][0])


def _warmth(facts: SiteFacts) -> float:
    """Return the mean of red minus blue."""
    return float(facts["colours"][0] - facts["colours"][2])
