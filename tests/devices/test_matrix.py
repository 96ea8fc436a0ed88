"""The matrix: every part and every command finishes on the pretend device with the CPU's result, bit for bit.

The rows come from the tables that configs name parts by, and from the table of the laws, so an algorithm, trainable
kind, mask strategy, loss, rule or metric that is added is in it by itself. Each row is one short run, once on the CPU
and once on the device, with caches of their own. Below, strays are planted: a tensor left on the CPU, a number read by
numpy, a generator of the wrong device; the row that they are in must fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from PIL import Image
from tests.laws.test_zoo_contract import ROWS, Row, Table, whole
from tests.support import tiny as small
from tests.support.pretend_device import NAME
from tests.support.tiny import same_bits, tensors_of, tiny, without_pictures
from torch import Tensor
from typer.testing import CliRunner

from fedgraft import algorithms as zoo
from fedgraft.aggregate.robust import AGGREGATORS
from fedgraft.cli.main import app
from fedgraft.client import observe
from fedgraft.config.data import DataTable, ModelTable
from fedgraft.config.options import CompressionTable, Config
from fedgraft.config.training import AlgorithmTable, LocalTable
from fedgraft.core import device as devices
from fedgraft.core.device import Device
from fedgraft.core.errors import FedgraftError
from fedgraft.core.registry import LOSSES, STRATEGIES, TRAINABLES
from fedgraft.core.space import Bound
from fedgraft.edit import choose, fisher
from fedgraft.engines import batched
from fedgraft.local import losses, optimizers
from fedgraft.local import train as local_training
from fedgraft.metrics.names import LABEL_SET_NAMES, METRIC_NAMES
from fedgraft.runs import loop

BODY = "trainable.kind=last_blocks"
SPARSE = ("trainable.kind=sparse", "trainable.sparse.samples=8", "trainable.sparse.rounds=2")
PRIVATE = ("algorithm.weighting=uniform", "privacy.dp.noise=0.8", "privacy.dp.clip=0.5", "privacy.dp.secret=false")
PRIVATE += ("rounds.sampling=poisson",)
FINETUNED = ("personal.evaluate=end", "personal.finetune_epochs=1", BODY)
SEVEN = "partition.clients=7"


def words(section: Any, name: str) -> tuple[str, ...]:
    """The words that an option may have."""
    return tuple(word for word in _flat(section.model_fields[name].annotation) if isinstance(word, str))


def _flat(annotation: Any) -> Iterator[Any]:
    for argument in get_args(annotation):
        yield from _flat(argument) if get_args(argument) else [argument]


def rows_from_tables() -> dict[str, tuple[str, ...]]:
    """The options of each row, by the part that it is there for."""
    rows: dict[str, tuple[str, ...]] = {"defaults": ()}
    for kind in TRAINABLES:
        rows[f"trainable {kind}"] = SPARSE if kind == "sparse" else (f"trainable.kind={kind}",)
    for strategy in STRATEGIES:
        rows[f"mask {strategy}"] = (*SPARSE, f"trainable.sparse.strategy={strategy}")
    for codec in words(CompressionTable, "codec"):
        rows[f"codec {codec}"] = (f"compression.codec={codec}", BODY)
    for weighting in words(AlgorithmTable, "weighting"):
        rows[f"weighting {weighting}"] = (f"algorithm.weighting={weighting}", BODY)
    for loss in LOSSES:
        rows[f"loss {loss}"] = (f"loss.name={loss}", BODY)
    for optimizer in words(LocalTable, "optimizer"):
        rows[f"optimizer {optimizer}"] = (f"local.optimizer={optimizer}", BODY)
        rows[f"optimizer {optimizer}, batched"] = (f"local.optimizer={optimizer}", "local.weight_decay=0.1")
    for head in words(ModelTable, "head"):
        if head != "stored":  # it needs a network that brings one, as the test of it has
            rows[f"head {head}"] = (f"model.head={head}",)
    for rule in AGGREGATORS:
        rows[f"rule {rule}"] = (f"algorithm.robust={rule}", "algorithm.attackers=1", SEVEN)
    for engine in words(Config, "engine"):
        if engine != "flower-sim":  # other processes, in which this device does not exist
            rows[f"engine {engine}"] = (f"engine={engine}", "local.steps=none", "local.epochs=1")
    for sampling in words(LocalTable, "sampling"):
        rows[f"sampling {sampling}"] = (f"local.sampling={sampling}", BODY)
    for protection, options in {
        "secure": ("privacy.aggregation=secure",),
        "private": PRIVATE,
        "secure and private": ("privacy.aggregation=secure", *PRIVATE),
    }.items():
        rows[f"protection {protection}"] = (*options, BODY)
    measured = [name for name in METRIC_NAMES if name not in LABEL_SET_NAMES]
    rows["metrics"] = (f"metrics={measured}", "personal.evaluate=end", "personal.finetune_epochs=1")
    rows["dropout"] = ("model.dropout=0.1", BODY)
    rows["clipped gradients"] = ("local.clip=0.01", BODY)
    rows["own masks"] = (*SPARSE, "trainable.sparse.per_client=true")
    rows["adaptive masks"] = (*SPARSE, "trainable.sparse.adaptive_start=0.5")
    rows["dropped low-rank inputs"] = ("trainable.kind=lora", "trainable.lora.dropout=0.1")
    rows["convolutions"] = ("model.name=cnn:width=4,size=16", "trainable.kind=everything")
    rows["augmented"] = ('data.augment=["flip","crop","jitter"]', BODY)
    return rows


def without_repetitions(rows: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Rows that are one config, such as a default and its name, become one row with all their names."""
    names: dict[str, list[str]] = {}
    options: dict[str, tuple[str, ...]] = {}
    for name, given in rows.items():
        digest = tiny(*given).digest
        names.setdefault(digest, []).append(name)
        options.setdefault(digest, given)
    return {"; ".join(names[digest]): options[digest] for digest in names}


