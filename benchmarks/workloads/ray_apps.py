"""The applications of benchmarks/workloads/object_apps.py on plain Ray: actors, and a driver on the first host."""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING, Any

import ray
import torch

from benchmarks.workloads import object_apps as apps
from benchmarks.workloads.digit_models import Learner, Voter, accuracy, query
from offbeat.lab.object_load import say
from offbeat.lab.ray_cluster import resource

if TYPE_CHECKING:
    import numpy as np


class RayWorker:
    """An actor that makes gradients."""

    def __init__(self, rank: int) -> None:
        _quiet()
        self._learner = Learner(rank)

    def gradient(self, weights: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The gradient of the next batch."""
        array: np.ndarray[Any, Any] = self._learner.gradient(torch.from_numpy(weights)).numpy()
        return array


class RayVoter:
    """An actor that answers by one model."""

    def __init__(self, rank: int) -> None:
        _quiet()
        self._voter = Voter(rank)

    def answer(self, images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The answer of this model."""
        array: np.ndarray[Any, Any] = self._voter.answer(torch.from_numpy(images)).numpy()
        return array


class RayReader:
    """An actor that loads versions."""

    def __init__(self, rank: int) -> None:
        _quiet()
        self._weights = torch.zeros(apps.NUMEL, dtype=torch.bfloat16)

    def load(self, words: np.ndarray[Any, Any]) -> float:
        """Load a version; the moment at which it is there."""
        self._weights.view(torch.int16).copy_(torch.from_numpy(words))
        return time.monotonic()

    def total(self) -> int:
        """By which versions are compared."""
        return apps.total_of(self._weights)


def run(names: list[str], world: int) -> None:
    """Do all that is asked for."""
    _quiet()
    for name in names:
        if name == "sgd":
            _learn(world)
        elif name == "ensemble":
            _ask(world)
        else:
            _publish(world, name)


def _actors(kind: type, ranks: range | list[int]) -> list[Any]:
    remote = ray.remote(num_cpus=0)(kind)
    actors = [remote.options(resources={resource(rank): 1}).remote(rank) for rank in ranks]
    ray.get([one.__ray_ready__.remote() for one in actors])
    return actors


def _learn(world: int) -> None:
    learner, workers = Learner(0), _actors(RayWorker, range(1, world))
    weights = learner.weights()
    optimizer = learner.optimizer(weights)
    ref = ray.put(weights.numpy())
    pending = {one.gradient.remote(ref): one for one in workers}
    for number in range(1, 1 + apps.UPDATES):
        began_s = time.monotonic()
        ready, _ = ray.wait(list(pending), num_returns=apps.FIRST)
        weights.grad = torch.from_numpy(sum(ray.get(ready))) / apps.FIRST
        optimizer.step()
        ref = ray.put(weights.numpy())
        for gradient in ready:
            one = pending.pop(gradient)
            pending[one.gradient.remote(ref)] = one
        del ready, gradient
        say(app="sgd", number=number, took_s=time.monotonic() - began_s)
    say(app="sgd", loss=learner.loss(weights))
    _kill(workers)


def _ask(world: int) -> None:
    voters, right = _actors(RayVoter, range(1, world)), []
    for number in range(1 + apps.QUERIES):
        images, labels = query(number)
        began_s = time.monotonic()
        ref = ray.put(images.numpy())
        answers = ray.get([one.answer.remote(ref) for one in voters])
        mean = torch.from_numpy(sum(answers) / len(answers))
        if number:
            say(app="ensemble", number=number, took_s=time.monotonic() - began_s)
        right.append(accuracy(mean, labels))
    say(app="ensemble", accuracy=sum(right) / len(right))
    _kill(voters)


def _publish(world: int, name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(apps.NUMEL, generator=generator).bfloat16()
    readers = _actors(RayReader, range(1, world))
    spare = _actors(RayReader, [world - 1]) if name == "readers" else []
    for number in range(1 + apps.VERSIONS):
        if number:
            apps.change_(weights, apps.SHARE if name == "deltas" else 1.0, generator)
        began_s, before = time.monotonic(), apps.sent_bytes()
        ref = ray.put(weights.view(torch.int16).numpy())
        loads = [one.load.remote(ref) for one in readers]
        if name == "readers" and number == apps.KILLED_IN:
            time.sleep(apps.KILLED_AFTER_S)
            ray.kill(readers[-1])
            readers[-1] = spare[0]
            loads[-1] = spare[0].load.remote(ref)
        ended_s = max(ray.get(loads))
        assert set(ray.get([one.total.remote() for one in readers])) == {apps.total_of(weights)}, "other bytes"
        if number:
            say(app=name, number=number, took_s=ended_s - began_s, sent_bytes=apps.sent_bytes() - before)
    _kill(readers)


def _kill(actors: list[Any]) -> None:
    for one in actors:
        ray.kill(one)


def _quiet() -> None:
    warnings.simplefilter("ignore")  # arrays that Ray maps are read-only
    torch.set_num_threads(1)
