"""The page's sections on what is sent, and whom to believe: `codec`, `rule`, `reset_toy` and `byzantine_table`."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks import byzantine_jobs, byzantine_table, reset_toy
from offbeat.short_name import short_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Lines = Callable[[list[str], Sequence[Sequence[str]]], str]

CODEC = Path(__file__).parent / "results/codec.json"
CODEC_CUDA = CODEC.with_name("codec_cuda.json")
RULE = Path(__file__).parent / "results/rule.json"


def codecs(lines: Lines) -> str:
    """What encoding takes, and below which speed of the links it pays, on this machine and on a GPU; "" before it was
    measured.
    """
    return "".join(_codecs(lines, path) for path in (CODEC, CODEC_CUDA) if path.exists())


def _codecs(lines: Lines, path: Path) -> str:
    found: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    settings, hardware = found["settings"], found["hardware"]
    return (
        f"\n## {path.stem}\n\nGradients of {settings['model']} in buckets of {settings['bucket_mb']:g} MiB, encoded "
        f"and decoded by one worker of {settings['workers']}. Of what cannot be added each worker receives what all "
        "others send: so many bytes are on a link as in an all-reduce of that size. A codec pays where the links are "
        f"slower than the last column says.\n\n{lines(CODEC_HEADINGS, codec_rows(found))}\n"
        f"`{found['command']}`, {found['date']}, {hardware['cores']} cores, "
        f"{hardware.get('accelerator', hardware['processor'])}, torch {found['versions']['torch']}. "
        f"[Raw records]({path.name}).\n"
    )


CODEC_HEADINGS = ["codec", "GB/s", "bytes sent", "bytes on a link", "pays below, Gbit/s"]


def codec_rows(found: dict[str, Any]) -> list[list[str]]:
    """The rows of its table."""
    return [
        [
            f"`{row['codec']}`",
            f"{row['median']:.2f}" if row["median"] < 100 else f"{row['median']:.0f}",
            f"{row['sent']:.2%}",
            f"{row['on_wire']:.2%}",
            "-" if row["pays_below_gbit_s"] is None else f"{row['pays_below_gbit_s']:.3g}",
        ]
        for row in found["rows"]
    ]


def rules(lines: Lines) -> str:
    """What robust rules take at a server, beside the mean; "" before it was measured."""
    if not RULE.exists():
        return ""
    found: dict[str, Any] = msgspec.json.decode(RULE.read_bytes())
    settings, mean = found["settings"], found["rows"][0]["median"]
    rows = [
        [f"`{row['rule']}`" if row["rule"] else "the mean", f"{row['median']:.2f}", f"{mean / row['median']:.1f}"]
        for row in found["rows"]
    ]
    return (
        f"\n## rule\n\nWhat a shard does with {settings['workers']} contributions of {settings['size_mb']:g} MiB, "
        f"block after block, in GB of contributions a second.\n\n{lines(['rule', 'GB/s', 'time, x the mean'], rows)}\n"
        f"`{found['command']}`, {found['date']}, {found['hardware']['cores']} cores, {found['hardware']['processor']}, "
        f"torch {found['versions']['torch']}. [Raw records](rule.json).\n"
    )


def resets(lines: Lines) -> str:
    """What becomes of what is not sent; "" before it was measured."""
    if not reset_toy.RESULT.exists():
        return ""
    found = reset_toy.read()
    rows = [
        [
            f"1/{ratio}",
            *(
                "diverges" if found.loss(ratio, method) > _DIVERGED else f"{found.loss(ratio, method):.3f}"
                for method in reset_toy.METHODS
            ),
        ]
        for ratio in reset_toy.PLANS
    ]
    told = _told(reset_toy.claims(found), "{:.3f} x")
    return (
        f"\n## reset_toy\n\n{found.workers} workers train a small student for {found.steps} steps, at the same "
        "learning rate with every plan; the loss of the mean of all replicas in the end, by the part of the bytes of "
        f"synchronous SGD that each sends, whose loss is {found.whole.loss:.3f}. Where error feedback lags, error "
        f"reset does not: the claim of CSER.\n\n{told}\n{lines(['bytes', *reset_toy.METHODS], rows)}\n"
        f"`{found.command}`, {found.date}, torch {found.versions['torch']}, means of {len(found.seeds)} seeds. "
        "[Raw records](reset_toy.json).\n"
    )


def attacks(lines: Lines) -> str:
    """What attacks do to rules; "" before it was measured."""
    if not byzantine_table.RESULT.exists():
        return ""
    found = byzantine_table.read()
    of = {(cell.rule, cell.threat): cell.mean for cell in found.cells}
    names = list(byzantine_table.RULES)
    rows = [
        [
            f"{threat.name} ({threat.liars} of 10)" if threat.liars else "none",
            *(f"{of[n, threat.name]:.3f}" for n in names),
        ]
        for threat in byzantine_table.THREATS
    ]
    told = _told(byzantine_table.claims(found), "{:.1f}")
    alone = statistics.fmean(found.server_only)
    return (
        "\n## byzantine_table\n\nTen workers in one process train a perceptron on MNIST, and some of them lie: test "
        f"accuracy in the end, the mean of {len(byzantine_table.SEEDS)} seeds. Trained on the "
        f"{byzantine_table.TRUSTED} trusted samples alone it is {alone:.3f}. Rules that compare workers with each "
        "other bear a minority of liars; those with a reference on trusted samples bear six of ten.\n\n"
        f"{told}\n{lines(['attack', *names], rows)}\n`{found.command}`, {found.date}, torch "
        f"{found.versions['torch']}; {found.note}. [Raw records](byzantine_table.json).\n"
    )


_FALLEN = 0.05  # of the accuracy without a lie


def jobs(lines: Lines) -> str:
    """Write the section on attacks in jobs of real processes; "" before they were measured."""
    if not byzantine_jobs.RESULT.exists():
        return ""
    found, settings = byzantine_jobs.read(), byzantine_jobs.read().settings
    return (
        f"\n## byzantine_jobs\n\nJobs of {settings['workers']} workers, two of which lie, with a server, and a "
        "validator where the rule needs one: each a process of its own. Test accuracy after "
        f"{settings['steps']} steps of each honest worker, one seed. Trained on the {settings['trusted']} trusted "
        f"samples alone it is {found.server_only[0]:.3f}. Liars know their own updates alone; one that repeats its "
        f"first honest gradient pushes {settings['repeats']} of them for each of an honest worker where nobody waits "
        f"for the others. Bold: at least {100 * _FALLEN:g} points below the same rule without a lie.\n\n"
        f"{jobs_table(lines)}\n`{found.command}`, {found.date}, torch {found.versions['torch']}; {found.note}. "
        "[Raw records](byzantine_jobs.json).\n"
    )


def jobs_table(lines: Lines) -> str:
    """The table of rules and lies, as far as it was measured."""
    of = {(cell.rule, cell.threat): cell.mean for cell in byzantine_jobs.read().cells}
    lies = [lie for lie in byzantine_jobs.LIES if any(threat == lie for _, threat in of)]

    def figure(rule: str, lie: str) -> str:
        if (rule, lie) not in of:
            return ""
        text = f"{of[rule, lie]:.3f}"
        return f"**{text}**" if of[rule, lie] <= of[rule, "none"] - _FALLEN else text

    rows = [[_rule_name(rule), *(figure(rule, lie) for lie in lies)] for rule in byzantine_jobs.PLANS]
    return lines(["rule", *lies], rows)


def _rule_name(name: str) -> str:
    """A rule as people write it, without what is its default."""
    plan = byzantine_jobs.PLANS[name]
    rule = "the mean" if plan.judging_rule is None else f"`{short_name(plan.judging_rule)}`"
    return f"{rule}, `{short_name(plan.sync)}`"


_DIVERGED = 100.0


def _told(claims: Sequence[tuple[str, float, bool]], figure: str) -> str:
    return "".join(
        f"* {words}. Measured: **{figure.format(value)}** ({'met' if is_met else 'missed'}).\n"
        for words, value, is_met in claims
    )
