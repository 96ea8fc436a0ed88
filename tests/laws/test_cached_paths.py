"""Law: a cached result is that of this command. With a cold cache, a warm one, and after a client left, the same bytes.

Every path that stores a result of data is here: heads made of sums, masks chosen by the federation, decoded pixels and
features of the frozen part. `CACHING` lists every file of the package that writes into the cache, and what tests it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.support.tiny import CNN, Open, same_bits, tiny
from torch import Tensor

import fedgraft
from fedgraft.config.load import Config
from fedgraft.core.messages import Request
from fedgraft.data import feature_cache
from fedgraft.data.pixels import originals
from fedgraft.runs.engines import Engines
from fedgraft.runs.head_init import install_head
from fedgraft.runs.open_run import open_run
from fedgraft.runs.setup import RunSetup, setup_of

HEADS = ["ridge", "probe", "ncm", "cof", "lda"]
MASK = ["trainable.kind=sparse", "trainable.sparse.samples=12", "model.head=random"]
PATHS = {
    **{f"head {head}": [f"model.head={head}", "model.probe_steps=5"] for head in HEADS},
    "mask by Fisher scores": [*MASK, "trainable.sparse.strategy=most_sensitive"],
    "mask in one shot": [*MASK, "trainable.sparse.calibration=oneshot"],
}


class SomeNodes:
    """Nodes on other machines, of which only those of `present` are there; they compute in this process."""

    def __init__(self, setup: RunSetup, present: Sequence[int]) -> None:
        self.present = present
        self.memory: MutableMapping[int, Any] = {}
        self.sent = self.received = 0
        self.setup = setup
        self.engines = Engines(setup)

    def open(self, run: str, tensors: Any) -> None:
        """Nothing is sent here."""

    def present_clients(self) -> list[int]:
        return sorted(self.present)

    def exchange(self, requests: Sequence[Request]) -> Iterable[Any]:
        context = self.setup.backbone_context
        if requests[0].vector is not None:
            context = self.setup.scoring_context
        engine = self.engines.preparing(context)
        answers = list(engine.exchange([request for request in requests if request.client in self.present]))
        gone = [request.client for request in requests if request.client not in self.present]
        return [*answers, *[(client, "no node serves it at present") for client in gone]]


def start_of(config: Config, present: Sequence[int] | None) -> dict[str, Tensor]:
    """Return every tensor that a run begins with: network and coordinates. `present` None: all on this machine."""
    setup = setup_of(config)
    remote = None
    if present is not None:
        remote = SomeNodes(setup, present)
    engines = Engines(setup, remote)
    install_head(setup, engines)
    opened = open_run(setup, engines)
    tensors = {name: tensor.clone() for name, tensor in setup.task.network.state_dict().items()}
    for part in opened.space.parts:
        if part.index is not None:
            tensors[f"coordinates of {part.name}"] = part.index.clone()
    return tensors


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache that only this test uses."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("FEDGRAFT_CACHE", str(cache))
    yield cache


def cold(cache: Path, config: Config, present: Sequence[int] | None = None) -> dict[str, Tensor]:
    """Return what a run begins with where nothing is cached."""
    shutil.rmtree(cache, ignore_errors=True)
    return start_of(config, present)


def assert_by_cache(cache: Path, first: tuple[Config, Any], second: tuple[Config, Any]) -> None:
    """Two runs differ, and each is the same with an empty cache, with its own results in it, and with the other's."""
    wanted = [cold(cache, *first), cold(cache, *second)]
    assert not same_bits(*wanted), "what changed has no effect here, so this test would notice nothing"
    shutil.rmtree(cache)
    for _ in range(2):
        assert same_bits(start_of(*first), wanted[0])
        assert same_bits(start_of(*second), wanted[1])


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "change", ["partition.without=['0']", "partition.joins={'0'=2}", "partition.evaluate_only=['0']"]
)
def test_the_clients_of_the_config_are_part_of_a_cached_result(path: str, change: str, own_cache: Path) -> None:
    assert_by_cache(own_cache, (tiny(*PATHS[path]), None), (tiny(*PATHS[path], change), None))


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_the_nodes_that_are_there_are_part_of_a_cached_result(path: str, own_cache: Path) -> None:
    """Run with all nodes, then without one: its sums are not in the second run's head or mask, and the reverse."""
    config = tiny(*PATHS[path])
    assert_by_cache(own_cache, (config, [0, 1, 2]), (config, [0, 2]))


@pytest.mark.slow
def test_a_result_stored_without_who_was_there_is_noticed(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engines, "presence", lambda self: [])
    config = tiny(*PATHS["head ridge"])
    with pytest.raises(AssertionError):
        assert_by_cache(own_cache, (config, [0, 1, 2]), (config, [0, 2]))


