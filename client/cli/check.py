"""``coterie silo check``: what the silo would train on, whether it can, and what would leave it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite
from typing import Any

import torch

from coterie.client.home.disclosure import About, learned_lines
from coterie.client.home.hours import words
from coterie.client.home.policy import METRICS, Policy
from coterie.client.home.settings import SettingsError, SiloSettings
from coterie.client.home.studies import tasks_of
from coterie.client.work import personal
from coterie.client.work.data import Data, Held, Part
from coterie.client.work.data_warnings import warnings_of
from coterie.client.work.diverged import divergence
from coterie.client.work.measure import evaluate, leading
from coterie.client.work.session import Session, open_session
from coterie.client.work.sgd import Stopwatch, TrainPlan, train
from coterie.client.work.weights import read_weights
from coterie.features.privacy.dp_sgd import rehearse
from coterie.features.privacy.silo import STAYING, check_privacy, private_of
from coterie.features.sums.trees.bins import USUAL as USUAL_BINS
from coterie.features.sums.trees.questions import bytes_of_tree
from coterie.tasks.base import Task, TaskError, leaves
from coterie.tasks.draws import most_of_one, num_persons
from coterie.tasks.own.declared import DeclaredTask
from coterie.tasks.problems import Classes, Labels, Masks, Numbers, Survival
from coterie.tasks.trees import Trees
from coterie.wire import NETWORK, TREES, counted, readable

USUAL = TrainPlan(epochs=5, batch_size=16, lr=0.01)
"""A round with default settings."""

ONE_EPOCH = replace(USUAL, epochs=1)


def check_all(settings: SiloSettings) -> Iterator[str]:
    """Run ``check`` for each of the silo's tasks; raise as ``check`` once all are checked."""
    tasks_of(settings)  # that no two have one name
    wrong = list[str]()
    for number, one in enumerate(settings.studies()):
        yield from [""] if number else []
        with _noting(wrong, one, number):
            yield from check(one)
    if wrong:
        raise SettingsError(" ".join(wrong))


def check_as_fields(settings: SiloSettings) -> list[dict[str, Any]]:
    """Run ``check`` for each of the silo's tasks; return what it found, as JSON values."""
    tasks_of(settings)
    wrong, found = list[str](), list[dict[str, Any]]()
    for number, one in enumerate(settings.studies()):
        with _noting(wrong, one, number):
            found.append(_fields(_opened(one)))
    if wrong:
        raise SettingsError(" ".join(wrong))
    return found


@contextmanager
def _noting(wrong: list[str], one: SiloSettings, number: int) -> Iterator[None]:
    """Note why a task cannot be used, with its section of silo.toml if there are several."""
    try:
        yield
    except (TaskError, SettingsError) as error:
        section = f"[[also]] number {number}" if number else "[data]"
        wrong.append(f"{section}, task {one.task}: {error}" if one.also else str(error))


def check(settings: SiloSettings) -> Iterator[str]:
    """Load the data, train one epoch, and report, line by line. Nothing is sent.

    Raises:
        TaskError, SettingsError: the silo cannot train with its present settings.
    """
    yield from _lines(_opened(settings))


def _opened(settings: SiloSettings) -> Session:
    opened = open_session(settings)
    session = replace(opened.whole[0], families=opened.families)  # the network, if also trees
    personal.check_policy(session)
    check_privacy(session)
    return session


def _fields(session: Session) -> dict[str, Any]:
    lines = list(_lines(session))
    is_labelled = not session.settings.unlabelled
    model, kept = read_weights(session.model), _kept(session)
    shared = personal.without(model, kept) if is_labelled else {}
    return {
        "task": session.task.name,
        "schema": session.schema,
        "device": str(session.device),
        "labelled": is_labelled,
        "training-samples": len(session.data.train) if is_labelled else 0,
        "test-samples": len(session.data.test) if is_labelled else 0,
        "unlabelled-samples": 0 if is_labelled else len(session.data.train),
        "model-bytes": sum(array.nbytes for array in shared.values()),
        "arrays": list(shared),
        "never-sent": list(kept),
        "metrics": _metric_names(session) if is_labelled else [],
        "warnings": [line[10:] for line in lines if line.startswith("warning ")],
        "lines": lines,
    }


def _kept(session: Session) -> tuple[str, ...]:
    """Return the names of the arrays that the policy keeps at the silo."""
    return personal.personal_names(session, session.settings.policy.keep_layers)


