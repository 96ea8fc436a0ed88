"""The signed log of rounds: an honest folder passes, resumed or not; what was changed or taken out is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fedgraft.cli.main import app
from fedgraft.config.load import load
from fedgraft.runs import loop as running
from fedgraft.runs.round_log import NAME, TensorDigests, state_digest, verify_log
from fedgraft.runs.secrets import secret_path

OVERRIDES = [
    "model.name=tiny",
    "data.source=digits",
    "data.image_size=16",
    "data.limit=120",
    "partition.clients=4",
    "rounds.total=4",
    "rounds.checkpoint_every=1",
    "rounds.evaluate_every=2",
    "model.head=random",
    "workers=1",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("log") / "whole"
    running.run(load(None, OVERRIDES), folder, console=False)
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def edit(folder: Path, number: int, change: str) -> None:
    lines = (folder / NAME).read_text().splitlines(keepends=True)
    if change == "remove":
        del lines[number]
    else:
        line = json.loads(lines[number])
        line["entry"]["updates"] = {"0": "00"}
        lines[number] = json.dumps(line, sort_keys=True, separators=(",", ":")) + "\n"
    (folder / NAME).write_text("".join(lines))


def test_an_honest_folder_passes_and_says_who_signed(folder: Path) -> None:
    about_the_log, wrong = verify_log(folder)
    assert not wrong and about_the_log.startswith("4 rounds, signed by")
    assert verify_log(folder, "0" * 32)[1] == [f"the log is signed with another key: {about_the_log.split()[-1]}"]
    entry = json.loads((folder / NAME).read_text().splitlines()[-1])["entry"]
    assert len(entry["updates"]) == 2 and entry["protection"] == "none"


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda f: edit(f, 3, "change"), "line 4 of rounds.log was changed"),
        (lambda f: edit(f, 3, "remove"), "round 2 is missing from the log"),
        (lambda f: edit(f, 5, "remove"), "round 4 is in metrics.jsonl and not in the log"),
        (lambda f: _swap_checkpoint(f), "is not the state that the log tells of"),
        (lambda f: _swap_metrics(f), "the line of round 2 in metrics.jsonl was changed"),
        (lambda f: _resign(f), "is not signed by the run's key"),
    ],
)
def test_what_was_tampered_with_is_named(folder: Path, spoil: object, named: str) -> None:
    spoil(folder)  # type: ignore[operator]
    assert any(named in sentence for sentence in verify_log(folder)[1])
    done = CliRunner().invoke(app, ["verify", str(folder)])
    assert done.exit_code != 0


def _swap_checkpoint(folder: Path) -> None:
    from fedgraft.runs import checkpoint

    last = checkpoint.load(checkpoint.listing(folder / "checkpoints")[-1])
    tensors = {**last.tensors, "vector": last.tensors["vector"] + 1}
    checkpoint.save(folder / "checkpoints", last.round, tensors, last.meta)


def _swap_metrics(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    lines[2]["accuracy"] = 0.99
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _resign(folder: Path) -> None:
    """A whole new chain over the changed lines, by somebody without the key."""
    import hashlib

    lines, before, texts = [json.loads(t) for t in (folder / NAME).read_text().splitlines()], "", []
    for line in lines:
        entry = {**line["entry"], **({"updates": {}} if "updates" in line["entry"] else {})}
        text = json.dumps(entry, sort_keys=True, separators=(",", ":"))
        before = hashlib.sha256((before + text).encode()).hexdigest()
        texts.append(json.dumps({"entry": entry, "hash": before, "signature": line["signature"]}) + "\n")
    (folder / NAME).write_text("".join(texts))


def test_a_resumed_run_has_the_same_log(finished: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "again"))
    shutil.copy(secret_path(finished), secret_path(folder))
    for path in sorted((folder / "checkpoints").iterdir())[-2:]:
        path.unlink()
    state = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**state, "status": "interrupted"}))
    running.run(load(None, OVERRIDES), folder, console=False)
    assert (folder / NAME).read_text() == (finished / NAME).read_text() and not verify_log(folder)[1]
    assert secret_path(folder).stat().st_mode & 0o077 == 0
    assert all(p.stat().st_mode & 0o077 == 0 for p in (folder / "checkpoints").iterdir())


def test_remembered_digests_see_every_change() -> None:
    """Only tensors that are new or were written to are read again, and the digest is that of reading all."""
    known, tensors = TensorDigests(), {"vector": torch.zeros(4), "rule/m": torch.ones(2), "personal/3": torch.ones(4)}
    first = state_digest(tensors, known)
    assert first == state_digest(tensors) == state_digest(tensors, known) and len(known) == 3
    tensors["vector"][1] = 5  # written to
    second = state_digest(tensors, known)
    assert second == state_digest(tensors) != first
    tensors["personal/3"] = torch.zeros(4)  # another one
    assert state_digest(tensors, known) == state_digest(tensors) != second
    assert state_digest({**tensors, "memory/1/x": torch.ones(1)}, known) == state_digest(tensors)
