"""Where images come from and how they are dealt to clients."""

from fedgraft.data.examples import FeatureExamples, ImageExamples
from fedgraft.data.feature_cache import CachedExamples, FeatureCache
from fedgraft.data.images.store import ImageStore, cache_dir, make_store
from fedgraft.data.images.transforms import Transform, make_transform
from fedgraft.data.partition import KINDS, Partition, make_partition
from fedgraft.data.partition.split import stratified_split
from fedgraft.data.sources import SOURCES, Dataset, load_dataset

__all__ = [
    "KINDS",
    "SOURCES",
    "CachedExamples",
    "Dataset",
    "FeatureCache",
    "FeatureExamples",
    "ImageExamples",
    "ImageStore",
    "Partition",
    "Transform",
    "cache_dir",
    "load_dataset",
    "make_partition",
    "make_store",
    "make_transform",
    "stratified_split",
]
