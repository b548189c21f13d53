"""Explanation of the groups that ``auto`` chose, from a run's record.

It covers the race as a whole, then every silo: its measurements, their uncertainty and the choice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from coterie import wire
from coterie.server.paths import with_federation
from coterie.server.report import families
from coterie.server.report.gains import grows_trees
from coterie.server.report.race_words import groups_text, listed, own_parts, taking, titles
from coterie.server.runs.record import Entrant, Placement, Round, Run, Verdict
from coterie.server.runs.record.metrics import Lead
from coterie.strategies.auto.candidates import TOGETHER
from coterie.strategies.errors import refused
from coterie.strategies.partition.race import standard_error

COLUMNS = ("partition", "held-out", "behind the best", "samples per model")


@dataclass(frozen=True)
class Explanation:
    """Why the groups of a round are as they are, in sentences: on the whole, and by silo.

    Of a run of ``auto``, ``whole`` is about its race; ``rows`` belong under ``COLUMNS``;
    ``verdict`` is None before there is one. If it chooses between families of models, ``rows`` and
    ``verdict`` are of networks, ``whole`` is about all races, and ``families`` has each.
    """

    round: int
    whole: tuple[str, ...]
    silos: Mapping[str, str]
    rows: tuple[tuple[str, ...], ...] = ()
    verdict: Verdict | None = None
    families: Mapping[str, Explanation] = field(default_factory=dict)

    @property
    def races(self) -> Mapping[str, Explanation]:
        """Title of a family → its race; without a title if there is one family."""
        return self.families or {"": self}


def thin_evidence(run: Run) -> str:
    """Say that the last race could not tell the result from the alternative; empty if it could.

    The alternative to groups is everybody alone, and that to everybody alone is any other partition
    that was in the race to its end.
    """
    rounds = [*run.rounds, *([run.final] if run.final else [])]
    verdict = next((v for one in reversed(rounds) if (v := one.grouping.verdict)), None)
    if run.strategy != "auto" or verdict is None:
        return ""
    if not verdict.judges:
        return "no silo sent errors on held-out data, so there is no evidence for the groups."
    alone = verdict.winner == verdict.alone
    rivals = [
        name
        for number, (name, e) in enumerate(
            zip(titles(verdict.entrants), verdict.entrants, strict=True)
        )
        if not e.out and number != verdict.winner and (alone or number == verdict.alone)
    ]
    if not rivals:
        return ""
    result = "training alone" if alone else "the groups"
    explain = with_federation(f"coterie runs explain {run.name}", run.folder)
    return (
        f"the evidence for {result} is thin: with {_count(verdict.judges, 'silo')}, "
        f"{titles(verdict.entrants)[verdict.winner]} may be no better than {listed(rivals)}. "
        f"`{explain}` shows the figures."
    )


def explain_race(run: Run, *, number: int | None = None) -> Explanation:
    """Explain the groups after a round, by default the last; with families, of each, and these.

    Raises:
        FederationError: there is no such round, or its part of the record is damaged.
    """
    found = _explained(run, number)
    rounds = [one for one in run.rounds if one.round <= found.round]
    if families.BOOSTED not in rounds[-1].details:
        return found
    if run.final and rounds[-1] is run.rounds[-1]:
        rounds.append(run.final)
    trees, said = _explained(families.of_trees(run), number), families.sentences_in(rounds)
    uses = {name: own["family"] for name, own in families.entries_in(rounds).items()}
    silos = {}
    for name, text in found.silos.items():
        own = trees.silos.get(name, text) if uses.get(name) == wire.TREES else text
        silos[name] = f"{said[name]} It {own}" if name in said else own
    races = {"Networks": found, "Boosted trees": trees}
    whole = [line for title, own in races.items() for line in (f"{title}:", *own.whole)]
    return replace(found, whole=tuple(whole), silos=silos, families=races)


def _explained(run: Run, number: int | None) -> Explanation:
    rounds = [one for one in run.rounds if number is None or one.round <= number]
    if not rounds or number not in (None, rounds[-1].round):
        raise refused(
            f"round must be in [1, {len(run.rounds)}]. Got {number}."
            if run.rounds
            else "no round of this run is recorded, so there is nothing to explain yet."
        )
    ending = number is None or rounds[-1] is run.rounds[-1]
    explained = [*rounds, *([run.final] if run.final and ending else [])]
    verdict = next((v for one in reversed(explained) if (v := one.grouping.verdict)), None)
    last = rounds[-1]
    if last.grouping.phase == "race" and (verdict is None or verdict.round < last.round):
        return _during_race(run, last)
    if verdict is None:
        return _before_race(last)
    chosen = _Chosen(run, verdict, explained)
    return Explanation(
        last.round, tuple(chosen.race()), dict(chosen.silos()), tuple(chosen.rows()), verdict
    )


# ---------------------------------------------------------------- before there is a verdict


def _before_race(last: Round) -> Explanation:
    text = (
        f"Until round {last.round} every silo trained alone from the common initial model, to show "
        "whose data are similar. No groups have been compared yet."
    )
    return Explanation(last.round, (text,), dict.fromkeys(_here(last), "trained alone so far."))


def lead_of_race(lead: Lead, of: Round) -> Lead:
    """Return the metric that a race compares by: the run's, or the one that the round names."""
    return Lead(of.grouping.score) if of.grouping.score else lead


