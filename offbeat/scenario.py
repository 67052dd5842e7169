"""A scenario: which hosts hang on which links, which work they do, and which systems are compared.

    [scenario]                          name and description
    [hosts] or [[host]]                 equal hosts by count, or one table each
    [topology], [[link]], [[switch]]    another network than one switch, and links that are different
    [workload] kind = "replay"|"script" what every worker does, whatever system carries its gradients
    [run]                               steps, repeats, and the row that others are compared with
    [[fault]]                           what goes wrong, at which worker and step
    [[attack]]                          which workers lie, and how
    [[row]]                             one system: "offbeat" with a plan, or a peer

>>> scenario = Scenario.from_toml('''
... [scenario]
... name = "two"
... [hosts]
... count = 2
... rate_mbps = 100
... [workload]
... kind = "replay"
... profile = "resnet50"
... scale = 0.01
... [[row]]
... name = "ddp"
... system = "ddp"
... ''')
>>> scenario.topology.hosts[1].name
'h1'

Reading a scenario opens no file and builds nothing: paths in it are resolved by the lab, plans are checked by `Plan`.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
from typing import Annotated, Any, Literal, get_args

import msgspec

from offbeat import toml_reader
from offbeat.attack_spec import AttackSpec
from offbeat.errors import ScenarioError, brief
from offbeat.fault_spec import Fault
from offbeat.model_profiles import TimedLayer, scaled, timed
from offbeat.straggler_model import StragglerLaw
from offbeat.topology import MAX_HOSTS, Host, Link, Topology, check_compute_factor, check_names, check_rate
from offbeat.topology_spec import LinkSpec, NetworkFile, SwitchSpec, TopologySpec, check_links, overridden

System = Literal["offbeat", "ddp", "ddp+restarts", "ddp+bf16", "ddp+powersgd", "torchft"]
Profile = Literal["resnet50", "vgg16", "transformer-small"]
MAX_IMPAIRED_MBPS = 100.0
Positive = Annotated[int, msgspec.Meta(ge=1)]
Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]
_LATER: list[tuple[str, Any]] = [
    ("straggle", None),
    ("impair", None),
    ("fault", []),
    ("attack", []),
    ("servers", 0),
    ("role", "worker"),
    ("memory_mb", None),
    ("jitter", 0.0),
    ("fixed", 0.0),
    ("better", "higher"),
    ("save_every", None),
    ("mtu", 1500),
    ("switch", "udp"),
    ("swap", []),
    ("to_mbps", None),
    ("topology", None),
    ("link", []),
    ("switch", []),
]


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file: what it does not name is refused."""


class ScenarioTable(_Table, frozen=True, kw_only=True):
    """`[scenario]`: `name` is a file name without its ending."""

    name: Annotated[
        str,
        msgspec.Meta(
            pattern="^[a-z0-9][a-z0-9_-]{0,63}$",
            description="of 1 to 64 of a-z, 0-9, '-' and '_', starting with a letter or digit",
        ),
    ]
    description: str = ""


class Impair(_Table, frozen=True, kw_only=True):
    """`[impair]`: what is wrong with some links, in each direction: each frame by its own chance.

    `hosts` names whose; the workers' if it is empty. A frame waits `delay_ms` and up to `jitter_ms` longer; the parts
    `loss`, `corrupt` and `reorder` of them get lost, have one bit flipped, or wait twice so that others overtake them.
    """

    hosts: list[str] = []
    delay_ms: Annotated[float, msgspec.Meta(ge=0, le=10_000)] = 0.0
    jitter_ms: Annotated[float, msgspec.Meta(ge=0, le=10_000)] = 0.0
    loss: Annotated[float, msgspec.Meta(ge=0, le=0.5)] = 0.0
    corrupt: Annotated[float, msgspec.Meta(ge=0, le=0.5)] = 0.0
    reorder: Annotated[float, msgspec.Meta(ge=0, le=0.5)] = 0.0


