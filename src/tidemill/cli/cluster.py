"""What the command line has for several hosts: which, where workers stand, and what they
lack."""

from pathlib import Path
from typing import Annotated

import typer

from tidemill.cli.arguments import pairs
from tidemill.cli.error_output import friendly, print_findings
from tidemill.launchers.table import with_options

Hosts = Annotated[
    int | None,
    typer.Option(
        help="With --launch ray or slurm: of so many hosts, this one included (default: all; of a job, 1)."
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(help="With --launch ray: HOST:PORT of its head (default: RAY_ADDRESS, or this machine's)."),
]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="With --launch ray: also by the internet without authentication."),
]
Place = Annotated[
    list[str] | None,
    typer.Option(help="On several hosts: where workers stand, GROUP=HOST or WORKER=HOST. Repeatable."),
]


def places(place: list[str] | None) -> dict[str, str] | None:
    """Return what ``--place`` says, by group or worker."""
    return pairs("--place", place) if place else None


@friendly
def doctor_cluster(
    launch: Annotated[
        str, typer.Option("--launch", help="ray, slurm, or FILE.py:NAME of a launcher of several hosts.")
    ] = "ray",
    hosts: Hosts = None,
    ray_address: RayAddress = None,
    insecure: Insecure = False,
    run_dir: Annotated[Path, typer.Option(help="Folder of a run, or where it would be.")] = Path("runs"),
) -> None:
    """Look over the hosts that a launcher brings: whether they are let in, versions,
    clocks, limits, the shared folder, bandwidth and latency between each two."""
    from tidemill.launchers.examine_cluster import examine_cluster

    options = {"hosts": hosts, "address": ray_address, "insecure": insecure or None}
    if not print_findings(examine_cluster(with_options(launch, options), run_dir.absolute())):
        raise typer.Exit(1)
