"""Imported once by the server that the tests' workers are forked from."""

import torch
import torch.nn.parallel

import offbeat.cli.shard_main
import offbeat.run.run
from tests import warm

offbeat.cli.shard_main.prepare_process()
warm.everywhere()
torch.set_num_threads(1)

__all__ = ["offbeat"]
