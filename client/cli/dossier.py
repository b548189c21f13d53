"""``coterie silo report --dossier``: a site's part of a data protection impact assessment.

The headings are those of Article 35 of Regulation (EU) 2016/679 (GDPR). Every fact is from the
silo's folder: ledger, model cards, approvals, policy and privacy budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from coterie import wire
from coterie.client.home import approvals, in_use
from coterie.client.home.folder import Home
from coterie.client.home.policy import Policy
from coterie.client.home.settings import SiloSettings
from coterie.client.ledger import ledger_of, read, totals
from coterie.client.work.card import Card, figure_texts, read_card
from coterie.features.privacy.budget import read_spent
from coterie.pictures.document import Section, render_document
from coterie.pictures.page import Table

DIGITS = 16
"""Digits of a hash that are shown."""


def build_dossier(folder: Path, run: str) -> str:
    """Return the document of a silo's folder as Markdown, of one run or, if empty, of all.

    Raises ``SettingsError`` if it is not a silo's folder, or a file in it is damaged.
    """
    home = Home(folder)
    settings = home.settings()
    lead = [
        f"Site {settings.name}. Facts are from the silo's folder. The coordinator's part has the "
        "figures of a run: coterie runs report RUN --dossier.",
    ]
    title = f"Data protection impact assessment: {settings.name}"
    return render_document(title, lead, list(_sections(home, settings, run)))


def _sections(home: Home, settings: SiloSettings, run: str) -> Iterator[Section]:
    cards = _cards(home.folder, run)
    sent = totals(read(home.folder, run=run)) if ledger_of(home.folder).exists() else {}
    yield Section(
        "GDPR, Article 35 (7) (a)",
        "processing and purposes",
        [f"Task: {settings.task}. Data: {settings.options.get('data', '–')}."
         f" The silo {'trains' if settings.trains else 'trains nothing'}.",
         f"Recipient: {home.recipient()}; of its group's model, the members of the group.",
         f"{wire.counted(sum(one.messages for one in sent.values()), 'message')} left, with "
         f"{sum(one.bytes for one in sent.values()):,} bytes of arrays."],
        {"What left, by the ledger": Table(
            ("run", "message", "times", "refused", "bytes of arrays", "other values"),
            [(name, kind, str(one.messages), str(one.refused), f"{one.bytes:,}",
              ", ".join(sorted(one.values)))
             for (name, kind), one in sent.items()]),
         "Models kept": _models(cards)},
        ["purposes; legitimate interest, if any; categories of data and persons; retention",
         "origin of the data, labelling, cleaning"],
    )  # fmt: skip
    yield Section(
        "GDPR, Article 35 (7) (b)",
        "necessity and proportionality",
        ["What may leave is bounded by these settings."],
        {"Policy": _policy(settings.policy)},
        ["why each item that leaves is necessary; legal basis; rights of data subjects"],
    )
    yield Section(
        "GDPR, Article 35 (7) (c)",
        "risks to rights and freedoms",
        list(_exposure(home, cards)),
        blanks=["likelihood and severity of each risk, such as reconstruction from updates"],
    )
    yield Section(
        "GDPR, Article 35 (7) (d)",
        "measures",
        ["Every reply is in the ledger before it leaves. The policy is checked at the silo."],
        {"Approvals": _approved(home.folder, run), "Models in use": _used(home)},
        ["further measures, such as access to the machine; responsible persons and dates"],
    )
    yield Section(
        "GDPR, Article 35 (2), (9) and (11)",
        "advice, views and review",
        blanks=["advice of the data protection officer", "views of data subjects", "next review"],
    )


def _cards(folder: Path, run: str) -> list[tuple[str, Card]]:
    found = [(file.stem, read_card(file)) for file in sorted(folder.glob("models/*.safetensors"))]
    return [(name, card) for name, card in found if not run or card.run == run]


def _models(cards: list[tuple[str, Card]]) -> Table:
    header = ("model", "round", "silos in the group", "training samples", "figure on test data",
              "interval", "SHA-256")  # fmt: skip
    rows = []
    for name, card in cards:
        figure = card.figures.get(card.metric)
        known = ("–",) * 3 if figure is None else figure_texts(card, card.metric, figure)
        title, value, interval = known
        rows.append((name, str(card.round), str(card.group_size), str(card.num_examples),
                     f"{title} {value}", interval, card.sha256[:DIGITS]))  # fmt: skip
    return Table(header, rows)


def _policy(policy: Policy) -> Table:
    rows = [(one.name, str(getattr(policy, one.name))) for one in fields(policy)]
    return Table(("setting", "value"), rows)


def _exposure(home: Home, cards: list[tuple[str, Card]]) -> Iterator[str]:
    spent = read_spent(str(home.folder))
    yield (
        f"Differential privacy: {spent.text()} spent over all runs."
        if spent is not None
        else "No differential privacy was used at this silo."
    )
    if sizes := [card.group_size for _, card in cards if card.group_size > 1]:
        yield f"The smallest group of several silos with a saved model has {min(sizes)}."


def _approved(folder: Path, run: str) -> Table:
    rows = [
        (one.run, one.asked, one.state, one.by or "–", one.decided or "–")
        for one in approvals.read_all(folder)
        if not run or one.run == run
    ]
    return Table(("run", "asked", "decision", "by", "at"), rows)


def _used(home: Home) -> Table:
    rows = [(one.model, one.since, one.by) for one in in_use.history(home.folder)]
    return Table(("model", "since", "by"), rows)