CONFIGS = without_repetitions(rows_from_tables())
MORE_CONFIGS: dict[str, tuple[str, ...]] = {
    **{f"scores {labels}": (*SPARSE, f"trainable.sparse.labels={labels}") for labels in fisher.LABELS},
    **{f"merged {merge}": (*SPARSE, f"trainable.sparse.merge={merge}") for merge in ("union", "intersection", "vote")},
    **{f"fine-tuned {part}": (f"personal.finetune_part={part}", *FINETUNED) for part in ("head", "body", "both")},
    **{f"augmented {word}": (f'data.augment=["{word}"]', BODY) for word in words(DataTable, "augment")},
}
"""Options of the parts, beside the parts themselves."""
PACKS: dict[str, tuple[str, ...]] = {}
for _kind in TRAINABLES:
    PACKS[_kind] = ("pack=3", *(SPARSE if _kind == "sparse" else (f"trainable.kind={_kind}",)))
"""Clients packed into one computation; a kind that cannot be packed is carried out one by one."""
LAW_ROWS = {name: row for name, row in ROWS.items() if name in zoo.ALGORITHMS}
MORE_ROWS = {name: row for name, row in ROWS.items() if name not in zoo.ALGORITHMS}


def outcome(row: Row, device: str) -> dict[str, Tensor]:
    """Everything that two rounds of a toy federation leave behind."""
    toy = Table(replace(row, network=lambda: row.network().to(device)))
    toy.run(2)
    assert not toy.summary.rejections
    tensors = whole(toy)
    assert {tensor.device.type for tensor in tensors.values()} == {"cpu"}  # what is kept or sent is on the host
    return tensors


@pytest.mark.parametrize("name", LAW_ROWS)
def test_every_algorithm_gives_the_bits_of_the_cpu(name: str) -> None:
    assert same_bits(outcome(LAW_ROWS[name], "cpu"), outcome(LAW_ROWS[name], NAME))


