"""`offbeat collective`: look at the paths of an all-reduce, and prove that they are one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.help_group import HelpGroup
from offbeat.errors import PlanError, ScenarioError

if TYPE_CHECKING:
    from offbeat.collective import Algorithm
    from offbeat.topology import Topology

app = typer.Typer(cls=HelpGroup, help="Show and verify the paths of an all-reduce.", no_args_is_help=True)

NetworkOption = Annotated[
    Path | None,
    typer.Option(help="A topology or a scenario as TOML, see docs/lab.md; ranks are its hosts.", show_default=False),
]


@app.command()
def show(
    method: Annotated[
        str, typer.Argument(help='By which paths are found, such as "MultiTree(split=4)".', show_default=False)
    ],
    network: NetworkOption = None,
    hosts: Annotated[int, typer.Option(min=1, max=1024, help="Equal hosts at one switch, without --network.")] = 4,
    rate_mbps: Annotated[float, typer.Option(help="Of their links, in 10^6 bit/s.")] = 1000.0,
    size: Annotated[float, typer.Option(min=0, help="Bytes of the vector.")] = 8e6,
    chunk: Annotated[list[int] | None, typer.Option(help="Chunks whose trees are shown; 0 if left out.")] = None,
    table: Annotated[
        list[int] | None, typer.Option(help="Ranks whose schedule tables are shown, as an interface would hold them.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File for the algorithm itself.", show_default=False)] = None,
    trees: Annotated[Path | None, typer.Option(help="File for a picture of the trees.", show_default=False)] = None,
    time_line: Annotated[
        Path | None, typer.Option(help="File for a picture of what each link carries when.", show_default=False)
    ] = None,
) -> None:
    """Make an algorithm for a network, verify it, and show who sends what to whom, how long it takes, and the least."""
    from offbeat.cli.part_syntax import read_part
    from offbeat.collective import bound, cost
    from offbeat.collective.draw import draw_time_line, draw_trees
    from offbeat.collective.schedule_table import table_lines
    from offbeat.collective.show import show as text_of
    from offbeat.wire.lane import blocks_on

    links = _network(network, hosts, rate_mbps)
    algorithm: Algorithm = read_part("collective", method).plan(links)
    algorithm.verify()
    chunks = chunk or [0]
    typer.echo(text_of(algorithm, chunks))
    for rank in table or ():
        typer.echo(f"\n{table_lines(algorithm, rank)}")
    typer.echo(f"\ndigest {algorithm.digest}")
    if len(links.hosts) > 1:
        least, took_s = bound(links, size), cost(algorithm, links, size, block_bytes=blocks_on(links))
        typer.echo(
            f"{size:g} bytes take {_seconds(took_s)}; at least {_seconds(least.any_method_s)} by any method, "
            f"{_seconds(least.all_gather_s + least.reduce_scatter_s)} if all is summed before it is gathered"
        )
    if out is not None:
        out.write_bytes(algorithm.to_bytes())
    if trees is not None:
        draw_trees(algorithm, links, trees, chunks)
    if time_line is not None:
        draw_time_line(algorithm, links, size, time_line, block_bytes=blocks_on(links))


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(help="An algorithm that `show --out` wrote.", show_default=False)],
    network: NetworkOption = None,
) -> None:
    """Prove that a file is the collective that it says: each contribution is in each result, exactly once.

    With a network also that no link is used twice in a time slot, where the algorithm has those.
    """
    from offbeat.collective import Algorithm, check_slots
    from offbeat.collective.show import summary

    try:
        data = path.read_bytes()
    except OSError as error:
        raise PlanError(f"Cannot read {path}: {error.strerror}.") from error
    algorithm = Algorithm.from_bytes(data)
    if network is not None and algorithm.uses_slots:
        check_slots(algorithm, _network(network, 1, None))
    typer.echo(f"{summary(algorithm)}\ndigest {algorithm.digest}\nIt is right.")


@app.command()
def evaluate(
    network: Annotated[
        list[str] | None,
        typer.Option(help='Only these, such as "torus 8x8"; all of the paper if left out.', show_default=False),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="File for all figures.", show_default=False)] = None,
    png: Annotated[Path | None, typer.Option(help="File for a picture.", show_default=False)] = None,
) -> None:
    """Repeat MultiTree's evaluation in a model of its machine: networks, sizes, scaling and models. Minutes."""
    import msgspec

    from offbeat.cli.interconnect_view import draw, groups, lines
    from offbeat.lab.plots import check_can_draw
    from offbeat.sim import interconnect

    if png is not None:
        check_can_draw()
    known = (*interconnect.NETWORKS, *interconnect.SCALING)
    for name in network or ():
        if name not in known:
            raise PlanError(f"Unknown network {name!r}. Use one of {', '.join(dict.fromkeys(known))} (--network).")
    chosen = [name for name in interconnect.NETWORKS if network is None or name in network]
    scaling = [name for name in interconnect.SCALING if network is None or name in network]
    rows = []
    for group in groups(interconnect.study(chosen, scaling)):
        rows += group
        for line in lines(group):
            typer.echo(line)
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode([row._asdict() for row in rows]), indent=1))
    if png is not None:
        draw(rows, png)


def _network(path: Path | None, hosts: int, rate_mbps: float | None) -> Topology:
    """The network of a file, or equal hosts at one switch."""
    from offbeat.scenario import Scenario
    from offbeat.topology import Topology
    from offbeat.topology_spec import NetworkFile

    if path is None:
        return Topology.star([f"h{i}" for i in range(hosts)], rate_mbps=rate_mbps)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"Cannot read {path}: {error}.") from error
    return Scenario.from_toml(text).workers if "[scenario]" in text else NetworkFile.from_toml(text).build()


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
