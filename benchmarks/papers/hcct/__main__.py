"""HCCT's four experiments with the paper's settings, ours beside the paper's figures.

    python -m benchmarks.papers.hcct --data FOLDER [--parts digit,fmnist] [--seeds 5]

Every run is stored as soon as it is done; a second call adds what is missing: more seeds, or fixed
values of α (``--alphas``). In-process Grid, one thread. A message that was answered before in the
same seed is answered from memory: HCCT's run is computed only where it differs from another run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.kit import (
    UNBOUNDED,
    Build,
    Entry,
    FixedGroups,
    Remembering,
    Store,
    Strategy,
    Trained,
    numbered_groups,
    read,
    say,
    train,
)
from benchmarks.papers.hcct.experiments import EXPERIMENTS, PERSISTENCE, Experiment, Variant, hcct
from benchmarks.papers.hcct.observe import Observer, during, persistent_alpha
from benchmarks.papers.hcct.tables import CURVE, LAST, STORE
from coterie.strategies.rounds.reports import RoundReport


def measure(
    store: Store, variants: Mapping[str, Variant], folder: str
) -> Callable[..., Entry | None]:
    """What trains a cell of the store, or nothing where no α persists."""
    memory: dict[tuple[str, int], Remembering] = {}

    def one(variant: str, **cell: Any) -> Entry | None:
        chosen = _resolved(variants[variant], store.find(variant="Independent", **cell))
        if chosen is None:
            print("  no α persists: not run", flush=True)
            return None
        place = (cell["experiment"], cell["seed"])
        if place not in memory:
            memory.clear()
            memory[place] = Remembering()
        return _run(chosen, memory[place], folder=folder, **cell)

    return one


def _resolved(variant: Variant, alone: Mapping[str, Any] | None) -> Variant | None:
    """The variant with a number for α; None where persistence gives none."""
    if variant.keys.get("alpha") != PERSISTENCE:
        return variant
    found = persistent_alpha(alone["observed"]) if alone else None
    if found is None:
        return None
    print(f"  α = {found[0]:.3g} persists after round {found[1]}", flush=True)
    return replace(variant, keys={**variant.keys, "alpha": found[0]})


def _run(
    variant: Variant,
    app: Remembering,
    *,
    folder: str,
    experiment: str,
    seed: int,
    rounds: int,
    data: Mapping[str, Any],
    precision: str,
) -> Entry:
    own = EXPERIMENTS[experiment]
    keys = {
        **{"seed": seed, "rounds": rounds, "local-epochs": own.epochs, "precision": precision},
        **UNBOUNDED,
        **{"batch-size": 64, "lr": 0.1, "lr-decay": 0.995, **variant.keys},
    }
    silos, show = own.nodes(folder, seed, **data), say(experiment)
    if variant.keys.get("strategy") != "independent":
        done = train(silos, keys, app=app, build=_fixed(own, variant), on_round=show)
        found = _measured(done, own.silos)
        if variant.keys.get("strategy") == "hcct":
            found["alpha"] = keys["alpha"]
            found["chosen alpha"] = done.result.rounds[-1].details.get("alpha")
            found["during"] = during(done, own)
        return found
    observer = Observer(own, app)

    def look(report: RoundReport) -> None:
        observer.look(report)
        show(report)

    done = train(silos, keys, app=observer.app, on_round=look)
    return {**_measured(done, own.silos), "observed": observer.seen}


def _fixed(experiment: Experiment, variant: Variant) -> Build | None:
    if not variant.groups:
        return None
    groups = [tuple(experiment.silos[i] for i in group) for group in variant.groups]
    fixed = FixedGroups(fixed=tuple(groups), first_statistics=variant.first_statistics)
    return lambda config, options: Strategy(fixed, **options)


def _measured(done: Trained, names: Sequence[str]) -> dict[str, Any]:
    """Errors in %, the last groups by number of the silo (from 1), and what it cost the silos."""
    trained = [r for r in done.result.rounds if not r.final]
    each = [{n: e for n, (_, e, _) in r.evaluation.items()} for r in done.result.rounds]
    curve = [(number, round(error, 2)) for number, error in done.curve()]
    shown = [entry for entry in curve[:-LAST] if entry[0] in CURVE] + curve[-LAST:]
    return {
        "errors": [round(100 * done.errors[name], 3) for name in names],
        "sizes": [int(trained[-1].silos[name].num_examples) for name in names],
        "best": [round(100 * min(r[n] for r in each if n in r), 3) for n in names],
        "curve": shown,
        "groups": [[i + 1 for i in group] for group in numbered_groups(trained[-1].groups, names)],
        "silo seconds": round(sum(s.seconds for r in trained for s in r.silos.values()), 3),
    }


def main() -> None:
    """Measure what is missing, print."""
    given = read(
        STORE,
        __doc__,
        data=True,
        parts=EXPERIMENTS,
        chosen="fmnist,example,digit,cifar10",
        seeds=5,
        rounds=0,
        samples={"type": int, "default": 0, "help": "split-samples; 0 for the paper's"},
        only={"default": "", "help": "names of variants, separated by ';'"},
        alphas={"default": "", "help": "HCCT also with these α, e.g. 10,100,auto"},
        groups={"default": "", "help": "HCCT also with these fixed numbers of groups, e.g. 2,5,10"},
        precision={"default": "float32", "choices": ("float32", "bfloat16")},
    )
    only = [name.strip() for name in given.only.split(";") if name.strip()]
    extra = {
        f"HCCT, α = {alpha}": Variant(hcct(alpha if alpha == "auto" else float(alpha)))
        for alpha in filter(None, given.alphas.split(","))
    }
    counts = [int(count) for count in filter(None, given.groups.split(","))]
    for name in given.parts:
        experiment = EXPERIMENTS[name]
        of_counts = {
            f"HCCT, K = {count}": Variant(
                {**experiment.variants["HCCT"].keys, "fixed-groups": count}
            )
            for count in counts
        }
        variants = {**experiment.variants, **extra, **of_counts}
        data = dict(experiment.data)
        if given.samples and "split-samples" in data:
            data["split-samples"] = given.samples
        cells = (
            {
                "experiment": name,
                "variant": variant,
                "seed": seed,
                "rounds": given.rounds or experiment.rounds,
                "data": data,
                "precision": given.precision,
            }
            for seed in range(given.seeds)
            for variant in variants
            if not only or variant in only
        )
        given.store.fill(cells, measure(given.store, variants, given.data))
    print(given.store.text())


if __name__ == "__main__":
    main()
