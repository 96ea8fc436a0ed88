"""Is it known who is similar? Runs with a model per client, each arm fine-tuned at the rate that suits it.

A client's body is fixed while its head is fine-tuned, so what enters the head is computed once and every rate is tried
on it: the same steps as `personal.finetune_part="head"` takes (SGD with momentum 0.9, batches of 50, five passes), from
the same head. The rate of an arm is the one with the highest mean accuracy on validation images of the client's
classes, over clients and measured seeds; test images are looked at once that is chosen. Rate 0 is no fine-tuning.

The last mixing matrix of a run is held against how much two clients' classes overlap: a similarity that knows who is
similar gives more weight where more is shared.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgraft.client.context import ClientContext, pooled_batches
from fedgraft.config.load import Config, to_toml
from fedgraft.core.rng import torch_stream
from fedgraft.core.state import ServerState
from fedgraft.core.store import write_text
from fedgraft.local.features import feature_batches
from fedgraft.runs.loop import run_setup
from fedgraft.runs.open_run import OpenRun
from fedgraft.runs.setup import RunSetup, setup_of
from reproduction.reproduce import Found, Tables, Work, with_rate
from reproduction.runs import FinishedRuns

FINETUNED = "finetuned.json"
"""Beside a finished run: accuracy by fine-tuning rate, and what its mixture knows."""
RATES = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1)
PASSES, BATCH, MOMENTUM = 5, 50, 0.9
Split = tuple[Tensor, Tensor]
"""Features (n, d) and labels (n,) of some images of a client."""


def finetune_heads(
    weight: Tensor, bias: Tensor, train: Split, rates: Sequence[float], seed: int
) -> tuple[Tensor, Tensor]:
    """Return the heads after fine-tuning at each rate, weights (R, classes, d) and biases (R, classes).

    All rates start from the same head and see the same batches. The gradient is that of the mean cross-entropy.
    """
    features, labels = train
    scale = torch.tensor(rates).view(-1, 1, 1)
    weights = weight.repeat(len(rates), 1, 1)
    biases = bias.repeat(len(rates), 1)
    velocity_w = torch.zeros_like(weights)
    velocity_b = torch.zeros_like(biases)
    targets = torch.nn.functional.one_hot(labels, len(bias)).to(features.dtype)
    shuffle = torch_stream(seed, "finetune")
    for _ in range(PASSES):
        for batch in torch.randperm(len(labels), generator=shuffle).split(BATCH):
            logits = features[batch] @ weights.transpose(1, 2) + biases[:, None]  # (R, B, classes)
            gradient = (logits.softmax(-1) - targets[batch]) / len(batch)
            velocity_w = MOMENTUM * velocity_w + gradient.transpose(1, 2) @ features[batch]
            velocity_b = MOMENTUM * velocity_b + gradient.sum(1)
            weights = weights - scale * velocity_w
            biases = biases - scale[:, 0] * velocity_b
    return weights, biases


def accuracies(weights: Tensor, biases: Tensor, split: Split) -> list[float]:
    """Return the accuracy of each head in percent; NaN where there is no image."""
    features, labels = split
    if not len(labels):
        return [float("nan")] * len(biases)
    predicted = (features @ weights.transpose(1, 2) + biases[:, None]).argmax(-1)  # (R, n)
    return [100 * float(right.float().mean()) for right in predicted == labels]


def overlap_correlation(mixing: Tensor, histogram: np.ndarray) -> float:
    """Return the correlation, over pairs of clients, of the weight one gives the other with their classes' overlap.

    Overlap is the cosine of two clients' label counts. NaN where all pairs weigh or overlap the same.
    """
    counts = histogram / np.linalg.norm(histogram, axis=1, keepdims=True)
    pairs = ~np.eye(len(counts), dtype=bool)
    overlap = (counts @ counts.T)[pairs]
    # A weight is the similarity times the other client's images; only the similarity may know anything.
    weights = (mixing.double().numpy() / histogram.sum(axis=1))[pairs]
    # Weights that differ by rounding only are one constant: their "correlation" would be noise.
    if np.ptp(weights) <= 1e-6 * weights.max() or not overlap.std():
        return float("nan")
    return float(np.corrcoef(weights, overlap)[0, 1])


def measured(setup: RunSetup, opened: OpenRun, state: ServerState) -> dict[str, Any]:
    """Return mean accuracy over clients, by fine-tuning rate, on their validation and on their test images."""
    context, data = opened.context, setup.task.data
    histogram = data.histogram()
    held = data.validation_rows
    validation, test = [], []
    for client in range(data.clients):
        context.load_model(state.model_of(client), None)
        train = _features(context, data.rows(client))
        own_classes = torch.from_numpy(np.flatnonzero(histogram[client]))
        mine = held[torch.isin(context.examples.labels[held], own_classes)]
        head = context.network.head
        weights, biases = finetune_heads(
            head.weight.detach(), head.bias.detach(), train, RATES, setup.config.seed * 1000 + client
        )
        validation.append(accuracies(weights, biases, _features(context, mine)))
        test.append(accuracies(weights, biases, _test_features(context, data.test_rows(client))))
    return {
        "rates": list(RATES),
        "validation": np.nanmean(validation, axis=0).tolist(),
        "test": np.nanmean(test, axis=0).tolist(),
    }


def _features(context: ClientContext, rows: Tensor) -> Split:
    """Return what enters the head for rows of the training store, and their labels."""
    if not len(rows):
        return torch.zeros(0, context.network.width), torch.zeros(0, dtype=torch.int64)
    found = pooled_batches(context, rows)
    return torch.cat([features for features, _ in found]), torch.cat([labels for _, labels in found])


def _test_features(context: ClientContext, rows: Tensor) -> Split:
    assert context.tests is not None
    batches = list(feature_batches(context.network, context.tests, rows))
    labels = torch.cat([context.tests.labels[batch] for batch, _ in batches])
    return torch.cat([features for _, features in batches]), labels


def run_and_measure(config: Config, folder: Path) -> None:
    """Run in this folder and leave `finetuned.json` there; a run that was killed before that is begun anew."""
    if folder.is_dir() and (folder / "summary.json").is_file():
        shutil.rmtree(folder)
    _, done = run_setup(
        lambda secret: (setup_of(config, secret=secret), None),
        folder,
        config.digest,
        to_toml(config),
        None,
        False,
    )
    assert done is not None
    setup, opened, state = done
    result = measured(setup, opened, state)
    mixing = last_mixing(folder)
    if mixing is not None:
        result["correlation"] = overlap_correlation(mixing, setup.task.data.histogram())
        result["self_weight"] = float(mixing.double().diagonal().mean())
    write_text(folder / FINETUNED, json.dumps(result) + "\n")


def last_mixing(folder: Path) -> Tensor | None:
    """Return the mixing matrix of the last round that drew one; None: this run mixes nobody."""
    import safetensors.torch

    files = sorted((folder / "figures").glob("crsm-round-*.safetensors"))
    if not files:
        return None
    return safetensors.torch.load(files[-1].read_bytes())["mixing"]


def known(work: Work) -> Found:
    """Carry out the study: all arms of seed 1, then of seed 2, and so on; what is finished is read."""
    from reproduction.reproduce import tune

    every = work.cells
    rates, at_edge = tune(work, every)
    finished = FinishedRuns(work.runs)
    results: dict[str, dict[int, dict[str, Any]]] = {}
    for seed in work.seeds:
        for cell in every:
            config = with_rate(cell.config(seed=seed), rates.get(cell.label))
            folder = finished.get(config, False)
            if folder is None or not (folder / FINETUNED).is_file():
                if work.read:
                    continue
                work.report(f"{cell.label}, seed {seed}")
                folder = work.runs / f"{config.name}-{config.digest}"
                run_and_measure(config, folder)
            results.setdefault(cell.label, {})[seed] = json.loads((folder / FINETUNED).read_text("utf-8"))
    values: dict[str, dict[str, dict[int, float]]] = {}
    rows = []
    for cell in every:
        if mine := results.get(cell.label):
            values[cell.label], row = at_best_rate(mine)
            rows.append({"arm": cell.label, **row})
    extra: Tables = {}
    if rows:
        extra["Fine-tuning rates, self-weight, and what the weights know"] = (_SAID, rows)
    return Found(work, every, rates=rates, values=values, at_edge=at_edge, extra=extra, titles=TITLES)


def at_best_rate(by_seed: Mapping[int, Mapping[str, Any]]) -> tuple[dict[str, dict[int, float]], dict[str, str]]:
    """Return an arm's numbers by measure and seed at the fine-tuning rate that validation chooses, and a table row."""
    rates = next(iter(by_seed.values()))["rates"]
    validation = np.mean([one["validation"] for one in by_seed.values()], axis=0)
    best = int(np.argmax(validation))
    raw = rates.index(0.0)
    values = {
        "finetuned": {seed: one["test"][best] for seed, one in by_seed.items()},
        "personal": {seed: one["test"][raw] for seed, one in by_seed.items()},
        "best": {seed: one["validation"][best] for seed, one in by_seed.items()},
    }
    for name in ("correlation", "self_weight"):
        series = {seed: one[name] for seed, one in by_seed.items() if one.get(name) == one.get(name) and name in one}
        if series:
            values[name] = series
    row = {"fine-tuning rate": f"{rates[best]:g}" + (" (the largest tried)" if best == len(rates) - 1 else "")}
    for at, rate in enumerate(rates):
        row[f"test at {rate:g}"] = f"{np.mean([one['test'][at] for one in by_seed.values()]):.1f}"
    row["own weight"] = _mean(values.get("self_weight"), ".3f")
    row["correlation with shared classes"] = _mean(values.get("correlation"), "+.2f")
    row["seeds"] = str(len(by_seed))
    return values, row


def _mean(series: Mapping[int, float] | None, form: str) -> str:
    if not series:
        return "–"
    return format(float(np.mean(list(series.values()))), form)


TITLES = {
    "finetuned": "mean client accuracy at the arm's own fine-tuning rate (%)",
    "personal": "mean client accuracy before fine-tuning (%)",
    "best": "validation at that rate (%)",
    "correlation": "correlation of weights with shared classes",
    "self_weight": "weight of the own model",
}
_SAID = (
    "Mean over seeds and clients; test accuracy (%) at every fine-tuning rate, 0 being none. The rate is chosen on "
    "validation images. The correlation is over pairs of clients, of the last round's weights with the cosine of label "
    "counts; – where all others weigh the same."
)
