"""Boosted trees in groups: what a group's trees are worth beside those of all its rows together.

    python -m benchmarks.engine.trees [--seeds 3]

Six silos with 300 rows each, of two hidden kinds: the same table, but labels mean the opposite. The
groups come from three rounds of HCCT on a logistic regression; inside each runs Flower's
``FedXgbBagging``. Needs boosting().
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedXgbBagging
from numpy.typing import NDArray
from sklearn.datasets import make_classification
from sklearn.metrics import roc_auc_score

from benchmarks.kit import Entry, Store, page, read, table
from coterie.engine.inprocess import InProcessGrid
from coterie.strategies import HCCT, FirstStage, PerGroup, RunResult

SILOS, ROWS, TEST_ROWS, COLUMNS = 6, 300, 1000, 20
ROUNDS, LINEAR_ROUNDS, LINEAR_STEPS = 30, 3, 20
PARAMS = {
    "objective": "binary:logistic",
    "eta": 0.1,
    "max_depth": 3,
    "eval_metric": "auc",
    "nthread": 1,
    "tree_method": "hist",
}
NO_TREES = ArrayRecord([np.array([], np.uint8)])
Rows = tuple[NDArray[np.float32], NDArray[np.int64]]


def boosting() -> Any:
    """Return xgboost, which only this benchmark needs."""
    return import_module("xgboost")


def rows_of(silo: int, seed: int) -> Rows:
    """Return a silo's rows; those of ``SILOS`` and ``SILOS + 1`` are for testing, by kind."""
    x, y = make_classification(
        SILOS * ROWS + TEST_ROWS,
        COLUMNS,
        n_informative=8,
        n_redundant=2,
        flip_y=0.02,
        class_sep=2.0,
        random_state=seed,
    )
    first, last = (silo * ROWS, (silo + 1) * ROWS) if silo < SILOS else (SILOS * ROWS, len(x))
    labels = y[first:last].astype(np.int64)
    return x[first:last].astype(np.float32), 1 - labels if silo % 2 else labels


# ---------------------------------------------------------------- the ClientApp

app = ClientApp()


def _mine(context: Context) -> Rows:
    own = context.node_config
    return rows_of(int(own["partition-id"]), int(own["seed"]))


def _reply(message: Message, metrics: Mapping[str, float], **records: ArrayRecord) -> Message:
    content = RecordDict({**records, "metrics": MetricRecord(dict(metrics))})
    return Message(content, reply_to=message)


@app.train()
def boost(message: Message, context: Context) -> Message:
    """Add one tree to the model, and send that tree; in round 1 begin with one."""
    x, y = _mine(context)
    data = boosting().DMatrix(x, y)
    if message.content["config"]["server-round"] == 1:
        trees = boosting().train(PARAMS, data, num_boost_round=1)
    else:
        trees = _loaded(message)
        trees.update(data, trees.num_boosted_rounds())
        trees = trees[trees.num_boosted_rounds() - 1 :]
    sent = ArrayRecord([np.frombuffer(trees.save_raw("json"), np.uint8)])
    return _reply(message, {"num-examples": len(y)}, arrays=sent)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Measure the model on the silo's kind of rows."""
    x, y = rows_of(
        SILOS + int(context.node_config["partition-id"]) % 2, int(context.node_config["seed"])
    )
    scores = _loaded(message).predict(boosting().DMatrix(x))
    return _reply(message, {"auc": float(roc_auc_score(y, scores)), "num-examples": len(y)})


def _loaded(message: Message) -> Any:
    trees = boosting().Booster(params=PARAMS)
    trees.load_model(bytearray(message.content.array_records["arrays"]["0"].numpy().tobytes()))
    return trees


@app.train("linear")
def regress(message: Message, context: Context) -> Message:
    """Make some steps of a logistic regression."""
    x, y = _mine(context)
    weights = message.content.array_records["arrays"]["weights"].numpy().astype(np.float64)
    for _ in range(LINEAR_STEPS):
        wrong = 1 / (1 + np.exp(-x @ weights)) - y
        weights -= 0.1 * x.T @ wrong / len(y)
    sent = ArrayRecord({"weights": Array(weights.astype(np.float32))})
    return _reply(message, {"num-examples": len(y)}, arrays=sent)


