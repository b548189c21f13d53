"""``coterie demo``: group ten silos on this machine by their data.

Nine silos hold scikit-learn's digits in three hidden kinds (upright, turned by 90°, labels
shifted by 3). Local training, FedAvg and HCCT (or another strategy) run over the same processes;
in the last run a tenth silo joins after a third of the rounds and one leaves after two thirds.
FedGenP, which shares one model, is shown on kinds that differ only in their images.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from threading import Event as Flag
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from coterie.server.machine.local import LocalFederation, SiloSpec
from coterie.server.report.explain import alpha_of
from coterie.server.report.race import explain_race
from coterie.server.report.shown import shown_for
from coterie.server.report.view import collaboration_text
from coterie.server.runs.config import RunConfig
from coterie.server.runs.letters import letters_of
from coterie.server.runs.record import Event, Run, read_whole
from coterie.server.study.playing import OnProcesses
from coterie.strategies.errors import refused
from coterie.strategies.partition.hcct import alpha_path
from coterie.strategies.registry import STRATEGIES
from coterie.system.terminal import aside

KINDS: Mapping[str, Mapping[str, int]] = {
    "upright": {},
    "turned": {"rotation": 90},
    "shifted": {"label-shift": 3},
}
TURNED: Mapping[str, Mapping[str, int]] = {
    "upright": {},
    "turned": {"rotation": 90},
    "over": {"rotation": 180},
}
"""Kinds for a strategy without groups: the same classes in rotated images."""
SIZES = (40, 70, 120)
NUM_TEST = 70
NEWCOMER, NEWCOMER_SIZE = "upright-late", 30
LEAVERS = ("shifted-2", "over-2")
GROUPING: Mapping[str, Mapping[str, Any]] = {
    "auto": {"strategy": "auto"},
    "hcct": {"strategy": "hcct"},
    "fedgroup": {"strategy": "fedgroup", "num-groups": 3, "cold-start-epochs": 25},
    "fedcollab": {"strategy": "fedcollab", "c": 10.0},
    "fedgenp": {"strategy": "fedgenp"},
}
WITHOUT_GROUPS = ("fedgenp",)


@dataclass(frozen=True)
class Outcome:
    """The results of the demo. Errors are shares in [0, 1]; those never measured are missing."""

    folder: Path
    errors: Mapping[str, Mapping[str, float]]
    samples: Mapping[str, int]
    tested: Mapping[str, int]
    groups: list[list[str]]
    hidden: list[list[str]]
    seconds: float
    peak_memory: int
    hashes: Mapping[str, Mapping[str, str]]


def silos(seed: int, kinds: Mapping[str, Mapping[str, int]] = KINDS) -> list[SiloSpec]:
    """Return the nine silos: three kinds of three sizes, without common samples."""
    specs, skip = [], 0
    for kind, options in kinds.items():
        for i, size in enumerate(SIZES, start=1):
            specs.append(_spec(f"{kind}-{i}", size, skip, seed, options))
            skip += size + NUM_TEST
    return specs


def newcomer(seed: int) -> SiloSpec:
    """Return the tenth silo, upright."""
    skip = 3 * (sum(SIZES) + 3 * NUM_TEST)
    return _spec(NEWCOMER, NEWCOMER_SIZE, skip, seed, KINDS["upright"])


def _spec(name: str, size: int, skip: int, seed: int, options: Mapping[str, int]) -> SiloSpec:
    cut = {"train": size, "test": NUM_TEST, "skip": skip, "split-seed": seed}
    return SiloSpec(name, options={**cut, **options})


def hidden_groups(names: list[str]) -> list[list[str]]:
    """Return the silos grouped by the kind of their data, which the algorithm does not know."""
    kinds = [[n for n in sorted(names) if n.startswith(kind)] for kind in KINDS]
    return sorted(group for group in kinds if group)


def demo(
    console: Console,
    *,
    seed: int = 0,
    rounds: int = 20,
    alpha: float | None = None,
    strategy: str = "hcct",
    folder: Path | None = None,
) -> Outcome:
    """Run the demo and print its results.

    Args:
        seed: of data, models and training.
        rounds: at least 6, so that there is time to join and to leave.
        alpha: HCCT's preference for more data; by default the strategy's.
        strategy: ``hcct``; ``auto``; ``fedgroup`` with three groups and a long pre-training;
            ``fedcollab``; ``fedgenp``.
        folder: for all files; by default a new one under ``runs/``.

    Raises:
        FederationError: an argument is out of bounds, something did not start, or a run failed.
    """
    if strategy not in GROUPING:
        raise refused(f"strategy must be one of {', '.join(GROUPING)}. Got {strategy!r}.")
    if rounds < 6:
        raise refused(f"the demo needs at least 6 rounds. Got {rounds}.")
    started = time.monotonic()
    folder = folder or Path("runs") / datetime.now().strftime("demo-%Y%m%d-%H%M%S")
    specs = silos(seed, TURNED if strategy in WITHOUT_GROUPS else KINDS)
    common: dict[str, Any] = {
        "rounds": rounds,
        "seed": seed,
        "local-epochs": 5,
        "batch-size": 16,
        "lr": 0.1,
        "lr-decay": 0.995,
        "min-silos": len(specs),
    }
    grouping = dict(GROUPING[strategy]) | ({} if alpha is None else {"alpha": alpha})
    RunConfig.read({**common, **grouping})  # before anything is started
    progress = aside(console)
    progress.print(
        f"[bold]coterie demo[/]: {len(specs)} silos, each a separate process, connect to a "
        f"SuperLink on this machine over gRPC. All files are in {escape(str(folder))}/",
        soft_wrap=True,
    )
    with LocalFederation(folder) as federation, _memory_watched(federation) as memory:
        for spec in specs:
            federation.start_silo(spec)
        federation.wait_for_silos(len(specs))
        since = time.monotonic() - started
        progress.print(f"{len(specs)} silos are connected after {since:.1f} s.")

        def play(title: str, on_event: Callable[[Event], None] = lambda _: None, **own: Any) -> Run:
            config = RunConfig.read({**common, **own, "label": title})
            silos_here = OnProcesses(federation, on_event)
            return read_whole(silos_here.play(config, title=title, shown=shown_for(progress)))

        alone = play("alone", strategy="independent")
        common["baseline-run"] = alone.run_id
        runs = {
            "alone": alone,
            "global": play("global", strategy="fedavg"),
            "grouped": _play_grouped(play, federation, seed, rounds, grouping),
        }
    outcome = _outcome(folder, runs, time.monotonic() - started, max(memory))
    _print_outcome(console, outcome, runs["grouped"])
    from coterie.server.report.command import write_report  # draws: loaded late

    (report,) = write_report(runs["grouped"].run_id, root=federation.runs_dir)
    console.print(f"Report: {report}", markup=False, soft_wrap=True)
    return outcome


@contextmanager
def _memory_watched(federation: LocalFederation) -> Iterator[list[int]]:
    samples, over = [0], Flag()

    def watch() -> None:
        while not over.is_set():
            samples.append(federation.memory())
            over.wait(2.0)

    with ThreadPoolExecutor(max_workers=1) as pool:
        pool.submit(watch)
        try:
            yield samples
        finally:
            over.set()


def _play_grouped(
    play: Callable[..., Run],
    federation: LocalFederation,
    seed: int,
    rounds: int,
    own: Mapping[str, Any],
) -> Run:
    """Play the run in which one silo joins and one leaves.

    The rounds of both are part of the run's configuration (``churn``), so that two demos with one
    seed are equal. The changes are real: a process starts, one ends.
    """
    join, leave = round(rounds / 3), round(2 * rounds / 3) + 1
    leaver = LEAVERS[own["strategy"] in WITHOUT_GROUPS]

    def on_event(event: Event) -> None:
        # Started two rounds early, because a Python with torch takes seconds to start.
        if event.kind == "look" and event.number == max(join - 2, 2):
            federation.start_silo(newcomer(seed))
        if event.kind == "look" and event.number == leave:
            federation.end_silo(leaver)

    churn = f"{NEWCOMER}+{join}, {leaver}-{leave}"
    title = STRATEGIES[own["strategy"]].public
    return play(title, on_event, churn=churn, **own)


def _outcome(folder: Path, runs: Mapping[str, Run], seconds: float, peak: int) -> Outcome:
    errors = {title: run.last_errors() for title, run in runs.items()}
    grouped = runs["grouped"]
    personalised = grouped.last_personal_errors()
    if personalised:
        errors["personalised"] = personalised
    groups = sorted(map(list, grouped.final_groups))
    return Outcome(
        folder=folder,
        errors=errors,
        samples={name: int(silo.num_examples) for name, silo in grouped.silos.items()},
        tested=grouped.test_counts(),
        groups=groups,
        hidden=hidden_groups([name for group in groups for name in group]),
        seconds=seconds,
        peak_memory=peak,
        hashes={title: run.model_hashes for title, run in runs.items()},
    )


# ---------------------------------------------------------------- what is printed at the end


def _print_outcome(console: Console, outcome: Outcome, run: Run) -> None:
    table = _table(outcome, run)
    console.print()
    console.print(table)
    if run.strategy in WITHOUT_GROUPS:
        console.print(GENERATORS_TEXT, soft_wrap=True)
    elif outcome.groups == outcome.hidden:
        console.print("The three hidden groups were [bold]found exactly[/].")
    else:
        hidden = "; ".join(", ".join(group) for group in outcome.hidden)
        console.print(f"The three hidden groups were [bold]NOT found[/]: {hidden}.")
    if run.strategy == "auto":
        for sentence in (*explain_race(run).whole, f"Every silo's reasons: {_again(run)}"):
            console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    if run.strategy == "hcct":
        console.print(_alpha_text(run), soft_wrap=True)
    if run.strategy == "fedcollab" and (structure := run.rounds[-1].grouping.structure):
        from coterie.server.report.similarity import interval_text  # draws: loaded late

        text = "FedCollab chose these groups by error bounds, which the report shows."
        console.print(text + interval_text(structure), soft_wrap=True)
    if run.collaboration:
        console.print(f"{collaboration_text(run.collaboration, run.lead)}.", soft_wrap=True)
    memory = f", peak memory {outcome.peak_memory / 1e9:.1f} GB" if outcome.peak_memory else ""
    console.print(
        f"{outcome.seconds:.0f} s in total{memory}. Models, records and logs: {outcome.folder}/",
        markup=False,
        soft_wrap=True,
    )


def _again(run: Run) -> str:
    place = shlex.join(["--runs-dir", str(run.folder.parent)])
    return f"coterie runs explain {shlex.quote(run.name)} {place}"


GENERATORS_TEXT = (
    "The coordinator trained a generator of latents for every silo, against the silo's own "
    "predictor and for those of the others. [bold]FedGenP[/] is the global model; [bold]Per[/] "
    "is each silo's personalised model after its last training with the generator."
)


def _table(outcome: Outcome, run: Run) -> Table:
    title, lead = STRATEGIES[run.strategy].public, run.lead
    caption = f"{lead.head} on each silo's own test data: {lead.direction}"
    table = Table(title=caption[0].upper() + caption[1:], title_justify="left")
    runs = list(outcome.errors)
    names_of = {"alone": "local", "grouped": title, "personalised": "Per"}
    remarks = {NEWCOMER: " (joined late)", **dict.fromkeys(LEAVERS, " (left early)")}
    for column in (
        "silo",
        "samples",
        "test samples",
        "group",
        *(names_of.get(own, own) for own in runs),
    ):
        table.add_column(column, justify="left" if column == "silo" else "right")
    group_of = letters_of(outcome.groups)
    called = {n: group_of.get(n, "left") or "alone" for n in outcome.errors["grouped"]}
    names = sorted(outcome.errors["grouped"], key=lambda n: (called[n], n))
    for name in names:
        table.add_row(
            Text(name + remarks.get(name, "")),
            str(outcome.samples.get(name, "")),
            str(outcome.tested.get(name, "")),
            called[name],
            *(lead.number(outcome.errors[own].get(name, math.nan)) for own in runs),
        )
    table.add_section()
    measured = set(group_of).intersection(*outcome.errors.values())
    shared = [name for name in names if name in measured]
    means = [float(np.mean([outcome.errors[r][n] for n in shared])) for r in outcome.errors]
    cells = (f"[bold]{lead.number(mean)}[/]" for mean in means)
    table.add_row(f"mean of {len(shared)}", "", "", "", *cells)
    return table


def _alpha_text(run: Run) -> str:
    alpha = alpha_of(run, run.rounds[-1])
    last = run.rounds[-1].grouping
    assert last.similarity is not None, "HCCT compares updates in every round"
    cosines, norms = last.similarity.values, last.norms
    sizes = [run.silos[name].num_examples for name in last.similarity.names]
    path = alpha_path(cosines * np.outer(norms, norms), sizes, solver="optimal")
    steps = []
    for stretch in path:
        if stretch.ratio < 1.15 and len(stretch.groups) not in (1, len(sizes)):
            continue  # short ranges between two long ones
        high = "∞" if np.isinf(stretch.alpha_high) else f"{stretch.alpha_high:.0f}"
        steps.append(f"{stretch.alpha_low:.0f}–{high}: {len(stretch.groups)}")
    return (
        "α is the preference for more data: a silo's utility is −α/D + cos(its update, its "
        f"group's), where D is the number of samples in the group. This run had α = {alpha:.3g}. "
        "With its last updates, other values of α give this many groups: "
        f"{', '.join(steps)}. A small α leaves every silo alone, a large α puts all of them "
        "together; in between, silos that learn the same thing stay together."
    )
