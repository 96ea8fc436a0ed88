"""Added from outside: a package of a few lines with an entry point, and its name works in a config and a command.

Each plug-in is a short module in a folder on the path, beside the metadata an installer would write.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from tests.support.errors import raises
from tests.support.tiny import CNN, OVERRIDES, same_bits, tensors_of, tiny, without_pictures
from torch import Tensor

from fedgraft.core import registry
from fedgraft.runs.adapted import adapted
from fedgraft.runs.loop import run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extend.md"
PLUGINS = {
    "algorithm": re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0],  # what users copy
    "loss": '''
from torch.nn.functional import cross_entropy
from fedgraft import Loss, registry

def focal(gamma: float = 2.0):
    """Lin et al. 2017: examples that are right already count less."""
    def value(network, inputs, labels, entry):
        each = cross_entropy(network(inputs, entry), labels, reduction="none")
        return ((1 - (-each).exp()) ** gamma * each).mean()
    return Loss("focal", lambda setting: value)

registry.LOSSES["focal"] = focal
''',
    "trainable": '''
from fedgraft.edit.dense import Dense
from fedgraft.core.registry import TRAINABLES

def biases():
    """Ben Zaken et al. 2022 (BitFit): the biases and nothing else."""
    return Dense("biases", lambda network, name: name.endswith("bias"), trains_head=True, trains_body=True)

TRAINABLES["biases"] = biases
''',
    "strategy": """
import torch
from fedgraft.edit.choose import Strategy
from fedgraft.core.registry import STRATEGIES

def by_place(weights, seed):
    return {name: torch.arange(t.numel()).view(t.shape).float() for name, t in weights.items()}

STRATEGIES["first"] = lambda: Strategy(largest=False, scores=by_place)
""",
    "aggregation": """
from fedgraft.core.registry import AGGREGATORS

AGGREGATORS["middle"] = lambda attackers: lambda stack, weights: stack.median(0).values
""",
    "source": '''
import numpy as np
import fedgraft as fg

def squares(size: int = 120):
    """Grey squares of four brightnesses."""
    labels, noise = np.arange(size) % 4, np.random.default_rng(0).integers(0, 20, (size, 16, 16, 3))
    images = (60 * labels[:, None, None, None] + noise).astype(np.uint8)
    half = size // 2
    return fg.data.arrays(images[:half], labels[:half], test=(images[half:], labels[half:]))

fg.registry.SOURCES["squares"] = squares
''',
}
REGISTRIES = (
    registry.ALGORITHMS,
    registry.LOSSES,
    registry.TRAINABLES,
    registry.STRATEGIES,
    registry.AGGREGATORS,
    registry.SOURCES,
)


def install(folder: Path, *names: str) -> None:
    """Write the plug-ins and the metadata that names them, as an installer would."""
    info = folder / "outside-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fedgraft]\n" + "".join(f"{n} = outside_{n}\n" for n in names))
    for name in names:
        (folder / f"outside_{name}.py").write_text(PLUGINS[name].lstrip())


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Installs plug-ins for one test; the registries and the modules are as before after it."""
    before = [dict(table) for table in REGISTRIES]

    def add(*names: str) -> None:
        install(tmp_path / "site", *names)
        monkeypatch.syspath_prepend(tmp_path / "site")
        monkeypatch.setattr(registry, "_loaded", False)

    with without_pictures():
        yield add
    for table, entries in zip(REGISTRIES, before, strict=True):
        table.clear()
        table.update(entries)
    for name in PLUGINS:
        sys.modules.pop(f"outside_{name}", None)


