"""The data of a run's loops: which loaders were prepared, who deals them out, and which batch is at hand."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import msgspec
from torch.utils.data import DataLoader, RandomSampler

from offbeat.batching import Leases, what_changes
from offbeat.diagnosis.wait import WaitContext
from offbeat.engine import BatchCounts, DrawnBatch, state_checks
from offbeat.errors import ModelError
from offbeat.loading import position
from offbeat.loading.endless_loader import EndlessLoader
from offbeat.loading.epoch_size import dataset_size
from offbeat.loading.leased_loader import SEEDS, LeasedLoader, ahead_of, batch_of, can_lease, drops_last, least_of
from offbeat.loading.loader_check import LoaderCheck
from offbeat.loading.replicated_source import BatchSizes, ReplicatedSource, Timing
from offbeat.loading.server_source import ServerSource
from offbeat.loading.sharded_loader import ShardedLoader, sampler_of
from offbeat.protocol.checkpoints import DEALING
from offbeat.protocol.data_leases import RegisterLoader
from offbeat.rng import RngState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from offbeat.batching import Keeps
    from offbeat.engine.model_registry import ModelRegistry
    from offbeat.engine.server_session import ServerSession
    from offbeat.engine.worker_context import WorkerContext
    from offbeat.loading.batch_source import BatchSource
    from offbeat.plan import Plan

_log = logging.getLogger("offbeat")
_MOST_UNTOLD = 128  # rounds after which it is surely known who had taken part in them


class LoopObserver(Protocol):
    """An observer of the script's loops over leased data: what all workers do together happens there."""

    def on_loop(self) -> None:
        """A loop begins."""

    def before_draw(self) -> None:
        """The next batch is about to be drawn, in the outermost loop."""


class _NobodyListens:
    """A `LoopObserver` of a worker that is alone."""

    def on_loop(self) -> None:
        """Do nothing."""

    def before_draw(self) -> None:
        """Do nothing."""