def _metric_names(session: Session) -> list[str]:
    """Return the names of the metrics that may leave."""
    policy = session.settings.policy
    of_task = session.task.problem.metrics
    usual = [name for name in (*METRICS, *of_task) if name not in policy.withheld]
    names = list(dict.fromkeys(usual)) if policy.share_metrics is None else policy.share_metrics
    if session.settings.privacy is None:
        return list(names)
    return [name for name in names if not {*METRICS.get(name, (name,))} <= STAYING]


def _lines(session: Session) -> Iterator[str]:
    if session.settings.unlabelled:
        yield from _unlabelled_lines(session)
        return
    yield from _data_lines(session)
    if session.settings.tests:
        yield from _testing_lines(session)
        return
    yield from _trees_lines(session)
    if not isinstance(session.model, Trees):  # they grow by sums, not by epochs
        yield from _step_lines(session)
    yield from _privacy_lines(session)
    yield from _leaving_lines(session)


def _data_lines(session: Session) -> Iterator[str]:
    data, task = session.data, session.task
    yield f"silo      {session.settings.name}"
    yield f"task      {task.name}, {_kind(task)}, schema {session.schema}"
    yield f"device    {session.device}"
    for name, part in (("training", data.train), ("test", data.test)):
        x = leaves(part.x if isinstance(part, Held) else part.at(torch.zeros(1).long())[0])
        shape = " and ".join("×".join(str(n) for n in leaf.shape[1:]) or "one number" for leaf in x)
        values = _range(x) if isinstance(part, Held) else ", read as needed"
        yield f"{name:9} {counted(len(part), 'sample')} of {shape}{values} ({_targets(task, part)})"
    yield from _person_lines(data)
    yield from _note_lines(task)
    for line in warnings_of(session):
        yield f"warning   {line}"
    yield from _key_lines(session)


def _range(inputs: Sequence[torch.Tensor]) -> str:
    """Return the smallest and the largest of the values that are not missing."""
    known = [leaf[~leaf.isnan()] if leaf.isnan().any() else leaf for leaf in inputs]
    known = [own for own in known if len(own)]
    if not known:
        return ", all missing"
    low, high = min(float(own.min()) for own in known), max(float(own.max()) for own in known)
    return f", from {readable(low)} to {readable(high)}"


def _key_lines(session: Session) -> Iterator[str]:
    """Yield columns that may identify persons, unless the silo names its person column."""
    task = session.task
    if not isinstance(task, DeclaredTask) or session.data.train.persons is not None:
        return
    try:
        for line in task.look_for_persons(session.settings.options):
            yield f"warning   {line}"
    except TaskError as error:
        yield f"warning   columns that identify persons were not looked for: {error}"


def _person_lines(data: Data) -> Iterator[str]:
    train, test = data.train.persons, data.test.persons
    if train is None and (blocks := data.train.together) is not None:
        yield (
            f"blocks    {num_persons(blocks)} of the training samples; one has at most "
            f"{most_of_one(blocks)}"
        )
    if train is not None and test is not None:
        yield (
            f"persons   {num_persons(train)} of the training samples, {num_persons(test)} of the "
            f"test samples; one has at most {most_of_one(train)} training samples"
        )


def _note_lines(task: Task) -> Iterator[str]:
    for line in getattr(task, "notes", list)():
        yield f"          {line}"


def _unlabelled_lines(session: Session) -> Iterator[str]:
    """Check that the model accepts a silo's unlabelled samples, and yield what would leave."""
    part, described = session.data.train, session.describe()
    shape = " and ".join("×".join(map(str, one)) or "one number" for one in session.shapes)
    session.model.eval()
    try:
        with torch.no_grad():
            session.model(part.at(torch.arange(min(len(part), 4)))[0])
    except (RuntimeError, TypeError, KeyError, IndexError) as error:
        raise TaskError(f"unlabelled: samples of {shape} do not fit the model: {error}") from None
    yield f"silo      {session.settings.name}"
    yield f"task      {session.task.name}, {_kind(session.task)}, schema {session.schema}"
    yield f"samples   {len(part)} of {shape}, without labels: it receives a model and trains none"
    yield from _note_lines(session.task)
    yield ""
    policy, private = session.settings.policy, session.settings.privacy is not None
    refuses = not policy.auxiliary or policy.min_group_size > 2 or private
    refused = (
        " This silo's policy refuses them: it receives a model only if all silos form one group."
    )
    yield (
        "When the silo joins, its name, task, schema and the number of samples leave it. In a "
        "run with several groups, discriminators between its samples' features and those of up "
        f"to 12 silos, and their accuracy; nothing else.{refused if refuses else ''}"
    )
    yield f"Runs on {described.device}. Then: coterie silo predict"


