"""Can a generator fool its receiver's head and not the others'? What eq. 10 of FedGenP does.

    python -m benchmarks.papers.fedgenp.fooling [--seeds 3] [--parts iid,"iid run"] [--only ROWS]

Silos of scikit-learn's digits train alike (FedAvg) for some rounds; the heads that they then have
of their own are those that FedGenP's server would see. On these, generators are trained for 2,000
steps from scratch, as the server trains them, and asked how many of their latents the other heads,
and the receiver's own, answer as meant. The parts whose names end in ``run`` are whole runs on the
same silos: what the global and the personalised models gain. Minutes on one thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kit import (
    Entry,
    Node,
    Store,
    Watched,
    page,
    read,
    select,
    spread,
    table,
    train,
)
from coterie import wire
from coterie.server.runs.config import RunConfig
from coterie.server.study import comparison_file
from coterie.server.study.comparison import Repeat
from coterie.strategies.fedgenp import generators as of
from coterie.strategies.fedgenp.latent import fresh_generator, predictor_arrays, predictor_shape

FILES = Path(__file__).parents[2] / "compare"
STEPS, ROUNDS = 2000, 5
RUN_ROUNDS, LAST = 15, 5
"""Of a whole run, and at its end those whose mean is shown."""
SETTINGS: dict[str, Mapping[str, Any]] = {
    "no reversal": {"reversal": "none"},
    "λ 0.1 (default)": {},
    "λ 0.5": {"reversal-weight": 0.5},
    "λ 1": {"reversal-weight": 1.0},
    "λ 3": {"reversal-weight": 3.0},
    "λ 1, J1 a sum": {"reversal-weight": 1.0, "generator-objective": "sum"},
    "λ 1, both in one step": {"reversal-weight": 1.0, "generator-objective": "both"},
    "λ 1, SGD 0.01": {
        "reversal-weight": 1.0,
        "generator-optimiser": "sgd",
        "generator-lr": 0.01,
    },
    "clip, λ 1": {"reversal": "clip", "reversal-weight": 1.0},
    "the paper to the letter": {
        "reversal": "unbounded",
        "reversal-weight": 1.0,
        "generator-objective": "sum",
        "generator-optimiser": "sgd",
        "generator-lr": 0.01,
    },
}
"""Name → keys of a run: what a person would set."""
FEDAVG, LONG = "FedAvg", {"generator-steps": 500}
RUNS: dict[str, Mapping[str, Any]] = {
    FEDAVG: {},
    "FedAvg, lr·2": {"lr": 0.2},
    "no reversal": SETTINGS["no reversal"],
    "λ 0.1 (default)": {},
    "λ 0.5": SETTINGS["λ 0.5"],
    "λ 1": SETTINGS["λ 1"],
    "λ 1, both in one step": SETTINGS["λ 1, both in one step"],
    "no reversal, 500 steps": {**SETTINGS["no reversal"], **LONG},
    "λ 0.5, 500 steps": {**SETTINGS["λ 0.5"], **LONG},
    "λ 1, 500 steps": {**SETTINGS["λ 1"], **LONG},
    "λ 1, 500 steps, lr·2": {**SETTINGS["λ 1"], **LONG, "lr": 0.2},
    "λ 1, both in one step, 500 steps": {**SETTINGS["λ 1, both in one step"], **LONG},
    "the paper to the letter": SETTINGS["the paper to the letter"],
}
"""What is tried in whole runs, FedGenP unless it says FedAvg: name → keys beside a run's."""
SHIFTS = {
    "agreeing": "one kind of data, one epoch at a learning rate of 0.01: heads hardly differ",
    "iid": "one kind of data",
    "feature": "turned images",
    "concept": "other labels",
}
RUN = " run"
PARTS = (
    "agreeing",
    "iid",
    "feature",
    *(f"{shift}{RUN}" for shift in ("iid", "feature", "concept")),
)


def silos_of(shift: str, seed: int) -> list[Node]:
    """The nine silos of a comparison."""
    given = comparison_file.read(FILES / f"{shift}.toml", data=None)
    return [{**silo.node_config(), "threads": 1} for silo in given.silos(Repeat(seed))]


@cache
def heads_of(shift: str, seed: int) -> tuple[list[wire.Model], wire.Layers]:
    """The heads that silos send after some rounds of FedAvg, and what they compute."""
    nodes = silos_of("iid" if shift == "agreeing" else shift, seed)
    watched = Watched()
    keys = {"strategy": "fedavg", "seed": seed, "rounds": ROUNDS, "local-epochs": 3}
    keys |= {"local-epochs": 1, "lr": 0.01, "rounds": 10} if shift == "agreeing" else {}
    done = train(nodes, keys, app=watched, evaluate=False)
    layers = done.silos[0].head
    return [predictor_arrays(new, layers) for _, new in watched.trained.values()], layers


def measure(shift: str, setting: str, seed: int) -> Entry | None:
    """A cell of the store."""
    if shift.endswith(RUN):
        return in_a_run(shift.removesuffix(RUN), setting, seed) if setting in RUNS else None
    return on_heads(shift, setting, seed) if setting in SETTINGS else None


