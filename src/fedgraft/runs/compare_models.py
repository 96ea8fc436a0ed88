"""Two models compared on one site's labelled images, or on those of several sites in one data set."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedgraft.core.errors import FedgraftError
from fedgraft.data.examples import examples_of
from fedgraft.data.sources.assemble import Dataset, without_unreadable
from fedgraft.metrics.comparison import Comparison, comparison_sums, merge_comparisons, paired_tests
from fedgraft.metrics.evaluate import logits_of
from fedgraft.runs.predict import predictor


@dataclass(frozen=True)
class SiteComparisons:
    """Two models compared at each site, and at all of them together."""

    models: tuple[str, str]
    images: int
    sites: dict[str, Comparison]
    """By the name of the site; empty where the data names none."""
    pooled: Comparison
    skipped: tuple[tuple[str, str], ...] = ()
    """The place of each image that cannot be read, and the reason."""

    def table(self) -> dict[str, Any]:
        """Return the comparison as plain values for JSON."""
        return asdict(self)


def compare_on_data(first: Path | str, second: Path | str, data: Dataset | Path | str) -> SiteComparisons:
    """Return the paired tests of two models on labelled images: those of `test` where the data has such a part.

    `first` and `second` are runs or exported models of the same classes; each sees the images as in its training.
    """
    models = (predictor(first), predictor(second))
    same_kind = models[0].network.label_sets == models[1].network.label_sets
    if tuple(models[0].classes) != tuple(models[1].classes) or not same_kind:
        raise FedgraftError(
            "E-RUN-OTHER-CLASSES",
            f"{first} and {second} have different classes",
            "compare models of the same classes",
        )
    names = tuple(models[0].classes)
    labelled = models[0].labelled_images(data)
    skipped: list[tuple[str, str]] = []
    readable = without_unreadable(labelled.named(names), skipped, models[0].transform.rule)
    rows = torch.arange(len(readable))
    logits = []
    for model in models:
        logits.append(logits_of(model.network, examples_of(readable, model.transform), rows))
    labels = torch.as_tensor(readable.targets)
    sites = np.asarray([""] * len(readable))
    if readable.sites is not None:
        sites = readable.sites
    comparisons = {}
    parts = []
    for site in sorted(set(sites.tolist())):
        at_site = torch.as_tensor(np.flatnonzero(sites == site))
        sums = comparison_sums(logits[0][at_site], logits[1][at_site], labels[at_site])
        parts.append(sums)
        if site:
            comparisons[site] = paired_tests(sums, names)
    pooled = paired_tests(merge_comparisons(parts, len(names)), names)
    paths = (str(first), str(second))
    return SiteComparisons(paths, len(readable), comparisons, pooled, tuple(skipped))
