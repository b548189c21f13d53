"""Auto beside every strategy with its defaults, on other silos than these were tuned on.

    python -m benchmarks.papers.auto --data FOLDER [--seeds 5] [--only ROWS] [--sets SETS]

The silos are those of ``benchmarks/compare/auto/*.toml``: other sizes, rotations and labels than in
``benchmarks/compare``, on which the other strategies' defaults were chosen. Auto's own constants
were chosen on seeds 0 to 2 of these silos; seeds 3 and 4 have a table of their own. Runs are on the
in-process Grid.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, product
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, RecordDict

from benchmarks.kit import (
    Entry,
    Node,
    Shared,
    Store,
    Trained,
    nodes,
    page,
    read,
    select,
    spread,
    table,
    train,
)
from benchmarks.papers.fedcollab.experiments import EXPERIMENTS as FEDCOLLAB
from benchmarks.papers.fedgroup.data import DATASETS as FEDGROUP
from benchmarks.papers.fedgroup.data import POWER_LAW
from benchmarks.papers.fedgroup.tables import BATCH
from benchmarks.papers.hcct.experiments import EXPERIMENTS as HCCT
from coterie import wire
from coterie.client.work.session import close_all, session_of
from coterie.client.work.weights import load_weights
from coterie.server.study import comparison_file
from coterie.server.study.comparison import Repeat
from coterie.tasks.base import Option, leaves

FILES = Path(__file__).parents[1] / "compare" / "auto"
SHIFTS = ("label", "feature", "concept", "quantity", "iid")
SETS = (*SHIFTS, "apart")
"""``apart``: nobody can help another."""

RULES = "2026-11-27"
"""Since when auto's rules and the defaults of all strategies are as they are. Who changes them,
changes this: what was measured before is marked, and measured again."""
AGAIN, OTHER_SEED = "alone, with another seed of training", 100
"""The same silos, each alone once more: what training itself does to a silo by chance."""
SETTINGS: dict[str, Mapping[str, Any]] = {
    "alone": {"strategy": "independent"},
    AGAIN: {"strategy": "independent"},
    "**auto**": {"strategy": "auto"},
    "auto, a third of the silos tell no errors": {"strategy": "auto"},
    "FedAvg": {"strategy": "fedavg"},
    "HCCT, α 50": {"strategy": "hcct", "alpha": 50.0},
    "HCCT, α auto": {"strategy": "hcct", "alpha": "auto"},
    "FedCollab": {"strategy": "fedcollab"},
    "FedCollab, c auto": {"strategy": "fedcollab", "c": "auto"},
    "FedGroup, 3 groups": {"strategy": "fedgroup"},
    "FedGroup, m auto, 10 cold-start epochs": {
        "strategy": "fedgroup",
        "num-groups": "auto",
        "cold-start-epochs": 10,
    },
    "CFL": {"strategy": "cfl"},
    "IFCA": {"strategy": "ifca"},
    "APFL": {"strategy": "apfl"},
    "pFedGraph": {"strategy": "pfedgraph"},
    "FedProx, μ 0.1": {"strategy": "fedavg", "proximal-mu": 0.1},
    "FLSC": {"strategy": "flsc"},
    "FeSEM": {"strategy": "fesem"},
    "FL+HC": {"strategy": "flhc"},
    "k-means": {"strategy": "kmeans"},
    "MAXFL": {"strategy": "maxfl"},
    "FedFA": {"strategy": "fedfa"},
    "FedNova": {"strategy": "fednova"},
    "Per-FedAvg": {"strategy": "perfedavg"},
}
"""pFedMe is not among them: it takes ten times as long, and has not converged in so few rounds."""
mnist_mclr = partial(Shared, "mnist/mclr")


@dataclass(frozen=True)
class Federation:
    """The silos of a paper, fewer or with a smaller network, and how they are trained.

    Attributes:
        title: of its column.
        nodes: folder and seed → what the silos are started with.
        run: keys of the configuration, for every strategy.
        notes: what it has, and what is smaller than in the paper.
    """

    title: str
    nodes: Callable[[str, int], Sequence[Node]]
    run: Mapping[str, Any]
    notes: str


def _of_fedcollab(folder: str, seed: int) -> Sequence[Node]:
    """Two of every five silos that have the same labels."""
    return [n for i, n in enumerate(FEDCOLLAB["fashion"].nodes(folder, seed)) if i % 5 < 2]


def _of_hcct(folder: str, seed: int) -> Sequence[Node]:
    return replace(HCCT["digit"], task="digit-five-mlp").nodes(folder, seed)


def _of_fedgroup(folder: str, seed: int) -> Sequence[Node]:
    """The first twenty; more samples of each, and half of them to test: a tenth is one or two."""
    own: dict[str, Option] = {"data": folder, "split-seed": seed}
    sizes: dict[str, Option] = {"silos": 1000, "split-base": 10, "test-share": 0.5}
    names = FEDGROUP["mnist-mclr"].names[:20]
    return nodes(f"{__name__}:mnist_mclr", names, {**POWER_LAW, **own, **sizes})


PAPERS = {
    "fashion": Federation(
        "FashionMNIST",
        _of_fedcollab,
        {**FEDCOLLAB["fashion"].keys, "rounds": 20},
        "*FashionMNIST* (FedCollab): silos of the paper's scripts, two of every five that have "
        "the same labels: four with 2,100 samples and four with 14; 20 rounds (the paper's: 200 "
        "rounds of 20 silos).",
    ),
    "digit": Federation(
        "Digit-five",
        _of_hcct,
        {"rounds": 15, "local-epochs": 3, "batch-size": 32, "lr": 0.05, "lr-decay": 0.995},
        "*Digit-five* (HCCT's Digit task): ten silos with 185 samples, two of every domain, "
        "SynthDigits drawn from fonts; a network with one hidden layer of 128 in place of a CNN "
        "of 14 million weights, 15 rounds of 3 epochs (the paper's: 20 of 5), batches of 32, and "
        "of the learning rates 0.1, 0.05, 0.02 and 0.01 the best one for training alone, 0.05.",
    ),
    "power-law": Federation(
        "MNIST, power law",
        _of_fedgroup,
        {"rounds": 15, "local-epochs": 3, "batch-size": BATCH, "lr": FEDGROUP["mnist-mclr"].lr},
        "*MNIST, power law* (FedGroup): the first twenty of 1,000 silos of two neighbouring "
        "digits with sizes by a power law; 15 rounds of 3 epochs (the paper's: 300 of 20, with "
        "20 silos a round). Half of a silo's samples test its model, and it has at least 10 more "
        "to train on (the paper's: a tenth, and 9).",
    ),
}
"""Sets of the papers, whose every run takes seconds."""


def _permuted(folder: str, seed: int) -> Sequence[Node]:
    """Six silos; the last three have other names for the labels."""
    own: dict[str, Option] = {"data": folder, "split-seed": seed}
    split: dict[str, Option] = {"split": "iid", "split-permutations": 2, "silos": 6}
    names = [f"silo-{number}" for number in range(6)]
    task = "fashion-mnist/cnn-fedgenp"
    return nodes(task, names, {**split, **own, "train": 150, "test": 200}, auxiliary=True)


LITTLE = {
    f"little-{rounds}": Federation(
        f"{rounds} rounds",
        _permuted,
        {"rounds": rounds, "optimiser": "adamw", "lr": 0.002, "local-epochs": 1, "batch-size": 32},
        "",
    )
    for rounds in (6, 12)
}
"""Little training: silos of two kinds whose labels contradict each other, one epoch a round."""
FEDERATIONS = {**PAPERS, **LITTLE}
KINDS = [["silo-0", "silo-1", "silo-2"], ["silo-3", "silo-4", "silo-5"]]
"""The right groups of ``LITTLE``."""
SEEDS, MORE_SEEDS = 5, 20
"""Of every row, and at most of those that tell who loses in truth."""
UNSEEN, LOOKED_AT = 3, 11
"""The first seed that auto's constants were not chosen on; the last one of label shift on which it
was looked how much of its own a silo best ends with."""
CHANCE = 0.05
"""Of one silo among all of a set being called worse than alone though it is not."""

Pair = tuple[int, int]
"""Test samples that one model answers rightly and another does not, and the other way round."""


@cache
def comparison(name: str, data: str) -> comparison_file.Comparison:
    """The silos and the training of a set."""
    file = FILES / f"{name}.toml"
    return comparison_file.read(file, data=Path(data) if name == "label" else None)


def federation(on: str, seed: int, data: str) -> tuple[Sequence[Node], Mapping[str, Any]]:
    """The silos of a set, and keys of their runs."""
    if on in FEDERATIONS:
        return FEDERATIONS[on].nodes(data, seed), FEDERATIONS[on].run
    given = comparison(on, data)
    silos = [{**spec.node_config(), "threads": 1} for spec in given.silos(Repeat(seed))]
    return silos, given.file.run


def measure(on: str, setting: str, seed: int, data: str) -> Entry:
    """Which of its test samples every silo's model answers rightly, and what that cost."""
    close_all()
    silos, run = federation(on, seed, data)
    if setting.endswith("tell no errors"):
        silos = [
            {**node, "share-metrics": "train-loss"} if i % 3 == 0 else node
            for i, node in enumerate(silos)
        ]
    of_run = seed + OTHER_SEED if setting == AGAIN else seed
    done = train(silos, {"seed": of_run, **run, **SETTINGS[setting]})
    reports = done.result.rounds
    return {
        "right": {name: packed(digits) for name, digits in rights(done, silos).items()},
        "groups": [list(group) for group in reports[-1].groups],
        "bytes": sum(
            silo.bytes_sent + silo.bytes_received for r in reports for silo in r.silos.values()
        )
        + sum(p.bytes_sent + p.bytes_received for r in reports for p in r.phases.values()),
        "trainings": (reports[-1].details.get("trainings") or {}),
    }


