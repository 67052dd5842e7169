"""`offbeat doctor`: what works on this machine, and for what does not the reason and the remedy.

Each check is a function that returns findings and takes what it looks at as arguments, so that each bad case can be
tried on a good machine.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import resource
import secrets
import shutil
import socket
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from offbeat.diagnosis.finding import Finding
from offbeat.wire.interfaces import interface_addresses, is_loopback, nominal_mbps, resolve_hostname

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_PROBE_S = 0.4
_PATIENCE_S, _DROP_S = 3.0, 0.2
_CHUNK = 1 << 20
_FEW_FILES = 1024
_SLOW_START = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")
_SLOW_GBPS = 1.0
_OLDEST_TORCH = (2, 9)


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Look at this machine: what works, and what to do about the rest. Exit code 1 if training cannot work."""
    report(list(examine()), json=json)


def examine() -> Iterator[Finding]:
    """All checks."""
    yield from check_machine()
    yield from check_torch()
    addresses = interface_addresses()
    yield check_interfaces(addresses)
    yield check_gloo(os.environ, addresses, resolve_hostname)
    yield check_strangers(os.environ, try_to_drop)
    yield check_loopback(measure_loopback_gbps)
    yield check_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield check_slow_start(_SLOW_START)
    yield check_shared_memory(Path("/dev/shm"))
    yield from check_packages(importlib.util.find_spec)
    yield check_lab(os.geteuid(), build_one_link)


def check_machine() -> Iterator[Finding]:
    """Cores, memory, Python."""
    cores = len(os.sched_getaffinity(0))
    total = os.cpu_count() or cores
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    allowed = "" if cores == total else f" (of {total}: this process may use {cores})"
    yield Finding("cores", f"{cores}{allowed}")
    yield Finding("memory", f"{memory_gb:.1f} GB")
    yield Finding("python", f"{platform.python_version()} at {sys.executable}")


def check_torch() -> Iterator[Finding]:
    """torch, its backends and its devices."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        yield Finding("torch", "missing", "bad", str(error), "pip install torch==2.13.0")
        return
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < _OLDEST_TORCH:
        yield Finding("torch", str(torch.__version__), "bad", "offbeat needs 2.9 or later", "pip install -U torch")
    else:
        yield Finding("torch", str(torch.__version__))
    if not dist.is_available() or not dist.is_gloo_available():
        yield Finding("backends", "none", "bad", "this torch has no Gloo", "install a torch with distributed support")
        return
    backends = ["gloo"] + (["nccl"] if dist.is_nccl_available() else []) + (["mpi"] if dist.is_mpi_available() else [])
    yield Finding("backends", ", ".join(backends))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    yield Finding("gpus", ", ".join(torch.cuda.get_device_name(i) for i in range(gpus)) or "none")
    if gpus and not dist.is_nccl_available():
        yield Finding("nccl", "missing", "note", "gradients of GPUs need NCCL", "install a CUDA build of torch")


def check_interfaces(addresses: Mapping[str, str], nominal_mbps: Callable[[str], int | None] = nominal_mbps) -> Finding:
    """List the networks of this machine, with the rates that they say they have.

    What they carry shows only with others: `Routed()` measures it, and logs it beside these.
    """
    rates = {name: nominal_mbps(name) for name in addresses}
    shown = ", ".join(
        f"{name} {address}" + (f" ({rates[name]:,} Mbit/s)" if rates[name] else "")
        for name, address in addresses.items()
        if address
    )
    if not shown:
        return Finding("interfaces", "none", "bad", "no interface has an address", "ip link set lo up")
    return Finding("interfaces", shown)


def check_gloo(environment: Mapping[str, str], addresses: Mapping[str, str], resolve: Callable[[], str]) -> Finding:
    """Find Gloo's interface: GLOO_SOCKET_IFNAME, else that of the hostname's address, else loopback."""
    wanted = environment.get("GLOO_SOCKET_IFNAME", "")
    if wanted:
        for name in wanted.split(","):
            if not addresses.get(name):
                reason = f"GLOO_SOCKET_IFNAME names {name}, which does not exist or has no address"
                choices = ", ".join(other for other, address in addresses.items() if address)
                return Finding("gloo would use", wanted, "bad", reason, f"set it to one of {choices}")
        return Finding("gloo would use", f"{wanted} (GLOO_SOCKET_IFNAME)")
    address = resolve()
    outward = [name for name, other in addresses.items() if other and not other.startswith("127.")]
    remedy = f"set GLOO_SOCKET_IFNAME={outward[0]} to train on several machines" if outward else ""
    if not address:
        reason = f"the hostname {socket.gethostname()} does not resolve to its own address; Gloo takes loopback"
        return Finding("gloo would use", "lo", "note", reason, remedy or "add the hostname to /etc/hosts")
    name = next((name for name, other in addresses.items() if other == address), "")
    loopback = is_loopback(address)
    if ":" in address and not loopback:
        return Finding("gloo would use", f"{address} (the hostname's)")
    if not name and not loopback:
        reason = f"the hostname resolves to {address}, which no interface has"
        return Finding("gloo would use", address, "note", reason, remedy or "correct /etc/hosts")
    if loopback:
        reason = f"the hostname resolves to {address}, so only this machine can be reached"
        return Finding("gloo would use", "lo", "note" if outward else "ok", reason if outward else "", remedy)
    return Finding("gloo would use", f"{name} {address} (the hostname's)")


def check_strangers(environment: Mapping[str, str], drop: Callable[[], None]) -> Finding:
    """Check whether Gloo's ports can be shut once the workers are connected; else strangers can end a worker."""
    name, remedy = "gloo's ports", "keep others from the workers' ports by a firewall"
    if environment.get("TORCH_GLOO_LAZY_INIT", "0") not in ("", "0"):
        reason = "TORCH_GLOO_LAZY_INIT is set: workers connect at any time, and strangers can use up their sockets"
        return Finding(name, "remain open", "note", reason, f"unset it, or {remedy}")
    try:
        drop()
    except (ImportError, OSError) as error:
        reason = f"cannot have the kernel drop what strangers send to a listening socket: {error}"
        return Finding(name, "remain open", "note", reason, remedy)
    return Finding(name, "shut once the workers are connected")


