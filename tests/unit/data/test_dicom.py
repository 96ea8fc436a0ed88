"""DICOM: pixels equal to pydicom's own, every syntax read or refused by name, hostile files refused in bounds."""

from __future__ import annotations

import sys
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.errors import raises

pydicom = pytest.importorskip("pydicom")

from pydicom.pixels import apply_color_lut, apply_modality_lut, apply_voi_lut, pixel_array  # noqa: E402
from tests.support.dicom_files import HOSTILE, PLANTED, dicom_dataset, write_dataset, write_dicom  # noqa: E402

from fedgraft import data  # noqa: E402
from fedgraft.data.pixels.dicom_elements import find_elements  # noqa: E402
from fedgraft.data.pixels.rule import PixelRule, Slice, Unreadable, decode_image  # noqa: E402
from fedgraft.data.pixels.scans import is_scan, scan_facts  # noqa: E402
from fedgraft.data.site_key import keyed_hash, site_key, site_key_path  # noqa: E402

TEST_FILES = Path(pydicom.__file__).parent / "data" / "test_files"
REFUSED = {
    "DICOMDIR",
    "DICOMDIR-bigEnd",
    "DICOMDIR-empty.dcm",
    "DICOMDIR-implicit",
    "DICOMDIR-nooffset",
    "DICOMDIR-nopatient",
    "DICOMDIR-reordered",
    "JPEG2000-embedded-sequence-delimiter.dcm",
    "MR_truncated.dcm",
    "SC_rgb_jpeg.dcm",
    "UN_sequence.dcm",
    "badVR.dcm",
    "empty_charset_LEI.dcm",
    "meta_missing_tsyntax.dcm",
    "nested_priv_SQ.dcm",
    "no_meta_group_length.dcm",
    "priv_SQ.dcm",
    "reportsi.dcm",
    "reportsi_with_empty_number_tags.dcm",
    "rtplan.dcm",
    "rtplan_truncated.dcm",
    "test-SR.dcm",
    "waveform_ecg.dcm",
}
"""pydicom's test files without an image, or with a damaged one."""
TWELVE_BITS = {"JPEG-lossy.dcm", "JPGExtended.dcm"}
"""JPEG of 12 bits, for which pydicom has no free decoder; both show the image of JPEG2000.dcm."""
RNG = np.random.default_rng(3)


@pytest.fixture(autouse=True)
def own_site_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has a site of its own."""
    monkeypatch.setenv("FEDGRAFT_SITE_KEY", str(tmp_path / "site" / "site.key"))
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / "cache"))


def pydicom_files() -> list[Path]:
    """Return pydicom's own test files that begin like DICOM, without the hundred equal stubs."""
    files = []
    for path in sorted(TEST_FILES.rglob("*")):
        if path.is_file() and "TINY_ALPHA" not in path.parts and is_scan(path):
            files.append(path)
    return files


