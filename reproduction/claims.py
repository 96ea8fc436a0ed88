"""What the documents claim, and what was measured: one stated rule turns numbers over seeds into plain words.

For each seed d = (left - right, or left / right, or left) - number. With Student's 95 % interval of d over seeds, and p
corrected by Holm over the claims of one experiment:

- `more` (`less`): supported if p < 0.05 and d is above (below) zero; contradicted if p < 0.05 and d is on the other
  side; else no difference to be seen.
- `same`: supported if the whole interval is within the margin; contradicted if all of it is outside; else no difference
  to be seen where p >= 0.05, and undecided where it is below.
- A number of the documents' own network is shown beside ours but not judged where the scale has another network.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fedgraft.errors import FedgraftError
from fedgraft.report.statistics import Difference, paired, summarise, table
from fedgraft.runs.files import write_text
from reproduction.claims_rows import ROWS, of_kind
from reproduction.preset import Claim, load_preset, names
from reproduction.reproduce import Found

SUPPORTED, CONTRADICTED, UNSEEN, UNDECIDED, UNMEASURED, ANOTHER = (
    "supported", "contradicted", "no difference to be seen", "undecided", "not measured yet",
    "not judged: another network",
)  # fmt: skip
_LEVEL = 0.05


@dataclass(frozen=True)
class Verdict:
    """A claim with what was measured."""

    row: int
    text: str
    document: str
    preset: str
    verdict: str
    numbers: str = ""
    scale: str = ""


def server_context(claim: Claim, found: Difference) -> str:
    """The verdict on the differences to the claimed number."""
    d = found.difference
    if d.count < 2:
        return UNMEASURED
    sure = found.p < _LEVEL
    if claim.expect == "same":
        if -claim.margin <= d.low and d.high <= claim.margin:
            return SUPPORTED
        if d.low > claim.margin or d.high < -claim.margin:
            return CONTRADICTED
        return UNDECIDED if sure else UNSEEN
    if not sure:
        return UNSEEN
    return SUPPORTED if (d.mean > 0) == (claim.expect == "more") else CONTRADICTED


def quantity(claim: Claim, found: Found) -> list[float] | None:
    """The measured number of a claim by seed; None where it cannot be had."""
    if not claim.left:
        return None
    left = found.measured(claim.left, claim.measure)
    if left is None or not claim.right:
        return left
    right = found.measured(claim.right, claim.measure)
    if right is None:
        return None
    if claim.ratio:
        return [a / b for a, b in zip(left, right, strict=True)] if all(right) else None
    return [round(a - b, 9) for a, b in zip(left, right, strict=True)]  # equal is equal, whatever the last bit says


def verdicts(found: Found) -> list[Verdict]:
    """Every claim of a preset, judged where this scale can answer it."""
    claims, name, scale = found.work.preset.claims, found.work.name, found.work.scale
    measured = {i: values for i, claim in enumerate(claims) if (values := quantity(claim, found)) is not None}
    gaps = {str(i): [v - claims[i].number for v in m] for i, m in measured.items() if scale in claims[i].scales}
    seeds = len(next(iter(gaps.values()), []))
    tested = {int(d.name): d for d in paired([0.0] * seeds, gaps)} if gaps else {}
    made = []
    for i, claim in enumerate(claims):
        verdict, numbers = UNMEASURED, ""
        if i in tested:
            verdict, numbers = server_context(claim, tested[i]), _said(claim, measured[i], tested[i].p)
        elif i in measured:
            verdict, numbers = ANOTHER, _said(claim, measured[i])
        made.append(Verdict(claim.row, claim.text, claim.document, name, verdict, numbers, scale))
    return made


def _said(claim: Claim, values: Sequence[float], p: float | None = None) -> str:
    """The measured number with its interval, and what it was held against."""
    what = f"{claim.left} {'/' if claim.ratio else '-'} {claim.right}" if claim.right else claim.left
    found = summarise(values)
    mean, low, high = (0.0 if abs(x) < 1e-9 else x for x in (found.mean, found.low, found.high))
    said = f"{claim.measure} of {what}: {mean:.3g} [{low:.3g}, {high:.3g}], {found.count} seeds"
    if p is None:
        return f"{said}; claimed of another network: {claim.number:g}"
    against = f"{claim.expect} {f'within {claim.margin:g} of' if claim.expect == 'same' else 'than'} {claim.number:g}"
    return f"{said}, p {p:.3f}; claimed: {against}"


def verdict_table(found: Sequence[Verdict]) -> str:
    """Markdown rows of verdicts."""
    rows = [[v.row, f"{v.text} ({v.document})", v.numbers or "–", f"**{v.verdict}**"] for v in found]
    return table(["row", "claim", "measured", "verdict"], rows)


def keep(found: Sequence[Verdict], folder: Path) -> None:
    """Store verdicts for the summary."""
    write_text(folder / "claims.json", json.dumps([asdict(v) for v in found], indent=2, ensure_ascii=False) + "\n")


def summary(out: Path) -> str:
    """The page `what the documents claim, what we measured`, from what reproductions left below `out`."""
    kept = {name: _kept(out / name / "claims.json") for name in names()}
    rows = []
    for row, text in of_kind("L").items():
        for name, claim in claims_of(row):
            found = kept[name].get((row, claim.text))
            numbers, said = (found.numbers or "–", found.verdict) if found else ("–", UNMEASURED)
            where = f"[{name}]({name}.md), {found.scale}" if found else name
            rows.append([row, f"{text}: {claim.text} ({claim.document})", where, numbers, f"**{said}**"])
    header = ["row", "what the documents claim", "experiment", "what we measured", "verdict"]
    return _PAGE.format(table=table(header, rows), rule=_RULE, experiments=_experiments(out))


def _experiments(out: Path) -> str:
    """Every experiment: its page, or the command that makes it."""
    rows = []
    for name in names():
        there = (out / f"{name}.md").is_file()
        rows.append(
            [f"[{name}]({name}.md)" if there else f"not run yet: `fedgraft reproduce {name}`", load_preset(name).title]
        )
    return table(["page", "what it is about"], rows)


def claims_of(row: int) -> list[tuple[str, Claim]]:
    """The claims that stand for a row of the checklist, each with its preset."""
    return [(name, claim) for name in names() for claim in load_preset(name).claims if claim.row == row]


def _kept(path: Path) -> Mapping[tuple[int, str], Verdict]:
    if not path.is_file():
        return {}
    try:
        return {(v["row"], v["text"]): Verdict(**v) for v in json.loads(path.read_text(encoding="utf-8"))}
    except (ValueError, KeyError, TypeError) as error:
        raise FedgraftError(f"{path} is damaged or of an older version; reproduce that experiment again.") from error


def listing() -> list[tuple[int, str, str, list[str]]]:
    """Every row of kind T, F or E, with the presets that stand for it: row, kinds, text, presets."""
    presets = {name: load_preset(name).rows for name in names()}
    wanted = of_kind("TFE")
    return [
        (row, ROWS[row][0], text, [n for n, rows in presets.items() if row in rows]) for row, text in wanted.items()
    ]


_RULE = (__doc__ or "").split("\n", 2)[2].strip()
_PAGE = """# What the documents claim, what we measured

One row per claim of the [checklist](../checklist.md) (kind L); a claim with several parts has several rows. The rule:

{rule}

"Not judged" needs `--scale paper`, which has the documents' network. With three seeds intervals are wide, so "no
difference to be seen" does not mean that there is none. This page is made by `fedgraft reproduce --summary`.

{table}

## All experiments

{experiments}
"""
