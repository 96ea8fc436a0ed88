"""Measuring models on images that a client holds out or tests on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.action import Action, RunPhase, SumScope
from fedgraft.client.context import ClientContext, empty_response, model_vector, pooled_batches
from fedgraft.client.request_checks import require_settings, require_tensor
from fedgraft.client.train import choose_cluster_model, evaluate_finetuned
from fedgraft.core.client_memory import ClientMemory
from fedgraft.core.errors import FedgraftError, Refused
from fedgraft.core.label_sets import UNKNOWN, are_label_sets, counts_of, exact_matches, image_losses
from fedgraft.core.messages import Request, Response, Scalar
from fedgraft.core.protocols import Examples, Network
from fedgraft.metrics import scores
from fedgraft.metrics import sums as metric_sums
from fedgraft.metrics.evaluate import evaluate_with_sums
from fedgraft.privacy.secagg.ring import Segment, Summand, segments_of

HIDDEN_LOSS = 20.0
"""Largest loss of an image in a secure sum, in nats."""
HIDDEN_STEP = 2.0**-3
"""Losses and confidences in a secure sum are rounded to multiples of this."""
_FINETUNE_PARTS = ("head", "body", "both")


def split_of(request: Request) -> str:
    """Return the split that a request is about: the one that it names, or the validation rows."""
    return "test" if request.settings.get("split") == "test" else "validation"


def _test_split(request: Request) -> str:
    return "test"


def requested_split(request: Request, context: ClientContext) -> tuple[Examples, Tensor]:
    """Return the examples of the split that a request names in its settings, and which rows of them are this client's.

    The split "test" is the client's test images; any other is the validation rows that it holds out of training. The
    rows are empty where the client has none.
    """
    if split_of(request) == "test":
        examples = context.examples if context.tests is None else context.tests
        rows_of_client = context.test_rows
    else:
        examples = context.examples
        rows_of_client = context.held
    if rows_of_client is None:
        return examples, torch.empty(0, dtype=torch.int64)
    return examples, rows_of_client(request.client)


# ---- count: right answers and losses of common models


def count_models(request: Request, context: ClientContext) -> dict[str, Tensor]:
    """Return {"counts": (models, 4)}: right answers, right among the first five, sum of losses, images, by model.

    The images are those of the split in the request's settings. The models are the tensor `heads` of the request (n,
    classes, width + 1), applied to the features of the untouched backbone, or else the request's vector as one model,
    which is loaded into the client's network. With the setting `scores` the sums of `metrics.scores` are returned
    beside the counts.
    """
    examples, rows = requested_split(request, context)
    if "heads" in request.auxiliary:
        return {"counts": _count_heads(request.auxiliary["heads"], context, rows)}
    context.load_model(model_vector(request))
    evaluation, sums = evaluate_with_sums(context.network, examples, rows, scores=bool(request.settings.get("scores")))
    means = [evaluation.accuracy, evaluation.top5, evaluation.loss, 1.0]
    counts = torch.tensor([means], dtype=torch.float64) * len(rows)
    counts[:, :2] = counts[:, :2].round()
    return {"counts": counts, **sums}


def _count_heads(heads: Tensor, context: ClientContext, rows: Tensor, largest_loss: float = math.inf) -> Tensor:
    """Return the counts of each head on these rows, (n, 4): right, right among the first five, loss sum, images.

    `heads` is (n, classes, width + 1); the last column is the bias. An image's loss counts up to `largest_loss`.
    """
    counts = torch.zeros(len(heads), 4, dtype=torch.float64)
    for batch, labels in pooled_batches(context, rows):
        ones = torch.ones(len(batch), 1, dtype=torch.float64)
        z = torch.cat([batch.double(), ones], dim=1)  # (B, width + 1)
        for i, head in enumerate(heads):
            logits = z @ head.T
            if are_label_sets(labels):
                right = near = exact_matches(logits, labels).sum()
            else:
                classes_ahead = scores.true_class_rank(logits, labels)
                right = (classes_ahead == 0).sum()
                near = (classes_ahead < 5).sum()
            loss = image_losses(logits, labels).clamp(max=largest_loss).sum()
            counts[i] += torch.tensor([float(right), float(near), float(loss), len(labels)], dtype=torch.float64)
    return counts


# ---- the same inside a secure sum: rounded, and without small groups


def hidden_counts(
    request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Mapping[str, Tensor], ClientMemory]:
    """Return the counts of the request's models for a secure sum, and the memory as it was.

    An image's loss counts up to `HIDDEN_LOSS` nats, and the sum of the losses is rounded to `HIDDEN_STEP`: under models
    that a server chooses, exact losses of thousands of images are the features of one of them.
    """
    examples, rows = requested_split(request, context)
    heads = request.auxiliary.get("heads")
    if heads is not None:
        return {"counts": _rounded_losses(_count_heads(heads, context, rows, HIDDEN_LOSS))}, memory
    context.load_model(model_vector(request))
    _, sums = evaluate_with_sums(context.network, examples, rows, largest_loss=HIDDEN_LOSS)
    right, near = metric_sums.right_and_near(sums)
    counts = torch.tensor([[right, near, float(sums["loss"][0]), len(rows)]], dtype=torch.float64)
    return {"counts": _rounded_losses(counts)}, memory


def _rounded_losses(counts: Tensor) -> Tensor:
    """Return the counts (models, 4) with the sums of losses rounded to multiples of `HIDDEN_STEP`."""
    rounded = counts.clone()
    rounded[:, 2] = (counts[:, 2] / HIDDEN_STEP).round() * HIDDEN_STEP
    return rounded


def hidden_scores(
    request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Mapping[str, Tensor], ClientMemory]:
    """Return the sums of `metrics.scores` of the request's model for a secure sum, and the memory as it was.

    Classes of which this client has fewer images than the run's smallest group are left out (findings, that are present
    in fewer images or absent from fewer), losses and confidences
    are rounded as in `hidden_counts`.
    """
    context.load_model(model_vector(request))
    examples, rows = requested_split(request, context)
    smallest = algorithm.privacy.sum_options.smallest_group
    if are_label_sets(examples.labels):
        examples = without_small_findings(examples, rows, smallest)
    else:
        rows = rows_of_large_classes(examples, rows, smallest)
    _, sums = evaluate_with_sums(context.network, examples, rows, largest_loss=HIDDEN_LOSS)
    for name in ("calibration", "loss"):
        sums[name] = (sums[name] / HIDDEN_STEP).round() * HIDDEN_STEP
    return sums, memory


def rows_of_large_classes(examples: Examples, rows: Tensor, smallest: int) -> Tensor:
    """Return those of the rows whose class has at least `smallest` images among them."""
    labels = examples.labels[rows]
    if not len(rows):
        return rows
    sizes = torch.bincount(labels)
    return rows[sizes[labels] >= smallest]


def without_small_findings(examples: Examples, rows: Tensor, smallest: int) -> Examples:
    """Return the examples with findings unknown that fewer than `smallest` of these rows have, or are known not to."""
    labels = examples.labels[rows]
    is_small = (counts_of(labels) < smallest).any(0)  # (C,)
    masked = copy(examples)
    masked.labels = examples.labels.clone()
    masked.labels[:, is_small] = UNKNOWN
    return masked


def _hidden_counts_layout(scope: SumScope) -> tuple[Segment, ...]:
    return segments_of(_hidden_counts_summands(scope.network, scope.settings))


def _hidden_counts_summands(network: Network | None, settings: Mapping[str, Scalar]) -> dict[str, Summand]:
    """Return shape and range of the counts; the setting `models` says how many models there are."""
    models = int(settings.get("models", 1))
    return {"counts": Summand((models, 4), torch.float64, 2.0**24 * HIDDEN_LOSS, HIDDEN_STEP)}


def _hidden_scores_layout(scope: SumScope) -> tuple[Segment, ...]:
    assert scope.network is not None
    return segments_of(_score_summands(scope.network, scope.settings))


def _validate_heads(request: Request, algorithm: Algorithm, context: ClientContext) -> None:
    """Refuse heads that do not have the shape of this network's, or are not as many as the request says."""
    models = int(request.settings["models"])
    require_tensor("the heads", request.auxiliary.get("heads"), (models, context.network.classes, _inputs(context)))


