"""Checkpoints: safetensors files whose name carries the digest of every byte, written whole or not at all.

`load_latest` verifies each candidate against its digest before it uses it and falls back to the one before; since a run
derives its randomness from (seed, round, client), an older start ends in the same bytes.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from fedgraft.core.errors import FedgraftError
from fedgraft.core.store import DamagedFile, digest_of_chunks, prune, read_verified, write_atomic

log = logging.getLogger(__name__)

_NAME = re.compile(r"round-(\d{8,})-([0-9a-f]{32})\.safetensors")
KEEP_LAST = 5
KEEP_BEST = 3
"""Checkpoints of a run that are kept unless its config says otherwise: so many of the latest and of the best."""
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.bool: "BOOL",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
}


class BadCheckpoint(FedgraftError):
    """A checkpoint file that is damaged, truncated, or belongs to another config."""


@dataclass(frozen=True)
class Checkpoint:
    """The state after `round`, as it was passed to `save`."""

    round: int
    tensors: Mapping[str, Tensor]
    meta: Mapping[str, Any]
    best: float | None
    """The validation score it was ranked by, if it had one."""
    path: Path
    skipped: tuple[str, ...] = ()
    """Names of newer files that were tried first and refused."""


def save(
    folder: Path,
    round: int,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    *,
    best: float | None = None,
    keep_last: int = KEEP_LAST,
    keep_best: int = KEEP_BEST,
) -> Path:
    """Write the state after `round` as a file in `folder`, atomically, and return its path.

    Args:
        best: the validation score it is ranked by; None: it has none.
        keep_last, keep_best: all files but the last few and the best few (largest `best`) are deleted.
    """
    chunks = _encode(round, tensors, meta, best)
    path = folder / f"round-{round:08d}-{digest_of_chunks(chunks)}.safetensors"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, chunks, 0o600)  # clients' memories may hold their keys
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise FedgraftError(
            "E-RUN-CHECKPOINT-WRITE",
            f"the checkpoint of round {round} could not be written to {folder} ({reason})",
            "earlier checkpoints are intact, so make room there and resume",
            round=round,
            path=str(folder),
        ) from error
    _delete_superseded(path, round, keep_last, keep_best)
    return path


def load(path: Path, config_digest: str | None = None) -> Checkpoint:
    """Return the checkpoint in a file; raise `BadCheckpoint` when any bit of it is not what was written.

    `config_digest` is that of the run it must belong to; None: any.
    """
    name = _NAME.fullmatch(path.name)
    if name is None:
        raise BadCheckpoint(
            "E-RUN-CHECKPOINT-NAME",
            f"{path.name} is not named like a checkpoint",
            "choose a file of a run's checkpoints folder",
            path=str(path),
        )
    try:
        data = read_verified(path, name[2])
    except OSError as error:
        raise _bad("E-RUN-CHECKPOINT-READ", path, f"cannot be read ({error.strerror})") from error
    except DamagedFile as error:
        raise _bad("E-RUN-CHECKPOINT-DAMAGED", path, "is damaged: it does not match its digest") from error
    try:
        header = _header(data)
        tensors = safetensors.torch.load(data)
    except (ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        raise _bad("E-RUN-CHECKPOINT-FORMAT", path, "is not in this library's format") from error
    if header["round"] != int(name[1]):
        raise _bad("E-RUN-CHECKPOINT-RENAMED", path, f"holds round {header['round']}: it was renamed")
    if config_digest is not None and header["meta"].get("config_digest") != config_digest:
        raise _bad("E-RUN-CHECKPOINT-FOREIGN", path, "belongs to another config")
    return Checkpoint(header["round"], tensors, header["meta"], header["best"], path)


def _bad(code: str, path: Path, problem: str) -> BadCheckpoint:
    """Return the error for a checkpoint that cannot be used; `problem` ends the sentence that its name begins."""
    return BadCheckpoint(code, f"checkpoint {path.name} {problem}", "use an earlier one", path=str(path))


def load_latest(
    folder: Path, config_digest: str | None = None, check: Callable[[Checkpoint], None] | None = None
) -> Checkpoint | None:
    """Return the newest good checkpoint of this config, or None; warn of damaged and foreign ones.

    `config_digest` None: of any config. `check` may refuse one with `BadCheckpoint`, for example because a file beside
    it that it names is damaged.
    """
    skipped: list[str] = []
    for path in sorted(listing(folder), key=_round, reverse=True):
        try:
            checkpoint = load(path, config_digest)
            if check is not None:
                check(checkpoint)
            return replace(checkpoint, skipped=tuple(skipped))
        except BadCheckpoint as error:
            log.warning("skipped: %s", error)
            skipped.append(path.name)
    return None


def listing(folder: Path) -> list[Path]:
    """Return the files of a folder that are named like checkpoints, oldest round first."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(paths, key=lambda path: (_round(path), path.name))