def rights(done: Trained, nodes: Sequence[Node]) -> dict[str, str]:
    """Silo → a digit for each of its test samples, in order: 1 where its model is right.

    The model is the one that the silo evaluated last, which may be its own (APFL, Per-FedAvg); of a
    silo that tells no errors, and so evaluated none, the one that the run gave it.
    """
    found = {}
    for number, node in enumerate(nodes, start=1):
        session = session_of(Context(1, number, dict(node), RecordDict(), run_config={}))
        name = session.settings.name
        if name not in done.result.models:
            continue
        if name not in done.errors:
            load_weights(session.model, wire.decode_arrays(done.result.models[name]))
        session.model.eval()
        with torch.no_grad():
            answers = [
                (session.model(x).argmax(1) == leaves(y)[0]).int().tolist()
                for x, y in session.data.test.batches(None, 1024)
            ]
        found[name] = "".join(str(right) for batch in answers for right in batch)
        own = found[name].count("0") / len(found[name])
        if abs(done.errors.get(name, own) - own) > 1e-6:
            raise ValueError(f"{name} said {done.errors[name]:.4f}, its model has {own:.4f}.")
    return found


def packed(digits: str) -> str:
    """A bit for each digit, in hexadecimal, after a 1 that keeps zeros at the beginning."""
    return f"{int('1' + digits, 2):x}"


