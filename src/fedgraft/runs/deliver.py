"""Exporting the adapted model: a `transformers` folder, a PEFT adapter folder, or an edit, each with a model card."""

from __future__ import annotations

import tempfile
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
    """Write the adapted model of a run folder into the new folder `to`, as one of `KINDS`, and return that folder.

    The run's images need not exist any more.
    """
    check_free(Path(to))  # before anything is loaded
    record = RunFolder.open(folder)
    summary: Summary = {}
    if record.status in {"finished", "stopped"}:
        summary = record.summary()
    return deliver(adapted(folder, data=False), summary, to, kind, record.path.resolve().name)


def deliver(run: Adapted, summary: Summary, to: Path | str, kind: str = "merged", name: str = "run") -> Path:
    """Write the adapted model into the new folder `to`: the whole model (merged, onnx), an adapter, or the edit alone.

    `summary` is that of summary.json, for the model card; `name` is that of the run. Returns the folder.
    """
    if kind not in KINDS:
        raise FedgraftError(
            "E-RUN-EXPORT-KIND",
            f"a model cannot be exported as {kind!r}",
            f"choose {', '.join(KINDS)}",
            kind=kind,
        )
    if kind in ("adapter", "edit") and run.network.label_sets:
        raise FedgraftError(
            "E-RUN-EXPORT-KIND",
            f"a model of sets of findings cannot be exported as {kind!r}, which does not say that it is one",
            "choose merged or onnx",
            kind=kind,
        )
    with phase("export"):
        return KINDS[kind](run, card_of(run, summary), Path(to), name)


def _merged(run: Adapted, card: Card, to: Path, name: str) -> Path:
    """Write the adapted network, low-rank factors merged, with the preprocessing of its training; return `to`.

    `name`, the run's, is not used here.
    """
    thresholds = card.thresholds
    return export_model(run.plain(), to, run.classes, run.setup.task.transform.preprocessor, card.text(), thresholds)


def _adapter(run: Adapted, card: Card, to: Path, name: str) -> Path:
    """Write only the low-rank factors and the head, as a folder that `PeftModel.from_pretrained` loads on the base.

    Return the folder. `name`, the run's, is not used here.
    """
    from fedgraft.models.adapter import export_adapter

    base = run.base()
    text = card.text("adapter", bundled=not base.stored)
    return export_adapter(run.network, base, to, run.classes, run.setup.task.transform.preprocessor, text)


def _edit(run: Adapted, card: Card, to: Path, name: str) -> Path:
    """Write the difference of the adapted network to its base as one small file, `adapted.edit`, in the folder `to`.

    `name` is the run's, which the edit is called after. Return the folder.
    """
    edit = edit_of(run, name)
    with atomic_folder(to) as new_folder:
        edit_file.save_edit(edit, new_folder / "adapted.edit")
        write_labels(new_folder, run.classes)
        (new_folder / "README.md").write_text(card.text("edit"), encoding="utf-8")
    return to


def _onnx(run: Adapted, card: Card, to: Path, name: str) -> Path:
    """Write the adapted network as an ONNX file with its classes and preprocessing; return the folder `to`.

    `name`, the run's, is not used here.
    """
    from fedgraft.models.onnx_file import export_onnx

    preprocessor = run.setup.task.transform.preprocessor
    return export_onnx(run.plain(), to, run.classes, preprocessor, card.text("onnx"))


KINDS: dict[str, Callable[[Adapted, Card, Path, str], Path]] = {
    "merged": _merged,
    "adapter": _adapter,
    "edit": _edit,
    "onnx": _onnx,
}


