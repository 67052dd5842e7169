"""Scenarios: what is read is what was written; what cannot be measured is refused in one sentence with its path."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.errors import ScenarioError
from offbeat.scenario import Replay, Scenario, TrainingScript
from offbeat.topology import Topology

SHIPPED = sorted((Path(__file__).parent.parent / "benchmarks/scenarios").glob("*.toml"))

GOOD = """
[scenario]
name = "two"
description = "two hosts"
[hosts]
count = 2
rate_mbps = 100
[workload]
kind = "replay"
profile = "resnet50"
scale = 0.01
[run]
repeats = 2
[[row]]
name = "ddp"
system = "ddp"
[[row]]
name = "ours"
system = "offbeat"
plan = { codec = { kind = "Cast" } }
"""


def changed(old: str, new: str) -> str:
    """The good scenario with one change."""
    assert GOOD.count(old) == 1
    return GOOD.replace(old, new)


def test_what_is_read_is_what_was_written() -> None:
    scenario = Scenario.from_toml(GOOD)
    assert scenario.scenario.name == "two"
    assert [(host.name, host.compute_factor) for host in scenario.topology.hosts] == [("h0", 1.0), ("h1", 1.0)]
    assert [link.rate_mbps for link in scenario.topology.links] == [100, 100]
    assert isinstance(scenario.workload, Replay)
    assert scenario.workload.scale == 0.01
    assert scenario.row[1].plan == {"codec": {"kind": "Cast"}}
    assert (scenario.run.repeats, scenario.run.baseline) == (2, "ddp")
    assert not scenario.loopback


def test_hosts_of_their_own() -> None:
    each = """
