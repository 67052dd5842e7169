"""A line is learnt: a workload that takes milliseconds."""

import torch

from benchmarks.workloads import race
from offbeat.lab.recorder import Work


class Line:
    """What `race.run` trains."""

    def __init__(self) -> None:
        self.x = torch.linspace(-1, 1, 64)[:, None]
        self.y = 2 * self.x + 1
        self.model = torch.nn.Linear(1, 1)
        self.samples, self.note = 64, "a line"

    def loss(self, model: torch.nn.Module, indices: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(self.x[indices]), self.y[indices])

    def metric(self, model: torch.nn.Module) -> float:
        return float(torch.nn.functional.mse_loss(model(self.x), self.y))


asked = race.options(__doc__, batch=8, every=4).parse_args()
torch.manual_seed(0)
race.run(Line(), lambda parameters: torch.optim.SGD(parameters, lr=0.1), asked, Work.from_environment())
