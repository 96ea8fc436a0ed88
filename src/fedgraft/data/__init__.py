"""Data: sources (one function each), stores and examples, and the division among clients (`partition`)."""

from fedgraft.data import partition
from fedgraft.data.cache_limit import cache_dir
from fedgraft.data.federated import FederatedData
from fedgraft.data.partition import KINDS, Partition, make_partition
from fedgraft.data.partition.split import stratified_split
from fedgraft.data.pixels.rule import PixelRule
from fedgraft.data.pixels.store import ImageStore, make_store
from fedgraft.data.sources import (
    SOURCES,
    Dataset,
    arrays,
    cifar10,
    cifar100,
    dataset,
    digits,
    features,
    folder,
    load_dataset,
    npz,
    options_of,
    owners,
    parquet,
    synthetic,
    table,
)

__all__ = [
    "KINDS",
    "SOURCES",
    "Dataset",
    "FederatedData",
    "ImageStore",
    "Partition",
    "PixelRule",
    "arrays",
    "cache_dir",
    "cifar10",
    "cifar100",
    "dataset",
    "digits",
    "features",
    "folder",
    "load_dataset",
    "make_partition",
    "make_store",
    "npz",
    "options_of",
    "owners",
    "parquet",
    "partition",
    "stratified_split",
    "synthetic",
    "table",
]