def new_process(root: Path, *words: str) -> None:
    """A Python that finds the plug-ins only by their metadata."""
    path = os.pathsep.join([str(root / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def ran(folder: Path, *words: str) -> dict[str, Tensor]:
    """The tensors of a run of the config, after one round."""
    with without_pictures():
        run(tiny("rounds.total=1", *words), folder, console=False)
    return tensors_of(folder)


def test_an_algorithm(installed: Callable[..., None], tmp_path: Path) -> None:
    installed("algorithm")
    half, whole = ran(tmp_path / "half", "algorithm.name=halfway"), ran(tmp_path / "whole", "algorithm.name=fedavg")
    start = adapted(tmp_path / "half").opened.space.gather(adapted(tmp_path / "half").base())
    torch.testing.assert_close(half["vector"], start + (whole["vector"] - start) / 2, rtol=1e-6, atol=1e-7)
    again = ran(tmp_path / "again", "algorithm.name=halfway", "algorithm.share=1.0")
    assert torch.equal(again["vector"], whole["vector"])
    with raises("E-CORE-UNKNOWN-OPTION"):
        ran(tmp_path / "refused", "algorithm.name=halfway", "algorithm.shar=1.0")


def test_the_page_names_the_module_and_the_group() -> None:
    project_file = tomllib.loads(re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0])
    assert (
        project_file["project"]["entry-points"]["fedgraft"] == {"halfway": "halfway"}
        and "halfway.py:\n" in PAGE.read_text()
    )


def test_a_broken_plug_in_is_named(installed: Callable[..., None], tmp_path: Path) -> None:
    installed("algorithm")
    (tmp_path / "site" / "outside_algorithm.py").write_text("import nothing_of_this_name\n")
    with raises("E-CORE-PLUGIN", plugin="outside_algorithm"):
        registry.ALGORITHMS.find("halfway")


def test_a_loss(installed: Callable[..., None], tmp_path: Path) -> None:
    installed("loss")
    plain = ran(tmp_path / "plain", "engine=reference")
    zero = ran(tmp_path / "zero", "engine=reference", "loss.name=focal", "loss.gamma=0.0")
    torch.testing.assert_close(zero["vector"], plain["vector"], rtol=1e-5, atol=1e-6)
    focal = ran(tmp_path / "focal", "engine=reference", "loss.name=focal")
    assert not torch.allclose(focal["vector"], plain["vector"], rtol=1e-4, atol=1e-5)
    with raises("E-CORE-UNKNOWN-OPTION"):
        ran(tmp_path / "refused", "loss.name=focal", "loss.gama=1.0")


def test_a_trainable_kind(installed: Callable[..., None], tmp_path: Path) -> None:
    installed("trainable")
    ran(tmp_path / "run", "trainable.kind=biases")
    run_again = adapted(tmp_path / "run")
    run_again.opened.context.load_model(run_again.last)
    start = dict(run_again.base().named_parameters())
    moved = {name for name, p in run_again.network.named_parameters() if not torch.equal(p, start[name])}
    assert moved and all(name.endswith("bias") for name in moved) and "head.bias" in moved


def test_a_mask_strategy(installed: Callable[..., None], tmp_path: Path) -> None:
    installed("strategy")
    sparse = ["trainable.kind=sparse", "trainable.sparse.strategy=first", "trainable.sparse.threshold=per_tensor"]
    ran(tmp_path / "run", *sparse, "trainable.head_too=false")
    mask = adapted(tmp_path / "run").opened.trainable.mask
    assert mask is not None
    for chosen in mask.values():
        count = int(chosen.sum())
        assert chosen.reshape(-1)[:count].all() and count == pytest.approx(0.1 * chosen.numel(), abs=1)


def test_an_aggregation_rule(installed: Callable[..., None], tmp_path: Path) -> None:
    installed("aggregation")
    ours, theirs = (ran(tmp_path / name, f"algorithm.robust={name}") for name in ("middle", "median"))
    assert torch.equal(ours["vector"], theirs["vector"])  # three clients: the same by another way
    assert not torch.equal(ours["vector"], ran(tmp_path / "mean")["vector"])


def test_a_data_source(installed: Callable[..., None], tmp_path: Path) -> None:
    installed("source")
    words = ["data.source=squares", "data.size=160"]
    ran(tmp_path / "run", *words)
    outside_task = adapted(tmp_path / "run").setup.task
    assert outside_task.data.classes == 4 and len(outside_task.data.dataset.test.labels) == 80
    with raises("E-DATA-SOURCE-OPTION"):
        ran(tmp_path / "refused", "data.source=squares", "data.sze=160")


def test_all_of_them_on_the_command_line(installed: Callable[..., None], tmp_path: Path) -> None:
    """Three commands in a new process, which knows of the plug-ins only by their metadata."""
    installed("algorithm", "loss", "trainable", "strategy", "aggregation", "source")
    slots = [CNN, "rounds.total=1", "loss.name=focal", "algorithm.robust=middle"]
    masks = [
        "trainable.kind=sparse",
        "trainable.sparse.strategy=first",
        "algorithm.name=halfway",
        "algorithm.share=0.3",
    ]
    squares = [CNN, "rounds.total=1", "data.source=squares", "data.size=160"]
    commands = {"biases": [*slots, "trainable.kind=biases"], "masks": [*slots, *masks], "squares": squares}
    words = [[*OVERRIDES, *words, "-q", "-o", str(tmp_path / f"{name}-command")] for name, words in commands.items()]
    script = (
        f"from fedgraft.cli.main import app\nfor words in {words!r}:\n    app(['run', *words], standalone_mode=False)"
    )
    new_process(tmp_path, "-c", script)
    for name, chosen in commands.items():
        assert same_bits(tensors_of(tmp_path / f"{name}-command"), ran(tmp_path / name, *chosen))


def test_a_name_that_no_plug_in_brings(installed: Callable[..., None], tmp_path: Path) -> None:
    installed("loss")
    with raises("E-CORE-UNKNOWN-NAME"):
        ran(tmp_path / "run", "loss.name=fokal")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_pages_own_check_holds_and_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, check, _ = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "ALGORITHMS", dict(registry.ALGORITHMS))
    small = check.replace('"nano"', '"tiny"')
    for text, holds in ((algorithm, True), (algorithm.replace("share * update", "share * 0.9 * update"), False)):
        (tmp_path / "halfway.py").write_text(text)
        sys.modules.pop("halfway", None)
        importlib.invalidate_caches()
        with without_pictures(), nullcontext() if holds else pytest.raises(AssertionError):
            exec(compile(small, "the page", "exec"), {"__name__": "__page__"})
    sys.modules.pop("halfway", None)


@pytest.mark.slow
def test_the_callback_of_the_page_stops_and_continues_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, callback = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    small = callback.replace('"nano"', '"tiny"')
    with without_pictures():
        exec(compile(small, "the page", "exec"), {"__name__": "__page__"})
        never_stops = small.replace("return fg.StopRun", "fg.StopRun").replace("runs/good-enough", "runs/never")
        with pytest.raises(AssertionError):
            exec(compile(never_stops, "the page", "exec"), {"__name__": "__page__"})
