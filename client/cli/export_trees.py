"""Boosted trees as a model file of XGBoost, in JSON (its documentation: "XGBoost JSON Schema").

A row goes left there if its value is below the condition, here if it is at most the threshold: the
condition is the next larger number. Nodes that do not split are left out. Temperature, unit and
constant answer are in the leaves, so that ``Booster.predict`` gives the answers of ``predict``.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.tasks.problems import Classes, Labels, Numbers, Problem
from coterie.tasks.trees import Trees

Array = NDArray[Any]
NO_PARENT = 2**31 - 1
VERSION = 2, 1, 0
"""XGBoost's version whose fields these are; later ones read them."""


def xgboost_json(model: Trees, problem: Problem, temperature: float) -> bytes:
    arrays = {name: one.detach().cpu().numpy() for name, one in model.state_dict().items()}
    leaf, base = (arrays[name].astype(np.float64) for name in ("leaf", "base"))
    outputs, columns = len(base), len(arrays["gain"])
    scale = problem.scale if isinstance(problem, Numbers) else ()
    means, widths = np.array(scale or [(0.0, temperature**-1)] * outputs).T
    leaf *= widths[:, None]
    leaf[0] += (base * widths + means)[:, None]
    feature, threshold, missing = (arrays[n] for n in ("feature", "threshold", "missing_left"))
    places = [(t, k) for t in range(len(leaf)) for k in range(outputs)]
    trees = [
        _tree(number, feature[at], threshold[at], missing[at], leaf[at], columns)
        for number, at in enumerate(places)
    ]
    several = isinstance(problem, Classes) and outputs > 1
    learner = {
        "attributes": {},
        "feature_names": [],
        "feature_types": [],
        "learner_model_param": {
            "base_score": "5E-1" if isinstance(problem, Classes | Labels) else "0E0",
            "boost_from_average": "0",
            "num_class": str(outputs * several),
            "num_feature": str(columns),
            "num_target": str(1 if several else outputs),
        },
        "objective": _objective(problem, outputs, several=several),
        "gradient_booster": {
            "name": "gbtree",
            "model": {
                "gbtree_model_param": {
                    "num_parallel_tree": "1",
                    "num_trees": str(len(trees)),
                    "size_leaf_vector": "0",
                },
                "iteration_indptr": list(range(0, len(trees) + 1, outputs)),
                "tree_info": list(range(outputs)) * len(leaf),
                "trees": trees,
            },
        },
    }
    return json.dumps({"learner": learner, "version": VERSION}).encode()


def _objective(problem: Problem, outputs: int, *, several: bool) -> dict[str, Any]:
    if several:
        parameters = {"softmax_multiclass_param": {"num_class": str(outputs)}}
        return {"name": "multi:softprob", **parameters}
    chances = isinstance(problem, Classes | Labels)
    name = "binary:logistic" if chances else "reg:squarederror"
    return {"name": name, "reg_loss_param": {"scale_pos_weight": "1"}}


def _tree(
    number: int, feature: Array, threshold: Array, missing_left: Array, leaf: Array, columns: int
) -> dict[str, Any]:
    """Return a tree of T nodes as XGBoost's arrays (T,), its root first."""
    inner, todo = len(feature), [(0, NO_PARENT)]
    above = np.nextafter(threshold, np.float32(np.inf), dtype=np.float32)
    above = np.minimum(above, np.finfo(np.float32).max)
    lists: dict[str, list[Any]] = {
        name: []
        for name in (
            *("left_children", "right_children", "parents"),
            *("split_indices", "split_conditions", "default_left"),
        )
    }
    for at, (node, parent) in enumerate(todo):  # which grows
        while node < inner and feature[node] < 0:
            node = 2 * node + 1
        if node < inner:
            nodes = len(todo), len(todo) + 1
            todo += [(2 * node + 1, at), (2 * node + 2, at)]
            split = int(feature[node]), float(above[node]), int(missing_left[node])
        else:
            nodes, split = (-1, -1), (0, float(np.float32(leaf[node - inner])), 0)
        for name, value in zip(lists, (*nodes, parent, *split), strict=True):
            lists[name].append(value)
    size = len(todo)
    return {
        "id": number,
        "tree_param": {
            "num_deleted": "0",
            "num_feature": str(columns),
            "num_nodes": str(size),
            "size_leaf_vector": "1",
        },
        **lists,
        **{name: [0.0] * size for name in ("base_weights", "loss_changes", "sum_hessian")},
        "split_type": [0] * size,
        **{f"categories{of}": [] for of in ("", "_nodes", "_segments", "_sizes")},
    }
