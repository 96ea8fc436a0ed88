"""The layout of help: commands by purpose, whole sentences, arguments with their meaning, an example each."""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Mapping

import click
import typer
from typer.core import TyperCommand, TyperGroup

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Run": ("run", "resume"),
    "Look": ("studio", "list", "show", "compare"),
    "Use the model": ("predict", "evaluate", "export"),
    "Several machines": ("deploy",),
    "More": ("options", "tools"),
}
TOOLS: Mapping[str, tuple[str, ...]] = {
    "Plan": ("presets", "algorithms", "partition", "preflight", "advise", "find-lr", "sweep", "attack"),
    "Train otherwise": ("centralized", "edit", "unlearn"),
    "Judge a run": ("verify", "worth", "release"),
    "Machine": ("profile", "selftest", "watch"),
}
"""Commands that `fedgraft tools` lists; each is called with or without the word `tools` before it."""
DEPLOY: Mapping[str, tuple[str, ...]] = {
    "Rehearse": ("local",),
    "Coordinator": ("init", "register", "server", "preflight", "submit", "status", "stop"),
    "Ask the nodes": ("evaluate", "compare", "release"),
    "Data owner": ("key", "policy", "trust", "node", "audit", "ledger", "clean"),
    "Keys and certificates": ("fingerprint", "revoke", "renew"),
}
"""Commands in the order of use, for the program and for `deploy`; others come last."""

EXAMPLES: Mapping[str, str] = {
    "run": "fedgraft run mine.toml algorithm.name=scaffold rounds.total=20",
    "resume": "fedgraft resume runs/mine-1a2b3c4d --rounds 40",
    "studio": "fedgraft studio runs --open",
    "watch": "fedgraft watch runs/mine-1a2b3c4d",
    "centralized": "fedgraft centralized mine.toml centralized.kind=finetune",
    "list": "fedgraft list --json",
    "show": "fedgraft show runs/mine-1a2b3c4d",
    "compare": "fedgraft compare runs/mine-* -o comparison --format png,pdf; fedgraft compare runs/a runs/b --on xrays",
    "verify": "fedgraft verify runs/mine-1a2b3c4d",
    "selftest": "fedgraft selftest --device cuda --out found.json",
    "profile": "fedgraft profile runs/mine-1a2b3c4d",
    "predict": "fedgraft predict runs/mine-1a2b3c4d new/*.png --top 3 --csv",
    "evaluate": "fedgraft evaluate runs/mine-1a2b3c4d --data labelled",
    "export": "fedgraft export runs/mine-1a2b3c4d adapted --as merged",
    "advise": "fedgraft advise xrays --budget 50MB --minutes 10 -o mine.toml",
    "find-lr": "fedgraft find-lr mine.toml --rates 0.003,0.01,0.03",
    "sweep": "fedgraft sweep mine.toml --over local.lr=0.01,0.03 --seeds 0,1,2",
    "attack": "fedgraft attack mine.toml --attacks sign_flip,alie --rules mean,median",
    "partition": "fedgraft partition mine.toml partition.alpha=0.1 -o clients.png",
    "options": "fedgraft options | grep privacy",
    "tools": "fedgraft tools",
    "algorithms": "fedgraft algorithms",
    "presets": "fedgraft presets demo > mine.toml",
    "preflight": "fedgraft preflight mine.toml",
    "worth": "fedgraft worth runs/mine-1a2b3c4d --metric balanced_accuracy",
    "release": "fedgraft release runs/mine-1a2b3c4d --rules release.toml",
    "unlearn": "fedgraft unlearn runs/mine-1a2b3c4d --client north --dry-run",
    "edit save": "fedgraft edit save runs/mine-1a2b3c4d mine.edit",
    "edit apply": "fedgraft edit apply mine.edit --model nano --to adapted --scale 0.5",
    "edit add": "fedgraft edit add one.edit two.edit --to both.edit --how ties",
    "edit negate": "fedgraft edit negate mine.edit --to without.edit",
    "edit inspect": "fedgraft edit inspect mine.edit",
    "edit sweep": "fedgraft edit sweep mine.edit runs/mine-1a2b3c4d --lambdas 0,0.5,1",
    "edit figures": "fedgraft edit figures runs/mine-1a2b3c4d -o figures",
    "deploy init": "fedgraft deploy init mine.toml --names north,south --host 10.0.0.5",
    "deploy key": "fedgraft deploy key north",
    "deploy register": "fedgraft deploy register federation north north.pub",
    "deploy server": "fedgraft deploy server federation --port 9092",
    "deploy node": "fedgraft deploy node --superlink 10.0.0.5:9092 --ca ca.crt --key north.key --id 0 --data xrays",
    "deploy slurm": "fedgraft deploy slurm node.sbatch --superlink 10.0.0.5:9092 --name north --id 0 --ca ca.crt "
    "--key north.key --data xrays",
    "deploy compose": "fedgraft deploy compose compose.yaml --superlink 10.0.0.5:9092 --name north --id 0 "
    "--image fedgraft-node --state north --data xrays",
    "deploy k8s": "fedgraft deploy k8s node.yaml --superlink 10.0.0.5:9092 --name north --id 0 --image fedgraft-node "
    "--claim xrays",
    "deploy preflight": "fedgraft deploy preflight federation",
    "deploy evaluate": "fedgraft deploy evaluate federation runs/mine-1a2b3c4d",
    "deploy release": "fedgraft deploy release federation runs/mine-1a2b3c4d --rare melanoma",
    "deploy compare": "fedgraft deploy compare federation runs/mine-1a2b3c4d runs/mine-5e6f7a8b",
    "deploy submit": "fedgraft deploy submit federation",
    "deploy status": "fedgraft deploy status federation",
    "deploy stop": "fedgraft deploy stop federation",
    "deploy app": "fedgraft deploy app flower-app mine.toml --nodes 4",
    "deploy local": "fedgraft deploy local mine.toml --nodes 4",
    "deploy policy": "fedgraft deploy policy mine.toml --key north.key",
    "deploy fingerprint": "fedgraft deploy fingerprint north.pub",
    "deploy trust": "fedgraft deploy trust 1 south.pub --key north.key",
    "deploy audit": "fedgraft deploy audit --key north.key",
    "deploy ledger": "fedgraft deploy ledger --key north.key",
    "deploy clean": "fedgraft deploy clean --key north.key --cache --yes",
    "deploy revoke": "fedgraft deploy revoke federation north",
    "deploy renew": "fedgraft deploy renew federation",
}


