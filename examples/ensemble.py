"""Have several models answer each query, and get the mean of their answers.

python examples/ensemble.py

Starts a store for the one who asks, and one for the models, as on two machines. A query is put once, and all models get
it; their answers are averaged on the way back. See docs/objects.md.
"""

import argparse
import multiprocessing
import secrets

import torch
import torch.nn.functional as F
from digits import digits
from torch import nn
from weight_sync import start_store

from offbeat.objects.client import connect
from offbeat.wire.credentials import Token


def trained(seed: int) -> nn.Module:
    """A small model, trained on a sample of its own."""
    torch.manual_seed(seed)
    images, labels = digits()[0].tensors
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(100):
        batch = torch.randint(0, len(labels), (32,))
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    return model


def serve(store: str, token: str, number: int, queries: int) -> None:
    """Answer all queries by one model."""
    torch.set_num_threads(1)
    model = trained(number)
    with connect(store, credentials=Token(token.encode())) as client, torch.no_grad():
        for query in range(queries):
            images = client.get(f"query/{query}", timeout=300)
            client.put(f"answer/{query}/{number}", model(images).softmax(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", type=int, default=4)
    parser.add_argument("--queries", type=int, default=10)
    asked, token = parser.parse_args(), secrets.token_hex(32)
    here, mine, directory = start_store(token, "--directory")
    there, theirs, _ = start_store(token, "--directories", directory)
    spawned = multiprocessing.get_context("spawn")
    models = [
        spawned.Process(target=serve, args=(theirs, token, number, asked.queries)) for number in range(asked.models)
    ]
    for model in models:
        model.start()
    images, labels = digits()[1].tensors
    with connect(mine, credentials=Token(token.encode())) as client:
        for query in range(asked.queries):
            noisy = images + 0.2 * torch.randn_like(images)
            client.put(f"query/{query}", noisy)
            answers = [f"answer/{query}/{number}" for number in range(asked.models)]
            client.reduce(f"mean/{query}", answers, op="mean")
            mean = client.get(f"mean/{query}", timeout=300)
            alone = client.get(answers[0])
            shares = [(one.argmax(1) == labels).float().mean().item() for one in (mean, alone)]
            print(f"query {query}: {shares[0]:.1%} are right, {shares[1]:.1%} by the first model alone")
            for name in (f"query/{query}", *answers, f"mean/{query}"):
                client.delete(name)
        for model in models:
            model.join()
    for store in (there, here):
        store.terminate()
        store.wait()


if __name__ == "__main__":
    main()
