"""The `dflash` command with what stands above the core: `dflash server | serve | watch-data | sweep`.

`dflash_core` knows neither Prefect nor this package, so the console script begins here and adds these commands to its own.
Each hands its words on to the module of the same name, which is imported only then: `dflash --help` imports no Prefect.
"""

from __future__ import annotations

import importlib
import sys

import typer

from dflash_core import cli

COMMANDS = {
    "server": ("flows.server", "The background Prefect server of the workspace: start, stop, status or url."),
    "serve": ("flows.serve", "Serve all flows as Prefect deployments, with forms, queues, schedule and event trigger."),
    "watch-data": ("flows.watch_data", "Say when new, complete files have arrived in a folder, which starts a retraining."),
    "sweep": ("flows.sweep", "Run an experiment with a grid of changes, and compare all runs."),
}
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def main() -> None:
    """The console script; ends with the exit code of what happened."""
    for name, (module, about) in COMMANDS.items():
        _add(name, module, about)
    cli.main()


def _add(name: str, module: str, about: str) -> None:
    # --help, too, is the module's own.
    @cli.app.command(name, help=about, context_settings=PASS_ON, add_help_option=False)
    def run(context: typer.Context) -> None:
        if module == "flows.sweep":  # its module imports Prefect, which must wait until a server is found
            from flows.command import main as run_flow

            sys.exit(run_flow("sweep", context.args))
        sys.exit(importlib.import_module(module).main(context.args))


if __name__ == "__main__":
    main()
