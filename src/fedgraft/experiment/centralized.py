"""Centralised training: all images in one place. The baseline that federated numbers are held against.

A linear probe, full (or partial) fine-tuning, or a ridge head in closed form - with the same transforms, the same
training loop, the same validation split and the same run folder as a federated run. A "round" is an epoch.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from fedgraft.client import Workplace, give_stream
from fedgraft.experiment import step_zero
from fedgraft.experiment.build import Setup
from fedgraft.experiment.config import Config, merge, to_toml, validate
from fedgraft.experiment.record import RunFolder
from fedgraft.experiment.report import write_report
from fedgraft.experiment.run import Best, Progress, Silent, install_head, one_thread
from fedgraft.experiment.trackers import open_trackers
from fedgraft.local.evaluate import evaluate
from fedgraft.local.train import train
from fedgraft.randomness import torch_stream

log = logging.getLogger("fedgraft")


def as_central(config: Config) -> Config:
    """The same config with one client that holds everything, trained for whole epochs."""
    c = config.centralized
    moves = {"probe": {"kind": "head"}, "ridge": {"kind": "head"}, "finetune": {}}[c.kind]
    kind = config.moves.kind
    if c.kind == "finetune" and kind == "head":
        moves = {"kind": "everything"}
    table = config.model_dump(mode="json", exclude_none=True)
    table = merge(table, {"moves": moves, "partition": {"kind": "iid", "clients": 1}, "rounds": {"fraction": 1.0}})
    table["local"].pop("steps", None)
    table = merge(table, {"local": {"epochs": 1}, "rounds": {"total": c.epochs}})
    if c.kind == "ridge":
        table = merge(table, {"model": {"head": "ridge"}})
    return validate(table)


def run_centralized(
    config: Config, folder: Path, progress: Progress | None = None, console: bool = True
) -> dict[str, Any]:
    """Train on everything in one place; returns the summary. Resumes like a federated run."""
    config = as_central(config)
    record = RunFolder.create(folder, to_toml(config), config.digest)
    if record.status == "finished":
        return record.summary()
    with record.writing(console=console), one_thread():
        setup = Setup(config)
        trackers = open_trackers(config.track.trackers, record.path, config.name, config.model_dump(mode="json"))
        with trackers as track:
            summary = _epochs(config, setup, record, progress or Silent(), track)
            track.finish(summary)
        record.finish(summary)
        write_report(record.path)
        return summary


def _epochs(config: Config, setup: Setup, record: RunFolder, progress: Progress, track: Any) -> dict[str, Any]:
    c, f = config.centralized, setup.federation
    total = 0 if c.kind == "ridge" else c.epochs
    found = record.resume()
    began = time.perf_counter()
    if found is None:
        install_head(setup)
        state = setup.algorithm.local.optimizer.init(setup.space.trained)
        vector, epoch, losses, best, spent = setup.space.gather(setup.network), 0, [], Best(), 0.0
    else:
        t = found.tensors
        step_zero.install(setup.network, torch.cat([t["head/weight"], t["head/bias"][:, None]], 1))
        state = {name.removeprefix("optimizer/"): v for name, v in t.items() if name.startswith("optimizer/")}
        vector, epoch, losses = t["vector"], found.round, list(found.meta["losses"])
        best, spent = Best(**found.meta["best"], vector=t.get("best/vector")), float(found.meta["seconds"])
    head = {
        "head/weight": setup.network.head.weight.detach().clone(),
        "head/bias": setup.network.head.bias.detach().clone(),
    }
    progress.start(
        total, epoch, f"centralised {c.kind}: {setup.space.trained:,} weights, {len(setup.deal.train_rows):,} images"
    )
    place = setup.place
    rows = setup.deal.validation_rows if len(setup.deal.validation_rows) else setup.deal.train_rows
    while epoch < total and not (c.patience and best.stale >= c.patience):
        tick = time.perf_counter()
        bound = place.bind(setup.space)
        bound.load(vector)
        rate = f.schedule(epoch, total, losses)
        line = _one_epoch(setup, place, bound, state, rate, epoch)
        vector = bound.values.clone()
        measured = evaluate(setup.network, setup.examples, rows)
        epoch += 1
        losses.append(measured.loss)
        better = measured.accuracy > best.accuracy
        best = Best(measured.accuracy, epoch, 0, vector) if better else replace(best, stale=best.stale + 1)
        line |= {
            "round": epoch,
            "lr": rate,
            "accuracy": measured.accuracy,
            "loss": measured.loss,
            "top5": measured.top5,
        }
        line["seconds"] = {"train": time.perf_counter() - tick}
        record.append(line)
        track.log(epoch, line)
        progress.update(line)
        if epoch == total or epoch % config.rounds.checkpoint_every == 0 or better:
            tensors = {"vector": vector, **head, **{f"optimizer/{k}": v for k, v in state.items()}}
            if best.vector is not None:
                tensors["best/vector"] = best.vector
            now = {"accuracy": best.accuracy, "round": best.round, "stale": best.stale}
            meta = {"losses": losses, "best": now, "seconds": spent + time.perf_counter() - began}
            record.save_checkpoint(epoch, tensors, meta, best=best.accuracy if better else None)
    if total == 0:
        measured = evaluate(setup.network, setup.examples, rows)
        best = Best(measured.accuracy, 0, 0, vector)
        record.save_checkpoint(0, {"vector": vector, **head, "best/vector": vector}, {"losses": []}, best=best.accuracy)
    setup.space.scatter(best.vector if best.vector is not None else vector, setup.network)
    test = evaluate(setup.network, setup.tests, torch.arange(len(setup.tests.labels)))
    return {
        "kind": f"centralised {c.kind}",
        "validation": {"accuracy": best.accuracy},
        "best_round": best.round,
        "test": asdict(test),
        "rounds": epoch,
        "bytes_up": 0,
        "bytes_down": 0,
        "seconds": spent + time.perf_counter() - began,
        "edited": {"coordinates": setup.space.trained, "of": sum(p.numel() for p in setup.network.parameters())},
    }


def _one_epoch(
    setup: Setup, place: Workplace, bound: Any, state: dict[str, Any], rate: float, epoch: int
) -> dict[str, Any]:
    seed = setup.config.seed
    give_stream(setup.network, torch_stream(seed, "layers", "epoch", epoch))
    result = train(
        setup.network, bound, setup.examples, setup.deal.train_rows, setup.algorithm.local, lambda step: rate,
        torch_stream(seed, "shuffle", "epoch", epoch), torch_stream(seed, "augment", "epoch", epoch), state=state,
    )  # fmt: skip
    return {"train_loss": result.loss, "steps": result.steps}
