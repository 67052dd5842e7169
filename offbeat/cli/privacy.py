"""`offbeat privacy`: what a plan's privacy spends, before anything is trained."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from offbeat.privacy import GaussianMechanism


def privacy(
    noise: Annotated[
        float, typer.Option(help="Standard deviation of the noise, in units of --max-norm.", show_default=False)
    ],
    contributions: Annotated[
        int, typer.Option(min=1, help="That each worker makes: its steps, or averages.", show_default=False)
    ],
    delta: Annotated[float, typer.Option(help="At which epsilon is told.")] = 1e-5,
    max_norm: Annotated[float, typer.Option(help="To which contributions are clipped.")] = 1.0,
    model_size: Annotated[int, typer.Option(min=0, help="Parameters, to tell how long the noise is.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="In each update, to tell what is left in their mean.")] = 1,
) -> None:
    """Say what contributions of a worker spend with GaussianMechanism(...), and how much noise that is."""
    mechanism = GaussianMechanism(max_norm, noise, delta)
    typer.echo(
        f"{contributions} contributions of a worker, clipped to {max_norm:g}, with noise of {mechanism.deviation:g} in "
        f"each element, at delta {delta:g}:\n"
        f"epsilon {mechanism.epsilon(contributions):.4g}, compared with nothing of this worker\n"
        f"epsilon {mechanism.epsilon(contributions, replaced=True):.4g}, compared with other data in its place, be it "
        "one sample of it"
    )
    if model_size:
        length = math.sqrt(model_size) * mechanism.deviation
        typer.echo(
            f"Noise energy {length**2:.4g}: a contribution of {model_size} elements is {length:.4g} long by noise alone"
            + (f", and the mean of {workers} {length / math.sqrt(workers):.4g}." if workers > 1 else ".")
        )
