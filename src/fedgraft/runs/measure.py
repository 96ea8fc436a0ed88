"""Measuring models: on the server's images, by sums from clients that hold images out, or client by client.

Where the run asks for metrics, or chooses its best round by one, the sums of `metrics.scores` are computed too. Clients
on other machines send these sums; under secure aggregation only their total is opened, unless `personal.evaluate` lets
every client report on its own images.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedgraft.algorithms.algorithm import has_one_model
from fedgraft.client.actions import action_named
from fedgraft.client.actions import subgroups as subgroup_actions
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import Request, Response, Scalar
from fedgraft.core.protocols import Examples
from fedgraft.core.state import ServerState
from fedgraft.metrics import label_metrics, metrics, scores
from fedgraft.metrics import sums as metric_sums
from fedgraft.metrics.evaluate import Evaluation, evaluate_with_sums, evaluation_of
from fedgraft.metrics.subgroups import Subgroups, group_sums, parse_all, values_of
from fedgraft.runs.head_init import mean_counts, no_images_error, sum_counts
from fedgraft.runs.open_run import OpenRun
from fedgraft.runs.setup import RunSetup
from fedgraft.server.collect import Engine
from fedgraft.server.example_counts import ExampleCounts
from fedgraft.server.expected import expected_counts, expected_evaluation, log_rejections, valid_responses
from fedgraft.server.secure_sum import Sums
from fedgraft.server.validate import Field, Rejection, validate_responses

log = logging.getLogger("fedgraft")
FINETUNED = "finetuned/"
"""Begins the names of sums that a client counted after fine-tuning."""


@dataclass(frozen=True)
class Measurement:
    """Loss and accuracies of a model, and the sums for metrics where they were computed."""

    plain: Evaluation
    sums: Mapping[str, Tensor]


@dataclass(frozen=True)
class ValidationSums:
    """The sums for metrics of one model on the validation images that clients hold."""

    score: float
    """By which the best round is chosen."""
    pooled: Mapping[str, Tensor]
    by_client: Mapping[str, Mapping[str, Tensor]]
    """By the client's name; empty under secure aggregation."""


