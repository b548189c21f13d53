"""Send an update as 16-bit numbers, and add the rounding error to the next one.

The error is kept per round, like everything that a silo keeps between rounds
(``coterie.client.home.rounds``), so a repeated round starts from the same error. Other trainings
(cold starts, trials) happen once, or from other models, so nothing is kept for them.
"""

from __future__ import annotations

from coterie import wire
from coterie.client.home import rounds
from coterie.client.work import personal
from coterie.client.work.request import RefusedError, Request
from coterie.client.work.stage import Stage, Work
from coterie.wire import Model

KIND = "rounding"


class Compression(Stage):
    """The stage for a smaller ``wire-format``."""

    name = "compression"

    def admit(self, request: Request) -> Request:
        """Refuse a format that conflicts with the run."""
        _format(request)
        return request

    def begin(self, request: Request, *, before: int, packed: bool) -> str:
        """Return the format of what leaves; float32 unless ``packed``."""
        return _format(request) if packed else wire.FLOAT32

    def before(self, mine: str, work: Work) -> None:
        """Remember the model received: the update is the difference to it."""
        if mine != wire.FLOAT32:
            work.keep_received()

    def leave(self, mine: str, work: Work) -> None:
        if mine == wire.FLOAT32 or wire.ARRAYS not in work.leaving:
            return
        received = personal.without(work.received, work.staying)
        work.leaving[wire.ARRAYS], figures = rounded(
            work.request, received, work.leaving[wire.ARRAYS], mine
        )
        work.metrics |= figures

    def end(self, request: Request) -> None:
        """Keep only the last rounding error."""
        rounds.keep_newest(request.session.settings, KIND, run=request.run)


def _format(request: Request) -> str:
    asked: str = request.value(wire.WIRE_FORMAT)
    if asked != wire.FLOAT32 and request.config.get(wire.SECURE):
        raise RefusedError(
            f"{wire.WIRE_FORMAT} = {asked} cannot be used in a secure run, whose sums are exact."
        )
    return asked


def rounded(
    request: Request, received: Model, trained: Model, wire_format: str
) -> tuple[Model, dict[str, float | int]]:
    """Round an update, less what stays at the silo, and keep the error; return it, and metrics."""
    session, of_the_round = request.session, not request.purpose
    before = None
    if of_the_round:
        number = request.round_number()
        before = rounds.latest(session.settings, KIND, run=request.run, before=number)
    parameters = {name for name, _ in session.model.named_parameters()}
    update = wire.round_update(
        trained, received, wire_format, exact=received.keys() - parameters, before=before
    )
    if update is None:
        return trained, {}
    if of_the_round:
        rounds.keep(
            session.settings, KIND, update.lost, run=request.run, number=number, passing=True
        )
    return update.arrays, {wire.UPDATE_NORM: update.norm, wire.UPDATE_LOST: update.share}
