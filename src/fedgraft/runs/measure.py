"""How a model is measured: on the server's images, by sums from clients that hold images out, or client by client.

Where the run asks for metrics, or chooses its best round by one, the sums of `local.scores` are counted along. Clients
far away send these sums; under secure aggregation only their total is opened, unless `personal.evaluate` lets every
client tell of its own images.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedgraft.client.actions import action_named
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import Request, Response, Scalar
from fedgraft.core.protocols import Examples
from fedgraft.core.state import ServerState
from fedgraft.metrics import metrics, scores
from fedgraft.metrics.evaluate import Evaluation, evaluate_with_sums, evaluation_of
from fedgraft.runs.head_init import summed_counts
from fedgraft.runs.open_run import OpenRun
from fedgraft.runs.setup import RunSetup
from fedgraft.server.collect import Engine
from fedgraft.server.example_counts import ExampleCounts
from fedgraft.server.expected import counts, evaluation, replies_to
from fedgraft.server.expected import name as name_all
from fedgraft.server.secure_sum import Sums
from fedgraft.server.validate import Field, Rejection, validate_responses


@dataclass(frozen=True)
class Found:
    """What measuring gave: loss and accuracies, and the sums for metrics where they were counted."""

    plain: Evaluation
    sums: Mapping[str, Tensor]


@dataclass(frozen=True)
class Measure:
    """Measures the models of one run."""

    setup: RunSetup
    opened: OpenRun
    engine: Engine
    requested: tuple[str, ...] | None = None
    """Metrics to compute; None: those of the config."""
    summed: dict[str, Found] = field(default_factory=dict)
    """The latest hidden sums for metrics, by the split and the model."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The metrics that are computed beside accuracy and loss."""
        if self.requested is None:
            return tuple(self.setup.config.metrics)
        return self.requested

    @property
    def counting(self) -> bool:
        """Whether the sums for metrics are counted."""
        return bool(self.metric_names) or self.setup.config.select != "accuracy"

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the outputs."""
        return self.setup.task.data.dataset.classes

    def score(self, found: Found) -> float:
        """The number that the best round is chosen by; higher is better."""
        select = self.setup.config.select
        return found.plain.accuracy if select == "accuracy" else metrics.select_value(found.sums, select, self.classes)

    def line(self, found: Found) -> dict[str, Any]:
        """What a line of metrics.jsonl says of it."""
        told: dict[str, Any] = {"accuracy": found.plain.accuracy, "loss": found.plain.loss, "top5": found.plain.top5}
        if found.sums:
            numbers = metrics.metric_values(found.sums, self.classes)
            names = dict.fromkeys([*self.metric_names, self.setup.config.select])
            told["metrics"] = {name: numbers[name] for name in names if name in numbers and name not in told}
        return told

    def tested(self, vector: Tensor, round: int) -> dict[str, Any]:
        """The delivered model on the test images, with the metrics that were asked for."""
        found, chosen = self.test(vector, round), self.metric_names
        told: dict[str, Any] = {"test": asdict(found.plain)}
        if chosen:
            told |= {"metrics": report(found.sums, chosen, self.classes), **tables(found.sums, chosen)}
            told |= {"select": self.setup.config.select, "class_names": list(self.classes)}
        return told

    def served(self, state: ServerState, best: Tensor) -> dict[str, Any]:
        """How each client is served: where asked for, and with metrics, unless the clients' sums are hidden."""
        a, config = self.setup.algorithm, self.setup.config
        wanted = config.personal.evaluate != "never"
        if not wanted and (not self.metric_names or a.privacy.collects_sum or not config.rounds.test):
            return {}
        common = not a.aggregate.personal and a.client_state.empty and not a.aggregate.gives(state)
        if self.metric_names and common:
            state = replace(state, vector=best)  # the delivered model is what clients get
        spread, each = self.personal(state)
        return ({"personal": spread} if wanted else {}) | ({"clients": each} if each else {})

    def validation(self, vector: Tensor, round: int) -> Found:
        """The common model on the validation images (on the clients' training images where there are none)."""
        if self.setup.task.data.blind:
            return self._counted(vector, round, "validation")
        return self._here(vector, self.opened.context.examples, self.setup.judging_rows)

    def test(self, vector: Tensor, round: int) -> Found:
        """The common model on the test images."""
        if self.setup.task.data.blind:
            return self._counted(vector, round, "test")
        tests = self.opened.context.tests
        assert tests is not None
        return self._here(vector, tests, torch.arange(len(tests.labels)))

    def _here(self, vector: Tensor, examples: Examples, rows: Tensor) -> Found:
        self.opened.context.load_model(vector)
        self.setup.ready(examples, rows)
        network, threads = self.opened.context.network, self.setup.threads
        return Found(*evaluate_with_sums(network, examples, rows, threads=threads, scores=self.counting))

    def _counted(self, vector: Tensor, round: int, split: str) -> Found:
        """The common model on images that the clients hold; they send counts and sums, nothing else."""
        f, space, network = self.setup.federation, self.opened.space.digest, self.setup.task.network
        privacy, those = self.setup.algorithm.privacy, f.evaluated if split == "test" else f.members
        asked = [k for k in those if f.there(k, round)]
        settings: dict[str, Scalar] = {"split": split, "scores": self.counting}
        if self.counting and privacy.collects_sum:
            known = split + hashlib.sha256(vector.numpy().tobytes()).hexdigest()
            if known in self.summed:  # a round without a step: clients give the same sum only once
                return self.summed[known]
            asking = Sums(self.engine.exchange, f.run, asked, network, privacy)
            asking.asked = 2 * round + (split == "test")  # clients serve each number once, and a resumed run repeats it
            sums = asking.ask(action_named("scores"), vector, {"split": split})
            if not sums["confusion"].sum():
                raise FedgraftError(f"no client has {split} images to measure the model on; raise data.validation.")
            self.summed.clear()
            return self.summed.setdefault(known, Found(evaluation_of(sums), sums))
        requests = [Request(f.run, round, k, "count", space, vector, {}, settings) for k in asked]
        more, lie = self._score_fields(("",) if self.counting else ())
        expected = counts(requests, 1, self.example_counts, split, more, lie)
        responses = replies_to(self.engine.exchange, requests, expected)
        plain = summed_counts(responses, self.example_counts, split)[0]
        if not self.counting:
            return Found(plain, {})
        return Found(plain, scores.merge([checked(r, network.classes) for r in responses], network.classes))

    @property
    def example_counts(self) -> ExampleCounts:
        """What clients said of themselves so far."""
        return self.opened.server_context.example_counts

    def _score_fields(self, prefixes: Sequence[str]) -> tuple[dict[str, Field], Callable[[Response], str]]:
        """What the sums for metrics look like, and what is wrong with them in a reply."""
        size = len(self.classes)

        def lie(response: Response) -> str:
            try:
                for prefix in prefixes:
                    own = {k.removeprefix(prefix): v for k, v in response.sums.items() if k.startswith(prefix)}
                    checked(replace(response, sums=own), size)
            except FedgraftError as error:
                return str(error)
            return ""

        shapes = scores.shapes(size).items()
        return {f"{p}{name}": Field(s.shape, torch.float64, s.limit) for p in prefixes for name, s in shapes}, lie

    def personal(self, state: ServerState) -> tuple[dict[str, float], dict[str, Any]]:
        """Every client on its own test images: mean, spread, before and after fine-tuning; and each one's metrics."""
        responses, _ = self.evaluated(state)
        return _spread(responses), self.each(responses) if self.metric_names else {}

    def evaluated(self, state: ServerState) -> tuple[list[Response], list[Rejection]]:
        """What clients find on their own test images, and who did not tell and why."""
        p, f, space = self.setup.config.personal, self.setup.federation, self.opened.space.digest
        settings: dict[str, Scalar] = {
            "finetune_epochs": p.finetune_epochs,
            "finetune_part": p.finetune_part,
            "finetune_lr": p.finetune_lr,
            "finetune_batch": p.finetune_batch,
            "lr": p.finetune_lr,
        }
        settings |= {"scores": True} if self.metric_names else {}
        clients = [k for k in f.evaluated if f.there(k, state.round) and len(self.setup.task.data.test_rows(k))]
        given = self.setup.algorithm.aggregate.gives(state)
        requests = [
            Request(f.run, state.round, k, "evaluate", space, state.model_of(k), given, settings) for k in clients
        ]
        if not requests:
            return [], []
        for k in clients if self.setup.task.data.rows_known else ():
            self.example_counts.note(k, {"test images": len(self.setup.task.data.test_rows(k))})
        tuned = bool(p.finetune_epochs)
        more, lie = self._score_fields(("", *(("finetuned/",) if tuned else ())) if self.metric_names else ())
        expected = evaluation(requests, self.example_counts, tuned, more, lie)
        accepted, rejections = validate_responses(self.engine.exchange(requests), expected)
        name_all(rejections, "evaluate")
        return [one.response for one in accepted if one.response.metrics["count"]], rejections

    def each(self, responses: Sequence[Response]) -> dict[str, Any]:
        """The metrics of each client by its name."""
        names, classes, found = self.setup.client_names, self.classes, dict[str, Any]()
        for response in sorted(responses, key=lambda r: r.client):
            cells = report(checked(response, len(classes)), self.metric_names, classes)
            if any(name.startswith("finetuned/") for name in response.sums):
                own = {k.removeprefix("finetuned/"): v for k, v in response.sums.items() if k.startswith("finetuned/")}
                tuned = report(checked(replace(response, sums=own), len(classes)), self.metric_names, classes)
                cells |= {f"finetuned_{name}": value for name, value in tuned.items()}
            found[names[response.client]] = cells
        return found