[[host]]
name = "fast"
rate_mbps = 200
[[host]]
name = "slow"
rate_mbps = 20
compute_factor = 1.5
memory_mb = 300
"""
    topology = Scenario.from_toml(changed("[hosts]\ncount = 2\nrate_mbps = 100", each)).topology
    assert [(host.name, host.compute_factor) for host in topology.hosts] == [("fast", 1.0), ("slow", 1.5)]
    assert [host.memory_mb for host in topology.hosts] == [None, 300]
    assert "compute x1.5, 300 MB" in topology.draw()
    assert [link.rate_mbps for link in topology.links] == [200, 20]


def test_a_script_and_loopback() -> None:
    text = changed(
        'kind = "replay"\nprofile = "resnet50"\nscale = 0.01', 'kind = "script"\npath = "a.py"\ntarget = 0.9'
    )
    scenario = Scenario.from_toml(text.replace("rate_mbps = 100", 'network = "loopback"'))
    assert isinstance(scenario.workload, TrainingScript)
    assert scenario.workload.target == 0.9
    assert scenario.loopback


def test_the_digest_is_of_the_meaning() -> None:
    digest = Scenario.from_toml(GOOD).digest
    assert digest == Scenario.from_toml("# a comment\n" + GOOD.replace("100", "100.0")).digest
    assert digest != Scenario.from_toml(changed("rate_mbps = 100", "rate_mbps = 101")).digest
    assert digest != Scenario.from_toml(changed('kind = "Cast"', 'kind = "Dense"')).digest


def test_what_is_reached_depends_on_what_is_better() -> None:
    text = changed(
        'kind = "replay"\nprofile = "resnet50"\nscale = 0.01', 'kind = "script"\npath = "a.py"\ntarget = 2.0'
    )
    higher = Scenario.from_toml(text).workload
    lower = Scenario.from_toml(text.replace("target = 2.0", 'target = 2.0\nbetter = "lower"')).workload
    none = Scenario.from_toml(text.replace("target = 2.0", "")).workload
    for workload, wanted in ((higher, [False, True, True]), (lower, [True, True, False]), (none, [False] * 3)):
        assert isinstance(workload, TrainingScript)
        assert [workload.reached(value) for value in (1.9, 2.0, 2.1)] == wanted


def test_names_may_have_underscores() -> None:
    assert Scenario.from_toml(changed('"two"', '"two_hosts"')).scenario.name == "two_hosts"


TWICE = '[[host]]\nname = "a"\nrate_mbps = 1\n[[host]]\nname = "a"\nrate_mbps = 1'
HOSTS = "[hosts]\ncount = 2\nrate_mbps = 100"
TORUS = '[topology]\nkind = "torus"\ndims = [2, 3]\nrate_mbps = 10'
TABLE = '[topology]\nkind = "table"\nrate_mbps = 10'


def link(a: str, b: str) -> str:
    return f'[[link]]\na = "{a}"\nb = "{b}"'


def struck(kind: str, *ends: str) -> str:
    return f'[[fault]]\nworker = 1\nstep = 3\nkind = "{kind}"\nlink = {list(ends)}'


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        # Rates that no lab reaches.
        ("= 100", "= 0", "Cannot shape a link to 0 Mbit/s: .* Choose a rate in that range (hosts.rate_mbps)."),
        ("= 100", "= -3", "Cannot shape a link to -3 Mbit/s: .* (hosts.rate_mbps)."),
        (
            "= 100",
            "= 1e6",
            "Cannot shape a link to 1e+06 Mbit/s: the lab shapes 0.1 to 10000 Mbit/s.* (hosts.rate_mbps).",
        ),
        ("= 100", "= nan", "Cannot shape a link to nan Mbit/s: .* (hosts.rate_mbps)."),
        ("= 100", '= "fast"', "Cannot set rate_mbps to 'fast': it takes a number. .* (hosts.rate_mbps)."),
        ("rate_mbps = 100", "", "Cannot build the links: no rate is given.* (hosts.rate_mbps)."),
        ("= 100", '= 100\nnetwork = "loopback"', "Cannot shape the loopback interface to 100.* (hosts.rate_mbps)."),
        (HOSTS, '[[host]]\nname = "a"\nrate_mbps = 0', "Cannot shape a link to 0 Mbit/s.* (host[0].rate_mbps)."),
        # Hosts that cannot be.
        (HOSTS, TWICE, "Cannot build host 'a' twice: host[1] has the name of host[0].* (host[1].name)."),
        (HOSTS, "", "Cannot tell the hosts: neither `hosts` nor `host` is given.* (hosts)."),
        (HOSTS, f"{HOSTS}\n{TWICE}", "Cannot tell the hosts: both `hosts` and `host` are given.* (hosts)."),
        ("count = 2", "count = 0", "Cannot build 0 hosts: a scenario has 1 to 10000.* (hosts.count)."),
        ("count = 2", "count = 2\ncompute_factor = 0", "Cannot slow a host down by 0: .* (hosts.compute_factor)."),
        # Keys and names that nobody knows.
        ("rate_mbps", "rate_mpbs", "Unknown key 'rate_mpbs' (did you mean 'rate_mbps'?).* (hosts.rate_mpbs)."),
        ("repeats", "repeat", "Unknown key 'repeat' (did you mean 'repeats'?).* (run.repeat)."),
        ("scale", "scael", "Unknown key 'scael' (did you mean 'scale'?).* (workload.scael)."),
        ("[run]", "[[swap]]\nstep = 3\n[run]", "Unknown key 'swap' .* swaps by the controller of its plan.* (swap)."),
        ("[run]", "[rnu]", "Unknown key 'rnu' (did you mean 'run'?).* (rnu)."),
        ("plan =", "plam =", "Unknown key 'plam' (did you mean 'plan'?).* (row[1].plam)."),
        ("resnet50", "resnet51", "Unknown profile 'resnet51' (did you mean 'resnet50'?).* (workload.profile)."),
        ('system = "ddp"', 'system = "pdp"', "Unknown system 'pdp' (did you mean 'ddp'?).* (row[0].system)."),
        ('"replay"', '"play"', "Unknown kind 'play' (did you mean 'replay'?).* (workload.kind)."),
        # Work and rows that cannot be measured.
        (
            'system = "ddp"',
            'system = "ddp"\nsave_every = 5',
            "Cannot have ddp save every 5 steps: .* (row[0].save_every).",
        ),
        ('system = "ddp"', 'system = "ddp+restarts"', "Cannot start a replay again: .* (row[0].system)."),
        (
            'system = "ddp"',
            'system = "ddp"\nswap = [{ step = 3, policy = "ASP" }]',
            "Cannot swap the policy of ddp: only offbeat has one.* (row[0].swap[0]).",
        ),
        (
            'system = "offbeat"',
            'system = "offbeat"\nswap = [{ step = 3, policy = "ASP" }, { step = 3000, policy = "BSP" }]',
            "Cannot swap the policy at step 3000: .* (row[1].swap[1].step).",
        ),
        ('profile = "resnet50"', "", "Cannot replay nothing: give profile .* (workload.profile)."),
        (
            "scale = 0.01",
            "scale = 0",
            "Cannot set scale to 0: it takes a number above 0 and up to 1. .* (workload.scale).",
        ),
        (
            "scale = 0.01",
            "forward_s = -1.0",
            "Cannot set forward_s to -1.0: it takes a number from 0 to 3,600. .* (workload.forward_s).",
        ),
        (
            "repeats = 2",
            "repeats = 0",
            "Cannot set repeats to 0: it takes a whole number from 1 to 100. .* (run.repeats).",
        ),
        ("repeats = 2", "repeats = true", "Cannot set repeats to true: it takes a whole number.* (run.repeats)."),
        (
            "repeats = 2",
            "warmup_steps = 2",
            "Cannot set warmup_steps to 2: it takes a whole number from 3 to 100,000, because .* (run.warmup_steps).",
        ),
        (
            "scale = 0.01",
            "batch = 0",
            "Cannot set batch to 0: it takes a whole number of at least 1.* (workload.batch).",
        ),
        ("scale = 0.01", "args = 1", "Unknown key 'args' .* (workload.args)."),
        ("scale = 0.01", "layer = [3]", "Cannot set layer[0] to 3: it takes a table.* (workload.layer[0])."),
        ('kind = "replay"\n', "", "Cannot do without kind: .* Give one of replay, script (workload.kind)."),
        ("= 100", '= 100\nnetwork = "loop"', "Unknown network 'loop' (did you mean 'loopback'?).* (hosts.network)."),
        ('{ codec = { kind = "Cast" } }', "3", "Cannot set plan to 3: it takes a table or a text.* (row[1].plan)."),
        ("repeats = 2", 'baseline = "dpd"', "Cannot compare with 'dpd': .*(did you mean 'ddp'?).* (run.baseline)."),
        ('name = "ours"', 'name = "ddp"', "Cannot measure row 'ddp' twice: row[1] has .* (row[1].name)."),
        ('"ddp"\n[[row]]', '"ddp"\nplan = "x"\n[[row]]', "Cannot give a plan to ddp: only offbeat .* (row[0].plan)."),
        (
            'name = "two"',
            'name = "../up"',
            "Cannot set name to '../up': it takes a text of 1 to 64 of a-z.* (scenario.name).",
        ),
        ("scale = 0.01", "jitter = 2", "Cannot set jitter to 2: it takes a number from 0 to 1.* (workload.jitter)."),
        # Links that cannot be made bad.
        (
            HOSTS,
            f"{HOSTS}\n[impair]\nloss = 0.9",
            "Cannot set loss to 0.9: it takes a number from 0 to 0.5.* (impair.loss).",
        ),
        (
            HOSTS,
            f'{HOSTS}\n[impair]\nhosts = ["h2"]',
            "Cannot impair the link of 'h2': no host has that name (did you mean 'h1'?).* (impair.hosts[0]).",
        ),
        (
            HOSTS,
            f"{HOSTS.replace('100', '200')}\n[impair]\nloss = 0.1",
            "Cannot impair the link of 'h0' at 200 Mbit/s: .* (impair.hosts).",
        ),
        (
            HOSTS,
            '[hosts]\ncount = 2\nnetwork = "loopback"\n[impair]\nloss = 0.1',
            "Cannot impair links: the loopback interface has none. .* (hosts.network).",
        ),
        (
            HOSTS,
            f'{HOSTS}\n[[fault]]\nworker = 0\nstep = 3\nkind = "sigstob"',
            "Unknown kind 'sigstob' (did you mean 'sigstop'?). Use one of .* (fault[0].kind).",
        ),
        (
            HOSTS,
            f'{HOSTS}\n[[fault]]\nworker = 0\nstep = 3\nkind = "sigstop"\nsecond = 2',
            "Unknown key 'second' (did you mean 'seconds'?). .* (fault[0].second).",
        ),
        (
            HOSTS,
            f'{HOSTS}\n[[fault]]\nworker = 2\nstep = 3\nkind = "sigkill"',
            "Cannot strike at a step of worker 2: there are 2, from 0. .* (fault[0].worker).",
        ),
        (
            HOSTS,
            f'{HOSTS}\n[[fault]]\nworker = 1\nstep = 25\nkind = "sigkill"',
            "Cannot strike at step 25: a run has 25, 5 of them to warm up. .* (fault[0].step).",
        ),
        (
            HOSTS,
            f'{HOSTS}\n[[fault]]\nworker = 1\nstep = 3\nkind = "gil"\ntarget = "server"',
            "Cannot have 'gil' strike the server: it happens within a training script. .* (fault[0].kind).",
        ),
        (
            HOSTS,
            f'{HOSTS.replace("100", "200")}\n[[fault]]\nworker = 1\nstep = 3\nkind = "partition"',
            "Cannot impair the link of 'h1' at 200 Mbit/s: .* (fault.kind).",
        ),
        (
            HOSTS,
            f'{HOSTS}\n[[fault]]\nworker = 1\nstep = 3\nkind = "rate"',
            "Cannot change a rate: the new one is not given. .* (fault[0].to_mbps).",
        ),
        (
            HOSTS,
            f'{HOSTS}\n[[fault]]\nworker = 1\nstep = 3\nkind = "rate"\nto_mbps = 0.0',
            "Cannot shape a link to 0 Mbit/s: .* (fault[0].to_mbps).",
        ),
        (
            HOSTS,
            f'{HOSTS}\n[[fault]]\nworker = 1\nstep = 3\nkind = "rate"\nto_mbps = 9\ntarget = "switch"',
            "Cannot change the rate of the switch: .* (fault[0].target).",
        ),
        (
            HOSTS,
            f'{HOSTS}\n[[fault]]\nworker = 1\nstep = 3\nkind = "rate"\nto_mbps = 9\ntarget = "server"',
            "Cannot change the rate of the server: .* (fault[0].target).",
        ),
        (
            HOSTS,
            f'{HOSTS}\n[[fault]]\nworker = 1\nstep = 3\nkind = "sigstop"\nto_mbps = 9',
            "Cannot have 'sigstop' strike with to_mbps = 9: .* (fault[0].to_mbps).",
        ),
        (
            HOSTS,
            f'{HOSTS}\n[[fault]]\nworker = 1\nstep = 3\nkind = "sigstop"\ntarget = "workers"',
            "Cannot have 'sigstop' strike with target = workers: .* (fault[0].target).",
        ),
        (
            HOSTS,
            '[hosts]\ncount = 2\nnetwork = "loopback"\n[[fault]]\nworker = 1\nstep = 3\nkind = "rate"\nto_mbps = 9',
            "Cannot change a rate: the loopback interface has no links. .* (hosts.network).",
        ),
        ('name = "two"\n', "", "Cannot do without name: it is not given.* (scenario.name)."),
        (HOSTS, '[[host]]\nname = "a"', "Cannot do without rate_mbps: it is not given, .* (host[0].rate_mbps)."),
        # Networks that cannot be.
        (HOSTS, f"{HOSTS}\n{TORUS}", "Cannot have both [hosts] and a topology of kind 'torus': .* (hosts)."),
        (HOSTS, TORUS.replace("torus", "tours"), "Unknown kind 'tours' (did you mean 'torus'?).* (topology.kind)."),
        (HOSTS, TORUS.replace("[2, 3]", "[2, 0]"), "Cannot build a torus with 0 in a dimension.* (topology.dims[1])."),
        (HOSTS, TORUS.replace("[2, 3]", "[2.5]"), "Cannot set dims[0] to 2.5: it takes a whole.* (topology.dims[0])."),
        (
            HOSTS,
            TORUS.replace("dims = [2, 3]", ""),
            "Cannot build a topology of kind 'torus' with 0.* (topology.dims).",
        ),
        (HOSTS, TORUS.replace("torus", "ring"), "Cannot build a topology of kind 'ring' with 2 .* (topology.dims)."),
        (HOSTS, TORUS.replace("[2, 3]", "[101, 100]"), "Cannot build 10100 hosts.* (hosts)."),
        (HOSTS, TORUS.replace("= 10", "= 0"), "Cannot shape a link to 0 Mbit/s: .* (topology.rate_mbps)."),
        (HOSTS, TORUS.replace("rate_mbps = 10", ""), "Cannot build the link between 'h0' and .* (topology.rate_mbps)."),
        (HOSTS, f"{TORUS}\nlatency_ms = -1", "Cannot delay a link by -1 ms: .* (topology.latency_ms)."),
        (HOSTS, f'{TORUS}\nranks = ["h0", "h9"]', "Cannot give 'h9' rank 1: there are h0.* (topology.ranks[1])."),
        (HOSTS, f'{TORUS}\nranks = ["h0", "h0"]', "Cannot give 'h0' rank 1: it has a rank.* (topology.ranks[1])."),
        (HOSTS, f'{TORUS}\nranks = ["h0"]', "Cannot tell the rank of 'h1': 1 of 6 hosts .* (topology.ranks)."),
        (HOSTS, f'{TORUS}\n[[switch]]\nname = "s"', "Cannot name switches of kind 'torus': .* (switch)."),
        (HOSTS, f'{TORUS}\n[[host]]\nname = "h6"', "Cannot find the host 'h6': .* (host[0].name)."),
        (HOSTS, f'{TORUS}\n[[host]]\nname = "h1"\nrate_mbps = 5', "Cannot give host 'h1' a.* (host[0].rate_mbps)."),
        (HOSTS, f"{TORUS}\n{link('h0', 'h4')}", "Cannot change the link between 'h0' and 'h4': 'h0' is.* (link[0])."),
        (HOSTS, f"{TORUS}\n{link('h0', 'x')}", "Cannot change the link between 'h0' and 'x': .* (link[0])."),
        (
            HOSTS,
            f"{TORUS}\n{link('h0', 'h1')}\n{link('h1', 'h0')}",
            "Cannot have two links between 'h1' and 'h0': link[1] has the ends of link[0].* (link[1]).",
        ),
        (
            HOSTS,
            f"{TORUS}\n{link('h0', 'h1')}\nrate_mbps = nan",
            "Cannot shape a link to nan Mbit/s: .* (link[0].rate_mbps).",
        ),
        (
            HOSTS,
            f"{TORUS}\n{link('h0', 'h1')}\nback_mbps = 0.0",
            "Cannot shape a link to 0 Mbit/s: .* (link[0].back_mbps).",
        ),
        (HOSTS, f"{TORUS}\n{link('h0', 'h1')}\nrate = 3", "Unknown key 'rate' (did you mean 'rate_.* (link[0].rate)."),
        (HOSTS, TABLE, "Cannot build a network without links: .* (link)."),
        (HOSTS, f"{TABLE}\n{link('a', 'b')}\n{link('c', 'd')}", "Cannot find a way from 'a' to 'c': .* (link)."),
        (HOSTS, f"{TABLE}\n{link('a', 'a')}", "Cannot link 'a' to itself: .* (link[0].b)."),
        (HOSTS, f"{TABLE}\n{link('a', 'B b')}", "Cannot name a host 'B b': .* (link[0].b)."),
        (
            HOSTS,
            f'{TABLE}\n{link("s", "t")}\n[[switch]]\nname = "s"\n[[switch]]\nname = "t"',
            "Cannot build a network of switches alone: .* (switch).",
        ),
        (
            HOSTS,
            f'{TABLE}\n{link("a", "b")}\n[[switch]]\nname = "s"',
            "Cannot find a way from 'a' to 's': .* (link).",
        ),
        (
            HOSTS,
            f"{TORUS}\n[impair]\nloss = 0.1",
            "Cannot impair links of this network: a program that forwards frames .* (impair).",
        ),
        (HOSTS, f"{TORUS}\n{struck('sigkill', 'h0', 'h1')}", "Cannot have 'sigkill' strike a link .* (fault[0].link)."),
        (HOSTS, f"{TORUS}\n{struck('partition', 'h0', 'h4')}", "Cannot find a link between 'h0' .* (fault[0].link)."),
        (
            HOSTS,
            f"{TORUS}\n{struck('partition', 'h0')}",
            "Cannot tell which link to strike: it has .* (fault[0].link).",
        ),
        (
            HOSTS,
            f"{TORUS}\n[[fault]]\nworker = 1\nstep = 3\nkind = 'lossy'",
            "Cannot lose some frames of this network: .* (fault[0].kind).",
        ),
        (
            HOSTS,
            f'[hosts]\ncount = 2\nnetwork = "loopback"\n{TABLE.replace("table", "star")}',
            "Cannot have a topology on the loopback interface: .* (hosts.network).",
        ),
    ],
)
def test_one_sentence_and_the_path(old: str, new: str, says: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        Scenario.from_toml(changed(old, new))
    start, _, end = says.partition(".*")
    text = str(caught.value)
    assert text.startswith(start)
    assert text.endswith(end.rpartition(".*")[2]), text
    assert end.partition(".*")[0] in text
    assert "\n" not in text


def test_no_rows() -> None:
    with pytest.raises(ScenarioError, match=r"Cannot measure nothing: there is no row\. .* \(row\)\.$"):
        Scenario.from_toml("row = []\n" + GOOD.partition("[[row]]")[0])


def test_layers_are_read_to_the_innermost_number() -> None:
    layer = '[[workload.layer]]\nname = "a"\nshapes = [[3, 0]]\nbackward_s = 0.1'
    with pytest.raises(ScenarioError, match=r"^Cannot set shapes\[0\]\[1\] to 0: .* \(workload\.layer\[0\]\.shapes\["):
        Scenario.from_toml(changed('profile = "resnet50"\nscale = 0.01', layer))


def test_not_toml() -> None:
    with pytest.raises(ScenarioError, match=r"Cannot read the scenario: it is not valid TOML \(.*line 1"):
        Scenario.from_toml("[scenario\n")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_scenarios(path: Path) -> None:
    """They are named after their files, stock DDP is among the rows, and their scripts are there."""
    scenario = Scenario.from_toml(path.read_text())
    assert scenario.scenario.name == path.stem
    assert scenario.scenario.description
    assert "ddp" in [row.system for row in scenario.row]
    if not scenario.servers:
        assert {row.name: row.system for row in scenario.row}[scenario.run.baseline] == "ddp"
        ends = any(fault.kind == "sigkill" for fault in scenario.fault)  # which the default plan does not outlive
        assert ends or any(row.system == "offbeat" and row.plan is None for row in scenario.row)
    if isinstance(scenario.workload, TrainingScript):
        assert (path.parent / scenario.workload.path).is_file()


def test_the_promised_scenarios_are_shipped() -> None:
    assert {path.stem for path in SHIPPED} >= {"uniform", "mnist", "loopback"}


def test_reading_a_scenario_loads_no_torch() -> None:
    code = "import sys, offbeat.scenario; assert 'torch' not in sys.modules and 'pyroute2' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=20)


def test_what_goes_wrong_can_be_told() -> None:
    text = f'{HOSTS}\n[[fault]]\nworker = 1\nstep = 3\nkind = "partition"\nseconds = 2.5'
    scenario = Scenario.from_toml(GOOD.replace(HOSTS, text))
    assert [fault.words for fault in scenario.fault] == ["partition of worker 1 for 2.5 s at its step 3"]
    assert scenario.emulated == ["h1"], "its link has to be one that can be made bad"
    assert scenario.impaired == []
    assert scenario.digest != Scenario.from_toml(GOOD).digest


def test_links_have_the_rates_of_their_steps() -> None:
    """Whoever's they are, at any rate; what was measured without such a fault is still of the same scenario."""
    hosts = HOSTS.replace("100", "200\nservers = 2")
    faults = [
        'worker = 1\nstep = 3\nkind = "rate"\nto_mbps = 50\ntarget = "workers"',
        'worker = 0\nstep = 5\nkind = "rate"\nto_mbps = 400',
        'worker = 0\nstep = 5\nkind = "rate"\nto_mbps = 20\ntarget = "server"',
    ]
    scenario = Scenario.from_toml(changed(HOSTS, "\n[[fault]]\n".join([hosts, *faults])))

    def rates(step: int) -> list[float | None]:
        made = scenario.at(step)
        assert [host.name for host in made.workers.hosts] == ["h0", "h1"]
        return [made.topology.uplink(name).rate_mbps for name in ("h0", "h1", "s0", "s1")]

    assert rates(3) == [200, 200, 200, 200], "it strikes when the worker makes that step"
    assert rates(4) == rates(5) == [50, 50, 200, 200]
    assert rates(6) == [400, 50, 200, 20]
    assert scenario.emulated == []
    assert scenario.fault[0].words == "rate of 50 Mbit/s at the links of the workers at step 3 of worker 1"
    assert scenario.fault[1].words == "rate of 400 Mbit/s at the link of worker 0 at its step 5"
    assert [fault.takes for fault in scenario.fault] == [None, None, "a server"]
    plain = Scenario.from_toml(GOOD)
    assert plain.at(10) is plain