class HostTable(_Table, frozen=True, kw_only=True):
    """One `[[host]]`; `rate_mbps` is its link to the switch, each direction, in 10^6 bit/s.

    Its processes may use `memory_mb` together, in 10^6 bytes.
    A host with `role = "server"` runs a shard of the parameter server, for rows whose plan has one. Where `[topology]`
    says which hosts there are, tables are for those that are different, and rates are those of links.
    """

    name: str
    rate_mbps: float | None = None
    compute_factor: float = 1.0
    memory_mb: Annotated[int, msgspec.Meta(ge=16)] | None = None
    role: Literal["worker", "server"] = "worker"


class Hosts(_Table, frozen=True, kw_only=True):
    """`[hosts]`: equal hosts, and beside them `servers` for the shards of a parameter server, with links alike.

    On `network = "loopback"` they are plain processes without links; no root needed. Frames carry `mtu` bytes, IP
    headers included. `switch` is what sums for rows on `Switch(...)`: a process ("udp") or the kernel ("ebpf").
    """

    count: int
    servers: Annotated[int, msgspec.Meta(ge=0, le=16)] = 0
    rate_mbps: float | None = None
    compute_factor: float = 1.0
    network: Literal["switch", "loopback"] = "switch"
    mtu: Annotated[int, msgspec.Meta(ge=1280, le=9000)] = 1500
    switch: Literal["udp", "ebpf"] = "udp"


class LayerTable(_Table, frozen=True, kw_only=True):
    """One `[[workload.layer]]`, in order of the forward pass: the shapes of its parameters and its times."""

    name: Annotated[
        str,
        msgspec.Meta(
            pattern="^[A-Za-z_][A-Za-z0-9_]*$", description="of letters, digits and '_', not starting with a digit"
        ),
    ]
    shapes: list[list[Size]]
    backward_s: Seconds
    forward_s: Seconds = 0.0


class Replay(_Table, frozen=True, kw_only=True, tag_field="kind", tag="replay"):
    """Real gradients of a profile's true sizes times `scale`, with the computation slept away.

    `forward_s` and `backward_s` are one step's computation on the reference host, divided among the layers by their
    work; for a table of layers each layer has its own times. `jitter` varies them from step to step, by a log-normal
    factor of mean 1 whose logarithm has that deviation; each worker and step has its own, the same for every row.
    `batch` is the samples a step stands for, per worker; where a plan tunes batches, a step of another size takes as
    much longer or shorter, but for `fixed`, the part of its time that every step takes. `bucket_bytes` is the bucket
    size of every row; None is each system's default.
    """

    profile: Profile | None = None
    layer: list[LayerTable] = []
    scale: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    forward_s: Seconds = 0.1
    backward_s: Seconds = 0.2
    jitter: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    batch: Positive = 32
    fixed: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    bucket_bytes: Size | None = None

    def layers(self) -> list[TimedLayer]:
        """List the layers, scaled and timed."""
        if self.profile is not None:
            return timed(self.profile, scale=self.scale, forward_s=self.forward_s, backward_s=self.backward_s)
        return [
            TimedLayer(
                one.name, scaled([tuple(shape) for shape in one.shapes], self.scale), one.forward_s, one.backward_s
            )
            for one in self.layer
        ]

    def work_of(self, count: int) -> float:
        """The time that a step of `count` samples computes, relative to one of `batch`."""
        return self.fixed + (1 - self.fixed) * count / self.batch


class TrainingScript(_Table, frozen=True, kw_only=True, tag_field="kind", tag="script"):
    """A training script, run by every worker. `path` and `data` are relative to the scenario's folder or to ours.

    With a `target` the time until `metric` first reaches it is measured: until it is at least that, or, where `better`
    is "lower", at most.
    """

    path: str
    args: list[str] = []
    data: str | None = None
    metric: str = "accuracy"
    target: float | None = None
    better: Literal["higher", "lower"] = "higher"
    bucket_bytes: Size | None = None

    def reached(self, value: float) -> bool:
        """Whether the metric has reached the target; never, if there is none."""
        if self.target is None:
            return False
        return value >= self.target if self.better == "higher" else value <= self.target


