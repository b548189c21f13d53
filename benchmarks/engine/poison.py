"""One dishonest silo against nine honest ones, with the bounds on a silo's influence and without.

    python -m benchmarks.engine.poison [--seeds 3] [--strategies fedavg,hcct] [--only "none;random"]

Ten silos of digits in one process, 15 rounds. The tenth trains like the others and then sends
what its attack makes of its update; how much worse the nine become is what the table shows. Two
runs at a time (``--workers``); without the bounds one seed. Goes on where it stopped. What was
measured with other bounds is forgotten.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from flwr.app import Context, Message

from benchmarks.kit import UNBOUNDED, App, Entry, Store, page, read, select, spread, table, train
from coterie import wire
from coterie.client.app import app as coterie_app
from coterie.features.robust.bounds import (
    AGAINST,
    AGREEMENT,
    AWAY,
    ELSEWHERE,
    FEWEST_VOTES,
    SHORT,
    SPREAD,
)
from coterie.strategies import Influence
from coterie.wire import Model
from coterie.wire.updates import MOST_ROOM

ATTACKER, SILOS, ROUNDS = "silo-9", 10, 15
SIZES, NUM_TEST = (40, 70, 100), 60
BOUNDS = ", ".join(
    f"{name} {value}"
    for name, value in (
        *Influence().model_dump().items(),
        *(("agreement", AGREEMENT), ("against", AGAINST), ("spread", SPREAD)),
        *(("short", SHORT), ("away", AWAY), ("most room", MOST_ROOM), ("elsewhere", ELSEWHERE)),
        ("share of more than", FEWEST_VOTES),
    )
)
"""All that the bounds depend on: a measurement holds for these."""
MUCH = 1.0
"""Points above the run without an attack that are listed."""
STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "hcct": {"alpha": 50.0},
    **{name: {} for name in ("fedcollab", "auto")},
    "fedgroup": {"num-groups": 3, "cold-start-epochs": 10},
    **{name: {"num-groups": 3} for name in ("ifca", "flsc", "fesem", "kmeans")},
    **{name: {} for name in ("cfl", "flhc", "maxfl")},
    **{name: {} for name in ("fedavg", "fedfa", "fednova", "perfedavg")},
    "pfedme": {"moreau-lr": 0.05},
    **{name: {} for name in ("apfl", "pfedgraph", "fedgenp", "fedgen", "fedensemble")},
}
"""Every strategy in which silos hear of each other. pFedMe's default step does not converge in so
few rounds."""
FACTORS = {
    "sign flipped": -1.0,
    "sign flipped, × 10": -10.0,
    "honest direction × 100": 100.0,
    "random": 1.0,
    "random, × 10⁶": 1e6,
}
CLAIMS = {"labels moved, claims 10⁵": 10**5, "labels moved, claims 10⁸": 10**8}
ATTACKS = ("none", *FACTORS, "labels moved", *CLAIMS)
KINDS = {1: "one kind", 2: "two kinds"}


def silos(kinds: int, attack: str, seed: int) -> list[dict[str, Any]]:
    """Ten silos without a sample in common; every second one labels otherwise, with two kinds."""
    found = []
    for i in range(SILOS):
        moved = 3 if i == SILOS - 1 and attack.startswith("labels moved") else 5 * (i % kinds)
        data = {"train": SIZES[i % 3], "test": NUM_TEST, "skip": 170 * i, "split-seed": seed}
        options = {f"data.{key}": value for key, value in {**data, "label-shift": moved}.items()}
        node = {"name": f"silo-{i}", "task": "digits", "threads": 1, "device": "cpu"}
        node |= {"label-counts": True}  # FedGen asks for them
        found.append({**node, **options})
    return found


def dishonest(attack: str) -> App:
    """The silos' app, in which the tenth sends what its attack makes of its training."""

    def answer(message: Message, context: Context) -> Message:
        reply = coterie_app(message, context)
        if context.node_config["name"] != ATTACKER or reply.has_error():
            return reply
        if attack in CLAIMS:
            claim(message, reply, CLAIMS[attack])
        if attack in FACTORS and wire.ARRAYS in reply.content.array_records:
            sent, back = (
                wire.decode_arrays(m.content.array_records[wire.ARRAYS]) for m in (message, reply)
            )
            round_number = int(message.content.config_records[wire.CONFIG][wire.ROUND])  # type: ignore[arg-type]
            changed = _changed(sent, back, attack, np.random.default_rng([7, round_number]))
            reply.content[wire.ARRAYS] = wire.encode_arrays(changed, packed=True)
        return reply

    return answer


def claim(message: Message, reply: Message, count: int) -> None:
    """State so many samples, on joining and with every training."""
    described = reply.content.config_records.get(wire.CONFIG)
    if described is not None and wire.NUM_EXAMPLES in described:
        described[wire.NUM_EXAMPLES] = count
    metrics = reply.content.metric_records.get(wire.METRICS)
    if metrics is not None and message.metadata.message_type.split(".")[0] == wire.TRAIN:
        metrics[wire.NUM_EXAMPLES] = count


def _changed(sent: Model, back: Model, attack: str, rng: np.random.Generator) -> Model:
    """The model sent, moved by the attack's multiple of the honest update, or of noise as long."""
    changed = {}
    for name, start in sent.items():
        step = back[name].astype(np.float64) - start.astype(np.float64)
        if attack.startswith("random"):
            step = rng.normal(size=step.shape) * np.std(step)
        changed[name] = (start.astype(np.float64) + FACTORS[attack] * step).astype(start.dtype)
    return changed