@pytest.mark.deploy
@pytest.mark.parametrize("name", MORE_ROWS)
def test_further_rows_of_the_laws_give_the_bits_of_the_cpu(name: str) -> None:
    assert same_bits(outcome(MORE_ROWS[name], "cpu"), outcome(MORE_ROWS[name], NAME))


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., dict[str, Tensor]]]:
    """Run a config on a device with a cache of its own, so that nothing is taken from the other device's."""

    def checkpoint_of(device: str, *options: str, fresh: bool = False) -> dict[str, Tensor]:
        caches = tmp_path if fresh else tmp_path.parent
        monkeypatch.setenv("FEDGRAFT_CACHE", str(caches / f"cache-{device}"))
        monkeypatch.setenv(devices.CHOICE, device)
        folder = tmp_path / device
        loop.run(tiny("rounds.total=1", "pack=off", *options), folder, console=False)
        return {name: tensor for name, tensor in tensors_of(folder).items() if not name.endswith("/identity")}

    with without_pictures():
        yield checkpoint_of


@pytest.mark.parametrize("name", CONFIGS)
def test_every_part_gives_the_bits_of_the_cpu(name: str, apart: Callable[..., dict[str, Tensor]]) -> None:
    assert same_bits(apart("cpu", *CONFIGS[name]), apart(NAME, *CONFIGS[name]))


def test_a_stored_head_gives_the_bits_of_the_cpu(apart: Callable[..., dict[str, Tensor]], tmp_path: Path) -> None:
    source = tmp_path / "source"
    loop.run(tiny("rounds.total=1", "pack=off", "model.name=tiny"), source, console=False)
    stored = (f"model.name={source}", "model.head=stored", BODY)
    assert same_bits(apart("cpu", *stored), apart(NAME, *stored))


@pytest.mark.parametrize("kind", PACKS)
def test_packed_clients_give_the_bits_of_the_cpu(kind: str, apart: Callable[..., dict[str, Tensor]]) -> None:
    assert same_bits(apart("cpu", *PACKS[kind]), apart(NAME, *PACKS[kind]))


@pytest.mark.deploy
@pytest.mark.parametrize("name", MORE_CONFIGS)
def test_options_of_the_parts_give_the_bits_of_the_cpu(name: str, apart: Callable[..., dict[str, Tensor]]) -> None:
    assert same_bits(apart("cpu", *MORE_CONFIGS[name]), apart(NAME, *MORE_CONFIGS[name]))


# ---- commands --------------------------------------------------------------------------------------------------------

RUN = ["trainable.kind=last_blocks", "rounds.total=2", "pack=off"]
COMMANDS: dict[str, list[str]] = {
    "resume": ["resume", "RUN"],
    "evaluate": ["evaluate", "RUN", "--json"],
    "predict": ["predict", "RUN", "image.png", "--json"],
    "export": ["export", "RUN", "exported"],
    "profile": ["profile", "RUN"],
    "worth": ["worth", "RUN"],
    "unlearn": ["unlearn", "RUN", "--client", "1"],
    "centralized": ["centralized", *small.OVERRIDES, "centralized.kind=finetune", "centralized.epochs=1", "-q"],
    "find-lr": ["find-lr", *small.OVERRIDES, "--rates", "0.01,0.1", "--rounds", "1"],
    "attack": ["attack", *small.OVERRIDES, "--rules", "mean", "--attacks", "sign_flip", "-q"],
}
COMPARED = ("evaluate", "predict")
"""Commands whose output is numbers only; of the others it is enough that they finish."""


def invoke(*arguments: str) -> str:
    """What a command prints; it must succeed."""
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, f"{arguments[0]}: {done.output[-1000:]} {done.exception!r}"
    return done.output