class LoaderManager:
    """The loaders that one worker has prepared.

    Args:
        plan: that the run begins with; batches are dealt out as it says to the end.
        context: of this worker.
        models: those prepared; more may come.

    Attributes:
        server: that deals out data, if there is one.
        observer: hears where the script is in its loops over leased data; set before a loader is prepared.
        has_data: False while a prepared loader repeats the last batch, which then does not count.
    """

    def __init__(
        self,
        plan: Plan,
        context: WorkerContext,
        models: ModelRegistry,
    ) -> None:
        self._plan, self._control, self._waiter, self._metrics = plan, context.control, context.waiter, context.metrics
        self._began_with, self._seed, self._is_elastic = context.began_with, context.seed, context.group is not None
        self._models = models
        self.observer: LoopObserver = _NobodyListens()
        self._outermost: LeasedLoader | None = None  # of those with a loop under way, the one whose began first
        self._specs: dict[int, RegisterLoader] = {}  # what was said of leased loaders, by number
        self.server: ServerSession | None = None
        self.loaders: list[ShardedLoader | LeasedLoader] = []
        self.has_data = True
        self._draws = 0  # batches that they gave out
        self._goes_alone = plan.is_tabled and context.control.world > 1
        self._check = LoaderCheck(context.log.own)
        self._is_validator = context.is_validator

    def prepare(self, loader: Iterable[Any]) -> ShardedLoader | LeasedLoader:
        """Deal out a loader. Collective.

        Raises:
            ModelError: if it cannot be dealt out as the plan wants.
            DisagreementError: if the workers' data differ.
        """
        if isinstance(loader, ShardedLoader | LeasedLoader):
            if loader not in self.loaders:
                raise ModelError("Cannot prepare a loader of another run. Prepare the original.")
            return loader
        prepared: ShardedLoader | LeasedLoader
        if self._is_validator:
            control, put_back = self._control, self._put_back
            prepared = EndlessLoader(loader, control=control, on_batch=self._on_batch, put_back=put_back)
        elif self._leases(loader):
            prepared = self._lease(loader)
        else:
            if self._control.newcomer_check is not None:
                raise ModelError(
                    "Cannot join with this loader: each worker has a part of its data for the whole job. Prepare a "
                    "DataLoader over a dataset with a length, or none."
                )
            prepared = ShardedLoader(
                loader,
                control=self._control,
                on_batch=self._on_batch,
                put_back=self._put_back,
                seed=self._seed,
                together=self.server is None,
            )
            if self._goes_alone:
                prepared.go_alone()
        self.loaders.append(prepared)
        self._check.prepared(loader, is_dealt=prepared.loader is not loader)
        self._metrics.loader_counts = True
        return prepared

    def go_alone(self, *, alone: bool) -> None:
        """Have each worker go through its part at its own pace from here on, or all together; they are at one step.

        Args:
            alone: whether each is to by itself.
        """
        self._goes_alone = alone
        for loader in self.loaders:
            if isinstance(loader, ShardedLoader):
                if alone:
                    loader.go_alone()
                else:
                    loader.go_together()

    def stepped(self) -> None:
        """A prepared optimizer is about to step."""
        if self._control.world > 1 or self.server is not None:
            self._check.stepped()

    @property
    def leased(self) -> list[LeasedLoader]:
        """The loaders whose samples are leased one by one."""
        return [loader for loader in self.loaders if isinstance(loader, LeasedLoader)]

    @property
    def progress(self) -> float:
        """Epochs so far of the loader prepared first.

        Raises:
            ModelError: if no loader was prepared.
        """
        if not self.loaders:
            raise ModelError("Cannot tell how far the data is: no loader was prepared. Give run.prepare one.")
        return self.loaders[0].progress

    def lose(self, ranks: Iterable[int]) -> str:
        """Go on without these workers; what becomes of the batches, in words. On the thread that has noticed it."""
        for loader in self.leased:
            loader.lost(ranks, unused=self._unlanded)
        return what_changes(self._keeps)

    def _unlanded(self) -> int:
        return max((synchronizer.accounting.unlanded for synchronizer in self._models.synchronizers), default=0)

    @property
    def is_settled(self) -> bool:
        """Whether there is a gradient of all that was drawn: what there is none of may yet be given back."""
        return not min((synchronizer.accounting.uncomputed for synchronizer in self._models.synchronizers), default=0)

    @property
    def is_through(self) -> bool:
        """Whether the outermost loop over leased data is about to end with its epoch."""
        return self._outermost is not None and self._outermost.is_through

    def hand_over(self) -> list[dict[str, Any]]:
        """Collect what new workers have to know, by loader."""
        return [loader.hand_over() for loader in self.leased]

    def join(self, ranks: Sequence[int], states: Sequence[Mapping[str, Any]] = ()) -> str:
        """Go on with these workers, too; what becomes of the batches, in words.

        Args:
            states: what those that were there before handed over, if this worker is one of these.
        """
        for loader, state in zip(self.leased, states, strict=False):
            loader.take_over(state)
        for loader in self.leased:
            loader.joined(ranks)
        return what_changes(self._keeps)

    def out_of_memory(self) -> None:
        """Handle that there was no memory for the batch at hand.

        Raises:
            ModelError: where all workers compute each step together, and one cannot be left out.
        """
        if not self.leased:
            raise ModelError(
                "Cannot leave out a batch that others cannot be given. Use a smaller one, or fabric=ParameterServer() "
                "and a prepared DataLoader over a dataset with a length."
            )
        for loader in self.leased:
            loader.out_of_memory()
        for synchronizer in self._models.synchronizers:
            synchronizer.accounting.give_up()
        self._metrics.give_up()

    def explain(self) -> list[str]:
        """Say which worker paces the rounds and why, by loader."""
        return [loader.explain() for loader in self.leased]

    def state_dict(self) -> list[dict[str, Any]]:
        """The place in the data, by loader."""
        return [loader.state_dict() for loader in self.loaders]

    def load_state_dict(self, states: Sequence[Mapping[str, Any]], *, seed: int) -> None:
        """Go on where `state_dict` was called, in a run of that seed."""
        self._seed = seed
        for loader, state in zip(self.loaders, self._as_here(states, seed), strict=True):
            loader.load_state_dict(state, seed=seed)

    def rng_state(self) -> dict[str, Any]:
        """The state of this process's random generators, now and where the loops under way began, as plain numbers and
        tensors.
        """
        began = [loader.loop_rng.began for loader in self.loaders]
        return {
            "now": RngState.capture(self._own_rngs, self._cuda).to_plain(),
            "loops": [None if one is None else one.to_plain() for one in began],
        }

    def load_rng_state(self, state: Mapping[str, Any]) -> None:
        """Have them go on where `rng_state` was called, and the next loops where those under way were.

        Raises:
            ValueError: if it is damaged, or of other loaders; then nothing has changed.
        """
        own, cuda = self._own_rngs, self._cuda
        if not isinstance(state, dict) or not isinstance(loops := state.get("loops"), list):
            raise ValueError("it holds no state of generators")
        now = RngState.from_plain(state.get("now"), own, cuda)
        if len(loops) != len(self.loaders):
            raise ValueError(f"it was saved with {len(loops)} loaders, and this run has {len(self.loaders)}")
        rngs = [loader.loop_rng for loader in self.loaders]
        began = [
            None if one is None else RngState.from_plain(one, rng.own) for one, rng in zip(loops, rngs, strict=True)
        ]
        now.restore(own, cuda)
        for one, rng in zip(began, rngs, strict=True):
            if one is not None:
                rng.resume(one, lambda: now.restore(own, cuda))

    @property
    def _own_rngs(self) -> list[torch.Generator]:
        return [generator for loader in self.loaders for generator in loader.loop_rng.own]

    @property
    def _cuda(self) -> torch.device | None:
        """The GPU on which this worker trains."""
        return next((p.device for model in self._models.modules for p in model.parameters() if p.is_cuda), None)

    def _as_here(self, states: Sequence[Mapping[str, Any]], seed: int) -> Sequence[Mapping[str, Any]]:
        """The same places as they are kept here, if the job was on another fabric when it was saved."""
        states = [self._dealt_as_here(number, state, seed) for number, state in enumerate(states)]
        places = {
            number: (
                msgspec.structs.replace(self._specs[number], seed=seed % SEEDS),
                dataclasses.replace(loader.source.leases, seed=seed % SEEDS),
                state,
            )
            for number, (loader, state) in enumerate(zip(self.loaders, states, strict=True))
            if isinstance(loader, LeasedLoader) and isinstance(loader.source, ServerSource) and "leases" in state
        }
        if not places:
            return states
        lease_state = position.for_coordinator(places)
        return [
            {"place": lease_state, "progress": position.progress_of(state["leases"], places[number][1].samples)}
            if number in places
            else state
            for number, state in enumerate(states)
        ]

    def _dealt_as_here(self, number: int, state: Mapping[str, Any], seed: int) -> Mapping[str, Any]:
        """One loader's place; where its data was dealt out in another order, the epoch begins anew."""
        loader, is_leased = self.loaders[number], "epoch" not in state
        if isinstance(loader, LeasedLoader) and is_leased:
            self._tell_who_made_it(position.workers_of(state, number))
            if "place" not in state or isinstance(loader.source, ServerSource):
                return state
            leases = dataclasses.replace(loader.source.leases, seed=seed % SEEDS)
            return position.for_workers(state["place"], number, leases, is_held=False)
        if isinstance(loader, ShardedLoader) and not is_leased:
            return state
        epoch = position.epoch_of(state, number) if is_leased else state_checks.whole(state["epoch"], "epoch")
        if self._control.is_leader:
            _log.warning("The checkpoint's data was in another order, that of its fabric: epoch %d begins anew.", epoch)
        if isinstance(loader, ShardedLoader):
            return {"epoch": epoch, "batch": 0}
        leases = dataclasses.replace(loader.source.leases, seed=seed % SEEDS)
        return position.beginning(leases, epoch, self._control.members)

    def _tell_who_made_it(self, then: Sequence[int]) -> None:
        """Tell, as the first worker, what carries over to other workers than made the checkpoint."""
        present = self._control.members
        if tuple(then) != tuple(present) and self._control.is_leader:
            _log.warning(
                "The checkpoint was made by rank %s, and this run has rank %s: the position in the data carries over, "
                "and what other workers had leased is leased again; %s.",
                ", ".join(map(str, then)),
                ", ".join(map(str, present)),
                what_changes("global_batch" if self._plan.tuning is not None else self._plan.keeps),
            )

    def _leases(self, loader: Iterable[Any]) -> TypeGuard[DataLoader[Any]]:
        if self._goes_alone or self._plan.has_quorum:
            return False  # nobody deals out to workers that are at different steps
        tuned = self._plan.tuning is not None and self._control.world > 1
        if not tuned and self.server is None and not self._is_elastic:
            return False
        can = can_lease(loader)
        if tuned and not can:
            raise ModelError(
                "Cannot tune the batches of this loader: offbeat has to choose their samples. Prepare a DataLoader "
                "over a dataset with a length, without a sampler of your own, or use tuning=None."
            )
        return can

    def _lease(self, loader: DataLoader[Any]) -> LeasedLoader:
        """A loader whose samples are dealt out one by one. Collective."""
        spec = RegisterLoader(
            loader=len(self.loaders),
            plan=self._plan.to_toml(),
            world=self._began_with,
            samples=dataset_size(loader),
            seed=self._seed % SEEDS,
            shuffle=isinstance(sampler_of(loader), RandomSampler),
            drop_last=drops_last(loader),
            batch=batch_of(loader),
            least=least_of(loader, self._models.modules),
            ahead=ahead_of(loader),
        )
        described = f"{spec.samples} samples\nshuffle {spec.shuffle}\nseed {spec.seed}\nbatches of {spec.batch}"
        described += f"\nof {spec.least} at least\ndrop_last {spec.drop_last}\n{spec.ahead} batches ahead"
        advice = "Give every worker the same seed, dataset, batch size and num_workers."
        self._control.check_equal("data", described, advice)
        server = self.server
        source: BatchSource = (
            self._replicated_source(spec) if server is None else ServerSource(server, self._waiter, spec)
        )
        self._specs[spec.loader] = spec
        return LeasedLoader(
            loader,
            source=source,
            on_batch=self._on_batch,
            put_back=self._put_back,
            world=self._began_with,
            on_loop=self.observer.on_loop,
            before_draw=self._before_draw,
        )

    def _replicated_source(self, spec: RegisterLoader) -> ReplicatedSource:
        return ReplicatedSource(
            Leases(
                spec.samples,
                seed=spec.seed,
                shuffle=spec.shuffle,
                drop_last=spec.drop_last,
            ),
            self._plan.tuning,
            BatchSizes(spec.batch, spec.least, self._keeps),
            control=self._control,
            take_timings=lambda: [Timing(*one) for one in self._metrics.take_recent()],
            kept=spec.ahead + _MOST_UNTOLD if self._is_elastic else 0,
        )

    # -- from one fabric to the other ----------------------------------------------------------------------------

    @property
    def stays(self) -> str:
        """The reason why the workers cannot do without a server; "" if they can."""
        for number, loader in enumerate(self.loaders):
            if isinstance(loader, ShardedLoader) and not loader.can_go_together:
                return (
                    f"Cannot leave the server: every worker goes through loader {number} by itself, and without a "
                    "server all have to make the same steps. Prepare a DataLoader over a dataset with a length."
                )
        return ""

    def bring_to(self, server: ServerSession) -> dict[int, ServerSource]:
        """Have a server know where the leased data is, if there is any; from where batches come there. Collective.

        Raises:
            NetworkError: if the server is gone.
        """
        sources: dict[int, ServerSource] = {}
        places: dict[int, tuple[RegisterLoader, Leases, Mapping[str, Any]]] = {}
        for number, loader in enumerate(self.loaders):
            if isinstance(loader, ShardedLoader):
                continue
            spec = msgspec.structs.replace(self._specs[number], seed=loader.source.leases.seed)
            places[number] = (spec, loader.source.leases, loader.source.state_dict())
            sources[number] = ServerSource(server, self._waiter, spec, loader.progress)
        if not places:
            return sources
        server.sum(DEALING, (), self._waiter)
        if server.brings_state:
            reply = server.client.set_data_state(position.for_coordinator(places))
            self._waiter.wait(reply, WaitContext("the server to resume the data", through_server=True))
        return sources

    def to_server(self, server: ServerSession, sources: Mapping[int, ServerSource]) -> None:
        """Have a server deal out from now on, at the beginning of a loop over leased data, as `bring_to` has it."""
        self.server = server
        for number, loader in enumerate(self.loaders):
            if isinstance(loader, ShardedLoader):
                loader.go_alone()
            else:
                loader.change_source(sources[number])

    def give_back(self) -> None:
        """Return all leases that were not drawn: the server is about to be left."""
        for loader in self.leased:
            if isinstance(loader.source, ServerSource):
                loader.source.give_back_undrawn()

    def to_group(self, server: ServerSession) -> None:
        """Have the workers work out by themselves who computes what; all have given back what they had. Collective.

        Raises:
            NetworkError: if the server is gone.
        """
        self.server = None
        lease_state = self._fetch_lease_state(server) if self.leased else ""
        for number, loader in enumerate(self.loaders):
            if isinstance(loader, ShardedLoader):
                loader.go_together()
                continue
            assert isinstance(loader.source, ServerSource)
            leases, reached = loader.source.leases, loader.progress
            begins = self._control.texts("the epoch that the next loop is in", str(loader.source.epoch))
            source = self._replicated_source(self._specs[number])
            kept = position.for_workers(lease_state, number, leases, epoch=min(map(int, begins.values())))
            source.load_state_dict(kept, seed=leases.seed)
            source.progress = max(source.progress, reached)
            loader.change_source(source)

    def _fetch_lease_state(self, server: ServerSession) -> str:
        """The place in the data, as one of the workers has asked; another, if that is lost meanwhile. Collective."""
        lease_state = ""
        while not lease_state:
            said = ""
            if self._control.is_leader:
                asked = server.client.data_state()
                self._waiter.wait(asked, WaitContext("the place in the data", through_server=True))
                said = asked.value.decode()
            reply = self._control.texts("the place in the data", said)
            lease_state = next(filter(None, reply.values()), "")
        return lease_state

    @property
    def _keeps(self) -> Keeps:
        return "global_batch" if self._plan.tuning is not None else self._plan.keeps

    def _before_draw(self, loader: LeasedLoader) -> None:
        # A loop within another's, and one over a second loader beside it, are where those that train are, too.
        if self._outermost is None or not self._outermost.is_open:
            self._outermost = loader
        if loader is self._outermost:
            self.observer.before_draw()

    def _on_batch(self, *, real: bool, source: int, samples: int, weight: float) -> DrawnBatch:
        self.has_data = real
        self._metrics.samples += samples
        self._draws += 1
        if self._draws == 1:
            self._check.drawn()
        for synchronizer in self._models.synchronizers:
            synchronizer.accounting.draw(real=real, source=source, weight=weight, samples=samples)
        return DrawnBatch(self._draws, BatchCounts(1, 1, weight, samples) if real else BatchCounts(1))

    def _put_back(self, draws: Sequence[DrawnBatch]) -> int:
        """Have those of these batches that no model has computed count no more; how many, the last ones."""
        uncomputed = min((synchronizer.accounting.uncomputed for synchronizer in self._models.synchronizers), default=0)
        back = [draw for draw in draws if draw.number > self._draws - uncomputed]
        for draw in back:
            self._metrics.samples = max(0, self._metrics.samples - draw.drawn.samples)
            for synchronizer in self._models.synchronizers:
                synchronizer.accounting.put_back(draw.drawn)
        return len(back)
