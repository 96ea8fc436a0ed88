"""`fedgraft edit ...`: what they write, what they print, what they refuse."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import tiny
from tests.support.tiny import without_pictures
from torch import Tensor

from fedgraft.config.load import load
from fedgraft.core.errors import FedgraftError
from fedgraft.core.network_digest import digest
from fedgraft.edit import edit_file as task_file
from fedgraft.models.backbones import load_network
from fedgraft.models.network import VisionNetwork
from fedgraft.runs import edit_files
from fedgraft.runs import loop as running
from fedgraft.runs.adapted import adapted
from fedgraft.runs.deliver import export_run
from fedgraft.runs.edit_files import edit_of_run
from fedgraft.runs.mask_figures import whole_mask

with warnings.catch_warnings():  # typer's own import of click warns with some pairs of versions
    warnings.simplefilter("ignore", DeprecationWarning)
    import typer
    from typer.testing import CliRunner

    from fedgraft.cli import edit as cli_edit

OVERRIDES = [
    *tiny.OVERRIDES,
    "model.head=random",
    "trainable.sparse.sparsity=0.9",
    "trainable.sparse.samples=60",
    "trainable.sparse.rounds=2",
    "trainable.head_too=false",
]
KINDS = {
    "head": ["trainable.kind=head"],
    "body": ["trainable.kind=body", "local.lr=0.002"],
    "sparse": ["trainable.kind=sparse", "trainable.sparse.strategy=most_sensitive"],
    "masked_head": ["trainable.kind=sparse", "trainable.head_too=true", "trainable.sparse.strategy=random"],
    "own": ["trainable.kind=sparse", "trainable.sparse.per_client=true"],
    "lora": ["trainable.kind=lora", "trainable.lora.rank=2", "local.lr=0.005"],
    "stack": ["trainable.kind=lora", "trainable.lora.rank=2", "trainable.lora.aggregate=stack", "local.lr=0.005"],
    "ridge": ["trainable.kind=head", "model.head=ridge", "local.lr=1e-6"],
    "other_backbone": ["trainable.kind=body", "seed=1", "local.lr=0.002"],
}
APP = typer.Typer()
APP.add_typer(cli_edit.app, name="edit")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One finished run of each kind."""
    root = tmp_path_factory.mktemp("runs")
    with without_pictures():
        for kind, overrides in KINDS.items():
            running.run(load(None, [*OVERRIDES, *overrides]), root / kind, console=False)
            if kind != "own":
                task_file.save_edit(edit_of_run(root / kind, last=kind == "ridge"), root / f"{kind}.edit")
    return root


def call(*overrides: object) -> str:
    """What a command prints."""
    result = CliRunner().invoke(APP, [str(word) for word in overrides], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def refused(*overrides: object) -> str:
    """The sentence a command refuses with."""
    result = CliRunner().invoke(APP, [str(word) for word in overrides])
    assert isinstance(result.exception, FedgraftError), result.output
    text = str(result.exception)
    assert "\n" not in text
    return text


def images(folder: Path) -> Tensor:
    task = adapted(folder).setup.task
    return task.eval_images.batch(task.data.validation_rows[:20])


def logits(folder: Path, train_images: Tensor) -> Tensor:
    with torch.no_grad():
        return load_network(folder, None).eval()(train_images)


def test_registering_is_light() -> None:
    text = (
        "import sys, typer; from fedgraft.cli import edit as cli_edit; app = typer.Typer(); "
        "app.add_typer(cli_edit.app, name='edit'); "
        "heavy = {'torch', 'numpy', 'matplotlib', 'pydantic'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", text], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["head", "body", "sparse", "masked_head", "lora", "stack"])