def try_to_drop() -> None:
    """Have the kernel drop what comes to a listening socket.

    Raises:
        OSError: if it cannot, or a connection is made all the same.
    """
    from offbeat.fabric.gloo_listener import drop_all

    with socket.create_server(("127.0.0.1", 0)) as listener:
        drop_all(listener)
        with contextlib.suppress(TimeoutError), socket.create_connection(listener.getsockname(), _DROP_S):
            raise OSError("the kernel took the filter, and a connection was made all the same")


def measure_loopback_gbps() -> float:
    """One TCP stream between two threads, in 10^9 bit/s."""
    received, stop_s = 0, 0.0
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = threading.Thread(target=_send, args=(listener.getsockname()[1],))
        sender.start()
        listener.settimeout(_PATIENCE_S)  # a firewall may swallow what it does not like
        stream, _ = listener.accept()
        stream.settimeout(_PATIENCE_S)
        buffer = bytearray(_CHUNK)
        began_s = time.perf_counter()
        with stream:
            while (stop_s := time.perf_counter()) - began_s < _PROBE_S:
                received += stream.recv_into(buffer)
        sender.join()
    return received * 8 / 1e9 / (stop_s - began_s)


def _send(port: int) -> None:
    chunk = bytes(_CHUNK)
    # The receiver leaves when it has seen enough, or reports what went wrong.
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), _PATIENCE_S) as stream:
        while True:
            stream.sendall(chunk)


def check_loopback(measure: Callable[[], float]) -> Finding:
    """Measure how fast two workers of this machine could talk."""
    try:
        rate_gbps = measure()
    except OSError as error:
        remedy = "bring it up: ip link set lo up"
        return Finding("loopback", "does not work", "bad", f"no TCP stream over 127.0.0.1: {error}", remedy)
    if rate_gbps < _SLOW_GBPS:
        reason = "local workers will wait for each other's gradients"
        return Finding("loopback", f"{rate_gbps:.2f} Gbit/s", "note", reason, "end other programs that keep it busy")
    return Finding("loopback", f"{rate_gbps:.1f} Gbit/s")


def check_files(limit: int) -> Finding:
    """Every worker holds sockets to every other."""
    if limit < _FEW_FILES:
        reason = "Gloo opens sockets to every other worker, for each model"
        return Finding("open files", str(limit), "note", reason, "ulimit -n 4096")
    return Finding("open files", str(limit) if limit < 1 << 40 else "no limit")


