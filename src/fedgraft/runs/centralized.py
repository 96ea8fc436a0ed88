"""Centralised training: all images in one place. The baseline that federated numbers are held against.

A linear probe, full (or partial) fine-tuning, or a ridge head in closed form - with the same transforms, the same
training loop, the same validation split and the same run folder as a federated run. A "round" is an epoch.
"""

from __future__ import annotations

import logging
import time
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from fedgraft import zoo
from fedgraft.client import give_stream
from fedgraft.runs import head_init as head_init
from fedgraft.runs.setup import Setup
from fedgraft.runs.checkpoint import Checkpoint
from fedgraft.config.load import Config, merge, to_toml, validate
from fedgraft.runs.tracking import Tracking, Progress, Silent
from fedgraft.runs.reporting import report_run
from fedgraft.runs.run_folder import RunFolder
from fedgraft.runs.run import Best, is_finished, one_thread
from fedgraft.runs.head_init import install_head
from fedgraft.local.evaluate import evaluate
from fedgraft.local.train import train
from fedgraft.randomness import torch_stream

log = logging.getLogger("fedgraft")


def as_central(config: Config) -> Config:
    """The same config with one client that holds everything, trained for whole epochs."""
    c = config.centralized
    zoo.named(config.algorithm.name)  # it plays no part here, but a name that does not exist is a mistake
    trainable = {"probe": {"kind": "head"}, "ridge": {"kind": "head"}, "finetune": {}}[c.kind]
    kind = config.trainable.kind
    if c.kind == "finetune" and kind == "head":
        trainable = {"kind": "everything"}
    table = config.model_dump(mode="json", exclude_none=True)
    table = merge(table, {"trainable": trainable, "partition": {"kind": "iid", "clients": 1}, "rounds": {"fraction": 1.0}})
    table["local"].pop("steps", None)
    table = merge(table, {"local": {"epochs": 1}, "rounds": {"total": c.epochs}, "algorithm": {"name": "fedavg"}})
    if c.kind == "ridge":
        table = merge(table, {"model": {"head": "ridge"}})
    return validate(table)


def run_centralized(
    config: Config, folder: Path, progress: Progress | None = None, console: bool = True
) -> dict[str, Any]:
    """Train on everything in one place; returns the summary. Resumes like a federated run."""
    config = as_central(config)
    with one_thread():
        done = is_finished(folder)
        setup = None if done and (folder / "report.html").exists() else Setup(config)
        record = RunFolder.create(folder, to_toml(config), config.digest)
        (record.path / "centralized").touch()  # tells `fedgraft resume` what kind of run this is
        if done:
            if setup is not None:
                report_run(record, setup)
            return record.summary()
        assert setup is not None
        with record.writing(console=console), closing(setup):
            summary = _Central(setup, record, progress or Silent()).go()
            record.finish(summary)
        report_run(record, setup)
        return summary


