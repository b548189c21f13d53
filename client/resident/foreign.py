"""Any Flower ClientApp in a resident silo: the user's own, as it is installed here.

The app is called as a SuperNode calls it: its node config holds the options of the silo's
``[data]`` under their own names, its run config is that of the run's FAB, and its state persists
from round to round. The silo's ledger wraps it, and so does the part of the silo's policy that can
be enforced on unknown code; ``conditions`` lists what is enforced and what is not.

The code of a run's FAB is never run: only its configuration is read.
"""

from __future__ import annotations

import logging
import re
import tomllib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from coterie import wire
from coterie.client.home import approvals
from coterie.client.home.hours import words
from coterie.client.home.policy import ALWAYS, METRICS, REVEALING_WORDS, Policy
from coterie.client.home.settings import SettingsError, SiloSettings
from coterie.client.ledger import outbound
from coterie.tasks.base import Option

log = logging.getLogger("coterie.silo")

Answering = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, Answering], Message]
"""A Flower mod: it is called with the app that it wraps."""

LIMITED = frozenset(
    {
        *(wire.LOCAL_EPOCHS, wire.COLD_START_EPOCHS, wire.PERSONAL_EPOCHS, wire.ADAPT_STEPS),
        *(wire.ROUND, wire.ROUNDS, wire.ASKS_LABEL_COUNTS),
    }
)
"""Settings stated by a run that a policy can refuse."""
MAX_STATES = 4
"""Latest runs whose app state a silo keeps."""


def load_app(reference: str) -> ClientApp:
    """Import the ClientApp at ``module:attribute``; raise ``SettingsError`` if there is none."""
    found = _imported(reference, "app")
    if not isinstance(found, ClientApp):
        raise SettingsError(
            f"app {reference!r} must be a flwr.clientapp.ClientApp. Got {type(found).__name__}."
        )
    return found


def load_mod(reference: str) -> Mod:
    """Import the mod at ``module:attribute``; raise ``SettingsError`` if there is none.

    An example is ``flwr.clientapp.mod:arrays_size_mod``.
    """
    found = _imported(reference, "mod")
    if not callable(found) or isinstance(found, type):
        raise SettingsError(
            f"mod {reference!r} must be a function of message, context and call_next, as Flower's "
            f"are. Got {type(found).__name__}."
        )
    made: Mod = found
    return made


