"""The log of a run's rounds, from which a consortium can prove which updates made a model: `rounds.log`.

One JSON line per round: the digest of every accepted update, its weight, who was dropped, the protection, the digest of
the server's state after it and of the round's line in metrics.jsonl. Each line holds the hash of the one before and is
signed (Ed25519, where the extra 'secure' is installed) with a key that lies beside the run folder. `verify_log`
lists lines that were changed, removed or added, and checkpoints whose state is not the one in the log.
A resumed run repeats its rounds bit for bit, so its lines are the same again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor

from fedgraft.core.errors import FedgraftError, MissingExtra
from fedgraft.core.files import drop_incomplete_line, json_ready, read_metrics, without_timing
from fedgraft.core.store import write_text
from fedgraft.runs import checkpoint
from fedgraft.runs.checkpoint import BadCheckpoint

NAME = "rounds.log"


TensorDigests = dict[int, tuple[ReferenceType[Tensor], int, str]]
"""Digests of tensors that still exist, by their id, with the version that was read."""


def state_digest(tensors: Mapping[str, Tensor], known: TensorDigests | None = None) -> str:
    """Return the digest of a server's state: its model, its rule's memory and the clients' models that it holds.

    `known` remembers the digests of tensors from call to call, so that only new ones are read.
    """
    if known is None:
        known = {}
    hasher = hashlib.sha256()
    for name in sorted(tensors):
        if name == "vector" or name.startswith(("rule/", "personal/")):
            tensor = tensors[name]
            content = _content_digest(tensor, known)
            hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {content}\n".encode())
    return hasher.hexdigest()


def _content_digest(tensor: Tensor, known: TensorDigests) -> str:
    """Return the digest of a tensor's bytes, from `known` if the tensor has not changed since."""
    if id(tensor) in known:
        reference, version, digest = known[id(tensor)]
        if reference() is tensor and version == tensor._version:
            return digest
    digest = hashlib.sha256(tensor.detach().cpu().contiguous().numpy().data).hexdigest()
    known[id(tensor)] = (ref(tensor), tensor._version, digest)
    return digest


def line_digest(line: Mapping[str, Any]) -> str:
    """Return the digest of a line of metrics.jsonl without its times."""
    (timeless,) = without_timing([json_ready(line)])
    return hashlib.sha256(_text(timeless).encode()).hexdigest()


def _text(entry: Mapping[str, Any]) -> str:
    """Return an entry as canonical JSON, the text that is hashed."""
    return json.dumps(entry, sort_keys=True, separators=(",", ":"))


def _chained_hash(previous: str, entry: Mapping[str, Any]) -> str:
    """Return the hash of a line, which follows from its entry and the hash of the line before."""
    return hashlib.sha256((previous + _text(entry)).encode()).hexdigest()


def _signing_key(secret: bytes) -> Any:
    """Return the run's signing key; None where the package for it is not installed."""
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError:
        return None
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"fedgraft round log" + secret).digest())