class _Central:
    """One centralised run. State: the vector, the optimizer's buffers, the epoch, the losses, the best so far."""

    def __init__(self, setup: Setup, record: RunFolder, progress: Progress) -> None:
        self.setup, self.config, self.record, self.progress = setup, setup.config, record, progress
        self.epoch, self.losses, self.best, self.spent = 0, [], Best(), 0.0  # type: ignore[var-annotated]
        rows = self.setup.federated.validation_rows
        self.judged = rows if len(rows) else self.setup.federated.train_rows

    def go(self) -> dict[str, Any]:
        """Epochs from where the last checkpoint stands, then the test."""
        c, setup = self.config.centralized, self.setup
        found = self.record.resume()
        if found is None:
            self._begin()
        else:
            self._restore(found)
        total = 0 if c.kind == "ridge" else c.epochs
        images = len(setup.federated.train_rows)
        self.progress.start(
            total, self.epoch, f"centralised {c.kind}: {setup.space.trained:,} weights, {images:,} images"
        )
        with Tracking(self.config, self.record.path, self.epoch) as track:
            if total == 0:
                self._judge({})
                self._save()
            while self.epoch < total and not (c.patience and self.best.stale >= c.patience):
                line = self._train()
                self.record.append(line)
                track.log(line)
                self.progress.update(line)
                self._save()
            track.summary = summary = self._summary()
        return summary

    def _begin(self) -> None:
        install_head(self.setup)
        self.stored = self.setup.open()
        self.vector = self.setup.space.gather(self.setup.network)
        self.state = self.setup.algorithm.local.optimizer.init(self.setup.space.trained)

    def _train(self) -> dict[str, Any]:
        """One pass over the training images, then the validation images."""
        began, setup, seed, epoch = time.perf_counter(), self.setup, self.config.seed, self.epoch
        rate = setup.federation.schedule(epoch, self.config.centralized.epochs, self.losses)
        bound = setup.context.bind(setup.space)
        bound.load(self.vector)
        give_stream(setup.network, torch_stream(seed, "layers", "epoch", epoch))
        result = train(
            setup.network, bound, setup.examples, setup.federated.train_rows, setup.algorithm.local, lambda step: rate,
            torch_stream(seed, "shuffle", "epoch", epoch), torch_stream(seed, "augment", "epoch", epoch),
            state=self.state,
        )  # fmt: skip
        self.vector, self.epoch = bound.values.clone().cpu(), epoch + 1
        line = {"round": self.epoch, "lr": rate, "train_loss": result.loss, "steps": result.steps}
        self._judge(line)
        seconds = time.perf_counter() - began
        self.spent += seconds
        return {**line, "seconds": {"train": seconds}}

    def _judge(self, line: dict[str, Any]) -> None:
        """Measure on validation images and remember the best."""
        found = evaluate(self.setup.network, self.setup.examples, self.judged)
        self.losses.append(found.loss)
        better = found.accuracy > self.best.accuracy
        stale = replace(self.best, stale=self.best.stale + 1)
        self.best = Best(found.accuracy, self.epoch, 0, self.vector) if better else stale
        line |= {"accuracy": found.accuracy, "loss": found.loss, "top5": found.top5}

    def _save(self) -> None:
        tensors = {"vector": self.vector, **{f"optimizer/{k}": v for k, v in self.state.items()}}
        tensors |= {f"edit/{key}": value for key, value in self.stored.items()}
        tensors |= dict(zip(("head/weight", "head/bias"), self.setup.head_start, strict=True))
        if self.best.vector is not None:
            tensors["best/vector"] = self.best.vector
        best = {"accuracy": self.best.accuracy, "round": self.best.round, "stale": self.best.stale}
        meta = {"losses": self.losses, "best": best, "seconds": self.spent}
        fresh = self.best.round == self.epoch
        self.record.save_checkpoint(self.epoch, tensors, meta, best=self.best.accuracy if fresh else None)

    def _restore(self, found: Checkpoint) -> None:
        t = found.tensors
        head_init.install(self.setup.network, torch.cat([t["head/weight"], t["head/bias"][:, None]], 1))
        self.stored = self.setup.open({n.removeprefix("edit/"): v for n, v in t.items() if n.startswith("edit/")})
        self.state = {n.removeprefix("optimizer/"): v for n, v in t.items() if n.startswith("optimizer/")}
        self.vector, self.epoch, self.losses = t["vector"], found.round, list(found.meta["losses"])
        self.best, self.spent = Best(**found.meta["best"], vector=t.get("best/vector")), float(found.meta["seconds"])

    def _summary(self) -> dict[str, Any]:
        setup = self.setup
        test = {}
        if self.config.rounds.test:
            setup.space.scatter(self.vector if self.best.vector is None else self.best.vector, setup.network)
            test = {"test": asdict(evaluate(setup.network, setup.tests, torch.arange(len(setup.tests.labels))))}
        return {
            "kind": f"centralised {self.config.centralized.kind}",
            "validation": {"accuracy": self.best.accuracy},
            "best_round": self.best.round,
            **test,
            "rounds": self.epoch,
            "bytes_up": 0,
            "bytes_down": 0,
            "seconds": self.spent,
            "edited": {"coordinates": setup.space.trained, "of": sum(p.numel() for p in setup.network.parameters())},
        }
