"""From a config to its data and their partition. Imports no torch, so that looking at a partition is quick."""

from __future__ import annotations

from fedgraft.config.options import Config
from fedgraft.core.errors import FedgraftError
from fedgraft.data.federated import FederatedData
from fedgraft.data.partition import federate as divide
from fedgraft.data.sources import Dataset, load_dataset
from fedgraft.data.sources.class_map import check_names, renamed


def open_data(config: Config, check: bool = True) -> Dataset:
    """The data that a config names; class names that look like one are refused, unless nobody trains on them yet."""
    d = config.data
    made = {"classes": d.classes, "train": d.count, "test": max(d.classes, d.count // 5)}
    options = {**(made if d.source == "synthetic" else {}), **(d.model_extra or {})}
    if d.unreadable is not None:
        options["unreadable"] = d.unreadable
    found = renamed(load_dataset(d.source, d.path, **options), d.class_map)
    if check:
        check_names(found.classes)
    return found


def federate(config: Config) -> FederatedData:
    """Load the data, hold out validation images once, and divide the rest among the clients."""
    d, p, dataset = config.data, config.partition, open_data(config)
    strange = [label for group in p.groups for label in group if not 0 <= label < len(dataset.classes)]
    if strange:
        raise FedgraftError(f"partition.groups names the label {strange[0]}, and there are {len(dataset.classes)}")
    split = {"seed": config.seed, "limit": d.limit, "validation": d.validation}
    return divide(dataset, p.kind, p.clients, **split, **partition_options(config))


def partition_options(config: Config) -> dict[str, object]:
    """What `make_partition` is told about this kind of partition."""
    p = config.partition
    own: dict[str, dict[str, object]] = {
        "by_site": {"column": p.column, "allow_uncovered": p.allow_uncovered},
        "classes": {"per_client": p.classes_per_client, "allow_uncovered": p.allow_uncovered},
        "shards": {"per_client": p.shards_per_client, "per_class": p.shard_rule == "per_class"},
        "dirichlet": {"alpha": p.alpha, "min_size": p.minimum},
        "dirichlet_balanced": {"alpha": p.alpha},
        "groups": {"groups": p.groups, "allow_uncovered": p.allow_uncovered},
    }
    return {**own.get(p.kind, {}), "test": p.test}
