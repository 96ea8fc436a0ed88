"""Systematic mutants: `record` which tests reach which lines, `run` a sample, `report` it, `choose` and run the `gate`.

Results are lines of JSON in `runs/mutants` (or `--results`): a run that was stopped goes on where it stopped, and the
last line about a mutant counts. `run --retry survived --most 400 --seconds 300` tries survivors again with more tests.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.systematic import report
from tests.mutants.systematic.coverage_map import CoverageMap, record
from tests.mutants.systematic.mutate import Mutant
from tests.mutants.systematic.sample import PACKAGE, all_mutants, draw
from tests.mutants.systematic.trial import Verdict, attempt, warm_up

ROOT = Path(__file__).resolve().parents[3]
GATE = Path(__file__).parent / "gate.toml"
GATE_SIZE = 60


def tests_of(mutant: Mutant, coverage: CoverageMap, most: int, seconds: float) -> list[str]:
    """Return the tests that reach a mutant; none if no test executes its statement."""
    if not mutant.imported:
        tests = coverage.covering(mutant.file, mutant.line, mutant.end_line)
        tests = tests or coverage.covering(mutant.file, *mutant.statement)
        if tests or not coverage.executed(mutant.file, *mutant.statement):
            return coverage.choose(tests, most, seconds)
        # Called while modules are imported, which every test does.
        tests = coverage.covering(mutant.file, 1, 100_000) or frozenset(coverage.seconds)
        return coverage.choose(tests, most, seconds)
    tests = frozenset()
    if mutant.function is not None:  # a default of a parameter
        tests = coverage.covering(mutant.file, *mutant.function)
    tests = tests or coverage.covering(mutant.file, 1, 100_000)
    return coverage.choose(tests, most, seconds)


class Results:
    """The lines of JSON of one run: verdicts on mutants, and which tests pass alone without any mutant."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mutants: dict[str, dict] = {}
        self.tests: dict[str, bool] = {}
        if path.is_file():
            for line in path.read_text().splitlines():
                self._add(json.loads(line))

    def _add(self, row: dict) -> None:
        if "test" in row:
            self.tests[row["test"]] = row["clean"]
        else:
            first = self.mutants.get(row["id"], row)
            self.mutants[row["id"]] = {**row, "first": first.get("first", first["status"])}

    def append(self, row: dict) -> None:
        """Add a row and write it."""
        self._add(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def passes_alone(self, test: str, seconds: float) -> bool:
        """Whether a test passes by itself without a mutant; one that does not cannot notice anything."""
        if test not in self.tests:
            verdict = attempt([test], seconds)
            self.append({"test": test, "clean": verdict.status == "survived"})
        return self.tests[test]


def judge(mutant: Mutant, tests: Sequence[str], coverage: CoverageMap, results: Results) -> Verdict:
    """Try a mutant; a test that noticed it must pass without it, else it is left out and the mutant tried again."""
    tests = [test for test in tests if results.tests.get(test, True)]
    if not tests:
        return Verdict("uncovered", "", 0.0)
    expected = sum(coverage.seconds[test] for test in tests)
    verdict = attempt(tests, expected, mutant)
    if verdict.by in coverage.seconds and not results.passes_alone(verdict.by, coverage.seconds[verdict.by]):
        return judge(mutant, tests, coverage, results)
    return verdict


def run(options: argparse.Namespace) -> None:
    """Try the mutants of the sample that have no verdict yet, or those whose verdict is to be tried again."""
    coverage = CoverageMap.load(options.results)
    results = Results(options.results / "results.jsonl")
    waiting = []
    for mutant in draw(options.sample, options.seed):
        row = results.mutants.get(mutant.id)
        if row is None or (options.retry and row["status"] in options.retry and row["most"] < options.most):
            waiting.append(mutant)
    if options.only:
        waiting = [mutant for mutant in waiting if mutant.id.startswith(tuple(options.only))]
    print(f"{len(waiting)} mutants to try, {len(results.mutants)} known", flush=True)
    warm_up(sorted({test.partition("::")[0] for test in coverage.seconds}))
    for mutant in waiting:
        tests = tests_of(mutant, coverage, options.most, options.seconds)
        verdict = judge(mutant, tests, coverage, results)
        row = {"id": mutant.id, "status": verdict.status, "by": verdict.by, "seconds": round(verdict.seconds, 2)}
        row |= {
            "tests": len(tests),
            "most": options.most,
            "change": mutant.describe((PACKAGE / mutant.file).read_text()),
        }
        results.append(row)
        print(time.strftime("%H:%M:%S"), verdict.status, row["seconds"], row["change"][:150], flush=True)


def try_again(options: argparse.Namespace) -> None:
    """Try some mutants against given tests, for example new ones, and note those that are noticed."""
    results = Results(options.results / "results.jsonl")
    mutants = {mutant.id: mutant for folder in all_mutants().values() for mutant in folder}
    warm_up(sorted({test.partition("::")[0] for test in options.tests}))
    if attempt(options.tests, 60.0).status != "survived":
        sys.exit("the tests do not pass without a mutant.")
    wanted = [row["id"] for row in report.survivors(list(results.mutants.values()))]
    for identity in wanted:
        if identity not in mutants or (options.only and not identity.startswith(tuple(options.only))):
            continue
        verdict = attempt(options.tests, 60.0, mutants[identity])
        row = results.mutants[identity]
        print(verdict.status, verdict.by, row["change"][:150], flush=True)
        if verdict.status != "survived":
            results.append({**row, "status": verdict.status, "by": verdict.by, "seconds": round(verdict.seconds, 2)})


def gate_entries() -> dict[str, str]:
    """Return the mutants of the gate with the test that notices each."""
    return {row["id"]: row["test"] for row in tomllib.loads(GATE.read_text())["mutant"]}


def gate() -> None:
    """Run the gate's mutants, each against the one test that is known to notice it; exit 1 if one survives."""
    mutants = {mutant.id: mutant for folder in all_mutants().values() for mutant in folder}
    entries = gate_entries()
    present = [identity for identity in entries if identity in mutants]
    if len(present) < 0.8 * len(entries):
        sys.exit("a fifth of the gate's mutants is gone with edits: `python -m tests.mutants.systematic choose` anew.")
    warm_up(sorted({entries[identity].partition("::")[0] for identity in present}))
    survivors = []
    began = time.perf_counter()
    for identity in present:
        if attempt([entries[identity]], 5.0, mutants[identity]).status == "survived":
            survivors.append(f"{identity} survives {entries[identity]}")
    print(f"{len(present)} mutants, {len(survivors)} survived, {time.perf_counter() - began:.0f} s")
    sys.exit("\n".join(survivors) if survivors else 0)


def choose(options: argparse.Namespace) -> None:
    """Write the gate's list: killed mutants of quick tests, as many of each folder as its share of the sample says."""
    coverage = CoverageMap.load(options.results)
    results = Results(options.results / "results.jsonl")
    present = {mutant.id for mutant in draw(options.sample, options.seed)}
    rows = [row for row in results.mutants.values() if row["status"] == "killed" and row["id"] in present]
    quick = [row for row in rows if coverage.seconds.get(row["by"], 9.0) < 0.2]
    text = [
        "# Mutants of the gate, each with the test that notices it: `python -m tests.mutants.systematic choose`.",
        "",
    ]
    for row in report.stratified(quick, GATE_SIZE):
        text += ["[[mutant]]", f"id = {json.dumps(row['id'])}", f"test = {json.dumps(row['by'])}", ""]
    GATE.write_text("\n".join(text))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.systematic", description=__doc__)
    parser.add_argument("command", choices=("record", "run", "try", "report", "choose", "gate", "show"))
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "mutants", help="folder of the map and results")
    parser.add_argument("--sample", type=int, default=1500, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0, help="which sample")
    parser.add_argument("--most", type=int, default=40, help="most tests for a mutant")
    parser.add_argument("--seconds", type=float, default=45, help="most seconds of tests for a mutant")
    parser.add_argument("--retry", nargs="*", default=[], help="try these verdicts again if fewer tests were tried")
    parser.add_argument("--only", nargs="*", default=[], help="only mutants whose ids begin so, such as core/")
    parser.add_argument(
        "--tests", nargs="*", default=[], help="try: tests that survivors are to meet; record: only these"
    )
    parser.add_argument("--slow", action="store_true", help="record: the tests marked slow")
    options = parser.parse_args()
    if options.command == "record":
        sys.exit(record(options.results, options.slow, options.tests))
    elif options.command == "run":
        run(options)
    elif options.command == "try":
        try_again(options)
    elif options.command == "choose":
        choose(options)
    elif options.command == "gate":
        gate()
    else:
        rows = Results(options.results / "results.jsonl").mutants
        if options.command == "report":
            report.write(list(rows.values()), options.sample)
        else:
            print(report.table(list(rows.values())))


if __name__ == "__main__":
    main()
