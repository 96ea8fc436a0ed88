"""Hostile servers and hostile nodes over real Flower: the in-process tables of lies, one federation, many lies.

Bytes are counted where they leave the node: a refused request is answered with its reason and nothing else.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import deployed_lies
from tests.support.deployed_lies import HUGE, LIAR, NAMES, VICTIM, Meter, Watch
from tests.support.flower_local import LocalFederation
from tests.support.hostile import LIES
from tests.support.tiny import same_bits, tensors_of, tiny, without_pictures

from fedgraft.core.messages import Request
from fedgraft.deploy.mailbox import LEAST_RESPONSE_LIMIT, response_too_large
from fedgraft.runs import loop as running
from fedgraft.runs.engines import Engines
from fedgraft.runs.loop import run

pytestmark = [pytest.mark.slow, pytest.mark.deploy]
ROOT = Path(__file__).parents[2]
FIVE = ["partition.clients=5", "model.head=random", "trainable.kind=everything", "algorithm.weighting=uniform"]
FIVE += ["rounds.total=10", "rounds.evaluate_every=0", "rounds.test=false", "engine=reference", "local.lr=0.05"]
PRIVATE = ["privacy.dp.noise=1.0", "privacy.dp.clip=1.0", "rounds.sampling=poisson", "rounds.fraction=0.8"]
STAGES = {
    "clear": FIVE,
    "secure": [*FIVE, "privacy.aggregation=secure"],
    "private": [*FIVE, *PRIVATE],
    "secure_private": [*FIVE, *PRIVATE, "privacy.aggregation=secure"],
    "secure-2": [*FIVE, "privacy.aggregation=secure", "privacy.degree=2"],
    "secure_private-2": [*FIVE, *PRIVATE, "privacy.aggregation=secure", "privacy.degree=2"],
}


def path(*more: str) -> str:
    return os.pathsep.join([str(ROOT / "tests/support/hostile_site"), str(ROOT / "src"), str(ROOT), *more])


def local(folder: Path, **more: str) -> LocalFederation:
    pytest.importorskip("flwr", reason="needs the extra 'flower'")
    return LocalFederation(folder, 5, None, PYTHONPATH=path(os.environ.get("PYTHONPATH", "")), **more)


def submitted(federation: LocalFederation, name: str, overrides: list[str], seconds: float = 1800) -> Path:
    folder = federation.folder / name
    number = federation.submit(tiny(*overrides, f"name={name}"), folder)
    assert federation.wait(number, seconds, 2.0) == "completed", (federation.status(number), federation.logs())
    return folder


class Attacks:
    """The outcome of every attack of the hostile server, and the traffic at the node's port meanwhile."""

    def __init__(self, federation: LocalFederation, meter: Meter, watch: Watch) -> None:
        self.meter = meter
        self.watch = watch
        self.outcomes: dict[str, list[dict[str, Any]]] = {}
        for name, overrides in STAGES.items():
            folder = submitted(federation, name, overrides)
            self.outcomes[name] = json.loads((folder / "outcomes.json").read_text())


@pytest.fixture(scope="module")
def attacks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacks]:
    root = tmp_path_factory.mktemp("hostile")
    home = root / f"node{VICTIM}" / f"node{VICTIM}.home"
    federation = local(root, HOSTILE="server", VICTIM_HOME=str(home))
    (home.parent / "policy.toml").write_text("request_megabytes = 32\n")
    try:
        federation.start_link()
        assert federation.server is not None
        meter = Meter(federation.server.port, federation.fed.certificates)
        federation.route = f"127.0.0.1:{meter.port}"
        federation.start_node(VICTIM)
        yield Attacks(federation, meter, Watch(federation.processes[f"node{VICTIM}"].pid))
    finally:
        federation.__exit__()


def test_every_lie_of_a_server_is_refused_by_name_over_flower(attacks: Attacks) -> None:
    names = set()
    for stage, outcomes in attacks.outcomes.items():
        for outcome in outcomes:
            names.add(outcome["name"])
            assert outcome["refused"], (stage, outcome["name"], outcome["reason"])
    assert len(names & set(LIES)) == len(LIES) - len(deployed_lies.UNPROTECTED)
    assert sum(map(len, attacks.outcomes.values())) > 120


