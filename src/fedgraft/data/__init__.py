"""Where examples come from, one function per source, and how they are divided among clients (`partition`)."""

from fedgraft.data import partition
from fedgraft.data.examples import FeatureExamples, ImageExamples, examples_of
from fedgraft.data.feature_cache import CachedExamples, FeatureCache
from fedgraft.data.federated import FederatedData
from fedgraft.data.images.rule import PixelRule
from fedgraft.data.images.store import ImageStore, cache_dir, make_store
from fedgraft.data.images.transforms import Transform, make_transform
from fedgraft.data.partition import KINDS, Partition, make_partition
from fedgraft.data.partition.split import stratified_split
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
)

__all__ = [
    "KINDS",
    "SOURCES",
    "CachedExamples",
    "Dataset",
    "FeatureCache",
    "FeatureExamples",
    "FederatedData",
    "ImageExamples",
    "ImageStore",
    "Partition",
    "PixelRule",
    "Transform",
    "arrays",
    "cache_dir",
    "cifar10",
    "cifar100",
    "dataset",
    "digits",
    "examples_of",
    "features",
    "folder",
    "load_dataset",
    "make_partition",
    "make_store",
    "make_transform",
    "npz",
    "options_of",
    "owners",
    "parquet",
    "partition",
    "stratified_split",
    "synthetic",
]
