"""The facts of a run under the headings of technical documentation and of an impact assessment.

The headings are those of Annex IV of Regulation (EU) 2024/1689 (AI Act) and of Article 35 of
Regulation (EU) 2016/679 (GDPR). Every figure is from the run's record or the federation's audit
log. What no record can know is a blank; whether the law applies is not judged.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from coterie import wire
from coterie.pictures.document import Section, render_document
from coterie.pictures.page import Page, Table
from coterie.server.paths import with_federation
from coterie.server.report.final import learned_nothing
from coterie.server.report.page import build_page, repeat_command
from coterie.server.report.race import thin_evidence
from coterie.server.report.story import NO_NUMBER, Story, bytes_of, duration
from coterie.server.runs.going_on import parent_of
from coterie.server.runs.record import Run
from coterie.server.site import audit
from coterie.server.site.federation import load
from coterie.strategies.errors import FederationError

ABOUT_SILOS = ("enrol", "remove", "withdraw", "withdrawn")
"""Acts about a silo that are listed if it took part."""
HASH = 16
"""Digits of a hash that are shown."""


def build_dossier(story: Story) -> str:
    """Return the whole document as Markdown."""
    run, page = story.run, build_page(story)
    lead = [
        f"Run {run.name}, started {run.started or NO_NUMBER}, {run.status}. Facts are from the "
        "run's record and the federation's audit log. Ledgers, model cards and approvals are at "
        "the silos: there, coterie silo report --dossier writes the part of each site.",
        page.lead,
    ]
    sections = [*_annex(story, page), *_assessment(story, page)]
    return render_document(f"Technical documentation: {page.title}", lead, sections)


def _annex(story: Story, page: Page) -> Iterator[Section]:
    run = story.run
    yield Section(
        "AI Act, Annex IV, 1",
        "general description",
        [f"Task: {run.config.get('task', NO_NUMBER)}.", *_origin(run)],
        {
            "Versions of the software (c)": _folded(page, "Versions"),
            "Models, by the SHA-256 of their arrays (a)": _models(story),
        },
        [
            "(a) intended purpose, provider, and version in relation to previous ones",
            "(b) hardware and software that the system interacts with",
            "(d) forms in which it is put into service · (e) hardware on which it will run",
            "(f) if it is part of a product: its marking and layout",
            "(g) user interface · (h) instructions for use",
        ],
    )
    yield _development(story, page)
    yield from _control(story, page)


def _origin(run: Run) -> Iterator[str]:
    if parent := parent_of(run):
        yield f"The run began from {parent}."
    yield from (f"It was {one.words}, at {one.at}." for one in run.resumed)


def _models(story: Story) -> Table:
    run, now = story.run, story.history.now
    rows = [
        (name, now[name][0] or "alone" if name in now else NO_NUMBER, known[:HASH])
        for name, known in sorted(run.model_hashes.items())
    ]
    return Table(("silo", "group", "first digits"), rows)


def _development(story: Story, page: Page) -> Section:
    run = story.run
    sent = [one.num_bytes for one in run.rounds_to_end()]
    to, back = sum(a for a, _ in sent), sum(b for _, b in sent)
    facts = [
        f"(a) Federated learning with the strategy {run.strategy}, {len(run.rounds)} of "
        f"{run.planned_rounds or '?'} rounds. Command: {repeat_command(run)}",
        f"(b) Groups at the end: {_groups(run)}. Why: "
        + with_federation(f"coterie runs explain {run.name}", run.folder),
        f"(c) {wire.counted(len(run.silos), 'silo')}, {duration(run.seconds)}, {bytes_of(to)} sent "
        f"to silos, {bytes_of(back)} received.",
        *(f"(g) {one}" for one in _measured(run)),
        *(f"(h) {one}" for one in _protection(run, page)),
    ]
    tables = {f"{what} ({point})": page.tables.get(what, Table((), ())) for what, point in (
        ("Configuration", "b"),
        ("All sites", "d, g"),
        ("Metrics after the last round, with 95% intervals", "g"),
        ("Sites that only test", "g"),
        ("Sites whose samples have no labels yet", "d"),
    )}  # fmt: skip
    tables["Keys at their defaults (b)"] = _folded(page, "Keys at their defaults")
    return Section(
        "AI Act, Annex IV, 2",
        "elements and development",
        facts,
        tables,
        [
            "(a) systems or tools of third parties, and how they were used",
            "(b) design choices and assumptions, persons or groups concerned, trade-offs",
            "(d) origin, scope and selection of each site's data; labelling; cleaning",
            "(e) measures for human oversight · (f) changes determined in advance",
            "(g) possibly discriminatory impacts; dated and signed test reports",
            "(h) cybersecurity measures of each site",
        ],
    )


def _groups(run: Run) -> str:
    each = [", ".join(group) for group in run.final_groups]
    return "; ".join(each) or "not recorded"


def _measured(run: Run) -> Iterator[str]:
    tested = run.test_counts()
    yield (
        f"Each site measured its final model on its own test data ({run.lead.title}); in total "
        f"{wire.counted(sum(tested.get(name, 0) for name in run.final_errors), 'sample')}, as "
        "the sites state."
    )


def _protection(run: Run, page: Page) -> Iterator[str]:
    yield f"Of the run: {page.subtitle}."
    private = sorted(name for name, facts in run.silos.items() if facts.private)
    names = ", ".join(private)
    yield f"Differential privacy: {f'at {names}, as these state' if private else 'at no silo'}."
    sizes = [len(group) for group in run.final_groups if len(group) > 1]
    if sizes:
        yield f"The smallest group of several silos at the end has {min(sizes)}."


def _control(story: Story, page: Page) -> Iterator[Section]:
    run = story.run
    limits = [
        *(f"{one}." for one in [thin_evidence(run)] if one),
        *(
            f"{what[0].upper()}{what[1:]}: {', '.join(names)}."
            for what, names in learned_nothing(run).items()
        ),
        *(f"Not recorded: {one}." for one in page.missing),
    ]
    yield Section(
        "AI Act, Annex IV, 3",
        "monitoring, functioning and control",
        limits or ["The record has no warning."],
        {
            "Left out": page.tables.get("Left out", Table((), ())),
            "Refused": page.tables.get("Refused", Table((), ())),
        },
        [
            "capabilities and limitations, accuracy for specific persons or groups",
            "foreseeable unintended outcomes; sources of risks to health, safety and rights",
            "human oversight; specifications of input data",
        ],
    )
    yield Section(
        "AI Act, Annex IV, 4",
        "appropriateness of the metrics",
        [f"The primary metric is {run.lead.title}."],
        blanks=["why the metrics are appropriate"],
    )
    decided, said = _decisions(run)
    yield Section(
        "AI Act, Annex IV, 5 and 6",
        "risk management, and changes through the lifecycle",
        [*said, *_origin(run)],
        {"Decisions, by the audit log": decided},
        ["risk management system (Article 9)", "relevant changes by the provider"],
    )
    yield Section(
        "AI Act, Annex IV, 7 to 9",
        "standards, declaration, monitoring after placing on the market",
        ["Each site can watch the model in use: coterie silo watch-model."],
        blanks=[
            "harmonised standards, or other solutions and specifications",
            "EU declaration of conformity (Article 47), as a copy",
            "post-market monitoring system and plan (Article 72)",
        ],
    )


def _decisions(run: Run) -> tuple[Table, list[str]]:
    """Return the acts about this run and its silos, and what is known of the log itself."""
    header = ("at", "who", "what", "about")
    folder = run.folder.resolve().parent.parent
    if not (folder / "coterie.toml").exists():
        return Table(header, []), ["There is no audit log: the run has no federation's folder."]
    try:
        log = audit.verify(load(folder))
    except FederationError as error:
        return Table(header, []), [f"The audit log cannot be read: {error}"]
    ids = {run.run_id, *(one.previous_run_id for one in run.resumed)}
    acts = [
        one
        for one in log.acts
        if one.about.get("run") in ids
        or (one.act in ABOUT_SILOS and one.about.get("silo") in run.silos)
    ]
    rows = [(one.at, one.who, one.act, _facts(one.about)) for one in acts]
    found = log.findings or [
        "The audit log is intact: its chain of hashes and signature are valid."
    ]
    return Table(header, rows), found


def _facts(about: Mapping[str, str]) -> str:
    return ", ".join(f"{key} {shlex.quote(value)}" for key, value in about.items())


def _assessment(story: Story, page: Page) -> Iterator[Section]:
    run = story.run
    names = "see" if run.config.get("name-members") else "do not see"
    recipients = (
        f"The coordinator gets each site's number of samples and metrics. The members of a "
        f"group get its model, and {names} each other's names."
    )
    yield Section(
        "GDPR, Article 35 (7) (a)",
        "processing and purposes",
        [
            "What left each site is in its ledger, and in its part of this documentation.",
            recipients,
        ],
        blanks=["purposes; legitimate interest, if any; categories of data and persons; retention"],
    )
    yield Section(
        "GDPR, Article 35 (7) (b)",
        "necessity and proportionality",
        blanks=["why each item that leaves is necessary; legal basis; rights of data subjects"],
    )
    yield Section(
        "GDPR, Article 35 (7) (c)",
        "risks to rights and freedoms",
        list(_protection(run, page)),
        blanks=["likelihood and severity of each risk, such as reconstruction from updates"],
    )
    yield Section(
        "GDPR, Article 35 (7) (d)",
        "measures",
        ["Each silo checks every message against its policy; a silo with a folder has a ledger."],
        {"Outlier check: each site's updates": _folded(page, "Each site's updates")},
        ["further measures, responsible persons and dates"],
    )
    yield Section(
        "GDPR, Article 35 (2), (9) and (11)",
        "advice, views and review",
        blanks=["advice of the data protection officer", "views of data subjects", "next review"],
    )


def _folded(page: Page, title: str) -> Table:
    found = [fold.tables[title] for fold in page.folds if title in fold.tables]
    return found[0] if found else Table((), ())