def _inputs(context: ClientContext) -> int:
    return context.network.width + 1


def _answer_count(
    request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Response, ClientMemory]:
    """Return the response whose sums are those of `count_models`, and the client's memory as it was."""
    return replace(empty_response(request, context), sums=count_models(request, context)), memory


def _validate_count(request: Request, algorithm: Algorithm, context: ClientContext) -> None:
    """Refuse a count whose heads, or whose model where it has no heads, do not have the shape of this network."""
    heads = request.auxiliary.get("heads")
    if heads is None:
        require_tensor("the model", model_vector(request), (context.space.size,))
    else:
        require_tensor("the heads", heads, (len(heads), context.network.classes, context.network.width + 1))


def held_out_images(request: Request, context: ClientContext) -> int:
    """Return how many images the counts of this request would be about."""
    rows_of_client = context.test_rows if request.settings.get("split") == "test" else context.held
    return 0 if rows_of_client is None else len(rows_of_client(request.client))


# ---- scores: sums from which metrics follow


def score_sums(request: Request, context: ClientContext) -> dict[str, Tensor]:
    """Return the sums of `metrics.scores` (confusion matrix, histograms, losses) of the request's model.

    The images are those of the split that the request names. The model stays loaded in the client's network.
    """
    context.load_model(model_vector(request))
    examples, rows = requested_split(request, context)
    _, sums = evaluate_with_sums(context.network, examples, rows)
    return sums


def _answer_scores(
    request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Response, ClientMemory]:
    """Return the response with the sums in the clear, and the client's memory as it was."""
    return replace(empty_response(request, context), sums=score_sums(request, context)), memory


