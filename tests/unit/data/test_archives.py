"""Hostile archives: refused with one sentence, by their headers, in bounded memory, and nothing of them runs."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from tests.support.archive_bombs import npz_bombs, write
from tests.support.errors import raises

from fedgraft.core.errors import FedgraftError
from fedgraft.data import features, npz, parquet
from fedgraft.data.pixels import originals
from fedgraft.data.sources import npz_file


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", npz_bombs())
def test_npz_files_that_lie(name: str, tmp_path: Path) -> None:
    write(tmp_path, {"d.npz": npz_bombs()[name]()})
    with raises("E-DATA-NPZ-UNREADABLE") as caught:
        npz(tmp_path / "d.npz")
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_other_headers_that_declare_terabytes(tmp_path: Path) -> None:
    write(tmp_path, {"d.safetensors": (1 << 40).to_bytes(8, "little") + b"{}", "d.npz": npz_bombs()["pickle"]()})
    for name in ("d.safetensors", "d.npz"):
        with pytest.raises(FedgraftError):
            features(tmp_path / name)


@pytest.mark.slow
def test_parquet_that_repeats_one_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = 2000
    same = pa.DictionaryArray.from_arrays(np.zeros(rows, np.int32), pa.array([bytes(1 << 20)]))
    text = pa.DictionaryArray.from_arrays(np.zeros(rows, np.int32), pa.array(["x" * (1 << 16)]))
    labels = (np.arange(rows) % 2).tolist()
    pq.write_table(pa.table({"image": same, "label": labels}), tmp_path / "a.parquet", store_schema=False)
    pq.write_table(
        pa.table({"image": [b""] * rows, "label": labels, "note": text}), tmp_path / "b.parquet", store_schema=False
    )
    assert (tmp_path / "a.parquet").stat().st_size < 1 << 20  # and says two gigabytes
    with monkeypatch.context() as patch:
        patch.setattr(originals, "_MAX_BYTES", 64 << 20)
        with raises("E-DATA-PARQUET-SIZE"):
            originals.from_parquet([tmp_path / "a.parquet"], "image").read(0, rows)
        with raises("E-DATA-PARQUET-SIZE"):
            parquet(tmp_path / "b.parquet")
    assert parquet(tmp_path / "b.parquet").train.columns == {}  # a long text is no site


@pytest.mark.slow
def test_memory_stays_bounded(tmp_path: Path) -> None:
    """All of them in a process of its own, which must not grow by more than 200 MB (one of them says 4 TB)."""
    write(tmp_path, {f"{n}.npz": make() for n, make in enumerate(npz_bombs().values())})
    script = """
import resource, sys
from pathlib import Path
from fedgraft.data import npz
from fedgraft.core.errors import FedgraftError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sorted(Path(sys.argv[1]).glob("*.npz")):
    try:
        npz(path)
    except FedgraftError:
        pass
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print("grown" if grown > 200_000 else "bounded")
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "bounded\n"


def test_what_packs_well_is_no_bomb(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 255, (40, 8, 8, 3)).astype(np.uint8)
    np.savez_compressed(tmp_path / "d.npz", x_train=x, y_train=np.repeat([0, 1], 20))
    assert len(npz(tmp_path / "d.npz").train) == 32
    with zipfile.ZipFile(tmp_path / "d.npz") as archive:
        info = archive.getinfo("y_train.npy")
        assert info.file_size > 3 * info.compress_size


@pytest.mark.slow
def test_without_the_guard_a_bomb_would_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"d.npz": npz_bombs()["grows"]()})
    monkeypatch.setattr(npz_file, "LARGE", 1 << 30)
    assert len(npz_file.read_npz(tmp_path / "d.npz", ["x_train"])["x_train"]) == 100 << 20
