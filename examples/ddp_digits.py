"""Train with torch's own DistributedDataParallel, along offbeat's paths: nothing else of the script is offbeat's.

torchrun --nproc-per-node 2 examples/ddp_digits.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits import accuracy, cnn, digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    dist.init_process_group("offbeat")  # was: "gloo"
    torch.manual_seed(0)
    train, test = digits()
    model = DistributedDataParallel(cnn())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: {accuracy(model.module, test):.1%} of the held-out digits are right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
