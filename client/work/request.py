"""A message to this silo, read and checked: what it asks for, or why it is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from math import ceil

from flwr.app import ConfigRecord, Context, Message, RecordDict

from coterie import wire
from coterie.client.home import personal
from coterie.client.work.data import Data
from coterie.client.work.guard import Guard, guarded_until
from coterie.client.work.measure import leading
from coterie.client.work.optimisers import SCHEDULES, Schedule, class_of
from coterie.client.work.personalisation import DITTO, FINETUNE, Ditto, Personalisation
from coterie.client.work.sgd import TooFewError, TrainPlan, has_batch_norm, seed_of
from coterie.client.work.weights import load_weights
from coterie.client.work.workbench import Workbench, workbench_of
from coterie.tasks.base import TaskError
from coterie.tasks.problems import BALANCE, Classes

PRECISIONS = ("float32", "bfloat16", "float16")


class RefusedError(ValueError):
    """The silo will not do what was asked. The text goes to the server."""


@dataclass(frozen=True)
class Request:
    """A message, and the workbench of the silo that it is for. Made by ``answering``.

    Every method raises ``RefusedError`` where the message asks for what this silo cannot do, does
    not do, or cannot read.
    """

    message: Message
    bench: Workbench
    config: ConfigRecord

    @property
    def run(self) -> str:
        """The run's name."""
        return str(self.config.get(wire.RUN, "run"))

    @property
    def purpose(self) -> str:
        """What the model is for beside the run's own rounds; empty for those."""
        return str(self.config.get(wire.PURPOSE, ""))

    @property
    def run_seed(self) -> int:
        """Of the whole run."""
        return self.integer(wire.SEED, minimum=0, default=0)

    def seed(self) -> int:
        """Of what this message makes the silo draw: by run, silo, round and purpose."""
        return self._seed(self.purpose)

    def round_number(self, *, default: int | None = None) -> int:
        """Number of the round."""
        return self.integer(wire.ROUND, minimum=0, default=default)

    def check_run(self) -> None:
        """Refuse another protocol or task. A plain Flower server says neither, and may go on."""
        protocol = self.config.get(wire.PROTOCOL_KEY, wire.PROTOCOL)
        if protocol != wire.PROTOCOL:
            self.refuse_for(
                f"speaks protocol {wire.PROTOCOL}, the run speaks {protocol!r}. Install the same "
                "coterie version on both sides."
            )
        own = self.bench.task.name
        task = self.config.get(wire.TASK, own)
        if task != own:
            self.refuse_for(f"serves task {own!r}, the run is of task {task!r}.")
        self.refuse_for(self.bench.settings.policy.objection(self.config))
        if self.message.metadata.message_type == wire.DESCRIBE:
            self._check_terms()

    def _check_terms(self) -> None:
        """Refuse now what the silo would refuse of a later message of this run."""
        plan = self.plan()
        self.metric()
        cold_start = self.integer(wire.PRETRAIN_STEPS, minimum=0, default=0)
        if cold_start:
            self._check_passes(replace(plan, steps=cold_start), wire.PRETRAIN_STEPS)

    def refuse_for(self, objection: str) -> None:
        """Refuse in the silo's name, unless the objection is empty."""
        if objection:
            raise RefusedError(f"silo {self.bench.settings.name!r} {objection}")

    def personal(self) -> tuple[str, ...]:
        """Names of the arrays that stay at this silo in this run."""
        layers = self.bench.settings.policy.keep_layers
        try:
            names = personal.personal_names(self.bench, str(self.config.get(wire.PERSONAL, "")))
            kept = personal.personal_names(self.bench, layers)
        except personal.PersonalError as error:
            raise RefusedError(str(error)) from None
        if not set(kept) <= set(names):
            asked = self.config.get(wire.PERSONAL) or "none"
            self.refuse_for(
                f"keeps its layers {layers!r}; this run leaves {asked!r} there (personal)."
            )
        return names

    def receive(self, names: tuple[str, ...], *, before: int) -> bool:
        """Load the message's arrays, completed by the personal ones, into the bench's model.

        The personal ones are of the last round before ``before``. Returns whether the arrays came
        packed.
        """
        record = self.message.content.array_records.get(wire.ARRAYS)
        if record is None:
            kind = self.message.metadata.message_type
            raise RefusedError(f"a {kind} message needs {wire.ARRAYS!r}.")
        try:
            whole = personal.complete(
                self.bench,
                wire.decode_arrays(record),
                names,
                run=self.run,
                seed=self.run_seed,
                before=before,
            )
            load_weights(self.bench.model, whole)
        except (wire.WireError, ValueError) as error:
            raise RefusedError(str(error)) from None
        return wire.is_packed(record)

    def plan(self) -> TrainPlan:
        """How to train."""
        plan = replace(
            self._way(),
            epochs=self.integer(wire.LOCAL_EPOCHS, minimum=1, default=1),
            lr=self.real(wire.LR, default=0.01),
            proximal_mu=self.real(wire.PROXIMAL_MU, default=0.0),
            steps=self.integer(wire.LOCAL_STEPS, minimum=0, default=0),
        )
        self._check_passes(plan, wire.LOCAL_STEPS if plan.steps else wire.INNER_STEPS)
        return plan

    def guard(self) -> Guard | None:
        """What the silo does to end no worse than alone; None if the run has no guard."""
        share = self.held_out_share(wire.GUARD)
        if not share:
            return None
        rounds = self.integer(wire.ROUNDS, minimum=0, default=0)
        return Guard(
            share=share,
            run=self.run,
            run_seed=self.run_seed,
            since=self.integer(wire.GUARD_SINCE, minimum=1, default=1),
            until=guarded_until(rounds),
            plan=self._guard_plan,
        )

    def _guard_plan(self, number: int) -> TrainPlan:
        """The run's own training in this round, without a pull to others' models."""
        decay = self.real(wire.GUARD_LR_DECAY, default=1.0)
        plan = replace(
            self._way(number),
            epochs=self.integer(wire.GUARD_EPOCHS, minimum=1, default=1),
            lr=self.real(wire.GUARD_LR, default=0.01) * decay ** (number - 1),
            steps=self.integer(wire.GUARD_STEPS, minimum=0, default=0),
        )
        self._check_passes(plan, wire.GUARD_STEPS if plan.steps else wire.GUARD_EPOCHS)
        return plan

    def _way(self, number: int | None = None) -> TrainPlan:
        """What all trainings of the run have in common, in this round or another."""
        return TrainPlan(
            epochs=1,
            batch_size=self._batch_size(),
            lr=0.01,
            momentum=self.real(wire.MOMENTUM, default=0.0),
            weight_decay=self.real(wire.WEIGHT_DECAY, default=0.0),
            precision=self._one_of(wire.PRECISION, PRECISIONS),
            optimiser=self._optimiser(),
            schedule=self._schedule(number),
            clip_norm=self.real(wire.CLIP_NORM, default=0.0),
            accumulate=self.integer(wire.ACCUMULATE, minimum=1, default=1),
            balance=self._balance(),
        )

    def metric(self) -> str:
        """The leading metric, if the run names another than the task's."""
        name = str(self.config.get(wire.METRIC, ""))
        try:
            leading(self.bench.task, name)
        except TaskError as error:
            raise RefusedError(str(error)) from None
        return name

    def inner_steps(self) -> int:
        """Steps on every mini-batch (pFedMe)."""
        return self.integer(wire.INNER_STEPS, minimum=1, default=1)

    def personalisation(self, *, before: int) -> Personalisation | None:
        """What the silo makes of the model received before it evaluates it, if anything.

        Ditto's own model is the last one of a round before ``before``.
        """
        steps = self._steps_before_a_test()
        kind = self.config.get(wire.PERSONALISE)
        if kind is None:
            return steps
        if kind not in (FINETUNE, DITTO):
            raise RefusedError(f"{wire.PERSONALISE} must be {FINETUNE} or {DITTO}. Got {kind!r}.")
        plan = replace(
            self._way(),
            epochs=self.integer(wire.PERSONAL_EPOCHS, minimum=1, default=1),
            lr=self.real(wire.PERSONAL_LR, default=0.01),
        )
        strength = self.real(wire.DITTO_LAMBDA, default=0.0)
        ditto = Ditto(strength, self.run, self.round_number(), before) if kind == DITTO else None
        return Personalisation(plan, self._seed(str(kind)), ditto)

    def _steps_before_a_test(self) -> Personalisation | None:
        """Steps along the gradient of all training data, with FedProx's pull (Per-FedAvg …)."""
        plan = TrainPlan(
            epochs=self.integer(wire.ADAPT_STEPS, minimum=0, default=0),
            batch_size=len(self.bench.data.train),
            lr=self.real(wire.ADAPT_LR, default=0.0),
            proximal_mu=self.real(wire.ADAPT_MU, default=0.0),
        )
        return Personalisation(plan, seed=0) if plan.epochs else None

    def held_out_share(self, key: str, *, of: Data | None = None) -> float:
        """Share of the training samples that is not trained with; 0 if the run has none.

        Args:
            key: of the share.
            of: what is left of the silo's data; by default all of them.
        """
        share = self.real(key, default=0.0)
        left = self.bench.data if of is None else of
        if share > 0.5:
            raise RefusedError(f"{key} must be in [0, 0.5]. Got {share}.")
        if share and len(left.train) < 2:
            self.refuse_for(
                f"has too few training samples for {key}: 1 is left, and at least 2 are needed to "
                "hold out one of them."
            )
        return share

    def integer(self, key: str, *, minimum: int, default: int | None = None) -> int:
        """A whole number of at least ``minimum``; without a default the message must have it."""
        value = self.config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise RefusedError(f"{key} must be an integer of at least {minimum}. Got {value!r}.")
        return value

    def real(self, key: str, *, default: float) -> float:
        """A number in [0, 1e9)."""
        value = self.config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
            raise RefusedError(f"{key} must be a number of at least 0. Got {value!r}.")
        return float(value)

    def _seed(self, purpose: str) -> int:
        return seed_of(self.run_seed, self.bench.settings.name, self.round_number(), purpose)

    def _batch_size(self) -> int:
        size = self.integer(wire.BATCH_SIZE, minimum=1, default=32)
        if size == 1 and has_batch_norm(self.bench.model):
            raise RefusedError("a model with BatchNorm cannot be trained with batch-size 1.")
        return size

    def _check_passes(self, plan: TrainPlan, key: str) -> None:
        """Refuse a training that goes over the silo's samples too often, a part counted as all.

        Those held out count too: a server that plans steps knows no other number.
        """
        epochs = plan.epochs
        if plan.steps:
            an_epoch = ceil(len(self.bench.data.train) / plan.batch_size)
            epochs = ceil(plan.steps / an_epoch)
        passes = epochs * self.inner_steps()
        self.refuse_for(self.bench.settings.policy.passes_objection(passes, key))

    def _one_of(self, key: str, known: Sequence[str]) -> str:
        value = str(self.config.get(key, known[0]))
        if value not in known:
            raise RefusedError(f"{key} must be one of {', '.join(known)}. Got {value!r}.")
        return value

    def _balance(self) -> str:
        balance = self._one_of(wire.BALANCE, BALANCE)
        if balance != "none" and not isinstance(self.bench.task.problem, Classes):
            self.refuse_for(f"learns no classes that {wire.BALANCE} = {balance} could make up for.")
        return balance

    def _optimiser(self) -> str:
        name = str(self.config.get(wire.OPTIMISER, "sgd"))
        if name != "sgd":
            try:
                class_of(name)
            except TaskError as error:
                raise RefusedError(str(error)) from None
        return name

    def _schedule(self, number: int | None) -> Schedule | None:
        kind = self._one_of(wire.SCHEDULE, SCHEDULES)
        warm_up = self.real(wire.WARM_UP, default=0.0)
        rounds = self.integer(wire.ROUNDS, minimum=0, default=0)
        if (kind == "constant" and not warm_up) or not rounds:
            return None
        if warm_up >= 1:
            raise RefusedError(f"{wire.WARM_UP} must be a share of the run below 1. Got {warm_up}.")
        if number is None:
            number = self.integer(wire.ROUND, minimum=0, default=1)
        begin = max(number - 1, 0) / rounds
        return Schedule(kind, warm_up, begin, 1 / rounds)


def answering(work: Callable[[Request], RecordDict]) -> Callable[[Message, Context], Message]:
    """A handler of Flower's that checks the run, does the work, and packs what it returns."""

    @wraps(work)
    def handler(message: Message, context: Context) -> Message:
        config = message.content.config_records.get(wire.CONFIG)
        request = Request(message, workbench_of(context), config or ConfigRecord())
        try:
            request.check_run()
            return Message(work(request), reply_to=message)
        except (RefusedError, TooFewError) as reason:
            return wire.refusal(str(reason), message)

    return handler