def test_an_applied_edit_is_the_exported_run(kind: str, runs: Path, tmp_path: Path) -> None:
    assert "written" in call("edit", "save", runs / kind, tmp_path / "it.edit")
    assert (tmp_path / "it.edit").read_bytes() == (runs / f"{kind}.edit").read_bytes()
    call("edit", "apply", tmp_path / "it.edit", "--model", runs / kind, "--to", tmp_path / "model")
    export_run(runs / kind, tmp_path / "exported")
    train_images = images(runs / kind)
    applied, exported = logits(tmp_path / "model", train_images), logits(tmp_path / "exported", train_images)
    torch.testing.assert_close(applied, exported, rtol=1e-4, atol=1e-4)
    call("edit", "apply", tmp_path / "it.edit", "--model", runs / kind, "--to", tmp_path / "base", "--scale", "0")
    setup = adapted(runs / kind)
    with torch.no_grad():
        base = setup.base().eval()(train_images)
    assert not torch.allclose(applied, base, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(tmp_path / "base", train_images), base, rtol=1e-6, atol=1e-6)


def test_edits_are_bound_to_the_backbone_or_to_the_whole(runs: Path) -> None:
    scopes = {kind: task_file.load_edit(runs / f"{kind}.edit").scope for kind in KINDS if kind != "own"}
    backbone = dict.fromkeys(("body", "sparse", "lora", "stack", "other_backbone"), "backbone.")
    assert scopes == {**backbone, "head": "", "masked_head": "", "ridge": ""}
    sizes = {kind: (runs / f"{kind}.edit").stat().st_size for kind in ("body", "sparse")}
    assert sizes["sparse"] < sizes["body"] / 5
    network = load_network("tiny", 7, 16)  # the same backbone under another head
    edit = task_file.load_edit(runs / "sparse.edit")
    assert digest(network, scope="backbone.") == edit.base != task_file.load_edit(runs / "other_backbone.edit").base


@pytest.mark.slow
def test_a_backbone_edit_fits_the_named_network(runs: Path, tmp_path: Path) -> None:
    named = ["--model", "tiny", "--image-size", "16"]
    call("edit", "apply", runs / "sparse.edit", *named, "--classes", "4", "--to", tmp_path / "a")
    assert load_network(tmp_path / "a", None).classes == 4
    sentence = refused("edit", "apply", runs / "sparse.edit", *named, "--to", tmp_path / "b")
    assert "--classes" in sentence and "run folder" in sentence
    call("edit", "apply", runs / "head.edit", *named, "--to", tmp_path / "drawn")  # a head drawn from the same seed
    call("edit", "apply", runs / "lora.edit", "--model", runs / "body", "--to", tmp_path / "c")  # another run's head
    edited = load_network(tmp_path / "c", None)
    call("edit", "apply", runs / "lora.edit", "--model", runs / "body", "--to", tmp_path / "d", "--scale", "0")
    call("edit", "apply", runs / "lora.edit", "--model", tmp_path / "d", "--to", tmp_path / "e")  # a folder as base
    again = load_network(tmp_path / "e", None)
    assert all(torch.equal(p, again.get_parameter(n)) for n, p in edited.named_parameters())


def test_bases_that_do_not_fit(runs: Path, tmp_path: Path) -> None:
    to = ["--to", tmp_path / "model"]
    assert "was made for the base" in refused(
        "edit", "apply", runs / "sparse.edit", "--model", runs / "other_backbone", *to
    )
    call("edit", "apply", runs / "sparse.edit", "--model", runs / "sparse", "--to", tmp_path / "once")
    twice = refused("edit", "apply", runs / "sparse.edit", "--model", tmp_path / "once", *to)
    assert "unedited" in twice
    head = refused("edit", "apply", runs / "ridge.edit", "--model", "tiny", "--image-size", "16", *to)
    assert "was made for the base" in head  # the head a run begins with belongs to its base
    assert "different bases" in refused(
        "edit", "add", runs / "sparse.edit", runs / "other_backbone.edit", "--to", tmp_path / "x"
    )
    assert "was made for" in refused("edit", "sweep", runs / "body.edit", runs / "other_backbone")
    assert not (tmp_path / "model").exists() and not (tmp_path / "x").exists()


