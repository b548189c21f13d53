"""FedCollab's experiments as Markdown, and the plot of known distances."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.kit import (
    Column,
    Entry,
    Store,
    columns,
    panels,
    select,
    spread,
    table,
    typed,
    unfinished,
)
from benchmarks.papers.fedcollab.distances import KNOWN_BUDGETS, KNOWN_KINDS, KNOWN_SHARES
from benchmarks.papers.fedcollab.experiments import (
    COLLAB,
    EXPERIMENTS,
    LOCAL,
    MIN_AUTHORS_ROUNDS,
    PAPER_STRUCTURE,
    VARIANTS,
)
from coterie.server.runs.record.metrics import ipr, rsd

PUBLISHED = ("fashion", "cifar10", "cifar100")
"""The paper's three columns; the others have been changed, to see what that does."""
TURNED = ("cifar10-corners", "cifar10")
UNKNOWN = (np.nan, np.nan, np.nan)


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    lines = [
        "# FedCollab's experiments",
        "",
        "Made by `python -m benchmarks.papers.fedcollab --data FOLDER`. Silos are numbered "
        "from 0. Seconds are wall clock of a machine that may have had other work. Where there are "
        "fewer than three seeds, or than the paper's rounds, they were not run: they take hours. "
        "The paper's figures of FedProx, FedNova, Per-FedAvg and pFedMe are not at hand.",
        "",
        *_missing(entries),
    ]
    for name in EXPERIMENTS:
        own = select(entries, experiment=name)
        lines += _accuracy_section(name, select(own, part="accuracy"))
        lines += _structures(name, own)
    if turned(entries):
        lines += ["![distances between turned silos](fedcollab_distances.png)", ""]
    lines += _cost_section(entries)
    lines += _known_section(select(entries, part="known"))
    return "\n".join(lines)


def _missing(entries: Sequence[Entry]) -> list[str]:
    """What is not finished of the paper's columns."""
    lines = []
    for name in PUBLISHED:
        own = EXPERIMENTS[name]
        runs = select(entries, part="accuracy", experiment=name, rounds=own.rounds)
        if text := unfinished({v: len(select(runs, variant=v)) for v in VARIANTS}):
            lines += [f"- {own.title}. {text}"]
    return [*lines, ""]


def _accuracy_section(name: str, runs: Sequence[Entry]) -> list[str]:
    experiment = EXPERIMENTS[name]
    figures = ("accuracy", "IPR", "RSD")
    heads = *(head for name in figures for head in (name, "the paper's", "gap")), "seeds", "s"
    lines: list[str] = []
    for rounds in sorted({run["rounds"] for run in runs}, reverse=True):
        made = select(runs, rounds=rounds)
        short = "" if rounds == experiment.rounds else f" (**the paper's: {experiment.rounds}**)"
        rows = {variant: select(made, variant=variant) for variant in VARIANTS}
        lines += [
            f"## {experiment.title}",
            "",
            f"{experiment.notes} {rounds} rounds{short}. c = {experiment.c:g}. Accuracy: plain "
            "mean over silos of the last round's, on each silo's own test data; IPR: share of "
            "silos better than Local; RSD: standard deviation of the gain over Local. All in %, "
            "mean ± standard deviation over seeds.",
            "",
            typed("fedcollab", name, made, rounds=experiment.rounds),
            "",
            *table(
                ("", *heads),
                (
                    _accuracy_cells(variant, own, made, experiment.paper.get(variant, UNKNOWN))
                    for variant, own in rows.items()
                    if own
                ),
            ),
            "",
        ]
    return lines


def _accuracy_cells(
    variant: str, runs: Sequence[Entry], made: Sequence[Entry], paper: Sequence[float]
) -> list[str]:
    figures = [_figures(run, made) for run in runs]
    ours = [spread((f[i] for f in figures), missing="") for i in range(3)]
    published = [f"{value:.2f}" if value == value else "" for value in paper]
    means = [np.mean([f[i] for f in figures]) - paper[i] for i in range(3)]
    gaps = [f"{gap:+.2f}" if gap == gap else "" for gap in means]
    cells = [cell for three in zip(ours, published, gaps, strict=True) for cell in three]
    seeds = ", ".join(str(run["seed"]) for run in runs)
    return [variant, *cells, seeds, f"{np.mean([run['seconds'] for run in runs]):.0f}"]


def _figures(run: Entry, runs: Sequence[Entry]) -> tuple[float, float, float]:
    """Accuracy, IPR and RSD in %, the last two beside the same seed's run alone."""
    local = select(runs, variant=LOCAL, seed=run["seed"], rounds=run["rounds"])
    accuracy = 100 - float(np.mean(run["errors"]))
    if not local or run["variant"] == LOCAL:
        return accuracy, float("nan"), float("nan")
    ours, alone = (
        {str(i): error / 100 for i, error in enumerate(one["errors"])} for one in (run, local[0])
    )
    return accuracy, 100 * ipr(ours, alone), 100 * rsd(ours, alone)


