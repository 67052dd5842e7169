"""`offbeat swap`: have another synchronization policy decide in a job that trains."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offbeat.cli.top import Authority, Certificate, JobName, JobPlace, Key, TokenFile, find, given
from offbeat.errors import NetworkError, OffbeatError, PlanError
from offbeat.serve import Settings

if TYPE_CHECKING:
    from offbeat.cli.onlooker import Target
    from offbeat.fabric.server.messages import Swapped

_DIAL = timedelta(seconds=3)
_PATIENCE_S = 30.0  # for all workers to say what they make of it
_GOOD_BYE_S = 0.5


def swap(
    policy: Annotated[str, typer.Argument(help="As Python, such as 'SSP(4)' or ASP.", show_default=False)],
    job: JobPlace,
    job_name: JobName = "",
    token_file: TokenFile = None,
    certificate: Certificate = None,
    key: Key = None,
    authority: Authority = None,
) -> None:
    """Have another policy decide when workers may go on, in a job with a parameter server, while it trains.

    All workers are asked; if all can go by it, it holds for all at once, and nothing that is on its way is lost. If one
    cannot, nothing changes, and the exit code is 2. If the plan has a controller, it lets go: nobody swaps back.
    """
    import tomli_w

    from offbeat.cli.names import read_part
    from offbeat.plan import table_of

    part = tomli_w.dumps({"sync": table_of(read_part("sync", policy))})
    target = find(job, given(job_name, token_file, certificate, key, authority))
    said = asyncio.run(_ask(target, part))
    if said.refusal:
        raise PlanError(said.refusal)
    typer.echo(said.text)


async def _ask(target: Target, part: str) -> Swapped:
    """What the server answers, once all workers have.

    Raises:
        NetworkError: if nobody can be reached there, or there is no answer.
        PeerError: if it is another job, or there are other credentials.
    """
    from offbeat.fabric.server.messages import Swap, pack
    from offbeat.wire.tcp import connect

    settings = Settings(
        job=target.job,
        token=target.token,
        certificate=target.certificate,
        key=target.key,
        authority=target.authority,
    )
    line = _Line()
    link = await connect(
        target.address,
        accept=lambda link: line,
        job=target.job,
        rank=0,
        role="operator",
        credentials=settings.credentials(),
        patience=_DIAL,
    )
    try:
        link.send(pack(Swap(0, part)))
        async with asyncio.timeout(_PATIENCE_S):
            return await line.answer
    except TimeoutError as error:
        raise NetworkError(
            f"Cannot tell whether the policy was swapped: the server has not answered for {_PATIENCE_S:g} s, as some "
            "worker has not. `offbeat top` shows which one, and the policy."
        ) from error
    finally:
        try:
            await asyncio.wait_for(link.close(), _GOOD_BYE_S)
        except (TimeoutError, OffbeatError):
            link.abort()


class _Line:
    """What the link hands frames to."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Swapped] = asyncio.get_running_loop().create_future()

    def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
        """Nowhere: an answer has no body."""
        raise NetworkError("The server sends a body where none is expected.")

    def received(self, metadata: bytes, body: memoryview) -> None:
        """The answer is here."""
        from offbeat.fabric.server.messages import Swapped, to_worker

        message: Any = to_worker(metadata)
        if isinstance(message, Swapped) and not self.answer.done():
            self.answer.set_result(message)

    def lost(self, error: OffbeatError | None) -> None:
        """The link is gone for good."""
        if not self.answer.done():
            self.answer.set_exception(error or NetworkError("The job has ended; nothing was swapped."))