def error_of(right: str) -> float:
    """Share of zeros in what is packed."""
    bits = int(right, 16)
    count = bits.bit_length() - 1
    return (count - bits.bit_count() + 1) / count


# --- the tables -----------------------------------------------------------------------------------


def mean_error(runs: Iterable[Entry]) -> list[float]:
    """Mean over silos of every run, in %."""
    return [100 * float(np.mean([error_of(own) for own in run["right"].values()])) for run in runs]


def paired(runs: Sequence[Entry], alone: Sequence[Entry]) -> dict[str, dict[int, Pair]]:
    """Silo → seed → test samples that it loses beside alone, and that it wins."""
    by_seed = {run["seed"]: run for run in alone}
    found: dict[str, dict[int, Pair]] = {}
    for run in runs:
        for name, own in run["right"].items() if run["seed"] in by_seed else ():
            mine, other = (int(x, 16) for x in (own, by_seed[run["seed"]]["right"][name]))
            if mine.bit_length() != other.bit_length():
                raise ValueError(f"{name}: of two numbers of test samples in seed {run['seed']}.")
            pair = (other & ~mine).bit_count(), (mine & ~other).bit_count()
            found.setdefault(name, {})[run["seed"]] = pair
    return found


def mean_loss(pairs: Iterable[Pair]) -> float:
    """Of test samples, over seeds."""
    return float(np.mean([lost - won for lost, won in pairs]))


