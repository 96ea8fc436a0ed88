"""What a node keeps of its work: encrypted under its key, for the very same request; the same bytes after a kill."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.machines import Machines
from tests.support.tiny import Open, tiny

from fedgraft.config.load import to_toml
from fedgraft.core.messages import Request, pack
from fedgraft.deploy import node, work_store
from fedgraft.deploy.keys import make_node_key
from fedgraft.deploy.node import NodeWorker
from fedgraft.deploy.node_loop import NodeLoop
from fedgraft.deploy.process import FINISHED_ANSWER, NODE_STATE_VARIABLE
from fedgraft.deploy.server_link import AnswerRefused, Delivery, Withdrawn
from fedgraft.deploy.work_store import StoredProgress, WorkStore, work_name
from fedgraft.engines.flower.node_link import WorkerRequest, WorkerResponse
from fedgraft.engines.flower.transport import REQUEST

TENSORS = {"values": torch.arange(1000, dtype=torch.float32), "numbers": torch.zeros(3)}


@pytest.fixture
def store(tmp_path: Path) -> WorkStore:
    private, _ = make_node_key(tmp_path, "north")
    return WorkStore(tmp_path / "work", private, "a request")


def test_work_is_read_again_and_nobody_else_can(store: WorkStore, tmp_path: Path) -> None:
    store.save("progress-train", TENSORS)
    file = tmp_path / "work" / "progress-train"
    assert file.stat().st_mode & 0o777 == 0o600
    loaded = store.load("progress-train")
    assert loaded is not None and torch.equal(loaded["values"], TENSORS["values"])
    raw = file.read_bytes()
    assert TENSORS["values"].numpy().tobytes()[400:440] not in raw and b"values" not in raw
    other, _ = make_node_key(tmp_path / "other", "other")
    assert replace(store, key=other).load("progress-train") is None


@pytest.mark.parametrize("change", ["request", "file", "bit", "cut", "missing"])
def test_what_is_damaged_or_of_another_request_counts_as_missing(store: WorkStore, change: str) -> None:
    store.save("progress-train", TENSORS)
    file = store.folder / "progress-train"
    data = bytearray(file.read_bytes())
    if change == "request":
        store = replace(store, name="another")
    elif change == "file":
        file.rename(store.folder / "progress-personal")
        assert store.load("progress-personal") is None
    elif change == "bit":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif change == "cut":
        file.write_bytes(data[:5])
    else:
        file.unlink()
    assert store.load("progress-train") is None


def test_progress_is_saved_at_intervals_and_forgotten(store: WorkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(work_store.time, "monotonic", lambda: now[0])
    progress = store.progress("train")
    assert isinstance(progress, StoredProgress) and progress.load() is None
    now[0] = 59.0
    assert not progress.due()
    now[0] = 60.0
    assert progress.due()
    progress.save(TENSORS)
    assert not progress.due() and store.progress("train").load() is not None
    store.forget_progress()
    assert progress.load() is None


def test_the_name_of_work_follows_from_all_that_it_depends_on() -> None:
    request = WorkerRequest("config", "folder", 1, 7, after=2, becomes=3, digest="d", classes=("a", "b"), request=b"r")
    changes = [{"config": "x"}, {"folder": "x"}, {"client": 2}, {"after": 1}, {"becomes": 4}, {"digest": "x"}]
    others = [replace(request, **change) for change in changes]
    others += [replace(request, classes=("ab",)), replace(request, request=b"x"), replace(request, data="x")]
    names = {work_name(one, b"rules") for one in [request, *others]} | {work_name(request, b"other rules")}
    assert len(names) == len(others) + 2
    assert work_name(replace(request, run=8), b"rules") == work_name(request, b"rules")


class Killed(BaseException):
    """The worker process ended here."""


def training_request(machines: Machines, job: Open) -> WorkerRequest:
    state = job.begin()
    settings = {"lr": 0.02}
    request = Request(job.setup.config.digest, 0, 0, "train", job.space.digest, state.vector, {}, settings)
    opened = pack(Request(job.setup.federation.run, -1, 0, "open", auxiliary=job.opened.message(False)))
    digest = hashlib.blake2b(opened, digest_size=12).hexdigest()
    return replace(machines.requests[0], request=pack(request), opened=opened, digest=digest, after=0, becomes=1)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False])
def test_a_killed_worker_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    """Killed three times inside one training: the same bytes, and no step is done twice; all are, without it."""
    words = ["local.steps=12", "model.head=random", "trainable.kind=everything", "local.checkpoint_seconds=1e-9"]
    config = tiny(*words)
    machines = Machines(config, tmp_path / "run", tmp_path, monkeypatch)
    monkeypatch.setenv(NODE_STATE_VARIABLE, str(machines.home(0)))
    request = training_request(machines, Open(config))
    assert to_toml(config) == request.config
    whole = NodeWorker().carry_out(replace(request, folder="another"), {})
    save = StoredProgress.save
    steps = [0]
    deaths = [4, 7, 9]

    def dying(progress: StoredProgress, tensors: dict[str, torch.Tensor]) -> None:
        if kept:
            save(progress, tensors)
        steps[0] += 1
        if deaths and steps[0] == deaths[0]:
            deaths.pop(0)
            raise Killed

    monkeypatch.setattr(StoredProgress, "save", dying)
    answer = WorkerResponse()
    for _ in range(4):
        try:
            answer = NodeWorker().carry_out(request, {})
            break
        except Killed:
            continue
    assert answer.response == whole.response
    assert (steps[0] == 12 + 3) == kept  # each death repeats the saving before its step, and nothing else
    assert not list((machines.home(0) / "work").glob("progress-*"))


@pytest.mark.slow
@pytest.mark.parametrize("seconds", ["1e-9", "1000"])
def test_a_finished_answer_is_sent_again_and_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: str
) -> None:
    """Killed after the training and before the answer was sent: nothing is trained again, if that took an interval."""
    config = tiny("local.steps=3", "model.head=random", f"local.checkpoint_seconds={seconds}")
    machines = Machines(config, tmp_path / "run", tmp_path, monkeypatch)
    home = machines.home(0)
    monkeypatch.setenv(NODE_STATE_VARIABLE, str(home))
    request = training_request(machines, Open(config))
    trained = []
    honest = node.handle_or_refuse

    def counting(*arguments: Any) -> Any:
        trained.append(arguments)
        return honest(*arguments)

    monkeypatch.setattr(node, "handle_or_refuse", counting)
    first = NodeWorker().carry_out(request, {})
    again = NodeWorker().carry_out(request, {})
    assert again == first
    keeps = seconds == "1e-9"
    assert len(trained) == (1 if keeps else 2)
    assert (home / FINISHED_ANSWER).exists() == keeps
    if keeps:
        assert (home / FINISHED_ANSWER).stat().st_mode & 0o777 == 0o600
        assert first.response[200:260] not in (home / FINISHED_ANSWER).read_bytes()
        NodeWorker().carry_out(replace(request, becomes=2), {})  # another request is carried out
        assert len(trained) == 2


def test_an_answer_that_was_sent_is_given_once(tmp_path: Path) -> None:
    """The file goes when the server has the answer, or no longer wants it: the same request again is counted again."""
    for ending in (None, Withdrawn(), AnswerRefused("too large")):
        (tmp_path / "work").mkdir(exist_ok=True)
        file = tmp_path / FINISHED_ANSWER
        file.write_bytes(b"sealed")

        def send(*arguments: Any, file: Path = file, ending: Exception | None = ending) -> None:
            assert file.exists()  # a link that breaks meanwhile finds it
            if ending is not None:
                raise ending

        link = SimpleNamespace(answer=send)
        loop = NodeLoop(link, 0, "", "", tmp_path, lambda request: WorkerResponse(b"answer", 1))  # type: ignore[arg-type]
        loop.answer(Delivery("m1", REQUEST, {}, {}))
        assert not file.exists()