def _structures(name: str, entries: Sequence[Entry]) -> list[str]:
    """Seed by seed: structure, bound, interval of c, rounds and bytes of the discriminators."""
    found = select(entries, part="structure")
    if not found:
        return []
    runs, own = select(entries, part="accuracy"), EXPERIMENTS[name]
    untrained = [] if runs else [f"{own.notes} Nobody has been trained on these silos yet.", ""]
    lines = [
        f"### {own.title}: the structure, seed by seed",
        "",
        *untrained,
        *columns(found, STRUCTURE),
    ]
    per_seed = select(runs, variant=COLLAB)
    if per_seed:
        lines += ["", f"{COLLAB}, seed by seed (accuracy, IPR, RSD): "]
    for run in per_seed:
        figures = ", ".join(f"{v:.2f}" for v in _figures(run, runs) if v == v)
        lines.append(f"- seed {run['seed']}, {run['rounds']} rounds: {figures}")
    return [*lines, ""]


def _interval_text(run: Entry) -> str:
    low, high = run["c from–to"] or (float("nan"), float("nan"))
    return f"{low:.3g} – {'∞' if high is None else f'{high:.3g}'}"


def _auto_text(run: Entry) -> str:
    """c = auto on the same distances, and whether it gives the paper's structure."""
    groups = run["auto groups"]
    same = "the paper's" if groups == PAPER_STRUCTURE else _groups_text(groups)
    return f"{run['c = auto']:.3g}: {same}"


def _groups_text(groups: Iterable[Sequence[int]]) -> str:
    parts = []
    for group in groups:
        whole = list(group) == list(range(group[0], group[-1] + 1)) and len(group) > 1
        parts.append(f"{group[0]}–{group[-1]}" if whole else ", ".join(map(str, group)))
    return " ".join(f"{{{part}}}" for part in parts)


def _cost_section(entries: Sequence[Entry]) -> list[str]:
    lines = ["## What the discriminators cost (FashionMNIST, 20 silos, 190 pairs)", ""]
    found = select(entries, part="structure", experiment="fashion")
    if found:
        bytes_each = 4 * (784 * 200 + 200 + 10 * 200 + 200 + 200 + 1)
        authors = MIN_AUTHORS_ROUNDS * 190 * 4 * bytes_each
        moved = float(np.mean([run["bytes"] for run in found]))
        rounds = ", ".join(str(run["discriminator rounds"]) for run in found)
        share = f"{100 * moved / authors:.1f} %"
        rows = (
            ["federated rounds, by seed", rounds, f"{MIN_AUTHORS_ROUNDS} a pair, in turn", ""],
            ["arrays on the wire, GB", f"{moved / 1e9:.2f}", f"{authors / 1e9:.1f}", share],
        )
        lines += [*table(("", "ours", "the paper's, at the least", "ours / the paper's"), rows), ""]
    for entry in select(entries, part="time"):
        loop, wide = entry["loop over pairs"], entry["wide layers"]
        ratios = " and ".join(f"{loop / one:.1f}" for one in wide)
        lines += [
            "Computing one round of 20 steps of all pairs, averaging and scoring included, one "
            f"thread: a loop over pairs {loop:.1f} s (every tenth pair, times ten); one wide "
            f"layer a silo, before and after it, {wide[0]:.1f} and {wide[1]:.1f} s: {ratios} "
            "times faster.",
            "",
        ]
    for entry in select(entries, part="scheme"):
        schemes = [{"": name, **entry[name]} for name in ("ours", "the paper's")]
        lines += [
            "Two silos of each kind (8 of the 20, 28 pairs), against the known total variation "
            "distance. *The paper's*: 101 rounds of one mini-batch, 7 training samples a silo "
            "(half of the smallest), best of all evaluations; here all pairs at once.",
            "",
            *columns(schemes, SCHEME),
            "",
        ]
    return lines


def _known_section(entries: Sequence[Entry]) -> list[str]:
    if not entries:
        return []
    lines = [
        "## Estimates of known distances",
        "",
        "Two FashionMNIST silos; mean ± standard deviation of the estimates over seeds, by the "
        "number of samples of each silo. *label*: a share of the second silo's samples has "
        "labels that the first has none of; *concept*: other labels for the same images; "
        "*feature*: images upside down. The share is the total variation distance (of *concept* "
        "and *feature* nearly: an image tells its class and which way up it is, but not always).",
        "",
    ]
    sizes = sorted({e["samples"] for e in entries})
    heads = ("kind", "distance", *(f"{size} samples" for size in sizes))
    for budget, (title, _) in KNOWN_BUDGETS.items():
        if own := select(entries, budget=budget):
            lines += [f"Budget: {title}.", "", *table(heads, _known_rows(own, sizes)), ""]
    return [*lines, "![estimates of known distances](fedcollab_known.png)", ""]


