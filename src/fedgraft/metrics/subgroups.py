"""Subgroups of images by a column of the data (sex, age group): which there are, and which are too small to be told.

A group's metrics come from the same sums as those of all images. Where the sums of all and of every other group are
known, those of a group follow by subtraction, so leaving out a small group alone hides nothing. `withheld` therefore
leaves out at least as many images as the smallest group may have.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedgraft.core.errors import FedgraftError
from fedgraft.core.label_sets import ABSENT, PRESENT, UNKNOWN, are_label_sets
from fedgraft.core.protocols import Examples, Network
from fedgraft.metrics.evaluate import evaluate_with_sums
from fedgraft.metrics.scores import LOSS_LIMIT

MOST_GROUPS = 64
"""A column with more different values is no column of groups."""


@dataclass(frozen=True)
class Subgroups:
    """A column of the data and the values by which metrics are told; without values: those that the images have."""

    column: str
    values: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Subgroups:
        """Return the groups that a text names: `sex`, or with the values `sex=F|M`; refuse one without a column."""
        column, equals, listed = text.partition("=")
        values = tuple(value.strip() for value in listed.split("|")) if equals else ()
        if not column.strip() or "" in values or len(set(values)) != len(values) or len(values) > MOST_GROUPS:
            raise FedgraftError(
                "E-METRICS-SUBGROUPS",
                f"metrics_by names {text!r}, which is no column with different values",
                "write a column of the data, such as sex, or its values too: sex=F|M",
                text=text,
            )
        return cls(column.strip(), values)

    def numbers(self, cells: np.ndarray) -> Tensor:
        """Return the number of each row's group (N,): its place in `values`, or their count for any other value."""
        place = {value: number for number, value in enumerate(self.values)}
        return torch.tensor([place.get(str(cell), len(self.values)) for cell in cells.tolist()], dtype=torch.int64)


def values_of(groups: Subgroups, cells: np.ndarray) -> Subgroups:
    """Return the groups with their values: those given, else the different ones of the rows, sorted, without empty."""
    if groups.values:
        return groups
    values = tuple(sorted({str(cell) for cell in cells.tolist()} - {""}))
    if not values or len(values) > MOST_GROUPS:
        raise FedgraftError(
            "E-METRICS-SUBGROUP-VALUES",
            f"metrics_by names the column {groups.column!r}, which has {len(values)} different values",
            f"name a column with 1 to {MOST_GROUPS}",
            column=groups.column,
            values=len(values),
        )
    return Subgroups(groups.column, values)


def withheld(counts: Tensor, smallest: int) -> Tensor:
    """Return which groups are not told, bool (G, ...), from the images of each (G + 1, ...).

    The last row counts the images of no group. A group of fewer than `smallest` images is left out, and so are the next
    larger ones until those left out, together with the images of no group, are none or at least `smallest`.
    """
    columns = counts.reshape(len(counts), -1)
    hidden = torch.zeros(len(counts) - 1, columns.shape[1], dtype=torch.bool)
    for column in range(columns.shape[1]):
        *groups, outside = columns[:, column].tolist()
        left_out = outside
        for group in sorted(range(len(groups)), key=lambda group: (groups[group], group)):
            is_small = 0 < groups[group] < smallest
            if groups[group] and (is_small or 0 < left_out < smallest):
                hidden[group, column] = True
                left_out += groups[group]
    return hidden.reshape(len(counts) - 1, *counts.shape[1:])


def told_labels(labels: Tensor, numbers: Tensor, groups: int, smallest: int) -> list[tuple[Tensor, Tensor]]:
    """Return for each group the places of its images that metrics are told of, and which findings of them are unknown.

    Args:
        labels: classes (n,) or label sets (n, C).
        numbers: of each image's group, (n,); `groups` for an image of no group.
        smallest: images that a group, a class or a finding of it must have.

    The findings are bool (C,), all false for classes: of a class that is too small in a group the images are left out.
    """
    hidden_groups = withheld(torch.bincount(numbers, minlength=groups + 1), smallest)
    outside = torch.full((1,), groups)
    place = torch.cat([torch.arange(groups).masked_fill(hidden_groups, groups), outside])
    numbers = place[numbers]  # images of groups that are withheld belong to no group from here on
    sets = are_label_sets(labels)
    if sets:
        present = _counts_by_group((labels == PRESENT).long(), numbers, groups)
        absent = _counts_by_group((labels == ABSENT).long(), numbers, groups)
        hidden = withheld(present, smallest) | withheld(absent, smallest)
    else:
        classes = 0
        if len(labels):
            classes = int(labels.max()) + 1
        is_of_class = (labels[:, None] == torch.arange(classes)).long()
        hidden = withheld(_counts_by_group(is_of_class, numbers, groups), smallest)
    told = []
    for group in range(groups):
        places = torch.nonzero(numbers == group).view(-1)
        if sets:
            told.append((places, hidden[group]))
            continue
        if len(places):
            places = places[~hidden[group][labels[places]]]
        told.append((places, torch.zeros(0, dtype=torch.bool)))
    return told


def _counts_by_group(marks: Tensor, numbers: Tensor, groups: int) -> Tensor:
    """Return the sums of `marks` (n, C) over the images of each group, (groups + 1, C)."""
    counts = torch.zeros(groups + 1, marks.shape[1], dtype=torch.int64)
    return counts.index_add_(0, numbers, marks)


def group_sums(
    network: Network,
    examples: Examples,
    rows: Tensor,
    cells: np.ndarray,
    groups: Subgroups,
    smallest: int,
    threads: int = 1,
    largest_loss: float = LOSS_LIMIT,
) -> list[dict[str, Tensor]]:
    """Return the sums for metrics over the images of each group, in the order of its values; zeros for one withheld.

    Args:
        rows: the images, rows of `examples`.
        cells: the column's value of every row of `examples`.
        groups: the column, with its values.
        smallest, largest_loss: as in `told_labels` and `evaluate_with_sums`.
    """
    numbers = groups.numbers(cells[rows.numpy()])
    parts = []
    for places, unknown in told_labels(examples.labels[rows], numbers, len(groups.values), smallest):
        told = copy(examples)
        told.labels = without_findings(examples.labels, unknown)
        _, sums = evaluate_with_sums(network, told, rows[places], threads=threads, largest_loss=largest_loss)
        parts.append(sums)
    return parts


def without_findings(labels: Tensor, unknown: Tensor) -> Tensor:
    """Return label sets (n, C) in which these findings, bool (C,), are unknown; classes as they are."""
    if not are_label_sets(labels):
        return labels
    return labels.masked_fill(unknown, UNKNOWN)


def parse_all(texts: Sequence[str]) -> tuple[Subgroups, ...]:
    """Return the subgroups that `metrics_by` names; refuse a column named twice."""
    parsed = tuple(Subgroups.parse(text) for text in texts)
    columns = [groups.column for groups in parsed]
    if len(set(columns)) != len(columns):
        raise FedgraftError(
            "E-METRICS-SUBGROUPS", "metrics_by names a column twice", "name each once", columns=tuple(columns)
        )
    return parsed
