"""HCCT's Figs. 3 to 6 on scikit-learn's digits: newcomers, α, and a number of groups that is given.

    python -m benchmarks.papers.hcct.figures [--parts newcomers,alpha,groups] [--seeds 1]

Up to twenty silos with the same digits, labelled in three ways (by 0, 3 or 6 more), so that there
are three right groups. Minutes on one thread; the paper has CIFAR-10 (Figs. 3 and 4) and Digit
(5 and 6). At the paper's own size a number of groups is `python -m benchmarks.papers.hcct --data
FOLDER --parts digit --groups 1,2,5,10`, and α `--alphas`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.kit import Entry, Node, Store, page, read, select, spread, table, train
from coterie.strategies.partition.evaluation import evaluate
from coterie.strategies.partition.objectives import HCCTUtility

TRAIN, TEST, EVERY = 40, 45, 88
SHIFTS = (0, 3, 6)
ROUNDS, FIRST = 15, 10
JOIN_EVERY, LONG = 8, 24
"""Fig. 3: rounds between newcomers, and in all (the paper: 10 and 50)."""
NEW, ALPHAS, SHARES = (0, 1, 2), (0.0, 5.0, 20.0, 50.0, 100.0, 300.0), (10, 20, 40)
COUNTS: Mapping[int, Sequence[int]] = {
    6: (1, 2, 3, 6),
    12: (1, 2, 3, 5, 12),
    20: (1, 2, 3, 5, 10, 20),
}
PARTS = ("newcomers", "alpha", "groups")


def silos(count: int, seed: int, samples: int = TRAIN) -> list[Node]:
    """So many silos; each kind of labels has every third."""
    return [
        {
            **{"name": f"silo-{i:02d}", "task": "digits", "threads": 1, "device": "cpu"},
            **{"data.train": samples, "data.test": TEST, "data.skip": EVERY * i},
            **{"data.label-shift": SHIFTS[i % 3], "data.split-seed": seed},
        }
        for i in range(count)
    ]


def settings(parts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What is trained."""
    if "newcomers" in parts:
        yield from ({"figure": 3, "new": new} for new in NEW)
    if "alpha" in parts:
        yield from ({"figure": 4, "alpha": a, "samples": s} for s in SHARES for a in ALPHAS)
    if "groups" in parts:
        yield from ({"figure": 5, "silos": n, "K": k} for n, own in COUNTS.items() for k in own)


def measure(seed: int, figure: int, **own: Any) -> Entry:
    """Errors in %, mean over silos, and over those that were there from the beginning."""
    keys: dict[str, Any] = {"strategy": "hcct", "seed": seed, "rounds": ROUNDS, "local-epochs": 3}
    nodes = silos(own.get("silos", FIRST), seed, own.get("samples", TRAIN))
    if figure == 3:
        joins = dict.fromkeys(range(JOIN_EVERY + 1, LONG + 1, JOIN_EVERY), own["new"])
        nodes = silos(FIRST + sum(joins.values()), seed)
        late = [(at, place) for at, count in joins.items() for place in range(count)]
        names = [str(node["name"]) for node in nodes[FIRST:]]
        churn = ", ".join(f"{n}+{at}" for n, (at, _) in zip(names, late, strict=True))
        keys |= {"rounds": LONG, "churn": churn, "min-silos": FIRST}
    keys |= {"alpha": own["alpha"]} if "alpha" in own else {}
    keys |= {"fixed-groups": own["K"]} if "K" in own else {}
    done = train(nodes, keys)
    first = [str(node["name"]) for node in nodes[:FIRST]]
    rounds = [r for r in done.result.rounds if r.evaluation]
    curve = [
        (
            r.evaluated_round,
            float(100 * np.mean([e for n, (_, e, _) in r.evaluation.items() if n in first])),
        )
        for r in rounds
    ]
    last = [r for r in done.result.rounds if not r.final][-1]
    return {
        "error": 100 * float(np.mean(list(done.errors.values()))),
        "of the first": 100 * float(np.mean([done.errors[n] for n in first if n in done.errors])),
        "curve": [(number, round(error, 2)) for number, error in curve],
        "groups": len(last.groups),
        "utility": _utility(last.details),
    }


