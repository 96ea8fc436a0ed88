"""`python -m reproduction` (`make reproduce NAME=...`): the documents' experiments and the six questions by name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedgraft.core.errors import FedgraftError

app = typer.Typer(add_completion=False)


@app.command()
def reproduce(
    name: Annotated[str | None, typer.Argument(help="an experiment or q1 to q6; --list shows them")] = None,
    scale: Annotated[str, typer.Option("--scale", help="laptop, paper (a GPU) or tiny (seconds, digits)")] = "laptop",
    seeds: Annotated[int, typer.Option("--seeds", help="how many: 1, 2, ...; 0: as planned", min=0)] = 0,
    processes: Annotated[int, typer.Option("--processes", help="runs at a time; 0: in this process", min=0)] = 2,
    data: Annotated[str | None, typer.Option("--data", help="folder with the data; else the usual places")] = None,
    model: Annotated[str | None, typer.Option("--model", help="folder of the network for q1 to q6")] = None,
    part: Annotated[str | None, typer.Option("--part", help="only this part of a question")] = None,
    runs: Annotated[Path, typer.Option("--runs", help="where runs are kept and found again")] = Path("runs/reproduce"),
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="where the pages go; else docs/results, below it for paper and tiny"),
    ] = None,
    formats: Annotated[str, typer.Option("--format", help="of the figures: png, and pdf or svg for papers")] = "png",
    list_: Annotated[bool, typer.Option("--list", help="every table, figure and experiment, with its name")] = False,
    read: Annotated[bool, typer.Option("--read", help="run nothing; pages from the finished runs")] = False,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="an option for every run, as device=cpu or rounds.total=5")
    ] = None,
    answers: Annotated[bool, typer.Option("--answers", help="write the answers from the numbers there are")] = False,
) -> None:
    """Repeat an experiment: run what is missing, then write its tables and figures."""
    from fedgraft.config.load import parse_overrides
    from reproduction.kept import pack, unpack
    from reproduction.preset import SCALES
    from reproduction.question import QUESTIONS

    if scale not in SCALES:
        raise FedgraftError(
            "E-REPRODUCTION-SCALE", f"there is no scale {scale!r}", f"there are {', '.join(SCALES)}", scale=scale
        )
    from fedgraft.report.compare import figure_formats

    kinds = figure_formats(formats)
    if list_:
        _list(scale)
        return
    if not (name or answers):
        raise FedgraftError(
            "E-REPRODUCTION-NAME", "no experiment is named", "name an experiment, or give --list or --answers"
        )
    # Digits must not take the place of real results, nor a laptop's those of a GPU.
    out = out or Path("docs/results") / ("" if scale == "laptop" else scale)
    everywhere = parse_overrides(changes or [])
    places = {word: place for word, place in (("DATA", data), ("MODEL", model)) if place}
    try:
        if name and scale != "tiny" and (known := unpack(out / "runs.zip.xz", runs, places)):
            typer.echo(f"{known} finished runs are read from {out / 'runs.zip.xz'}")
        if name:
            page = _one(
                name,
                scale,
                seeds,
                processes,
                (data, model),
                (runs, out),
                kinds,
                (part, read),
                everywhere,
            )
            if name not in QUESTIONS:  # a question's page is long
                typer.echo("\n".join(line for line in page.read_text("utf-8").splitlines() if line[:1] in "|#"))
            typer.echo(page)
        if name and scale != "tiny":
            pack(runs, out / "runs.zip.xz", places)
    except KeyboardInterrupt:
        typer.echo("\ninterrupted; the runs are saved. The same command goes on from here.", err=True)
        raise typer.Exit(130) from None
    if answers:
        _answers(out)


def _one(
    name: str,
    scale: str,
    seeds: int,
    processes: int,
    given: tuple[str | None, str | None],
    folders: tuple[Path, Path],
    formats: tuple[str, ...],
    which: tuple[str | None, bool],
    changes: dict[str, Any],
) -> Path:
    from reproduction.page import write, write_question
    from reproduction.preset import Preset, load_preset
    from reproduction.question import QUESTIONS, load_question
    from reproduction.reproduce import Work
    from reproduction.reproduce import reproduce as carry_out

    part, read = which

    def work(label: str, preset: Preset, read: bool = read) -> Work:
        count = seeds or (1 if scale == "tiny" else preset.seeds)
        measured = tuple(range(preset.first_seed, preset.first_seed + count))
        return Work(label, preset, scale, measured, folders[0], processes, *given, typer.echo, read, changes)

    if name not in QUESTIONS:
        return write(carry_out(work(name, load_preset(name))), folders[1], formats)
    parts = load_question(name).parts
    if part is not None and part not in parts:
        raise FedgraftError(
            "E-REPRODUCTION-PART", f"{name} has no part {part!r}", f"it has {', '.join(parts)}", part=part
        )
    if scale == "laptop" and given[1] is None:
        raise FedgraftError(
            "E-REPRODUCTION-MODEL",
            f"{name} needs a pretrained network",
            "say where its folder is (MODEL=folder, or --model)",
            name=name,
        )
    done = {}
    for label, preset in parts.items():  # other parts than the wanted one stay on the page as far as they came
        only = read or part not in (None, label)
        found = carry_out(work(f"{name}-{label}", preset, only))
        if not only or found.measured_at_all:
            done[label] = found
    return write_question(name, done, folders[1], formats)


def _answers(out: Path) -> None:
    from fedgraft.core.store import write_text
    from reproduction.answers_page import answers_html, answers_page, claims_page, results

    if not any(out.glob("q*/numbers.json")):
        raise FedgraftError(
            "E-REPRODUCTION-NO-NUMBERS",
            f"{out} has no numbers (q1/numbers.json ...)",
            "--out says where they are and pages go",
            folder=str(out),
        )
    typer.echo("judging every endpoint and claim, drawing six figures")
    found = results(out)
    for file, text in (("answers.md", answers_page(found)), ("claims.md", claims_page(found))):
        write_text(out / file, text)
        typer.echo(out / file)
    typer.echo(answers_html(found, out / "answers.html"))


def _list(scale: str) -> None:
    """Rows of the checklist with their experiments, then the experiments and questions with their cost."""
    from reproduction.claims import listing
    from reproduction.preset import load_preset, names
    from reproduction.question import QUESTIONS, load_question

    for row, kind, text, found in listing():
        typer.echo(f"{row:4} {kind:3} {', '.join(found) or '-':28} {text}")
    typer.echo("")
    for one in names():
        preset = load_preset(one)
        minutes = preset.scales[scale].core_minutes  # type: ignore[index]
        typer.echo(f"{one:16} {minutes:5.0f} core-minutes ({scale}, {preset.seeds} seeds)  {preset.title}")
    for one in QUESTIONS:
        question = load_question(one)
        minutes = question.core_minutes(scale)  # type: ignore[arg-type]
        typer.echo(f"{one:16} {minutes:5.0f} core-minutes ({scale}, as planned)  {question.title}")


def main() -> None:
    """The command; what is wrong is one sentence."""
    try:
        app()
    except FedgraftError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        typer.echo("\ninterrupted before anything began.", err=True)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