def test_nothing_but_the_reason_leaves_the_node(attacks: Attacks) -> None:
    """Socket bytes: a refusal's envelope is of one size, whatever the request; an honest response carries the model."""
    around = []
    for outcomes in attacks.outcomes.values():
        for outcome in outcomes:
            for began, ended, length in outcome["refusals"]:
                around.append(attacks.meter.pushed(began, ended) - length)
    honest = next(outcome for outcome in attacks.outcomes["clear"] if outcome["name"] == "honest")
    began, ended, update = honest["bytes"]
    assert attacks.meter.pushed(began, ended) > update
    assert len(around) > 120 and min(around) > 0 and max(around) - min(around) < 256, (min(around), max(around))


def test_a_request_of_300_mb_is_refused_before_it_is_fetched(attacks: Attacks) -> None:
    large = next(outcome for outcome in attacks.outcomes["clear"] if outcome["name"] == "300 MB")
    assert attacks.watch.rise(*large["when"]) < 2 * (32 << 20)


# ---- a hostile node --------------------------------------------------------------------------------------------------

THREE = ["partition.clients=3", "model.head=random", "trainable.kind=everything", "personal.evaluate=always"]
THREE += ["rounds.minimum_answers=2", "rounds.evaluate_every=1", "rounds.total=27", "engine=reference"]


class Without(Engines):
    """The same run in one process, in which the liar never answers."""

    def training(self, *parts: Any) -> Any:
        engine = super().training(*parts)
        real = engine.exchange

        def exchange(requests: list[Request]) -> Any:
            return real([request for request in requests if request.client != LIAR])

        engine.exchange = exchange  # type: ignore[method-assign]
        return engine


def model_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the model and the server rule's state of a run."""
    return {name: tensor for name, tensor in tensors_of(folder).items() if name.startswith(("vector", "rule/"))}


def test_a_run_with_a_lying_node_ends_as_without_it(tmp_path: Path) -> None:
    """27 lies about training and 23 about evaluation, one of each a round, in one deployed run."""
    assert len(NAMES) >= 50
    federation = local(tmp_path, HOSTILE="node")
    try:
        federation.start_link()
        for client in range(3):
            federation.start_node(client)
        folder = submitted(federation, "there", THREE)
    finally:
        federation.__exit__()
    with pytest.MonkeyPatch.context() as patch, without_pictures():
        patch.setattr(running, "Engines", Without)
        run(tiny(*THREE, "name=there"), tmp_path / "here", console=False)
    there = model_tensors(folder)
    assert same_bits(there, model_tensors(tmp_path / "here"))
    assert not torch.equal(there["vector"], torch.zeros_like(there["vector"]))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(LIAR in {drop["client"] for drop in line["dropped"]} for line in lines if line["round"])


@pytest.mark.parametrize("bounded", [True, False])
def test_a_response_of_300_mb_stays_outside(tmp_path: Path, bounded: bool) -> None:
    """At the port: the server's memory rises by less than twice the stated limit; in the broken variant by more."""
    overrides = ["partition.clients=3", "model.head=random", "rounds.total=8", "engine=reference"]
    federation = local(tmp_path, HOSTILE="node", LARGE="1", **({} if bounded else {"UNBOUNDED": "1"}))
    try:
        federation.start_link()
        assert federation.server is not None
        watch = Watch(federation.server.pid)
        for client in range(3):
            federation.start_node(client)
        folder = federation.folder / "large"
        number = federation.submit(tiny(*overrides, "name=large"), folder)
        marks = list[float]()
        until = time.monotonic() + 1800
        while (
            len(marks) < 2 and time.monotonic() < until
        ):  # from the round before the large response to the one after it
            time.sleep(0.2)
            path = folder / "metrics.jsonl"
            rounds = path.read_text().count("\n") - 1 if path.is_file() else 0
            if rounds >= deployed_lies.AT_LARGE + (3 if marks else 0):
                marks.append(time.monotonic())
        assert federation.wait(number, 600, 2.0) == "completed", federation.logs()
    finally:
        federation.__exit__()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    reasons = {}
    for line in lines:
        reasons[line["round"]] = [drop["reason"] for drop in line.get("dropped", ()) if drop["client"] == LIAR]
    (reason,) = reasons[deployed_lies.AT_LARGE + 1]
    (bomb,) = reasons[deployed_lies.AT_LARGE + 2]
    rise = watch.rise(*marks)
    print(
        f"rise {rise >> 20} MB of a limit of {LEAST_RESPONSE_LIMIT >> 20} MB, response {HUGE >> 20} MB: {reason}",
        file=sys.stderr,
    )
    assert (rise < 2 * LEAST_RESPONSE_LIMIT) == bounded
    for told in (reason, bomb):  # the reason is the product: it names why the client was dropped
        assert (response_too_large(LEAST_RESPONSE_LIMIT) in told) == bounded
