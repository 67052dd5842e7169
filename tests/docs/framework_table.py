"""The table of docs/frameworks.md: what was tried with each framework, from the tests themselves.

    pip install -e ".[frameworks,examples]" && python -m tests.docs.framework_table

runs `tests/integrations` and writes the table, with the versions that were there. A line whose tests did not all pass
says so.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs/frameworks.md"
FOLDER = ROOT / "tests/integrations"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"
_PACKAGES = ("lightning", "accelerate", "transformers", "ray", "tensorboard", "wandb", "mlflow-skinny")
ROWS: dict[str, dict[str, str]] = {
    "Lightning": {
        "test_lightning.test_a_plan_of_all_together_has_the_bits_of_ddp[plain]": "DDP's bits, means, validation",
        "test_lightning.test_a_plan_of_all_together_has_the_bits_of_ddp[accumulate]": "gradient accumulation",
        "test_lightning.test_a_plan_of_all_together_has_the_bits_of_ddp[clip]": "clipping",
        "test_lightning.test_a_plan_of_all_together_has_the_bits_of_ddp[bf16]": "mixed precision (bf16)",
        "test_lightning.test_any_plan_trains_and_all_evaluate_the_same": "a server, ASP, LocalSGD, ErrorReset, Prophet",
        "test_lightning.test_a_resumed_run_is_the_uninterrupted_one": "resuming, with what server and codec keep",
        "test_lightning.test_all_stop_early_together_and_the_best_is_kept": "early stopping, the best checkpoint",
        "test_lightning.test_lightnings_loggers_are_told_how_the_workers_train": "its loggers",
        "test_lightning.test_what_a_plan_cannot_bear_is_refused": "refused: several optimizers, BatchTuning, a mean in "
        "each step under ASP",
    },
    "Accelerate": {
        "test_accelerate.test_a_plan_of_all_together_has_the_bits_of_ddp[plain]": "DDP's bits, schedules",
        "test_accelerate.test_a_plan_of_all_together_has_the_bits_of_ddp[accumulate]": "gradient accumulation",
        "test_accelerate.test_a_plan_of_all_together_has_the_bits_of_ddp[clip]": "clipping",
        "test_accelerate.test_a_plan_of_all_together_has_the_bits_of_ddp[bf16]": "mixed precision (bf16)",
        "test_accelerate.test_a_resumed_run_is_the_uninterrupted_one": "save_state and load_state, with a server's and "
        "a codec's",
        "test_accelerate.test_what_a_plan_cannot_bear_is_refused": "refused: a model without its optimizer, a gather "
        "in each step under ASP",
    },
    "the Trainer": {
        "test_accelerate.test_the_trainer_has_the_bits_of_ddp[plain]": "DDP's bits, evaluation",
        "test_accelerate.test_the_trainer_has_the_bits_of_ddp[accumulate]": "gradient accumulation",
        "test_accelerate.test_the_trainer_has_the_bits_of_ddp[clip]": "clipping",
        "test_accelerate.test_the_trainer_has_the_bits_of_ddp[bf16]": "mixed precision (bf16)",
        "test_accelerate.test_the_trainer_resumes": "resuming, with what server and codec keep",
        "test_accelerate.test_the_best_model_stays_loaded_though_a_server_has_another": "the best model at the end",
        "test_accelerate.test_the_trainer_logs_how_the_workers_train": "its logs",
    },
    "Ray Train": {
        "test_examples.test_ray_starts_a_killed_worker_again": "`offbeat.init()` in the loop, a worker that is killed, "
        "resuming from `Checkpoints`",
    },
    "Ray": {
        "test_ray_objects.test_tasks_on_all_nodes_find_their_store": "a store of objects on each node",
        "test_ray_transport.test_a_returned_tensor_reaches_an_actor_on_another_node": "references to tensors (RDT)",
        "test_ray_collective.test_each_collective_has_its_values": "`ray.util.collective`",
    },
    "trackers": {
        "test_trackers.test_tensorboard_shows_a_run": "TensorBoard",
        "test_trackers.test_wandb_shows_a_run": "Weights & Biases, offline",
        "test_trackers.test_mlflow_shows_a_run": "MLflow, a store of files",
    },
}
"""By framework, the tests (all of a name without brackets), and what they try."""


def outcomes() -> dict[str, list[str]]:
    """Run the tests; by name without and with brackets, how each ended."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = ["-m", "pytest", "-q", "-m", "", "--timeout", "180", f"--junitxml={report}", str(FOLDER)]
        subprocess.run([sys.executable, *command], cwd=ROOT, check=False)
        cases = list(ET.parse(report).iter("testcase"))
    found = defaultdict(list)
    for case in cases:
        name = f"{case.attrib['classname'].rpartition('.')[2]}.{case.attrib['name']}"
        ended = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        for key in {name, name.partition("[")[0]}:
            found[key].append(ended)
    return found


def table(ended: dict[str, list[str]]) -> str:
    """The lines of the page."""
    versions = []
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    lines = [f"With {', '.join(versions)}:", "", "| | tried, and works |", "| --- | --- |"]
    for framework, rows in ROWS.items():
        works = [words for name, words in rows.items() if set(ended.get(name, ["missing"])) == {"passed"}]
        fails = [words for name, words in rows.items() if words not in works]
        told = "; ".join(works) + (f". **Did not pass here: {'; '.join(fails)}**" if fails else "")
        lines.append(f"| {framework} | {told} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}{table(outcomes())}{END}{after}")


if __name__ == "__main__":
    main()
