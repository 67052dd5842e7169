"""What wrote these files: two workers train for 8 steps, change the policy, and make a checkpoint after the sixth.

Args (of its command line):
    where the checkpoint goes; "wait" behind it: train 6 steps, say so on standard output, and do nothing more.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat


def main(folder: str, waits: bool) -> None:
    with offbeat.init() as run:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        data = DataLoader(TensorDataset(torch.randn(96, 3)), batch_size=4, shuffle=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        replica, optimizer, loader = run.prepare(model, optimizer, data)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        checkpoints = offbeat.Checkpoints(run, folder, model=replica, optimizer=optimizer, schedule=schedule)
        for (x,) in loader:
            loss = replica(x).square().mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            run.log(loss=loss.item())
            if run.step == 3:
                served = run.plan.fabric.offers.served
                run.swap(sync=offbeat.SSP(bound=1) if served else offbeat.LocalSGD(every=2))
            if run.step == 6 and waits:
                run.settle()
                sys.stdout.write(f"{torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()}\n")
                sys.stdout.flush()
                time.sleep(3600)
            if run.step == 6:
                checkpoints.save()
            if run.step == 8:
                break


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] == ["wait"])