def _testing_lines(session: Session) -> Iterator[str]:
    """Measure the untrained model, and yield what would leave a silo that only tests."""
    lead, part = leading(session.task), session.data.test
    found = evaluate(session.task, session.model, part)
    unit = getattr(session.task.problem, "unit", "")
    text = lead.text(lead.shortfall(found.error), unit)
    names = ", ".join(["numbers of samples", *_metric_names(session)])
    yield f"role      it only tests; {lead.title} of an untrained model {text}"
    yield ""
    yield (
        "When the silo joins, its name, task, schema and the number of test samples leave it. At "
        f"the end of a run: {names}. No update ever leaves it. The training samples above only "
        "choose the group whose model it tests."
    )


def _kind(task: Task) -> str:
    problem = task.problem
    if isinstance(problem, Classes):
        return f"{problem.num_classes} classes"
    return {"labels": "labels", "number": "real targets"}.get(problem.kind, problem.kind)


def _targets(task: Task, part: Part) -> str:
    """Return the samples per class, or the mean of the targets, or the number of events."""
    problem = task.problem
    if isinstance(problem, Masks):
        return f"masks of {problem.num_classes} classes"
    y = part.targets().cpu()
    if isinstance(problem, Survival):
        return f"{int(y[:, 1].sum())} events"
    if isinstance(problem, Numbers):
        mean, spread = y.mean(dim=0), y.std(dim=0, correction=0)
        each = zip(mean.tolist(), spread.tolist(), strict=True)
        said = (f"mean {readable(m)} ± {readable(s)} {problem.unit}".rstrip() for m, s in each)
        return ", ".join(said)
    if isinstance(problem, Labels):
        counts = [int(count) for count in y.sum(dim=0)]
    else:
        counts = torch.bincount(y, minlength=task.num_classes).tolist()
    names = task.classes or range(len(counts))
    return ", ".join(f"{name}: {count}" for name, count in zip(names, counts, strict=True))


def _trees_of(session: Session) -> Trees | None:
    """Return the trees that the silo's sums would grow; None if its task grows none."""
    model = session.families.get(TREES, session).model
    private = session.settings.privacy is not None  # then only the network of "any" is used
    return model if isinstance(model, Trees) and not private else None


def _trees_lines(session: Session) -> Iterator[str]:
    """Warn of a policy with which runs refuse the silo, as its task grows trees."""
    if _trees_of(session) and session.settings.policy.sums_objection(TREES):
        but = f" (but not those with task.family = {NETWORK})" * bool(session.families)
        yield (
            f"warning   this task grows trees: runs refuse this silo{but} until sums = "
            f'["{TREES}"] in silo.toml allows the sums that they grow by'
        )


def _step_lines(session: Session) -> Iterator[str]:
    lead = leading(session.task)
    unit = getattr(session.task.problem, "unit", "")
    before = evaluate(session.task, session.model, session.data.test)
    with Stopwatch() as watch:
        loss = _one_epoch(session)
    after = evaluate(session.task, session.model, session.data.test)
    was, now = (lead.text(lead.shortfall(one.error), unit) for one in (before, after))
    said = f"loss {loss:.3f}" if isfinite(loss) else "the loss is not a number"
    yield (
        f"one epoch in {watch.seconds:.2f} s: {said}; {lead.title} on own test data "
        f"{was} before, {now} after"
    )
    if why := divergence(read_weights(session.model), loss):
        yield f"warning   after one epoch with lr {ONE_EPOCH.lr:g}, {why}"


def _one_epoch(session: Session) -> float:
    """Train as the silo would; nothing of it leaves, so that it costs no privacy."""
    private = private_of(session)
    if private is None:
        return train(session.task, session.model, session.data.train, ONE_EPOCH, seed=0)
    return rehearse(session.task, session.model, session.data.train, ONE_EPOCH, private, seed=0)


def _privacy_lines(session: Session) -> Iterator[str]:
    if (private := private_of(session)) is None:
        return
    budget, terms = private.budget, private.terms
    spent = budget.spent()
    a_round = private.planned(session.model, session.data.train, USUAL)
    more = budget.epsilon_with(a_round) - spent.epsilon
    left = budget.rounds_left(a_round)
    yield (
        f"privacy   {spent.text()} spent, in {spent.charges} trainings; noise {terms.noise:g}, "
        f"clip {terms.clip:g}. The next round of {USUAL.epochs} epochs with batches of "
        f"{USUAL.batch_size} costs ε {more:.3g}; {left} such rounds remain."
    )
    if (tighter := budget.tighter()) is not None:
        yield (
            "          By the PRV accountant, ε "
            f"{tighter:.3g} is spent; the budget does not count this smaller figure."
        )
    if (persons := session.data.train.persons) is not None:
        most = most_of_one(persons)
        yield (
            f"          ε applies to one sample. For a person with {most}, the whole budget is "
            f"up to {most} times as much: ε {most * terms.epsilon:.3g}."
        )
    if not session.settings.home:
        yield "warning   without a folder the noise is predictable: privacy is only simulated."


