"""A run: build, step 0, rounds, evaluation, checkpoints, the final test, the report. Resuming is the same code."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgraft import server
from fedgraft.algorithm import Mixing, vary
from fedgraft.privacy.dp import HIDDEN_NOT_COVERED, NOT_COVERED
from fedgraft.report import representation_figures
from fedgraft.runs import head_init as head_init
from fedgraft.runs.setup import Setup
from fedgraft.runs.warnings import warnings_for
from fedgraft.runs.checkpoint import Checkpoint
from fedgraft.config.load import Config, to_toml
from fedgraft.runs.tracking import Tracking, Progress, Silent
from fedgraft.runs.parts import budget
from fedgraft.runs.personal_store import PersonalStore
from fedgraft.runs.reporting import describe, keep_phases, report_run
from fedgraft.runs.run_folder import RunFolder
from fedgraft.runs.head_init import install_head
from fedgraft.local.evaluate import Evaluation, evaluate
from fedgraft.local.memory import keep_freed_memory
from fedgraft.messages import Order, Reply
from fedgraft.round import run_round
from fedgraft.server import ServerState

log = logging.getLogger("fedgraft")


@dataclass(frozen=True)
class Best:
    """The best model by validation so far, and how long ago that was."""

    accuracy: float = -1.0
    round: int = -1
    stale: int = 0
    vector: Tensor | None = None


@contextmanager
def one_thread() -> Iterator[None]:
    """Clients compute on one thread: the number of threads changes the bits of a sum."""
    keep_freed_memory()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run(
    config: Config,
    folder: Path,
    progress: Progress | None = None,
    console: bool = True,
    build: Callable[[Config], Setup] = Setup,
) -> dict[str, Any]:
    """Run a config in its folder, from the beginning or from its last good checkpoint; returns the summary.

    `build` makes the setup; a federation of machines has one of its own.
    """
    with one_thread():
        # Everything that can be refused is refused before a folder exists.
        done = is_finished(folder)
        setup = None if done and (folder / "report.html").exists() else build(config)
        record = RunFolder.create(folder, to_toml(config), config.digest)
        if done:
            log.info("%s is already finished", folder)
            if setup is not None:
                report_run(record, setup)
            return record.summary()
        assert setup is not None
        with record.writing(console=console), closing(setup):  # no worker process outlives the run
            work = _Run(setup, record, progress or Silent())
            summary = work.go()
        began = time.perf_counter()
        report_run(record, setup)
        keep_phases(folder, {**work.phases, "figures and report": time.perf_counter() - began})
        return summary


def is_finished(folder: Path) -> bool:
    """Whether a folder holds a finished run."""
    return (folder / "run.json").exists() and RunFolder.open(folder).status == "finished"


class _Run:
    """The state of one running run, so that its steps can be read one by one."""

    def __init__(self, setup: Setup, record: RunFolder, progress: Progress) -> None:
        self.setup, self.config, self.record, self.progress = setup, setup.config, record, progress
        self.best = Best()
        self.totals = {"bytes_up": 0, "bytes_down": 0}
        self.spent = 0.0
        self.phases: dict[str, float] = {}
        """Seconds outside the rounds, since this process began."""

    def go(self) -> dict[str, Any]:
        """Everything from the first round that is not done yet to the report."""
        config, setup = self.config, self.setup
        found = self.record.resume(self._check)
        with Tracking(config, self.record.path, 0 if found is None else found.round) as track:
            state = self._begin() if found is None else self._restore(found)
            for text in warnings_for(config, setup):
                log.warning(text)
            self.progress.start(config.rounds.total, state.round, describe(setup))
            state = self._rounds(state, track)
            summary = self._finish(state)
            track.summary = summary
        self.record.finish(summary)
        return summary

    def _begin(self) -> ServerState:
        """Step 0, then the state before round 0."""
        began = time.perf_counter()
        start = install_head(self.setup)
        self.stored = self.setup.open()
        self.engine = self.setup.engine()
        state = server.start(
            self.setup.algorithm, self.setup.space.gather(self.setup.network), self.setup.space.trained
        )
        megabytes = self.setup.federation.clients * len(state.vector) * 4 / 1e6
        if isinstance(self.setup.algorithm.aggregate, Mixing) and megabytes > self.config.rounds.personal_memory_mb:
            log.info("the clients' models (%.0f MB) are kept on disk", megabytes)
            state = replace(state, personal=PersonalStore.create(self.record.path / "personal", len(state.vector)))
        if start is not None:  # the model that nobody has trained yet is a candidate too
            self.best = Best(start.accuracy, 0, 0, state.vector)
        self.spent += time.perf_counter() - began
        self.phases["step 0"] = self.spent
        self._add(self._traffic())
        log.info("step 0 (%s head) took %.1f s", self.config.model.head, self.spent)
        self._save(state)
        return state

    def _rounds(self, state: ServerState, track: Tracking) -> ServerState:
        r = self.config.rounds
        while state.round < r.total and not (r.patience and self.best.stale >= r.patience):
            account = budget(self.config, self.setup.algorithm, state.round)
            if account is not None and not account.can_spend():
                log.warning(
                    "stopped after %d rounds: the next one would exceed epsilon %g", state.round, account.target
                )
                break
            before = dict(self.engine.memory), self.best, self.totals, self.spent
            try:
                state = self._one_round(state, track)
            except KeyboardInterrupt:  # half a round must not leave traces: save as it was before
                self.engine.memory, self.best, self.totals, self.spent = before
                self._save(state)
                raise
            # What clients on other machines remember moves on every round, and the checkpoint must not fall behind.
            every = r.checkpoint_every if self.setup.remote is None else 1
            if state.round == r.total or state.round % every == 0:
                self._save(state)
        return state

    def _one_round(self, state: ServerState, track: Tracking) -> ServerState:
        """One round, its evaluation if one is due, and its line in the record."""
        began, r, before = time.perf_counter(), self.config.rounds, self._traffic()
        new, summary = run_round(self.setup.algorithm, self.setup.federation, state, self.engine, self.setup.server_context)
        representation_figures.keep_mixing(self.record.path, self.config, summary)
        for rejection in summary.rejections:
            log.warning("round %d: client %d dropped: %s", new.round, rejection.client, rejection.reason)
        line = dict(summary.record)
        if line.get("skipped"):
            log.warning("round %d: too few usable answers, so nothing changed", new.round)
        if new.round == r.total or (r.evaluate_every and new.round % r.evaluate_every == 0):
            new = self._validate(new, line)
        line |= self._traffic(before)  # all that crossed the wire, also what only a deployment sends
        self._add(line)
        self.spent += time.perf_counter() - began
        self.record.append(line)
        track.log(line)
        self.progress.update(line)
        return new

    def _traffic(self, before: Mapping[str, int] | None = None) -> dict[str, int]:
        """Bytes that crossed the wire, since `before`, where clients are on other machines; else there is no wire."""
        remote, then = self.setup.remote, before or {"bytes_up": 0, "bytes_down": 0}
        now = {} if remote is None else {"bytes_up": remote.received, "bytes_down": remote.sent}
        return {key: value - then[key] for key, value in now.items()}

    def _add(self, bytes: Mapping[str, Any]) -> None:
        self.totals = {key: value + int(bytes.get(key, 0)) for key, value in self.totals.items()}

    def _validate(self, state: ServerState, line: dict[str, Any]) -> ServerState:
        """Measure on validation images, remember the best, and let clients test themselves where asked."""
        began = time.perf_counter()
        result = self.measure(state.vector, state.round)
        line |= {"accuracy": result.accuracy, "loss": result.loss, "top5": result.top5}
        best = self.best
        stale = 0 if result.accuracy > best.accuracy + self.config.rounds.min_delta else best.stale + 1
        if result.accuracy > best.accuracy:
            best = Best(result.accuracy, state.round, 0, state.vector)
        self.best = replace(best, stale=stale)
        if self.config.personal.evaluate == "always":
            line["personal"] = self.personal(state)
        line["seconds"] = {**line["seconds"], "evaluate": time.perf_counter() - began}
        return replace(state, losses=(*state.losses, result.loss))

    def measure(self, vector: Tensor, round: int) -> Evaluation:
        """The common model on the validation images (on the clients' training images where there are none)."""
        setup = self.setup
        if setup.federated.blind:
            return self._count(vector, round, "validation")
        self._show(vector)
        rows = setup.federated.validation_rows if len(setup.federated.validation_rows) else setup.federated.train_rows
        setup.ready(setup.examples, rows)
        return evaluate(setup.network, setup.examples, rows, threads=setup.threads)

    def _count(self, vector: Tensor, round: int, split: str) -> Evaluation:
        """The common model on images that the clients hold; they send counts and sums of losses, nothing else."""
        f, space = self.setup.federation, self.setup.space.digest
        orders = [Order(f.run, round, k, "count", space, vector, {}, {"split": split}) for k in range(f.clients)]
        replies = [r for r in self.engine.exchange(orders) if isinstance(r, Reply)]
        return head_init.summed_counts(sorted(replies, key=lambda r: r.client), 1)[0]

    def _show(self, vector: Tensor) -> None:
        """Put the common model into the network; a head that clients keep to themselves stands at its start."""
        context = self.setup.context
        if context.private is not None and context.private_start is not None:
            context.private.scatter(context.private_start, self.setup.network)
        self.setup.space.scatter(vector, self.setup.network)

    def personal(self, state: ServerState) -> dict[str, float]:
        """Every client's accuracy on its own test images: mean, spread, before and after fine-tuning."""
        p, federation = self.config.personal, self.setup.federation
        settings = {
            "finetune_epochs": p.finetune_epochs, "finetune_part": p.finetune_part,
            "finetune_lr": p.finetune_lr, "finetune_batch": p.finetune_batch, "lr": p.finetune_lr,
        }  # fmt: skip
        clients = [k for k in range(federation.clients) if len(self.setup.federated.test_rows(k))]
        orders = [
            Order(
                federation.run,
                state.round,
                k,
                "evaluate",
                self.setup.space.digest,
                server.model_of(state, k),
                {},
                settings,
            )
            for k in clients
        ]
        replies = [r for r in self.engine.exchange(orders) if isinstance(r, Reply)]
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

    def _finish(self, state: ServerState) -> dict[str, Any]:
        """What is kept of the run; the test set is seen here, once, with the best model by validation."""
        setup, before = self.setup, self._traffic()
        summary: dict[str, Any] = {
            "kind": "federated",
            "validation": {"accuracy": self.best.accuracy},
            "best_round": self.best.round,
            **({"test": asdict(self._test(state))} if self.config.rounds.test else {}),
            "rounds": state.round,
            **self.totals,
            "seconds": self.spent,
            "edited": {"coordinates": setup.space.trained, "of": sum(p.numel() for p in setup.network.parameters())},
        }
        if self.config.privacy.aggregation == "zero_sum_demo":
            summary["protection"] = "INSECURE: zero_sum_demo is for comparison, the server can read every change"
        account = budget(self.config, setup.algorithm, state.round)
        if account is not None:
            summary["privacy"] = {
                "epsilon": account.epsilon, "delta": account.delta, "noise": account.noise, "rounds": account.spent,
                "not_covered": list(NOT_COVERED), "repeatable_noise": not self.config.privacy.dp.secret,  # type: ignore[union-attr]
            }  # fmt: skip
            if self.config.privacy.aggregation == "secure":
                summary["privacy"]["not_covered"] += HIDDEN_NOT_COVERED
                summary["privacy"]["given_up"] = sum("given_up" in line for line in self.record.metrics())
        if self.config.personal.evaluate != "never":
            summary["personal"] = self.personal(state)
        if setup.remote is not None:
            self._add(self._traffic(before))
            for key, total in self.totals.items():  # step 0, calibration and the final test are no round's
                summary |= {
                    key: total,
                    f"{key}_outside_rounds": total - sum(int(one[key]) for one in self.record.metrics()),
                }
        return summary

    def _test(self, state: ServerState) -> Evaluation:
        best, setup = state.vector if self.best.vector is None else self.best.vector, self.setup
        if setup.federated.blind:
            return self._count(best, state.round, "test")
        self._show(best)
        rows = torch.arange(len(setup.federated.dataset.test.labels))
        setup.ready(setup.tests, rows)
        return evaluate(setup.network, setup.tests, rows, threads=setup.threads)

    def _save(self, state: ServerState) -> None:
        began = time.perf_counter()
        tensors: dict[str, Tensor] = {"vector": state.vector}
        tensors |= {f"rule/{key}": value for key, value in state.rule.items()}
        stored = state.personal.sealed() if isinstance(state.personal, PersonalStore) else {}
        if not stored:
            tensors |= {f"personal/{k}": value for k, value in state.personal.items()}
        tensors |= {f"memory/{k}/{key}": v for k, kept in self.engine.memory.items() for key, v in kept.items()}
        tensors["head/weight"], tensors["head/bias"] = self.setup.head_start
        tensors |= {f"edit/{key}": value for key, value in self.stored.items()}
        if self.best.vector is not None:
            tensors["best/vector"] = self.best.vector
        if (key := self._secret_key()) is not None:
            tensors["privacy/key"] = torch.tensor(list(key), dtype=torch.uint8)
        meta = {
            "losses": list(state.losses), "clip": state.clip, "drifts": list(state.drifts),
            "totals": self.totals, "seconds": self.spent,
            "best": {"accuracy": self.best.accuracy, "round": self.best.round, "stale": self.best.stale},
            "space": self.setup.space.digest,
        }  # fmt: skip
        at_best = self.best.accuracy if self.best.round == state.round else None
        meta |= {"personal": stored} if stored else {}
        if not self.setup.federated.rows_known:  # the data is elsewhere, and the model's outputs must be named
            meta["classes"] = list(self.setup.federated.dataset.classes)
        self.record.save_checkpoint(state.round, tensors, meta, best=at_best)
        if isinstance(state.personal, PersonalStore):
            state.personal.release(self.record.checkpoints)
        self.phases["checkpoints"] = self.phases.get("checkpoints", 0.0) + time.perf_counter() - began

    def _secret_key(self) -> bytes | None:
        """The key of the noise where it does not follow from the seed."""
        chosen, privacy = self.config.privacy.dp, self.setup.algorithm.privacy.dp
        return privacy.key if chosen is not None and chosen.secret and privacy is not None else None

    def _check(self, found: Checkpoint) -> None:
        """Open the personal models on disk that a checkpoint names, or refuse it."""
        self.personal_store: PersonalStore | None = None
        if "personal" in found.meta:
            length = len(found.tensors["vector"])
            self.personal_store = PersonalStore.restore(self.record.path / "personal", length, found.meta["personal"])

    def _restore(self, found: Checkpoint) -> ServerState:
        """The state a checkpoint holds; the head of step 0 goes back into the network first."""
        tensors, meta = found.tensors, found.meta
        head = torch.cat([tensors["head/weight"], tensors["head/bias"][:, None]], 1)
        head_init.install(self.setup.network, head)
        self.stored = self.setup.open({n.removeprefix("edit/"): t for n, t in tensors.items() if n.startswith("edit/")})
        if "privacy/key" in tensors:  # a repeated round gets the same noise; a second sample would cost privacy again
            privacy = self.setup.algorithm.privacy
            assert privacy.dp is not None
            dp = replace(privacy.dp, key=bytes(tensors["privacy/key"].tolist()))
            self.setup.algorithm = vary(self.setup.algorithm, privacy=replace(privacy, dp=dp))
        self.engine = self.setup.engine()
        self.best = Best(**meta["best"], vector=tensors.get("best/vector"))
        self.totals, self.spent = dict(meta["totals"]), float(meta["seconds"])
        personal, rule = {}, {}
        for name, tensor in tensors.items():
            group, _, key = name.partition("/")
            if group == "rule":
                rule[key] = tensor
            elif group == "personal":
                personal[int(key)] = tensor
            elif group == "memory":
                client, _, what = key.partition("/")
                kept = dict(self.engine.memory.get(int(client), {}))
                self.engine.memory[int(client)] = kept | {what: tensor}
        state = ServerState(
            found.round, tensors["vector"], rule, personal if self.personal_store is None else self.personal_store,
            drifts=tuple(meta["drifts"]), clip=float(meta["clip"]), losses=tuple(meta["losses"]),
        )  # fmt: skip
        log.info("resumed after round %d", state.round)
        return state