def chance_of(pairs: Iterable[Pair]) -> float:
    """How likely it is to lose so many samples by chance: McNemar's exact test, one-sided.

    Of the test samples, over all seeds, that one of the two models answers rightly and the other
    does not, as many are lost as won if nothing differs.
    """
    lost, won = (sum(column) for column in zip(*pairs, strict=True))
    ways = sum(comb(lost + won, k) for k in range(lost, lost + won + 1))
    return float(ways / 2 ** (lost + won))


def num_worse(silos: Mapping[str, Mapping[int, Pair]]) -> int:
    """How many silos lose more than chance explains, by Holm's correction."""
    ordered = sorted(chance_of(pairs.values()) for pairs in silos.values())
    kept = (rank for rank, p in enumerate(ordered) if p > CHANCE / (len(ordered) - rank))
    return next(kept, len(ordered))


def largest_by_chance(sets: Iterable[Mapping[str, Mapping[int, Pair]]]) -> list[float]:
    """The largest mean loss of any silo, drawn 2,000 times as if nobody lost or won in truth.

    A run's differences, around the mean of each silo, get a sign by lot, the same for all silos.
    """
    rng = np.random.default_rng(0)
    largest = np.full(2000, -np.inf)
    for silos in sets:
        lost = np.array([[one - two for one, two in own.values()] for own in silos.values()], float)
        count = lost.shape[1]
        # Around its own mean a silo's spread is smaller than around the truth.
        noise = (lost - lost.mean(axis=1, keepdims=True)) * np.sqrt(count / (count - 1))
        signs = rng.choice([-1.0, 1.0], size=(count, len(largest)))
        largest = np.maximum(largest, (noise @ signs / count).max(axis=0))
    return [float(value) for value in largest]


def left_out(silos: Mapping[str, Mapping[int, Pair]]) -> list[float]:
    """Seed by seed: what the silo loses in it that loses most on average over the others."""
    found = []
    for seed in sorted({seed for own in silos.values() for seed in own}):
        others = {
            name: mean_loss(pair for other, pair in own.items() if other != seed)
            for name, own in silos.items()
            if seed in own
        }
        found.append(mean_loss([silos[max(others, key=lambda name: others[name])][seed]]))
    return found


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    first = [entry for entry in entries if entry["seed"] < SEEDS]
    unseen = [entry for entry in first if entry["seed"] >= UNSEEN]
    head = ("strategy", *SETS, "mean", "seeds")
    beside = ("worse beyond chance", "largest loss", "bytes", "passes")
    return page(
        "# Auto beside the others",
        "Made by `python -m benchmarks.papers.auto`; 15 rounds of 3 epochs. Error in %, mean "
        "over silos ± standard\ndeviation over seeds. *Mean*: of the five shifts. *Oracles* choose "
        f"by the test data, which nobody can. †: at least one run is older than {RULES}, the rules "
        "of today.",
        table(head, [*_rows(first, SETS, SHIFTS), *_oracles(first, SETS, SHIFTS)]),
        f"Auto's own constants were chosen on seeds 0 to {UNSEEN - 1} of these silos; of three "
        "ways to find a silo's share\nof its own the one that is used was taken after a look at "
        f"seeds 0 to {LOOKED_AT} of *label*. The other seeds alone:",
        table(head, _rows(unseen, SETS, SHIFTS)),
        *_on_unseen_seeds(entries),
        "## Beside training alone",
        "Over the six sets. *Worse beyond chance*: silos whose model answers fewer test samples "
        "rightly than the one\ntrained alone on all its data, by McNemar's exact test over all "
        "seeds (one-sided, Holm-corrected over the silos\nof a set, 5 %). *Largest loss*: of "
        "test samples, mean over seeds. *Bytes* and *passes* (over a silo's samples, the\nlargest "
        "of any silo): as multiples of FedAvg's; in brackets the set that moves far more than the "
        "others. What chance\nalone does is in the row of the silos that were trained alone "
        "twice, with two seeds.",
        table(("strategy", *beside), _beside_alone(first, SETS)),
        *_over_more_seeds(entries),
        *_on_papers(first, beside),
        *_on_little(entries),
    )


