"""Workload: a small transformer that learns to write like Shakespeare, timed to a loss in bits per character.

Reads tiny_shakespeare.txt from the scenario's data folder, 1.1 million characters, which is
https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt; the last 5 % are held out.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.workloads import race
from offbeat.errors import ScenarioError
from offbeat.lab.recorder import Work

if TYPE_CHECKING:
    from collections.abc import Iterable

FILE = "tiny_shakespeare.txt"
CONTEXT = 64  # characters, T below
WIDTH, HEADS, LAYERS = 64, 4, 2  # D, H
HELD_OUT = 0.05
EVALUATED = 256  # windows of the held-out part


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each behind a norm and beside a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_feed = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        parts = self.attend(self.before_attention(x_BTD)).chunk(3, dim=-1)
        q_BHTK, k_BHTK, v_BHTK = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        x_BTD = x_BTD + self.project(mixed_BHTK.transpose(1, 2).flatten(2))
        return x_BTD + torch.as_tensor(self.feed(self.before_feed(x_BTD)))


class Transformer(nn.Module):
    """A decoder of 113,000 parameters: [B, T] int64 characters to [B, T, V] logits of the next ones."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary)
        for table in (self.letters, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, text_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.letters(text_BT) + self.places(torch.arange(text_BT.shape[1]))
        return torch.as_tensor(self.head(self.last(self.blocks(x_BTD))))


class Chars:
    """The next character of each of 64 in a row."""

    def __init__(self, text: str) -> None:
        vocabulary = sorted(set(text))
        numbers = {letter: number for number, letter in enumerate(vocabulary)}
        codes = torch.tensor([numbers[letter] for letter in text])
        train = codes[: round(len(codes) * (1 - HELD_OUT))]
        self._train, self._held_out = _windows(train), _windows(codes[len(train) :])[:EVALUATED]
        self.samples, self.trusted = len(self._train), 0
        self.note = (
            f"{FILE}: trained on {len(train):,} characters, bits per character of {EVALUATED * CONTEXT:,} others"
        )
        torch.manual_seed(0)
        self.model: nn.Module = Transformer(len(vocabulary))

    def loss(self, model: nn.Module, indices: torch.Tensor) -> torch.Tensor:
        """Cross entropy in nats."""
        return _loss(model, self._train[indices])

    def metric(self, model: nn.Module) -> float:
        """Bits per character of text that was held out."""
        with torch.no_grad():
            return float(_loss(model, self._held_out)) / math.log(2)


def read(folder: str | None) -> str:
    """The text.

    Raises:
        ScenarioError: if it is not there.
    """
    path = Path(folder or ".") / FILE
    try:
        return path.read_text()
    except OSError as error:
        raise ScenarioError(f"Cannot learn from {path}: {error.strerror}. Put {FILE} there (workload.data).") from error


def _windows(codes: torch.Tensor) -> torch.Tensor:
    """Windows [n, T + 1] that overlap by one character: the last of one is the first of the next."""
    return codes.unfold(0, CONTEXT + 1, CONTEXT)


def _loss(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    logits_BTV = model(windows[:, :-1])
    return F.cross_entropy(logits_BTV.flatten(0, 1), windows[:, 1:].flatten())


def main() -> None:
    options = race.options(__doc__, batch=16, every=8)
    options.add_argument("--lr", type=float, default=4e-3)
    asked = options.parse_args()
    torch.set_num_threads(1)
    work = Work.from_environment()

    def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        # Half of the usual momentum: where contributions are applied one by one, their age adds more.
        return torch.optim.Adam(parameters, lr=asked.lr, betas=(0.5, 0.99))

    race.run(Chars(read(work.data)), adam, asked, work)


if __name__ == "__main__":
    main()
