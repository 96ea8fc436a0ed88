"""Division of a dataset among clients: one function per kind of partition, each returning a `FederatedData`."""

from fedgraft.data.partition.federate import (
    by_site,
    classes,
    dirichlet,
    dirichlet_balanced,
    federate,
    given,
    groups,
    iid,
    shards,
    stratified,
)
from fedgraft.data.partition.partition import KINDS, Partition, compress, edges_of, make_partition

__all__ = [
    "KINDS",
    "Partition",
    "by_site",
    "classes",
    "compress",
    "dirichlet",
    "dirichlet_balanced",
    "edges_of",
    "federate",
    "given",
    "groups",
    "iid",
    "make_partition",
    "shards",
    "stratified",
]
