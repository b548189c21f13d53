"""The silo's part: which of a task's families a message is about."""

from __future__ import annotations

from dataclasses import replace

from coterie import wire
from coterie.client.work.request import Request
from coterie.client.work.stage import Stage
from coterie.tasks.problems import Numbers

AUTO = "auto"


class Families(Stage):
    """The stage for tasks with several families of models."""

    name = "families"

    def admit(self, request: Request) -> Request:
        """Return the request with the session of the family that the message names.

        Refuse runs that choose none.
        """
        families = request.session.families
        if not families:
            return request
        if request.joins and request.config.get(wire.STRATEGY) not in wire.UNTRAINED:
            self._check(request)
        family = request.config.get(wire.FAMILY, "")
        if family == "":
            return request
        if not isinstance(family, str) or family not in families:
            request.refuse_for(f"has models of the families {', '.join(families)}. Got {family!r}.")
        own = families[str(family)]
        return replace(request, session=replace(own, work=request.session.work))

    def _check(self, request: Request) -> None:
        named, settings = request.config.get(wire.STRATEGY), request.session.settings
        if named is not None and named != AUTO:
            request.refuse_for(
                f'has network = "any" in its task, for which only {AUTO} chooses. For another '
                f"strategy, set task.family to {' or '.join(wire.FAMILIES)}."
            )
        if request.lead()["metric"] == "loss" and isinstance(request.session.task.problem, Numbers):
            request.refuse_for(
                'has network = "any" and real targets. A network scales these and trees do '
                "not, so their losses cannot be compared. Set primary-metric to mae, rmse or r2."
            )
        if settings.trains and not request.session.describe().private:
            request.refuse_for(settings.policy.sums_objection(wire.TREES))
