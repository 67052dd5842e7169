"""The job of one row: the command of its worker programs, the plan, and how exact the sum must be."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import tomli_w

from offbeat import toml_reader
from offbeat.errors import PlanError, ScenarioError
from offbeat.lab import command_lines
from offbeat.lab.demand import Demand
from offbeat.lab.recorder import SNAPSHOT, WORK, Work
from offbeat.scenario import Replay, Row, Scenario, TrainingScript

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.attack_spec import AttackSpec
    from offbeat.fault_spec import Fault, Part
    from offbeat.lab.worker_placement import WorkerPlacement
    from offbeat.plan import Plan
    from offbeat.sync import Policy

_ROUNDING = 1e-5
"""Largest error of a mean of standard-normal float32 numbers."""
_ROUNDING_16_BIT = 0.1
"""The same with 8 bits of precision, summed in that type by up to a few dozen workers."""
SILENCING = frozenset({"sigstop", "gil", "partition", "deaf", "mute", "lossy"})
"""Kinds of faults after which nobody may hear of a worker for a while."""
SAVE_EVERY = 10
"""Steps between two snapshots, where a row does not say."""
_PEERS: dict[str, tuple[str, float | None, Demand]] = {
    "ddp": ("DistributedDataParallel", _ROUNDING, Demand()),
    "ddp+restarts": (
        "DistributedDataParallel under torchrun, which starts all again from a snapshot", _ROUNDING, Demand(),
    ),
    "ddp+bf16": ("DistributedDataParallel with bf16_compress_hook", _ROUNDING_16_BIT, Demand(part=0.5)),
    "ddp+powersgd": ("DistributedDataParallel with powerSGD_hook, rank 1", None, Demand(part=0.0)),
    "torchft": ("torchft's DistributedDataParallel on Gloo, each worker a replica group", _ROUNDING, Demand()),
}  # fmt: skip


@dataclass(frozen=True)
class RowJob:
    """One row, ready to run. `plan` is for people, `toml` for offbeat; `folder` is the scenario's."""

    row: Row
    scenario: Scenario
    folder: Path
    plan: str
    toml: str
    tolerance: float | None
    served: bool = False  # whether its plan has a parameter server
    switched: bool = False  # whether a switch sums its gradients
    validated: bool = False  # whether its contributions are judged beside a validator's
    elastic: bool = False  # whether it is all-reduce that goes on without the workers it loses
    demand: Demand = field(default_factory=Demand)  # what a step demands of machines and links
    sends_each_gradient: bool = True  # of every step, of the batches that the baseline has, without a server
    is_settled: bool = True  # whether replicas are equal after every step, and not only when somebody settles them

    @property
    def command(self) -> list[str]:
        """The worker program and its arguments."""
        workload = self.scenario.workload
        if isinstance(workload, Replay):
            return self._faulty("-m", "offbeat.lab.replay") or command_lines.module("offbeat.lab.replay")
        script = find(workload.path, self.folder)
        if script is None:
            raise ScenarioError(
                f"Cannot run the script {workload.path!r}: it is neither in {self.folder} nor in {Path.cwd()}. "
                "Give its path from one of the two (workload.path)."
            )
        return self._faulty(str(script), *workload.args) or command_lines.script(script, *workload.args)

    @property
    def parts(self) -> set[Part]:
        """The parts of this row, of all that a fault may take."""
        if self.served:
            return {"a server", "room for new workers", "others that continue"}
        if self.switched:
            return {"a switch", "others that continue"}
        if self.elastic:
            return {"room for new workers", "others that continue"}
        return {"others that continue"} if self.restarts else set()

    @property
    def restarts(self) -> bool:
        """Whether its workers are started again, all of them, when one ends."""
        return self.row.system == "ddp+restarts"

    @property
    def faults(self) -> list[Fault]:
        """The faults that strike this row: it has what they take."""
        return [fault for fault in self.scenario.fault if self.lacks(fault) is None]

    def lacks(self, fault: Fault) -> str | None:
        """The part that this fault takes and this row has not, so that it is left out; None if it strikes."""
        if fault.takes is not None and fault.takes not in self.parts:
            return fault.takes
        if not self.restarts:
            return None
        # Whoever is started again counts its steps anew, so a second fault would strike at another step than elsewhere.
        kills = [one for one in self.scenario.fault if one.kind == "sigkill" and one.target == "worker"]
        return None if fault in kills[:1] else "workers that are not started again"

    @property
    def attacks(self) -> list[AttackSpec]:
        """The attacks of this row: its own, and those of all rows."""
        return [*self.scenario.attack, *self.row.attack]

    @property
    def given_up(self) -> set[int]:
        """Ranks that the others go on without, because they announce and do not send."""
        return {worker for attack in self.attacks if attack.kind == "drop" for worker in attack.workers}

    @property
    def may_lose(self) -> set[int]:
        """Ranks that a fault takes away for so long that the others may go on without them."""
        if "others that continue" not in self.parts or self.restarts:
            return set()
        mine = [one for one in self.faults if one.target == "worker"]
        return self.given_up | {one.worker for one in mine if one.ends or (one.kind in SILENCING and one.changes_sum)}

    def _faulty(self, *program: str) -> list[str]:
        """The command that runs a program with its faults and attacks; nothing if it has none."""
        # By its name: the lab stands below `offbeat.testing`, which is a program like any other here.
        is_plain = not self.faults and not self.attacks
        return [] if is_plain else command_lines.module("offbeat.testing.run_with_faults", *program)

    def environment(self, run_dir: Path) -> dict[str, str]:
        """Variables for all workers; offbeat writes its metrics to `run_dir`."""
        own: dict[str, str] = {"OFFBEAT_LAB_SYSTEM": self.row.system}
        if self.row.system == "offbeat":
            own |= {"OFFBEAT_PLAN": self.toml, "OFFBEAT_RUN_DIR": str(run_dir)}
            if (network := self.scenario.network_file) is not None:
                path = run_dir.with_name("topology.toml")
                path.write_text(network.to_toml())
                own["OFFBEAT_TOPOLOGY"] = str(path)
        if self.restarts:
            own |= {SNAPSHOT: str(run_dir.with_name("snapshot.pt"))}
        return own

    def each(self, places: Sequence[WorkerPlacement]) -> list[dict[str, str]]:
        """Variables for each worker: its work."""
        return [{WORK: msgspec.json.encode(self._work(rank, place)).decode()} for rank, place in enumerate(places)]

    def of_validator(self, place: WorkerPlacement) -> dict[str, str]:
        """Variables for a validator: the work of a worker that never straggles, as the others wait for it."""
        work = msgspec.structs.replace(self._work(len(self.scenario.workers.hosts), place), straggle=None)
        return {WORK: msgspec.json.encode(work).decode()}

    def _work(self, rank: int, place: WorkerPlacement) -> Work:
        workload = self.scenario.workload
        is_spoilt = bool(self.attacks) or any(fault.changes_sum for fault in self.faults)
        data = None
        if isinstance(workload, TrainingScript) and workload.data is not None:
            # A script falls back to other data where the folder is missing, and notes it.
            data = str(find(workload.data, self.folder) or workload.data)
        return Work(
            system=self.row.system,
            steps=self.scenario.run.steps,
            warmup_steps=self.scenario.run.warmup_steps,
            compute_factor=place.compute_factor,
            bucket_bytes=self.row.bucket_bytes or workload.bucket_bytes,
            data=data,
            tolerance=None if is_spoilt else self.tolerance,
            replay=workload if isinstance(workload, Replay) else None,
            straggle=self.scenario.straggle,
            save_every=(self.row.save_every or SAVE_EVERY) if self.restarts else None,
            swaps=tuple(self.row.swap) if rank == 0 else (),
        )


