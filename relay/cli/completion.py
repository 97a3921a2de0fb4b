"""`relay completion`: the script that has a shell complete commands, options and endpoints' ids."""

from __future__ import annotations

import sys

import click
from click.shell_completion import get_completion_class

from relay.core.errors import Unavailable

#: What click looks for; the command's name in it is the one that the shell completes.
_PROGRAM = "relay"
_VARIABLE = "_RELAY_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes a shell complete `relay`.

    For bash put `eval "$(relay completion bash)"` into ~/.bashrc, for zsh the same with zsh into ~/.zshrc; for fish
    write it to ~/.config/fish/completions/relay.fish.
    """
    from relay.cli.main import main

    made = get_completion_class(shell)
    if made is None:
        raise Unavailable(f"this release of click completes nothing for {shell}")
    try:
        click.echo(made(main, {}, _PROGRAM, _VARIABLE).source())
    except RuntimeError as error:
        # A bash that is too old, as macOS has it.
        click.echo(f"relay: {error}", err=True)
        sys.exit(1)
