"""A federation's SuperLink: Flower's, with a check of each operator's key and role.

    python -m coterie.server.site.gate OPTIONS OF flower-superlink

Callers of its Control API sign as an operator who is enrolled in the federation's folder
(``$COTERIE_FEDERATION``). Flower has one place that identifies callers, made for accounts at an
identity provider: the gate replaces it. Each act is in the audit log before it is done. One call is
added to Flower's, for enrolment and the queue.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import grpc

from coterie.engine.control import ACT, CONTROL, digest_in, settings_of, started
from coterie.engine.fast.superlink.serving import serve
from coterie.server.machine.signing import Metadata, RefusedError, SigningError, Verifier
from coterie.server.site import audit, operators
from coterie.server.site.acts import ACTS, UNKNOWN, Act
from coterie.server.site.federation import Federation, load
from coterie.server.site.queue import who_queued
from coterie.strategies.errors import FederationError
from coterie.wire import plain_text

NEEDED = {
    "StartRun": "run",
    "StopRun": "run",
    "ListRuns": "look",
    "ListNodes": "look",
    "StreamLogs": "look",
    "RegisterNode": "",
    "UnregisterNode": "",
}
"""Method → role; empty: only the coordinator's own commands, which maintain the roster. Flower's
other methods are closed to everybody."""
SAID_OF_A_RUN = ("strategy", "task", "rounds", "label", "resume", "more-rounds", "parent")
"""Keys of a run that its line in the log includes."""

Answer = Callable[[Any, grpc.ServicerContext], Any]


class Gate:
    """A check that the operator who signed a call has the role for it."""

    def __init__(self, made: Federation) -> None:
        self.made = made
        self.verifier = Verifier(made.ca.read_bytes(), self._key_of)

    @contextmanager
    def passing(self, metadata: Metadata, method: str, raw: bytes) -> Iterator[str]:
        """Check a call's signature and role, then run the block; yields the operator's name.

        ``raw`` is the request as it was sent: these bytes are signed. Raises ``RefusedError`` if
        the signer is unknown or lacks the role, or the block raises ``FederationError``.
        """
        try:
            who = self.verifier.caller(metadata, method, raw)
        except SigningError as error:
            raise RefusedError(grpc.StatusCode.UNAUTHENTICATED, str(error)) from None
        try:
            self._require_role(who, method, raw)
            yield who
        except FederationError as error:
            raise RefusedError(grpc.StatusCode.PERMISSION_DENIED, str(error)) from None

    def noted(self, method: str, who: str, request: Any) -> AbstractContextManager[None]:
        """Log an act before its block; raises ``FederationError`` for a run that must be queued."""
        name = method.removeprefix(CONTROL)
        if name == "StartRun":
            self._require_turn(who)
            said = _settings(request)
            about = {key: said[key] for key in SAID_OF_A_RUN if said.get(key)}
            return audit.acting(self.made, "run", who=self._starter(who, request), **about)
        if name == "StopRun":
            return audit.acting(self.made, "stop", who=_named(who), run=request.run_id)
        return nullcontext()

    def note_begun(self, who: str, request: Any, reply: Any) -> None:
        """Log the number of a run that was started."""
        run_id = started(reply)
        if run_id is not None:
            audit.note(self.made, audit.BEGUN, who=self._starter(who, request), run=run_id)

    def act(self, who: str, raw: bytes) -> bytes:
        """Do what ``Control.act`` asks for; return the answer.

        Raises ``FederationError`` if it cannot be done, or is not known here.
        """
        try:
            asked = json.loads(raw)
            del asked["act"]
            work = {str(key): str(value) for key, value in asked.items()}
            done = _act_of(raw).do(self.made, _named(who), work)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise FederationError(
                "the call comes from a different version of coterie. Install the coordinator's "
                "version here."
            ) from None
        return json.dumps(done).encode()

    def _key_of(self, name: str) -> bytes | None:
        found = operators.find(self.made, name)
        return found.key.encode() if found is not None else None

    def _require_role(self, who: str, method: str, raw: bytes) -> None:
        """Reject an operator without the role, and log that. Raises ``FederationError``."""
        known = operators.find(self.made, who)
        name = method.removeprefix(CONTROL)
        needed = _act_of(raw).role if method == ACT else NEEDED.get(name)
        if who == operators.LOCAL and needed is not None:
            return
        roles = known.roles if known is not None else ()
        if known is not None and needed and (needed == "look" or needed in roles):
            return
        audit.note(self.made, "refused", who=who, call=name, roles=", ".join(roles))
        if not needed:
            raise FederationError(f"the call {name} is not available to operators.")
        held = f"the roles {', '.join(roles)}" if roles else "no role"
        raise FederationError(
            f"operator {who!r} has {held}; the role {needed!r} is required to "
            f"{operators.ROLES[needed]}. The coordinator's operator can give it with "
            f"`coterie operator set-roles {who} --role {needed}`."
        )

    def _require_turn(self, who: str) -> None:
        """Raise ``FederationError`` for a run that bypasses a mandatory queue."""
        at_once = self.made.config.runs.at_once
        if who != operators.LOCAL and at_once:
            raise FederationError(
                f"at most {at_once} runs may be active here at the same time ([runs] at_once): "
                "use --queue, and the run starts when its turn comes."
            )

    def _starter(self, who: str, request: Any) -> str:
        """Return who starts a run; for a run from the queue, who queued it."""
        if who != operators.LOCAL:
            return who
        with suppress(FederationError):  # a damaged queue is reported elsewhere
            return who_queued(self.made, digest_in(request))
        return ""


class GrpcGate(grpc.ServerInterceptor):  # type: ignore[misc]
    """The gate before Flower's Control API; ``inner`` is Flower's interceptor."""

    def __init__(self, gate: Gate, inner: grpc.ServerInterceptor) -> None:
        self.gate, self.inner = gate, inner

    def intercept_service(
        self, continuation: Callable[..., Any], handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        method = str(handler_call_details.method)
        if method == ACT:
            return grpc.unary_unary_rpc_method_handler(
                self._checked(method, lambda who, raw, context: self.gate.act(who, raw))
            )
        handler = self.inner.intercept_service(continuation, handler_call_details)
        if handler is None or not method.startswith(CONTROL):
            return handler
        wrap, answer = (
            (grpc.unary_unary_rpc_method_handler, handler.unary_unary)
            if handler.unary_unary
            else (grpc.unary_stream_rpc_method_handler, handler.unary_stream)
        )

        def answered(who: str, raw: bytes, context: grpc.ServicerContext) -> Any:
            request = handler.request_deserializer(raw)
            with self.gate.noted(method, who, request):
                reply = answer(request, context)
            self.gate.note_begun(who, request, reply)
            return reply

        # Without a deserializer: signed are the bytes.
        return wrap(
            self._checked(method, answered), response_serializer=handler.response_serializer
        )

    def _checked(
        self, method: str, answer: Callable[[str, bytes, grpc.ServicerContext], Any]
    ) -> Answer:
        def check(raw: bytes, context: grpc.ServicerContext) -> Any:
            try:
                with self.gate.passing(context.invocation_metadata(), method, raw) as who:
                    return answer(who, raw, context)
            except RefusedError as error:
                context.abort(error.code, str(error))

        return check


def _named(who: str) -> str:
    """Return the name for the log, where the coordinator's own operator is an account."""
    return "" if who == operators.LOCAL else who


def _act_of(raw: bytes) -> Act:
    """Return the requested act; an unknown one fails later, for callers who may enrol."""
    try:
        return ACTS.get(str(json.loads(raw)["act"]), UNKNOWN)
    except (ValueError, KeyError, TypeError):
        return UNKNOWN


def _settings(request: Any) -> dict[str, str]:
    return {key: plain_text(value, 200) for key, value in settings_of(request).items()}


def main() -> None:
    """Start a SuperLink with the gate before its Control API."""
    made = load()
    serve(made.folder, lambda inner: GrpcGate(Gate(made), inner))


if __name__ == "__main__":
    main()
