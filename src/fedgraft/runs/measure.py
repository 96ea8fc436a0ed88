"""How a model is measured: on the server's images, by counts from clients that hold images out, or client by client."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedgraft.collect import Engine
from fedgraft.local.evaluate import Evaluation, evaluate
from fedgraft.messages import Order, Scalar
from fedgraft.protocols import Examples
from fedgraft.runs.head_init import summed_counts
from fedgraft.runs.job import Job
from fedgraft.runs.opening import Opening
from fedgraft.state import ServerState
from fedgraft.update.claims import Claims
from fedgraft.update.expected import counts, evaluation, replies_to


@dataclass(frozen=True)
class Measure:
    """Measures the models of one run."""

    job: Job
    opening: Opening
    engine: Engine

    @property
    def claims(self) -> Claims:
        """What clients said of themselves so far."""
        return self.opening.server_context.claims

    def validation(self, vector: Tensor, round: int) -> Evaluation:
        """The common model on the validation images (on the clients' training images where there are none)."""
        if self.job.task.data.blind:
            return self._counted(vector, round, "validation")
        return self._here(vector, self.opening.context.examples, self.job.task.judging_rows)

    def test(self, vector: Tensor, round: int) -> Evaluation:
        """The common model on the test images."""
        if self.job.task.data.blind:
            return self._counted(vector, round, "test")
        tests = self.opening.context.tests
        assert tests is not None
        return self._here(vector, tests, torch.arange(len(tests.labels)))

    def _here(self, vector: Tensor, examples: Examples, rows: Tensor) -> Evaluation:
        self.opening.context.show(vector)
        self.job.ready(examples, rows)
        return evaluate(self.opening.context.network, examples, rows, threads=self.job.threads)

    def _counted(self, vector: Tensor, round: int, split: str) -> Evaluation:
        """The common model on images that the clients hold; they send counts and sums of losses, nothing else."""
        f, space = self.job.federation, self.opening.space.digest
        orders = [Order(f.run, round, k, "count", space, vector, {}, {"split": split}) for k in range(f.clients)]
        replies = replies_to(self.engine.exchange, orders, counts(orders, 1, self.claims, split))
        return summed_counts(replies, self.claims, split)[0]

    def personal(self, state: ServerState) -> dict[str, float]:
        """Every client's accuracy on its own test images: mean, spread, before and after fine-tuning."""
        p, f, space = self.job.config.personal, self.job.federation, self.opening.space.digest
        settings: dict[str, Scalar] = {
            "finetune_epochs": p.finetune_epochs, "finetune_part": p.finetune_part,
            "finetune_lr": p.finetune_lr, "finetune_batch": p.finetune_batch, "lr": p.finetune_lr,
        }  # fmt: skip
        clients = [k for k in range(f.clients) if len(self.job.task.data.test_rows(k))]
        orders = [Order(f.run, state.round, k, "evaluate", space, state.model_of(k), {}, settings) for k in clients]
        if self.job.task.data.rows_known:
            for k in clients:
                self.claims.note(k, {"test images": len(self.job.task.data.test_rows(k))})
        expected = [evaluation(orders, self.claims, bool(p.finetune_epochs))] if orders else []
        replies = replies_to(self.engine.exchange, orders, expected[0]) if expected else []
        found: dict[str, float] = {}
        for key in ("accuracy", "finetuned_accuracy"):
            values = torch.tensor([r.metrics[key] for r in replies if key in r.metrics], dtype=torch.float64)
            if len(values):
                counts = torch.tensor([r.metrics["count"] for r in replies], dtype=torch.float64)
                prefix = "" if key == "accuracy" else "finetuned_"
                found |= {
                    f"{prefix}mean": float(values.mean()), f"{prefix}min": float(values.min()),
                    f"{prefix}max": float(values.max()), f"{prefix}std": float(values.std(correction=0)),
                    f"{prefix}weighted": float((values * counts).sum() / counts.sum()),
                }  # fmt: skip
        return found
