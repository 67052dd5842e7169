"""Faults and attacks of a run: what its workers are told of them, and links and switch, which are the lab's to strike.

A worker strikes itself, and the server's processes, when its step comes (`offbeat.testing.faults`). What is to happen
to a link of the network, or to the switch, it asks for, in a file that is looked at here while the run lasts. Of
attacks those alone hear that lie (`offbeat.testing.attacker`).
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from offbeat.attack_spec import ATTACKS, ATTACKS_LOG, read_forged, untold
from offbeat.errors import ScenarioError
from offbeat.fault_spec import ASKED, FAULTS, JOINED, LOG, Fault, Fired, read_fired, unfired
from offbeat.lab import recorder
from offbeat.lab.emulated_link import law_of
from offbeat.lab.emulator import Law
from offbeat.lab.recorder import MeasuredStep

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from offbeat.lab.jobs import RowJob
    from offbeat.lab.launch import SwitchProcess
    from offbeat.lab.network import Network
    from offbeat.topology import Arc

_LOOK_S = 0.01
_LOSS = 0.05


class _Joiner(msgspec.Struct):
    """The parts of a metrics record that say whether a worker exchanges anything with others."""

    kind: str
    rank: int = 0
    time_s: float = 0.0
    bytes_sent: int = 0


class FaultRun:
    """The faults of one run; use it as a context manager around the workers.

    Args:
        job: the row they strike.
        folder: for what is written down.
        network: whose links they strike; None on loopback, where workers do that to their own.

    Attributes:
        switch: that they strike; None if there is none.
    """

    def __init__(self, job: RowJob, folder: Path, network: Network | None) -> None:
        self.faults = job.faults
        self._log, self._asked, self._lies = (folder / f"faults.{name}" for name in ("log", "asked", "lies"))
        self._job, self._scenario, self._network = job, job.scenario, network
        self.switch: SwitchProcess | None = None
        self._over = threading.Event()
        self._watcher: threading.Thread | None = None
        self._mending: list[tuple[float, Callable[[], object]]] = []  # when, and what ends a fault
        self._rates_mbps = {arc: arc.rate_mbps for arc in self._scenario.topology.arcs}  # what holds, but for a while

    @property
    def environment(self) -> dict[str, str]:
        """Variables for all workers."""
        if not self.faults:
            return {}
        is_asked = self._network is not None or self._job.switched
        asked = {ASKED: str(self._asked)} if is_asked else {}
        return {FAULTS: msgspec.json.encode(self.faults).decode(), LOG: str(self._log), **asked}

    def environment_of(self, rank: int) -> dict[str, str]:
        """Variables for one worker: its attacks, if it is to lie."""
        attacks = self._job.attacks
        if not any(rank in attack.workers for attack in attacks):
            return {}
        return {ATTACKS: msgspec.json.encode(attacks).decode(), ATTACKS_LOG: str(self._lies)}

    @property
    def struck(self) -> set[int]:
        """Ranks that are not to come to the end."""
        ended = {fault.worker for fault in self.faults if fault.ends and not self._job.restarts}
        return ended | self._job.given_up

    @property
    def fired(self) -> list[Fired]:
        """List the faults that have struck so far, in order of time."""
        return read_fired(self._log)

    def events(self, begin_s: float) -> list[str]:
        """Say what struck, and when.

        Args:
            begin_s: of the measured steps, by `time.perf_counter`.

        Raises:
            ScenarioError: if a fault never fired, or a liar told no lie.
        """
        lies = self._told()
        if missing := unfired(self.faults, self._log):
            raise ScenarioError(
                f"Cannot tell what {'; '.join(fault.words for fault in missing)} does: it never fired. That worker "
                "does not come to that step, or what is to be struck is not there (fault.step)."
            )
        offset_s = time.time() - time.perf_counter() + begin_s
        joined = [self._joined(offset_s)] if any(fault.kind == "join" for fault in self.faults) else []
        lacking = [(fault, self._job.lacks(fault)) for fault in self._scenario.fault]
        return [
            *(f"left out: {fault.words}, which takes {what}" for fault, what in lacking if what is not None),
            *(
                f"fault: {one.fault.words}, {one.time_s - offset_s:.2f} s after the first measured step began"
                for one in self.fired
            ),
            *joined,
            *lies,
        ]

    def _told(self) -> list[str]:
        """Say how often each liar has lied."""
        attacks, forged = self._job.attacks, read_forged(self._lies)
        if missing := untold(attacks, self._lies):
            who = "; ".join(f"{spec.words}: worker {worker}" for spec, worker in missing)
            raise ScenarioError(
                f"Cannot tell what lies do: {who} told none. Have them begin earlier, lie more often, or train for "
                "longer (attack.from_step)."
            )
        counts = Counter((one.number, one.worker) for one in forged)
        return [f"attack: {attacks[i].words}: {n} lies of worker {w}" for (i, w), n in sorted(counts.items())]

    def _joined(self, offset_s: float) -> str:
        """Say what became of workers that were to join: to have been started is not to have taken part."""
        said = self._log.with_suffix(".joiner").read_text(errors="replace").strip().splitlines()
        if self._job.row.system == "offbeat":
            steps = self._steps_of_joiner()
        elif any(line.startswith(JOINED) for line in said):
            ahead_s, rank = time.time() - time.perf_counter(), len(self._scenario.workers.hosts)
            lines = recorder.read(self._log.with_suffix(".joined.jsonl"))
            steps = [_Joiner("step", rank, one.end_s + ahead_s) for one in lines if isinstance(one, MeasuredStep)]
        else:
            steps = []
        if not steps:
            raise ScenarioError(
                "Cannot tell what join does: the worker that was to join took no part in training. It said "
                f"{said[-1].strip() if said else 'nothing'!r}. Have it join earlier, or train for longer (fault.step)."
            )
        return (
            f"joined: rank {steps[0].rank}, {steps[0].time_s - offset_s:.2f} s after the first measured step began; "
            f"it made {len(steps)} steps"
        )

    def _steps_of_joiner(self) -> list[_Joiner]:
        """The steps in which offbeat's sent something."""
        with suppress(OSError):
            lines = (self._log.parent / "faults.joined/metrics.jsonl").read_bytes().splitlines()
            told = [msgspec.json.decode(line, type=_Joiner) for line in lines]
            return [record for record in told if record.kind == "step" and record.bytes_sent]
        return []

    def __enter__(self) -> FaultRun:
        if any(fault.is_asked_for for fault in self.faults) and (self._network is not None or self.switch is not None):
            self._watcher = threading.Thread(target=self._watch, name="offbeat-strikes")
            self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._watcher is not None:
            self._watcher.join()

    def _watch(self) -> None:
        done, network = 0, self._network
        while not self._over.wait(_LOOK_S):
            asked = read_fired(self._asked)
            for one in asked[done:]:
                if one.fault.target == "switch":
                    assert self.switch is not None, "else it is left out"
                    self._note(one)
                    self.switch.restart()
                elif network is not None and one.fault.stays:
                    self._shape(network, one)
                elif network is not None:
                    self._strike(network, one)
            done = len(asked)
            self._mend(time.monotonic())
        self._mend(float("inf"))  # the next run finds all links as they were
        if network is not None:
            for arc in [arc for arc, rate_mbps in self._rates_mbps.items() if rate_mbps != arc.rate_mbps]:
                network.shape_arc(arc, arc.rate_mbps)

    def _note(self, asked: Fired) -> None:
        with self._log.open("ab") as log:
            log.write(msgspec.json.encode(msgspec.structs.replace(asked, time_s=time.time())) + b"\n")

    def _shape(self, network: Network, asked: Fired) -> None:
        self._note(asked)
        for arc in self._struck(asked.fault):
            self._rates_mbps[arc] = asked.fault.to_mbps
            network.shape_arc(arc, asked.fault.to_mbps)

    def _strike(self, network: Network, asked: Fired) -> None:
        fault, until_s = asked.fault, time.monotonic() + asked.fault.seconds
        if network.topology.is_star:
            (host,) = self._scenario.linked(fault)
            up, down = self._laws(fault, host)
            network.worsen(host, up=up, down=down)
            usual = self._usual(host)
            self._mending.append((until_s, functools.partial(network.worsen, host, up=usual, down=usual)))
        else:
            for arc in self._struck(fault):
                rate_mbps, is_cut = self._rates_mbps[arc] or 0.0, fault.kind != "slow-link"
                network.shape_arc(arc, rate_mbps if is_cut else rate_mbps / fault.factor, is_cut=is_cut)
                self._mending.append((until_s, functools.partial(self._restore, network, arc)))
        self._note(asked)

    def _struck(self, fault: Fault) -> list[Arc]:
        """The directions of links that a fault strikes: of the links that it names, or of hosts, for these all but what
        they hear, or say, if it lets that pass."""
        topology, hosts = self._scenario.topology, set(self._scenario.linked(fault))
        links = {topology.between(link.a, link.b) for link in self._scenario.struck_links(fault)}
        passing = {"mute": "target", "deaf": "source"}.get(fault.kind)
        return [
            arc
            for arc in topology.arcs
            if arc.link in links and (passing is None or getattr(arc, passing) not in hosts)
        ]

    def _restore(self, network: Network, arc: Arc) -> None:
        network.shape_arc(arc, self._rates_mbps[arc])

    def _laws(self, fault: Fault, host: str) -> tuple[Law | None, Law | None]:
        """The laws for what the host sends, and for what it receives; None where nothing changes."""
        usual = self._usual(host)
        if fault.kind == "slow-link":
            rate_mbps = self._scenario.topology.uplink(host).rate_mbps or 0.0
            slow = dataclasses.replace(usual, rate_bytes_per_s=rate_mbps * 1e6 / 8 / fault.factor)
            return slow, slow
        if fault.kind == "lossy":
            lossy = dataclasses.replace(usual, loss=max(usual.loss, _LOSS))
            return lossy, lossy
        blocked = dataclasses.replace(usual, blocked=True)
        return (None if fault.kind == "deaf" else blocked), (None if fault.kind == "mute" else blocked)

    def _usual(self, host: str) -> Law:
        impair = self._scenario.impair
        return law_of(impair) if impair is not None and host in self._scenario.impaired else Law()

    def _mend(self, now_s: float) -> None:
        for item in [item for item in self._mending if item[0] <= now_s]:
            self._mending.remove(item)
            item[1]()
