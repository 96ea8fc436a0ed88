"""Handing the adapted model on: a `transformers` folder, a PEFT adapter folder, or an edit, each with a card."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedgraft.core.errors import FedgraftError
from fedgraft.core.progress import phase
from fedgraft.edit import edit_file
from fedgraft.models.card import Card
from fedgraft.models.export import atomic_folder, check_free, export_model, write_labels
from fedgraft.report.values import format_epsilon
from fedgraft.runs.adapted import Adapted, adapted
from fedgraft.runs.edit_files import edit_of
from fedgraft.runs.folder import RunFolder

Summary = Mapping[str, Any]


def export_run(folder: Path | str, to: Path | str, kind: str = "merged") -> Path:
    """The adapted model of a run folder as one of `KINDS`; the run's images need not be there any more."""
    check_free(Path(to))  # before anything is loaded
    record = RunFolder.open(folder)
    summary = record.summary() if record.status == "finished" else {}
    return deliver(adapted(folder, data=False), summary, to, kind, record.path.resolve().name)


def deliver(found: Adapted, summary: Summary, to: Path | str, kind: str = "merged", name: str = "run") -> Path:
    """What was trained, in a new folder: the whole model (merged), an adapter, or the edit alone."""
    if kind not in KINDS:
        raise FedgraftError(f"a model cannot be exported as {kind!r}; choose {', '.join(KINDS)}.")
    with phase("export"):
        return KINDS[kind](found, card_of(found, summary), Path(to), name)


def _merged(found: Adapted, card: Card, to: Path, name: str) -> Path:
    """The network as it was trained, factors merged, with the very preprocessing of its training."""
    return export_model(found.plain(), to, found.classes, found.setup.task.transform.preprocessor, card.text())


def _adapter(found: Adapted, card: Card, to: Path, name: str) -> Path:
    """Only the low-rank factors and the head, as a folder that `PeftModel.from_pretrained` loads on the base."""
    from fedgraft.models.adapter import export_adapter

    base = found.base()
    text = card.text("adapter", bundled=not base.stored)
    return export_adapter(found.network, base, to, found.classes, found.setup.task.transform.preprocessor, text)


def _edit(found: Adapted, card: Card, to: Path, name: str) -> Path:
    """What training did to the base as one small file, `adapted.edit`."""
    edit = edit_of(found, name)
    with atomic_folder(to) as made:
        edit_file.save_edit(edit, made / "adapted.edit")
        write_labels(made, found.classes)
        (made / "README.md").write_text(card.text("edit"), encoding="utf-8")
    return to


KINDS: dict[str, Callable[[Adapted, Card, Path, str], Path]] = {"merged": _merged, "adapter": _adapter, "edit": _edit}


def card_of(found: Adapted, summary: Summary) -> Card:
    """What there is to say about the model."""
    task, config, algorithm = found.setup.task, found.setup.config, found.setup.algorithm
    edited, data = summary.get("edited", {}), summary.get("data", {})
    training: dict[str, object] = {
        "algorithm": algorithm.name,
        "rounds": summary.get("rounds"),
        "delivered": _delivered(summary),
        "clients": config.partition.clients,
        "local rate": algorithm.local.lr,
        "batch": algorithm.local.batch_size,
        "weights trained": f"{edited.get('coordinates', 0):,} of {edited.get('of', 0):,}",
        "seed": config.seed,
    }
    told = data and f"{data['name']}: {data['images']:,} training images, {data['clients']} owners. "
    return Card(
        title=f"{config.name}, adapted with fedgraft",
        data=f"{told or ''}Classes: {', '.join(found.classes)}.",
        base=task.network.source,
        licence=task.network.licence,
        training=training,
        metrics=_metrics(summary),
        protection=_protection(found, summary),
    )


def _delivered(summary: Summary) -> str:
    best = summary.get("best_round")
    return "" if best is None else "the model the run began with" if best == 0 else f"the model after round {best}"


def _metrics(summary: Summary) -> dict[str, object]:
    """The run's numbers; those of `metrics` with the images behind them."""
    found, test = summary.get("metrics") or {}, summary.get("test") or {}
    rows: dict[str, object] = {
        f"test {name}": value["value"] for name, value in found.items() if value and ":" not in name
    }
    if "accuracy" in test:
        rows = {"test accuracy": test["accuracy"], **rows, "test images": test.get("count")}
    if (start := summary.get("start")) is not None:
        rows["validation accuracy at the start"] = start
    rows["validation accuracy"] = (summary.get("validation") or {}).get("accuracy")
    return {name: value for name, value in rows.items() if value is not None}


def _protection(found: Adapted, summary: Summary) -> str:
    privacy = found.setup.algorithm.privacy
    told = [
        "updates were summed under secure aggregation"
        if privacy.collects_sum
        else "updates were aggregated in the clear"
    ]
    told += [summary["protection"]] if "protection" in summary else []
    if "privacy" in summary:
        account = summary["privacy"]
        told.append(f"epsilon {format_epsilon(account['epsilon'])} at delta {account['delta']:.3g}, per client")
        told += [f"not covered: {text}" for text in summary["privacy"].get("not_covered", [])]
    else:
        told.append("no noise was added" if privacy.noise is None else "noise was added")
    return "; ".join(told) + "."