def test_a_preset_with_links_that_are_different() -> None:
    text = f"{TORUS}\nlatency_ms = 2\n{link('h1', 'h0')}\nrate_mbps = 5\n{link('h0', 'h3')}\nback_mbps = 1"
    scenario = Scenario.from_toml(changed(HOSTS, f'{text}\n[[host]]\nname = "h4"\ncompute_factor = 3.0'))
    topology = scenario.topology
    assert [host.compute_factor for host in topology.hosts] == [1, 1, 1, 1, 3, 1]
    rates = {(arc.source, arc.target): (arc.rate_mbps, arc.latency_ms) for arc in topology.arcs}
    assert rates["h0", "h1"] == rates["h1", "h0"] == (5, 2)
    assert (rates["h0", "h3"], rates["h3", "h0"]) == ((10, 2), (1, 2))
    assert rates["h4", "h1"] == (10, 2)
    assert len(rates) == 2 * (2 * 3 + 3)
    assert [arc.target for arc in topology.route("h0", "h2")] == ["h2"], "it is still a torus"


@pytest.mark.parametrize(
    ("kind", "dims", "hosts", "links"),
    [
        ("star", [3], 3, 3),
        ("ring", [5], 5, 5),
        ("mesh", [2, 2, 2], 8, 12),
        ("torus", [4, 4], 16, 32),
        ("fat-tree", [2, 2], 4, 8),
        ("bigraph", [2, 4], 8, 12),
    ],
)
def test_every_preset(kind: str, dims: list[int], hosts: int, links: int) -> None:
    text = f'[topology]\nkind = "{kind}"\ndims = {dims}\nrate_mbps = 10'
    scenario = Scenario.from_toml(changed(HOSTS, text))
    assert (len(scenario.topology.hosts), len(scenario.topology.links)) == (hosts, links)
    assert scenario.workers == scenario.topology
    assert scenario.digest != Scenario.from_toml(changed(HOSTS, text.replace("10", "11"))).digest


