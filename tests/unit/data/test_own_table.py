"""An owner's own table of images: parquet and npz, names and numbers as labels, and what is refused."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from fedgraft.data.sources.own_table import load_table, numbered
from PIL import Image

from fedgraft.deploy.deployed import load_own
from fedgraft.errors import FedgraftError

IMAGES = np.random.default_rng(0).integers(0, 255, (20, 32, 32, 3)).astype(np.uint8)
LABELS = np.arange(20) % 2


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / "cache"))


def png(image: np.ndarray) -> bytes:
    target = io.BytesIO()
    Image.fromarray(image).save(target, "png")
    return target.getvalue()


def write_parquet(path: Path, labels: list[object], **columns: object) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"image": [png(one) for one in IMAGES[: len(labels)]], "label": labels, **columns}), path)
    return path


def rows(images: np.ndarray) -> list[bytes]:
    return sorted(image.tobytes() for image in images)


@pytest.mark.parametrize("names", [("cat", "dog"), (3, 7)])
def test_parquet_keeps_every_image_once_under_its_label(names: tuple[object, object], tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "d.parquet", [names[label] for label in LABELS])
    train, test = load_table("parquet", path)
    assert train.classes == test.classes == tuple(map(str, names)) and len(test) == 4
    assert rows(np.concatenate([train.images, test.images])) == rows(IMAGES)
    for store in (train, test):
        for image, label in zip(store.images, store.labels, strict=True):
            (context,) = [i for i in range(20) if np.array_equal(IMAGES[i], image)]
            assert LABELS[context] == label


def test_a_folder_of_parquet_files_is_one_table(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    whole = write_parquet(tmp_path / "whole.parquet", LABELS.tolist() * 1)
    for part in ("a", "b"):
        write_parquet(tmp_path / "d" / f"{part}.parquet", ["x", "y"] * 5)
    assert sum(map(len, load_table("parquet", tmp_path / "d"))) == 20 == sum(map(len, load_table("parquet", whole)))


def test_npz_with_and_without_a_test_part_and_with_names(tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    np.savez(path, x_train=IMAGES, y_train=LABELS)
    train, test = load_table("npz", path)
    assert (len(train), len(test), train.classes) == (16, 4, ("0", "1"))
    named = tmp_path / "n.npz"
    np.savez(
        named, x_train=IMAGES[:12], y_train=LABELS[:12], x_test=IMAGES[12:], y_test=LABELS[12:], classes=["a", "b", "c"]
    )
    train, test = load_table("npz", named)
    assert train.classes == ("a", "b", "c") and np.array_equal(test.images, IMAGES[12:])
    assert np.array_equal(test.labels, LABELS[12:])


def test_images_of_another_size_are_fitted(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x_train=np.zeros((10, 20, 24, 3), np.uint8), y_train=LABELS[:10])
    assert load_table("npz", tmp_path / "d.npz")[0].images.shape[1:] == (32, 32, 3)


def test_the_ending_tells_what_a_path_is(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x_train=IMAGES, y_train=LABELS)
    assert load_own("", str(tmp_path / "d.npz")).name == "npz"
    with pytest.raises(FedgraftError, match="does not exist"):
        load_own("", str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"x_train": IMAGES}, "must hold x_train and y_train"),
        ({"x_train": IMAGES, "y_train": LABELS, "x_test": IMAGES}, "or neither"),
        ({"x_train": IMAGES.astype(np.float32), "y_train": LABELS}, "uint8 images"),
        ({"x_train": IMAGES, "y_train": LABELS[:5]}, "as many labels"),
        ({"x_train": IMAGES, "y_train": LABELS / 2}, "names or whole numbers"),
        ({"x_train": IMAGES, "y_train": LABELS + 5, "classes": np.array(["a", "b"])}, "labels must lie in"),
    ],
)
def test_what_is_no_table_of_images_is_one_sentence(
    arrays: dict[str, np.ndarray], sentence: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "d.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(FedgraftError, match=sentence):
        load_table("npz", tmp_path / "d.npz")


def test_damaged_files_are_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    for kind in ("npz", "parquet"):
        (tmp_path / f"d.{kind}").write_bytes(b"nonsense")
        with pytest.raises(FedgraftError, match="not a readable"):
            load_table(kind, tmp_path / f"d.{kind}")
        with pytest.raises(FedgraftError, match=f"no {kind} file"):
            load_table(kind, tmp_path / "nothing")
    with pytest.raises(FedgraftError, match="too few"):
        load_table("parquet", write_parquet(tmp_path / "c.parquet", ["a", "b"]))
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"image": [b"no image"], "label": ["a"]}), tmp_path / "bad.parquet")
    with pytest.raises(FedgraftError, match="cannot be decoded"):
        load_table("parquet", tmp_path / "bad.parquet")


def test_numbers_and_names() -> None:
    places, names = numbered(np.array([7, 3, 7]))
    assert places.tolist() == [1, 0, 1] and names == ("3", "7")
    places, names = numbered(np.array(["b", "a"], dtype=object))
    assert places.tolist() == [1, 0] and names == ("a", "b")
    assert numbered(np.array([1, 0]), ["x", "y"]) == (pytest.approx([1, 0]), ("x", "y"))
