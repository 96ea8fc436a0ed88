"""Preflight: faults that are planted one by one, each of which must be found by its name, and clean data has none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.support.errors import raises
from typer.testing import CliRunner

from fedgraft.cli.main import app
from fedgraft.config.load import Config, load
from fedgraft.consortium import preflight as module
from fedgraft.consortium.preflight import run_preflight
from fedgraft.consortium.site_faults import findings
from fedgraft.core.errors import FedgraftError
from fedgraft.data.sources.class_map import similar_names
from fedgraft.deploy import preflight as preflight_of_nodes

STREAM = np.random.default_rng(5)


def picture(level: int = 128, size: int = 32, mode: str = "RGB") -> Image.Image:
    shape = (size, size) if mode in ("L", "I;16") else (size, size, len(mode))
    if mode == "I;16":
        return Image.fromarray(STREAM.integers(0, 60000, shape).astype(np.uint16))
    return Image.fromarray(np.clip(STREAM.normal(level, 30, shape), 0, 255).astype(np.uint8), mode)


def sites(root: Path) -> Path:
    """Three clean sites of two classes, eight images of each for training and five for testing."""
    for site in ("east", "north", "south"):
        for part, count in (("train", 8), ("test", 5)):
            for name in ("benign", "melanoma"):
                place = root / site / part / name
                place.mkdir(parents=True)
                for i in range(count):
                    picture().save(place / f"{i}.png")
    return root


def config(root: Path, *more: str) -> Config:
    return load(
        None,
        [
            "data.source=owners",
            f"data.path={root}",
            "partition.kind=by_site",
            "partition.clients=3",
            "data.image_size=32",
            *more,
        ],
    )


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sites(tmp_path_factory.mktemp("clean"))


@pytest.fixture
def data(clean: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(clean, tmp_path / "data"))


def rename(root: Path, name: str, site: str = "south", old: str = "melanoma") -> None:
    for part in ("train", "test"):
        (root / site / part / old).rename(root / site / part / name)


def remake(root: Path, make: Callable[[], Image.Image], site: str = "south") -> None:
    for path in sorted((root / site).rglob("*.png")):
        make().save(path)


def warm() -> Image.Image:
    """Reddish where the other sites are grey, as bright as they are."""
    grey = np.asarray(picture()).astype(int)
    return Image.fromarray(np.clip(grey + np.array([50, 0, -50]), 0, 255).astype(np.uint8))


def keep(place: Path, count: int) -> None:
    for path in sorted(place.iterdir())[count:]:
        path.unlink()


def remove_class(root: Path) -> None:
    for part in ("train", "test"):
        shutil.rmtree(root / "south" / part / "melanoma")


TRAIN = Path("south/train/melanoma")
FAULTS: dict[str, Callable[[Path], object]] = {
    "class_case": lambda r: rename(r, "Melanoma"),
    "class_space": lambda r: rename(r, "melanoma "),
    "class_punctuation": lambda r: rename(r, "mela-noma"),
    "class_similar": lambda r: rename(r, "melanona"),
    "unreadable": lambda r: (r / TRAIN / "0.png").write_bytes((r / TRAIN / "0.png").read_bytes()[:60]),
    "unreadable ": lambda r: (r / TRAIN / "0.png").write_bytes(b""),
    "duplicates": lambda r: shutil.copy(r / TRAIN / "0.png", r / TRAIN / "copy.png"),
    "duplicates_across": lambda r: shutil.copy(r / "north/train/melanoma/0.png", r / TRAIN / "copy.png"),
    "contradictory_labels": lambda r: shutil.copy(r / TRAIN / "0.png", r / "south/train/benign/copy.png"),
    "train_and_test": lambda r: shutil.copy(r / TRAIN / "0.png", r / "south/test/melanoma/copy.png"),
    "deep": lambda r: picture(mode="I;16").save(r / TRAIN / "0.png"),
    "depth": lambda r: remake(r, lambda: picture(mode="I;16")),
    "channels": lambda r: remake(r, lambda: picture(mode="L")),
    "transparency": lambda r: picture(mode="RGBA").save(r / TRAIN / "0.png"),
    "one_class": remove_class,
    "missing_class": remove_class,
    "rare_class": lambda r: (keep(r / TRAIN, 2), keep(r / "south/test/melanoma", 1)),
    "small_images": lambda r: picture(size=8).save(r / TRAIN / "0.png"),
    "size_differs": lambda r: remake(r, lambda: picture(size=96)),
    "intensity_differs": lambda r: remake(r, lambda: picture(level=30)),
    "site_names": lambda r: (r / "south").rename(r / "North"),
    "cmyk": lambda r: picture().convert("CMYK").save(r / TRAIN / "0.jpg"),
    "several_pictures": lambda r: picture().save(r / TRAIN / "0.tif", save_all=True, append_images=[picture()]),
    "not_images": lambda r: (r / TRAIN / "scan.xray").write_bytes(bytes(128) + b"DICM"),
    "shape_differs": lambda r: remake(r, lambda: picture().resize((20, 60))),
    "colour_differs": lambda r: remake(r, warm),
    "dominates": lambda r: [picture().save(r / TRAIN / f"more{i}.png") for i in range(250)],
    "transparency ": lambda r: picture().convert("P").save(r / TRAIN / "0.png", transparency=3),
    "blank": lambda r: Image.new("RGB", (32, 32), (9, 9, 9)).save(r / TRAIN / "0.png"),
}


def test_clean_data_has_nothing_to_find(clean: Path) -> None:
    assert run_preflight(config(clean))[1] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_a_planted_fault_is_found_by_its_name(kind: str, data: Path) -> None:
    FAULTS[kind](data)
    kinds = {finding.kind for finding in run_preflight(config(data))[1]}
    assert kind.strip() in kinds


@pytest.mark.parametrize(
    "field, value, kind",
    [
        ("disk_gb", 0.5, "disk"),
        ("policy", False, "no_policy"),
        ("test_images", 0, "no_test_images"),
        ("images", 0, "no_images"),
        ("versions", {"fedgraft": "0.0.1"}, "versions"),
    ],
)
def test_what_only_a_node_can_lack_is_found_too(field: str, value: object, kind: str, clean: Path) -> None:
    facts = run_preflight(config(clean))[0]
    reported = findings([{**facts[0], field: value}, *facts[1:]])
    assert kind in {finding.kind for finding in reported}


def test_small_counts_and_single_images_stay_hidden(data: Path, tmp_path: Path) -> None:
    keep(data / TRAIN, 2)
    keep(data / "south/test/melanoma", 1)
    facts, reported = run_preflight(config(data))
    assert {f["site"]: f["classes"]["melanoma"] for f in facts} == {"east": 13, "north": 13, "south": None}
    assert facts[2]["classes"]["benign"] is None  # it and the total would tell the other
    page = module.write_preflight(tmp_path / "out", facts, reported).read_text()
    facts_of_site, digests = module.site_facts("a", *_one(data))
    assert (
        "counts below 5" in (tmp_path / "out" / "preflight.md").read_text()
        and "hidden" in page
        and len(digests) == facts_of_site["images"]
        and digests[0].hex() not in json.dumps(facts_of_site)
    )
    shutil.copy(data / TRAIN / "0.png", data / TRAIN / "copy.png")
    facts_of_site, _ = module.site_facts("a", *_one(data, 2))
    assert facts_of_site["faults"] == {"duplicates": None}  # one image is about one person


def test_hidden_counts_do_not_follow_from_the_others(data: Path, tmp_path: Path) -> None:
    """With the total, one hidden class, one kind of channels or one unreadable file would be what is left."""
    keep(data / TRAIN, 2)
    keep(data / "south/test/melanoma", 1)
    (data / TRAIN / "broken.png").write_bytes(b"no image")
    dataset, rows = _one(data, 2)
    facts, digests = module.site_facts("a", dataset, rows)  # type: ignore[arg-type]
    for table in ("classes", "channels", "bits"):
        counts = list(facts[table].values())
        left = facts["images"] - sum(count or 0 for count in counts)
        assert None in counts and left >= facts["minimum"], table
    assert facts["unreadable"] and set(facts["unreadable"].values()) == {None}
    shutil.copy(data / TRAIN / "0.png", data / TRAIN / "copy.png")
    dataset, rows = _one(data, 2)
    facts, digests = module.site_facts("a", dataset, rows)  # type: ignore[arg-type]
    tags = preflight_of_nodes._tags(digests, b"key", facts["images"])
    assert len(digests) < len(set(tags)) == facts["images"]
    assert set(preflight_of_nodes._tags(digests, b"key", len(digests))) <= set(tags)


def _one(data: Path, site: int = 0) -> tuple[object, list[np.ndarray]]:
    from fedgraft.config.federate import open_data

    dataset = open_data(config(data))
    return dataset, module.rows_by_site(dataset)[1][site]


def test_a_class_that_one_site_alone_has_is_named(data: Path) -> None:
    """A secure sum does not hide what this site adds to the class, so its owner is told before the run."""
    assert "lone_class" not in {finding.kind for finding in run_preflight(config(data))[1]}
    for part in ("train", "test"):
        shutil.copytree(data / "south" / part / "benign", data / "south" / part / "lentigo")
    _, reported = run_preflight(config(data))
    (finding,) = [finding for finding in reported if finding.kind == "lone_class"]
    assert finding.site == "south" and "lentigo" in finding.text


def test_a_map_settles_slips_and_a_run_refuses_them_without_one(data: Path, tmp_path: Path) -> None:
    from fedgraft.config.federate import federate

    rename(data, "Melanoma ")
    with raises("E-DATA-SIMILAR-CLASSES"):
        federate(config(data))
    (tmp_path / "map.toml").write_text('"Melanoma " = "melanoma"\n')
    settled = config(data, f"data.class_map={tmp_path / 'map.toml'}")
    assert federate(settled).dataset.classes == ("benign", "melanoma") and run_preflight(settled)[1] == []
    assert settled.data.class_map == {"Melanoma ": "melanoma"}  # the map itself travels with the config, not its path
    with pytest.raises(FedgraftError, match="no map of class names"):
        config(data, "data.class_map=nowhere.toml")


def test_the_spelling_of_most_sites_is_kept_and_the_window_is_the_configs(data: Path) -> None:
    rename(data, "Melanoma")
    for i in range(8):
        picture(mode="I;16").save(data / "south/train/benign" / f"{i}.png")
    reported = run_preflight(config(data))[1]
    assert 'data.class_map = {"Melanoma" = "melanoma"}' in next(
        finding.text for finding in reported if finding.kind == "class_case"
    )
    assert "missing_class" not in {finding.kind for finding in reported}  # that it is missing follows from the slip
    bright = [run_preflight(config(data, *more))[0][2]["intensity"][0] for more in ((), ["data.grey_window=[0,65535]"])]
    assert bright[0] > bright[1] + 0.05  # nearly all of a deep image is above 255


def test_numbers_and_short_words_are_no_slips() -> None:
    assert similar_names(["0", "1", "class_1", "class_2", "nv", "mv", "bcc", "benign", "malign"]) == []


def test_like_names_at_one_site_are_two_classes_and_stop_nobody(data: Path) -> None:
    for site in ("east", "north", "south"):
        rename(data, "horse", site, "benign")
        rename(data, "house", site)
    assert [(finding.kind, finding.stops) for finding in run_preflight(config(data))[1]] == [("class_similar", False)]
    rename(data, "house ", "south", "horse")
    stopped = {finding.kind: finding.text for finding in run_preflight(config(data))[1] if finding.stops}
    assert "'house ' (south)" in stopped["class_space"]  # a space is a slip, wherever it is


def test_the_command_ends_with_one_where_something_stops(data: Path, tmp_path: Path) -> None:
    rename(data, "Melanoma")
    words = ["data.source=owners", f"data.path={data}", "partition.kind=by_site", "--out", str(tmp_path / "p")]
    done = CliRunner().invoke(app, ["preflight", *words])
    assert done.exit_code == 1 and "class_case" in done.output and (tmp_path / "p/preflight.html").exists()
    assert json.loads((tmp_path / "p/preflight.json").read_text())["findings"][0]["stops"] is True