def test_a_whole_network_as_a_table() -> None:
    text = f"{TABLE}\n{link('a', 's')}\n{link('b', 's')}\nback_mbps = 2\n{link('b', 'c')}\nrate_mbps = 3"
    hosts = '[[switch]]\nname = "s"\n[[host]]\nname = "c"\nrole = "server"'
    scenario = Scenario.from_toml(changed(HOSTS, f"{text}\n{hosts}"))
    assert [host.name for host in scenario.topology.hosts] == ["a", "b", "c"]
    assert scenario.topology.switches == ("s",)
    assert [link.rates_mbps for link in scenario.topology.links] == [(10, 10), (10, 2), (3, 3)]
    assert scenario.servers == ["c"]
    assert [host.name for host in scenario.workers.hosts] == ["a", "b"]
    assert scenario.workers.switches == ("s", "c"), "others' ways may lead through it"


def test_ranks_go_in_any_order() -> None:
    order = ["h0", "h1", "h2", "h5", "h4", "h3"]
    scenario = Scenario.from_toml(changed(HOSTS, f"{TORUS}\nranks = {order}"))
    assert [host.name for host in scenario.workers.hosts] == order
    assert all(len(scenario.topology.route(a, b)) == 1 for a, b in zip(order, [*order[1:], order[0]], strict=True))