def _on_unseen_seeds(entries: Sequence[Entry]) -> list[str | list[str]]:
    """Auto beside the strategies that were run with more seeds, on those it was not tuned on."""
    rows = []
    for on, name in product(SETS, SETTINGS):
        found = {run["seed"]: run for run in select(entries, on=on, setting=name)}
        mine = {run["seed"]: run for run in select(entries, on=on, setting="**auto**")}
        if name in ("alone", AGAIN, "**auto**") or not any(seed >= SEEDS for seed in found):
            continue
        seeds = sorted(seed for seed in found.keys() & mine.keys() if seed >= UNSEEN)
        its, own = (np.array(mean_error(runs[seed] for seed in seeds)) for runs in (found, mine))
        error = np.std(own - its, ddof=1) / np.sqrt(len(seeds))
        behind = f"{np.mean(own - its):+.1f} ± {error:.1f}"
        shown = _marked(name, [runs[seed] for runs in (found, mine) for seed in seeds])
        rows.append([on, shown, f"{its.mean():.1f}", f"{own.mean():.1f}", behind, str(len(seeds))])
    if not rows:
        return []
    return [
        "Two seeds are few, so strategies that were better than auto on a shift were run with "
        "more. All seeds from "
        f"{UNSEEN}\non that both have, difference ± standard error:",
        table(("set", "strategy", "its error", "auto's", "auto − strategy", "seeds"), rows),
    ]


def _over_more_seeds(entries: Sequence[Entry]) -> list[str | list[str]]:
    """Who loses in truth, where more seeds were run."""
    rows, losers = [], []
    for name, seeds in product(("**auto**", AGAIN), (SEEDS, MORE_SEEDS)):
        asked = [entry for entry in entries if entry["seed"] < seeds]
        own = {s: r for s, r in _by_set(asked, name, SETS).items() if len(r) > 1}
        sets = {s: paired(runs, select(asked, setting="alone", on=s)) for s, runs in own.items()}
        silos = {f"{n}, {s}": p for s, found in sets.items() for n, p in found.items()}
        means = {n: mean_loss(p.values()) for n, p in silos.items()}
        if not means:
            continue
        most = max(means, key=lambda n: means[n])
        chance, again = largest_by_chance(sets.values()), left_out(silos)
        rows.append(
            [
                _marked(name, chain.from_iterable(own.values())),
                _seeds_of(own),
                f"{sum(map(num_worse, sets.values()))} of {len(silos)}",
                f"{means[most]:.1f} ({most})",
                f"{np.mean(chance):.1f} (up to {np.quantile(chance, 0.95):.1f})",
                f"{np.mean(again):.1f} ± {np.std(again, ddof=1) / np.sqrt(len(again)):.1f}",
            ]
        )
        if name == "**auto**" and seeds == MORE_SEEDS:
            losers = [_loser(n, silos[n]) for n in sorted(means, key=lambda n: -means[n])[:5]]
    if not rows:
        return []
    return [
        "The same over more seeds, to tell who loses in truth. *By chance*: the largest mean loss "
        "that the spread over\nseeds gives if no silo loses or wins in truth, mean and 95th "
        "percentile. *Left out*: what the silo loses in a\nseed that loses most over the others, "
        "± standard error; it is what the largest loss is without the luck of being\nthe largest.",
        table(
            ("strategy", "seeds", "worse beyond chance", "largest loss", "by chance", "left out"),
            rows,
        ),
        "The five silos that lose most beside alone with auto:",
        table(("silo", "mean loss", "seeds lost, even, won", "samples", "McNemar's p"), losers),
    ]


def _loser(name: str, pairs: Mapping[int, Pair]) -> list[str]:
    lost = [one - other for one, other in pairs.values()]
    error = np.std(lost, ddof=1) / np.sqrt(len(lost))
    signs = ", ".join(str(np.sign(lost).tolist().count(sign)) for sign in (1, 0, -1))
    samples = " − ".join(str(sum(column)) for column in zip(*pairs.values(), strict=True))
    p = f"{chance_of(pairs.values()):.2g}"
    return [name, f"{np.mean(lost):.1f} ± {error:.1f}", signs, samples, p]


