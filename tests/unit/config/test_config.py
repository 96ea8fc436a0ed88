"""The config: one sentence for every mistake, a lossless file, and an identity that ignores what does not count."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.errors import raises

from fedgraft.config import presets
from fedgraft.config.describe import COMMON
from fedgraft.config.load import (
    Config,
    describe_options,
    from_folder,
    known_keys,
    load,
    merge,
    parse_override,
    read_toml,
    to_toml,
    validate,
)
from fedgraft.core.errors import FedgraftError


def sentence(*overrides: str) -> str:
    with pytest.raises(FedgraftError) as caught:
        load(None, list(overrides))
    text = str(caught.value)
    assert "\n" not in text and text.endswith("."), text
    return text


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("local.learning_rate=1", "local."),
        ("local.lrr=1", "local.lr"),
        ("local.momentun=0.9", "local.momentum"),
        ("partition.client=10", "partition.clients"),
        ("sede=3", "seed"),
        ("trainable.sparse.sparcity=0.5", "trainable.sparse.sparsity"),
        ("rounds.totl=3", "rounds.total"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(word: str, nearest: str) -> None:
    text = sentence(word)
    assert f"there is no option {word.split('=')[0]!r}" in text and f"the nearest one is '{nearest}" in text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["algorithm.moo=3"], "the algorithm fedavg has no option 'moo'; it takes none"),
        (["algorithm.mu=3"], "the algorithm fedavg has no option 'mu'; it takes none"),
        (
            ["algorithm.name=fedprox", "algorithm.moo=3"],
            "the algorithm fedprox has no option 'moo'; the nearest is 'mu'",
        ),
        (["loss.moo=3"], "the loss cross_entropy has no option 'moo'"),
        (["trainable.kind=tail"], "there is no trainable kind 'tail'; the nearest one is"),
        (["trainable.kind=sparse", "trainable.moo=3"], "the trainable kind sparse has no option 'moo'"),
        (["algorithm.name=fedavgg"], "there is no algorithm 'fedavgg'; the nearest one is 'fedavg'"),
    ],
)
def test_names_and_options_of_registries_are_refused_when_they_are_built(words: list[str], text: str) -> None:
    """Plug-ins bring names and options of their own, so only the building knows them all."""
    from fedgraft.config.build import build_algorithm

    with pytest.raises(FedgraftError) as caught:
        build_algorithm(load(None, words))
    assert text in str(caught.value)


@pytest.mark.parametrize("words", [[], ["algorithm.name=fedprox", "algorithm.mu=0.3"], ["trainable.kind=sparse"]])
def test_the_file_of_a_config_builds_the_same_algorithm(words: list[str]) -> None:
    """A file that names every option would hand each algorithm options it does not have."""
    from fedgraft.config.build import build_algorithm

    config = load(None, words)
    again = validate(tomllib.loads(to_toml(config)))
    assert build_algorithm(again).name == build_algorithm(config).name and again.digest == config.digest


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("data.validation=1", ("data.validation", "less than 1")),
        ("data.validation=-0.1", ("data.validation", "greater than or equal to 0")),
        ('data.augment=["twist"]', ("data.augment", "'twist'")),
        ("data.image_size=2", ("data.image_size", "4")),
        ("data.limit=0", ("data.limit", "1")),
        ("partition.clients=0", ("partition.clients", "1", "got 0")),
        ("partition.kind=random", ("partition.kind", "'random'")),
        ("partition.alpha=0", ("partition.alpha", "greater than 0")),
        ("model.dropout=1", ("model.dropout", "less than 1")),
        ("model.head=best", ("model.head", "'best'")),
        ("trainable.sparse.sparsity=1", ("trainable.sparse.sparsity", "less than 1")),
        ("trainable.lora.rank=0", ("trainable.lora.rank", "1")),
        ("local.lr=0", ("local.lr", "greater than 0")),
        ("local.lr=fast", ("local.lr", "number", "'fast'")),
        ("local.lr=nan", ("local.lr",)),
        ("local.lr=inf", ("local.lr",)),
        ("local.momentum=1", ("local.momentum", "less than 1")),
        ("local.steps=0", ("local.steps", "1")),
        ("local.steps=2.5", ("local.steps", "integer")),
        ("local.batch_size=0", ("local.batch_size", "1")),
        ("schedule.factor=1", ("schedule.factor", "less than 1")),
        ("rounds.fraction=0", ("rounds.fraction", "greater than 0")),
        ("rounds.fraction=1.5", ("rounds.fraction", "less than or equal to 1")),
        ("rounds.total=-1", ("rounds.total", "0")),
        ("compression.codec=zip", ("compression.codec", "'zip'")),
        ("privacy.aggregation=hidden", ("privacy.aggregation", "'hidden'")),
        ('track.trackers=["paper"]', ("track.trackers", "'paper'")),
        ("name=../up", ("name", "../up")),
        ("seed=-1", ("seed", "0")),
        ("workers=-1", ("workers", "0")),
        ("local=3", ("'local' is a table of options", "local.steps")),
    ],
)
def test_every_limit_has_its_sentence(word: str, parts: tuple[str, ...]) -> None:
    text = sentence(word)
    assert all(part in text for part in parts), text


def test_groups_need_their_labels() -> None:
    with raises("E-CONFIG-VALUE", option="partition"):
        load(None, ["partition.kind=groups"])


def test_steps_and_epochs_exclude_each_other() -> None:
    with raises("E-CONFIG-VALUE", option="local"):
        load(None, ["local.steps=4", "local.epochs=1"])


@pytest.mark.parametrize("word", ["lr", "=3", "", "  "])
def test_a_word_that_is_no_assignment_is_refused(word: str) -> None:
    with raises("E-CONFIG-OVERRIDE"):
        load(None, [word])


@pytest.mark.parametrize(
    ("word", "table"),
    [
        ("local.lr=0.1", {"local": {"lr": 0.1}}),
        ("name=abc", {"name": "abc"}),
        ('name="abc"', {"name": "abc"}),
        ("data.augment=['flip', 'crop']", {"data": {"augment": ["flip", "crop"]}}),
        ("local.clip=none", {"local": {"clip": None}}),
        ("local.nesterov=true", {"local": {"nesterov": True}}),
        ("data.path=/a b/c=d", {"data": {"path": "/a b/c=d"}}),
        ("trainable.sparse.sparsity=1e-1", {"trainable": {"sparse": {"sparsity": 0.1}}}),
        ("schedule.kind=none", {"schedule": {"kind": "none"}}),
        ("data.path=none", {"data": {"path": None}}),
    ],
)
def test_words_are_toml_values_or_plain_text(word: str, table: dict[str, Any]) -> None:
    assert parse_override(word) == table


def test_later_words_win_and_tables_join() -> None:
    config = load(None, ["local.lr=0.1", "local.momentum=0.5", "local.lr=0.2"])
    assert (config.local.lr, config.local.momentum) == (0.2, 0.5)
    assert merge({"a": {"x": 1, "y": 2}, "b": 1}, {"a": {"y": 3}, "b": {"z": 1}}) == {
        "a": {"x": 1, "y": 3},
        "b": {"z": 1},
    }


def test_words_win_over_the_file_and_the_file_over_the_preset(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("seed = 5\n[local]\nlr = 0.3\n")
    config = load(path, ["local.lr=0.4"], {"seed": 1, "name": "base"})
    assert (config.seed, config.local.lr, config.name) == (5, 0.4, "base")


def test_files_that_cannot_be_read_say_so(tmp_path: Path) -> None:
    with raises("E-CONFIG-FILE"):
        read_toml(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[local\nlr = 1")
    with raises("E-CONFIG-TOML"):
        read_toml(tmp_path / "bad.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with raises("E-CONFIG-TOML"):
        read_toml(tmp_path / "binary.toml")
    with raises("E-CONFIG-FILE"):
        read_toml(tmp_path)


OVERRIDES = [
    "seed=3",
    "name=x",
    "local.clip=1.5",
    "local.epochs=2",
    "data.augment=['flip','crop']",
    "data.limit=50",
    "trainable.sparse.scope=['qk','norm']",
    "partition.groups=[[0,1],[2]]",
    "schedule.at=[0.1,0.9]",
    "rounds.norm_bound=2.0",
    "algorithm.name=fedalign",
    "local.amp=bfloat16",
    "track.trackers=['wandb']",
    "model.ridge=0.01",
    "local.lr=0.1234567890123",
]


@settings(max_examples=30, deadline=None)
@given(st.sets(st.sampled_from(OVERRIDES)))
def test_the_resolved_config_survives_its_file(overrides: set[str]) -> None:
    config = load(None, sorted(overrides))
    again = validate(tomllib.loads(to_toml(config)))
    assert again == config and again.digest == config.digest


def test_the_folder_gives_the_config_back(tmp_path: Path) -> None:
    config = load(None, ["seed=3", "local.steps=7"])
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert from_folder(tmp_path) == config


@pytest.mark.parametrize("word", ["name=other", "track.trackers=['wandb']", "workers=3"])
def test_what_does_not_decide_the_result_is_not_in_the_digest(word: str) -> None:
    assert load(None, [word]) != Config() and load(None, [word]).digest == Config().digest


@pytest.mark.parametrize(
    "word", ["seed=1", "local.lr=0.02", "rounds.total=21", "trainable.sparse.sparsity=0.8", "data.source=cifar10"]
)
def test_what_decides_the_result_is(word: str) -> None:
    assert load(None, [word]).digest != Config().digest


def test_defaults_are_valid_and_every_option_is_described() -> None:
    assert validate({}) == Config()
    text = "\n".join(describe_options())
    missing = [key for key in known_keys() if f"  {key} = " not in text]
    assert not missing
    told = (
        "skip them with a warning; one of refuse, skip",
        '  local.optimizer = "sgdm"  one of sgdm, adamw',
        "  track.trackers = []  any of tensorb",
    )
    assert all(line in text for line in told) and not any(w in text for w in ("Optional[", "Literal", "tuple["))


def test_an_option_of_an_algorithm_is_declared_in_its_signature_alone() -> None:
    """`mu` stands in `fedprox` and nowhere in the config; type, range, default and meaning come from there."""
    assert load(None, ["algorithm.name=fedprox", "algorithm.mu=2"]).algorithm.mu == 2.0
    with raises("E-CONFIG-VALUE", option="algorithm.mu"):
        load(None, ["algorithm.name=fedprox", "algorithm.mu=-1"])
    with raises("E-CORE-UNKNOWN-OPTION", option="mu"):
        load(None, ["algorithm.name=fedavg", "algorithm.mu=2"])
    assert "  algorithm.mu = 0.01  fedprox: weight of the proximal term" in describe_options()


def test_a_default_that_is_written_out_does_not_change_the_identity() -> None:
    explicit = load(None, ["algorithm.name=fedprox", "algorithm.mu=0.01", "local.momentum=0.9", "schedule.factor=0.5"])
    assert explicit.digest == load(None, ["algorithm.name=fedprox"]).digest


def test_the_short_list_has_sixty_options_that_exist() -> None:
    assert len(COMMON) == 60 and set(COMMON) <= set(known_keys())
    listed = [line.split(" = ")[0].strip() for line in describe_options(common_only=True) if " = " in line]
    assert set(listed) == set(COMMON)


@pytest.mark.parametrize("name", presets.summaries())
def test_every_preset_is_a_valid_config_with_a_line_about_it(name: str) -> None:
    validate(presets.table(name))
    assert presets.summaries()[name].endswith(".")


def test_an_unknown_preset_names_the_nearest() -> None:
    with raises("E-CONFIG-PRESET", name="dmo"):
        presets.table("dmo")
    with pytest.raises(FedgraftError):
        presets.table("../presets/demo")


@pytest.mark.slow
def test_bad_input_is_refused_before_torch_is_loaded() -> None:
    code = "import sys, fedgraft.config.load as c, fedgraft.cli.main; c.load(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_unknown_options_are_all_named_with_what_was_meant() -> None:
    with raises("E-CONFIG-UNKNOWN-OPTION", options=["local.learningrate", "rounds.totl"]) as refusal:
        load(None, ["local.learningrate=0.1", "rounds.totl=3"])
    assert "'local.lr'" in str(refusal.value) and "'rounds.total'" in str(refusal.value)  # the sentence is the product
    for word, meant in {"learning_rate": "local.lr", "num_rounds": "rounds.total", "local.rate": "local.lr"}.items():
        assert f"the nearest one is {meant!r}" in sentence(f"{word}=1")


def test_a_value_that_is_nearly_one_of_a_list_is_suggested() -> None:
    assert "the nearest one is 'auroc'" in sentence("metrics=auc")


def test_words_with_commas_are_a_list_where_the_option_is_one() -> None:
    assert load(None, ["metrics=auroc,f1"]).metrics == ("auroc", "f1")
    assert load(None, ["metrics=auroc"]).metrics == ("auroc",)
    assert parse_override("data.path=a,b") == {"data": {"path": "a,b"}}