def measure(strategy: str, kinds: int, attack: str, bounded: bool, seed: int) -> Entry:
    """Mean error in % of the nine honest silos' final models; when the tenth was moved out."""
    logging.getLogger("coterie").setLevel(logging.ERROR)  # in a worker's process
    keys = {"strategy": strategy, "rounds": ROUNDS, "local-epochs": 3, "seed": seed}
    keys |= {"evaluate-every": ROUNDS}
    keys |= STRATEGIES[strategy]
    keys |= {} if bounded else UNBOUNDED
    done = train(silos(kinds, attack, seed), keys, app=dishonest(attack))
    honest = [error for name, error in done.errors.items() if name != ATTACKER]
    influences = [(r.round, r.details.get("influence", {})) for r in done.result.rounds]
    out = {n for _, influence in influences for n in influence.get("apart", {})}
    return {
        "bounds": BOUNDS if bounded else "",
        "error": 100 * float(np.mean(honest)),
        "clipped-honest": sum(
            name != ATTACKER for _, influence in influences for name in influence.get("clipped", {})
        ),
        "moved-out": next((r for r, i in influences if ATTACKER in i.get("apart", {})), 0),
        "honest-moved-out": len(out - {ATTACKER}),
    }


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    return page(
        "## One dishonest silo of ten",
        f"`make bench-poison`: digits, {ROUNDS} rounds of 3 epochs; mean error in % of the nine "
        "honest silos, over the seeds measured; without the bounds (`max-share=1 clip-updates=0 "
        "quarantine-after=0`, one seed) → with the defaults. – is not measured yet. Claims are "
        "made on joining. **Bold** is more than a point above the run without an attack.",
        measured_with(entries),
        *(block for kinds in KINDS for block in _table(select(entries, kinds=kinds), kinds)),
        _honest_text(select(entries, bounded=True)),
    )


def measured_with(entries: Sequence[Entry]) -> str:
    """Which bounds measurements hold for, in a sentence; empty if these are today's defaults."""
    others = sorted({entry["bounds"] for entry in entries} - {"", BOUNDS})
    return f"**Measured before today's defaults**, with {'; or '.join(others)}." if others else ""


def above(entries: Sequence[Entry]) -> dict[tuple[str, str, str], tuple[float, float]]:
    """What an attack achieves against the defaults where it is more than a point, of equal seeds.

    Returns:
        (strategy, kinds of data, attack) → mean error in % without and with it.
    """
    found = {}
    for strategy in STRATEGIES:
        for kinds, title in KINDS.items():
            own = select(entries, strategy=strategy, kinds=kinds, bounded=True)
            before = {run["seed"]: run["error"] for run in select(own, attack="none")}
            for attack in ATTACKS:
                runs = [run for run in select(own, attack=attack) if run["seed"] in before]
                pairs = [(before[run["seed"]], run["error"]) for run in runs]
                if pairs and np.mean([after - first for first, after in pairs]) > MUCH:
                    first, after = np.mean(pairs, axis=0)
                    found[strategy, title, attack] = (float(first), float(after))
    return found


def _table(entries: Sequence[Entry], kinds: int) -> Iterator[str | list[str]]:
    seeds = len({entry["seed"] for entry in entries})
    yield f"**{KINDS[kinds].capitalize()} of data** (up to {seeds} seeds)"
    costly = above(entries)
    rows = []
    for strategy in STRATEGIES:
        row = [strategy]
        for attack in ATTACKS:
            own = select(entries, strategy=strategy, attack=attack)
            free, held = (
                spread((run["error"] for run in select(own, bounded=bounded)), 1)
                for bounded in (False, True)
            )
            much = (strategy, KINDS[kinds], attack) in costly
            row.append(f"{free} → **{held}**" if much else f"{free} → {held}")
        rows.append(row)
    yield table(["strategy", *ATTACKS], rows)


def _honest_text(bounded: Sequence[Entry]) -> str:
    clipped = sum(entry["clipped-honest"] for entry in bounded)
    out = sum(entry["honest-moved-out"] for entry in bounded)
    updates = len(bounded) * ROUNDS * (SILOS - 1)
    return (
        f"Of about {updates} updates of honest silos with the defaults {clipped} were clipped; "
        f"{out} honest silos in {len(bounded)} runs were moved out for some rounds."
    )


STORE = Store("poison", document, keys=("strategy", "kinds", "attack", "bounded", "seed"))


def fill(
    store: Store,
    text: str,
    measure_one: Callable[..., Entry],
    *,
    rows: Sequence[str],
    strategies: Iterable[str],
    **more: Sequence[Any],
) -> None:
    """Read the command line of ``text``, measure what is missing in ``store``, print it.

    Runs without the bounds have one seed. ``more`` are further arguments and all their values.
    """
    given = read(
        store,
        text,
        rows=rows,
        seeds=3,
        strategies={"default": ",".join(strategies)},
        workers={"type": int, "default": 2},
    )
    given.store.keep(lambda entry: entry.get("bounds") == (BOUNDS if entry["bounded"] else ""))
    cells = [
        {"strategy": s, "attack": attack, "bounded": bounded, "seed": seed}
        | dict(zip(more, values, strict=True))
        for bounded in (True, False)
        for seed in range(given.seeds if bounded else 1)
        for attack in given.only
        for s in given.strategies.split(",")
        for values in product(*more.values())
    ]
    given.store.fill(cells, measure_one, workers=given.workers)
    print(given.store.text())


def main() -> None:
    """Measure, store, print."""
    fill(STORE, __doc__, measure, rows=ATTACKS, strategies=STRATEGIES, kinds=list(KINDS))


if __name__ == "__main__":
    main()