def jobs(scenario: Scenario, folder: Path) -> list[RowJob]:
    """The rows of a scenario, ready to run; `folder` is where its file lies.

    Raises:
        ScenarioError: if a plan cannot be read or cannot work, or a script is missing.
    """
    made = [_job(index, row, scenario, folder) for index, row in enumerate(scenario.row)]
    for job in made:
        _ = job.command
    return made


def find(name: str, folder: Path) -> Path | None:
    """The file or folder of that name, from the scenario's folder or else from ours."""
    for candidate in (folder / name, Path(name)):
        with suppress(OSError):  # no file has such a name, as of 300 characters
            if candidate.exists():
                return candidate.resolve()
    return None


def _job(index: int, row: Row, scenario: Scenario, folder: Path) -> RowJob:
    if row.system != "offbeat":
        plan, tolerance, demand = _PEERS[row.system]
        if row.system == "ddp+restarts":
            plan += f" of every {row.save_every or SAVE_EVERY} steps"
        elastic = row.system == "torchft"
        return RowJob(row, scenario, folder, plan, "", tolerance, elastic=elastic, demand=demand)
    # Imported here: plans stand on torch, which takes seconds to load.
    from offbeat.codec import Rescales
    from offbeat.plan import Plan

    try:
        made = Plan.from_toml(_plan_toml(index, row, scenario, folder))
    except PlanError as error:
        raise ScenarioError(f"Cannot use the plan of row {row.name!r} (row[{index}].plan): {error}") from error
    served = made.is_served
    if served and not scenario.servers and not scenario.loopback:
        raise ScenarioError(
            f"Cannot use the plan of row {row.name!r}: there is no host for its parameter server. Add one with "
            f'servers = 1 (hosts.servers), or role = "server" (host.role).'
        )
    if made.fabric.offers.holds == "switch" and not scenario.topology.is_star:
        raise ScenarioError(
            f"Cannot use the plan of row {row.name!r}: a switch sums where all hosts hang on it, and here they do not. "
            f"Use another fabric, or leave [topology] out (row[{index}].plan)."
        )
    _check_attacks(index, row, scenario, made)
    if made.validator is not None and row.swap:
        raise ScenarioError(
            f"Cannot have worker 0 swap the policy of row {row.name!r}: its plan has a validator, whose word alone "
            f"that is. Leave out one of the two (row[{index}].swap)."
        )
    promises = made.codec.promises
    exact = promises.linear and promises.contraction == 1.0 and not isinstance(made.codec, Rescales)
    rounding = _ROUNDING if promises.variance is not None else _ROUNDING_16_BIT
    is_mean = made.judging_rule is None and made.privacy is None
    tolerance = rounding if exact and is_mean and _adds_up(made.sync) else None
    each = all(made.contributes(step) == "gradient" for step in range(scenario.measured_steps.stop))
    return RowJob(
        row,
        scenario,
        folder,
        repr(made),
        made.to_toml(),
        tolerance,
        served,
        validated=made.validator is not None,
        switched=made.fabric.offers.holds == "switch",
        elastic=made.has_elastic_group,
        demand=Demand.of(made, scenario.measured_steps, len(scenario.workers.hosts)),
        sends_each_gradient=each and not served and made.tuning is None,
        is_settled=each and not served and made.controller is None,
    )


