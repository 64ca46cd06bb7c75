"""`dflash registry list | show ID | rollback [ID]`: which drafter of a target is in use, and how it became that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dflash_core.errors import UserError

if TYPE_CHECKING:
    from dflash_core.registry import Registry

app = typer.Typer(help="The drafters of each target: what is in use, what was tried, and the way back.", no_args_is_help=True)
Target = Annotated[str | None, typer.Option("--target", help="Registry of one target, by the beginning of its folder's name")]


def _registries(target: str | None) -> list[Registry]:
    from dflash_core.experiment_data import workspace
    from dflash_core.registry import find_registries

    home = workspace()
    found = find_registries(home, target)
    if not found and target is not None:
        names = ", ".join(registry.folder.name for registry in find_registries(home)) or "none"
        raise UserError(f"--target {target}: no registry begins so; there are: {names}")
    if not found:
        raise UserError(f"{home / 'registry'}: holds no registry; python -m flows.retrain EXPERIMENT makes one")
    return found


def _with_drafter(target: str | None, beginning: str) -> tuple[Registry, str]:
    """The registry that holds the drafter whose id begins so, and the whole id."""
    found = []
    for registry in (registries := _registries(target)):
        if any(entry.drafter.startswith(beginning) for entry in registry.entries()):
            found.append((registry, registry.find(beginning)))
    if len(found) != 1:
        where = ", ".join(registry.folder.name for registry in ([r for r, _ in found] or registries))
        what = "is in several registries; choose one with --target" if found else "no such drafter (dflash registry list) in"
        raise UserError(f"{beginning}: {what}: {where}")
    return found[0]


@app.command("list")
def list_drafters(target: Target = None) -> None:
    """Show every decision, the newest first; a star marks the drafter in use."""
    from dflash_core.registry import describe_list

    for number, registry in enumerate(_registries(target)):
        if number:
            typer.echo("")
        for line in describe_list(registry.folder.name, registry.entries()):
            typer.echo(line)


@app.command()
def show(
    drafter: Annotated[str, typer.Argument(metavar="ID", help="Drafter, or how its id begins")], target: Target = None
) -> None:
    """Show all that is known of a drafter, decision by decision, and check its files."""
    from dflash_core.registry import describe_entry

    registry, name = _with_drafter(target, drafter)
    entries = [entry for entry in registry.entries() if entry.drafter == name]
    kept = any(entry.decision == "promoted" for entry in entries)
    problem = registry.check(name) if kept else f"not kept here; its run is {entries[-1].run_id}"
    for number, entry in enumerate(entries):
        if number:
            typer.echo("")
        for line in describe_entry(entry, str(registry.drafter_folder(name)), problem):
            typer.echo(line)
    if kept and problem is not None:
        raise UserError(problem)


@app.command()
def rollback(
    drafter: Annotated[str | None, typer.Argument(metavar="[ID]", help="Drafter to use again; default: the one before")] = None,
    reason: Annotated[str, typer.Option(help="Why, for the lineage")] = "",
    target: Target = None,
) -> None:
    """Put an earlier drafter into use again."""
    if drafter is not None:
        registry, drafter = _with_drafter(target, drafter)
    else:
        registries = _registries(target)
        if len(registries) > 1:
            names = ", ".join(registry.folder.name for registry in registries)
            raise UserError(f"there are several registries; choose one with --target: {names}")
        registry = registries[0]
    entry = registry.roll_back(drafter, reason)
    typer.echo(f"{entry.current} is in use, {entry.previous} no longer: {registry.current_link}")