def _on_papers(entries: Sequence[Entry], beside: Sequence[str]) -> list[str | list[str]]:
    """The papers' silos, if any were run."""
    rows = _rows(entries, PAPERS, PAPERS)
    if not rows:
        return []
    judged = _beside_alone(entries, PAPERS)
    cells = [[*row, *more] for row, (_, *more) in zip(rows, judged, strict=True)]
    oracles = [[*row, *[""] * len(beside)] for row in _oracles(entries, PAPERS, PAPERS)]
    lacking = [name for name in SETTINGS if name not in _names(entries, PAPERS)]
    return [
        "## On the papers' data",
        "Error in %, and beside training alone, as above. Every strategy has its defaults, auto "
        "too: nothing was tuned on\nthese silos. *Seeds*: of each "
        "set; one says little, and cells of different seeds do\nnot compare.",
        [f"- {own.notes}" for own in PAPERS.values()],
        table(
            ("strategy", *(own.title for own in PAPERS.values()), "mean", "seeds", *beside),
            [*cells, *oracles],
        ),
        f"Not run there: {'; '.join(lacking)}." if lacking else "",
    ]


def _of_one_kind(group: Sequence[str]) -> bool:
    return any(set(group) <= set(kind) for kind in KINDS)


def _on_little(entries: Sequence[Entry]) -> list[str | list[str]]:
    """Auto beside training alone with little training, if any was run."""
    rows = []
    for on, own in LITTLE.items():
        auto, alone = (select(entries, on=on, setting=name) for name in ("**auto**", "alone"))
        if not auto or not alone:
            continue
        found = paired(auto, alone)
        mixed = sum(not all(_of_one_kind(group) for group in run["groups"]) for run in auto)
        cells = [spread(np.array(mean_error(runs)), 1) for runs in (alone, auto)]
        right = f"{sum(run['groups'] == KINDS for run in auto)} of {len(auto)}"
        shown = _marked(own.title, [*auto, *alone])
        rows.append([shown, *cells, f"{num_worse(found)} of {len(found)}", right, str(mixed)])
    if not rows:
        return []
    return [
        "## Little training",
        "Six silos with 150 samples of FashionMNIST; the last three permute the labels. AdamW, "
        "lr 0.002, one epoch a round,\nbatches of 32. Error in %; *right*: runs that end with the "
        "two kinds; *mixed*: with a group of both.",
        table(("run", "alone", "auto", "worse beyond chance", "right", "mixed"), rows),
    ]


def _beside_alone(entries: Sequence[Entry], sets: Iterable[str]) -> list[list[str]]:
    """Every strategy beside training alone, and what it costs."""
    sets = list(sets)
    runs = {name: _by_set(entries, name, sets) for name in _names(entries, sets)}
    return [
        [_marked(name, chain.from_iterable(own.values())), *_judged(own, entries)]
        for name, own in runs.items()
    ]


def _judged(own: Mapping[str, Sequence[Entry]], entries: Sequence[Entry]) -> list[str]:
    worse, silos, largest = 0, 0, ("", 0.0)
    ratios: dict[str, list[float]] = {}
    passes = []
    for name, runs in own.items():
        alone, common = (select(entries, setting=s, on=name) for s in ("alone", "FedAvg"))
        found = paired(runs, alone)
        if not found:
            continue
        worse, silos = worse + num_worse(found), silos + len(found)
        silo, loss = max(
            ((silo, mean_loss(pairs.values())) for silo, pairs in found.items()),
            key=lambda entry: entry[1],
        )
        largest = max(largest, (f"{silo}, {name}", loss), key=lambda entry: entry[1])
        usual = {run["seed"]: run["bytes"] for run in common}
        times = [run["bytes"] / usual[run["seed"]] for run in runs if run["seed"] in usual]
        ratios |= {name: times} if times else {}
        rounds = FEDERATIONS[name].run["rounds"] if name in FEDERATIONS else 15
        passes += [max(run["trainings"].values()) / rounds for run in runs if run["trainings"]]
    return [
        f"{worse} of {silos}",
        f"{largest[1]:.1f} ({largest[0]})" if largest[1] > 0 else "none",
        _bytes_cell(ratios),
        f"{max(passes):.1f}" if passes else "–",
    ]