def _leaving_lines(session: Session) -> Iterator[str]:
    policy = session.settings.policy
    model = read_weights(session.model)
    kept = _kept(session)
    shared = personal.without(model, kept)
    size = sum(array.nbytes for array in shared.values())
    described = session.describe()
    yield ""
    yield "When the silo joins, this would leave it:"
    yield f"  name {described.name}, {described.num_examples} (the number of training samples),"
    yield f"  task {described.task}, schema {described.schema} and digests of its parts,"
    if len(described.tasks) > 1:
        yield f"  the names of all tasks that it serves: {', '.join(described.tasks)},"
    yield f"  device {described.device},"
    alpha = "" if described.alpha is None else f"alpha {described.alpha}, "
    yield f"  {alpha}min_group_size {described.min_group_size},"
    yield f"  max_local_epochs {described.max_local_epochs}, versions"
    if described.mark:
        yield "  a data fingerprint of the training data, which shows only whether they changed"
    yield f"In every round, at most: {counted(len(shared), 'array')} of the model, {size:,} bytes:"
    for name, array in shared.items():
        yield f"  {name} {'×'.join(map(str, array.shape)) or 'one number'} {array.dtype}"
    names = _metric_names(session)
    auxiliary = policy.auxiliary and session.settings.privacy is None
    if auxiliary and policy.min_group_size <= 2:  # they are averaged in pairs
        yield "  (in runs of fedcollab also a discriminator per other silo, and its accuracy)"
    yield f"  and metrics: numbers of samples{''.join(f', {name}' for name in names)}"
    yield from _sums_lines(session)
    if session.frozen:
        stays = sum(tensor.nbytes for tensor in session.model.state_dict().values()) - sum(
            array.nbytes for array in model.values()
        )
        yield f"Frozen (not trained, not sent): {stays:,} bytes of the model, SHA-256"
        yield f"  {session.frozen}"
    if session.task.weights:
        name, digest = session.task.weights
        yield f"The model starts from {name}, SHA-256"
        yield f"  {digest}"
    if kept:
        yield f"Never sent, in any run: {', '.join(kept)}"
    yield from _condition_lines(policy)
    yield ""
    yield "What others can learn about its data with these settings:"
    about = About(
        *(
            len(session.data.train),
            len(session.data.test),
            tuple(names),
            session.task.pooled_columns,
        ),
        epsilon=0.0 if session.settings.privacy is None else session.settings.privacy.epsilon,
        persons=0 if (whose := session.data.train.persons) is None else num_persons(whose),
        most=1 if whose is None else most_of_one(whose),
        families=tuple(session.families)
        or (TREES if isinstance(session.model, Trees) else NETWORK,),
    )
    yield from learned_lines(policy, about)


def _sums_lines(session: Session) -> Iterator[str]:
    """Yield what leaves to grow trees."""
    trees = _trees_of(session)
    if trees is None or session.settings.policy.sums_objection(TREES):
        return
    (_, outputs, _), columns = trees.leaf.shape, len(trees.gain)
    each = "tree" if outputs == 1 else f"tree of each of {outputs} outputs"
    size = bytes_of_tree(columns, outputs, trees.depth, USUAL_BINS)
    yield "To agree on bins: the number of rows in cells of every column"
    yield f"For each level of a tree: sums in bins of each of {columns} columns (gradients, second"
    yield f"  derivatives, rows), at most {size:,} bytes per {each} with {USUAL_BINS} bins;"
    yield "  label totals follow exactly from them"


def _condition_lines(policy: Policy) -> Iterator[str]:
    if policy.strategies:
        yield f"Takes part only in: {', '.join(policy.strategies)}"
    if policy.approve:
        yield "Takes part in a run only after approval here: coterie silo approve RUN"
    if when := words(policy.hours, policy.days):
        yield f"Joins runs and trains only when it {when}"
    if policy.max_local_epochs:
        yield f"Refuses runs of more than {policy.max_local_epochs} epochs per round."
    if policy.max_minutes:
        yield f"Stops work on a message after {policy.max_minutes:g} minutes."
    if policy.max_message_mb:
        yield f"Refuses messages of more than {policy.max_message_mb:g} MB."
    if policy.max_kept_runs:
        yield f"Keeps models of at most {policy.max_kept_runs} runs."
