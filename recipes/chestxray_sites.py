"""A federation of chest X-rays with several findings: writes the table `labels.csv` beside a folder of images.

Takes images of ChestX-ray14 (Wang et al., 2017; any part of them, at any size) and its `Data_Entry_2017.csv`. The data
names no hospitals. As sites stand the detectors: the pixel spacing of a patient's first image, the commonest ones each
a site and all others one more. A patient's images are at one site and in one part, training or test::

    python recipes/chestxray_sites.py IMAGES Data_Entry_2017.csv [--sites 4] [--test 0.3] [--least 60]

Findings that fewer than `--least` images have are left out. The columns beside them are image, site, group (the
patient), split, sex and age_group; the last line printed names the findings for `data.findings`.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

AGES = (40, 60)
"""Where age groups end."""


def read_entries(table: Path, images: Path) -> list[dict[str, str]]:
    """Return the rows of the table whose image is in the folder."""
    present = {path.name for path in images.iterdir()}
    with table.open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["Image Index"] in present]
    if not rows:
        raise SystemExit(f"{table} names none of the images in {images}")
    return rows


def sites_by_detector(rows: Sequence[dict[str, str]], count: int) -> dict[str, str]:
    """Return the site of each patient: the pixel spacing of the first image; spacings beyond the commonest are one."""
    spacing = {}
    for row in rows:
        spacing.setdefault(row["Patient ID"], row["OriginalImagePixelSpacing[x"])
    common = [value for value, _ in Counter(spacing.values()).most_common(count - 1)]
    sites = {}
    for patient, value in spacing.items():
        sites[patient] = f"spacing {value}" if value in common else "other spacings"
    return sites


def age_group(age: str) -> str:
    """Return the group of an age in years ("058Y" or "58")."""
    years = int(age.rstrip("Y"))
    if years < AGES[0]:
        return f"under {AGES[0]}"
    if years < AGES[1]:
        return f"{AGES[0]} to {AGES[1] - 1}"
    return f"{AGES[1]} and older"


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("entries", type=Path)
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--test", type=float, default=0.3, help="share of the patients that are tested on")
    parser.add_argument("--least", type=int, default=60, help="fewest images with a finding")
    options = parser.parse_args()
    rows = read_entries(options.entries, options.images)
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(row["Finding Labels"].split("|"))
    findings = sorted(name for name, count in counts.items() if count >= options.least and name != "No Finding")
    site = sites_by_detector(rows, options.sites)
    patients = sorted(site)
    tested = np.random.default_rng(0).permutation(len(patients))[: round(options.test * len(patients))]
    test_patients = {patients[number] for number in tested}
    target = options.images.parent / "labels.csv"
    with target.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", *findings, "site", "group", "split", "sex", "age_group"])
        for row in rows:
            patient = row["Patient ID"]
            present = set(row["Finding Labels"].split("|"))
            labels = [int(name in present) for name in findings]
            split = "test" if patient in test_patients else "train"
            image = f"{options.images.name}/{row['Image Index']}"
            more = [site[patient], patient, split, row["Patient Gender"], age_group(row["Patient Age"])]
            writer.writerow([image, *labels, *more])
    print(f"{len(rows)} images of {len(patients)} patients, {len(test_patients)} of them tested on: {target}")
    for name, number in Counter(site[row["Patient ID"]] for row in rows).most_common():
        print(f"  {name}: {number} images")
    print("data.findings=" + json.dumps(findings))


if __name__ == "__main__":
    main()