def test_files_that_are_no_edits(runs: Path, tmp_path: Path) -> None:
    assert "cannot be read" in refused("edit", "inspect", tmp_path / "none.edit")
    (tmp_path / "text.edit").write_text("hello")
    assert "not an edit file" in refused("edit", "inspect", tmp_path / "text.edit")
    data = bytearray((runs / "sparse.edit").read_bytes())
    data[-1] ^= 1
    (tmp_path / "flipped.edit").write_bytes(data)
    assert "damaged" in refused("edit", "negate", tmp_path / "flipped.edit", "--to", tmp_path / "y")
    assert "no run in" in refused("edit", "save", tmp_path, tmp_path / "z")
    assert "commas" in refused("edit", "sweep", runs / "body.edit", runs / "body", "--lambdas", "a;b")


def test_adding_and_negating(runs: Path, tmp_path: Path) -> None:
    call("edit", "add", runs / "sparse.edit", runs / "lora.edit", "--scales", "1,0.5", "--to", tmp_path / "sum.edit")
    call("edit", "negate", runs / "sparse.edit", "--to", tmp_path / "minus.edit")
    one, two, total, minus = (
        task_file.load_edit(path)
        for path in (runs / "sparse.edit", runs / "lora.edit", tmp_path / "sum.edit", tmp_path / "minus.edit")
    )
    assert torch.equal(minus.update(), -one.update())
    network = load_network("tiny", 10, 16)
    start = {name: p.detach().clone() for name, p in network.named_parameters()}
    total.space.scatter(total.space.gather(network) + total.update(), network)
    wanted = {name: torch.zeros_like(p, dtype=torch.float64).view(-1) for name, p in start.items()}
    for edit, scale in ((one, 1.0), (two, 0.5)):
        for part, begin, end in edit.space.ranges:
            where = slice(None) if part.index is None else part.index
            wanted[part.name][where] += scale * edit.update()[begin:end].double()
    for name, p in network.named_parameters():
        torch.testing.assert_close((p - start[name]).double().view(-1), wanted[name], rtol=1e-4, atol=1e-7)
    assert "3 scales" in refused("edit", "add", runs / "sparse.edit", "--scales", "1,2,3", "--to", tmp_path / "no")
    call("edit", "add", runs / "sparse.edit", tmp_path / "minus.edit", "--to", tmp_path / "zero.edit")
    assert not task_file.load_edit(tmp_path / "zero.edit").values.any()


