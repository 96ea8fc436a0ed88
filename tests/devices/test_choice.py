"""Where a command computes: its own choice, this machine's, or by itself; never the run's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.errors import raises
from tests.support.pretend_device import NAME
from tests.support.tiny import CNN, Open, same_bits, tensors_of, tiny, without_pictures
from tests.unit.engines.test_flower_node import SMALL, Direct

from fedgraft.cli.overrides import config_of
from fedgraft.config.load import Config, from_folder, load
from fedgraft.core.device import CHOICE, Device, choose_devices
from fedgraft.core.device_choice import AUTO
from fedgraft.data.cache_limit import cache_dir
from fedgraft.deploy import node as node_module
from fedgraft.deploy.deployed import run_deployed
from fedgraft.runs.adapted import adapted
from fedgraft.runs.loop import run
from fedgraft.runs.plan import plan_run

BODY = "trainable.kind=last_blocks"


def test_a_command_is_stronger_than_the_config_and_the_config_than_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_devices().first == torch.device("cpu")
    monkeypatch.setenv(CHOICE, f"{NAME}:1")
    assert choose_devices().first == torch.device(NAME, 1)
    assert choose_devices("cpu").first == torch.device("cpu")
    assert config_of(["device=cpu"], NAME).device == NAME
    assert config_of([], None).device == AUTO


def test_several_devices_are_given_to_workers_in_turn() -> None:
    chosen = choose_devices(f"{NAME}:0, {NAME}:1")
    assert [chosen.of_worker(number).index for number in range(4)] == [0, 1, 0, 1]
    for wrong in (f"{NAME}:0,{NAME}:0", "cuda:7", "nonsense", ""):
        with raises("E-CONFIG-DEVICE"):
            choose_devices(wrong)


def test_the_device_is_no_part_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was stopped on one device is continued on another, and the folder of a device that is gone opens."""
    assert tiny(f"device={NAME}").digest == tiny("device=cuda").digest == tiny().digest
    with without_pictures():
        run(tiny(BODY, "pack=off"), tmp_path / "whole", console=False)
        folder = tmp_path / "moved"
        monkeypatch.setattr("fedgraft.runs.loop._Run._one_round", stops_before(2))
        with pytest.raises(KeyboardInterrupt):
            run(tiny(BODY, "pack=off", f"device={NAME}"), folder, console=False)
        monkeypatch.undo()
        assert f'device = "{NAME}"' in (folder / "config.toml").read_text()
        run(from_folder(folder), folder, console=False)
    assert same_bits(tensors_of(tmp_path / "whole"), tensors_of(folder))
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace(NAME, "cuda:7"))  # made where there are eight
    assert Device.of(adapted(folder).network).is_host


def stops_before(last: int):  # type: ignore[no-untyped-def]
    """A round that ends the program when it is this one's turn."""
    from fedgraft.runs.loop import _Run

    plain = _Run._one_round

    def one_round(self, state):  # type: ignore[no-untyped-def]
        if state.round + 1 == last:
            raise KeyboardInterrupt
        return plain(self, state)

    return one_round


def test_caches_of_devices_are_apart_and_those_of_the_cpu_keep_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("trainable.kind=sparse", "trainable.sparse.samples=8", "trainable.sparse.rounds=1")
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path))

    def names() -> set[str]:
        found = set()
        for group in ("features", "heads", "edits"):
            found |= {f"{group}/{path.name}" for path in (cache_dir() / group).glob("*")}
        return found - {"features/rows"}

    Open(tiny(*options))
    on_cpu = names()
    Open(tiny(*options, f"device={NAME}"))
    on_both = names()
    assert {name.partition("/")[0] for name in on_both - on_cpu} == {"features", "heads", "edits"}
    Open(tiny(*options))
    assert names() == on_both
    monkeypatch.setattr(Device, "cache_words", lambda self, precision=None: [])
    Open(tiny(*options, f"device={NAME}"))
    assert names() == on_both  # without the words the device would have taken the CPU's


def test_the_plan_says_what_is_where() -> None:
    assert "device: cpu" in plan_run(tiny())
    assert f"device: {NAME}:0" in plan_run(tiny(f"device={NAME}"))
    lines = plan_run(tiny(BODY, f"device={NAME}:0,{NAME}:1", "workers=3"))
    places = f"worker 0 on {NAME}:0, worker 1 on {NAME}:1, worker 2 on {NAME}:0"
    assert f"device: {NAME}:0 for evaluation; {places}" in lines


BACKEND = """[torch.backends]
pretend = tests.support.pretend_device:loaded
"""


@pytest.mark.deploy
def test_workers_on_two_devices_give_the_bits_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are spawned, one context each; torch loads the device in them by its entry point for such packages.

    Autograd has a queue for one device of a backend in Python, so the second is the CPU.
    """
    package = tmp_path / "site" / "pretend-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: pretend\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(BACKEND)
    monkeypatch.syspath_prepend(tmp_path / "site")
    model = "model.name=cnn:width=4,size=16"
    with without_pictures():
        for name, options in {"alone": (), "two": (f"device={NAME}:0,cpu", "workers=2")}.items():
            run(tiny(model, BODY, "rounds.total=1", *options), tmp_path / name, console=False)
    assert same_bits(tensors_of(tmp_path / "alone"), tensors_of(tmp_path / "two"))


def test_a_fork_beside_a_device_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDGRAFT_START", "fork")
    with raises("E-ENGINES-FORK-DEVICE"):
        run(tiny(BODY, f"device={NAME}", "workers=2", "pack=off"), tmp_path / "run", console=False)


def test_nodes_compute_where_their_owners_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has a device that the sites do not have: they take part on their CPUs, with the same bits."""
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDGRAFT_NODE_HOME", str(tmp_path / "home"))
    config = load(None, [*SMALL, "data.limit=60", CNN, "rounds.total=1"])
    kinds = []
    build = node_module.setup_of

    def setup_of(*args, **options):  # type: ignore[no-untyped-def]
        setup = build(*args, **options)
        kinds.append(Device.of(setup.task.network).kind)
        return setup

    monkeypatch.setattr(node_module, "setup_of", setup_of)
    with without_pictures():
        run(config, tmp_path / "here", console=False)
        elsewhere = merge_device(config, NAME)
        run_deployed(elsewhere, tmp_path / "there", Direct(merge_device(config, "cuda:7"), tmp_path / "there"))
    assert kinds == ["cpu"] * 3
    assert torch.equal(tensors_of(tmp_path / "here")["vector"], tensors_of(tmp_path / "there")["vector"])


def merge_device(config: Config, name: str) -> Config:
    return config.model_copy(update={"device": name})
