"""Trees as LightGBM writes them: the text of a model that `lightgbm.Booster(model_str=...)` reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np

    from offbeat.groups.feature_bins import FeatureBins
    from offbeat.groups.tree_growing import GrownTree

_DEFAULT_LEFT, _HAS_MISSING = 2, 8  # bits of LightGBM's decision_type


def model_text(
    rounds: Sequence[Sequence[GrownTree]],
    start: np.ndarray,
    bins: FeatureBins,
    rate: float,
    objective: str,
    parameters: Mapping[str, Any],
) -> str:
    """Return a model as text.

    Args:
        rounds: the trees of each, one for each column of scores.
        start: (columns,), the scores at which boosting began, which the first trees take in.
        rate: of learning.
        objective: as LightGBM names it, with its settings.
        parameters: that the text tells.
    """
    columns, features = len(start), len(bins.edges)
    blocks: list[str] = []
    for at, trees in enumerate(rounds):
        for column, tree in enumerate(trees):
            bias, shrinkage = (float(start[column]), 1.0) if at == 0 else (0.0, rate)
            lines = _tree_lines(tree, bins, bias, shrinkage)
            blocks.append("\n".join((f"Tree={len(blocks)}", *_joined(lines), "", "", "")))
    head = {
        "version": "v4",
        "num_class": columns,
        "num_tree_per_iteration": columns,
        "label_index": 0,
        "max_feature_idx": features - 1,
        "objective": objective,
        "feature_names": [f"Column_{at}" for at in range(features)],
        "feature_infos": ["none"] * features,
        "tree_sizes": [len(block) for block in blocks],
    }
    told = "\n".join(f"[{name}: {value}]" for name, value in parameters.items())
    first = "\n".join(("tree", *_joined(head), "", ""))
    return (
        f"{first}{''.join(blocks)}end of trees\n\nparameters:\n{told}\nend of parameters\n\npandas_categorical:null\n"
    )


def _tree_lines(tree: GrownTree, bins: FeatureBins, bias: float, shrinkage: float) -> dict[str, Any]:
    missing = [bins.has_missing[split.feature] for split in tree.splits]
    return {
        "num_leaves": len(tree.values),
        "num_cat": 0,
        "split_feature": [split.feature for split in tree.splits],
        "split_gain": [split.gain for split in tree.splits],
        "threshold": [float(bins.edges[split.feature][split.bin]) for split in tree.splits],
        "decision_type": [
            _DEFAULT_LEFT * split.missing_left + _HAS_MISSING * bool(has)
            for split, has in zip(tree.splits, missing, strict=True)
        ],
        "left_child": [left for left, _ in tree.children],
        "right_child": [right for _, right in tree.children],
        "leaf_value": [value + bias for value in tree.values],
        "leaf_weight": [float(sums[1]) for sums in tree.sums],
        "leaf_count": [int(sums[2]) for sums in tree.sums],
        "internal_value": [split.value + bias for split in tree.splits],
        "internal_weight": [float(split.whole[1]) for split in tree.splits],
        "internal_count": [int(split.whole[2]) for split in tree.splits],
        "is_linear": 0,
        "shrinkage": shrinkage,
    }


def _joined(lines: Mapping[str, Any]) -> Iterable[str]:
    for name, value in lines.items():
        yield f"{name}={' '.join(map(str, value)) if isinstance(value, list) else value}"
