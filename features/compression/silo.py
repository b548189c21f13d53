"""Send an update in 16 bits a number, and add what was rounded away to the next one.

What is rounded away is kept as after its round, like all that a silo keeps from round to round
(``coterie.client.home.rounds``): a round that is repeated begins from the same again. Trainings
beside the rounds' own (cold starts, trials) come once, or from other models, so nothing is kept of
them.
"""

from __future__ import annotations

from coterie import wire
from coterie.client.home import personal, rounds
from coterie.client.work.request import RefusedError, Request
from coterie.client.work.stage import Stage, Work
from coterie.wire import Model

KIND = "rounding"


class Compression(Stage):
    """Active where the run asks for a smaller ``wire-format``."""

    name = "compression"

    def check(self, request: Request) -> None:
        """Refuse a format that does not go with the run."""
        _format(request)

    def begin(self, request: Request, *, before: int, packed: bool) -> str:
        """Return the format of what leaves; of other ClientApps' coordinators, float32."""
        return _format(request) if packed else wire.FLOAT32

    def before(self, mine: str, work: Work) -> None:
        """Remember the model received: what leaves is the difference to it."""
        if mine != wire.FLOAT32:
            work.keep_received()

    def leave(self, mine: str, work: Work) -> None:
        """Round the update."""
        if mine == wire.FLOAT32 or wire.ARRAYS not in work.leaving:
            return
        received = personal.without(work.received, work.staying)
        work.leaving[wire.ARRAYS], figures = rounded(
            work.request, received, work.leaving[wire.ARRAYS], mine
        )
        work.metrics |= figures

    def end(self, request: Request) -> None:
        """Forget what was rounded away."""
        rounds.forget(request.bench.settings, KIND, run=request.run)


def _format(request: Request) -> str:
    asked: str = request.value(wire.WIRE_FORMAT)
    if asked != wire.FLOAT32 and request.config.get(wire.SECURE):
        raise RefusedError(
            f"{wire.WIRE_FORMAT} = {asked} does not go with a secure run: its sums are exact."
        )
    return asked


def rounded(
    request: Request, received: Model, trained: Model, wire_format: str
) -> tuple[Model, dict[str, float | int]]:
    """Round an update as the run asks, and keep what is lost; return what leaves, and its figures.

    Args:
        request: of the training.
        received, trained: less what stays at the silo.
        wire_format: of what leaves.
    """
    bench, of_the_round = request.bench, not request.purpose
    before = None
    if of_the_round:
        number = request.round_number()
        before = rounds.latest(bench.settings, KIND, run=request.run, before=number)
    parameters = {name for name, _ in bench.model.named_parameters()}
    update = wire.round_update(
        trained,
        received,
        wire_format,
        exact=received.keys() - parameters,
        before=before,
    )
    if update is None:
        return trained, {}
    if of_the_round:
        rounds.keep(bench.settings, KIND, update.lost, run=request.run, number=number, passing=True)
    return update.arrays, {wire.UPDATE_NORM: update.norm, wire.UPDATE_LOST: update.share}