def test_a_star_with_links_that_are_different() -> None:
    text = f"{HOSTS}\n{link('h1', 'switch')}\nback_mbps = 400"
    scenario = Scenario.from_toml(changed(HOSTS, text))
    assert [link.rates_mbps for link in scenario.topology.links] == [(100, 100), (100, 400)]
    assert not scenario.topology.is_star
    usual = Scenario.from_toml(changed(HOSTS, '[topology]\nkind = "star"\nrate_mbps = 9\n[hosts]\ncount = 2'))
    assert usual.topology == Topology.star(["h0", "h1"], rate_mbps=9)
    listed = Scenario.from_toml(changed(HOSTS, '[topology]\nkind = "star"\nrate_mbps = 9\n[[host]]\nname = "a"'))
    assert listed.topology == Topology.star(["a"], rate_mbps=9)


def test_faults_may_name_a_link() -> None:
    text = f"{TORUS}\n{struck('rate', 'h1', 'h0')}\nto_mbps = 2.5\n{struck('partition', 'h0', 'h3')}"
    scenario = Scenario.from_toml(changed(HOSTS, text))
    assert [fault.words for fault in scenario.fault] == [
        "rate of 2.5 Mbit/s at the link h1-h0 at step 3 of worker 1",
        "partition of the link h0-h3 for 1 s at step 3 of worker 1",
    ]
    assert scenario.emulated == []
    assert [(link.a, link.b) for link in scenario.struck_links(scenario.fault[0])] == [("h0", "h1")]
    assert scenario.at(3) is scenario
    later = {frozenset((one.a, one.b)): one.rates_mbps for one in scenario.at(4).topology.links}
    assert later.pop(frozenset(("h0", "h1"))) == (2.5, 2.5)
    assert set(later.values()) == {(10, 10)}


