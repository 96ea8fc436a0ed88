"""How help looks: commands by what one wants, whole sentences, arguments with their meaning, an example each."""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Mapping

import click
import typer
from typer.core import TyperCommand, TyperGroup

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Run": ("run", "resume", "watch", "centralized"),
    "Look": ("list", "show", "compare", "verify", "profile"),
    "Use the model": ("predict", "evaluate", "export", "edit"),
    "Plan": ("advise", "find-lr", "sweep", "attack", "partition", "options", "algorithms", "presets"),
    "Several owners": ("preflight", "worth", "unlearn", "deploy"),
}
DEPLOY: Mapping[str, tuple[str, ...]] = {
    "Rehearse": ("local",),
    "Coordinator": ("init", "register", "server", "preflight", "submit", "status", "evaluate", "stop"),
    "Data owner": ("key", "policy", "trust", "node", "audit"),
    "Keys and certificates": ("fingerprint", "revoke", "renew"),
}
"""Commands in the order of use, for the program and for `deploy`; what is not named comes last."""

EXAMPLES: Mapping[str, str] = {
    "run": "fedgraft run mine.toml algorithm.name=scaffold rounds.total=20",
    "resume": "fedgraft resume runs/mine-1a2b3c4d",
    "watch": "fedgraft watch runs/mine-1a2b3c4d",
    "centralized": "fedgraft centralized mine.toml centralized.kind=finetune",
    "list": "fedgraft list --json",
    "show": "fedgraft show runs/mine-1a2b3c4d",
    "compare": "fedgraft compare runs/mine-* -o comparison --format png,pdf",
    "verify": "fedgraft verify runs/mine-1a2b3c4d",
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
    "algorithms": "fedgraft algorithms",
    "presets": "fedgraft presets demo > mine.toml",
    "preflight": "fedgraft preflight mine.toml",
    "worth": "fedgraft worth runs/mine-1a2b3c4d --metric balanced_accuracy",
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
    "deploy preflight": "fedgraft deploy preflight federation",
    "deploy evaluate": "fedgraft deploy evaluate federation runs/mine-1a2b3c4d",
    "deploy submit": "fedgraft deploy submit federation",
    "deploy status": "fedgraft deploy status federation",
    "deploy stop": "fedgraft deploy stop federation",
    "deploy local": "fedgraft deploy local mine.toml --nodes 4",
    "deploy policy": "fedgraft deploy policy mine.toml --key north.key",
    "deploy fingerprint": "fedgraft deploy fingerprint north.pub",
    "deploy trust": "fedgraft deploy trust 1 south.pub --key north.key",
    "deploy audit": "fedgraft deploy audit --key north.key",
    "deploy revoke": "fedgraft deploy revoke federation north",
    "deploy renew": "fedgraft deploy renew federation",
}


MEANT: Mapping[str, str] = {
    "report": "every run leaves report.html in its folder, and `fedgraft show RUN` prints its numbers.",
    "train": "did you mean 'run'?",
    "test": "did you mean 'evaluate'?",
    "forget": "did you mean 'unlearn'?",
    "help": "`fedgraft --help` lists all commands, `fedgraft run --help` explains one.",
}
"""What people type for something that has another name, or none."""


class Command(TyperCommand):
    """A command whose help gives every argument its meaning."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; of a mistyped option only what is really near is suggested."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            known = [name for one in self.get_params(ctx) for name in one.opts]
            near = difflib.get_close_matches(error.option_name, known, 1, 0.7)
            raise click.NoSuchOption(error.option_name, possibilities=near, ctx=ctx) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Arguments and options, without the marks that are meant for other ways of printing."""
        meanings = _meanings(self)
        arguments, options = [], []
        for one in self.get_params(ctx):
            if one.param_type_name == "argument":
                arguments.append((one.make_metavar(ctx), meanings.get(one.name or "", "")))
            elif (record := one.get_help_record(ctx)) is not None:
                options.append((record[0].replace(" RANGE", ""), record[1].replace("\\[", "[")))
        for title, rows in (("Arguments", arguments), ("Options", options)):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class Group(TyperGroup):
    """Commands by what they are for, each with its whole sentence."""

    _main_shell_completion = click.Group._main_shell_completion  # typer expects other words than click's scripts send

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that is meant; a mistyped one is told the nearest name, once."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), 1)
            hint = f"did you mean {near[0]!r}?" if near else f"`{ctx.command_path} --help` lists them."
            meant = MEANT.get(args[0], hint) if ctx.parent is None else hint
            ctx.fail(f"there is no command {args[0]!r}; {meant}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One section for each group that has a command here."""
        left = {name: one for name in self.list_commands(ctx) if (one := self.get_command(ctx, name)) is not None}
        groups = GROUPS if ctx.parent is None else DEPLOY
        for title, names in {**groups, "Commands": tuple(left)}.items():
            if rows := [(name, left.pop(name).get_short_help_str(200)) for name in names if name in left]:
                with formatter.section(title):
                    formatter.write_dl(rows)


def polish(app: typer.Typer, above: str = "") -> None:
    """Give every command of an app this help and its example."""
    for command in app.registered_commands:
        name = command.name or (command.callback.__name__ if command.callback else "")
        command.cls = Command
        if example := EXAMPLES.get(f"{above}{name}"):
            command.epilog = f"\b\nExample:\n  {example}"
    for group in app.registered_groups:
        group.cls = Group
        if group.typer_instance is not None:
            polish(group.typer_instance, f"{above}{group.name} ")


def _meanings(command: click.Command) -> dict[str, str]:
    """What each parameter's annotation says; typer hands an argument's help to a click that drops it."""
    hints = typing.get_type_hints(inspect.unwrap(command.callback), include_extras=True) if command.callback else {}
    said = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: extra[0].help or "" for name, extra in said.items() if extra and hasattr(extra[0], "help")}