class RowSwap(_Table, frozen=True, kw_only=True):
    """`[[row.swap]]`: `offbeat swap` is run when worker 0 has made so many steps, those to warm up counted.

    `policy` is as on its command line, such as `SSP(8)`.
    """

    step: Positive
    policy: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class Row(_Table, frozen=True, kw_only=True):
    """One system to measure.

    `plan` (offbeat only) is a table, or the path of a TOML file; the default if left out. `bucket_bytes` is this row's
    bucket size instead of the workload's. `save_every` (ddp+restarts
    only) is the steps between two snapshots. `swap` (offbeat only) has another policy hold while it trains. `attack` is
    what workers lie about in this row, beside the attacks of all rows.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=40, description="of 1 to 40 characters")]
    system: System
    plan: dict[str, Any] | str | None = None
    bucket_bytes: Size | None = None
    save_every: Positive | None = None
    swap: list[RowSwap] = []
    attack: list[AttackSpec] = []


class Rounds(_Table, frozen=True, kw_only=True):
    """`[run]`: each row runs `repeats` times, interleaved with the others; the first `warmup_steps` are dropped."""

    repeats: Annotated[int, msgspec.Meta(ge=1, le=100)] = 3
    steps: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 20
    warmup_steps: Annotated[
        int,
        msgspec.Meta(ge=3, le=100_000, description="because DDP still moves its buckets in the first steps"),
    ] = 5
    baseline: str = "ddp"
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 120.0


class Scenario(_Table, frozen=True, kw_only=True):
    """A scenario, checked as far as it can be without opening a file."""

    scenario: ScenarioTable
    workload: Replay | TrainingScript
    row: list[Row]
    hosts: Hosts | None = None
    host: list[HostTable] = []
    topology_spec: TopologySpec | None = msgspec.field(default=None, name="topology")
    link: list[LinkSpec] = []
    switch: list[SwitchSpec] = []
    straggle: StragglerLaw | None = None
    impair: Impair | None = None
    fault: list[Fault] = []
    attack: list[AttackSpec] = []
    run: Rounds = msgspec.field(default_factory=Rounds)

    @classmethod
    def from_toml(cls, text: str) -> Scenario:
        """Read a scenario.

        Raises:
            ScenarioError: if the text is not TOML, a key or value is unknown, or what it describes cannot be built;
                the text ends with the path of the value.
        """
        table = toml_reader.decode(text, "scenario", ScenarioError)
        _check_keys(table, msgspec.inspect.type_info(cls), "")
        try:
            scenario = msgspec.convert(table, cls, strict=True)
        except msgspec.ValidationError as error:
            raise ScenarioError(_sentence(str(error), table)) from error
        scenario._check()
        return scenario

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of what the scenario says; comments and order of keys do not matter."""
        said = msgspec.json.decode(msgspec.json.encode(self, order="deterministic"))
        for row in said["row"]:  # came later, and a workload has always had a key of that name
            if row["bucket_bytes"] is None:
                del row["bucket_bytes"]
        return hashlib.sha256(msgspec.json.encode(_without_later(said))).hexdigest()

    @property
    def loopback(self) -> bool:
        """Whether the hosts are plain processes on the loopback interface, not namespaces."""
        return self.hosts is not None and self.hosts.network == "loopback"

    @property
    def mtu(self) -> int:
        """Bytes that a frame carries at most."""
        if self.topology_spec is not None:
            return self.topology_spec.mtu
        return 1500 if self.hosts is None else self.hosts.mtu

    @property
    def network_file(self) -> NetworkFile | None:
        """The network between the workers, where it is said which links there are; None for one switch."""
        spec = self.topology_spec
        if spec is None or self.hosts is not None or self._lists_hosts:
            return None
        return NetworkFile(topology=spec, link=self.link, switch=self.switch)

    @property
    def topology(self) -> Topology:
        """Hosts and links: one switch and one link per host, if nothing else is said."""
        spec = self.topology_spec
        if spec is not None and self.hosts is None and not self._lists_hosts:
            made = spec.build(self.link, self.switch)
            own = {host.name: Host(host.name, host.compute_factor, host.memory_mb) for host in self.host}
            return dataclasses.replace(made, hosts=tuple(own.get(host.name, host) for host in made.hosts))
        usual_mbps, latency_ms = (None, 0.0) if spec is None else (spec.rate_mbps, spec.latency_ms)
        if self.hosts is not None:
            names = [f"h{index}" for index in range(self.hosts.count)] + self.servers
            hosts = [Host(name, self.hosts.compute_factor) for name in names]
            rates_mbps = dict.fromkeys(names, self.hosts.rate_mbps or usual_mbps)
        else:
            hosts = [Host(host.name, host.compute_factor, host.memory_mb) for host in self.host]
            rates_mbps = {host.name: host.rate_mbps or usual_mbps for host in self.host}
        links = tuple(Link(name, "switch", rate, latency_ms=latency_ms) for name, rate in rates_mbps.items())
        return overridden(Topology(tuple(hosts), links), self.link)

    @property
    def _lists_hosts(self) -> bool:
        """Whether `[[host]]` says which hosts there are, and not only what is different about some of them."""
        return bool(self.host) and (
            self.topology_spec is None or (self.topology_spec.kind == "star" and not self.topology_spec.dims)
        )

    @property
    def impaired(self) -> list[str]:
        """Names of the hosts with whose links something is wrong; they hang on one switch."""
        if self.impair is None:
            return []
        return self.impair.hosts or [host.name for host in self.workers.hosts]

    @property
    def emulated(self) -> list[str]:
        """Names of the hosts whose links can become bad: those that are, and those of which a fault says so."""
        if not self.topology.is_star:
            return []  # each end of a link is shaped where it is: no frame passes a program
        struck = [name for fault in self.fault if fault.on_links for name in self.linked(fault)]
        return list(dict.fromkeys([*self.impaired, *struck]))

    def linked(self, fault: Fault) -> list[str]:
        """Names of the hosts whose links a fault strikes; of a link, those of its ends that are hosts."""
        if fault.link:
            return [host.name for host in self.topology.hosts if host.name in fault.link]
        if fault.target in ("worker", "workers"):
            hosts = self.workers.hosts
            return [host.name for host in (hosts if fault.target == "workers" else [hosts[fault.worker]])]
        return self.servers[:1] if fault.target == "coordinator" else self.servers[-1:]

    def struck_links(self, fault: Fault) -> list[Link]:
        """The links that a fault strikes: the one it names, or all those of whom it names."""
        topology = self.topology
        if fault.link:
            return [topology.links[topology.between(*fault.link)]]
        hosts = set(self.linked(fault))
        return [link for link in topology.links if hosts & {link.a, link.b}]

    def at(self, step: int) -> Scenario:
        """The scenario with the rates that links have in a step, from 0; itself if they are those of the beginning."""
        changes = sorted((fault for fault in self.fault if fault.stays and fault.step < step), key=lambda one: one.step)
        if not changes:
            return self
        changed = [
            LinkSpec(a=link.a, b=link.b, rate_mbps=fault.to_mbps)
            for fault in changes
            for link in self.struck_links(fault)
        ]
        return msgspec.structs.replace(self, link=[*self.link, *changed])

    @property
    def servers(self) -> list[str]:
        """Names of the hosts that are there for the shards of a parameter server."""
        if self.hosts is not None:
            return [f"s{index}" for index in range(self.hosts.servers)]
        return [host.name for host in self.host if host.role == "server"]

    @property
    def workers(self) -> Topology:
        """The topology without the servers."""
        servers = self.servers
        return self.topology.among([host.name for host in self.topology.hosts if host.name not in servers])

    @property
    def measured_steps(self) -> range:
        """Numbers of the steps that count; those before are to warm up."""
        return range(self.run.warmup_steps, self.run.warmup_steps + self.run.steps)

    def _check(self) -> None:
        self._check_network()
        if isinstance(self.workload, Replay) and (self.workload.profile is None) == (not self.workload.layer):
            raise ScenarioError(
                f"Cannot replay {'both a profile and a table of layers' if self.workload.layer else 'nothing'}: "
                f"give profile (one of {', '.join(get_args(Profile))}) or [[workload.layer]] (workload.profile)."
            )
        self._check_rows()
        self._check_impaired()
        self._check_faults()
        for index, row in enumerate(self.row):
            self._check_attacks(row, self.attack, "attack")
            self._check_attacks(row, row.attack, f"row[{index}].attack")
        if len(self.servers) == len(self.topology.hosts):
            raise ScenarioError("Cannot train on servers alone: no host is a worker. Add one (host).")
        _ = self.workers

    def _check_network(self) -> None:
        spec = self.topology_spec
        check_links(self.link)
        if spec is not None and (spec.kind != "star" or spec.dims):
            self._check_preset(spec)
        elif (self.hosts is None) == (not self.host):
            both = "both `hosts` and `host` are given" if self.hosts else "neither `hosts` nor `host` is given"
            raise ScenarioError(
                f"Cannot tell the hosts: {both}. Use one [hosts] table with a count, or one [[host]] per host (hosts)."
            )
        else:
            self._check_star(spec)
        if self.loopback and (spec is not None or self.link):
            raise ScenarioError(
                "Cannot have a topology on the loopback interface: it has no links. Leave out [topology] and [[link]], "
                'or use network = "switch" (hosts.network).'
            )
        for link in self.topology.links:
            if None in link.rates_mbps and not self.loopback:
                raise ScenarioError(
                    f"Cannot build the link between {link.a!r} and {link.b!r}: no rate is given. Give one to all, "
                    "or a [[link]] with one to this (topology.rate_mbps)."
                )

    def _check_star(self, spec: TopologySpec | None) -> None:
        if self.hosts is not None:
            _check_hosts(self.hosts, None if spec is None else spec.rate_mbps)
        check_names([host.name for host in self.host], taken=["switch"], path="host")
        for index, host in enumerate(self.host):
            check_compute_factor(host.compute_factor, f"host[{index}].compute_factor")
            if host.rate_mbps is not None:
                check_rate(host.rate_mbps, f"host[{index}].rate_mbps")
            elif spec is None or spec.rate_mbps is None:
                raise ScenarioError(
                    "Cannot do without rate_mbps: it is not given, and there is no default. Give a number "
                    f"(host[{index}].rate_mbps)."
                )
        if self.switch or (spec is not None and spec.ranks):
            key = "switch" if self.switch else "topology.ranks"
            raise ScenarioError(
                f"Cannot use {key} where hosts are listed: they hang on one switch, and have the ranks of their order. "
                f"Leave it out ({key})."
            )
        if spec is not None:
            spec.check()

    def _check_preset(self, spec: TopologySpec) -> None:
        if self.hosts is not None:
            raise ScenarioError(
                f"Cannot have both [hosts] and a topology of kind {spec.kind!r}: it says itself which hosts there are. "
                "Leave [hosts] out, or use [[host]] for those that are different (hosts)."
            )
        made = spec.build(self.link, self.switch)
        names = [host.name for host in made.hosts]
        for index, host in enumerate(self.host):
            if host.name not in names:
                raise ScenarioError(
                    f"Cannot find the host {brief(host.name)!r}: the topology has none of that name"
                    f"{_nearest(host.name, names)}. Name one of it (host[{index}].name)."
                )
            if host.rate_mbps is not None:
                raise ScenarioError(
                    f"Cannot give host {host.name!r} a rate: in a topology of kind {spec.kind!r} links have rates. Use "
                    f"[[link]], or [topology] for all of them (host[{index}].rate_mbps)."
                )
            check_compute_factor(host.compute_factor, f"host[{index}].compute_factor")
        check_names([host.name for host in self.host], taken=[], path="host")

    def _check_impaired(self) -> None:
        if self.impair is None:
            return
        if self.loopback:
            raise ScenarioError(
                'Cannot impair links: the loopback interface has none. Use network = "switch" (hosts.network).'
            )
        if not self.topology.is_star:
            raise ScenarioError(
                "Cannot impair links of this network: a program that forwards frames stands where hosts meet one "
                "switch, by links that carry as much back. Leave [impair] out (impair)."
            )
        names = [host.name for host in self.topology.hosts]
        for index, name in enumerate(self.impair.hosts):
            if name not in names:
                raise ScenarioError(
                    f"Cannot impair the link of {name!r}: no host has that name{_nearest(name, names)}. Name hosts of "
                    f"the scenario (impair.hosts[{index}])."
                )
        self._check_rates(self.impaired, "impair.hosts")

    def _check_rates(self, names: list[str], path: str) -> None:
        if names and self.mtu != 1500:
            raise ScenarioError(
                f"Cannot worsen links whose frames carry {self.mtu} bytes: the program that does it takes 1500. Leave "
                "hosts.mtu out (hosts.mtu)."
            )
        for name in names:
            rate_mbps = self.topology.uplink(name).rate_mbps
            if rate_mbps is None or rate_mbps > MAX_IMPAIRED_MBPS:
                raise ScenarioError(
                    f"Cannot impair the link of {name!r} at {rate_mbps:g} Mbit/s: each frame passes a program, which "
                    f"keeps up to {MAX_IMPAIRED_MBPS:g} Mbit/s. Choose a lower rate ({path})."
                )

    def _check_faults(self) -> None:
        steps = self.run.warmup_steps + self.run.steps
        for index, fault in enumerate(self.fault):
            fault.check(f"fault[{index}]")
            if fault.worker >= len(self.workers.hosts):
                raise ScenarioError(
                    f"Cannot strike at a step of worker {fault.worker}: there are {len(self.workers.hosts)}, from 0. "
                    f"Choose one of them (fault[{index}].worker)."
                )
            if fault.step >= steps:
                raise ScenarioError(
                    f"Cannot strike at step {fault.step}: a run has {steps}, {self.run.warmup_steps} of them to warm "
                    f"up. Choose an earlier one (fault[{index}].step)."
                )
            if fault.stays and self.loopback:
                raise ScenarioError(
                    'Cannot change a rate: the loopback interface has no links. Use network = "switch" (hosts.network).'
                )
            if fault.link:
                self._check_struck(fault, f"fault[{index}]")
            if fault.on_links and fault.kind == "lossy" and not self.topology.is_star and not self.loopback:
                raise ScenarioError(
                    "Cannot lose some frames of this network: a program that does it stands where hosts meet one "
                    'switch, by links that carry as much back. Choose "partition" or "slow-link" '
                    f"(fault[{index}].kind)."
                )
            if fault.stays and not self.linked(fault):
                raise ScenarioError(
                    f'Cannot change the rate of the {fault.target}: there is none. Choose "workers", or add one with '
                    f'servers = 1, or role = "server" (fault[{index}].target).'
                )
        if not self.loopback:
            self._check_rates(self.emulated, "fault.kind")

    def _check_struck(self, fault: Fault, path: str) -> None:
        if self.loopback:
            raise ScenarioError(
                'Cannot strike a link: the loopback interface has none. Use network = "switch" (hosts.network).'
            )
        self.topology.between(fault.link[0], fault.link[1], f"{path}.link")

    def _check_attacks(self, row: Row, attacks: list[AttackSpec], path: str) -> None:
        for index, attack in enumerate(attacks):
            attack.check(f"{path}[{index}]")
            workers = len(self.workers.hosts)
            if (most := max(attack.workers)) >= workers:
                raise ScenarioError(
                    f"Cannot have worker {most} lie: there are {workers}, from 0. Choose one of them "
                    f"({path}[{index}].workers)."
                )
            if attack.kind == "label-flip" and isinstance(self.workload, Replay):
                raise ScenarioError(
                    f"Cannot flip labels: a replay learns nothing, and has none. Use a script ({path}[{index}].kind)."
                )
            if attack.kind != "label-flip" and row.system != "offbeat":
                raise ScenarioError(
                    f"Cannot have {attack.kind!r} forge what {row.system} sends in row {row.name!r}: contributions of "
                    "offbeat can be forged. Leave that row out, or give the attack to the rows that it is for, as "
                    f"[[row.attack]] ({path}[{index}].kind)."
                )

    def _check_rows(self) -> None:
        if not self.row:
            raise ScenarioError("Cannot measure nothing: there is no row. Add a [[row]] for each system (row).")
        names = [row.name for row in self.row]
        for index, row in enumerate(self.row):
            if row.name in names[:index]:
                raise ScenarioError(
                    f"Cannot measure row {row.name!r} twice: row[{index}] has the name of "
                    f"row[{names.index(row.name)}]. Give each row its own name (row[{index}].name)."
                )
            if row.plan is not None and row.system != "offbeat":
                raise ScenarioError(
                    f"Cannot give a plan to {row.system}: only offbeat takes one. "
                    f'Remove the plan or use system = "offbeat" (row[{index}].plan).'
                )
            self._check_restarts(row, f"row[{index}]")
            self._check_swaps(row, f"row[{index}]")
        if self.run.baseline not in names:
            raise ScenarioError(
                f"Cannot compare with {self.run.baseline!r}: no row has that name{_nearest(self.run.baseline, names)}. "
                "Name one of the rows (run.baseline)."
            )

    def _check_swaps(self, row: Row, path: str) -> None:
        steps = self.run.warmup_steps + self.run.steps
        for index, swap in enumerate(row.swap):
            if row.system != "offbeat":
                raise ScenarioError(
                    f"Cannot swap the policy of {row.system}: only offbeat has one. Remove the swap or use "
                    f'system = "offbeat" ({path}.swap[{index}]).'
                )
            if swap.step >= steps:
                raise ScenarioError(
                    f"Cannot swap the policy at step {swap.step}: a run has {steps}, {self.run.warmup_steps} of them "
                    f"to warm up. Choose an earlier one ({path}.swap[{index}].step)."
                )

    def _check_restarts(self, row: Row, path: str) -> None:
        is_restarted = row.system == "ddp+restarts"
        if row.save_every is not None and not is_restarted:
            raise ScenarioError(
                f"Cannot have {row.system} save every {row.save_every} steps: only ddp+restarts goes on from what it "
                f'saved. Remove the key or use system = "ddp+restarts" ({path}.save_every).'
            )
        if is_restarted and isinstance(self.workload, Replay):
            raise ScenarioError(
                "Cannot start a replay again: it has nothing to save, so it would begin anew. Use a script, with "
                f"offbeat.lab.peer_checkpoint, or another system ({path}.system)."
            )


