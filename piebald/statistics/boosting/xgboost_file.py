"""A forest as the JSON file of xgboost's own models, which any program that has xgboost reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from piebald.statistics.boosting.forest import LEAF, Floats32
from piebald.statistics.boosting.growth import OBJECTIVES
from piebald.statistics.boosting.rounds import Boosted
from piebald.statistics.boosting.targets import Target

_VERSION = [3, 1, 0]  # the first whose models have a start for each class
_ROOT = 2147483647  # what stands for the parent of a root


def model_of(boosted: Boosted, target: Target, columns: Sequence[str]) -> dict[str, Any]:
    """The model as xgboost's JSON values; what xgboost calls cover is a node's training rows here."""
    objective: dict[str, Any] = {"name": OBJECTIVES[target.objective]}
    if target.objective == "multiclass":
        objective["softmax_multiclass_param"] = {"num_class": str(target.classes)}
    else:
        objective["reg_loss_param"] = {"scale_pos_weight": "1"}
    trees = [_tree(table, number, len(columns)) for number, table in enumerate(boosted.forest.table)]
    base = ",".join(repr(one) for one in target.base_score(boosted.start.margins))
    model = {
        "gbtree_model_param": {"num_parallel_tree": "1", "num_trees": str(len(trees))},
        "cats": {"enc": [], "feature_segments": [], "sorted_idx": []},
        "iteration_indptr": [0, *boosted.ends],
        "tree_info": [number % target.groups for number in range(len(trees))],
        "trees": trees,
    }
    return {
        "learner": {
            "attributes": {},
            "feature_names": list(columns),
            "feature_types": ["float"] * len(columns),
            "gradient_booster": {"model": model, "name": "gbtree"},
            "learner_model_param": {
                "base_score": f"[{base}]",
                "boost_from_average": "0",
                "num_class": str(target.classes if target.objective == "multiclass" else 0),
                "num_feature": str(len(columns)),
                "num_target": "1",
            },
            "objective": objective,
        },
        "version": _VERSION,
    }


def _tree(table: Floats32, number: int, columns: int) -> dict[str, Any]:
    order, queue = [], [0]  # nodes in the order of their depth, as xgboost numbers them
    while queue:
        place = queue.pop(0)
        order.append(place)
        if table[place, 0] >= 0:
            queue += [2 * place + 1, 2 * place + 2]
    named = {place: node for node, place in enumerate(order)}
    rows = table[order]
    split = [int(one) for one in rows[:, 0]]
    inner = [one > LEAF for one in split]
    numbers, nothing = [float(one) for one in rows[:, 1]], [0] * len(order)
    return {
        "base_weights": [0.0 if is_inner else one for one, is_inner in zip(numbers, inner, strict=True)],
        "categories": [],
        "categories_nodes": [],
        "categories_segments": [],
        "categories_sizes": [],
        "default_left": [one & 1 if is_inner else 0 for one, is_inner in zip(split, inner, strict=True)],
        "id": number,
        "left_children": [named[2 * p + 1] if is_inner else -1 for p, is_inner in zip(order, inner, strict=True)],
        "loss_changes": [float(one) for one in rows[:, 2]],
        "parents": [named[(place - 1) // 2] if place else _ROOT for place in order],
        "right_children": [named[2 * p + 2] if is_inner else -1 for p, is_inner in zip(order, inner, strict=True)],
        "split_conditions": numbers,
        "split_indices": [one >> 1 if is_inner else 0 for one, is_inner in zip(split, inner, strict=True)],
        "split_type": nothing,
        "sum_hessian": [float(one) for one in rows[:, 3]],
        "tree_param": {
            "num_deleted": "0",
            "num_feature": str(columns),
            "num_nodes": str(len(order)),
            "size_leaf_vector": "1",
        },
    }
