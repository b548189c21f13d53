"""A message to this silo, read and checked: what it asks for, or why it is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial, wraps
from math import ceil
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from coterie import wire
from coterie.client.home.approvals import not_now
from coterie.client.home.request_counts import asked_by, question_of, quota_objection
from coterie.client.work import personal
from coterie.client.work.data import Data, draw
from coterie.client.work.hold_out import leave_out_validation
from coterie.client.work.measure import leading
from coterie.client.work.optimisers import AUTO, PLAIN, Schedule, class_of
from coterie.client.work.session import Session, of_run, session_of
from coterie.client.work.sgd import TooFewError, TrainPlan, has_batch_norm, require_balance, seed_of
from coterie.client.work.stage import Stage
from coterie.client.work.weights import load_weights, travelling
from coterie.tasks.base import TaskError, has_own
from coterie.tasks.draws import fewest_persons, num_persons
from coterie.tasks.models import TableNetwork
from coterie.wire import Model
from coterie.wire.games import Game, game_of
from coterie.wire.limits import MAX_NAME

COMMON = {field.name for field in fields(TrainPlan)} & set(wire.SiloKeys.model_fields) - {
    "lr",
    "proximal_mu",
    "schedule",
}
"""Settings that all trainings of a run share, by their name in plans and messages."""


class RefusedError(ValueError):
    """A refusal of the silo. Its text goes to the server, with its code."""

    def __init__(self, reason: str, *, code: int = wire.REFUSED) -> None:
        super().__init__(reason)
        self.code = code


@dataclass(frozen=True)
class Request:
    """A message, and the session of its silo. Made by ``answering``.

    ``game``: in which the silo is played, if no network is between.

    Every method raises ``RefusedError`` if the silo cannot read the message, or cannot or will
    not do what it asks for.
    """

    message: Message
    session: Session
    config: ConfigRecord
    stages: tuple[Stage, ...] = ()
    game: Game | None = None

    @property
    def run(self) -> str:
        return str(self.config.get(wire.RUN, "run"))

    @property
    def purpose(self) -> str:
        """The model's purpose, if it is not for the run's own rounds; empty for those."""
        return str(self.config.get(wire.PURPOSE, ""))

    @property
    def run_seed(self) -> int:
        seed: int = self.value(wire.SEED)
        return seed

    def seed(self) -> int:
        """Return the seed of this message's random draws: by run, silo, round and purpose."""
        return self.seed_for(self.purpose)

    @property
    def joins(self) -> bool:
        """Whether the silo is asked to join a run."""
        return self.message.metadata.message_type == wire.DESCRIBE

    @property
    def trains_own(self) -> bool:
        """Whether this is a training of the run's own rounds, whose state the silo may keep."""
        kind = self.message.metadata.message_type
        return not self.purpose and wire.kind_of(kind).secret

    def round_number(self, *, default: int | None = None) -> int:
        return self.integer(wire.ROUND, minimum=0, default=default)

    def checked(self) -> Request:
        """Check the run's terms; return the request with the task as the run's keys make it."""
        self._check_run()
        values = {
            key.removeprefix(wire.TASK_KEYS): value
            for key, value in self.config.items()
            if key.startswith(wire.TASK_KEYS)
        }
        try:
            session = of_run(self.session, values)
        except TaskError as error:
            raise RefusedError(str(error)) from None
        work = self.run, wire.whole(self.config.get(wire.ROUND)), self.purpose[:64]
        request = replace(self, session=replace(session, work=work))
        if self.joins:
            request._check_terms()
        for stage in self.stages:
            request = stage.admit(request)
        if self.joins:
            request._check_now()  # last: nobody is asked about a run that is refused anyway
        return request

    def is_of_another_study(self) -> bool:
        """Return whether a run of a task that this silo does not serve asks who it is."""
        speaks = self.config.get(wire.PROTOCOL_KEY, wire.PROTOCOL) == wire.PROTOCOL
        own = self.session.task.name
        return self.joins and speaks and self.config.get(wire.TASK, own) != own

    def _check_run(self) -> None:
        """Refuse a different protocol or task; a plain Flower server states neither and passes."""
        protocol = self.config.get(wire.PROTOCOL_KEY, wire.PROTOCOL)
        if not wire.is_spoken(protocol):
            self.refuse_for(
                f"speaks protocol {wire.OLDEST_PROTOCOL} to {wire.PROTOCOL}, the run speaks "
                f"{protocol!r}. Upgrade the older side: a release works with the one before it."
            )
        if not wire.is_plain_name(self.run):
            self.refuse_for(f"accepts run names of at most {MAX_NAME} visible characters.")
        own = self.session.task.name
        task = self.config.get(wire.TASK, own)
        if task != own:
            self.refuse_for(f"serves task {own!r}, {wire.OTHER_TASK} {task!r}.")
        if self.session.settings.also and wire.TASK not in self.config:
            self.refuse_for("serves several tasks, and this message does not name one.")
        policy, kind = self.session.settings.policy, self.message.metadata.message_type
        self.refuse_for(policy.objection(self.config))
        self.refuse_for(policy.type_objection(kind, self.config))
        self.refuse_for(policy.secure_objection(kind, self.config))
        if self.session.settings.unlabelled and not wire.kind_of(kind).without_labels:
            self.refuse_for("has no labels yet (unlabelled): nothing is trained or measured here.")
        run = str(self.config.get(wire.RUN, ""))
        flower_run = str(self.message.metadata.run_id)
        asked = asked_by(self.session.settings, run, flower_run, self.game)
        question = partial(question_of, self.message)
        self.refuse_for(asked.objection(kind, self.config, policy, question))
        if self.config.get(wire.STRATEGY) not in wire.UNTRAINED:
            self.refuse_for(quota_objection(self.session.settings.home, run, policy.max_kept_runs))
        if kind != wire.DESCRIBE:
            self._check_now(begun=asked.evaluated[wire.whole(self.config.get(wire.ROUND))] > 0)

    def _check_now(self, *, begun: bool = False) -> None:
        """Refuse, for now, what waits for approval or for the silo's hours."""
        meta, settings = self.message.metadata, self.session.settings
        run = str(meta.run_id)
        later = not_now(settings, meta.message_type, self.config, run, begun=begun)
        self.refuse_for(later.why, code=later.code)

    def _check_terms(self) -> None:
        """Refuse now what the silo would refuse in a later message of this run."""
        self._check_schema()
        if self.config.get(wire.STRATEGY) in wire.UNTRAINED:
            return  # nothing is trained
        staying = self.personal()
        if self.session.settings.tests:
            return  # nothing is trained here
        if self.session.settings.unlabelled:
            self._check_use_without_labels(staying)
        plan = self.plan()
        self.metric()
        cold_start = self.value(wire.COLD_START_STEPS)
        if cold_start:
            self._check_passes(replace(plan, steps=cold_start), wire.COLD_START_STEPS)

    def _check_use_without_labels(self, staying: Sequence[str]) -> None:
        if self.config.get(wire.SECURE):
            self.refuse_for(
                "has no labels yet (unlabelled), and a secure run cannot place it in a group: "
                "the measurements for that would leave the silo."
            )
        if staying:
            self.refuse_for(
                "has no labels yet (unlabelled), and this run leaves layers at the silos "
                "(personal), which it cannot train: it could not use the model."
            )

    def _check_schema(self) -> None:
        """Refuse a run whose schema differs, and name the parts that do."""
        schema = self.config.get(wire.SCHEMA, self.session.schema)
        if schema == self.session.schema:
            return
        try:
            parts = wire.decode_parts(self.config.get(wire.SCHEMA_PARTS, "{}"))
        except (TypeError, ValueError):
            parts = {}
        found = wire.differences(parts, self.session.parts) if parts else []
        self.refuse_for(
            "does not fit the run: its model or task differs from the other silos' "
            f"({', '.join(found) or 'its weights or arrays'}). Ask them for their declaration, "
            "code and weights of the task."
        )

    def refuse_for(self, objection: str, *, code: int = wire.REFUSED) -> None:
        """Refuse in the silo's name, unless the objection is empty."""
        if objection:
            raise RefusedError(f"silo {self.session.settings.name!r} {objection}", code=code)

    def personal(self) -> tuple[str, ...]:
        """Return the names of the arrays that stay at this silo in this run."""
        layers = self.session.settings.policy.keep_layers
        try:
            names = personal.personal_names(self.session, wire.personal_layers(self.config))
            kept = personal.personal_names(self.session, layers)
        except personal.PersonalError as error:
            raise RefusedError(str(error)) from None
        if not set(kept) <= set(names):
            asked = self.config.get(wire.PERSONAL) or "none"
            self.refuse_for(
                f"does not send its layers {layers!r}; this run leaves only {asked!r} at the silos "
                "(personal)."
            )
        return names

    def receive(self, names: tuple[str, ...], *, before: int) -> bool:
        """Load the message's arrays, completed by the personal ones, into the session's model.

        Personal arrays are from the last round before ``before``. Return whether arrays came
        packed.
        """
        record = wire.array_records(self.message.content).get(wire.ARRAYS)
        try:
            model = None if record is None else self._restored(record)
            for stage in self.stages:
                model = stage.receive(self, model)
            if model is None:
                kind = self.message.metadata.message_type
                raise RefusedError(f"a {kind} message needs {wire.ARRAYS!r}.")
            whole = personal.complete(
                self.session, model, names, run=self.run, seed=self.run_seed, before=before
            )
            load_weights(self.session.model, whole)
        except RefusedError:
            raise
        except (wire.WireError, ValueError) as error:
            raise RefusedError(str(error)) from None
        return record is None or wire.is_packed(record)

    def _restored(self, record: ArrayRecord) -> Model:
        """Return the message's model, also if it came in 16-bit numbers."""
        own = travelling(self.session.model).items()
        like = {n: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in own}
        return wire.restore_model(wire.decode_arrays(record), like)

    def plan(self) -> TrainPlan:
        plan = replace(
            self.way(),
            epochs=self.value(wire.LOCAL_EPOCHS),
            lr=self.value(wire.LR),
            proximal_mu=self.value(wire.PROXIMAL_MU),
            cosine_lambda=self.value(wire.COSINE_LAMBDA),
            penalty=self.value(wire.PENALTY),
            steps=self.value(wire.LOCAL_STEPS),
            part=self._part(),
        )
        self._check_passes(plan, wire.LOCAL_STEPS if plan.steps else wire.INNER_STEPS)
        self.check_samples(plan.steps, plan.batch_size)
        self._check_task()
        return plan

    def _part(self) -> str:
        """Return the part of a table's network to train; empty: all of it."""
        parts = ("", wire.LINEAR_PART, wire.HIDDEN_PART, wire.BOTH_PARTS)
        part = self._one_of(wire.PART, parts, default="")
        if part and not isinstance(self.session.model, TableNetwork):
            self.refuse_for(f"was asked to train the {part} part, but its model has no such parts.")
        return "" if has_own(self.session.task, "train") else part

    def _check_task(self) -> None:
        """Refuse settings that do not go with the task's own hooks."""
        for name, entry in wire.entries().items():
            self.refuse_with(name, entry.at.without, idle=entry.at.idle)

    def refuse_with(self, name: str, hooks: Sequence[str], *, idle: object) -> None:
        """Refuse an entry that is not ``idle`` if the task replaces one of these hooks."""
        asked: object = self.config.get(name, idle)
        own = [hook for hook in hooks if has_own(self.session.task, hook)]
        if own and asked != idle:
            self.refuse_for(
                f"cannot take part: its task {self.session.task.name!r} has its own {own[0]}, "
                f"which cannot be combined with this run's {name} = {asked}."
            )

    def way(self) -> TrainPlan:
        """Return the settings that all trainings of this round share."""
        asked = {name: self.value(name.replace("_", "-")) for name in COMMON}
        if self.value(wire.PLAIN_STEPS) and asked["optimiser"] == AUTO:
            asked["optimiser"] = "sgd"
        plan = TrainPlan(epochs=1, lr=0.01, schedule=self._schedule(), **asked)
        if plan.batch_size == 1 and has_batch_norm(self.session.model):
            raise RefusedError("a model with BatchNorm cannot be trained with batch-size 1.")
        try:
            require_balance(self.session.task, plan.balance)
            if plan.optimiser not in PLAIN:
                class_of(plan.optimiser)
        except TaskError as error:
            raise RefusedError(str(error)) from None
        return plan

    def metric(self) -> str:
        """Return the primary metric, if the run names one; else an empty string."""
        name: str = self.value(wire.METRIC)
        try:
            leading(self.session.task, name)
        except TaskError as error:
            raise RefusedError(str(error)) from None
        return name

    def lead(self) -> dict[str, str]:
        """Return name and unit of the primary metric, by which errors are measured."""
        task = self.session.task
        unit = getattr(task.problem, "unit", "")
        return {"metric": leading(task, self.metric()).name, "unit": unit}

    def held_out_share(self, key: str, *, of: Data | None = None, needed: bool = True) -> float:
        """Return the share of the training samples to hold out, by its run key; 0 if there is none.

        Args:
            of: what is left of the silo's data; None: all of them.
            needed: refuse if no sample can be held out.
        """
        share: float = self.value(key)
        left = self.session.data if of is None else of
        if share > 0.5:
            raise RefusedError(f"{key} must be in [0, 0.5]. Got {share}.")
        if not (needed and share):
            return share
        whole = left.train.together
        kind = "blocks" if left.train.persons is None else "persons"
        if (len(left.train) if whole is None else num_persons(whole)) < 2:
            what = "training samples" if whole is None else f"{kind} in its training data"
            self.refuse_for(
                f"has too few {what} for {key}: 1 remains, and at least 2 are needed to hold "
                "one out."
            )
        if (
            whole is not None
            and left.validation is None
            and not len(draw(left.train, 1, seed=0)[0])
        ):
            self.refuse_for(
                f"can hold out none of the {kind} in its training data for {key}: each is the only "
                "one with some class."
            )
        return share

    def spared(self) -> Session:
        """Return the session without validation data, which no training of this run sees."""
        share = self.held_out_share(wire.VALIDATION)
        return leave_out_validation(self.session, share, run_seed=self.run_seed)

    @property
    def splits(self) -> tuple[object, ...]:
        """The entries that decide which rows are held out."""
        names = (wire.VALIDATION, wire.HOLDOUT, wire.SEED, wire.STRATEGY)
        return tuple(self.config.get(name) for name in names)

    def value(self, name: str) -> Any:
        """Return a declared entry of the message, checked, or the silo's default for it."""
        entry = wire.entries()[name]
        if entry.choices:
            return self._one_of(name, entry.choices, default=str(entry.at.default))
        if entry.kind is int:
            return self.integer(name, minimum=entry.least, default=int(entry.at.default))
        if entry.kind is float:
            return self.real(name, default=float(entry.at.default))
        return entry.kind(self.config.get(name, entry.at.default))

    def integer(self, key: str, *, minimum: int, default: int | None = None) -> int:
        """Return an integer of at least ``minimum``; without a default the message must have it."""
        value = self.config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise RefusedError(f"{key} must be an integer of at least {minimum}. Got {value!r}.")
        return value

    def real(self, key: str, *, default: float, below: float = 1e9) -> float:
        """Return a number in [0, ``below``)."""
        value = self.config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < below:
            raise RefusedError(f"{key} must be a number of at least 0. Got {value!r}.")
        return float(value)

    def seed_for(self, purpose: str) -> int:
        """Return the seed of a training for this purpose in this round."""
        return seed_of(self.run_seed, self.session.settings.name, self.round_number(), purpose)

    def _check_passes(self, plan: TrainPlan, key: str) -> None:
        """Refuse too many passes over the silo's samples; a partial pass counts as a whole one.

        Held-out samples count too: a server that plans steps knows no other number.
        """
        epochs = plan.epochs
        if plan.steps:
            an_epoch = ceil(len(self.session.data.train) / plan.batch_size)
            epochs = ceil(plan.steps / an_epoch)
        passes = epochs * self.value(wire.INNER_STEPS)
        self.refuse_for(self.session.settings.policy.passes_objection(passes, key))

    def check_samples(self, steps: int, batch: int, *, most: int | None = None) -> None:
        """Refuse a training with too few samples of the silo, or samples of too few persons.

        ``steps`` mini-batches of ``batch`` samples (0: whole epochs) use at most ``most`` samples.
        """
        own, whose = len(self.session.data.train), self.session.data.train.persons
        seen = min(own, own if most is None else most, steps * batch if steps else own)
        behind = None
        if whose is not None:
            behind = fewest_persons(whose, seen), num_persons(whose)
        policy = self.session.settings.policy
        self.refuse_for(policy.samples_objection(seen, batch, of=own, persons=behind))

    def _one_of(self, key: str, known: Sequence[str], *, default: str) -> str:
        value = str(self.config.get(key, default))
        if value not in known:
            raise RefusedError(f"{key} must be one of {', '.join(known)}. Got {value!r}.")
        return value

    def _schedule(self) -> Schedule | None:
        kind, warm_up, rounds = map(self.value, (wire.SCHEDULE, wire.WARM_UP, wire.ROUNDS))
        own = self.session.task.lr_factor if has_own(self.session.task, "lr_factor") else None
        if (kind == "constant" and not warm_up and own is None) or not rounds:
            return None
        if warm_up >= 1:
            raise RefusedError(
                f"{wire.WARM_UP} must be a share of the run, below 1. Got {warm_up}."
            )
        begin = max(self.round_number(default=1) - 1, 0) / rounds
        schedule = Schedule(kind, warm_up, begin, 1 / rounds, own)
        try:
            schedule.factor(0.0)
        except TaskError as error:
            raise RefusedError(str(error)) from None
        return schedule


def answering(
    work: Callable[[Request], RecordDict], stages: tuple[Stage, ...]
) -> Callable[[Message, Context], Message]:
    """Return a Flower handler that checks the run, does the work and packs its outcome."""

    answer = work
    for stage in reversed(stages):
        answer = partial(stage.answer, work=answer)

    @wraps(work)
    def handler(message: Message, context: Context) -> Message:
        config = wire.config_records(message.content).get(wire.CONFIG)
        config = config or ConfigRecord()
        session = session_of(context, str(config.get(wire.TASK, "")))
        request = Request(message, session, config, stages, game_of(context))
        if request.is_of_another_study():
            return Message(wire.encode_description(session.describe_elsewhere()), reply_to=message)
        try:
            request = request.checked()
            return Message(answer(request), reply_to=message)
        except RefusedError as reason:
            return wire.refusal(str(reason), message, code=reason.code)
        except TooFewError as reason:
            return wire.refusal(str(reason), message)

    return handler