def _bytes_cell(ratios: Mapping[str, Sequence[float]]) -> str:
    """Mean over the sets, and the one that stands out, if one does."""
    if not ratios:
        return "–"
    means = {name: float(np.mean(of_set)) for name, of_set in ratios.items()}
    name, most = max(means.items(), key=lambda entry: entry[1])
    mean = np.mean(list(means.values()))
    return f"{mean:.1f}" + (f" ({most:.1f}, {name})" if most > 1.5 * mean else "")


def _oracles(
    entries: Sequence[Entry], sets: Iterable[str], mean_of: Collection[str]
) -> list[list[str]]:
    """The best strategy of every set, and of every silo."""
    own = ("auto", AGAIN)
    fixed = [n for n, keys in SETTINGS.items() if keys["strategy"] not in own and n not in own]
    best_of_set, best_of_silo = ["oracle: best of a set"], ["oracle: best of every silo"]
    counted = []
    for place, name in enumerate(sets, start=1):
        runs = {s: select(entries, setting=s, on=name) for s in fixed}
        runs = {s: own for s, own in runs.items() if own}
        counted += [place] if name in mean_of else []
        if not runs:
            best_of_set.append("–")
            best_of_silo.append("–")
            continue
        best_of_set.append(f"{min(float(np.mean(mean_error(own))) for own in runs.values()):.1f}")
        seeds = set.intersection(*({run["seed"] for run in own} for own in runs.values()))
        silos = [
            min(
                error_of(run["right"][silo])
                for own in runs.values()
                for run in select(own, seed=seed)
            )
            for seed in sorted(seeds)
            for silo in next(iter(runs.values()))[0]["right"]
        ]
        best_of_silo.append(f"{100 * float(np.mean(silos)):.1f}" if silos else "–")
    both = (best_of_set, best_of_silo)
    return [[*row, _mean([row[place] for place in counted]), ""] for row in both]


def _names(entries: Sequence[Entry], sets: Collection[str]) -> list[str]:
    return [n for n in SETTINGS if any(e["setting"] == n and e["on"] in sets for e in entries)]


def _by_set(entries: Sequence[Entry], name: str, sets: Iterable[str]) -> dict[str, list[Entry]]:
    return {s: select(entries, setting=name, on=s) for s in sets}


def _marked(name: str, runs: Iterable[Entry]) -> str:
    """The name, with a mark if not all runs are of today's rules."""
    return name if all(run.get("rules") == RULES for run in runs) else f"{name} †"


def _rows(
    entries: Sequence[Entry], sets: Collection[str], mean_of: Collection[str]
) -> list[list[str]]:
    """Errors of every strategy that has been measured."""
    rows = []
    for name in _names(entries, sets):
        own = _by_set(entries, name, sets)
        cells = [spread(np.array(mean_error(runs)), 1) if runs else "–" for runs in own.values()]
        means = [float(np.mean(mean_error(own[s]))) for s in mean_of if own[s]]
        mean = f"{np.mean(means):.2f}" if len(means) == len(mean_of) else "–"
        shown = _marked(name, chain.from_iterable(own.values()))
        rows.append([shown, *cells, mean, _seeds_of(own)])
    return rows


def _seeds_of(own: Mapping[str, Sequence[Entry]]) -> str:
    """How many there are of every set: ``5``, or set by set ``2, 1, 5``."""
    counts = [len(runs) for runs in own.values()]
    return ", ".join(map(str, counts if len(set(counts)) > 1 else counts[:1]))


def _mean(cells: Sequence[str]) -> str:
    return "–" if "–" in cells else f"{np.mean([float(cell) for cell in cells]):.2f}"


STORE = Store("auto", document, keys=("on", "setting", "seed"))


def main() -> None:
    """Measure what is not stored yet."""
    known = (*SETS, *FEDERATIONS)
    sets = {"default": ",".join(known), "help": f"of {', '.join(known)}"}
    given = read(STORE, __doc__, data=True, rows=SETTINGS, seeds=SEEDS, sets=sets)
    chosen = [name for name in given.sets.split(",") if name in known]
    cells = (
        {"on": s, "setting": name, "seed": seed, "rules": RULES}
        for seed, s, name in product(range(given.seeds), chosen, given.only)
    )
    given.store.fill(cells, lambda rules, **cell: measure(data=given.data, **cell))
    print(given.store.text())


if __name__ == "__main__":
    main()