def expected_pixels(path: Path) -> np.ndarray:
    """Return what pydicom's own functions make of the first frame of a file, as 8 bits RGB."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = pydicom.dcmread(path)
        values = pixel_array(dataset, index=0)
        photometric = dataset.PhotometricInterpretation
        if photometric == "PALETTE COLOR":
            colours = apply_color_lut(values, dataset)
            return colours if colours.dtype == np.uint8 else colours >> 8
        if values.ndim == 3:
            return values if values.dtype == np.uint8 else values >> (dataset.BitsStored - 8)
        signed = bool(dataset.PixelRepresentation)
        low = -(2 ** (dataset.BitsStored - 1)) if signed else 0
        high = low + 2**dataset.BitsStored - 1
        if "WindowCenter" in dataset:
            values = apply_voi_lut(apply_modality_lut(values, dataset), dataset)
            slope, intercept = float(dataset.get("RescaleSlope", 1)), float(dataset.get("RescaleIntercept", 0))
            low, high = low * slope + intercept, high * slope + intercept
    grey = np.clip(np.rint((values.astype(float) - low) / (high - low) * 255), 0, 255)
    if photometric == "MONOCHROME1":
        grey = 255 - grey
    return grey[..., None].repeat(3, axis=2)


@pytest.mark.parametrize("path", pydicom_files(), ids=lambda path: path.name)
def test_every_file_of_pydicom_is_read_as_pydicom_does_or_refused_by_name(path: Path) -> None:
    if path.name in REFUSED:
        with pytest.raises(Unreadable) as refusal:
            decode_image(path)
        assert 10 < len(refusal.value.reason) < 120
        return
    pixels = np.asarray(decode_image(path)).astype(int)
    if path.name in TWELVE_BITS:
        same_image = np.asarray(decode_image(TEST_FILES / "JPEG2000.dcm", (0, 4095))).astype(int)
        assert np.abs(np.asarray(decode_image(path, (0, 4095))).astype(int) - same_image).mean() < 0.5
        return
    assert np.abs(pixels - expected_pixels(path).astype(int)).max() == 0


def test_the_syntaxes_that_are_read_are_those_we_say() -> None:
    syntaxes = set()
    for path in pydicom_files():
        if path.name not in REFUSED:
            with path.open("rb") as file:
                syntaxes.add(find_elements(file, set()).syntax)
    compressed = {f"1.2.840.10008.1.2.4.{number}" for number in (50, 51, 70, 80, 81, 90, 91)}
    native = {"1.2.840.10008.1.2", "1.2.840.10008.1.2.1", "1.2.840.10008.1.2.1.99", "1.2.840.10008.1.2.2"}
    assert syntaxes == compressed | native | {"1.2.840.10008.1.2.5"}


@pytest.mark.parametrize("kind", list(HOSTILE))
def test_hostile_files_are_refused_in_a_second_and_little_memory(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.dcm"
    path.write_bytes(HOSTILE[kind]())
    decode_once(tmp_path)
    tracemalloc.start()
    try:
        with pytest.raises(Unreadable) as refusal:
            decode_image(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200 << 20
    for value in ("Philo", "Odile", "PHILO"):
        assert value not in str(refusal.value)


def decode_once(folder: Path) -> None:
    """Import everything that decoding needs, so that it is not measured."""
    decode_image(write_dicom(folder / "honest.dcm", np.zeros((4, 4), np.uint8)))


def test_without_the_walk_a_nested_file_costs_what_we_say_it_does(tmp_path: Path) -> None:
    """The broken variant: pydicom alone reads the two million elements, or gives up by recursion."""
    path = tmp_path / "hostile.dcm"
    path.write_bytes(HOSTILE["nested sequences"]())
    with warnings.catch_warnings(), pytest.raises(RecursionError):
        warnings.simplefilter("ignore")
        pydicom.dcmread(path)


def test_declared_sizes_of_compressed_images_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedgraft.data.pixels import dicom

    path = tmp_path / "hostile.dcm"
    path.write_bytes(HOSTILE["a JPEG of another size"]())
    with pytest.raises(Unreadable, match="another size"):
        decode_image(path)
    monkeypatch.setattr(dicom, "declared_size", lambda stream: (16, 16, 1))  # the broken variant asks the decoder
    with pytest.raises(Unreadable, match="cannot be decoded"):
        decode_image(path)


# ---- grey values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "stored"), [(np.uint8, 8), (np.uint16, 12), (np.uint16, 16), (np.int16, 16)])
@pytest.mark.parametrize("photometric", ["MONOCHROME1", "MONOCHROME2"])
def test_all_bits_and_both_directions(tmp_path: Path, dtype: Any, stored: int, photometric: str) -> None:
    low = -(2 ** (stored - 1)) if np.dtype(dtype).kind == "i" else 0
    values = RNG.integers(low, low + 2**stored, (9, 7)).astype(dtype)
    path = write_dicom(
        tmp_path / "a.dcm", values, BitsStored=stored, HighBit=stored - 1, PhotometricInterpretation=photometric
    )
    expected = np.rint((values.astype(float) - low) / (2**stored - 1) * 255)
    if photometric == "MONOCHROME1":
        expected = 255 - expected
    assert np.abs(np.asarray(decode_image(path))[..., 0] - expected).max() <= 1  # float32 at an exact half
    assert np.mean(np.asarray(decode_image(path))[..., 0] != expected) < 0.05


@pytest.mark.parametrize("function", ["LINEAR", "LINEAR_EXACT", "SIGMOID"])
def test_the_window_of_the_file_is_that_of_the_standard(tmp_path: Path, function: str) -> None:
    values = np.arange(-200, 200, dtype=np.int16).reshape(20, 20)
    tags = {
        "WindowCenter": 40,
        "WindowWidth": 80,
        "VOILUTFunction": function,
        "RescaleSlope": 2,
        "RescaleIntercept": -10,
    }
    path = write_dicom(tmp_path / "a.dcm", values, **tags)
    physical = values * 2.0 - 10
    if function == "LINEAR":  # PS3.3 C.11.2.1.2.1
        expected = ((physical - (40 - 0.5)) / (80 - 1) + 0.5) * 255
    elif function == "LINEAR_EXACT":
        expected = ((physical - 40) / 80 + 0.5) * 255
    else:
        expected = 255 / (1 + np.exp(-4 * (physical - 40) / 80))
    expected = np.rint(expected.clip(0, 255))
    assert np.abs(np.asarray(decode_image(path))[..., 0] - expected).max() <= 1
    assert np.mean(np.asarray(decode_image(path))[..., 0] != expected) < 0.02


def test_a_grey_window_stands_above_that_of_the_file(tmp_path: Path) -> None:
    values = RNG.integers(0, 4096, (16, 16)).astype(np.uint16)
    plain = write_dicom(tmp_path / "a.dcm", values, WindowCenter=100, WindowWidth=50)
    from_array = decode_image(values, (500, 1500))
    assert np.array_equal(decode_image(plain, (500, 1500)), from_array)
    assert not np.array_equal(decode_image(plain), from_array)
    inverted = write_dicom(tmp_path / "b.dcm", values, PhotometricInterpretation="MONOCHROME1")
    assert np.array_equal(255 - np.asarray(decode_image(inverted, (500, 1500))), from_array)


def test_windows_and_scales_of_single_frames_are_used(tmp_path: Path) -> None:
    values = RNG.integers(0, 1000, (2, 8, 8)).astype(np.uint16)
    dataset = dicom_dataset(values)
    groups = []
    for centre in (200, 700):
        window = pydicom.Dataset()
        window.WindowCenter, window.WindowWidth, window.VOILUTFunction = centre, 100, "LINEAR_EXACT"
        group = pydicom.Dataset()
        group.FrameVOILUTSequence = [window]
        groups.append(group)
    dataset.PerFrameFunctionalGroupsSequence = groups
    scale = pydicom.Dataset()
    scale.RescaleSlope, scale.RescaleIntercept = 2, 50
    shared = pydicom.Dataset()
    shared.PixelValueTransformationSequence = [scale]
    dataset.SharedFunctionalGroupsSequence = [shared]
    path = tmp_path / "a.dcm"
    write_dataset(path, dataset)
    for frame, centre in enumerate((200, 700)):
        expected = decode_image((values[frame] * 2 + 50).astype(np.int32), (centre - 50, centre + 50))
        assert np.array_equal(decode_image(Slice(path, frame)), expected)
    assert scan_facts(path).window == "file"


def test_tables_are_applied(tmp_path: Path) -> None:
    values = RNG.integers(0, 256, (16, 16)).astype(np.uint8)
    table = np.arange(255, -1, -1, dtype=np.uint16) * 16
    dataset = dicom_dataset(values)
    item = pydicom.Dataset()
    item.LUTDescriptor, item.LUTData = [256, 0, 12], table.tolist()
    item["LUTDescriptor"].VR, item["LUTData"].VR = "US", "US"
    dataset.VOILUTSequence = [item]
    path = tmp_path / "a.dcm"
    write_dataset(path, dataset)
    expected = np.rint(table[values] / 4095 * 255)
    assert np.array_equal(np.asarray(decode_image(path))[..., 0], expected)
    assert scan_facts(path).window == "table"


# ---- rows, groups, owners --------------------------------------------------------------------------------------------


def study(folder: Path, patients: int = 6, images: int = 3, endings: str = ".dcm") -> list[np.ndarray]:
    """Write a folder per class with several images of each patient; return the pixels in the order of the rows."""
    pixels = []
    for patient in range(patients):
        label = "abc"[patient % 2]
        for image in range(images):
            values = np.random.default_rng([patient, image]).integers(0, 256, (12, 12)).astype(np.uint8)
            pixels.append((label, patient, image, values))
    pixels.sort(key=lambda entry: entry[:3])
    for label, patient, image, values in pixels:
        path = folder / label / f"{patient}-{image}{endings}"
        write_dicom(path, values, f"PLANTED-{patient}", InstitutionName=f"{INSTITUTION_OF[patient % 2]}")
    return [values for *_, values in pixels]


INSTITUTION_OF = ("Planted North", "Planted South")


def test_a_folder_of_scans_gives_rows_groups_and_owners(tmp_path: Path) -> None:
    pixels = study(tmp_path / "scans")
    scans = data.folder(tmp_path / "scans", test_share=0.0, site="tag:InstitutionName")
    assert scans.classes == ("a", "b")
    assert np.array_equal(scans.train.open(PixelRule(12))[np.arange(18)][..., 0], np.stack(pixels))
    groups = scans.train.groups
    assert groups is not None and groups.tolist() == [f"g{number}" for number in np.repeat(range(6), 3)]
    assert scans.train.sites is not None and sorted(set(scans.train.sites.tolist())) == ["site-0", "site-1"]
    by_study = data.folder(tmp_path / "scans", test_share=0.0, group="tag:StudyInstanceUID")
    assert by_study.train.groups is not None and len(set(by_study.train.groups.tolist())) == 6


def test_files_without_an_ending_are_found(tmp_path: Path) -> None:
    study(tmp_path / "scans", endings="")
    (tmp_path / "scans" / "a" / "notes").write_text("no image")
    scans = data.folder(tmp_path / "scans", test_share=0.0)
    assert len(scans.train) == 18
    assert len(scans.other_files) == 1


def test_no_patient_is_trained_and_tested_on(tmp_path: Path) -> None:
    study(tmp_path / "scans", patients=20, images=4)
    scans = data.folder(tmp_path / "scans", test_share=0.3)
    train = set(scans.train.groups.tolist())  # type: ignore[union-attr]
    test = set(scans.test.groups.tolist())  # type: ignore[union-attr]
    assert len(train) + len(test) == 20 and not train & test


def test_the_same_data_gives_the_same_rows_under_every_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study(tmp_path / "scans")
    datasets = []
    for key in ("one", "two"):
        monkeypatch.setenv("FEDGRAFT_SITE_KEY", str(tmp_path / key / "site.key"))
        datasets.append(data.folder(tmp_path / "scans", site="tag:InstitutionName"))
    first, second = datasets
    assert first.train.digest == second.train.digest
    for name in ("group", "site"):
        assert first.train.columns[name].tolist() == second.train.columns[name].tolist()
    hashes = [path.read_text() for path in (tmp_path / "cache" / "tags").glob("*.json")]
    assert len(hashes) == 2 and hashes[0] != hashes[1]  # under another key another file


@pytest.mark.parametrize(("frames", "count"), [("first", 1), ("middle", 1), ("all", 5)])
def test_frames_are_chosen(tmp_path: Path, frames: Any, count: int) -> None:
    values = RNG.integers(0, 256, (5, 6, 6)).astype(np.uint8)
    write_dicom(tmp_path / "scans" / "a" / "1.dcm", values, "one")
    write_dicom(tmp_path / "scans" / "b" / "2.dcm", values[0], "two")
    scans = data.folder(tmp_path / "scans", frames=frames, test_share=0.0)
    assert len(scans.train) == count + 1
    pixels = scans.train.open(PixelRule(6))[np.arange(count)][..., 0]
    chosen = {"first": values[:1], "middle": values[2:3], "all": values}[frames]
    assert np.array_equal(pixels, chosen)
    assert scans.train.groups is not None and len(set(scans.train.groups[:count].tolist())) == 1
    assert ("frame 2" in scans.train.where(min(2, count - 1))) == (frames != "first")


def test_a_table_lists_scans_beside_images(tmp_path: Path) -> None:
    from PIL import Image

    values = RNG.integers(0, 256, (6, 6, 6)).astype(np.uint8)
    lines = ["image,edema,mass,group"]
    for number in range(6):
        name = f"{number}.png"
        if number % 2:
            name = f"{number}.dcm"
            write_dicom(tmp_path / name, values[number])
        else:
            Image.fromarray(values[number]).save(tmp_path / name)
        lines.append(f"{name},{number % 2},{number // 3},patient {number}")
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    scans = data.table(tmp_path, findings=["edema", "mass"], test_share=0.0)
    assert np.array_equal(scans.train.open(PixelRule(6))[np.arange(6)][..., 0], values)
    assert scans.train.groups is not None and scans.train.groups.tolist() == [f"patient {n}" for n in range(6)]
    grouped = data.table(tmp_path, findings=["edema", "mass"], test_share=0.0, group="tag:PatientID")
    assert (
        grouped.train.groups is not None and len(set(grouped.train.groups.tolist())) == 4
    )  # three files of one patient


def test_tiles_are_grouped_by_their_slide(tmp_path: Path) -> None:
    from PIL import Image

    for label in ("a", "b"):
        for slide in range(2):
            (tmp_path / label / f"slide-{slide}").mkdir(parents=True)
            for tile in range(3):
                Image.fromarray(RNG.integers(0, 256, (4, 4)).astype(np.uint8)).save(
                    tmp_path / label / f"slide-{slide}" / f"{tile}.png"
                )
    tiles = data.folder(tmp_path, group="folder", test_share=0.0)
    assert tiles.train.groups is not None
    assert tiles.train.groups.tolist() == [f"g{number}" for number in np.repeat(range(4), 3)]
    one_class = data.folder(tmp_path / "a", test_share=0.0)  # slides as classes: nothing groups pictures by itself
    assert one_class.train.groups is None


def test_wrong_rules_are_refused(tmp_path: Path) -> None:
    study(tmp_path / "scans")
    with raises("E-DATA-FRAMES", frames="last"):
        data.folder(tmp_path / "scans", frames="last")  # type: ignore[arg-type]
    with raises("E-DATA-TAG", rule="tag:PatientName"):
        data.folder(tmp_path / "scans", group="tag:PatientName")
    with raises("E-DATA-TAG", rule="patient"):
        data.folder(tmp_path / "scans", group="patient")
    for file in (tmp_path / "scans").rglob("*.dcm"):
        dataset = pydicom.dcmread(file)
        del dataset.InstitutionName
        dataset.save_as(file)
    with raises("E-DATA-TAG-MISSING", tag="InstitutionName"):
        data.folder(tmp_path / "scans", site="tag:InstitutionName")


def test_files_of_nobody_are_groups_of_their_own(tmp_path: Path) -> None:
    for number in range(3):
        write_dicom(tmp_path / "a" / f"{number}.dcm", np.zeros((4, 4), np.uint8), "")
    write_dicom(tmp_path / "b" / "1.dcm", np.zeros((4, 4), np.uint8), "somebody")
    scans = data.folder(tmp_path, test_share=0.0)
    assert scans.train.groups is not None and len(set(scans.train.groups.tolist())) == 4


# ---- the key, the cache ----------------------------------------------------------------------------------------------


def test_the_site_key_is_private_and_stays(tmp_path: Path) -> None:
    key = site_key()
    assert site_key_path().stat().st_mode & 0o777 == 0o600
    assert len(key) == 32 and site_key() == key
    assert keyed_hash(key, "PatientID", b"1") != keyed_hash(key, "StudyInstanceUID", b"1")
    site_key_path().chmod(0o640)
    with raises("E-DATA-SITE-KEY-OPEN"):
        site_key()
    site_key_path().chmod(0o600)
    site_key_path().write_bytes(b"short")
    with raises("E-DATA-SITE-KEY"):
        site_key()


def test_headers_are_read_once_and_the_cache_holds_no_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedgraft.data.sources import scan_rows

    study(tmp_path / "scans")
    first = data.folder(tmp_path / "scans")
    (entry,) = (tmp_path / "cache" / "tags").glob("*.json")
    assert entry.stat().st_mode & 0o777 == 0o600
    text = entry.read_text()
    assert not any(value in text for value in (*PLANTED, *INSTITUTION_OF))

    def refuse(file: object) -> None:
        raise AssertionError("a header was read again")

    with monkeypatch.context() as patch:
        patch.setattr(scan_rows, "scan_facts", refuse)
        assert data.folder(tmp_path / "scans").train.digest == first.train.digest
    entry.write_text('[[1, {"PatientID": "Planted"}]]')  # damaged: read anew
    assert data.folder(tmp_path / "scans").train.columns["group"].tolist() == first.train.columns["group"].tolist()
    assert entry.read_text() == text


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_dicom(tmp_path / "a.dcm", np.zeros((4, 4), np.uint8))
    with monkeypatch.context() as patch, raises("E-MISSING-EXTRA", extra="medical", package="pydicom"):
        patch.setitem(sys.modules, "pydicom", None)
        decode_image(path)
    monkeypatch.setitem(sys.modules, "imagecodecs", None)
    decode_image(path)  # not compressed
    with raises("E-MISSING-EXTRA", extra="medical", package="imagecodecs"):
        decode_image(TEST_FILES / "JPEG2000.dcm")


# ---- volumes ---------------------------------------------------------------------------------------------------------


def volume(path: Path, values: np.ndarray, **header: float) -> Path:
    """Write a NIfTI volume."""
    nibabel = pytest.importorskip("nibabel")
    image = nibabel.Nifti1Image(values, np.eye(4))
    for name, value in header.items():
        image.header[name] = value
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(image, path)
    return path


@pytest.mark.parametrize("ending", [".nii", ".nii.gz"])
def test_slices_of_a_volume_are_rows(tmp_path: Path, ending: str) -> None:
    values = RNG.integers(-1000, 1000, (5, 6, 4)).astype(np.int16)
    volume(tmp_path / "scans" / "a" / f"1{ending}", values)
    volume(tmp_path / "scans" / "b" / f"2{ending}", values[..., :1])
    scans = data.folder(tmp_path / "scans", frames="all", test_share=0.0)
    assert len(scans.train) == 5
    pixels = scans.train.open(PixelRule(5, "squash", window=(-1000, 1000)))
    assert pixels[np.arange(4)].shape == (4, 5, 5, 3)
    for number in range(4):
        expected = decode_image(values[..., number].T[::-1].astype(np.int32), (-1000, 1000))
        assert np.array_equal(
            decode_image(Slice(tmp_path / "scans" / "a" / f"1{ending}", number), (-1000, 1000)), expected
        )
    assert scans.train.groups is not None and len(set(scans.train.groups[:4].tolist())) == 1


def test_the_window_of_a_volume(tmp_path: Path) -> None:
    values = RNG.integers(0, 900, (5, 6, 2)).astype(np.int16)
    silent = volume(tmp_path / "a.nii", values)
    with pytest.raises(Unreadable, match="grey_window"):
        decode_image(silent)
    speaking = volume(tmp_path / "b.nii", values, cal_min=0, cal_max=900)
    assert np.array_equal(decode_image(speaking), decode_image(silent, (0, 900)))
    plain = volume(tmp_path / "c.nii", values.astype(np.uint8))
    assert np.array_equal(np.asarray(decode_image(plain))[..., 0], values[..., 0].astype(np.uint8).T[::-1])


@pytest.mark.parametrize("lie", ["sides", "cut", "empty", "text"])
def test_volumes_that_lie_are_refused(tmp_path: Path, lie: str) -> None:
    path = volume(tmp_path / "a.nii", np.zeros((4, 4, 4), np.int16))
    content = bytearray(path.read_bytes())
    if lie == "sides":
        content[42:48] = (30_000).to_bytes(2, "little") * 3
    elif lie == "cut":
        content = content[:400]
    elif lie == "empty":
        content[42:44] = b"\0\0"
    else:
        content = bytearray(b"no volume at all")
    path.write_bytes(content)
    with pytest.raises(Unreadable):
        decode_image(path, (0, 1))