def _score_summands(network: Network, settings: Mapping[str, Scalar]) -> dict[str, Summand]:
    """Return shape and range of each sum of `metrics.scores`, by name."""
    summands = {}
    for name, shape in metric_sums.sum_layouts(network.classes, network.label_sets).items():
        summands[name] = Summand(shape.shape, torch.float64, shape.limit, shape.step)
    return summands


def validate_split(request: Request, algorithm: Algorithm, context: ClientContext) -> None:
    """Refuse a split other than "validation" and "test"."""
    if request.settings["split"] not in ("validation", "test"):
        raise Refused("the request names a split that does not exist", "request")


# ---- evaluate: the client's own model on its own test images


def evaluate_on_own_tests(
    request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Response, ClientMemory]:
    """Measure a model on the client's own test images, and again after fine-tuning where the request asks for it.

    The model is the request's, or with personalisation the client's own from its memory. Return the response, with the
    metrics `loss`, `accuracy`, `count` (and `finetuned_...`) and the sums of `metrics.scores`, and the memory as it
    was. Where updates are hidden in sums nothing leaves but the share of right answers and the number of images. The
    model stays loaded in the client's network.
    """
    if context.tests is None or context.test_rows is None:
        raise FedgraftError(
            "E-CLIENT-NO-TEST-ROWS",
            f"client {request.client} has no test rows of its own to evaluate on",
            client=request.client,
        )
    rows = context.test_rows(request.client)
    if algorithm.privacy.collects_sum and context.history is not None:
        context.history.check_evaluated(request, algorithm)
    request, _ = choose_cluster_model(request, algorithm, context)
    own_model = algorithm.client_state.own_model(model_vector(request), memory)
    context.load_model(own_model, memory.get("private"))
    counts_only = algorithm.privacy.collects_sum
    with_scores = bool(request.settings.get("scores")) and not counts_only
    evaluation, sums = evaluate_with_sums(context.network, context.tests, rows, scores=with_scores)
    metrics = {"accuracy": evaluation.accuracy, "count": float(len(rows))}
    if not counts_only:
        metrics["loss"] = evaluation.loss
    if request.settings.get("finetune_epochs"):
        finetuned, finetuned_sums = evaluate_finetuned(request, algorithm, context, rows)
        metrics["finetuned_accuracy"] = finetuned.accuracy
        if not counts_only:
            metrics["finetuned_loss"] = finetuned.loss
            for name, tensor in finetuned_sums.items():
                sums[f"finetuned/{name}"] = tensor
    return replace(empty_response(request, context), metrics=metrics, sums=sums), memory


def _validate_finetuning(request: Request, algorithm: Algorithm, context: ClientContext) -> None:
    """Refuse an evaluation with fine-tuning whose epochs, rate, batch size or part is missing or impossible."""
    if not request.settings.get("finetune_epochs"):
        return
    declared = {"finetune_epochs": float}
    for name in ("finetune_lr", "finetune_batch"):
        if name in request.settings:
            declared[name] = float
    require_settings(request, declared)
    if request.settings.get("finetune_part", "both") not in _FINETUNE_PARTS:
        raise Refused("the request names a part to fine-tune that does not exist", "request")


def _own_test_images(request: Request, context: ClientContext) -> int:
    return 0 if context.test_rows is None else len(context.test_rows(request.client))


ACTIONS = [
    Action(
        "count",
        RunPhase.EVALUATION,
        "evaluation at the clients",
        _answer_count,
        validate=_validate_count,
        split=split_of,
        images=held_out_images,
    ),
    Action(
        "scores",
        RunPhase.EVALUATION,
        "evaluation at the clients: sums of scores",
        _answer_scores,
        settings={"split": str},
        model="edit_space",
        validate=validate_split,
        summands=_score_summands,
        layout=_hidden_scores_layout,
        summed=hidden_scores,
        split=split_of,
    ),
    Action(
        "counts",
        RunPhase.EVALUATION,
        "evaluation at the clients: sums of counts",
        _answer_count,
        settings={"split": str},
        model="edit_space",
        validate=validate_split,
        summands=_hidden_counts_summands,
        layout=_hidden_counts_layout,
        summed=hidden_counts,
        split=split_of,
    ),
    Action(
        "head_counts",
        RunPhase.HEAD,
        "head initialisation: sums of counts",
        _answer_count,
        settings={"models": float},
        validate=_validate_heads,
        tensor_names=("heads",),
        summands=_hidden_counts_summands,
        layout=_hidden_counts_layout,
        summed=hidden_counts,
        split=split_of,
    ),
    Action(
        "evaluate",
        RunPhase.EVALUATION,
        "evaluation by the clients",
        evaluate_on_own_tests,
        model="edit_space",
        validate=_validate_finetuning,
        shown_alone=True,
        split=_test_split,
        images=_own_test_images,
    ),
]