@pytest.mark.slow
def test_every_command_finishes_and_prints_what_it_prints_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run made on one kind of device is used on the other, in both directions."""
    monkeypatch.chdir(tmp_path)
    Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16)).save("image.png")
    printed: dict[str, dict[str, str]] = {}
    digests = {}
    with without_pictures():
        for made_on, used_on in ((NAME, "cpu"), ("cpu", NAME)):
            folder = f"run-{made_on}"
            monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / f"cache-{made_on}"))
            invoke("run", *small.OVERRIDES, *RUN, f"device={made_on}", "--folder", folder, "-q")
            digests[made_on] = tensors_of(Path(folder))
            monkeypatch.setenv(devices.CHOICE, used_on)
            for name, arguments in COMMANDS.items():
                if used_on == NAME or name in (*COMPARED, "export", "resume"):
                    words = [folder if word == "RUN" else word for word in arguments]
                    words = [f"{word}-{used_on}" if word == "exported" else word for word in words]
                    printed.setdefault(name, {})[used_on] = invoke(*words)
            monkeypatch.delenv(devices.CHOICE)
    assert same_bits(digests[NAME], digests["cpu"])
    for name in COMPARED:
        assert printed[name][NAME] == printed[name]["cpu"], name
    exported = [Path(f"exported-{device}/model.safetensors").read_bytes() for device in (NAME, "cpu")]
    assert exported[0] == exported[1]


# ---- planted strays --------------------------------------------------------------------------------------------------


def left_behind(monkeypatch: pytest.MonkeyPatch, module: Any, name: str = "fetch") -> None:
    """Let a module keep on the device what it should bring to the host."""
    monkeypatch.setattr(module, name, lambda tensors: tensors)


def not_put(monkeypatch: pytest.MonkeyPatch, chosen: Callable[[Tensor], bool]) -> None:
    """Let some tensors stay on the host that belong on the device."""
    put = Device.put
    monkeypatch.setattr(Device, "put", lambda self, tensor: tensor if chosen(tensor) else put(self, tensor))


def draws_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedgraft.models.network import Dropout

    def forward(self: Any, values: Tensor) -> Tensor:
        if not self.training:
            return values
        return values * (torch.rand(values.shape, generator=self.generator, device=values.device) >= self.p)

    monkeypatch.setattr(Dropout, "forward", forward)


def host_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = property(lambda self: torch.bincount(self.labels, minlength=self.classes))
    monkeypatch.setattr(losses.LossContext, "counts", counts)


def host_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    gradient = Bound.gradient
    monkeypatch.setattr(Bound, "gradient", lambda self: gradient(self).cpu())


def host_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = batched._buffer
    monkeypatch.setattr(batched, "_buffer", lambda buffers, name, size, device=None: buffer(buffers, name, size))


def host_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "state_on", lambda optimizer, state, device: state)
    monkeypatch.setattr(Device, "making", lambda self: torch.device("cpu"))


def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGRAFT_START", "fork")


STRAYS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], tuple[str, ...] | str]] = {
    "a sparse index": (lambda patch: not_put(patch, lambda t: t.dtype == torch.int64 and t.dim() == 1), SPARSE),
    "labels of a batch": (lambda patch: not_put(patch, lambda t: t.dtype == torch.int64), (BODY,)),
    "features of a batch": (lambda patch: not_put(patch, lambda t: t.dim() == 4), ()),
    "a buffer of the batched product": (host_buffers, ()),
    "the anchor of Ditto": (lambda patch: patch.setattr(Device, "put_all", lambda self, t: dict(t)), "ditto"),
    "counts of classes": (host_counts, ("loss.class_weights=own", BODY)),
    "a gradient": (host_gradient, "fedprox"),
    "momentum": (host_state, (BODY, "local.optimizer=adamw")),
    "a generator of the host": (draws_on_the_device, ("model.dropout=0.1", BODY)),
    "numpy on scores": (
        lambda patch: left_behind(patch, choose),
        (*SPARSE, "trainable.sparse.strategy=lowest_magnitude"),
    ),
    "sums of squared gradients": (lambda patch: left_behind(patch, fisher, "fetch_all"), SPARSE),
    "an update that is sent": (lambda patch: left_behind(patch, local_training), "fedavg"),
    "evidence that is sent": (lambda patch: left_behind(patch, observe), "fedfisher"),
    "forked workers": (forked_workers, (BODY, "workers=2")),
}


@pytest.mark.parametrize("stray", STRAYS)
def test_planted_strays_are_caught(
    stray: str, apart: Callable[..., dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row passes in the tests above; with the stray it must not."""
    plant, row = STRAYS[stray]
    plant(monkeypatch)
    with pytest.raises((RuntimeError, TypeError, AssertionError, FedgraftError), match=r"device|cpu|plain tensor"):
        if isinstance(row, str):
            outcome(ROWS[row], NAME)
        else:
            apart(NAME, *row, fresh=True)