@app.evaluate("linear")
def score(message: Message, context: Context) -> Message:
    """Measure a logistic regression on the silo's own rows."""
    x, y = _mine(context)
    right = (x @ message.content.array_records["arrays"]["weights"].numpy() > 0) == y
    return _reply(message, {"accuracy": float(right.mean()), "num-examples": len(y)})


# ---------------------------------------------------------------- measurements


def boosted(groups: Any, seed: int, *, rounds: int = ROUNDS, silos: int = SILOS) -> RunResult:
    """Run ``FedXgbBagging`` inside these groups, or inside those of a first stage."""
    nodes = [{"partition-id": silo, "seed": seed} for silo in range(silos)]
    strategy = PerGroup(
        groups,
        lambda group: FedXgbBagging(min_train_nodes=1, min_available_nodes=1),
        metric_names={"auc": "accuracy"},
    )
    grid = InProcessGrid(app, nodes)
    return strategy.start(grid, NO_TREES, num_rounds=rounds)


def first_stage() -> FirstStage:
    """Return HCCT on the logistic regression."""
    zero = ArrayRecord({"weights": Array(np.zeros(COLUMNS, np.float32))})
    return FirstStage(HCCT(), zero, num_rounds=LINEAR_ROUNDS, action="linear")


def aucs(result: RunResult) -> dict[str, float]:
    """Return silo → AUC of its final model on its kind's test rows."""
    return {name: 1 - error for name, (_, error, _) in result.rounds[-1].evaluation.items()}


def together(kind: int, seed: int) -> float:
    """Return the AUC of trees trained on all rows of a kind, as many as its group has."""
    parts = [rows_of(silo, seed) for silo in range(kind, SILOS, 2)]
    data = boosting().DMatrix(*(np.concatenate(one) for one in zip(*parts, strict=True)))
    trees = boosting().train(PARAMS, data, num_boost_round=ROUNDS * len(parts))
    x, y = rows_of(SILOS + kind, seed)
    return float(roc_auc_score(y, trees.predict(boosting().DMatrix(x))))


def measure(seed: int) -> Entry:
    """AUC by kind: trees per group, of all rows of the kind, of each silo alone, over all."""
    grouped = boosted(first_stage(), seed)
    names = sorted(grouped.rounds[-1].evaluation)
    everybody = aucs(boosted([names], seed))
    alone = aucs(boosted([[name] for name in names], seed))
    own = aucs(grouped)
    return {
        "groups": grouped.groups[ROUNDS],
        "per group": [own[names[kind]] for kind in (0, 1)],
        "rows together": [together(kind, seed) for kind in (0, 1)],
        "alone": float(np.mean(list(alone.values()))),
        "over all": float(np.mean(list(everybody.values()))),
    }


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    rows = [
        [
            str(run["seed"]),
            *(f"{auc:.3f}" for kind in zip(run["per group"], run["rows together"], strict=True)
              for auc in kind),
            f"{run['alone']:.3f}",
            f"{run['over all']:.3f}",
        ]
        for run in entries
    ]  # fmt: skip
    heads = ("seed", "kind 0: per group", "rows together", "kind 1: per group", "rows together")
    return page(
        "# Boosted trees in groups",
        f"{SILOS} silos of two hidden kinds, {ROWS} rows each, {ROUNDS} rounds of one tree per "
        "silo.\nMade by `python -m benchmarks.engine.trees`. AUC on 1,000 rows of the kind.",
        table((*heads, "each silo alone", "bagging over all"), rows),
    )


STORE = Store("trees", document, keys=("seed",))


def main() -> None:
    """Measure what is not stored yet."""
    given = read(STORE, __doc__, seeds=3)
    given.store.fill(({"seed": seed} for seed in range(given.seeds)), measure)
    print(given.store.text())


if __name__ == "__main__":
    main()
