"""The commands of two parties with different features: transfer, and what others do with the folder of one."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from piebald.cli import app
from piebald.core.errors import PiebaldError, RuntimeFault, SettingError
from piebald.core.progress import Bar

Learns = Literal["both", "source", "target", "size"]  # without importing torch

if TYPE_CHECKING:
    from piebald.vertical import TransferResult, TransferSettings
    from piebald.vertical.protocol import Role
    from piebald.vertical.transfer_runs import Watcher


@app.command("sets", "scale", "out", "as_json", "quiet")
def transfer(
    options: app.SharedOptions,
    file: Annotated[Path, typer.Argument(help="A TOML file that describes vertical training between two parties.")],
    party: Annotated[str | None, typer.Option(help="Run only this party: source or target.")] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(help="This party's raw table, matched by --key; without --party the source's, then the target's."),
    ] = None,
    key: Annotated[
        list[str] | None, typer.Option(help="A column of the key of --data, in the order that both have agreed on.")
    ] = None,
    kind: Annotated[
        list[str] | None, typer.Option(help="How each column is written alike: exact, text, date, phone or name.")
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Simulate with so many seeds, each with other held-out rows, and compare.")
    ] = 1,
    partner: Annotated[
        list[str] | None,
        typer.Option(help="With --party: another party, by its certificate; of several, one after the other."),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Check settings and tables, meet nobody, and end.")] = False,
) -> None:
    """Train two parties that have different features of partly the same people, under encryption."""
    from piebald import vertical

    app.end_on_term()
    if party not in (None, "source", "target"):
        raise SettingError(f"--party must be source or target, got {party!r}")
    if seeds > 1 and party is not None:
        raise SettingError(f"--seeds repeats a simulation of both parties, and --party {party} runs one: leave one out")
    roles: list[Any] = ["source", "target"] if party is None else [party]
    if bool(data) != bool(key) or (data and len(data) != len(roles)):
        need = "one table each of source and target" if party is None else "one table"
        raise SettingError(f"raw tables need {need} with --data, and the columns of their key with --key")
    tables = [f"files.{role}.{name}={json.dumps(value)}" for role, path in zip(roles, data or (), strict=False)
              for name, value in (("path", str(path)), ("key", (key or [""])[0]))]  # fmt: skip
    settings = vertical.TransferSettings.load(file, [*tables, *(options.sets or ())], options.out, options.scale)
    kinds = kind or ["exact"] * len(key or ())
    if check:
        from piebald.vertical.raw_tables import check as found

        facts = found(settings, roles, key or (), kinds)
        return app.print_result(options, facts, "\n".join(f"{name}: {value}" for name, value in facts.items()))
    folder = Path(settings.out) if settings.out is not None else app.free_folder(Path("runs"), "transfer")

    if partner:
        if party is None:
            raise SettingError("--partner is another party of this one: choose this one with --party source or target")
        return _in_pairs(settings, roles[0], partner, folder, key or (), kinds, options)
    if party is None and key:
        from piebald.vertical.raw_tables import named

        settings = named(settings, key, kinds, folder)
    with _watching(settings, folder, party is None, options) as watch:
        if seeds > 1:
            compared = vertical.compare(settings, range(settings.seed, settings.seed + seeds), folder, watch, _caution)
            if options.as_json:
                return app.print_json(compared.plain())
            return None if options.quiet else app.print_table(compared.table())
        if party is None:
            result = vertical.run(settings, out=folder, watch=watch, tell=_caution)
        else:
            result = vertical.run_party(roles[0], settings, folder, watch, _caution, key or (), kinds)
    return _print(result, options)


def _in_pairs(
    settings: TransferSettings, role: Role, partners: list[str], folder: Path, key: Sequence[str],
    kinds: Sequence[str], options: app.SharedOptions,
) -> None:  # fmt: skip
    """Run one party with others in turn, each pair in a folder of its own: an error ends no other pair."""
    from piebald import vertical
    from piebald.vertical.transfer_runs import with_partners

    failed, results = list[str](), dict[str, Any]()
    for name, pair in with_partners(settings, partners).items():
        path = folder / name
        options.say(f"{role} with {name}: {path}")
        try:
            with _watching(pair, path, False, options) as watch:
                results[name] = vertical.run_party(role, pair, path, watch, _caution, key, kinds)
        except PiebaldError as error:
            _caution(f"{name}: {error}")
            failed.append(name)
        else:
            if not options.as_json:
                _print(results[name], options)
    if options.as_json:
        app.print_json({name: found.plain() for name, found in results.items()})
    if failed:
        raise RuntimeFault(
            f"{len(failed)} of {len(partners)} pairs did not finish: go on with --partner {' --partner '.join(failed)}"
        )


@app.command("as_json", "quiet")
def match(
    options: app.SharedOptions,
    rows: Annotated[Path, typer.Argument(metavar="ROWS", help="This party's table: .csv, .tsv or .parquet.")],
    key: Annotated[list[str], typer.Option(help="A column of the key, in the order that both have agreed on.")],
    credentials: Annotated[Path, typer.Option(help="The folder of this party's credentials.")],
    kind: Annotated[
        list[str] | None, typer.Option(help="How each column is written alike: exact, text, date, phone or name.")
    ] = None,
    learns: Annotated[Learns, typer.Option(help="Who learns the common keys: both, source, target, or size.")] = "both",
    floor: Annotated[int, typer.Option(help="The least size that is shown, with --learns size.")] = 1,
    country: Annotated[str, typer.Option(help="The digits that stand for the leading 0 of a phone number.")] = "",
    partner: Annotated[str | None, typer.Option(help="The name in the other party's certificate.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the other party.")] = 600.0,
    out: Annotated[Path, typer.Option("--out", help="A CSV file: the rows with a shared_id.")] = Path("matched.csv"),
) -> None:
    """Find the rows whose keys the other party has as well, without telling it any other key."""
    from piebald import vertical

    app.end_on_term()
    found = vertical.match(
        rows, key, credentials, out, kinds=kind or ["exact"] * len(key), learns=learns, floor=floor, country=country,
        partner=partner, timeout=timeout, tell=_caution,
    )  # fmt: skip
    size = "not shown" if found.size is None else f"{found.size:,}"
    written = str(out) if found.names else None
    line = f"keys that both have: {size}" + (f"; rows with their shared_id: {out}" if written else "")
    app.print_result(options, {"size": found.size, "out": written}, line)


def resume_transfer(folder: Path, options: app.SharedOptions) -> None:
    """Continue an interrupted transfer."""
    from piebald import vertical
    from piebald.vertical.party_store import read_settings
    from piebald.vertical.transfer_results import is_simulated

    with _watching(read_settings(folder), folder, is_simulated(folder), options) as watch:
        result = vertical.resume(folder, watch, _caution)
    _print(result, options)


@contextmanager
def _watching(
    settings: TransferSettings, folder: Path, simulated: bool, options: app.SharedOptions
) -> Iterator[Watcher | None]:
    """Say what a run hides; show its progress, with seconds per step and traffic."""
    from piebald.vertical.transfer_results import secrecy

    for name, sentence in secrecy(settings, simulated).items():
        options.say(f"{name}: {sentence}")
    with app.guarded(folder, f"piebald resume {folder}"), Bar("", settings.steps, options.progress, unit="step") as bar:
        bar.show(note="generating keys")

        def watch(line: dict[str, Any]) -> None:
            ways = f"{line['sent'] / 1000:,.0f} kB out, {line['received'] / 1000:,.0f} kB in"
            losses = "".join(f", {name} {value:.3g}" for name, value in (line["losses"] or {}).items())
            bar.show(line["step"] + 1, f"{line['seconds']:.2f} s per step, {ways}{losses}")

        yield watch if options.progress else None


def _caution(sentence: str) -> None:
    print(f"warning: {sentence}", file=sys.stderr)


def _print(result: TransferResult, options: app.SharedOptions) -> None:
    """Print a result, after writing its page where the target ran."""
    from piebald.vertical.transfer_results import write_page

    table, folder = result.table(), result.folder
    if folder is not None and (folder / "target").is_dir():
        table.append({"name": "page", "value": str(write_page(folder)[0])})
    if options.as_json:
        app.print_json(result.plain())
    elif not options.quiet:
        app.print_table(table)
