"""Workers that join a job while it trains: where it is, and who they are to be there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from offbeat.cli.onlooker import JobEnded, Onlooker
from offbeat.cli.target import find
from offbeat.errors import NetworkError

_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Joining:
    """A job that trains.

    Args:
        environment: by which workers find it.
        first_rank: that nobody in it has had.
        plan: its plan of the beginning, with this server, if it is known here; the server says which one holds.
    """

    environment: dict[str, str]
    first_rank: int
    plan: Path | None


def look_for(where: str) -> Joining:
    """The job in a run folder, or at host:port with the credentials of the environment.

    Raises:
        NetworkError: if there is none, or it does not train yet.
        PeerError: if there are other credentials.
    """
    target = find(where, {})
    try:
        with Onlooker(target) as onlooker:
            scenes = onlooker.look(_PATIENCE_S)
    except JobEnded:
        scenes = ()
    if not scenes or not all(scene.started for scene in scenes):
        raise NetworkError(
            f"Cannot join the job at {where}: it does not train now. Try again while its workers do; `offbeat top` "
            "shows them."
        )
    began_with = scenes[0].world
    first_rank = max([began_with, *(seen.worker + 1 for scene in scenes for seen in scene.workers)])
    plans = [Path(target.folder) / name for name in ("server.toml", "plan.toml")] if target.folder else []
    environment = {
        "WORLD_SIZE": "1",
        "OFFBEAT_JOINS": str(began_with),
        "OFFBEAT_SERVERS": ",".join(target.servers or (target.address,)),
        "OFFBEAT_JOB": target.job,
        "OFFBEAT_TOKEN": target.token,
        "OFFBEAT_CERTIFICATE": target.certificate,
        "OFFBEAT_KEY": target.key,
        "OFFBEAT_AUTHORITY": target.authority,
    }
    return Joining(environment, first_rank, next((plan for plan in plans if plan.is_file()), None))