def test_all_links_of_a_host_may_be_struck() -> None:
    text = f'{TORUS}\n[[fault]]\nworker = 1\nstep = 3\nkind = "rate"\nto_mbps = 5'
    scenario = Scenario.from_toml(changed(HOSTS, text))
    assert {frozenset((one.a, one.b)) for one in scenario.struck_links(scenario.fault[0])} == {
        frozenset(("h1", other)) for other in ("h0", "h2", "h4")
    }


DEEP = 100_000


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"a = {'[' * DEEP}{']' * DEEP}", "it is nested more than 32 deep"),
        (f"a{'.a' * DEEP} = 1", "a key has more than 32 parts"),
        (f'"a"{".a" * DEEP} = 1', "a key has more than 32 parts"),
        (f"[{'a.' * DEEP}a]", "a key has more than 32 parts"),
        (f"a = {'{a=' * (DEEP // 2)}1{'}' * (DEEP // 2)}", "it is nested more than 32 deep"),
        (f"a = {'9' * 5000}", "a number has thousands of digits"),
        (GOOD.replace("count = 2", f"count = {'9' * 4000}"), "a number has about 4,000 digits"),
        (GOOD.replace('"two hosts"', f'"{"x" * 3000}"'), "a text has 3,000 characters, and 2,000 are the most"),
        (GOOD.replace("repeats", "r" * 300), "a key has 300 characters, and 64 are the most"),
        (GOOD.replace('"two"', f'"{"n" * 300}"'), "Cannot set name to 'nnn"),
        (GOOD.replace('"ours"', f'"{"n" * 300}"'), "Cannot set name to 'nnn"),
        (GOOD.replace("[run]", f'[run]\nbaseline = "{"b" * 300}"'), "Cannot compare with 'bbb"),
    ],
    ids=lambda value: value[:20],
)
def test_what_has_no_end_is_refused_in_a_sentence(text: str, says: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        Scenario.from_toml(text)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


def test_dots_and_brackets_of_an_ordinary_scenario_are_no_depth() -> None:
    """Comments with dots to lead the eye, paths, lists of numbers, and many tables one behind the other."""
    layers = "".join(
        f'[[workload.layer]]\nname = "l{index}"\nshapes = [[64, 3, 7, 7], [64]]\nbackward_s = 0.001\n'
        for index in range(200)
    )
    text = GOOD.replace('profile = "resnet50"\n', "").replace("[run]", f"# {'.' * 100}\n{layers}[run]")
    assert len(Scenario.from_toml(text).workload.layer) == 200  # type: ignore[union-attr]
