"""The one way in which files are kept: replaced whole, verified by a digest, locked, and pruned.

Run folders, checkpoints, personal models, caches, edits and the state of nodes write through this module. A file is
written beside its place and renamed, so a kill or a full disk leaves either the old file or the new one. Files that
must survive a power cut are flushed first (`write_atomic`); caches, which can be made anew, are not (`write_cached`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from fedgraft.core.errors import FedgraftError

log = logging.getLogger(__name__)

Chunk = bytes | memoryview
_BLOCK = 1 << 22  # bytes of a file that are hashed at a time
_RETRY = 0.05  # seconds between two attempts to take a lock


class DamagedFile(FedgraftError):
    """A file whose bytes are not those that were written."""


class LockTaken(FedgraftError):
    """A lock that another process holds; `owner` is its process id, or "unknown"."""

    def __init__(self, path: Path, owner: str) -> None:
        super().__init__(
            "E-CORE-LOCKED", f"{path} is locked by process {owner}", "wait for it", path=str(path), owner=owner
        )
        self.owner = owner


# ---- digests


def digest_of_chunks(chunks: Iterable[Chunk], size: int = 16) -> str:
    """Return the BLAKE2b digest of these bytes, of `size` bytes, in hexadecimal digits."""
    hasher = hashlib.blake2b(digest_size=size)
    for chunk in chunks:
        hasher.update(chunk)
    return hasher.hexdigest()


def digest_of_file(path: Path) -> str:
    """Return the digest of a file's bytes, after all of them have reached the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return digest_of_chunks(iter(lambda: file.read(_BLOCK), b""))


def read_verified(path: Path, digest: str) -> bytes:
    """Return the bytes of a file; raise `DamagedFile` unless they have this digest."""
    data = path.read_bytes()
    if digest_of_chunks([data]) != digest:
        raise DamagedFile(
            "E-CORE-DAMAGED", f"{path.name} is damaged: it does not match its digest", "restore it", path=str(path)
        )
    return data


# ---- writing


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o666, *, durable: bool = True, shared: bool = False) -> Iterator[int]:
    """Yield the descriptor of a new file, which takes the place of `path` when the block ends without an error.

    Args:
        mode: permissions of the new file.
        durable: the bytes and the name are on the disk when the block ends.
        shared: several threads, processes or machines may write the same file at once; the last wins. Without it the
            temporary file has one name, so that what a kill leaves behind is overwritten by the next attempt.

    An error or an interrupt leaves the old file as it was and nothing beside it.
    """
    suffix = ".tmp"
    if shared:
        suffix = f".{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}.tmp"
    temporary = path.with_name(f".{path.name}{suffix}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        try:
            yield descriptor
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)  # noqa: PTH105 - one spelling for all steps of the write
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        _sync_folder(path.parent)


def write_all(descriptor: int, data: Chunk) -> None:
    """Write all of the data at the end of what was written; the system may take it in parts."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write_at(descriptor: int, data: Chunk, offset: int) -> None:
    """Write all of the data at this offset of the file; the system may take it in parts."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view = view[written:]
        offset += written


def write_atomic(path: Path, chunks: Iterable[Chunk], mode: int = 0o666) -> None:
    """Replace a file durably; raise `OSError` where that is not possible, with the old file as it was."""
    with replacing(path, mode) as descriptor:
        for chunk in chunks:
            write_all(descriptor, chunk)


def write_bytes(path: Path, data: Chunk) -> None:
    """Replace a file by these bytes durably; raise E-CORE-WRITE where that is not possible."""
    try:
        write_atomic(path, [data])
    except OSError as error:
        raise _not_written(path, error) from error


def write_text(path: Path, text: str) -> None:
    """Replace a file by this text durably; raise E-CORE-WRITE where that is not possible."""
    write_bytes(path, text.encode())


def write_cached(path: Path, chunks: Iterable[Chunk]) -> None:
    """Replace a file of a cache that several processes share, without waiting for the disk; makes its folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, durable=False, shared=True) as descriptor:
            for chunk in chunks:
                write_all(descriptor, chunk)
    except OSError as error:
        raise _not_written(path, error) from error


def _not_written(path: Path, error: OSError) -> FedgraftError:
    """Return the error for a file that could not be written."""
    return FedgraftError(
        "E-CORE-WRITE",
        f"{path} could not be written ({error.strerror})",
        "make room or allow it",
        path=str(path),
    )


def _sync_folder(folder: Path) -> None:
    """Make a rename durable: it is stored in the folder, not in the file."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- deleting


def prune(paths: Iterable[Path]) -> None:
    """Delete these files; one that cannot be deleted is named in a warning, because nothing depends on it."""
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s could not be deleted (%s)", path.name, error.strerror)


# ---- locks


@contextlib.contextmanager
def locked(path: Path, timeout: float | None = None) -> Iterator[None]:
    """Hold the lock of this lock file, which is made where it does not exist and names the process that holds it.

    Wait for it as long as it takes, or `timeout` seconds and then raise `LockTaken`. The system frees the lock of a
    process that ends, however it ends.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if timeout is None:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        elif not _take_lock(descriptor, timeout):
            owner = os.read(descriptor, 32).decode(errors="replace").strip()
            raise LockTaken(path, owner or "unknown")
        with contextlib.suppress(OSError):  # a full disk does not keep anybody from working
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _take_lock(descriptor: int, timeout: float) -> bool:
    """Try to take a lock for so many seconds; return whether it was taken."""
    end = time.monotonic() + timeout
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(_RETRY)


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of this lock file."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