def test_fisher_information_is_of_the_model_that_the_edit_is_of(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its last round where the edit is of that (the best of this run is its start), also from a file of halves."""
    call("edit", "save", runs / "ridge", tmp_path / "half.edit", "--half", "--last")
    edit, seen = task_file.load_edit(runs / "ridge.edit"), []
    real = edit_files.squared_gradients

    def watched(network: VisionNetwork, *rest: Any) -> Tensor:
        seen.append(edit.space.gather(network) - edit.space.gather(adapted(runs / "ridge").base()))
        return real(network, *rest)

    monkeypatch.setattr(edit_files, "squared_gradients", watched)
    both = [runs / "ridge.edit", tmp_path / "half.edit"]
    of = [word for _ in both for word in ("--runs", runs / "ridge")]
    call("edit", "add", *both, "--how", "fisher", *of, "--to", tmp_path / "mean.edit")
    assert len(seen) == 2 and all(torch.equal(values, edit.values) for values in seen)


def test_fisher_refuses_a_run_that_is_not_the_edits_own(runs: Path, tmp_path: Path) -> None:
    call("edit", "add", runs / "body.edit", runs / "sparse.edit", "--to", tmp_path / "sum.edit")
    for kind, first in (
        ("body", runs / "body.edit"),
        ("other_backbone", runs / "body.edit"),
        ("body", tmp_path / "sum.edit"),
    ):
        of = ["--runs", runs / kind, "--runs", runs / "body"]
        sentence = refused("edit", "add", first, runs / "sparse.edit", "--how", "fisher", *of, "--to", tmp_path / "x")
        assert "is not the run of the edit" in sentence and not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("ties --share 0", "greater than 0, not 0.0"),
        ("ties --share 1.1", "not 1.1"),
        ("ties --share nan", "finite"),
        ("dare --share 1", "less than 1, not 1.0"),
        ("dare --share -0.1", "not -0.1"),
        ("sum --share 0.3", "has no --share, which is for ties and dare"),
        ("fisher --share 0.3", "has no --share"),
        ("sum --seed 0", "has no --seed"),
        ("ties --seed 1", "has no --seed"),
        ("dare --runs x", "has no --runs"),
        ("slerp", "choose sum, ties, dare, fisher"),
        ("ties --scales -1,2", "none below 0"),
        ("dare --scales 0,0", "not only 0"),
        ("fisher", "give --runs"),
    ],
)
def test_ways_of_merging_refuse_what_they_do_not_have(words: str, told: str, runs: Path, tmp_path: Path) -> None:
    both = [runs / "body.edit", runs / "sparse.edit"]
    assert told in refused("edit", "add", *both, "--to", tmp_path / "x", "--how", *words.split())
    assert not (tmp_path / "x").exists()


def test_an_empty_edit_is_refused(runs: Path, tmp_path: Path) -> None:
    sentence = refused("edit", "save", runs / "ridge", tmp_path / "none.edit")  # nothing beat the head it began with
    assert "began with" in sentence and "--last" in sentence and not (tmp_path / "none.edit").exists()
    call("edit", "save", runs / "ridge", tmp_path / "last.edit", "--last")
    assert task_file.load_edit(tmp_path / "last.edit").values.any()


def test_inspecting_and_halving(runs: Path, tmp_path: Path) -> None:
    text = call("edit", "inspect", runs / "sparse.edit")
    edit = task_file.load_edit(runs / "sparse.edit")
    assert text.startswith("sparse: ") and f"{edit.space.size} coordinates" in text and "backbone.layers.1" in text
    call("edit", "save", runs / "sparse", tmp_path / "half.edit", "--half")
    half = task_file.load_edit(tmp_path / "half.edit")
    assert (tmp_path / "half.edit").stat().st_size < 0.75 * (runs / "sparse.edit").stat().st_size
    torch.testing.assert_close(half.values, edit.values, rtol=1e-3, atol=1e-3 * float(edit.values.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["head", "lora", "masked_head"])
def test_sweeping_strengths(kind: str, runs: Path, tmp_path: Path) -> None:
    figure = tmp_path / "sweep.png"
    text = call("edit", "sweep", runs / f"{kind}.edit", runs / kind, "--lambdas", "0,0.5,1", "--out", figure)
    rows = [line.split() for line in text.splitlines() if line.startswith("lambda")]
    assert [float(row[1]) for row in rows] == [0, 0.5, 1] and figure.stat().st_size > 5000
    record = running.RunFolder.open(runs / kind)
    best = record.summary()["validation"]["accuracy"]
    assert float(rows[-1][3]) == pytest.approx(100 * best, abs=0.01)  # strength 1 is the run's own best model


@pytest.mark.slow
def test_figures(runs: Path, tmp_path: Path) -> None:
    kinds = ["sparse", "masked_head", "own", "lora", "body"]
    text = call("edit", "figures", *(runs / kind for kind in kinds), "--out", tmp_path / "figures")
    made = {Path(line).name for line in text.splitlines()}
    assert made == {
        "density_by_layer.png",
        "density_by_kind.png",
        "overlap_of_runs.png",
        "overlap_of_clients_own.png",
        "accuracy_by_round.png",
        "loss_by_round.png",
        "accuracy_by_traffic.png",
    }
    assert all((tmp_path / "figures" / name).stat().st_size > 5000 for name in made)
    alone = call("edit", "figures", runs / "lora", "--out", tmp_path / "one").split()
    assert {Path(line).name for line in alone} == {
        "accuracy_by_round.png",
        "loss_by_round.png",
        "accuracy_by_traffic.png",
    }


def test_a_run_as_a_mask(runs: Path) -> None:
    setup = adapted(runs / "masked_head")
    mask, chosen_ones = whole_mask(setup.network, setup.opened.space), setup.opened.trainable.mask
    assert chosen_ones is not None and mask.count == chosen_ones.count
    assert mask.total == sum(p.numel() for p in setup.network.parameters())
    assert all(torch.equal(mask[name], chosen) for name, chosen in chosen_ones.items())
    assert setup.setup.algorithm.trainable.label == "random 90 %"
    assert adapted(runs / "lora").setup.algorithm.trainable.label == "LoRA r=2 mean"