def _imported(reference: str, what: str) -> object:
    module, _, attribute = reference.partition(":")
    if not module or not attribute:
        raise SettingsError(f"{what} must be given as MODULE:ATTRIBUTE. Got {reference!r}.")
    try:
        return getattr(import_module(module), attribute)
    except ImportError as error:
        raise SettingsError(
            f"{what} {reference!r} cannot be imported: {error}. Install its package where this "
            "runs, or set PYTHONPATH."
        ) from error
    except AttributeError:
        raise SettingsError(f"module {module!r} has no attribute {attribute!r}.") from None
    except Exception as error:
        raise SettingsError(
            f"{what} {reference!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error


def typed(options: Mapping[str, Option]) -> dict[str, Option]:
    """Parse options as Flower parses a node config: ``3`` is a number, other text stays text."""
    return {k: _typed(v) if isinstance(v, str) else v for k, v in options.items()}


def _typed(text: str) -> Option:
    try:
        value = tomllib.loads(f"value = {text}")["value"] if "\n" not in text else text
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    return value if isinstance(value, int | float | str) else text


class ForeignApp:
    """A ClientApp wrapped in the silo's ledger and policy, and called like one.

    ``mods`` are Flower mods; the first is outermost. They see what the app sees and sends, and
    the ledger records their result.
    """

    def __init__(self, app: ClientApp, mods: Sequence[Mod] = ()) -> None:
        self._answer: Answering = app
        for mod in (*mods[::-1], self._within_policy, outbound):
            self._answer = partial(_through, mod, self._answer)
        self._states: OrderedDict[tuple[str, int], RecordDict] = OrderedDict()
        self._said: set[tuple[str, str]] = set()

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message; ``context.node_config`` has the silo's settings."""
        return self._answer(message, context)

    def _within_policy(self, message: Message, context: Context, call_next: Answering) -> Message:
        """Apply the policy as a mod: refuse, or call the app and send what may leave."""
        silo = SiloSettings.from_node_config(context.node_config, node_id=context.node_id)
        if message.metadata.message_type == wire.NAME:
            stated = ConfigRecord({wire.SILO: silo.name})
            return Message(RecordDict({wire.CONFIG: stated}), reply_to=message)
        objection = objection_to(message, context.run_config, silo.policy)
        if objection:
            return wire.refusal(f"silo {silo.name!r} {objection}", message)
        later = not_now_of(silo, message, context.run_config)
        if later.why:
            return wire.refusal(f"silo {silo.name!r} {later.why}", message, code=later.code)
        reply = call_next(message, self._seen(silo, context))
        if reply.has_error():
            # Its reason is the app's own text, which may quote the silo's data.
            log.error("the app answered with error %s: %s", reply.error.code, reply.error.reason)
            return wire.failure(silo.name, AppError(reply.error.code), message)
        objection = objection_to_reply(message, reply, silo.policy)
        if objection:
            return wire.refusal(f"silo {silo.name!r} {objection}", message)
        self._say_what_stays(silo, reply)
        return within(reply, silo.policy)

    def _say_what_stays(self, silo: SiloSettings, reply: Message) -> None:
        """Log each metric once that the policy keeps back."""
        records = wire.metric_records(reply.content).values()
        names = {key for record in records for key in record if not may_leave(key, silo.policy)}
        if new := sorted(name for name in names if (silo.name, name) not in self._said):
            self._said |= {(silo.name, name) for name in new}
            toml = "share_metrics ([policy] in silo.toml)"
            why = f"{toml} does not name them"
            if silo.policy.share_metrics is None:
                why = (
                    "with others they reveal how frequent the classes are. To let them leave, name "
                    f"all metrics that may leave in {toml}"
                )
            log.warning("silo %s: metrics of the app stay here: %s: %s", silo.name, new, why)

    def _seen(self, silo: SiloSettings, context: Context) -> Context:
        key = (silo.name, context.series_id or context.run_id)
        state = self._states.setdefault(key, RecordDict())
        self._states.move_to_end(key)
        for old in [k for k in self._states if k[0] == silo.name][:-MAX_STATES]:
            del self._states[old]
        return Context(
            run_id=context.run_id,
            node_id=context.node_id,
            node_config=dict(silo.options),
            state=state,
            run_config=context.run_config,
            series_id=context.series_id,
        )


class AppError(RuntimeError):
    """An error reply by the app itself."""


def _through(mod: Mod, call_next: Answering, message: Message, context: Context) -> Message:
    return mod(message, context, call_next)


# ---------------------------------------------------------------- the policy, for any app


def objection_to(message: Message, run_config: Mapping[str, object], policy: Policy) -> str:
    """Return why a message is refused; empty if it is not.

    The message's configuration and ``run_config``, of the run's FAB, are checked separately.
    """
    records = wire.config_records(message.content).values() if message.has_content() else ()
    asked = [
        (wire.spelled(key), value)
        for config in (run_config, *records)
        for key, value in config.items()
    ]
    named: object = dict(asked).get(wire.STRATEGY, "")
    # One by one: of two spellings of a setting nobody knows which the app reads. What a step is
    # only the app knows, so steps do not take the place of epochs here.
    for key, value in [(wire.STRATEGY, named), *((k, v) for k, v in asked if k in LIMITED)]:
        if objection := policy.objection({wire.STRATEGY: named, key: value}):
            return objection
    if message.metadata.message_type.partition(".")[0] == wire.TRAIN:
        return _group_objection(message, policy)
    return ""


def not_now_of(
    silo: SiloSettings, message: Message, run_config: Mapping[str, object]
) -> approvals.Later:
    """Return why a message must wait; its run's terms are its configuration at the SuperLink."""
    own = wire.config_records(message.content).get(wire.CONFIG) if message.has_content() else None
    meta, config = message.metadata, own or ConfigRecord()
    return approvals.not_now(
        silo, meta.message_type, config, str(meta.run_id), terms=run_config or None
    )


def _group_objection(message: Message, policy: Policy) -> str:
    records = wire.config_records(message.content) if message.has_content() else {}
    config = records.get(wire.CONFIG)
    return policy.group_objection(config or {})


def objection_to_reply(message: Message, reply: Message, policy: Policy) -> str:
    """Return why an app's reply must stay here; empty if it may leave."""
    records = wire.array_records(reply.content)
    sent = set(wire.array_records(message.content)) if message.has_content() else set()
    if not policy.auxiliary and (extra := sorted(set(records) - sent)):
        return f"sends no model except the one received; its app also sends {extra[0]!r}."
    layers = policy.keep_layers
    if layers and any(name.startswith(layers) for record in records.values() for name in record):
        return f"does not send its layers {layers!r}; its app sends them."
    return _group_objection(message, policy) if records else ""


def within(reply: Message, policy: Policy) -> Message:
    """Remove from a reply, in place, what the policy does not let leave.

    With ``share_metrics`` in silo.toml only these leave in addition to arrays; without it, all
    metrics except those that reveal class frequencies.
    """
    content = reply.content
    for name, record in list(wire.metric_records(content).items()):
        kept = {key: value for key, value in record.items() if may_leave(key, policy)}
        if len(kept) < len(record):
            content[name] = MetricRecord(kept)
    if policy.share_metrics is not None:
        for name in list(wire.config_records(content)):
            content[name] = ConfigRecord()
    if policy.min_group_size > 1 and wire.array_records(content):
        for record in wire.metric_records(content).values():
            # For the server: of those that train, not all may answer.
            record[wire.MIN_GROUP_SIZE] = policy.min_group_size
    return reply


def may_leave(key: str, policy: Policy) -> bool:
    """Return whether a metric of this name may leave, however its app spells it."""
    name = wire.spelled(key).removesuffix(wire.LOW).removesuffix(wire.HIGH)
    if name in ALWAYS:
        return True
    if policy.share_metrics is None:
        reveals = (
            REVEALING_WORDS & set(re.findall("[a-z0-9]+", name)) or "balanced-accuracy" in name
        )
        return not reveals and name not in policy.withheld
    named = map(wire.spelled, policy.share_metrics)
    allowed = {key for wanted in named for key in METRICS.get(wanted, (wanted,))}
    return name in allowed or (name == wire.ACCURACY and wire.ERROR in allowed)


# ---------------------------------------------------------------- what is held, and what is not


def check_policy(silo: SiloSettings) -> None:
    """Raise ``SettingsError`` for [privacy] or layers, which cannot be enforced for an app."""
    if silo.privacy is not None:
        raise SettingsError(
            "[privacy] in silo.toml cannot be enforced for an app: differential privacy covers "
            "only coterie's own training loop. Remove the section, or serve a task."
        )
    if (layers := silo.policy.keep_layers) in ("head", "norm"):
        raise SettingsError(
            f'keep_layers = "{layers}" cannot be enforced for an app: only of a task is it known '
            "which layers these are. Give the prefix of the names of the arrays that must not "
            "leave."
        )


def conditions(silo: SiloSettings) -> Iterator[str]:
    """Yield sentences about which of the silo's settings hold for its app and which do not."""
    policy = silo.policy
    config = ", ".join(f"{k}={v!r}" for k, v in silo.options.items()) or "nothing"
    yield f"The app's node config, from [data]: {config}."
    yield "Every reply is recorded in the ledger. For an error, only its kind leaves."
    if policy.approve:
        yield (
            "A run is answered only after approval here (coterie silo approve RUN), by its "
            "configuration at the SuperLink; other contents of its messages are not compared."
        )
    if when := words(policy.hours, policy.days):
        yield f"It trains only when it {when}."
    if policy.strategies:
        names = ", ".join(policy.strategies)
        yield f"It takes part only in {names}: a run that does not name its strategy is refused."
    if policy.max_rounds:
        yield f"Refused: runs that state more than {policy.max_rounds} rounds."
    if policy.max_local_epochs:
        yield (
            f"Refused: messages and runs that state more than {policy.max_local_epochs} local "
            "epochs. The app itself decides how long it trains."
        )
    if policy.min_group_size > 1:
        yield (
            "Its updates leave only in groups whose size the run states, of at least "
            f"{policy.min_group_size} silos, or alone. coterie's strategies state it, Flower's "
            "do not."
        )
    if policy.keep_layers:
        yield f"A reply with arrays whose names begin with {policy.keep_layers!r} does not leave."
    if not policy.auxiliary:
        yield "A reply with models in addition to the one received does not leave."
    if policy.share_metrics is None:
        kept, parts = (", ".join(sorted(names)) for names in (policy.withheld, REVEALING_WORDS))
        yield (
            f"Metrics leave as the app names them, except {kept}, and names with one of the words "
            f"{parts}."
        )
    else:
        allowed = ", ".join(["numbers of samples", *policy.share_metrics])
        yield f"Only these metrics leave: {allowed}. Configurations in replies do not leave."
    yield (
        "Not checked for an app: how it computes its arrays and metrics. It can read whatever "
        "this user account can, and labels or samples in what it sends are not recognised."
    )
    ignored = ["task", "device", "threads", "workers", *(["alpha"] if silo.alpha else [])]
    yield f"Without effect: {', '.join(ignored)}. The app decides them."
