"""The gradient sizes and work of well-known networks, computed from their architecture.

A profile is the list of a network's layers in order of the forward pass: the shapes of each one's parameters, in order
of registration, and its multiply-adds for one sample. Nothing else about a network matters to the links.

* ResNet-50 (He et al., CVPR 2016, table 1, with the stride in the 3x3 convolution as in torchvision), 224x224 images.
* VGG-16 (Simonyan and Zisserman, ICLR 2015, configuration D), 224x224 images.
* A small decoder-only transformer: 6 blocks, width 384, 6 heads, 256 tokens, 8,192 words, tied embeddings.

>>> sum(layer.numel for layer in profile("resnet50"))
25557032
>>> sum(layer.numel for layer in profile("vgg16"))
138357544
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.errors import ScenarioError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """A layer's parameter shapes, and its multiply-adds per sample in the forward pass."""

    name: str
    shapes: tuple[Shape, ...]
    work: float

    @property
    def numel(self) -> int:
        """Number of parameters."""
        return sum(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True)
class TimedLayer:
    """A layer as it is replayed: scaled shapes, and seconds of computation on the reference host."""

    name: str
    shapes: tuple[Shape, ...]
    forward_s: float
    backward_s: float


def profile(name: str) -> list[Layer]:
    """The layers of a named network.

    Raises:
        ScenarioError: if there is no such profile.
    """
    if name not in _PROFILES:
        raise ScenarioError(f"Unknown profile {name!r}. Use one of {', '.join(_PROFILES)} (workload.profile).")
    return _PROFILES[name]()


def timed(name: str, *, scale: float, forward_s: float, backward_s: float) -> list[TimedLayer]:
    """The layers of a named network, scaled, with the times of one step shared out in proportion to their work.

    Args:
        scale: see `scaled`.
        forward_s, backward_s: of one step of all layers.

    Raises:
        ScenarioError: if there is no such profile.
    """
    layers = profile(name)
    total = sum(layer.work for layer in layers)
    return [
        TimedLayer(
            layer.name, scaled(layer.shapes, scale), forward_s * layer.work / total, backward_s * layer.work / total
        )
        for layer in layers
    ]


def size_bytes(layers: list[TimedLayer]) -> int:
    """Bytes of one float32 gradient of all layers."""
    return 4 * sum(math.prod(shape) for layer in layers for shape in layer.shapes)


def scaled(shapes: Sequence[Shape], scale: float) -> tuple[Shape, ...]:
    """Scale shapes in the first dim: matrices stay matrices (what low-rank methods live on), with at least one row."""
    return tuple((max(1, round(shape[0] * scale)), *shape[1:]) if shape else shape for shape in shapes)


def _resnet50() -> list[Layer]:
    layers = [_conv_norm("conv1", 3, 64, 7, 112)]
    inputs = 64
    for stage, (blocks, width, side) in enumerate(((3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7)), start=1):
        for block in range(blocks):
            name = f"layer{stage}_{block}"
            # The first block of stages 2 to 4 halves the image in its 3x3 convolution, after the first 1x1.
            side_in = side * 2 if block == 0 and stage > 1 else side
            layers += [
                _conv_norm(f"{name}_conv1", inputs, width, 1, side_in),
                _conv_norm(f"{name}_conv2", width, width, 3, side),
                _conv_norm(f"{name}_conv3", width, 4 * width, 1, side),
            ]
            if block == 0:
                layers.append(_conv_norm(f"{name}_downsample", inputs, 4 * width, 1, side))
            inputs = 4 * width
    return [*layers, _linear("fc", inputs, 1000)]


def _vgg16() -> list[Layer]:
    layers, inputs = [], 3
    for stage, (convolutions, width, side) in enumerate(
        ((2, 64, 224), (2, 128, 112), (3, 256, 56), (3, 512, 28), (3, 512, 14))
    ):
        for index in range(convolutions):
            work = inputs * width * 9 * side * side
            layers.append(Layer(f"conv{stage}_{index}", ((width, inputs, 3, 3), (width,)), work))
            inputs = width
    return [*layers, _linear("fc0", 512 * 49, 4096), _linear("fc1", 4096, 4096), _linear("fc2", 4096, 1000)]


def _transformer_small() -> list[Layer]:
    width, tokens, words, depth = 384, 256, 8192, 6
    # The output layer has the embedding's matrix, whose gradient is complete when the embedding's backward is.
    layers = [Layer("embedding", ((words, width), (tokens, width)), 2.0 * tokens * width)]
    norm = ((width,), (width,))
    for block in range(depth):
        attention = tokens * width * (4 * width) + 2 * tokens * tokens * width
        shapes = (*norm, (3 * width, width), (3 * width,), (width, width), (width,))
        layers.append(Layer(f"block{block}_attention", shapes, attention))
        shapes = (*norm, (4 * width, width), (4 * width,), (width, 4 * width), (width,))
        layers.append(Layer(f"block{block}_mlp", shapes, 2 * tokens * width * 4 * width))
    return [*layers, Layer("norm", norm, tokens * width), Layer("head", (), tokens * width * words)]


def _conv_norm(name: str, inputs: int, outputs: int, kernel: int, side: int) -> Layer:
    """A convolution without bias and its batch norm, whose output is `side` x `side`."""
    work = inputs * outputs * kernel * kernel * side * side
    return Layer(name, ((outputs, inputs, kernel, kernel), (outputs,), (outputs,)), work)


def _linear(name: str, inputs: int, outputs: int) -> Layer:
    return Layer(name, ((outputs, inputs), (outputs,)), inputs * outputs)


_PROFILES: dict[str, Callable[[], list[Layer]]] = {
    "resnet50": _resnet50,
    "vgg16": _vgg16,
    "transformer-small": _transformer_small,
}