def _utility(details: Mapping[str, Any]) -> float:
    """Mean utility of the planned groups (eq. 9) on what was compared."""
    names, norms = details["compared"], np.array(details["norms"])
    gram = np.array(details["similarity"]) * np.outer(norms, norms)
    utility = HCCTUtility.from_gram(gram, details["sizes"], alpha=details["alphas"])
    rows = {name: row for row, name in enumerate(names)}
    groups = [[rows[n] for n in group if n in rows] for group in details["planned"]]
    return float(np.mean(evaluate(utility, [g for g in groups if g]).values))


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    seeds = 1 + max((run["seed"] for run in entries), default=0)
    return page(
        "# HCCT's figures on scikit-learn's digits",
        f"Silos of {TRAIN} training digits labelled in three ways, {ROUNDS} rounds of 3 epochs, "
        f"α = 50 unless said, {seeds} seed{'s' * (seeds > 1)}.\nMade by `python -m "
        "benchmarks.papers.hcct.figures`. Errors in %, mean over silos.",
        _newcomers(select(entries, figure=3)),
        _alphas(select(entries, figure=4)),
        _groups(select(entries, figure=5)),
    )


def _newcomers(runs: Sequence[Any]) -> str:
    shown = [JOIN_EVERY, JOIN_EVERY + 2, 2 * JOIN_EVERY, 2 * JOIN_EVERY + 2, LONG]
    rows = [
        [
            str(new),
            *(spread([dict(r["curve"]).get(n, np.nan) for r in own], 1) for n in shown),
            spread([r["error"] for r in own], 1),
            ", ".join(str(r["groups"]) for r in own),
        ]
        for new in NEW
        if (own := select(runs, new=new))
    ]
    heads = ("N_new", *(f"after {n}" for n in shown), "all silos, at the end", "groups")
    what = (
        f"## Fig. 3: newcomers\n\nTen silos begin, N_new more come in rounds "
        f"{', '.join(str(n) for n in range(JOIN_EVERY + 1, LONG + 1, JOIN_EVERY))}; errors of the "
        "ten.\n\n"
    )
    return what + "\n".join(table(heads, rows)) if rows else ""


def _alphas(runs: Sequence[Any]) -> str:
    rows = [
        [f"{alpha:g}"]
        + [
            f"{spread([r['error'] for r in own], 1)} ({', '.join(str(r['groups']) for r in own)})"
            if (own := select(runs, alpha=alpha, samples=samples))
            else ""
            for samples in SHARES
        ]
        for alpha in ALPHAS
    ]
    heads = ("α", *(f"{samples} training samples" for samples in SHARES))
    what = "## Fig. 4: α\n\nIn brackets the groups at the end.\n\n"
    return what + "\n".join(table(heads, rows)) if runs else ""


def _groups(runs: Sequence[Any]) -> str:
    rows = [
        [
            *(str(n), str(k)),
            *(
                spread([r[what] for r in own], digits)
                for what, digits in (("error", 1), ("utility", 3))
            ),
        ]
        for n, counts in COUNTS.items()
        for k in counts
        if (own := select(runs, silos=n, K=k))
    ]
    what = "## Figs. 5 and 6: K groups of N silos\n\n"
    return what + "\n".join(table(("N", "K", "error", "mean utility"), rows)) if rows else ""


STORE = Store(
    "hcct_figures", document, keys=("figure", "new", "alpha", "samples", "silos", "K", "seed")
)


def main() -> None:
    """Measure what is not stored yet."""
    given = read(STORE, __doc__, parts=PARTS, seeds=1)
    cells = ({**own, "seed": i} for i in range(given.seeds) for own in settings(given.parts))
    given.store.fill(cells, measure)
    print(given.store.text())


if __name__ == "__main__":
    main()