def push_to_hub(
    run: Adapted, summary: Summary, repository: str, kind: str, private: bool, token: str | None, name: str
) -> str:
    """Export the model and upload it to a repository of the Hugging Face Hub; return the address of the commit.

    The repository is made if there is none, `private` unless told otherwise; nothing else is uploaded than the folder
    that `deliver` writes.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    api = HfApi(token=token)
    with tempfile.TemporaryDirectory(prefix="fedgraft-hub-") as scratch:
        folder = deliver(run, summary, Path(scratch) / "model", kind, name)
        try:
            with phase("upload"):
                api.create_repo(repository, private=private, exist_ok=True)
                commit = api.upload_folder(
                    repo_id=repository, folder_path=folder, commit_message=f"Upload {name}, adapted with fedgraft"
                )
        except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise FedgraftError(
                "E-RUN-HUB",
                f"the model could not be uploaded to {repository!r}: {reason}",
                "log in with `hf auth login`, or save it with save_pretrained(...) and upload that folder",
                repository=repository,
            ) from error
    return str(commit.commit_url)


def card_of(run: Adapted, summary: Summary) -> Card:
    """Return the model card of a run's model."""
    network = run.setup.task.network
    config = run.setup.config
    algorithm = run.setup.algorithm
    edited = summary.get("edited", {})
    clients = config.partition.clients
    if summary.get("data"):
        clients = summary["data"]["clients"]  # owners come with the data, whatever the config says
    training: dict[str, object] = {
        "algorithm": algorithm.name,
        "rounds": summary.get("rounds"),
        "delivered": _delivered(summary),
        "clients": clients,
        "learning rate": summary.get("learning_rate", algorithm.local.lr),
        "batch": algorithm.local.batch_size,
        "weights trained": f"{edited.get('coordinates', 0):,} of {edited.get('of', 0):,}",
        "seed": config.seed,
    }
    return Card(
        title=f"{config.name}, adapted with fedgraft",
        data=_data(run, summary),
        base=network.source,
        licence=network.licence,
        training=training,
        metrics=_metrics(summary),
        protection=_protection(run, summary),
        thresholds=summary.get("thresholds") or {},
    )


def _data(run: Adapted, summary: Summary) -> str:
    """Return the model card's sentences about the training data."""
    classes = f"Classes: {', '.join(run.classes)}."
    data = summary.get("data")
    if not data:
        return classes
    return f"{data['name']}: {data['images']:,} training images, {data['clients']} owners. {classes}"


def _delivered(summary: Summary) -> str:
    """Return which model of the run is delivered; empty where the run has no summary."""
    best_round = summary.get("best_round")
    if best_round is None:
        return ""
    if best_round == 0:
        return "the model the run began with"
    return f"the model after round {best_round}"


def _metrics(summary: Summary) -> dict[str, object]:
    """Return the rows of the card's table of metrics by name, those of the test first."""
    test = summary.get("test") or {}
    rows: dict[str, object] = {}
    if "accuracy" in test:
        rows["test accuracy"] = test["accuracy"]
    for name, metric in (summary.get("metrics") or {}).items():
        is_of_one_class = ":" in name
        if metric and not is_of_one_class:
            rows[f"test {name}"] = metric["value"]
    if "accuracy" in test:
        rows["test images"] = test.get("count")
    rows["validation accuracy at the start"] = summary.get("start")
    rows["validation accuracy"] = (summary.get("validation") or {}).get("accuracy")
    return {name: value for name, value in rows.items() if value is not None}


def _protection(run: Adapted, summary: Summary) -> str:
    """Return the card's sentence about how updates were protected."""
    privacy = run.setup.algorithm.privacy
    phrases = []
    if privacy.collects_sum:
        phrases.append("updates were summed under secure aggregation")
    else:
        phrases.append("updates were aggregated in the clear")
    if "protection" in summary:
        phrases.append(summary["protection"])
    account = summary.get("privacy")
    if account is not None:
        phrases.append(
            f"epsilon {format_epsilon(account['epsilon'])} at delta {account['delta']:.3g}, per {account['unit']}"
        )
        for gap in account.get("not_covered", []):
            phrases.append(f"not covered: {gap}")
    elif not privacy.answers_only_accounted:
        phrases.append("no noise was added")
    else:
        phrases.append("noise was added")
    return "; ".join(phrases) + "."
