"""Learn handwritten digits with workers that nobody waits for: the server adds the first half of the gradients.

python examples/async_sgd.py

Starts two stores, as on two machines: the server's and the workers'. Of the gradients that workers have put, or will
put, `reduce` adds the first ones; the others are in a later sum. See docs/objects.md.
"""

import argparse
import multiprocessing
import secrets

import torch
import torch.nn.functional as F
from digits import digits
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from weight_sync import start_store

from offbeat.objects.client import connect
from offbeat.wire.credentials import Token

STOP = -1


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def work(store: str, token: str, worker: int) -> None:
    """Make gradients of the weights that the server says."""
    torch.set_num_threads(1)
    model, (train, _) = net(), digits()
    images, labels = train.tensors
    generator = torch.Generator().manual_seed(worker)
    with connect(store, credentials=Token(token.encode())) as client:
        update, count = 0, 0
        while update != STOP:
            vector_to_parameters(client.get(f"weights/{update}", timeout=300), model.parameters())
            batch = torch.randint(0, len(labels), (32,), generator=generator)
            model.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
            client.put(f"gradient/{worker}/{count}", parameters_to_vector(gradients))
            update = int(client.get(f"next/{worker}/{count}", timeout=300).item())
            count += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--workers", type=int, default=4)
    asked, token = parser.parse_args(), secrets.token_hex(32)
    here, mine, directory = start_store(token, "--directory")
    there, theirs, _ = start_store(token, "--directories", directory)
    spawned = multiprocessing.get_context("spawn")
    workers = [spawned.Process(target=work, args=(theirs, token, worker)) for worker in range(asked.workers)]
    for process in workers:
        process.start()

    model, (_, test) = net(), digits()
    weights = parameters_to_vector(model.parameters()).detach()
    optimizer = torch.optim.Adam([weights], lr=5e-3)
    half = max(1, asked.workers // 2)
    with connect(mine, credentials=Token(token.encode())) as client:
        client.put("weights/0", weights)
        pending = {f"gradient/{worker}/0": (worker, 0) for worker in range(asked.workers)}
        for update in range(1, 1 + asked.updates):
            client.reduce(f"sum/{update}", list(pending), op="mean", num_objects=half)
            weights.grad = client.get(f"sum/{update}", timeout=300)
            optimizer.step()
            client.put(f"weights/{update}", weights)
            for name in client.reduced_set(f"sum/{update}"):  # these workers go on with the new weights
                worker, count = pending.pop(name)
                client.put(f"next/{worker}/{count}", torch.tensor([update]))
                pending[f"gradient/{worker}/{count + 1}"] = worker, count + 1
        for worker, count in pending.values():
            client.put(f"next/{worker}/{count}", torch.tensor([STOP]))
        for process in workers:
            process.join()
    vector_to_parameters(weights, model.parameters())
    images, labels = test.tensors
    right = (model(images).argmax(1) == labels).float().mean().item()
    print(f"{asked.updates} updates of {half} gradients each: {right:.1%} of the held-out digits are right")
    for store in (there, here):
        store.terminate()
        store.wait()


if __name__ == "__main__":
    main()
