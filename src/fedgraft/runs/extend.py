"""More rounds for a run that is finished: the same folder, as if it had been planned longer from the start."""

from __future__ import annotations

from pathlib import Path

from fedgraft.config.build import build_schedule
from fedgraft.config.load import Config, from_folder, load, to_toml
from fedgraft.core.errors import FedgraftError
from fedgraft.runs import checkpoint
from fedgraft.runs.folder import RunFolder


def extend(folder: Path, rounds: int) -> Config:
    """Make the run in `folder` one of `rounds` rounds in all, to be continued; return its new config.

    Refused where the rounds so far would have been others in a longer run: under a schedule that ends with the run, or
    under differential privacy, whose noise is planned for a number of rounds. The run's last round was measured because
    it was the last; a run that was longer from the start may not have measured it.
    """
    record = RunFolder.open(folder)
    config = from_folder(folder)
    longer = load(folder / "config.toml", [f"rounds.total={rounds}"])
    _check(record, config, longer)
    superseded = checkpoint.listing(record.checkpoints)
    for path in superseded:
        stored = checkpoint.load(path, record.config_digest)
        checkpoint.save(
            record.checkpoints,
            stored.round,
            stored.tensors,
            {**stored.meta, "config_digest": longer.digest},
            best=stored.best,
            keep_last=2 * len(superseded),
            keep_best=2 * len(superseded),
        )
    record.become(to_toml(longer), longer.digest)
    for path in superseded:
        path.unlink(missing_ok=True)
    return longer


def _check(record: RunFolder, config: Config, longer: Config) -> None:
    """Raise if the run cannot be continued beyond its planned rounds."""
    total = config.rounds.total
    wanted = longer.rounds.total
    if record.config_digest != config.digest:
        raise FedgraftError(
            "E-RUN-EXTEND",
            f"{record.path} was made from Python objects or in a deployment, or its config was changed",
            "run it again with more rounds; objects: fg.run(..., rounds=N)",
            path=str(record.path),
        )
    if wanted <= total:
        raise FedgraftError(
            "E-RUN-EXTEND",
            f"{record.path} has {total} rounds already",
            f"give --rounds a number above {total}",
            path=str(record.path),
            rounds=total,
        )
    if config.privacy.dp is not None:
        raise FedgraftError(
            "E-RUN-EXTEND",
            f"the noise of {record.path} was planned for {total} rounds",
            "start a run of more rounds, whose noise is planned for all of them",
            path=str(record.path),
        )
    losses = [line["loss"] for line in record.metrics() if "loss" in line]
    shorter_schedule = build_schedule(config, 1.0)
    longer_schedule = build_schedule(longer, 1.0)
    for number in range(total):
        if shorter_schedule(number, total, losses) != longer_schedule(number, wanted, losses):
            raise FedgraftError(
                "E-RUN-EXTEND",
                f"schedule.kind={config.schedule.kind!r} ends with the run, so the first {total} rounds of a run of "
                f"{wanted} have other learning rates",
                "start a run of more rounds; with schedule.period a cosine does not depend on their number",
                path=str(record.path),
                schedule=config.schedule.kind,
            )
