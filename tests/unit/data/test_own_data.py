"""Data from where users have it: arrays, torch and Hugging Face datasets, parquet and npz under any names."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.errors import raises

from fedgraft.config import load as configs
from fedgraft.data import Dataset, arrays, dataset, features, npz, parquet
from fedgraft.data.labelled import numbered
from fedgraft.data.pixels.rule import PixelRule
from fedgraft.data.pixels.store import ImageStore
from fedgraft.deploy.deployed import load_own

IMAGES = np.random.default_rng(0).integers(0, 255, (20, 32, 32, 3)).astype(np.uint8)
LABELS = np.arange(20) % 2
NAMES = [("cat", "dog")[label] for label in LABELS]
SITES = [f"s{row % 3}" for row in range(20)]
GROUPS = [f"g{row // 4}" for row in range(20)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / "cache"))


def png(image: np.ndarray) -> bytes:
    target = io.BytesIO()
    Image.fromarray(image).save(target, "png")
    return target.getvalue()


def write_parquet(path: Path, label: list[Any] | None = None, **columns: Any) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    labels = NAMES if label is None else label
    table = {"image": [png(one) for one in IMAGES[: len(labels)]], "label": labels, **columns}
    pq.write_table(pa.table(table), path, row_group_size=7)
    return path


def check(found: Dataset, names: tuple[str, ...] = ("cat", "dog"), sites: bool = False) -> None:
    """Every image once, to the bit, under its own label, site and group; no group on both sides."""
    seen: list[int] = []
    assert found.classes == names
    for store in (found.train, found.test):
        assert isinstance(store, ImageStore)
        for row, image in enumerate(store.open(PixelRule(32))[np.arange(len(store))]):
            (place,) = [i for i in range(20) if np.array_equal(IMAGES[i], image)]
            assert store.labels[row] == LABELS[place]
            if sites:
                assert store.sites is not None and store.groups is not None
                assert store.sites[row] == SITES[place] and store.groups[row] == GROUPS[place]
            seen.append(place)
    assert sorted(seen) == list(range(20)) and len(found.test)
    if sites:
        assert not set(found.train.columns["group"]) & set(found.test.columns["group"])


class Items(torch.utils.data.Dataset):
    """A torch dataset as people write them; `show` is its transform."""

    classes = ("cat", "dog")

    def __init__(self, show: Any, rows: range = range(20)) -> None:
        self.show, self.rows = show, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        return self.show(IMAGES[self.rows[row]]), int(LABELS[self.rows[row]])


def channels_first(image: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(image.copy()).permute(2, 0, 1)


SHOWN = {
    "pil": Image.fromarray,
    "array": lambda image: image,
    "bytes, channels first": channels_first,
    "ToTensor": lambda image: channels_first(image).float().div(255),
}


@pytest.mark.parametrize("kind", SHOWN)
def test_a_torch_dataset(kind: str) -> None:
    check(dataset(Items(SHOWN[kind])))
    parts = dataset(Items(SHOWN[kind], range(12)), test=Items(SHOWN[kind], range(12, 20)))
    assert (len(parts.train), len(parts.test)) == (12, 8)
    check(parts)


def test_torch_datasets_that_do_not_fit() -> None:
    normalised = Items(lambda image: (channels_first(image).float() / 255 - 0.5) / 0.5)
    with raises("E-DATA-IMAGE-VALUES"):
        dataset(normalised)
    with raises("E-DATA-ITEM", row=0):
        dataset(torch.utils.data.TensorDataset(torch.zeros(3, 8, 8)))
    with raises("E-DATA-DATASET-TYPE"):
        dataset(iter([]))


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("parts", [False, True])
def test_hugging_face_datasets(saved: bool, parts: bool, tmp_path: Path) -> None:
    hf = pytest.importorskip("datasets")
    table = {"scan": [{"bytes": png(image), "path": None} for image in IMAGES], "kind": LABELS.tolist()}
    whole = hf.Dataset.from_dict({**table, "hospital": SITES, "patient": GROUPS})
    whole = whole.cast_column("scan", hf.Image()).cast_column("kind", hf.ClassLabel(names=["cat", "dog"]))
    if parts:
        whole = hf.DatasetDict(train=whole.select(range(12)), validation=whole.select(range(12, 20)))
    if saved:
        whole.save_to_disk(str(tmp_path / "saved"))
    found = dataset(
        tmp_path / "saved" if saved else whole, image="scan", label="kind", site="hospital", group="patient"
    )
    check(found, sites=True)
    assert len(found.test) == 8 if parts else len(found.test) == 4
    with raises("E-DATA-COLUMN", candidates=("image", "img"), columns=("scan", "kind", "hospital", "patient")):
        dataset(whole["train"] if parts else whole)
    with raises("E-DATA-NOT-SAVED"):
        dataset(tmp_path)


@pytest.mark.parametrize("form", ["array", "list", "channels first", "fractions"])
def test_arrays(form: str) -> None:
    x: Any = {
        "array": IMAGES,
        "list": list(IMAGES),
        "channels first": torch.from_numpy(IMAGES).permute(0, 3, 1, 2),
        "fractions": IMAGES.astype(np.float32) / 255,
    }[form]
    check(arrays(x, NAMES, sites=SITES, groups=GROUPS), sites=True)
    check(arrays(x, LABELS, classes=["cat", "dog"], test=None))
    check(arrays(x[:15], NAMES[:15], test=(x[15:], NAMES[15:])))


def test_grey_and_ragged_arrays() -> None:
    grey = arrays(IMAGES[..., 0], LABELS)
    assert isinstance(grey.train, ImageStore) and np.ptp(grey.train.images, axis=3).max() == 0
    ragged = arrays([image[: 8 + row] for row, image in enumerate(IMAGES)], LABELS)
    assert isinstance(ragged.train, ImageStore)
    assert ragged.train.open(PixelRule(16))[np.arange(3)].shape == (3, 16, 16, 3)
    with raises("E-DATA-COLUMN-LENGTH", column="site"):
        arrays(IMAGES, LABELS, sites=["a"] * 3)
    with raises("E-DATA-UNKNOWN-LABEL", label="fox"):
        arrays(IMAGES, ["fox"] * 20, classes=["cat", "dog"])
    with raises("E-DATA-LABELS-MIXED"):
        arrays(IMAGES, LABELS, test=(IMAGES, NAMES))


@pytest.mark.parametrize("names", [("cat", "dog"), (3, 7)])
def test_parquet_with_names_or_numbers(names: tuple[Any, Any], tmp_path: Path) -> None:
    check(parquet(write_parquet(tmp_path / "d.parquet", [names[y] for y in LABELS])), tuple(map(str, names)))


def test_parquet_with_any_column_names_sites_and_groups(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    cells = [{"bytes": png(image), "path": f"{row}.png"} for row, image in enumerate(IMAGES)]
    whole = pa.table({"scan": cells, "diagnosis": LABELS, "hospital": SITES, "patient": GROUPS})
    (tmp_path / "d").mkdir()
    pq.write_table(whole.slice(0, 12), tmp_path / "d" / "train.parquet")
    pq.write_table(whole.slice(12), tmp_path / "d" / "test.parquet")
    (tmp_path / "d" / "labels.json").write_text(json.dumps({"classes": ["cat", "dog"]}))
    told = {"image": "scan", "label": "diagnosis"}
    check(parquet(tmp_path / "d", **told, site="hospital", group="patient"), sites=True)
    plain = parquet(tmp_path / "d", **told)
    assert set(plain.train.columns) == {"hospital", "patient"} and plain.train.sites is None
    with raises("E-DATA-COLUMN", candidates=("clinic",), columns=("hospital", "patient")):
        parquet(tmp_path / "d", **told, site="clinic")
    with raises("E-DATA-COLUMN", columns=("scan", "diagnosis", "hospital", "patient")):
        parquet(tmp_path / "d")
    named = write_parquet(tmp_path / "named.parquet", site=SITES, group=GROUPS)  # found without being told
    check(parquet(named), sites=True)
    with raises("E-DATA-COLUMN-GAPS", column="site"):
        parquet(write_parquet(tmp_path / "gaps.parquet", site=[None, *SITES[1:]]))
    with raises("E-DATA-LABEL-MISSING", rows=1):
        parquet(write_parquet(tmp_path / "gaps.parquet", [None, *NAMES[1:]]))


def test_a_folder_of_parquet_files_is_one_table(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for part in ("a", "b"):
        write_parquet(tmp_path / "d" / f"{part}.parquet", ["x", "y"] * 5)
    found = parquet(tmp_path / "d")
    assert len(found.train) + len(found.test) == 20


@pytest.mark.parametrize("spelling", ["x_train", "train_x", "train_images", "images"])
def test_npz_under_any_names(spelling: str, tmp_path: Path) -> None:
    image, label = ("images", "labels") if "images" in spelling else ("x", "y")
    if spelling == "images":
        made = {"images": IMAGES, "labels": LABELS, "hospital": SITES, "patient": GROUPS}
    else:
        made = {}
        for part, rows in (("train", slice(0, 12)), ("test", slice(12, 20))):
            for name, values in ((image, IMAGES), (label, LABELS), ("hospital", SITES), ("patient", GROUPS)):
                key = f"{part}_{name}" if spelling.startswith("train") else f"{name}_{part}"
                made[key] = values[rows][:, None] if name == label else values[rows]  # labels as MedMNIST has them
    np.savez_compressed(tmp_path / "d.npz", classes=["cat", "dog"], **made)  # type: ignore[arg-type]
    found = npz(tmp_path / "d.npz", image=image, label=label, site="hospital", group="patient")
    check(found, sites=True)


@pytest.mark.parametrize(
    ("made", "code"),
    [
        ({"x_train": IMAGES}, "E-DATA-NPZ-ARRAY"),
        ({"x_train": IMAGES, "y_train": LABELS, "x_test": IMAGES}, "E-DATA-NPZ-ARRAY"),
        ({"x_train": IMAGES.astype(np.float32), "y_train": LABELS}, "E-DATA-IMAGES-SHAPE"),
        ({"x_train": IMAGES, "y_train": LABELS[:5]}, "E-DATA-LABEL-COUNT"),
        ({"x_train": IMAGES, "y_train": LABELS / 2}, "E-DATA-LABEL-TYPE"),
        ({"x_train": IMAGES, "y_train": LABELS + 5, "classes": np.array(["a", "b"])}, "E-DATA-LABEL-RANGE"),
    ],
)
def test_what_is_no_table_of_images_is_one_sentence(made: dict[str, np.ndarray], code: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", **made)  # type: ignore[arg-type]
    with raises(code):
        npz(tmp_path / "d.npz")


def test_damaged_and_missing_files_are_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    for kind, load, code in (
        ("npz", npz, "E-DATA-NPZ-UNREADABLE"),
        ("parquet", parquet, "E-DATA-PARQUET-UNREADABLE"),
    ):
        (tmp_path / f"d.{kind}").write_bytes(b"nonsense")
        with raises(code):
            load(tmp_path / f"d.{kind}")
        with raises("E-DATA-NO-FILE"):
            load(tmp_path / "nothing")
    with raises("E-DATA-TOO-FEW"):
        parquet(write_parquet(tmp_path / "c.parquet", ["a", "b"]))


def test_the_ending_tells_what_a_path_is(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x_train=IMAGES, y_train=LABELS)
    assert load_own("", str(tmp_path / "d.npz"), configs.load(None, [])).name == "npz"
    with raises("E-DATA-NO-FOLDER"):
        load_own("", str(tmp_path / "nothing"), configs.load(None, []))


def test_given_features() -> None:
    x = np.arange(80, dtype=np.float64).reshape(20, 4)
    found = features(x, NAMES, sites=SITES, groups=GROUPS)
    assert found.classes == ("cat", "dog") and not set(found.train.columns["group"]) & set(found.test.columns["group"])
    parts = features(x[:15], NAMES[:15], test=(x[15:], NAMES[15:]))
    assert (len(parts.train), len(parts.test)) == (15, 5)


def test_numbers_and_names() -> None:
    places, names = numbered(np.array([7, 3, 7]))
    assert places.tolist() == [1, 0, 1] and names == ("3", "7")
    places, names = numbered(np.array(["b", "a"], dtype=object))
    assert places.tolist() == [1, 0] and names == ("a", "b")
    assert numbered(np.array([1, 0]), ["x", "y"]) == (pytest.approx([1, 0]), ("x", "y"))