def _without_later(said: Any) -> Any:
    """Leave out keys that came later, where they have their default: results measured before stay valid."""
    if isinstance(said, dict):
        return {key: _without_later(value) for key, value in said.items() if (key, value) not in _LATER}
    return [_without_later(item) for item in said] if isinstance(said, list) else said


def _check_hosts(hosts: Hosts, usual_mbps: float | None) -> None:
    if not 1 <= hosts.count <= MAX_HOSTS:
        raise ScenarioError(
            f"Cannot build {hosts.count} hosts: a scenario has 1 to {MAX_HOSTS}. Choose a number in that range "
            "(hosts.count)."
        )
    if hosts.network == "loopback":
        if hosts.rate_mbps is not None:
            raise ScenarioError(
                f"Cannot shape the loopback interface to {hosts.rate_mbps:g} Mbit/s: it has no links. "
                'Remove the rate, or use network = "switch" (hosts.rate_mbps).'
            )
    elif hosts.rate_mbps is None and usual_mbps is None:
        raise ScenarioError(
            "Cannot build the links: no rate is given. Give a rate in Mbit/s, "
            'or use network = "loopback" for plain processes without links (hosts.rate_mbps).'
        )
    elif hosts.rate_mbps is not None:
        check_rate(hosts.rate_mbps, "hosts.rate_mbps")
    check_compute_factor(hosts.compute_factor, "hosts.compute_factor")


