"""One model's way to the other workers: the fabric, counted by the metrics, waited for by the one waiting primitive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.diagnosis.wait import WaitContext
from offbeat.fabric import ReduceScatters

if TYPE_CHECKING:
    import torch

    from offbeat.engine.worker_context import WorkerContext
    from offbeat.fabric import Fabric, Scattered
    from offbeat.layout import Bucket
    from offbeat.payload import Payload, Reply, Sum
    from offbeat.pending import Pending


class Communicator:
    """A fabric whose exchanges are counted and waited for.

    Args:
        fabric: this worker's end of the fabric; nobody else issues on it.
        context: of this worker.
        model: which of several, from 0, for reports.
        is_apart: it is a thread's that does not train; the metrics have its bytes when that which does calls `tell`.
    """

    def __init__(self, fabric: Fabric, context: WorkerContext, model: int = 0, *, is_apart: bool = False) -> None:
        self._fabric, self._waiter, self._metrics = fabric, context.waiter, context.metrics
        self._is_apart, self._untold_bytes = is_apart, 0
        self.now_s = context.metrics.now_s  # the clock
        self.model = model
        self.rank, self.world = fabric.rank, fabric.world
        self.step = 0  # exchanges so far
        self.buckets = 0  # how many there are, for reports

    def start(self, payload: Payload) -> Pending:
        """Begin an exchange; in the same order on every rank."""
        return self._count(self._fabric.start(payload))

    def reduce_scatter(self, payload: Sum) -> Scattered:
        """Begin the first round of a sum in two; `all_gather` begins its second. In the same order on every rank."""
        assert isinstance(self._fabric, ReduceScatters), "the plan is refused where a fabric cannot do that"
        scattered = self._fabric.reduce_scatter(payload)
        self._count(scattered)
        return scattered

    def all_gather(self, scattered: Scattered) -> Pending:
        """Begin the second round of a sum; in the same order on every rank."""
        return self._count(scattered.all_gather())

    def broadcast(self, tensor: torch.Tensor, source: int) -> Pending:
        """Begin to overwrite `tensor` with that of rank `source`; in the same order on every rank."""
        return self._count(self._fabric.broadcast(tensor, source))

    def wait(self, pending: Pending, operation: str, label: str = "", index: int = -1) -> Reply:
        """Block until it is done.

        Args:
            operation: such as "all-reduce".
            label: the layer names it is about.
            index: of the bucket, -1 if it is none.

        Raises:
            WorkerLostError, NetworkError: as `BlockingWait.wait`.
        """
        return self._waiter.wait(pending, WaitContext(operation, self.step, index, self.buckets, label, self.model))

    def wait_for_bucket(self, pending: Pending, bucket: Bucket) -> Reply:
        """Block until a round of the bucket's exchange is done."""
        return self.wait(pending, "all-reduce", bucket.label, bucket.index)

    def tell(self) -> None:
        """Have the metrics count what was sent until now; while nothing is on its way."""
        self._metrics.sent_bytes += self._untold_bytes
        self._untold_bytes = 0

    def _count(self, pending: Pending) -> Pending:
        self._untold_bytes += pending.sent_bytes
        if not self._is_apart:
            self.tell()
        return pending
