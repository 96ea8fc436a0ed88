"""Features somebody else computed: reading them, refusing what does not fit, and a whole run on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from tests.support.errors import raises

from fedgraft.config.load import load
from fedgraft.core.errors import FedgraftError
from fedgraft.data.examples import FeatureExamples, ImageExamples, PrecomputedExamples, examples_of
from fedgraft.data.pixels.store import make_store
from fedgraft.data.pixels.transforms import Transform
from fedgraft.data.sources import load_dataset
from fedgraft.data.sources.features import load_features, make_feature_store
from fedgraft.models.backbones import load_network
from fedgraft.models.export import export_model
from fedgraft.runs.loop import run
from fedgraft.runs.predict import evaluate_run


def tables(**updates: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    centres = 3 * rng.normal(size=(4, 8))
    found = {}
    for part, count in (("train", 200), ("test", 40)):
        labels = np.arange(count) % 4
        found[f"{part}_y"] = labels
        found[f"{part}_x"] = (centres[labels] + rng.normal(size=(count, 8))).astype(np.float32)
    return {name: value for name, value in {**found, **updates}.items() if value is not None}


def write(folder: Path, suffix: str = ".npz", **updates: Any) -> Path:
    path = folder / f"given{suffix}"
    if suffix == ".npz":
        np.savez(path, **tables(**updates))
    else:
        save_file(tables(**updates), path)
    return path


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_both_formats_give_the_same_store(tmp_path: Path, suffix: str) -> None:
    train, test = load_features(write(tmp_path, suffix))
    assert (len(train), len(test), train.width) == (200, 40, 8) and train.classes == ("0", "1", "2", "3")
    np.testing.assert_array_equal(train.features, tables()["train_x"])
    assert train.digest == load_features(write(tmp_path))[0].digest != test.digest


def test_names_of_classes_and_other_number_types(tmp_path: Path) -> None:
    given = {"classes": np.array(["a", "b", "c", "d"]), "train_x": tables()["train_x"].astype(np.float64)}
    train, _ = load_features(write(tmp_path, **given))
    assert train.classes == ("a", "b", "c", "d") and train.features.dtype == np.float32


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a field is missing": ({"test_y": None}, "E-DATA-FEATURE-ARRAY"),
    "other widths": ({"test_x": np.zeros((40, 7), np.float32)}, "E-DATA-FEATURE-WIDTHS"),
    "too few labels": ({"train_y": np.zeros(199, np.int64)}, "E-DATA-FEATURE-LABELS"),
    "labels that are no whole numbers": ({"train_y": np.zeros(200)}, "E-DATA-FEATURE-LABELS"),
    "a negative label": ({"train_y": np.full(200, -1)}, "E-DATA-LABEL-RANGE"),
    "not a number": ({"train_x": np.full((200, 8), np.nan, np.float32)}, "E-DATA-FEATURES-NONFINITE"),
    "images": ({"train_x": np.zeros((200, 8, 8, 3), np.uint8)}, "E-DATA-FEATURES-SHAPE"),
    "nothing to test on": (
        {"test_x": np.zeros((0, 8), np.float32), "test_y": np.zeros(0, np.int64)},
        "E-DATA-FEATURES-EMPTY",
    ),
    "words": ({"train_x": np.full((200, 8), "x")}, "E-DATA-FEATURES-SHAPE"),
    "more labels than names": ({"classes": np.array(["a"])}, "E-DATA-LABEL-RANGE"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(tmp_path: Path, name: str) -> None:
    updates, code = BAD[name]
    with raises(code):
        load_features(write(tmp_path, **updates))


def test_nothing_in_a_file_is_executed_and_no_file_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "bad.npz"
    np.savez(path, **{**tables(), "train_x": np.array([object()], dtype=object)})  # needs pickle
    with raises("E-DATA-NPZ-UNREADABLE"):
        load_features(path)
    for name, code in (("none.npz", "E-DATA-NO-FILE"), ("given.txt", "E-DATA-FEATURE-FORMAT")):
        (tmp_path / "given.txt").write_text("x")
        with raises(code):
            load_features(tmp_path / name)
    with raises("E-DATA-SOURCE-NO-PATH", source="features"):
        load_dataset("features")


def test_taking_rows_and_limits(tmp_path: Path) -> None:
    dataset = load_dataset("features", str(write(tmp_path)), limit=20)
    assert len(dataset.train) == 20
    store = make_feature_store(tables()["train_x"], tables()["train_y"], "abcd")
    np.testing.assert_array_equal(store.take(np.array([3, 1])).features, store.features[[3, 1]])


def test_examples_of_each_kind_of_store() -> None:
    given = examples_of(make_feature_store(tables()["train_x"], tables()["train_y"], "abcd"), Transform(8))
    assert isinstance(given, PrecomputedExamples) and given.entry == 0
    rows, out = torch.tensor([5, 0, 5]), torch.empty(3, 8)
    given.batch_into(rows, None, out)
    assert torch.equal(out, given.batch(rows)) and torch.equal(out[0], torch.from_numpy(tables()["train_x"][5]))
    images = make_store(np.zeros((2, 8, 8, 3), np.uint8), np.array([0, 1]), "ab")
    assert isinstance(examples_of(images, Transform(8)), ImageExamples)
    # Where a subclass shows other views, there is no way around its `batch`.
    assert not hasattr(FeatureExamples, "batch_into")


def test_the_network_is_its_head() -> None:
    network = load_network("features:width=8", 4)
    assert network.depth == 0 and {n for n, _ in network.named_parameters()} == {"head.weight", "head.bias"}
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(network(x), network.head(x)) and torch.equal(network.features(x), x)
    assert network.default_probe_layers() == () and network.entry_for(1) == 0
    with raises("E-MODELS-FEATURES-SIZE"):
        load_network("features:width=8", 4, image_size=16)


def overrides(path: Path, *more: str) -> list[str]:
    start = ["data.source=features", f"data.path={path}", "model.name=features", "partition.clients=4"]
    return [*start, "rounds.total=4", "local.lr=0.1", *more]


@pytest.mark.slow
@pytest.mark.parametrize("head", ["random", "ridge"])
def test_a_whole_run_learns_and_agrees_with_the_reference(tmp_path: Path, head: str) -> None:
    path = write(tmp_path)
    config = load(None, overrides(path, f"model.head={head}"))
    summary = run(config, tmp_path / "run", console=False)
    assert summary["test"]["accuracy"] > 0.9
    assert "batched" in (tmp_path / "run" / "log.txt").read_text()
    assert evaluate_run(tmp_path / "run").accuracy == summary["test"]["accuracy"]
    plain = run(
        load(None, overrides(path, f"model.head={head}", "engine=reference")), tmp_path / "plain", console=False
    )
    assert plain["test"]["loss"] == pytest.approx(summary["test"]["loss"], rel=1e-4)


@pytest.mark.parametrize(
    "more", [["model.name=nano"], ["data.augment=['flip']"], ["data.image_size=32"], ["data.source=digits"]]
)
def test_a_config_that_mixes_images_and_features_is_refused(tmp_path: Path, more: list[str]) -> None:
    with pytest.raises(FedgraftError, match="given features"):
        load(None, [*overrides(tmp_path / "x.npz"), *more])


def test_export_says_what_to_do_instead(tmp_path: Path) -> None:
    for name in ("features:width=8", "cnn:width=2,size=8"):
        with raises("E-MODELS-NO-EXPORT"):
            export_model(load_network(name, 4), tmp_path / "out", None, {}, "")