def report(sums: Mapping[str, Tensor], chosen: Sequence[str], classes: Sequence[str]) -> dict[str, Any]:
    """The chosen metrics as summary.json holds them: value, interval, images; None where there is nothing to tell."""
    found = metrics.compute(sums, classes)
    wanted = {name: m for name, m in found.items() if name.partition(":")[0] in chosen}
    return {
        name: None if m is None else {k: v for k, v in asdict(m).items() if v is not None} for name, m in wanted.items()
    }


def tables(sums: Mapping[str, Tensor], chosen: Sequence[str]) -> dict[str, Any]:
    """What is no single number: the confusion matrix (true class by row) and the reliability curve, where chosen."""
    made: dict[str, Any] = {}
    if "confusion" in chosen:
        made["confusion"] = sums["confusion"].long().tolist()
    if "calibration_error" in chosen:
        made["reliability"] = [
            {"confidence": one.confidence, "accuracy": asdict(one.accuracy)} for one in metrics.reliability(sums)
        ]
    return made


def checked(response: Response, classes: int) -> dict[str, Tensor]:
    """The sums that a client counted, if they can be: right shapes, nothing negative, all about the same images."""
    found = {name: response.sums.get(name) for name in scores.shapes(classes)}
    if not all(scores.is_plausible_sum(name, tensor, classes) for name, tensor in found.items()):
        raise FedgraftError(f"client {response.client} counted what cannot be: its node runs other software.")
    sums = {name: tensor for name, tensor in found.items() if tensor is not None}
    images = sums["confusion"].sum()
    if not (sums["histogram"].sum((0, 2)) == images).all() or sums["calibration"][0].sum() != images:
        raise FedgraftError(f"client {response.client} counted different images for different metrics.")
    return sums


def _spread(responses: Sequence[Response]) -> dict[str, float]:
    """Mean, extremes and spread of the clients' accuracies."""
    found: dict[str, float] = {}
    for key in ("accuracy", "finetuned_accuracy"):
        values = torch.tensor([r.metrics[key] for r in responses if key in r.metrics], dtype=torch.float64)
        if len(values):
            counts = torch.tensor([r.metrics["count"] for r in responses], dtype=torch.float64)
            prefix = "" if key == "accuracy" else "finetuned_"
            found |= {
                f"{prefix}mean": float(values.mean()),
                f"{prefix}min": float(values.min()),
                f"{prefix}max": float(values.max()),
                f"{prefix}std": float(values.std(correction=0)),
                f"{prefix}weighted": float((values * counts).sum() / counts.sum()),
            }
    return found
