"""Imported once by the server that the tests' workers are forked from."""

import torch
import torch.nn.parallel

import offbeat.run
import offbeat.serve
from tests import warm

offbeat.serve.prepare_process()
warm.everywhere()
torch.set_num_threads(1)

__all__ = ["offbeat"]
