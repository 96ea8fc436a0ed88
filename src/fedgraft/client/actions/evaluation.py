"""Measuring models on images that a client holds out or tests on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.action import Action, RunPhase, sum_action
from fedgraft.client.context import ClientContext, empty_response, model_vector, pooled_batches
from fedgraft.client.request_checks import require_settings, require_tensor
from fedgraft.client.train import choose_cluster_model, evaluate_finetuned
from fedgraft.core.client_memory import ClientMemory
from fedgraft.core.errors import FedgraftError, Refused
from fedgraft.core.messages import Request, Response, Scalar
from fedgraft.core.protocols import Examples, Network
from fedgraft.metrics import scores
from fedgraft.metrics.evaluate import evaluate_with_sums
from fedgraft.privacy.secagg.ring import Summand

_FINETUNE_PARTS = ("head", "body", "both")


def _split_of(request: Request) -> str:
    """Return the split that a request is about: the one that it names, or the validation rows."""
    return "test" if request.settings.get("split") == "test" else "validation"


def _test_split(request: Request) -> str:
    return "test"


def _requested_split(request: Request, context: ClientContext) -> tuple[Examples, Tensor]:
    """Return the examples of the split that a request names in its settings, and which rows of them are this client's.

    The split "test" is the client's test images; any other is the validation rows that it holds out of training. The
    rows are empty where the client has none.
    """
    if _split_of(request) == "test":
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
    examples, rows = _requested_split(request, context)
    if "heads" in request.auxiliary:
        return {"counts": _count_heads(request.auxiliary["heads"], context, rows)}
    context.load_model(model_vector(request))
    evaluation, sums = evaluate_with_sums(context.network, examples, rows, scores=bool(request.settings.get("scores")))
    means = [evaluation.accuracy, evaluation.top5, evaluation.loss, 1.0]
    counts = torch.tensor([means], dtype=torch.float64) * len(rows)
    counts[:, :2] = counts[:, :2].round()
    return {"counts": counts, **sums}


def _count_heads(heads: Tensor, context: ClientContext, rows: Tensor) -> Tensor:
    """Return the counts of each head on these rows, (n, 4): right, right among the first five, loss sum, images.

    `heads` is (n, classes, width + 1); the last column is the bias.
    """
    counts = torch.zeros(len(heads), 4, dtype=torch.float64)
    for batch, labels in pooled_batches(context, rows):
        ones = torch.ones(len(batch), 1, dtype=torch.float64)
        z = torch.cat([batch.double(), ones], dim=1)  # (B, width + 1)
        for i, head in enumerate(heads):
            logits = z @ head.T
            classes_ahead = scores.true_class_rank(logits, labels)
            right = (classes_ahead == 0).sum()
            near = (classes_ahead < 5).sum()
            loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            counts[i] += torch.tensor([float(right), float(near), float(loss), len(labels)], dtype=torch.float64)
    return counts


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


def _held_out_images(request: Request, context: ClientContext) -> int:
    """Return how many images the counts of this request would be about."""
    rows_of_client = context.test_rows if request.settings.get("split") == "test" else context.held
    return 0 if rows_of_client is None else len(rows_of_client(request.client))


# ---- scores: sums from which metrics follow


def score_sums(request: Request, context: ClientContext) -> dict[str, Tensor]:
    """Return the sums of `metrics.scores` (confusion matrix, histograms, losses) of the request's model.

    The images are those of the split that the request names. The model stays loaded in the client's network.
    """
    context.load_model(model_vector(request))
    examples, rows = _requested_split(request, context)
    _, sums = evaluate_with_sums(context.network, examples, rows)
    return sums


def _score_summands(network: Network, settings: Mapping[str, Scalar]) -> dict[str, Summand]:
    """Return shape and range of each sum of `metrics.scores`, by name."""
    summands = {}
    for name, shape in scores.sum_layouts(network.classes).items():
        summands[name] = Summand(shape.shape, torch.float64, shape.limit, shape.step)
    return summands


def _validate_split(request: Request, algorithm: Algorithm, context: ClientContext) -> None:
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
    was. The model stays loaded in the client's network.
    """
    if context.tests is None or context.test_rows is None:
        raise FedgraftError(
            "E-CLIENT-NO-TEST-ROWS",
            f"client {request.client} has no test rows of its own to evaluate on",
            client=request.client,
        )
    rows = context.test_rows(request.client)
    request, _ = choose_cluster_model(request, algorithm, context)
    own_model = algorithm.client_state.own_model(model_vector(request), memory)
    context.load_model(own_model, memory.get("private"))
    with_scores = bool(request.settings.get("scores"))
    evaluation, sums = evaluate_with_sums(context.network, context.tests, rows, scores=with_scores)
    metrics = {"loss": evaluation.loss, "accuracy": evaluation.accuracy, "count": float(len(rows))}
    if request.settings.get("finetune_epochs"):
        finetuned, finetuned_sums = evaluate_finetuned(request, algorithm, context, rows)
        metrics["finetuned_loss"] = finetuned.loss
        metrics["finetuned_accuracy"] = finetuned.accuracy
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
        shown_alone=True,
        split=_split_of,
        images=_held_out_images,
    ),
    sum_action(
        "scores",
        score_sums,
        _score_summands,
        phase=RunPhase.EVALUATION,
        progress_label="evaluation at the clients: sums of scores",
        settings={"split": str},
        model="edit_space",
        validate=_validate_split,
        split=_split_of,
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