ALTERNATIVES: Mapping[str, str] = {
    "report": "every run leaves report.html in its folder, and `fedgraft show RUN` prints its numbers.",
    "train": "did you mean 'run'?",
    "test": "did you mean 'evaluate'?",
    "forget": "did you mean 'unlearn'?",
    "help": "`fedgraft --help` lists all commands, `fedgraft run --help` explains one.",
}
"""Commands that do not exist, with the hint at what does."""


class Command(TyperCommand):
    """A command whose help explains every argument."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments and return the rest (click); for a mistyped option suggest only a close match."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            known = []
            for parameter in self.get_params(ctx):
                known += parameter.opts
            near = difflib.get_close_matches(error.option_name, known, 1, 0.7)
            raise click.NoSuchOption(error.option_name, possibilities=near, ctx=ctx) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections of arguments and options, without markup that typer adds for rich."""
        explanations = _argument_help(self)
        arguments = []
        options = []
        for parameter in self.get_params(ctx):
            if parameter.param_type_name == "argument":
                arguments.append((parameter.make_metavar(ctx), explanations.get(parameter.name or "", "")))
                continue
            record = parameter.get_help_record(ctx)
            if record is not None:
                options.append((record[0].replace(" RANGE", ""), record[1].replace("\\[", "[")))
        _write_section(formatter, "Arguments", arguments)
        _write_section(formatter, "Options", options)


class Group(TyperGroup):
    """A group that lists its commands by purpose, each with its whole sentence."""

    _main_shell_completion = click.Group._main_shell_completion  # typer's own expects other arguments

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command; for a mistyped one fail with a suggestion."""
        args = without_tools(args)
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"there is no command {args[0]!r}; {self._suggestion(ctx, args[0])}")
        return super().resolve_command(ctx, args)

    def _suggestion(self, ctx: click.Context, name: str) -> str:
        """Return the hint for an unknown command: what to use instead, the nearest one, or how to list them."""
        if ctx.parent is None and name in ALTERNATIVES:
            return ALTERNATIVES[name]
        near = difflib.get_close_matches(name, self.list_commands(ctx), 1)
        if near:
            return f"did you mean {near[0]!r}?"
        return f"`{ctx.command_path} --help` lists them."

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section for each purpose that has a command here."""
        descriptions = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None:
                descriptions[name] = command.get_short_help_str(200)
        groups = DEPLOY
        if ctx.parent is None:
            groups = GROUPS
            for name in (name for names in TOOLS.values() for name in names):
                descriptions.pop(name, None)
        for title, names in groups.items():
            rows = [(name, descriptions.pop(name)) for name in names if name in descriptions]
            _write_section(formatter, title, rows)
        _write_section(formatter, "Commands", list(descriptions.items()))


def without_tools(args: list[str]) -> list[str]:
    """Return the words of a command line without a first `tools` that has a command after it."""
    if len(args) > 1 and args[0] == "tools" and not args[1].startswith("-"):
        return args[1:]
    return args


def list_tools(group: click.Group, ctx: click.Context) -> str:
    """Return the text of `fedgraft tools`: the commands of `TOOLS` by purpose."""
    formatter = ctx.make_formatter()
    for title, names in TOOLS.items():
        rows = []
        for name in names:
            command = group.get_command(ctx, name)
            if command is not None:
                rows.append((name, command.get_short_help_str(200)))
        _write_section(formatter, title, rows)
    formatter.write_paragraph()
    formatter.write_text("`fedgraft COMMAND --help` explains one.")
    return formatter.getvalue().rstrip()


def _write_section(formatter: click.HelpFormatter, title: str, rows: list[tuple[str, str]]) -> None:
    """Write a section of (name, explanation) rows under `title`; nothing without rows."""
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows)


def install_help(app: typer.Typer, above: str = "") -> None:
    """Give every command of an app this layout of help and its example; `above` is the path of its parent commands."""
    for command in app.registered_commands:
        name = command.name or getattr(command.callback, "__name__", "")
        command.cls = Command
        example = EXAMPLES.get(f"{above}{name}")
        if example:
            command.epilog = f"\b\nExample:\n  {example}"
    for group in app.registered_groups:
        group.cls = Group
        if group.typer_instance is not None:
            install_help(group.typer_instance, f"{above}{group.name} ")


def _argument_help(command: click.Command) -> dict[str, str]:
    """Return the help of each parameter of a command by name, from its annotation; click drops that of arguments."""
    if command.callback is None:
        return {}
    explanations = {}
    hints = typing.get_type_hints(inspect.unwrap(command.callback), include_extras=True)
    for name, hint in hints.items():
        metadata = getattr(hint, "__metadata__", ())
        if metadata and hasattr(metadata[0], "help"):
            explanations[name] = metadata[0].help or ""
    return explanations