def on_heads(shift: str, setting: str, seed: int) -> Entry:
    """Shares in % of latents that the others' heads, and the own, answer as meant; and p(y)."""
    heads, layers = heads_of(shift, seed)
    config = RunConfig.read({"strategy": "fedgenp", **SETTINGS[setting]})
    plan = config.algorithm.plan  # type: ignore[attr-defined]
    latent, classes = predictor_shape({str(i): head for i, head in enumerate(heads)}, layers)
    rngs = [np.random.default_rng([seed, 1, i]) for i in range(len(heads))]
    made = [
        fresh_generator(num_classes=classes, latent=latent, hidden=plan.hidden, rng=rng)
        for rng in rngs
    ]
    for _ in range(STEPS // plan.steps):
        made, _ = of.train_generators(
            made, heads, layers, plan=plan, rngs=rngs, drawing=np.random.default_rng(0)
        )
    cpu = torch.device("cpu")
    drawn = [of._sample(g, 500, classes, rng, cpu) for g, rng in zip(made, rngs, strict=True)]
    latents, labels = (torch.stack([one[i] for one in drawn]) for i in (0, 1))
    logits = of._all_heads(of._stack(heads, cpu), layers, latents).unflatten(2, labels.shape)
    right = (logits.argmax(1) == labels).float().mean(2)  # (heads, receivers)
    wanted = labels.expand(len(heads), 1, -1, -1)
    sure = logits.softmax(1).gather(1, wanted)[:, 0].mean(2)
    own = torch.eye(len(heads)).bool()
    return {
        "others": float(100 * right[~own].mean()),
        "own": float(100 * right[own].mean()),
        "p others": float(sure[~own].mean()),
        "p own": float(sure[own].mean()),
    }


def in_a_run(shift: str, setting: str, seed: int) -> Entry:
    """Errors of a run's last rounds in %, of the global and the personalised models, and shares."""
    strategy = "fedavg" if setting.startswith(FEDAVG) else "fedgenp"
    own = {"strategy": strategy, "seed": seed, **RUNS[setting]}
    keys: dict[str, Any] = {"rounds": RUN_ROUNDS, "local-epochs": 3, "evaluate-trained": True}
    done = train(silos_of(shift, seed), keys | own)
    reports = done.result.rounds
    per = [[e for _, e in r.personalised.values()] for r in reports if r.personalised]
    receivers = [r.details.get("generators", {}).get("receivers", {}).values() for r in reports]
    shares = [[(r["others-agree"], r["own-agrees"]) for r in one] for one in receivers if one]
    said: list[float] = (100 * np.mean(shares[-LAST:], axis=(0, 1))).tolist() if shares else []
    return {
        "global": float(np.mean([error for _, error in done.curve()[-LAST:]])),
        "per": float(100 * np.mean(per[-LAST:])),
        **dict(zip(("others", "own"), said, strict=False)),
    }


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    return page(
        "# Can a generator fool its receiver's head and not the others'?",
        f"Heads after {ROUNDS} rounds of FedAvg on scikit-learn's digits, generators of {STEPS:,} "
        "steps from scratch. Shares of latents\nanswered as meant, mean over receivers ± deviation "
        "over seeds; p(y): the probability of the label that was meant.\nMade by `python -m "
        "benchmarks.papers.fedgenp.fooling`. Rows of fewer than three seeds, and those that are "
        "missing, are not finished.",
        *(_heads(shift, entries) for shift in SHIFTS if select(entries, shift=shift)),
        *(_runs(p, entries) for p in PARTS if p.endswith(RUN) and select(entries, shift=p)),
    )


def _heads(shift: str, entries: Sequence[Entry]) -> str:
    rows = []
    for name in SETTINGS:
        if runs := select(entries, shift=shift, setting=name):
            shares = [spread([r[k] for r in runs], 1) for k in ("others", "own")]
            sure = [f"{np.mean([r[k] for r in runs]):.2f}" for k in ("p others", "p own")]
            rows.append([name, *shares, *sure, str(len(runs))])
    heads = ("", "others right, %", "own right, %", "p(y) of others", "p(y) of own", "seeds")
    return f"## {shift}: {SHIFTS[shift]}\n\n" + "\n".join(table(heads, rows))


def _runs(part: str, entries: Sequence[Entry]) -> str:
    """Errors beside FedAvg's of the same seed."""
    rows = []
    base = {r["seed"]: r for r in select(entries, shift=part, setting=FEDAVG)}
    for name in RUNS:
        if runs := select(entries, shift=part, setting=name):
            both = [
                (r, base[r["seed"]]) for r in runs if r["seed"] in base and r != base[r["seed"]]
            ]
            errors = [spread([r[k] for r in runs], 1) for k in ("global", "per")]
            gains = [spread([b[k] - r[k] for r, b in both], 1, sign="+") for k in ("global", "per")]
            values = [[r[k] for r in runs if k in r] for k in ("others", "own")]
            shares = ", ".join(f"{np.mean(one):.0f}" for one in values if one) or "–"
            rows.append([name, *errors, *gains, shares, str(len(runs))])
    heads = ("", "global", "Per", "gain: global", "gain: Per", "latents: others, own", "seeds")
    title = f"## A whole run, {SHIFTS[part.removesuffix(RUN)]}"
    text = (
        f"Errors in %, mean of the last {LAST} of {RUN_ROUNDS} rounds of 3 epochs; gains over "
        "FedAvg in points, mean ± deviation of the\ndifferences seed by seed; latents as above, in "
        "the same rounds; 50 steps of generators a round unless said."
    )
    return "\n\n".join([title, text, "\n".join(table(heads, rows))])


STORE = Store("fooling", document, keys=("shift", "setting", "seed"))


def main() -> None:
    """Measure what is not stored yet."""
    given = read(STORE, __doc__, parts=PARTS, rows=dict.fromkeys([*SETTINGS, *RUNS]), seeds=3)
    cells = (
        {"shift": s, "setting": name, "seed": i}
        for i, s, name in product(range(given.seeds), given.parts, given.only)
    )
    given.store.fill(cells, measure)
    print(given.store.text())


if __name__ == "__main__":
    main()
