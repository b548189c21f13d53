"""The first sentences of a report: which sites gained, how much, and how sure that is."""

from __future__ import annotations

import math
from statistics import median

from coterie import wire
from coterie.server.report.gains import baselines, has
from coterie.server.report.story import Story, bytes_of
from coterie.server.runs.record import Run

MOST_NAMED = 3
_WORDS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def lead_of(story: Story) -> str:
    """Return the answer, and how sure it is, in one sentence."""
    gains = story.gains.gain.values()
    if not gains and has(story.run, baselines(story.run)[0]):
        return "Every site trained alone: this run is what others are compared with."
    if not gains:
        return (
            "There is nothing to compare this run with: no run of local training has the same "
            "settings and as many samples at every silo. The command for one is at the end."
        )
    better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
    count, same = len(gains), len(gains) - better - worse
    answer = (
        f"{_word(better).capitalize()} of {_word(count)} {'site' if count == 1 else 'sites'} "
        f"{'does' if better == 1 else 'do'} better than with local training"
        f"{f', {_word(same)} the same' if same else ''}, {_word(worse)} worse"
    )
    if better == count > 1:
        answer = f"All {_word(count)} sites do better than with local training"
    return "; ".join(filter(None, [answer, chance_of(story)])) + "."


def detail_of(story: Story) -> str:
    """Return the sentences after the answer: mean, extremes and omissions."""
    gains, lead = story.gains, story.run.lead
    if not gains.gain:
        return ""
    ends = f"from {lead.text(gains.mean_alone)} to {lead.text(gains.mean_error)} on average"
    higher = lead.direction.startswith("higher") == (gains.mean_gain > 0)
    mean = f"The {lead.title} {'rises' if higher else 'falls'} {ends}."
    parts = [mean] if gains.mean_gain else []
    order = sorted(gains.gain, key=lambda n: (-gains.gain[n], n))
    parts += [f"Largest gain: {_change(story, n)}." for n in order[:1] if gains.gain[n] > 0]
    worse = [n for n in reversed(order) if gains.gain[n] < 0]
    if worse:
        parts.append(f"Worse: {wire.some([_change(story, n) for n in worse], MOST_NAMED)}.")
    if missing := _not_compared(story):
        is_are = "site is" if len(missing) == 1 else "sites are"
        count, names = _word(len(missing)).capitalize(), wire.some(missing, MOST_NAMED)
        parts.append(f"{count} {is_are} not compared: {names}.")
    return " ".join(parts)


def chance_of(story: Story) -> str:
    """Return below which difference chance may be the reason, at 95%; empty if it is unknown.

    The two models are tested on the same samples, but the record has no single answers. So their
    errors count as independent: too large a limit rather than too small a one.
    """
    gains, lead = story.gains, story.run.lead
    counts = [story.run.test_counts().get(name, 0) for name in gains.gain]
    runs = [run for run in (story.run, story.alone) if run]
    found = [[interval_of(run, name) for run in runs] for name in gains.gain]
    widths = [math.hypot(*((e[1] - e[0]) / 2 for e in own if e)) for own in found if all(own)]
    known = ""
    if lead.metric == wire.ERROR and counts and min(counts) > 0:
        most = f" to {max(counts):,}" if max(counts) > min(counts) else ""
        known = f"with {min(counts):,}{most} test samples"
        if len(widths) < len(counts):
            both = (gains.mean_alone, gains.mean_error)
            spread = sum(max(p * (1 - p), 0.0) for p in both)  # a silo may state errors above 1
            widths = [1.96 * math.sqrt(spread / n) for n in counts]
    if not widths or len(widths) < len(counts) or max(widths) <= 0:
        return ""
    size = lead.scale * median(widths)
    text = f"{size:.0f}" if lead.scale == 100 and size >= 1 else wire.readable(size)
    larger = sum(lead.scale * abs(gain) > size for gain in gains.gain.values())
    return (
        f"{known or 'by the 95% intervals'}, differences below about {text} {lead.points} may be "
        f"chance: {_word(larger)} {'is' if larger < 2 else 'are'} larger"
    )


def interval_of(run: Run, name: str) -> tuple[float, float] | None:
    """Return the recorded 95% interval of a silo's primary metric, or None."""
    own = run.final.metrics.get(name, {}) if run.final else {}
    ends = [own.get(run.metric + end) for end in (wire.LOW, wire.HIGH)]
    low, high = (float(end) if isinstance(end, int | float) else math.nan for end in ends)
    return (low, high) if math.isfinite(low + high) else None


def _word(count: int) -> str:
    return _WORDS[count] if count < len(_WORDS) else f"{count:,}"


def _change(story: Story, name: str) -> str:
    gains, lead, tested = story.gains, story.run.lead, story.run.test_counts().get(name, 0)
    text = f"{name}, {lead.text(gains.alone[name])} → {lead.text(gains.together[name])}"
    if lead.metric != wire.ERROR or not tested:
        return text
    return f"{text} ({abs(round(gains.gain[name] * tested))} of its {tested} test samples)"


def _not_compared(story: Story) -> list[str]:
    gains, found = story.gains, []
    for name in story.history.order(set(story.run.silos) - set(gains.gain)):
        why = "no local baseline" if name in gains.lasting else "left early"
        why = "no error reported" if name not in gains.together else why
        found.append(f"{name} ({why})")
    return found


def figures_of(story: Story) -> dict[str, str]:
    """Return at most four figures: short name → text."""
    gains, lead, figures = story.gains, story.run.lead, {}
    if gains.gain:
        better = sum(gain > 0 for gain in gains.gain.values())
        figures["better than local"] = f"{better}/{len(gains.gain)}"
    if gains.together:
        before = f"{lead.text(gains.mean_alone)} → " if gains.gain else ""
        figures[f"average {lead.title}"] = before + lead.text(gains.mean_error)
    if story.history.stretches:
        together = [group for group in story.history.stretches[-1].groups if len(group) > 1]
        figures["groups"] = str(len(together))
    if moved := sum(sum(one.num_bytes) for one in story.run.rounds_to_end()):
        figures["data transferred"] = bytes_of(moved)
    return figures