@dataclass(frozen=True)
class Measure:
    """Measures the models of one run, on the server's images or by requests to the clients."""

    setup: RunSetup
    opened: OpenRun
    engine: Engine
    requested: tuple[str, ...] | None = None
    """Metrics to compute; None: those of the config."""
    summed: dict[str, Measurement] = field(default_factory=dict)
    """The latest sums for metrics that secure aggregation opened, by the split and the model."""

    in_sums: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The clients over which secure sums about a split are, by the split."""
    on_validation: dict[str, ValidationSums] = field(default_factory=dict)
    """Of findings at clients: the sums of the best and the latest model on their validation images, by its digest."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The metrics that are computed beside accuracy and loss."""
        if self.requested is None:
            return tuple(self.setup.config.metrics)
        return self.requested

    @property
    def needs_sums(self) -> bool:
        """Whether the sums for metrics are computed."""
        return bool(self.metric_names) or self.setup.config.select != "accuracy"

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the outputs."""
        return self.setup.task.data.dataset.classes

    @property
    def layouts(self) -> dict[str, scores.SumLayout]:
        """The layout of a client's sums for metrics."""
        return metric_sums.sum_layouts(len(self.classes), self.setup.task.data.label_sets)

    @property
    def example_counts(self) -> ExampleCounts:
        """The numbers of images that clients claimed so far."""
        return self.opened.server_context.example_counts

    def score(self, measurement: Measurement) -> float:
        """Return the number that the best round is chosen by; higher is better."""
        select = self.setup.config.select
        if select == "accuracy":
            return measurement.plain.accuracy
        return metric_sums.select_value(measurement.sums, select, self.classes)

    def metrics_entries(self, measurement: Measurement) -> dict[str, Any]:
        """Return the entries of a measurement in a line of metrics.jsonl: accuracy, loss, top5 and further metrics."""
        plain = measurement.plain
        line: dict[str, Any] = {"accuracy": plain.accuracy, "loss": plain.loss, "top5": plain.top5}
        if measurement.sums:
            values = metric_sums.metric_values(measurement.sums, self.classes)
            further = {}
            for name in dict.fromkeys([*self.metric_names, self.setup.config.select]):
                if name in values and name not in line:
                    further[name] = values[name]
            line["metrics"] = further
        return line

    def summarise_test(self, vector: Tensor, round: int) -> dict[str, Any]:
        """Measure the delivered model on the test images and return the entries of summary.json about it.

        `round` is the last one of the run: where clients hold the test images, those that were still there are asked.
        """
        measurement = self.test(vector, round)
        summary: dict[str, Any] = {"test": asdict(measurement.plain)}
        data = self.setup.task.data
        if data.label_sets:
            summary |= self.thresholds(vector)
        if self.metric_names:
            summary["metrics"] = report(measurement.sums, self.metric_names, self.classes)
            summary |= tables(measurement.sums, self.metric_names)
            if self.setup.config.metrics_by:
                summary["subgroups"] = self.subgroups(vector, round)
            summary["select"] = self.setup.config.select
            summary["class_names"] = list(self.classes)
        return summary

    def subgroups(self, vector: Tensor, round: int) -> dict[str, dict[str, Any]]:
        """Return the metrics on the test images by column of `metrics_by` and value; None for a group withheld.

        `round` is as in `summarise_test`. Where clients hold the images, they send the sums of each group.
        """
        setup = self.setup
        blind = setup.task.data.blind
        told: dict[str, dict[str, Any]] = {}
        for place, groups in enumerate(parse_all(setup.config.metrics_by)):
            if blind:
                number = round * len(setup.config.metrics_by) + place
                settings = subgroup_actions.settings_of(groups)
                candidates = setup.federation.evaluated
                clients = [client for client in candidates if setup.federation.takes_part(client, round)]
                if setup.algorithm.privacy.collects_sum:  # over the same clients as the other sums about these images
                    clients = list(self.in_sums.get("test", tuple(clients)))
                sums = self.hidden_sums(vector, number, "test", clients, subgroup_actions.NAME, settings)
                parts = subgroup_actions.split_groups(sums)
            else:
                groups, parts = self._subgroups_here(vector, groups)
            cells: dict[str, Any] = {}
            for value, part in zip(groups.values, parts, strict=True):
                cells[value] = None
                if metric_sums.images_in(part):
                    cells[value] = report(part, self.metric_names, self.classes)
            told[groups.column] = cells
        return told

    def _subgroups_here(self, vector: Tensor, groups: Subgroups) -> tuple[Subgroups, list[dict[str, Tensor]]]:
        """Return the groups with their values, and the sums of each on the test images that the server has."""
        setup = self.setup
        context = self.opened.context
        tests = context.tests
        assert tests is not None
        context.load_model(vector)
        cells = context.test_columns[groups.column]
        groups = values_of(groups, cells)
        rows = torch.arange(len(tests.labels))
        smallest = setup.config.privacy.smallest_group
        return groups, group_sums(context.network, tests, rows, cells, groups, smallest, setup.threads)

    def thresholds(self, vector: Tensor) -> dict[str, Any]:
        """Return the probabilities above which the model says each finding, chosen on the validation images.

        `thresholds` are common to all sites, `thresholds_by_site` each site's own, where single sites may be measured:
        on the server's images by the column `site`, on clients' images from their sums in the clear. Clients are not
        asked anew: without sums of this model from a round (no metrics, a resumed run) there are none.
        """
        if self.setup.task.data.blind:
            sums = self.on_validation.get(_model_key(vector))
            if sums is None:
                log.warning("no thresholds were chosen: the clients sent no sums about this model")
                return {}
            parts = sums.by_client
            pooled = sums.pooled
        else:
            pooled, parts = self._validation_sums_here(vector)
        chosen: dict[str, Any] = {"thresholds": label_metrics.best_thresholds(pooled, self.classes)}
        if parts:
            by_site = {site: label_metrics.best_thresholds(part, self.classes) for site, part in parts.items()}
            chosen["thresholds_by_site"] = by_site
        return chosen

    def _validation_sums_here(self, vector: Tensor) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        """Return the sums on the validation images that the server has: of all, and by site if there are several."""
        context = self.opened.context
        context.load_model(vector)
        rows = self.setup.evaluation_rows
        threads = self.setup.threads
        sites = self.setup.task.data.dataset.train.sites
        _, pooled = evaluate_with_sums(context.network, context.examples, rows, threads=threads)
        parts = {}
        if sites is not None:
            names = sites[rows.numpy()]
            for site in sorted(set(names.tolist())):
                at_site = rows[torch.from_numpy(names == site)]
                _, parts[site] = evaluate_with_sums(context.network, context.examples, at_site, threads=threads)
        if len(parts) < 2:
            parts = {}
        return pooled, parts

    def _remember_validation(
        self, vector: Tensor, measurement: Measurement, by_client: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        """Keep the sums of findings on clients' validation images: thresholds are chosen from those of the best model.

        Only the best and the latest model's are kept.
        """
        if not (self.setup.task.data.label_sets and measurement.sums):
            return
        best = max(self.on_validation.items(), key=lambda item: item[1].score, default=None)
        self.on_validation.clear()
        if best is not None:
            self.on_validation[best[0]] = best[1]
        self.on_validation[_model_key(vector)] = ValidationSums(self.score(measurement), measurement.sums, by_client)

    def summarise_personal(self, state: ServerState, best: Tensor) -> dict[str, Any]:
        """Let every client measure its model on its own test images, where the config or its metrics ask for that.

        Return the entries of summary.json: `personal`, mean and spread of their accuracies, and `clients`, each one's
        metrics; {} where clients are not asked. `best` is the delivered model. Under secure aggregation metrics alone
        are no reason to ask.
        """
        algorithm = self.setup.algorithm
        config = self.setup.config
        is_requested = config.personal.evaluate != "never"
        may_ask = not (algorithm.privacy.collects_sum or algorithm.privacy.answers_only_accounted)
        shows_clients = bool(self.metric_names) and may_ask and config.rounds.test
        if not is_requested and not shows_clients:
            return {}
        if self.metric_names and has_one_model(algorithm):
            state = replace(state, vector=best)  # the delivered model is what clients get
        spread, by_client = self.personal(state)
        summary: dict[str, Any] = {}
        if is_requested:
            summary["personal"] = spread
        if by_client:
            summary["clients"] = by_client
        return summary

    def validation(self, vector: Tensor, round: int) -> Measurement:
        """Return the common model's measurement on the validation images (on training images if there are none).

        Where clients hold these images, those that take part in `round` are asked; else the model stays in the network.
        """
        if self.setup.task.data.blind:
            return self._measure_at_clients(vector, round, "validation")
        return self._measure_here(vector, self.opened.context.examples, self.setup.evaluation_rows)

    def test(self, vector: Tensor, round: int) -> Measurement:
        """Return the common model's measurement on the test images.

        Where clients hold these images, those that take part in `round` are asked; else the model stays in the network.
        """
        if self.setup.task.data.blind:
            return self._measure_at_clients(vector, round, "test")
        tests = self.opened.context.tests
        assert tests is not None
        return self._measure_here(vector, tests, torch.arange(len(tests.labels)))

    def _measure_here(self, vector: Tensor, examples: Examples, rows: Tensor) -> Measurement:
        """Return loss and accuracies of a model on `rows` of examples that the server has.

        With them come the sums from which further metrics follow, where the run has such metrics. The model stays in
        the network. Features of these rows that are missing in the cache may be computed and stored there, on disk.
        """
        context = self.opened.context
        context.load_model(vector)
        self.setup.cache_features(examples, rows)
        plain, sums = evaluate_with_sums(
            context.network, examples, rows, threads=self.setup.threads, scores=self.needs_sums
        )
        return Measurement(plain, sums)

    def _measure_at_clients(self, vector: Tensor, round: int, split: str) -> Measurement:
        """Return the common model's measurement on images of a split that the clients hold; they send sums only.

        Requests go to the clients that take part in this round.
        """
        federation = self.setup.federation
        candidates = federation.evaluated if split == "test" else federation.members
        clients = [client for client in candidates if federation.takes_part(client, round)]
        if self.setup.algorithm.privacy.collects_sum:
            hidden = self._measure_by_hidden_sum(vector, round, split, candidates)
            if split == "validation":
                self._remember_validation(vector, hidden, {})
            return hidden
        settings: dict[str, Scalar] = {"split": split, "scores": self.needs_sums}
        requests = []
        for client in clients:
            requests.append(
                Request(federation.run, round, client, "count", self.opened.space.digest, vector, {}, settings)
            )
        prefixes = ("",) if self.needs_sums else ()
        fields, implausible = self._score_fields(prefixes)
        expected = expected_counts(requests, 1, self.example_counts, split, fields, implausible)
        responses = valid_responses(self.engine.exchange, requests, expected)
        plain = sum_counts(responses, self.example_counts, split)[0]
        if not self.needs_sums:
            return Measurement(plain, {})
        by_client = {}
        for response in responses:
            by_client[self.setup.client_names[response.client]] = validated_sums(response, self.layouts)
        measurement = Measurement(plain, scores.merge_scores(by_client.values(), len(self.classes), self.layouts))
        if split == "validation":
            self._remember_validation(vector, measurement, by_client)
        return measurement

    def _measure_by_hidden_sum(self, vector: Tensor, round: int, split: str, clients: Sequence[int]) -> Measurement:
        """Return the common model's measurement by a secure sum over the clients on the split; it is cached.

        The sum is about scores where metrics need them, else about counts. `round` numbers it, because clients serve
        each number once. Clients refuse sums about the same images over other clients than before: asked are those that
        are there in every round, and later on those that were in the first sum.
        """
        key = split + _model_key(vector)
        if key in self.summed:  # a round without a step: clients give the same sum only once
            return self.summed[key]
        always = [client for client in clients if self.setup.federation.takes_part_always(client)]
        clients = self.in_sums.get(split, tuple(always))
        # Clients serve each number once, and a resumed run repeats it.
        number = 2 * round + (split == "test")
        sums = self.hidden_sums(vector, number, split, clients, "scores" if self.needs_sums else "counts")
        if self.needs_sums:
            if not metric_sums.images_in(sums):
                raise no_images_error(split)
            measurement = Measurement(evaluation_of(sums), sums)
        else:
            measurement = Measurement(mean_counts(sums["counts"], split)[0], {})
        self.summed.clear()
        self.summed[key] = measurement
        return measurement

    def hidden_sums(
        self,
        vector: Tensor,
        number: int,
        split: str,
        clients: Sequence[int],
        action: str = "scores",
        settings: Mapping[str, Scalar] | None = None,
    ) -> dict[str, Tensor]:
        """Return what a sum over these clients says of a model: the sums of `metrics.scores`, of counts, of subgroups.

        It is a secure sum where the run has these. `number` is that of the sum among those of its action; clients serve
        each number once. `settings` are those of the requests; None: the split alone.
        """
        setup = self.setup
        asking = Sums(self.engine.exchange, setup.federation.run, clients, setup.task.network, setup.algorithm.privacy)
        asking.sums_requested = number
        sums = asking.ask(action_named(action), vector, settings or {"split": split})
        self.in_sums[split] = asking.clients
        return sums

    def _score_fields(self, prefixes: Sequence[str]) -> tuple[dict[str, Field], Callable[[Response], str]]:
        """Return the expected form of the sums for metrics, and a check of their plausibility.

        `prefixes` of their names: "" for the model itself, `FINETUNED` for the one after fine-tuning.
        """
        layouts = self.layouts

        def implausible(response: Response) -> str:
            """Return what cannot be true of a response's sums, or ""."""
            try:
                for prefix in prefixes:
                    validated_sums(replace(response, sums=_without_prefix(response.sums, prefix)), layouts)
            except FedgraftError as error:
                return str(error)
            return ""

        fields = {}
        for prefix in prefixes:
            for name, shape in layouts.items():
                fields[f"{prefix}{name}"] = Field(shape.shape, torch.float64, shape.limit)
        return fields, implausible

    def personal(self, state: ServerState) -> tuple[dict[str, float], dict[str, Any]]:
        """Ask every client to measure its model on its own test images.

        Return mean and spread of their accuracies, and the metrics by client name ({} where none are computed).
        """
        responses, _ = self.evaluated(state)
        by_client = self.each(responses) if self.metric_names else {}
        return accuracy_spread(responses), by_client

    def evaluated(self, state: ServerState) -> tuple[list[Response], list[Rejection]]:
        """Ask clients to measure on their own test images; return their answers, and who was rejected and why."""
        options = self.setup.config.personal
        federation = self.setup.federation
        data = self.setup.task.data
        settings: dict[str, Scalar] = {
            "finetune_epochs": options.finetune_epochs,
            "finetune_part": options.finetune_part,
            "finetune_lr": options.finetune_lr,
            "finetune_batch": options.finetune_batch,
            "lr": options.finetune_lr,
        }
        shows_scores = bool(self.metric_names) and not self.setup.algorithm.privacy.collects_sum
        if shows_scores:
            settings["scores"] = True
        common_tensors = self.setup.algorithm.aggregate.request_tensors(state)
        requests = []
        for client in federation.evaluated:
            if not federation.takes_part(client, state.round) or not len(data.test_rows(client)):
                continue
            model = state.model_of(client)
            space = self.opened.space.digest
            request = Request(federation.run, state.round, client, "evaluate", space, model, common_tensors, settings)
            requests.append(request)
        if not requests:
            return [], []
        if data.rows_known:
            for request in requests:
                self.example_counts.note(request.client, {"test images": len(data.test_rows(request.client))})
        is_finetuned = bool(options.finetune_epochs)
        prefixes: list[str] = []
        if shows_scores:
            prefixes.append("")
            if is_finetuned:
                prefixes.append(FINETUNED)
        fields, implausible = self._score_fields(prefixes)
        with_loss = not self.setup.algorithm.privacy.collects_sum
        expected = expected_evaluation(requests, self.example_counts, is_finetuned, fields, implausible, with_loss)
        accepted, rejections = validate_responses(self.engine.exchange(requests), expected)
        log_rejections(rejections, "evaluate")
        responses = [item.response for item in accepted if item.response.metrics["count"]]
        return responses, rejections

    def each(self, responses: Sequence[Response]) -> dict[str, Any]:
        """Return the metrics of each response by client name; those after fine-tuning begin with "finetuned_".

        Where updates are hidden in sums a client shows right answers only, so there is no metric but accuracy.
        """
        classes = self.classes
        by_client: dict[str, Any] = {}
        for response in sorted(responses, key=lambda response: response.client):
            if self.setup.algorithm.privacy.collects_sum:
                by_client[self.setup.client_names[response.client]] = accuracy_cells(response, self.metric_names)
                continue
            cells = report(validated_sums(response, self.layouts), self.metric_names, classes)
            finetuned_sums = _without_prefix(response.sums, FINETUNED)
            if finetuned_sums:
                validated = validated_sums(replace(response, sums=finetuned_sums), self.layouts)
                for name, value in report(validated, self.metric_names, classes).items():
                    cells[f"finetuned_{name}"] = value
            by_client[self.setup.client_names[response.client]] = cells
        return by_client


def _model_key(vector: Tensor) -> str:
    """Return the digest of a model's vector."""
    return hashlib.sha256(vector.numpy().tobytes()).hexdigest()


def _without_prefix(sums: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the sums whose names begin with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in sums.items() if name.startswith(prefix)}


def report(sums: Mapping[str, Tensor], chosen: Sequence[str], classes: Sequence[str]) -> dict[str, Any]:
    """Return the chosen metrics as summary.json holds them: value, interval, images; None where one is undefined.

    `sums` are those of `metrics.scores`, `chosen` the names of metrics, `classes` those of the classes.
    """
    cells: dict[str, Any] = {}
    for name, metric in metric_sums.compute(sums, classes).items():
        if name.partition(":")[0] not in chosen:
            continue
        if metric is None:
            cells[name] = None
        else:
            cells[name] = {key: value for key, value in asdict(metric).items() if value is not None}
    return cells


def accuracy_cells(response: Response, chosen: Sequence[str]) -> dict[str, Any]:
    """Return the accuracies of a response as summary.json holds them, if `chosen` names accuracy."""
    cells: dict[str, Any] = {}
    if "accuracy" not in chosen:
        return cells
    images = response.metrics["count"]
    for name in ("accuracy", "finetuned_accuracy"):
        if name in response.metrics:
            metric = metrics.share(round(response.metrics[name] * images), images)
            assert metric is not None
            cells[name] = {key: value for key, value in asdict(metric).items() if value is not None}
    return cells


READABLE_CLASSES = 100
"""With more classes nobody reads a confusion matrix that was not asked for."""


def tables(sums: Mapping[str, Tensor], chosen: Sequence[str]) -> dict[str, Any]:
    """Return the confusion matrix (true class by row), and the reliability curve where `chosen` names its metric.

    `sums` are those of `metrics.scores`, `chosen` the metrics of the config. The matrix comes with any metric, as it is
    among the sums anyway; with more than `READABLE_CLASSES` classes only where `chosen` names it.
    """
    made: dict[str, Any] = {}
    if "confusion" in chosen or ("confusion" in sums and len(sums["confusion"]) <= READABLE_CLASSES):
        made["confusion"] = sums["confusion"].long().tolist()
    if "calibration_error" in chosen:
        curve = []
        for point in metrics.reliability(sums):
            curve.append({"confidence": point.confidence, "accuracy": asdict(point.accuracy)})
        made["reliability"] = curve
    return made


def validated_sums(response: Response, layouts: Mapping[str, scores.SumLayout]) -> dict[str, Tensor]:
    """Return a client's sums for metrics by name; raise for wrong shapes, impossible counts and sums that disagree.

    `layouts` are those of the sums of one client.
    """
    sums: dict[str, Tensor] = {}
    for name, layout in layouts.items():
        tensor = response.sums.get(name)
        if tensor is None or not scores.is_plausible_sum(layout, tensor):
            raise FedgraftError(
                "E-RUN-METRIC-SUMS",
                f"inconsistent metric sums: {name!r} of client {response.client} cannot be",
                "let its node run the same version of fedgraft",
                client=response.client,
            )
        sums[name] = tensor
    if metric_sums.disagree(sums):
        raise FedgraftError(
            "E-RUN-METRIC-IMAGES",
            f"inconsistent metric sums: client {response.client} counted different images for different metrics",
            client=response.client,
        )
    return sums


def accuracy_spread(responses: Sequence[Response]) -> dict[str, float]:
    """Return mean, extremes and spread of the clients' accuracies, before and after fine-tuning."""
    spread: dict[str, float] = {}
    for key, prefix in (("accuracy", ""), ("finetuned_accuracy", "finetuned_")):
        accuracies = [response.metrics[key] for response in responses if key in response.metrics]
        if not accuracies:
            continue
        values = torch.tensor(accuracies, dtype=torch.float64)
        images = torch.tensor([response.metrics["count"] for response in responses], dtype=torch.float64)
        spread[f"{prefix}mean"] = float(values.mean())
        spread[f"{prefix}min"] = float(values.min())
        spread[f"{prefix}max"] = float(values.max())
        spread[f"{prefix}std"] = float(values.std(correction=0))
        spread[f"{prefix}weighted"] = float((values * images).sum() / images.sum())
    return spread