def _known_rows(entries: Sequence[Entry], sizes: Sequence[int]) -> Iterable[list[str]]:
    for kind in KNOWN_KINDS:
        for share in KNOWN_SHARES:
            own = select(entries, kind=kind, share=share)
            if own:
                cells = ([e["estimate"] for e in select(own, samples=size)] for size in sizes)
                yield [kind, f"{share:g}", *(spread(found, missing="") for found in cells)]


def turned(entries: Sequence[Entry]) -> list[Entry]:
    """The first structure of each experiment with turned photographs."""
    found = select(entries, part="structure")
    return [own[0] for name in TURNED if (own := select(found, experiment=name))]


def draw_distances(entries: Sequence[Entry], file: Path) -> None:
    """The paper's Fig. 4: a panel per way to turn photographs, distances of all pairs of silos."""
    found = turned(entries)
    with panels(file, 1, len(found), figsize=(4.2 * len(found), 3.8)) as (axes,):
        for panel, run in zip(axes, found, strict=True):
            shown = panel.imshow(square(run["distances"]), vmin=0, vmax=1, cmap="viridis")
            panel.set_title(EXPERIMENTS[run["experiment"]].title, fontsize=9)
            panel.set_xlabel("silo")
            panel.set_xticks(range(0, 20, 5))
            panel.set_yticks(range(0, 20, 5))
        axes[0].set_ylabel("silo")
        panel.figure.colorbar(shown, ax=list(axes), label="distance")


def square(triangle: Sequence[Sequence[float]]) -> np.ndarray:
    """(N, N) from the N − 1 rows above the diagonal."""
    matrix = np.zeros((len(triangle) + 1, len(triangle) + 1))
    for i, row in enumerate(triangle):
        matrix[i, i + 1 :] = matrix[i + 1 :, i] = row
    return matrix


def draw_known(entries: Sequence[Entry], file: Path) -> None:
    """Estimates over known distances: a panel per kind and budget, a line per number of samples."""
    budgets = [b for b in KNOWN_BUDGETS if select(entries, part="known", budget=b)]
    size = (10, 3.4 * len(budgets))
    with panels(file, len(budgets), len(KNOWN_KINDS), figsize=size, sharey=True) as rows:
        for budget, axes in zip(budgets, rows, strict=True):
            for panel, kind in zip(axes, KNOWN_KINDS, strict=True):
                own = select(entries, part="known", budget=budget, kind=kind)
                panel.plot([0, 1], [0, 1], color="black", linewidth=1, label="known")
                for count in sorted({entry["samples"] for entry in own}):
                    means = {
                        share: np.mean([e["estimate"] for e in made])
                        for share in KNOWN_SHARES
                        if (made := select(own, samples=count, share=share))
                    }
                    panel.plot(
                        list(means), list(means.values()), marker="o", markersize=3,
                        label=f"{count} samples",
                    )  # fmt: skip
                panel.set_title(f"{kind}, {'10' if budget == 'default' else '100'} rounds")
                panel.set_xlabel("total variation distance")
            axes[0].set_ylabel("estimate")
        rows[0][0].legend(fontsize=8)


STRUCTURE: dict[str, Column] = {
    "seed": "{seed}",
    "structure": lambda run: _groups_text(run["groups"]),
    "the paper's": lambda run: "yes" if run["groups"] == PAPER_STRUCTURE else "no",
    "bound: chosen, second best": "{bound[0]:.4g}, {bound[1]:.4g}",
    "c from – to": _interval_text,
    "c = auto": _auto_text,
    "rounds": "{discriminator rounds}",
    "GB": lambda run: f"{run['bytes'] / 1e9:.2f}",
    "s": "{seconds:.0f}",
}
SCHEME: dict[str, Column] = {
    "": lambda run: run[""],
    "rounds": "{rounds}",
    "MB": lambda run: f"{run['bytes'] / 1e6:.0f}",
    "s": "{seconds:.0f}",
    "mean absolute error": "{mean absolute error:.3f}",
    "mean error": "{mean error:+.3f}",
}
"""Columns: structures seed by seed; the discriminators' schemes."""
STORE = Store(
    "fedcollab",
    document,
    keys=(
        *("part", "experiment", "variant", "seed", "rounds"),
        *("budget", "kind", "share", "samples"),
    ),
)