def _during_race(run: Run, last: Round) -> Explanation:
    entrants, judges = last.grouping.entrants, last.grouping.judges
    lead = lead_of_race(run.lead, last)
    names = titles(entrants)
    text = (
        f"After round {last.round} a race between {len(entrants)} partitions was under way: "
        f"{'; '.join(names)}."
    )
    if judges:
        text += f" So far {_count(judges, 'silo')} measured all of them."
    else:
        text += " No silo had measured all of them yet."
    rows = tuple(
        (name, lead.text(e.error), _behind(lead, e), _samples(e.samples))
        for name, e in zip(names, entrants, strict=True)
        if judges
    )
    why = "its place is decided when the race is over."
    return Explanation(last.round, (text,), dict.fromkeys(_here(last), why), rows)


def _here(last: Round) -> list[str]:
    return sorted(name for group in last.groups for name in group)


# ---------------------------------------------------------------- the verdict


@dataclass(frozen=True)
class _Chosen:
    """A verdict, and the rounds up to which it is explained."""

    run: Run
    verdict: Verdict
    rounds: Sequence[Round]

    @property
    def lead(self) -> Lead:
        return lead_of_race(self.run.lead, self._last)

    @property
    def names(self) -> list[str]:
        return titles(self.verdict.entrants)

    # ------------------------------------------------------------ the race

    def race(self) -> Iterable[str]:
        verdict = self.verdict
        yield self._how()
        if not verdict.judges:
            yield (
                "No silo sent errors on held-out samples (share_metrics in silo.toml may withhold "
                "them), so the race could not be decided. Every silo trains alone."
            )
        else:
            yield f"Chosen: {self.names[verdict.winner]}: {groups_text(verdict)}. {self._why()}"
            if penalty := verdict.chosen.own_penalty:
                yield f"Every silo has its own model: {own_parts(verdict)} (λ = {penalty:g})."
            if verdict.chosen.by_silo:
                yield "One group's trees also split by silo, where its silos differ."
        yield from self._hidden_layers()
        silent = [name for name in verdict.silos if name not in verdict.judges]
        if silent and verdict.judges:
            yield (
                f"{listed(silent)} did not measure every partition (the silo's policy keeps "
                "errors back, its metric is not defined on its samples, it has too few, or it was "
                "offline): placed by the others' measurements."
            )
        if verdict.own:
            yield f"Keeping the model trained alone: {listed(verdict.own)}."
        if verdict.left:
            yield f"Alone because most of their group are: {listed(verdict.left)}."
        if waiting := self.rounds[-1].grouping.probation or self._last.grouping.probation:
            yield f"Newcomers on probation: {listed(sorted(waiting))}."
        yield from self._cost()

    def _hidden_layers(self) -> Iterable[str]:
        """Say what became of the hidden layers of a table's network."""
        for one in self.rounds:
            found = one.details.get("hidden-layers")
            if not isinstance(found, Mapping) or not isinstance(found.get("share"), int | float):
                continue
            before = f"Before round {one.round}, samples that were held out showed that"
            if found.get("leave"):
                yield (
                    f"{before} every silo's own hidden layers are better than its group's. From "
                    "then on every silo trains alone."
                )
            elif found["share"]:
                yield f"{before} hidden layers help; {found['share']:.0%} of their effect is kept."
            else:
                yield f"{before} hidden layers do not help: the models are linear."

    @property
    def _last(self) -> Round:
        return next(one for one in reversed(self.rounds) if not one.final)

    def _how(self) -> str:
        verdict, first = self.verdict, self.verdict.began + 1
        rounds = f"rounds {first}–{verdict.round}" if verdict.round > first else f"round {first}"
        counts = [verdict.trials[n].count for n in verdict.judges if n in verdict.trials]
        text = f"A race of {len(verdict.entrants)} partitions in {rounds} decided"
        if counts:
            low, high = min(counts), max(counts)
            each = f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"
            text += (
                f", judged by {_count(verdict.judges, 'silo')} on {each} held-out samples "
                f"each ({self.lead.title}: {self.lead.direction}; ± is one standard error)"
            )
        if not verdict.complete:
            text += ". The run ended before the race, so the best partition so far was chosen"
        return f"{text}."

    def _why(self) -> str:
        chosen = self.verdict.chosen
        best = next((e for e in self.verdict.entrants if e.behind == 0 and not e.dropped), chosen)
        others = [e for e in self.verdict.entrants if e is not chosen and not e.out]
        measured = f"{self.lead.text(chosen.error)} on average over silos"
        if not others and not chosen.out:
            return f"It had {measured}; all others had been dropped, as worse beyond chance."
        if best is chosen:
            return f"It had the best held-out {self.lead.title}, {measured}."
        where = self.names[self.verdict.entrants.index(best)]
        if self.verdict.alone == self.verdict.winner:
            return (
                "No other partition is used: at the end of the race each one, or those of its "
                "groups in which most silos would have stayed, was behind everybody alone."
            )
        if chosen.supported:
            return (
                f"It had {measured}, {_behind(self.lead, chosen)} {self.lead.points} behind the "
                f"best ({where}), which a few samples cannot tell apart; the silos' "
                "discriminators, which compared their data, propose it too."
            )
        if not self.verdict.converged:
            rule = (
                "the one whose models learn from the most data is chosen "
                f"({_samples(chosen.samples)} samples against {_samples(best.samples)})"
            )
        elif TOGETHER in chosen.source.split("; "):
            rule = "all together is chosen, as more data no longer improves models that converged"
        else:
            rule = (
                "the best one is chosen that, with the groups that most of their silos would have "
                "stayed in, did not stand behind everybody alone"
            )
        return (
            f"It had {measured}, {_behind(self.lead, chosen)} {self.lead.points} behind the best "
            f"({where}), which a few samples cannot tell apart; of equally good partitions {rule}."
        )

    def _cost(self) -> Iterable[str]:
        passes = self._last.grouping.trainings
        rounds = Counter(name for one in self.rounds if not one.final for name in one.silos)
        times = [passes[name] / rounds[name] for name in passes if rounds[name]]
        if times and not grows_trees(self.run):  # growing trees is not a pass
            low, high = f"{min(times):.1f}", f"{max(times):.1f}"
            budget = self.run.config.get("budget")
            within = f" (budget: {budget:g})" if isinstance(budget, int | float) else ""
            yield (
                f"Cost so far: {low if low == high else f'{low} to {high}'} times FedAvg's passes "
                f"over a silo's samples{within}."
            )
        traffic = self._last.grouping.traffic
        if traffic is not None and traffic.usual and not grows_trees(self.run):
            least = f", or {traffic.least / 1e6:g} MB" if traffic.least else ""
            yield (
                f"Bytes so far: {traffic.moved / 1e6:.3g} MB, {traffic.moved / traffic.usual:.1f} "
                f"times FedAvg's (budget for the whole run: {traffic.budget:g}{least}); "
                f"{traffic.discriminators / 1e6:.3g} MB of them for discriminators."
            )
        sums = [one.phases.get(wire.EVALUATE_HISTOGRAMS) for one in self.rounds if not one.final]
        moved = sum(one.bytes_sent + one.bytes_received for one in sums if one is not None)
        if moved and grows_trees(self.run):
            yield f"Histograms moved {moved / 1e6:.3g} MB so far, which no budget limits."
        for one in self.rounds:
            work = None if one.final else one.grouping.discriminators
            if work is not None and not work.pairs and work.missing:
                why, _ = Counter(work.missing.values()).most_common(1)[0]
                yield f"FedCollab's discriminators were left out in round {one.round}: {why}"

    def rows(self) -> Iterable[tuple[str, ...]]:
        """Yield a row per partition: the chosen one, those in the race to its end, the others."""
        for number, entrant in self._in_order():
            mark = f" – dropped after round {entrant.dropped}" if entrant.dropped else ""
            mark = " – chosen" if number == self.verdict.winner else mark
            yield (
                f"{self.names[number]}{mark}",
                self.lead.text(entrant.error),
                _behind(self.lead, entrant),
                _samples(entrant.samples),
            )

    def _in_order(self) -> list[tuple[int, Entrant]]:
        winner = self.verdict.winner
        rows = list(enumerate(self.verdict.entrants))

        def place(row: tuple[int, Entrant]) -> tuple[bool, bool, int, float]:
            number, one = row
            return number != winner, one.dropped > 0, -one.dropped, one.behind

        return sorted(rows, key=place)

    # ------------------------------------------------------------ every silo

    def silos(self) -> Iterable[tuple[str, str]]:
        placed = {n: (one.round, p) for one in self.rounds for n, p in one.grouping.placed.items()}
        waiting = self._last.grouping.probation
        here = set(_here(self.rounds[-1]))
        for name in sorted({*self.verdict.silos, *placed, *waiting, *here}):
            if name in placed and placed[name][0] >= self.verdict.round:
                text = self._newcomer(*placed[name])
            elif name in self.verdict.silos:
                text = self._raced(name)
            elif name in waiting:
                group = f"with {listed(waiting[name])} and " if waiting[name] else ""
                text = f"a newcomer on probation: it trains {group}alone until it is placed."
            else:
                text = "joined after the race; it trains alone until it has been measured."
            yield name, text if name in here else f"has left. Before: {text}"

    def _raced(self, name: str) -> str:
        group = next(group for group in self.verdict.chosen.groups if name in group)
        others = [other for other in group if other != name]
        if not others:
            return " ".join(("trains alone.", *self._lone(name)))
        gain, left = self.verdict.gains.get(name), name in self.verdict.left
        place = f"grouped with {listed(others)}"
        if left:
            with_whom = listed(others)
            place = f"trains alone, as most of its group with {with_whom} keep their own models"
        if gain is None or name not in self.verdict.trials:
            return (
                f"{place}. It did not measure the two models, so it is placed by the others' "
                "measurements."
            )
        trial = self.verdict.trials[name]
        known = self.verdict.alone
        own = "" if known is None else f" ({self._two(name, self.verdict.winner, known)})"
        count = wire.counted(round(trial.count), "sample")
        kept = (
            ", but keeps the model that it trained alone" if gain.own else ", and holds its model"
        )
        if gain.share > 0:
            part = round(100 * gain.share)
            kept = (
                f", and ends with a mean of two models: {100 - part}% that of its group, {part}% "
                "its own after its last training (the probability that it is better off alone)"
            )
        if self.verdict.chosen.own_penalty and not left:
            last = next((r.silos[name] for r in reversed(self.rounds) if name in r.silos), None)
            rows = math.nan if last is None else last.num_examples
            place, kept = taking(self.verdict, others, rows, self.run.lead), ""
        better = "better" if gain.expected >= 0 else "worse"
        found = (
            f"{place}{'' if left else kept}. On {count} that no model had seen, "
            f"{self.lead.compared(gain.measured, gain.noise)} in its group than alone{own}."
        )
        if math.isnan(gain.standard_error):  # no other silo measured both
            return found
        return (
            f"{found} With the other silos' measurements, the expected difference is "
            f"{self.lead.gain(abs(gain.expected), sign='')} ± "
            f"{self.lead.gain(gain.standard_error, sign='')} {self.lead.points}: "
            f"its group is {better}."
        )

    def _two(self, name: str, one: int, other: int) -> str:
        errors = self.verdict.trials[name].errors
        return f"{self.lead.text(errors[one])} against {self.lead.text(errors[other])}"

    def _lone(self, name: str) -> Iterable[str]:
        verdict, trial = self.verdict, self.verdict.trials.get(name)
        alone = verdict.alone if verdict.alone is not None else verdict.winner
        if trial is None or not math.isfinite(trial.errors[alone]):
            yield "It did not measure the models of the race: the others' measurements place it."
            return
        offered = [
            (error, number)
            for number, error in enumerate(trial.errors)
            if math.isfinite(error) and len(_group(verdict.entrants[number], name)) > 1
        ]
        if not offered:
            yield "No other group was tried for it."
            return
        error, number = min(offered)
        entrant, own = verdict.entrants[number], trial.errors[alone]
        others = [n for n in _group(entrant, name) if n != name]
        _, noise = _difference([error], [own], [trial.count], shares=verdict.shares)
        dropped = f", dropped after round {entrant.dropped}" if entrant.dropped else ""
        yield (
            f"The best group that was tried for it was with {listed(others)} "
            f"({self.names[number]}{dropped}): on {trial.count:.0f} samples that no model had "
            f"seen, {self.lead.compared(own - error, noise)} there than alone "
            f"({self._two(name, number, alone)})."
        )

    def _newcomer(self, number: int, one: Placement) -> str:
        if not one.group:
            return f"a newcomer, alone since round {number}: no group could be measured for it."
        if not (math.isfinite(one.alone) and math.isfinite(one.grouped)):
            kept = "joined" if one.joins else "did not join"
            return (
                f"a newcomer that {kept} {listed(one.group)} after round {number}. It did not "
                "report its measurements of the two models."
            )
        errors = f"{self.lead.text(one.grouped)} against {self.lead.text(one.alone)}"
        _, noise = _difference([one.grouped], [one.alone], [one.count], shares=self.verdict.shares)
        what = self.lead.compared(one.alone - one.grouped, noise)
        joined = "so it joined" if one.joins else "so it trains alone"
        return (
            f"a newcomer, on probation with {listed(one.group)} until round {number}: on "
            f"{one.count:.0f} samples that neither model had seen, {what} in the group than alone "
            f"({errors}), {joined}."
        )


def _difference(
    one: Sequence[float], other: Sequence[float], counts: Sequence[float], *, shares: bool
) -> tuple[float, float]:
    """Return the mean of paired differences of errors and its standard error."""
    from numpy import asarray

    from coterie.strategies.partition.race import sampling_variances

    first, second, number = (asarray(v, dtype=float) for v in (one, other, counts))
    noise = sampling_variances(first, second, number) if shares else None
    if noise is None and len(first) < 2:
        return float((first - second).mean()), math.nan
    return float((first - second).mean()), standard_error(first - second, noise)


def _group(entrant: Entrant, name: str) -> tuple[str, ...]:
    return next((group for group in entrant.groups if name in group), (name,))


# ---------------------------------------------------------------- words


def _count(names: Sequence[str], what: str) -> str:
    return wire.counted(len(names), what)


def _behind(lead: Lead, one: Entrant) -> str:
    if math.isnan(one.error):
        return "–"
    if one.behind == 0:
        return "0"
    return f"{lead.gain(one.behind, sign='')} ± {lead.gain(one.standard_error, sign='')}"


def _samples(number: float) -> str:
    return "–" if math.isnan(number) else f"{number:.0f}"
