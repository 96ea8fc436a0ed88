"""The recipe that converts CIFAR as published: every form gives the same arrays, and a pickle gets no power."""

from __future__ import annotations

import builtins
import importlib
import io
import json
import pickle
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedgraft.data.pixels.rule import PixelRule
from fedgraft.data.pixels.store import ImageStore
from fedgraft.data.sources import load_dataset
from fedgraft.data.sources.cifar import CLASSES

RECIPES = Path(__file__).resolve().parents[3] / "recipes"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(RECIPES))
    return importlib.import_module("cifar_to_npz")


def toy(count: int, classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8), rng.integers(0, classes, count)


TRAIN = {"cifar10": toy(20, 10, 0), "cifar100": toy(20, 100, 1)}
TEST = {"cifar10": toy(8, 10, 2), "cifar100": toy(8, 100, 3)}


def png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def old_pickle(images: np.ndarray, labels: np.ndarray, label_key: bytes) -> bytes:
    """A pickle as Python 2 and an old NumPy write it: byte strings, an array rebuilt through numpy.core.multiarray."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    def number(value: int) -> bytes:
        return b"J" + value.to_bytes(4, "little", signed=True)

    data = images.transpose(0, 3, 1, 2).reshape(len(images), 3072).tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\n" + b"cnumpy\nndarray\n" + b"K\x00\x85" + text(b"b") + b"\x87R("
    array += (
        b"K\x01" + number(len(images)) + number(3072) + b"\x86" + b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R"
    )
    array += b"(K\x03" + text(b"|") + b"NNN" + number(-1) * 2 + b"K\x00tb"
    array += b"\x89T" + len(data).to_bytes(4, "little") + data + b"tb"
    listed = b"](" + b"".join(number(int(label)) for label in labels) + b"e"
    body = text(b"batch_label") + text(b"one of one") + text(label_key) + listed + text(b"data") + array
    return b"\x80\x02}(" + body + b"u."


def python_files(name: str) -> dict[str, bytes]:
    if name == "cifar100":
        return {"train": old_pickle(*TRAIN[name], b"fine_labels"), "test": old_pickle(*TEST[name], b"fine_labels")}
    images, labels = TRAIN[name]
    parts = {
        f"data_batch_{n + 1}": old_pickle(images[4 * n : 4 * n + 4], labels[4 * n : 4 * n + 4], b"labels")
        for n in range(5)
    }
    return parts | {"test_batch": old_pickle(*TEST[name], b"labels")}


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def write_tar(path: Path, prefix: str, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"{prefix}/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def package_files() -> dict[str, bytes]:
    images, labels = TRAIN["cifar10"]
    files = {f"data_batch_{n + 1}.png": png(images[4 * n : 4 * n + 4].reshape(4, 1024, 3)) for n in range(5)}
    files["test_batch.png"] = png(TEST["cifar10"][0].reshape(8, 1024, 3))
    files["train_lables.json"] = json.dumps(labels.tolist()).encode()
    return files | {"test_lables.json": json.dumps(TEST["cifar10"][1].tolist()).encode()}


def check(recipe: ModuleType, source: Path, name: str) -> None:
    """Convert the source, read it as the package does and compare with what was drawn."""
    target = Path(f"{name}.npz")
    recipe.main([str(source), str(target)])
    dataset = load_dataset(name, str(target))
    for store, (images, labels) in ((dataset.train, TRAIN[name]), (dataset.test, TEST[name])):
        assert isinstance(store, ImageStore)
        np.testing.assert_array_equal(store.open(PixelRule(32))[np.arange(len(store))], images)
        assert store.labels.tolist() == labels.tolist() and store.classes == CLASSES[name]


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_pickles_packed_and_unpacked(name: str, recipe: ModuleType) -> None:
    write_files(Path("folder"), python_files(name))
    write_tar(Path("packed.tar.gz"), "inside", python_files(name))
    check(recipe, Path("folder"), name)
    check(recipe, Path("packed.tar.gz"), name)


def test_the_npm_package(recipe: ModuleType) -> None:
    write_files(Path("package"), package_files())
    write_tar(Path("package.tgz"), "package", package_files())
    check(recipe, Path("package"), "cifar10")
    check(recipe, Path("package.tgz"), "cifar10")


class Attacked:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


ATTACKS = {
    "exec": Attacked(builtins.exec, "open('pwned', 'w')"),
    "open": Attacked(open, "pwned", "w"),
    "getattr": Attacked(getattr, "text", "upper"),
    "touch": Attacked(Path.touch, Path("pwned")),
    "numpy": Attacked(np.save, "pwned", [1]),
    "bytearray": Attacked(bytearray, 10),
    "wrong dtype": np.zeros(3, dtype=np.float64),
}


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("attack", list(ATTACKS))
def test_a_hostile_pickle_is_refused_and_runs_nothing(attack: str, protocol: int, recipe: ModuleType) -> None:
    data = pickle.dumps({b"data": ATTACKS[attack], b"fine_labels": [1]}, protocol=protocol)
    write_files(Path("c"), {"train": data, "test": data})
    with pytest.raises(SystemExit, match="c cannot be converted"):
        recipe.main(["c", "cifar100.npz"])
    assert not list(Path().glob("pwned*")) and not Path("cifar100.npz").exists()


def test_the_attacks_would_work_on_a_plain_unpickler(recipe: ModuleType) -> None:
    pickle.loads(pickle.dumps(ATTACKS["touch"]))
    assert Path("pwned").exists()


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_pickles_of_today_are_read_too(protocol: int, recipe: ModuleType) -> None:
    images, labels = TRAIN["cifar100"]
    rows = images.transpose(0, 3, 1, 2).reshape(len(images), -1).copy()
    data = pickle.dumps({"data": rows, "fine_labels": labels.tolist()}, protocol)
    read_images, read_labels = recipe.read_batch(data, b"fine_labels")
    np.testing.assert_array_equal(read_images, images)
    assert read_labels.tolist() == labels.tolist()


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"train": python_files("cifar100")["train"][:1000], "test": b""}, "cannot be converted"),
        ({"train": python_files("cifar100")["train"]}, "holds neither"),
        ({"train": old_pickle(*TRAIN["cifar100"], b"labels"), "test": b""}, "holds no fine_labels"),
        (package_files() | {"test_batch.png": b"junk"}, "cannot be converted"),
    ],
)
def test_a_damaged_source_says_so(files: dict[str, bytes], reason: str, recipe: ModuleType) -> None:
    write_files(Path("c"), files)
    with pytest.raises(SystemExit, match=reason):
        recipe.main(["c", "c.npz"])
