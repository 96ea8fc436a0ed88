"""`fedgraft selftest`: two minutes that say whether this machine computes what this project's machines computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedgraft.cli.console import import_runtime, print_line
from fedgraft.cli.overrides import DeviceName

if TYPE_CHECKING:
    from fedgraft.runs.selftest import Check


def selftest(
    out: Annotated[Path | None, typer.Option("--out", "-o", help="write the result as JSON, to send back")] = None,
    only: Annotated[list[str] | None, typer.Option("--only", help="a check by its name; may be repeated")] = None,
    device: DeviceName = None,
) -> None:
    """Train small federations twice on a device and compare with stored results: every kind, 12 algorithms, AMP."""
    import_runtime()
    from fedgraft.core.device_choice import AUTO
    from fedgraft.runs.selftest import selftest as test_device

    result = test_device(device or AUTO, only or (), _print_check)
    for name, reason in result.refused.items():
        print_line(f"refused {name}: {reason}")
    facts = ", ".join(f"{name} {value}" for name, value in result.facts.items())
    print_line(facts)
    rates = ", ".join(f"{name} {value:,.0f}" for name, value in result.speed.items())
    print_line(f"images per second of a tiny network: {rates}")
    if out is not None:
        out.write_text(json.dumps(result.as_table(), indent=2) + "\n")
        print_line(f"written: {out}")
    failed = [check.name for check in result.checks if not check.passed]
    if failed:
        print_line(f"fedgraft: {len(failed)} of {len(result.checks)} checks failed: {', '.join(failed)}", error=True)
        raise typer.Exit(1)


def _print_check(check: Check) -> None:
    """Print the line of one check."""
    verdict = "passed" if check.passed else "FAILED"
    repeated = "the same twice" if check.repeats else "not the same twice"
    distance = f"{check.difference:9.2e} from the stored result"
    print_line(f"{verdict}  {check.name:22} {distance}, {repeated}, {check.seconds:.1f} s")