# ---- pixels and features ---------------------------------------------------------------------------------------------

FROZEN = [CNN, "trainable.kind=head", "model.head=random", "rounds.total=1"]
"""A run whose clients train on stored features of stored pixels."""
CHANGES = {
    "another network": ["model.name=cnn:width=6,size=16"],
    "another size": ["data.image_size=24", "model.name=cnn:width=4,size=24"],
    "another normalisation": ["data.normalise=cifar100"],
    "other images": ["data.limit=48"],
    "other transforms": ["data.augment=['flip']"],
}


def trained(cache: Path, config: Config, empty: bool = False) -> dict[str, Tensor]:
    """Return the head after one round on stored features; with `empty` nothing is stored before."""
    if empty:
        shutil.rmtree(cache, ignore_errors=True)
    *_, last = Open(config).rounds(1)
    return {"vector": last.vector}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_stored_pixels_and_features_are_those_of_this_config(change: str, own_cache: Path) -> None:
    configs = [tiny(*FROZEN), tiny(*FROZEN, *CHANGES[change])]
    wanted = [trained(own_cache, config, empty=True) for config in configs]
    assert not same_bits(*wanted), "what changed has no effect here, so this test would notice nothing"
    shutil.rmtree(own_cache)
    for _ in range(2):
        for config, tensors in zip(configs, wanted, strict=True):
            assert same_bits(trained(own_cache, config), tensors)


@pytest.mark.slow
def test_features_stored_under_one_name_are_noticed(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_cache, "_hash", lambda data: "features")
    with pytest.raises(AssertionError):
        test_stored_pixels_and_features_are_those_of_this_config("another normalisation", own_cache)


def paint(folder: Path, seed: int) -> None:
    """Write one image of a folder anew, as large as before."""
    pixels = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "a" / "0.bmp")


def images(tmp_path: Path) -> Config:
    """A run on a folder of noise in two classes."""
    folder = tmp_path / "images"
    for number in range(40):
        place = folder / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.bmp")
    paint(folder, 100)
    return tiny(*FROZEN, "data.source=folder", f"data.path={folder}", "data.limit=none", "data.validation=0")


def exchange_image(own_cache: Path, tmp_path: Path) -> None:
    """An image that was exchanged for another of the same name and size gives what an empty cache gives."""
    config = images(tmp_path)
    before = trained(own_cache, config, empty=True)
    paint(tmp_path / "images", 101)
    warm = trained(own_cache, config)
    assert not same_bits(warm, before) and same_bits(warm, trained(own_cache, config, empty=True))


@pytest.mark.slow
def test_an_exchanged_image_is_decoded_again(own_cache: Path, tmp_path: Path) -> None:
    exchange_image(own_cache, tmp_path)


@pytest.mark.slow
def test_pixels_stored_without_the_state_of_their_files_are_noticed(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(originals, "file_identity", lambda files: str(len(files)))
    with pytest.raises(AssertionError):
        exchange_image(own_cache, tmp_path)


# ---- is anything missing here? ---------------------------------------------------------------------------------------

CACHING = {
    "runs/head_init.py": "PATHS above; tests/unit/runs/test_head_init.py",
    "runs/open_run.py": "PATHS above; sums of a stopped calibration: tests/unit/runs/test_tensor_cache.py",
    "runs/tensor_cache.py": "what the two above write with",
    "runs/task.py": "features: CHANGES above",
    "data/feature_cache.py": "features: CHANGES above; features/rows names network, versions and machine",
    "data/pixels/store.py": "pixels: CHANGES and the exchanged image above; tests/unit/data/test_pixel_store.py",
    "data/sources/scan_rows.py": "hashed tags: tests/unit/data/test_dicom.py (headers are read once)",
    "data/cache_limit.py": "the folder itself, and its bound: tests/unit/data/test_cache_limit.py",
    "report/run_index.py": "the studio's index: tests/studio/test_studio_views.py (the index is made anew)",
    "deploy/slots.py": "memories of a node's clients, by run: tests/unit/runs/test_memory_store.py",
}
READERS = {"deploy/clean.py", "consortium/preflight.py", "runs/estimate.py"}
"""They measure or remove the cache and put nothing into it."""


def test_every_file_that_caches_is_listed() -> None:
    root = Path(fedgraft.__file__).parent
    found = set()
    for file in root.rglob("*.py"):
        if re.search(r"\bcache_dir\(\)|\b(cached_tensors|PartialSum|FeatureTable)\(", file.read_text()):
            found.add(file.relative_to(root).as_posix())
    assert found == CACHING.keys() | READERS