_INSTEAD = {"swap": "; a row swaps by the controller of its plan, such as ByProgress"}
"""What there is instead of keys that people look for."""


def _check_keys(value: Any, kind: Any, path: str) -> None:
    """Refuse the first key that no table of that kind has, with the nearest that it does have."""
    if isinstance(kind, msgspec.inspect.ListType) and isinstance(value, list):
        for index, item in enumerate(value):
            _check_keys(item, kind.item_type, f"{path}[{index}]")
    known = _keys(kind, value)
    for key, item in value.items() if known else ():
        inner = f"{path}.{key}" if path else key
        if key not in known:
            raise ScenarioError(
                f"Unknown key {key!r}{_nearest(key, known)}. Correct or remove it{_INSTEAD.get(key, '')} ({inner})."
            )
        _check_keys(item, known[key], inner)


def _keys(kind: Any, value: Any) -> dict[str, Any]:
    """The type of each key of a table of that kind; empty if it is no table of ours."""
    structs = [
        t
        for t in getattr(kind, "types", [kind])
        if isinstance(t, msgspec.inspect.StructType) and isinstance(value, dict)
    ]
    # A table that does not say its kind, or a wrong one, is told so: until then it may hold what any kind may.
    own = [t for t in structs if t.tag_field is None or t.tag == value.get(t.tag_field)] or structs
    keys = {field.encode_name: field.type for t in own for field in t.fields}
    tags = tuple(t.tag for t in structs if t.tag_field is not None)
    return keys | {t.tag_field: msgspec.inspect.LiteralType(tags) for t in own if t.tag_field is not None}


