"""Handing the adapted model on: a `transformers` folder or a PEFT adapter folder, with a card that says what it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedgraft.config.options import Config
from fedgraft.edit.lora import adapted as adapters
from fedgraft.edit.lora import merge
from fedgraft.models.card import Card
from fedgraft.models.export import export
from fedgraft.models.network import VisionNetwork
from fedgraft.progress import phase
from fedgraft.runs.task import Task


def deliver(task: Task, config: Config, algorithm: str, summary: Mapping[str, Any], to: Path | str) -> Path:
    """The network as it was trained, factors merged, with the very preprocessing of its training."""
    return export_network(task.network, task, card_of(task, config, algorithm, summary).text(), to)


def deliver_adapter(
    task: Task, base: VisionNetwork, config: Config, algorithm: str, summary: Mapping[str, Any], to: Path | str
) -> Path:
    """Only the low-rank factors and the head, as a folder that `PeftModel.from_pretrained` loads on the base."""
    from fedgraft.models.adapter import export_adapter

    card = card_of(task, config, algorithm, summary)
    return export_adapter(
        task.network, base, Path(to), list(task.data.dataset.classes), preprocessor_of(task), card.text(adapter=True)
    )


def export_network(network: VisionNetwork, task: Task, card: str, to: Path | str) -> Path:
    """Any network for this task's classes, with this task's preprocessing."""
    if adapters(network):
        merge(network)
    with phase("export"):
        return export(network, Path(to), list(task.data.dataset.classes), preprocessor_of(task), card)


def preprocessor_of(task: Task) -> dict[str, Any]:
    """What preprocessor_config.json must say to give the pixels of training."""
    return task.transform.rule.to_preprocessor(task.transform.mean, task.transform.std)


def card_of(task: Task, config: Config, algorithm: str, summary: Mapping[str, Any]) -> Card:
    """What there is to say about the model."""
    data, test = task.data, summary.get("test", {})
    edited = summary.get("edited", {})
    training = {
        "algorithm": algorithm, "rounds": summary.get("rounds"), "clients": data.clients,
        "weights trained": f"{edited.get('coordinates', 0):,} of {edited.get('of', 0):,}", "seed": config.seed,
    }  # fmt: skip
    metrics = {"test accuracy": test.get("accuracy"), "test images": test.get("count")} if test else {}
    metrics["validation accuracy"] = summary.get("validation", {}).get("accuracy")
    p = config.privacy
    told = [f"aggregation: {p.aggregation}"]
    if "privacy" in summary:
        told.append("epsilon {epsilon:.3g} at delta {delta:.3g}, per client".format(**summary["privacy"]))
    return Card(
        title=f"{config.name}, adapted with fedgraft",
        data=f"{data.dataset.name}: {data.total:,} training images of {data.classes} classes, {data.clients} owners.",
        base=task.network.source,
        licence=task.network.licence,
        training=training,
        metrics=metrics,
        protection="; ".join(told),
    )
