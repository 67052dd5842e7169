"""Profiles: the sizes and the work are those of the published networks."""

from __future__ import annotations

import math

import pytest
import torch

from offbeat.errors import ScenarioError
from offbeat.model_profiles import profile, size_bytes
from offbeat.scenario import LayerTable, Replay


@pytest.mark.parametrize(
    ("name", "parameters", "tensors", "work"),
    [
        # He et al. 2016: 25.6 M, 3.8 (stride in the 1x1) to 4.1 G multiply-adds (stride in the 3x3, as here).
        ("resnet50", 25_557_032, 161, 4.09e9),
        # Simonyan and Zisserman 2015: 138 M, 15.5 G multiply-adds.
        ("vgg16", 138_357_544, 32, 15.47e9),
    ],
)
def test_published_sizes_and_work(name: str, parameters: int, tensors: int, work: float) -> None:
    layers = profile(name)
    assert sum(layer.numel for layer in layers) == parameters
    assert sum(len(layer.shapes) for layer in layers) == tensors
    assert sum(layer.work for layer in layers) == pytest.approx(work, rel=0.01)


def test_the_transformer_is_that_of_torch() -> None:
    """Shape for shape: torch's own encoder layers (a decoder without memory is the same), embeddings and last norm."""
    block = torch.nn.TransformerEncoderLayer(384, 6, 4 * 384, norm_first=True, device="meta")
    expected = sorted(tuple(p.shape) for p in block.parameters()) * 6
    expected += [(8192, 384), (256, 384), (384,), (384,)]
    found = [shape for layer in profile("transformer-small") for shape in layer.shapes]
    assert sorted(found) == sorted(expected)


def test_gradients_come_in_the_order_of_the_layers() -> None:
    names = [layer.name for layer in profile("resnet50")]
    assert names[0] == "conv1"
    assert names[-1] == "fc"
    assert names.index("layer1_0_conv1") < names.index("layer4_2_conv3")
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", ["resnet50", "vgg16", "transformer-small"])
@pytest.mark.parametrize("scale", [1.0, 0.06, 0.01])
def test_scaled_sizes_and_times(name: str, scale: float) -> None:
    replay = Replay(profile=name, scale=scale, forward_s=0.1, backward_s=0.3)  # type: ignore[arg-type]
    layers = replay.layers()
    assert sum(layer.forward_s for layer in layers) == pytest.approx(0.1)
    assert sum(layer.backward_s for layer in layers) == pytest.approx(0.3)
    full = 4 * sum(layer.numel for layer in profile(name))
    assert size_bytes(layers) == (full if scale == 1 else pytest.approx(full * scale, rel=0.05))
    for layer, original in zip(layers, profile(name), strict=True):
        assert [len(shape) for shape in layer.shapes] == [len(shape) for shape in original.shapes]
        assert all(math.prod(shape) > 0 for shape in layer.shapes)


def test_a_table_keeps_its_own_times() -> None:
    table = [
        LayerTable(name="a", shapes=[[100, 3], [100]], backward_s=0.01),
        LayerTable(name="b", shapes=[[7]], backward_s=0.02, forward_s=0.03),
    ]
    layers = Replay(layer=table, scale=0.5, forward_s=9, backward_s=9).layers()
    assert [(layer.name, layer.shapes) for layer in layers] == [("a", ((50, 3), (50,))), ("b", ((4,),))]
    assert [(layer.forward_s, layer.backward_s) for layer in layers] == [(0.0, 0.01), (0.03, 0.02)]


def test_an_unknown_profile_is_refused() -> None:
    with pytest.raises(
        ScenarioError, match=r"Unknown profile 'resnet51'\. Use one of .*resnet50.*\(workload\.profile\)"
    ):
        profile("resnet51")
