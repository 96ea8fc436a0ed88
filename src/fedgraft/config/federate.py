"""From a config to its data and their partition. Imports no torch, so that looking at a partition is quick."""

from __future__ import annotations

from typing import Any

from fedgraft.config.options import Config
from fedgraft.core.errors import FedgraftError
from fedgraft.data.federated import FederatedData
from fedgraft.data.partition import federate as divide
from fedgraft.data.sources import Dataset, load_dataset
from fedgraft.data.sources.class_map import check_names, renamed


def open_data(config: Config, check: bool = True) -> Dataset:
    """Return the dataset of a config, its classes renamed; with `check`, refuse names that differ only by spelling."""
    table = config.data
    options: dict[str, Any] = dict(table.model_extra or {})
    if table.source == "synthetic":
        sizes = {"classes": table.classes, "train": table.count, "test": max(table.classes, table.count // 5)}
        options = {**sizes, **options}
    if table.unreadable is not None:
        options["unreadable"] = table.unreadable
    dataset = renamed(load_dataset(table.source, table.path, **options), table.class_map)
    if check:
        check_names(dataset.classes)
    if table.class_names is not None:
        dataset = Dataset(dataset.name, dataset.train.named(table.class_names), dataset.test.named(table.class_names))
    if table.store == "none":
        dataset = dataset.without_stored_pixels()
    return dataset


def federate(config: Config) -> FederatedData:
    """Return the config's data with validation images held out and the rest divided among the clients.

    Reads the data from disk; everything random follows from the config's seed.
    """
    dataset = open_data(config)
    classes = len(dataset.classes)
    for group in config.partition.groups:
        for label in group:
            if not 0 <= label < classes:
                raise FedgraftError(
                    "E-CONFIG-GROUP-LABEL",
                    f"partition.groups names the label {label}, and there are {classes} classes",
                    f"use labels from 0 to {classes - 1}",
                    label=label,
                )
    split = {"seed": config.seed, "limit": config.data.limit, "validation": config.data.validation}
    partition = config.partition
    return divide(dataset, partition.kind, partition.clients, **split, **partition_options(config))


def partition_options(config: Config) -> dict[str, object]:
    """Return the options of the config's kind of partition, as arguments of `make_partition`."""
    table = config.partition
    by_kind: dict[str, dict[str, object]] = {
        "by_site": {"column": table.column, "allow_uncovered": table.allow_uncovered},
        "classes": {"per_client": table.classes_per_client, "allow_uncovered": table.allow_uncovered},
        "shards": {"per_client": table.shards_per_client, "per_class": table.shard_rule == "per_class"},
        "dirichlet": {"alpha": table.alpha, "min_size": table.minimum},
        "dirichlet_balanced": {"alpha": table.alpha},
        "groups": {"groups": table.groups, "allow_uncovered": table.allow_uncovered},
    }
    return {**by_kind.get(table.kind, {}), "test": table.test}