def check_slow_start(path: Path) -> Finding:
    """Links rest while a worker computes; then the kernel forgets how fast they are."""
    if path.exists() and path.read_text().strip() != "0":
        reason = "after each computation a link starts slowly again: several round trips until it is as fast as before"
        return Finding("tcp", "slow start after idle", "note", reason, "sysctl -w net.ipv4.tcp_slow_start_after_idle=0")
    return Finding("tcp", "no slow start after idle")


def check_shared_memory(path: Path) -> Finding:
    """Check the place where the processes of a DataLoader hand over batches."""
    if not path.is_dir():
        reason = "a DataLoader with num_workers hands over batches there"
        return Finding("shared memory", "none", "note", reason, "mount a tmpfs on /dev/shm, or use num_workers=0")
    free_mb = shutil.disk_usage(path).free / 1e6
    if free_mb < 128:
        reason = "a DataLoader with num_workers may run out of it"
        return Finding("shared memory", f"{free_mb:.0f} MB", "note", reason, "give the container more (--shm-size)")
    return Finding("shared memory", f"{free_mb:.0f} MB free")


def check_packages(find: Callable[[str], Any]) -> Iterator[Finding]:
    """Check the optional packages."""
    for package, extra, what in (
        ("pyroute2", "lab", "offbeat lab builds no networks"),
        ("matplotlib", "plot", "reports have no plots"),
        ("optuna", "tune", "Credit(trials=...) cannot be tuned"),
        ("sklearn", "examples", "the examples have no data"),
    ):
        if find(package) is None:
            yield Finding(package, "missing", "note", f"without it {what}", f"pip install 'offbeat[{extra}]'")
        else:
            name = "scikit-learn" if package == "sklearn" else package
            yield Finding(package, importlib.metadata.version(name))


def build_one_link() -> None:
    """Build what the lab is made of, and remove it again: a namespace, a veth pair, a token bucket.

    Raises:
        Exception: whatever the kernel refuses.
    """
    from pyroute2 import IPRoute, netns

    from offbeat.lab.namespace import inside

    name = f"offbeat-doctor-{secrets.token_hex(4)}"

    def build() -> None:
        with IPRoute() as kernel:
            kernel.link("add", ifname="a", kind="veth", peer={"ifname": "b"})
            link = kernel.link_lookup(ifname="a")[0]
            kernel.tc("add", "tbf", link, rate=1_000_000, burst=10_000, limit=100_000)
            kernel.link("add", ifname="br0", kind="bridge")

    netns.create(name)
    try:
        inside(name, build)
    finally:
        netns.remove(name)


def check_lab(user: int, build: Callable[[], None]) -> Finding:
    """Check whether `offbeat lab` can build networks here."""
    if user != 0:
        return Finding("lab", "no", "note", f"network namespaces need root, this is user {user}", "run it with sudo")
    try:
        build()
    except ImportError:
        return Finding("lab", "no", "note", "pyroute2 is not installed", "pip install 'offbeat[lab]'")
    except Exception as error:  # whatever the kernel answers is the finding
        reason = f"the kernel refused a part of a network: {error}"
        return Finding("lab", "no", "note", reason, "use a kernel with veth, bridge and sch_tbf")
    return Finding("lab", "namespaces, veth, bridge and tbf work")


def report(found: list[Finding], *, json: bool) -> None:
    """Print findings, as JSON or as a table.

    Raises:
        Exit: with code 1, if one of them is bad.
    """
    if json:
        import msgspec

        typer.echo(msgspec.json.encode([asdict(finding) for finding in found]).decode())
    else:
        _show(found)
    if any(finding.level == "bad" for finding in found):
        raise typer.Exit(1)


def _show(found: list[Finding]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        for finding in found:
            why = f" - {finding.reason}: {finding.remedy}" if finding.reason else ""
            console.print(f"{finding.level:4}  {finding.name}: {finding.value}{why}", markup=False)
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "bad": "[red]bad[/]"}
    for finding in found:
        why = f"{finding.reason}: {finding.remedy}" if finding.remedy else finding.reason
        table.add_row(marks[finding.level], finding.name, Text(finding.value), Text(why))
    console.print(table)
