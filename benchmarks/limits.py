"""Write the limit of each row anew into the result files, and draw their pictures: `python -m benchmarks.limits`.

What was measured stays as it is: a limit follows from the raw records of a file and from its scenario.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.page import RESULTS, measured
from offbeat.lab import lower_bounds, plots, results
from offbeat.lab.jobs import jobs
from offbeat.scenario import Scenario

SCENARIOS = Path(__file__).parent / "scenarios"


def main() -> None:
    for name in measured():
        path = RESULTS / f"{name}.json"
        report = results.read(path)
        report = lower_bounds.again(report, jobs(Scenario.from_toml(report.scenario), SCENARIOS))
        results.write(report, path)
        plots.draw(report, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