def _encode(
    round: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], best: float | None
) -> list[bytes | memoryview]:
    """Return the bytes of a checkpoint file in chunks: length, header, then views of the tensors' own memory.

    Nothing large is copied. `best` is the validation score for the header, None: it has none.
    """
    metadata = json.dumps({"round": round, "best": best, "meta": dict(meta)}, sort_keys=True, separators=(",", ":"))
    entries: dict[str, Any] = {"__metadata__": {"fedgraft": metadata}}
    contents: list[bytes | memoryview] = []
    offset = 0
    # Wide types first keeps every tensor aligned to its element size.
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        end = offset + flat.numel() * flat.element_size()
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        if flat.numel():
            contents.append(flat.view(torch.uint8).numpy().data)
        offset = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return [len(header).to_bytes(8, "little"), header, *contents]


def _header(data: bytes) -> dict[str, Any]:
    """Return round, score and meta of a checkpoint from its first bytes (the length and the JSON header)."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["fedgraft"])
    return {"round": header["round"], "best": header["best"], "meta": dict(header["meta"])}


def is_among_best(folder: Path, round: int, score: float, keep_best: int) -> bool:
    """Return whether a model after `round` with this validation score is one of the best `keep_best` so far.

    It is compared with the checkpoints of earlier rounds in `folder`; of equals the earlier counts as better.
    """
    earlier = [path for path in listing(folder) if _round(path) < round]
    better = 0
    for path in earlier:
        other = _stored_score(path)
        if other is not None and other >= score:
            better += 1
    return better < keep_best


def _stored_score(path: Path) -> float | None:
    """Return the validation score of a checkpoint's model from its header alone; None where it was not measured."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            size = min(int.from_bytes(start, "little"), path.stat().st_size)
            best = _header(start + file.read(size))["best"]
        if best is None:
            return None
        return float(best)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _round(path: Path) -> int:
    """Return the number of the round in the file name of a checkpoint."""
    return int(path.name.split("-")[1])


def _ranked(paths: Iterable[Path]) -> list[Path]:
    """Return those of these checkpoints that have a score, the largest first, the earliest round among equals."""
    ranks: dict[Path, float] = {}
    for path in paths:
        score = _stored_score(path)
        if score is not None and score == score:  # not NaN
            ranks[path] = score
    return sorted(ranks, key=lambda path: (-ranks[path], _round(path)))


def _delete_superseded(newest: Path, round: int, keep_last: int, keep_best: int) -> None:
    """Delete checkpoints of this run's past that are neither among the last nor the best, and unfinished writes.

    `newest` was just written after `round`; files of later rounds are no part of this run's past and stay.
    """
    past = []
    superseded = []
    for path in listing(newest.parent):
        if _round(path) == round and path != newest:
            superseded.append(path)  # an earlier attempt at the same round
        elif _round(path) <= round:
            past.append(path)
    retained = {newest, *past[-keep_last:], *_ranked(past)[:keep_best]}
    superseded += [path for path in past if path not in retained]
    interrupted_writes = [path for path in newest.parent.iterdir() if path.name.startswith(".round-")]
    prune([*interrupted_writes, *superseded])