class RoundLog:
    """Writes the log of one run; opening it cuts the file back to the round that the run continues from.

    `run` is the run's identity, `secret` gives the signing key, `after` is the round of the checkpoint (None: from the
    beginning).
    """

    def __init__(self, folder: Path, run: str, secret: bytes, after: int | None) -> None:
        self.path = folder / NAME
        self.signing_key = _signing_key(secret)
        self.hash = ""
        self.known: TensorDigests = {}
        public_key = ""
        if self.signing_key is not None:
            public_key = self.signing_key.public_key().public_bytes_raw().hex()
        drop_incomplete_line(self.path)
        texts = [self._line({"run": run, "key": public_key})]
        if after is not None and self.path.is_file():
            for line in _read_lines(self.path)[1:]:
                if line["entry"]["round"] <= after:
                    texts.append(self._line(line["entry"]))
        write_text(self.path, "".join(texts))

    def _line(self, entry: Mapping[str, Any]) -> str:
        """Return the next line, signed and chained to the one before, and make its hash the latest."""
        self.hash = _chained_hash(self.hash, entry)
        signature = ""
        if self.signing_key is not None:
            signature = self.signing_key.sign(self.hash.encode()).hex()
        return _text({"entry": entry, "hash": self.hash, "signature": signature}) + "\n"

    def append(self, line: Mapping[str, Any], state: Mapping[str, Tensor], **facts: Any) -> None:
        """Add a round to the file: digests of its metrics line and of the server's state after it, and `facts`."""
        entry = {
            "round": line["round"],
            "state": state_digest(state, self.known),
            "line": line_digest(line),
            "model": state_digest({"vector": state["vector"]}, self.known),
            **json_ready(facts),
        }
        self.known = {key: digest for key, digest in self.known.items() if digest[0]() is not None}
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(self._line(entry))
        except OSError as error:
            raise FedgraftError(
                "E-RUN-LOG-WRITE",
                f"{self.path} could not be written ({error.strerror})",
                "make room and resume",
                path=str(self.path),
            ) from error


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log with entry, hash and signature each."""
    lines = []
    try:
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            lines.append({"entry": dict(line["entry"]), "hash": str(line["hash"]), "signature": str(line["signature"])})
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FedgraftError(
            "E-RUN-LOG-READ",
            f"{path} cannot be read as a log of rounds ({reason})",
            "restore the run folder",
            path=str(path),
        ) from error
    return lines


def read_entries(path: Path) -> dict[int, dict[str, Any]]:
    """Return the entries of a log by round; 0 is before the first round. Signatures are not checked."""
    entries: dict[int, dict[str, Any]] = {}
    for line in _read_lines(path)[1:]:
        round = line["entry"].get("round")
        if type(round) is int:
            entries[round] = line["entry"]
    return entries


def verify_log(folder: Path, key: str | None = None) -> tuple[str, list[str]]:
    """Return one line about the log of a run, and every way in which log, metrics and checkpoints do not agree.

    `key` is the public key, or its fingerprint, that the log must be signed with.
    """
    path = folder / NAME
    lines = _read_lines(path)
    if not lines:
        raise FedgraftError("E-RUN-LOG-EMPTY", f"{path} is empty", "restore the run folder", path=str(path))
    public_key = str(lines[0]["entry"].get("key", ""))
    problems = []
    if key is not None and key not in (public_key, signer_fingerprint(public_key)):
        problems.append(f"the log is signed with another key: {signer_fingerprint(public_key)}")
    problems += _broken_links(lines, public_key)
    entries = read_entries(path)
    last_round = max(entries, default=0)
    for round in range(last_round + 1):
        if round not in entries:
            problems.append(f"round {round} is missing from the log")
    problems += _unlike_metrics(folder, entries)
    for file in checkpoint.listing(folder / "checkpoints"):
        problems += _unlike_checkpoint(file, entries)
    signed = "not signed (the extra 'secure' was not installed)"
    if public_key:
        signed = f"signed by {signer_fingerprint(public_key)}"
    return f"{last_round} rounds, {signed}", problems


def signer_fingerprint(public_key: str) -> str:
    """Return a short name of a key that people can compare."""
    if not public_key:
        return "nobody"
    return hashlib.sha256(public_key.encode()).hexdigest()[:32]


def _unlike_metrics(folder: Path, entries: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return how the log and metrics.jsonl differ: rounds in one of them only, then changed lines."""
    measured = {line.get("round"): line_digest(line) for line in read_metrics(folder)}
    unmeasured = [f"round {round} is in the log and not in metrics.jsonl" for round in entries if round not in measured]
    unlogged = [f"round {round} is in metrics.jsonl and not in the log" for round in measured if round not in entries]
    changed = []
    for round, entry in entries.items():
        if round in measured and measured[round] != entry["line"]:
            changed.append(f"the line of round {round} in metrics.jsonl was changed")
    return [*unmeasured, *unlogged, *changed]


def _broken_links(lines: list[dict[str, Any]], public_key: str) -> list[str]:
    """Return the lines whose hash does not follow from them and those before, or whose signature is wrong."""
    problems = []
    previous = ""
    for number, line in enumerate(lines, 1):
        if line["hash"] != _chained_hash(previous, line["entry"]):
            problems.append(f"line {number} of {NAME} was changed, or one before it was taken out")
        elif public_key and not _is_signed(public_key, line):
            problems.append(f"line {number} of {NAME} is not signed by the run's key")
        previous = line["hash"]
    return problems


def _is_signed(public_key: str, line: Mapping[str, str]) -> bool:
    """Return whether a line's signature is by this key."""
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError as error:
        raise MissingExtra("cryptography", "secure", "checking signatures") from error
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))
        key.verify(bytes.fromhex(line["signature"]), line["hash"].encode())
    except (InvalidSignature, ValueError):
        return False
    return True


def _unlike_checkpoint(path: Path, entries: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return how a checkpoint differs from the log: its state, and the best model in it."""
    try:
        saved = checkpoint.load(path)
    except BadCheckpoint as error:
        return [str(error)]
    problems = []
    if saved.round not in entries or entries[saved.round]["state"] != state_digest(saved.tensors):
        problems.append(f"checkpoint {path.name} is not the state that the log tells of")
    best_round = saved.meta.get("best", {}).get("round", -1)
    if "best/vector" in saved.tensors:
        model = state_digest({"vector": saved.tensors["best/vector"]})
        if entries.get(best_round, {}).get("model") != model:
            problems.append(f"the best model in checkpoint {path.name} is not that of round {best_round}")
    return problems
