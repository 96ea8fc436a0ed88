"""A run: head initialisation, rounds, evaluation, checkpoints, final test, report. Resuming is the same code."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedgraft.config.build import budget
from fedgraft.config.load import Config, to_toml
from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import check_place
from fedgraft.core.progress import phase, shown_by, watching
from fedgraft.core.state import ServerState, from_tensors, to_tensors
from fedgraft.local.memory import one_thread
from fedgraft.report import representation_figures
from fedgraft.run.callbacks import Callback
from fedgraft.run.checkpoint import Checkpoint
from fedgraft.run.engines import AnyEngine, Engines, Remote
from fedgraft.run.folder import RunFolder
from fedgraft.run.head_init import install, install_head, own_starts
from fedgraft.run.job import Job, job_of
from fedgraft.run.measure import Measure
from fedgraft.run.opening import Opening, open_run
from fedgraft.run.personal_store import PersonalStore, first_models
from fedgraft.run.plan import check
from fedgraft.run.reporting import describe, keep_phases, keep_skipped, noted, report_run, summary_of
from fedgraft.run.round_log import RoundLog
from fedgraft.run.saving import Best, pack_run, protection_of, saved_edit
from fedgraft.run.secrets import secret_of, unseen, with_secrets
from fedgraft.run.tracking import PhaseFile, PhaseLog, Progress, Silent, Tracking
from fedgraft.run.warnings import warnings_for
from fedgraft.server import sample as server
from fedgraft.server.round import run_round

log = logging.getLogger("fedgraft")

Build = Callable[[], tuple[Job, Remote | None]]


def run(
    config: Config, folder: Path, progress: Progress | None = None, console: bool = True, build: Build | None = None
) -> dict[str, Any]:
    """Run a config in its folder, from the beginning or from its last good checkpoint; returns the summary."""
    make = build or (lambda: (job_of(config), None))
    done, _ = run_job(make, folder, config.digest, to_toml(config), progress, console)
    return done


def run_job(
    build: Build,
    folder: Path,
    identity: str,
    text: str,
    progress: Progress | None = None,
    console: bool = True,
    callbacks: Sequence[Callback] = (),
) -> tuple[dict[str, Any], tuple[Job, Opening, ServerState] | None]:
    """Run a job in its folder; the summary, and the open job with its last state where this call computed it."""
    seen = nullcontext() if progress is None or progress.look is None else shown_by(progress.look)
    with one_thread(), seen:
        check_place(folder, "--folder")  # everything that can be refused is refused before a folder exists
        done = is_finished(folder)
        made = None if done and (folder / "report.html").exists() else build()
        if made is not None and not done:
            check(made[0])
        record = RunFolder.create(folder, text, identity)
        if made is None or done:
            log.info("%s is already finished", folder)
            if made is not None:
                report_run(record, made[0])
            return record.summary(), None
        job, remote = made
        secret = secret_of(folder, needed=job.algorithm.privacy.dp is not None and job.algorithm.privacy.dp.bound)
        job = with_secrets(job, secret)
        told = watching(PhaseLog(), PhaseFile(folder))
        with record.writing(console=console), told, closing(Engines(job, remote)) as engines:  # no worker outlives it
            work = _Run(job, engines, record, progress or Silent(), callbacks)
            work.secret = secret
            summary = work.go()
        began = time.perf_counter()
        with phase("figures and report"):
            report_run(record, job)
        keep_phases(folder, {**work.phases, "figures and report": time.perf_counter() - began})
        return summary, (job, work.opening, work.state)


def is_finished(folder: Path) -> bool:
    """Whether a folder holds a finished run."""
    return (folder / "run.json").exists() and RunFolder.open(folder).status == "finished"


class _Run:
    """One running run, so that its steps can be read one by one."""

    def __init__(
        self, job: Job, engines: Engines, record: RunFolder, progress: Progress, callbacks: Sequence[Callback]
    ) -> None:
        self.job, self.config, self.engines, self.record = job, job.config, engines, record
        self.progress, self.callbacks, self.remote = progress, callbacks, engines.remote
        self.best, self.secret = Best(), b""
        self.totals = {"bytes_up": 0, "bytes_down": 0}
        self.spent = 0.0
        self.unused: str | None = None
        """Why the last round's answers could not be used, as long as no round had one; then empty."""
        self.phases: dict[str, float] = {}
        """Seconds outside the rounds, since this process began."""

    def go(self) -> dict[str, Any]:
        """Everything from the first round that is not done yet to the report."""
        config = self.config
        found = self.record.resume(self._check)
        self.log = RoundLog(self.record.path, self.job.identity, self.secret, None if found is None else found.round)
        keep_skipped(self.record.path, self.job.task.data)
        with Tracking(config, self.record.path, 0 if found is None else found.round) as track:
            state = self._begin(track) if found is None else self._restore(found)
            for text in warnings_for(self.job, self.opening, self.engines):
                log.warning(text)
            self.progress.start(config.rounds.total, state.round, describe(self.job, self.opening))
            for callback in self.callbacks:
                callback.on_start(self.job, state)
            self.state = self._rounds(state, track)
            summary = self._finish(self.state)
            track.summary = summary
        self.record.finish(summary)
        for callback in self.callbacks:
            callback.on_end(summary)
        return summary

    def _begin(self, track: Tracking) -> ServerState:
        """Head initialisation, then the state before round 1, measured: the start is on every curve."""
        began = time.perf_counter()
        head = install_head(self.job, self.engines)
        self._open(None)
        state = server.start(
            self.opening.algorithm, self.opening.space.gather(self.job.task.network), self.opening.space.trained
        )
        megabytes = self.job.federation.clients * len(state.vector) * 4 / 1e6
        on_disk = self.opening.algorithm.aggregate.personal and megabytes > self.config.rounds.personal_memory_mb
        if on_disk:
            log.info("the clients' models (%.0f MB) are kept on disk", megabytes)
        own = own_starts(self.job, self.engines, self.opening.space, head)
        state = replace(state, personal=first_models(self.record.path / "personal", len(state.vector), own, on_disk))
        line: dict[str, Any] = {"round": 0, "seconds": {}}
        found = self.measure.validation(state.vector, 0)
        line |= self.measure.line(found)
        if self.opening.algorithm.privacy.dp is None:  # what private training did not make is not delivered by it
            self.best = Best(found.plain.accuracy, self.measure.score(found), 0, 0, state.vector)
        self.spent += time.perf_counter() - began
        self.phases["head initialisation"] = self.spent
        shared = head is not None and self.opening.algorithm.aggregate.shares  # training alone sends nothing
        self._add(self._traffic() if self.remote else head.traffic if head and shared else {})
        log.info("head initialisation (%s) took %.1f s", self.config.head, self.spent)
        self.record.append(line)
        self.log.append(line, to_tensors(state, {})[0])
        track.log(line)
        self._save(state)
        return state

    def _open(self, saved: Mapping[str, Tensor] | None) -> None:
        """Open the edit space and the engine of the rounds."""
        self.opening = open_run(self.job, self.engines, saved)
        if self.remote is not None:
            with_probe = not self.job.task.data.rows_known
            self.remote.open(self.job.federation.run, self.opening.message(with_probe))
        self.engine: AnyEngine = self.remote or self.engines.training(self.opening.algorithm, self.opening.context)
        if self.job.wrap is not None:
            self.engine = self.job.wrap(self.job, self.opening, self.engine)
        self.measure = Measure(self.job, self.opening, self.engine)

    def _rounds(self, state: ServerState, track: Tracking) -> ServerState:
        r = self.config.rounds
        while state.round < r.total:
            if r.patience and self.best.stale >= r.patience:
                log.info("stopped after %d rounds: none of the last %d measured better", state.round, self.best.stale)
                break
            account = budget(self.config, self.opening.algorithm, state.round)
            if account is not None and not account.can_spend():
                log.warning("stopped after %d rounds: one more would exceed epsilon %g", state.round, account.target)
                break
            before = dict(self.engine.memory), self.best, self.totals, self.spent, self.unused
            try:
                state = self._one_round(state, track)
            except KeyboardInterrupt:  # half a round must not leave traces: save as it was before
                self.engine.memory, self.best, self.totals, self.spent, self.unused = before
                self._save(state)
                raise
            # What clients on other machines remember moves on every round, and the checkpoint must not fall behind.
            every = r.checkpoint_every if self.remote is None else 1
            if state.round == r.total or state.round % every == 0 or self.best.round == state.round:
                self._save(state)
        if self.unused:
            raise FedgraftError(f"nothing was trained: no answer of any round could be used, the last: {self.unused}.")
        return state

    def _one_round(self, state: ServerState, track: Tracking) -> ServerState:
        """One round, its evaluation if one is due, and its line in the record."""
        began, r, before, opening = time.perf_counter(), self.config.rounds, self._traffic(), self.opening
        new, summary = run_round(opening.algorithm, opening.federation, state, self.engine, opening.server_context)
        representation_figures.keep_mixing(self.record.path, self.config, summary)
        line = noted(summary, new.round)
        if new.round == r.total or (r.evaluate_every and new.round % r.evaluate_every == 0):
            new = self._validate(new, line)
        line |= self._traffic(before)  # all that crossed the wire, also what only a deployment sends
        self._add(line)
        line = unseen(line, opening.federation)
        self.spent += time.perf_counter() - began
        self.record.append(line)
        self.log.append(
            line, to_tensors(new, {})[0], updates=summary.digests, protection=protection_of(opening.algorithm)
        )
        track.log(line)
        self.progress.update(line)
        for callback in self.callbacks:
            callback.on_round_end(line, new)
        reasons = {rejection.client: rejection.reason for rejection in summary.rejections}
        if self.unused != "":  # where answers are private no round is skipped
            lost = reasons and (line.get("skipped") or reasons.keys() >= set(summary.cohort))
            self.unused = next(iter(reasons.values())) if lost else ""
        if line.get("skipped") and reasons and all("finite" in reason for reason in reasons.values()):
            raise FedgraftError(
                f"training diverged in round {new.round}: every client's update is infinite or not a number; lower "
                "local.lr (fedgraft find-lr finds one) or set local.clip."
            )
        return new

    def _traffic(self, before: Mapping[str, int] | None = None) -> dict[str, int]:
        """Bytes that crossed the wire, since `before`, where clients are on other machines; else there is no wire."""
        then = before or {"bytes_up": 0, "bytes_down": 0}
        now = {} if self.remote is None else {"bytes_up": self.remote.received, "bytes_down": self.remote.sent}
        return {key: value - then[key] for key, value in now.items()}

    def _add(self, bytes: Mapping[str, Any]) -> None:
        self.totals = {key: value + int(bytes.get(key, 0)) for key, value in self.totals.items()}

    def _validate(self, state: ServerState, line: dict[str, Any]) -> ServerState:
        """Measure on validation images, remember the best, and let clients test themselves where asked."""
        began = time.perf_counter()
        result = self.measure.validation(state.vector, state.round)
        line |= self.measure.line(result)
        best, score = self.best, self.measure.score(result)
        stale = 0 if score > best.score + self.config.rounds.min_delta else best.stale + 1
        # Under differential privacy nothing chooses: the model after the last round is what the account speaks of.
        if score > best.score or self.opening.algorithm.privacy.dp is not None:
            best = Best(result.plain.accuracy, score, state.round, 0, state.vector)
        self.best = replace(best, stale=stale)
        if self.config.personal.evaluate == "always":
            line["personal"], _ = self.measure.personal(state)
        line["seconds"] = {**line["seconds"], "evaluate": time.perf_counter() - began}
        return replace(state, losses=(*state.losses, result.plain.loss))

    def _finish(self, state: ServerState) -> dict[str, Any]:
        """What is kept of the run; the test set is seen here, once, with the best model by validation."""
        before, best = self._traffic(), state.vector if self.best.vector is None else self.best.vector
        tested = self.measure.tested(best, state.round) if self.config.rounds.test else {}
        summary = summary_of(self.job, self.opening, state, self.best, self.record.metrics()) | tested
        summary |= {"seconds": self.spent, **self.measure.served(state, best)}
        self._add(self._traffic(before))
        for key, total in self.totals.items():  # preparations and the last test are no round's; secret rounds tell none
            inside = total if self.opening.federation.secret else sum(int(o.get(key, 0)) for o in self.record.metrics())
            summary |= {key: total} | ({f"{key}_outside_rounds": total - inside} if total > inside else {})
        return summary

    # ---- saving and restoring -------------------------------------------------------------------------------------

    def _save(self, state: ServerState) -> None:
        began, store = time.perf_counter(), state.personal if isinstance(state.personal, PersonalStore) else None
        tensors, meta = pack_run(self.job, self.opening, state, self.engine.memory, self.best)
        meta |= {"totals": self.totals, "seconds": self.spent, "unused": self.unused}
        meta |= {"personal": store.sealed()} if store else {}
        at_best = self.best.score if self.best.round == state.round else None
        self.record.save_checkpoint(state.round, tensors, meta, best=at_best)
        if store is not None:
            store.release(self.record.checkpoints)
        self.phases["checkpoints"] = self.phases.get("checkpoints", 0.0) + time.perf_counter() - began

    def _check(self, found: Checkpoint) -> None:
        """Open the personal models on disk that a checkpoint names, or refuse it."""
        self.store: PersonalStore | None = None
        if "personal" in found.meta:
            length = len(found.tensors["vector"])
            self.store = PersonalStore.restore(self.record.path / "personal", length, found.meta["personal"])

    def _restore(self, found: Checkpoint) -> ServerState:
        """The state a checkpoint holds; the head that the run began with goes back into the network first."""
        tensors, meta = found.tensors, found.meta
        install(self.job.task.network, tensors["head"])
        self._open(saved_edit(tensors))
        state, memories = from_tensors(found.round, tensors, meta)
        self.engine.memory = dict(memories)
        self.best = Best(**meta["best"], vector=tensors.get("best/vector"))
        self.totals, self.spent, self.unused = dict(meta["totals"]), float(meta["seconds"]), meta["unused"]
        log.info("resumed after round %d", state.round)
        return state if self.store is None else replace(state, personal=self.store)