def _check_attacks(index: int, row: Row, scenario: Scenario, plan: Plan) -> None:
    """Refuse attacks that a plan has no place for.

    Raises:
        ScenarioError: if blocks are to be forged, or not sent, without a server; or leave before they can be.
    """
    paths = [("attack", scenario.attack), (f"row[{index}].attack", row.attack)]
    for path, attack in [(f"{name}[{i}]", one) for name, attacks in paths for i, one in enumerate(attacks)]:
        if not plan.is_served and (attack.kind == "drop" or attack.when == "after"):
            how = "announce and not send" if attack.kind == "drop" else "lie after encoding"
            key = "kind" if attack.kind == "drop" else "when"
            raise ScenarioError(
                f"Cannot have workers {how} in row {row.name!r}: without a server all add up together, and there is no "
                f"push. Use a plan with a ParameterServer, or another attack ({path}.{key})."
            )
        if plan.is_served and plan.scheduling is not None and attack.when != "after" and attack.kind != "label-flip":
            raise ScenarioError(
                f"Cannot have {attack.kind!r} forge gradients in row {row.name!r}: with {plan.scheduling!r} they leave "
                f"for the server block by block, before a liar has all. Leave the plan's scheduling out ({path})."
            )


def _adds_up(policy: Policy) -> bool:
    """Whether parameters move by the plain sum of what all workers computed; nothing else can be checked."""
    from offbeat.sync import Hybrid, KSync, StepsLocally

    if isinstance(policy, Hybrid):
        return _adds_up(policy.inner) and _adds_up(policy.outer)
    return not isinstance(policy, KSync) and not (isinstance(policy, StepsLocally) and policy.outer is not None)


def _plan_toml(index: int, row: Row, scenario: Scenario, folder: Path) -> str:
    if isinstance(row.plan, str):
        path = find(row.plan, folder)
        if path is None:
            raise ScenarioError(
                f"Cannot use the plan of row {row.name!r}: there is no file {row.plan!r} in {folder} or {Path.cwd()}. "
                f"Give its path from one of the two, or write the plan as a table (row[{index}].plan)."
            )
        way_out = f"Name a TOML file, or write the plan as a table (row[{index}].plan)."
        return toml_reader.read_text(path, f"plan of row {row.name!r},", way_out, ScenarioError)
    size = row.bucket_bytes or scenario.workload.bucket_bytes
    return tomli_w.dumps(({} if size is None else {"bucket_bytes": size}) | (row.plan or {}))