def _sentence(message: str, table: Any) -> str:
    """msgspec's verdict as a sentence of ours: what cannot be, what would do, and the path."""
    reason, _, place = message.partition(" - at ")
    path = place.strip("`").removeprefix("$").removeprefix(".")
    missing = reason.startswith("Object missing required field")
    if missing:
        path = f"{path}.{reason.split('`')[1]}".removeprefix(".")
    found, kind = table, msgspec.inspect.type_info(Scenario)
    for part in path.replace("[", ".[").split("."):
        if part.startswith("["):
            found, kind = found[int(part[1:-1])], kind.item_type  # type: ignore[attr-defined]
        else:
            found, kind = found.get(part), _keys(kind, found)[part]
    key = path.rpartition(".")[2]
    wanted = _wanted(kind)
    if missing:
        return f"Cannot do without {key}: it is not given, and there is no default. Give {wanted} ({path})."
    known = [value for one in getattr(kind, "types", [kind]) for value in getattr(one, "values", ())]
    if known and isinstance(found, str):
        return f"Unknown {key} {found!r}{_nearest(found, known)}. Use one of {', '.join(known)} ({path})."
    return f"Cannot set {key} to {_shown(found)}: it takes {wanted}. Choose such a value ({path})."


def _wanted(kind: Any) -> str:
    """The type of a key, in words for people."""
    match kind:
        case msgspec.inspect.Metadata(type=inner, extra_json_schema={"description": str(text)}):
            return f"{_wanted(inner)}{' ' if text.startswith('of ') else ', '}{text}"
        case msgspec.inspect.UnionType(types=types):
            return " or ".join(dict.fromkeys(_wanted(t) for t in types if not isinstance(t, msgspec.inspect.NoneType)))
        case msgspec.inspect.IntType():
            return f"a whole number{_range(kind)}"
        case msgspec.inspect.FloatType():
            return f"a number{_range(kind)}"
        case msgspec.inspect.StrType():
            return "a text"
        case msgspec.inspect.LiteralType(values=values):
            return f"one of {', '.join(map(str, values))}"
        case msgspec.inspect.ListType(item_type=inner):
            return f"a list, each item {_wanted(inner)}"
    return "a table"


def _range(kind: Any) -> str:
    low, high = kind.ge if kind.gt is None else kind.gt, kind.le
    if low is None:
        return ""
    least = "of at least" if kind.gt is None else "above"
    if high is None:
        return f" {least} {low:,g}"
    return f" from {low:,} to {high:,}" if kind.gt is None else f" above {low:,g} and up to {high:,g}"


def _shown(value: Any) -> str:
    return {dict: "a table", list: "a list", bool: str(value).lower()}.get(type(value)) or brief(repr(value))


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else f" (there is {', '.join(known)})"
