"""The replies of a silo's private trainings: a repeated request gets the same bytes, for nothing.

A coordinator that returns from a crash asks again for what it lost. Nothing is computed for that
and nothing is charged, so a repeated request reveals nothing that its reply has not revealed. Any
other request is trained, with new noise, and charged. Hence nothing depends on this digest
being complete: two requests with one digest have one reply.

    privacy/replies/RUN.ROUND.KIND.DIGEST    a reply, as Flower sends it
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

import torch
from flwr.app import Array, Message, RecordDict

from coterie import wire
from coterie.client.home import rounds
from coterie.client.work.request import Request
from coterie.engine.saved import content_of, packed
from coterie.features.privacy.budget import FOLDER
from coterie.features.privacy.dp_sgd import Private
from coterie.system.files import make_folder, write_atomically

log = logging.getLogger("coterie.silo")

REPLIES = "replies"
MOST = 8 * rounds.KEPT
"""Most replies that are kept, the latest: those of the rounds whose state the silo keeps, and of as
many models in a round."""
MOST_BYTES = 2_000_000_000
ROUND_TRIP = frozenset({wire.PEERS, wire.SEALED, wire.ASKED_BY})
"""Entries that differ whenever a message is made: signatures and seals are random, and another
operator may resume a run."""
OWN, TRIAL = "own", "trial"
"""Kinds of requests: of the run's own rounds, and with a purpose."""


def request_digest(request: Request) -> str:
    """Return the SHA-256 of all that a reply depends on, as 64 hexadecimal digits.

    That is the message's type, every entry, known or not, and every array, except ``ROUND_TRIP``;
    and the silo's settings, data, model and release of torch.
    """
    session = request.session
    digest = hashlib.sha256()
    about: list[object] = [request.message.metadata.message_type, torch.__version__, session.schema]
    about += [session.data_digest(), session.settings.to_node_config()]
    digest.update(json.dumps(about, sort_keys=True, default=str).encode())
    for name, record in sorted(request.message.content.items()):
        for key, value in sorted(record.items()):
            if isinstance(value, Array):
                head = [name, key, value.dtype, list(value.shape), value.stype, len(value.data)]
                digest.update(json.dumps(head).encode())
                digest.update(value.data)
            elif key not in ROUND_TRIP:
                digest.update(repr((name, key, value)).encode())
    return digest.hexdigest()


class Replies:
    """The kept replies, and the place of one request's among them; without a folder none."""

    def __init__(self, private: Private) -> None:
        home = private.budget.settings.home
        self._folder = Path(home) / FOLDER / REPLIES if home else None
        self._run = hashlib.sha256(private.run.encode()).hexdigest()[:16]
        self._round = private.round
        self._file = f"{self._run}.{private.round}.{TRIAL if private.purpose else OWN}"
        self._digest = private.digest

    def get(self) -> RecordDict | None:
        """Return the reply to this request; None if there is none, or it is damaged."""
        if self._folder is None:
            return None
        file = self._folder / f"{self._file}.{self._digest}"
        try:
            return content_of(file.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning("%s is damaged: %s", file, error)
            return None

    def put(self, reply: Message) -> None:
        """Keep the reply and remove old ones; without room, warn: a repetition is then charged."""
        if self._folder is None:
            return
        try:
            content = packed(reply)
            make_folder(self._folder, private=True)
            write_atomically(self._folder / f"{self._file}.{self._digest}", content, private=True)
            self._remove_old()
        except (OSError, ValueError) as error:
            log.warning("the reply is not kept, and a repetition will be charged: %s", error)

    def remove_later(self) -> None:
        """Remove the replies that follow from an earlier training of this round, as of the state
        that the silo keeps (``rounds.keep``): they belong to a past that was rolled back."""
        for file in self._folder.iterdir() if self._folder and self._folder.exists() else ():
            run, number, kind, *_ = file.name.split(".")  # a killed process leaves a .tmp
            own = kind == OWN and int(number) == self._round
            if run == self._run and (int(number) > self._round or own):
                file.unlink(missing_ok=True)

    def _remove_old(self) -> None:
        assert self._folder is not None
        stats = {file: file.stat() for file in self._folder.iterdir()}
        room = MOST_BYTES
        for place, file in enumerate(sorted(stats, key=lambda f: -stats[f].st_mtime_ns)):
            room -= stats[file].st_size
            if place >= MOST or (place and room < 0):
                file.unlink(missing_ok=True)
