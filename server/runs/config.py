"""The run's configuration: every key, its type, bounds and meaning, checked once at the edge.

The same keys everywhere: ``coterie run --set KEY=VALUE``, ``flwr run . --run-config "KEY=VALUE"``,
and ``[tool.flwr.app.config]`` in ``pyproject.toml``, which holds the defaults for Flower. A test
keeps the two lists equal. ``docs/reference/configuration.md`` is made from this class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from coterie.server.runs.tracking import tracker_names
from coterie.strategies.hcct.alpha import (LOOK_ROUNDS, TRIAL_ROUNDS)
from coterie.strategies.errors import (EXIT_CONFIG, FederationError)
from coterie.strategies.rounds.roster import Churn

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


AROUND = ("fedavg", "fedgenp", "hcct", "fedgroup", "fedcollab")
"""Strategies that take generators."""
NUMBERED = ("ifca", "flsc", "fesem", "kmeans")
"""Strategies that must be told the number of groups."""


def dashed(name: str) -> str:
    """A field's name as it is written in files and on command lines."""
    return name.replace("_", "-")


class RunConfig(BaseModel):
    """One run. Keys are written with dashes: ``local-epochs``."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=dashed, populate_by_name=True
    )

    strategy: Literal[
        "independent",
        "fedavg",
        "hcct",
        "fedgroup",
        "fedcollab",
        "maxfl",
        "fedfa",
        "ifca",
        "flsc",
        "fesem",
        "cfl",
        "flhc",
        "kmeans",
        "fednova",
        "perfedavg",
        "pfedme",
        "fedgenp",
        "fedgen",
        "fedensemble",
    ] = Field("hcct", description="Who trains with whom; see docs/how-to/choose-a-strategy.md.")
    task: str = Field("digits", min_length=1, description="Task that every silo must serve.")
    rounds: int = Field(20, ge=1, le=100_000, description="Number of rounds.")
    seed: int = Field(0, ge=0, le=2**31 - 1, description="Same seed, same models.")
    label: str = Field(
        "", max_length=80, description="A name for the run's folder; empty takes the strategy's."
    )
    min_silos: int = Field(2, ge=1, le=100_000, description="Silos to wait for before round 1.")
    wait_for_silos: Positive = Field(
        120.0, description="Seconds to wait for silos before giving up."
    )
    round_timeout: Positive = Field(
        600.0, description="Seconds after which a round goes on without missing replies."
    )
    churn: str = Field(
        "",
        description="Script of joins and leaves, `NAME+ROUND` and `NAME-ROUND`, for repeatable "
        "simulations.",
    )
    local_epochs: int = Field(5, ge=1, le=10_000, description="Epochs of local training a round.")
    local_steps: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="Mini-batches of local training a round, in place of `local-epochs`; 0 counts "
        "epochs.",
    )
    batch_size: int = Field(16, ge=1, le=1_000_000, description="Samples of a mini-batch.")
    lr: Positive = Field(0.1, le=1000, description="Learning rate of local SGD in round 1.")
    lr_decay: Positive = Field(
        0.995, le=1, description="Factor on the learning rate after every round."
    )
    momentum: NotNegative = Field(0.0, lt=1, description="Momentum of local SGD.")
    weight_decay: NotNegative = Field(0.0, le=10, description="Weight decay of local SGD.")
    proximal_mu: NotNegative = Field(
        0.0,
        le=1e6,
        description="μ of FedProx's term in local training; 0 turns it off. With FedNova lr·μ "
        "below 1.",
    )
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="Arithmetic of local training; bfloat16 is autocast."
    )
    alpha: NotNegative | Literal["auto"] = Field(
        50.0,
        description="HCCT: hunger for data. Small keeps silos apart, large puts them together. "
        "`auto` finds it in a short trial. A silo's own α goes before it.",
    )
    memory: NotNegative = Field(
        1.0, le=1, description="HCCT: γ of the accumulated updates that are compared; 0 = paper."
    )
    similarity: Literal["parameters", "parameters+buffers"] = Field(
        "parameters", description="HCCT: whether running statistics are compared too."
    )
    solver: Literal["best", "agglomerative"] = Field(
        "best",
        description="HCCT, FedCollab: exact or best search of the partition, or greedy merging.",
    )
    layers: str = Field(
        "all",
        description="HCCT: arrays that are compared: `all`, `auto` (HCCT-E: the layer of largest "
        "relative variance after round 1), or a prefix of array names.",
    )
    regroup_every: int = Field(1, ge=1, le=100_000, description="HCCT: rounds between partitions.")
    settle_after: int = Field(
        0,
        ge=0,
        le=100_000,
        description="HCCT: keep the partition once it was the same so often; 0 never does.",
    )
    num_groups: Annotated[int, Field(ge=1, le=100_000)] | Literal["auto"] = Field(
        3,
        description="FedGroup, IFCA, FLSC, FeSEM, k-means: number of groups; `auto` (FedGroup) "
        "takes the best separated number.",
    )
    measure: Literal["edc", "madc"] = Field(
        "edc",
        description="FedGroup: how updates are compared: `edc` (k-means on `num-groups` "
        "directions) or `madc` (complete linkage).",
    )
    pretrain_epochs: int = Field(
        0,
        ge=0,
        le=10_000,
        description="FedGroup, k-means: epochs of a cold start; 0 takes `local-epochs`. Fewer than "
        "those begin a round that goes on; more separate small silos better.",
    )
    pretrain_steps: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="FedGroup: mini-batches of a cold start, in place of `pretrain-epochs`, which "
        "must be 0; 0 takes epochs.",
    )
    pretrain_silos: int = Field(
        0,
        ge=0,
        le=100_000,
        description="FedGroup: so many silos, drawn by seed, form the groups (the paper's α times "
        "`num-groups`; at least `num-groups`); 0 takes all.",
    )
    min_similarity: float = Field(
        -1.0,
        ge=-1,
        le=1,
        description="FedGroup: a newcomer whose largest cosine is below opens a new group; "
        "-1 never does.",
    )
    sample: int = Field(
        0,
        ge=0,
        le=100_000,
        description="FedAvg, FedGroup, IFCA, FLSC, FeSEM, FedGenP, FedGen, FedEnsemble: silos a "
        "round, by seed; 0 takes all.",
    )
    inter_group_lr: NotNegative = Field(
        0.0, le=1000, description="FedGroup: η_g of the inter-group aggregation; 0 turns it off."
    )
    soft_groups: int = Field(
        2,
        ge=1,
        le=100_000,
        description="FLSC: N_g, models that a silo mixes; at most `num-groups`.",
    )
    threshold: float = Field(
        0.0,
        ge=-1e6,
        le=1e6,
        description="MAXFL: by how much the global model's training loss must be below that of the "
        "silo's own.",
    )
    warm_up: int = Field(
        5, ge=0, le=100_000, description="MAXFL: rounds in which everybody takes part."
    )
    own_rounds: int = Field(
        1, ge=1, le=100_000, description="MAXFL: rounds of training alone behind a silo's demand."
    )
    eps_mean: Positive = Field(
        0.4,
        le=1e6,
        description="CFL: ε₁; a group is split when its mean update is shorter than this share of "
        "the longest update so far,",
    )
    eps_largest: NotNegative = Field(
        0.5, le=1e6, description="CFL: ε₂; and its longest update longer than this share."
    )
    first_split: int = Field(
        2, ge=1, le=100_000, description="CFL: no group is split before this round."
    )
    rounds_before: int = Field(
        3, ge=0, le=100_000, description="FL+HC: rounds of FedAvg before the clustering."
    )
    max_distance: Positive = Field(
        0.9, le=1e6, description="FL+HC: groups farther apart are not merged."
    )
    metric: Literal["cosine", "euclidean"] = Field(
        "cosine", description="FL+HC: distance of two updates."
    )
    linkage: Literal["average", "complete", "single", "ward"] = Field(
        "average", description="FL+HC: distance of two groups; `ward` needs `euclidean`."
    )
    meta_lr: Positive = Field(
        0.03, le=1000, description="Per-FedAvg: α, rate of the step on a silo's own data."
    )
    moreau_lambda: Positive = Field(
        15.0,
        le=1e6,
        description="pFedMe: λ; large keeps personal models near the common one. lr·λ below 2.",
    )
    moreau_lr: Positive = Field(
        0.005, le=1000, description="pFedMe: η, rate of the common model; η·λ at most 1."
    )
    inner_steps: int = Field(
        5, ge=1, le=10_000, description="pFedMe: K, steps towards the personal model per batch."
    )
    server_lr: Positive = Field(
        1.0, le=1, description="pFedMe: β, how far the server follows the silos' mean."
    )
    adapt_steps: int = Field(
        0,
        ge=0,
        le=10_000,
        description="Per-FedAvg, pFedMe: steps on a silo's own data before a model is tested; 0 "
        "takes the strategy's own number (1; 20).",
    )
    c: Positive | Literal["auto"] = Field(
        10.0,
        description="FedCollab: C of its bound, hunger for data. `auto` takes the smallest at "
        "which noise alone keeps no two silos apart.",
    )
    discriminator_rounds: int = Field(
        10, ge=1, le=10_000, description="FedCollab: budget of discriminators' rounds, all pairs."
    )
    discriminator_patience: int = Field(
        2,
        ge=1,
        le=10_000,
        description="FedCollab: so many evaluations without a gain end a pair's discriminator.",
    )
    discriminator_gigabytes: NotNegative = Field(
        0.0, le=1e9, description="FedCollab: budget of their bytes in all; 0 sets none."
    )
    discriminator_steps: int = Field(
        20, ge=1, le=100_000, description="FedCollab: mini-batches of 32 a round of discriminators."
    )
    discriminator_samples: int = Field(
        500,
        ge=1,
        le=1_000_000,
        description="FedCollab: at most so many samples train them; half are always held out.",
    )
    discriminator_lr: Positive = Field(0.01, le=1000, description="FedCollab: their learning rate.")
    distance: Literal["last", "max", "cross-fit"] = Field(
        "last",
        description="FedCollab: score that is reported: the last round's, the best (the paper), or "
        "the best of one half on the other.",
    )
    newcomers: Literal["keep", "resolve"] = Field(
        "keep", description="FedCollab: with a newcomer nobody else moves, or all may."
    )
    unmeasured: Literal["alone", "unknown"] = Field(
        "alone",
        description="FedCollab: silos whose distances are not known train alone, or count as "
        "different as the mean.",
    )
    generators: Literal["off", "silos", "groups"] = Field(
        "off",
        description="FedGenP's generators around hcct, fedgroup, fedcollab or fedavg: one per silo "
        "or per group. fedgenp itself is fedavg with one per silo.",
    )
    generator_steps: int = Field(
        50,
        ge=1,
        le=100_000,
        description="Generators: optimiser steps a round, on the server; with a reversal at least "
        "2, for every second one is its own.",
    )
    generator_lr: Positive = Field(
        3e-4, le=1, description="Generators: learning rate of Adam on the server."
    )
    generator_hidden: int = Field(
        256, ge=1, le=65_536, description="Generators: width of the hidden layer."
    )
    reversal: Literal["log1mp", "clip", "unbounded", "none"] = Field(
        "log1mp",
        description="FedGenP: how a generator turns against its receiver's own head; `none` does "
        "not, `unbounded` diverges.",
    )
    reversal_weight: NotNegative = Field(
        0.1, le=1e6, description="FedGenP: λ of the term against the own head."
    )
    generated_weight: NotNegative = Field(
        1.0, lt=1e6, description="Silos: weight of the loss on generated latents."
    )
    distil_weight: NotNegative = Field(
        0.0,
        lt=1e6,
        description="Silos: weight of the divergence from the head's answers to latents generated "
        "for the own labels; the released code has 10.",
    )
    generated_decay: Positive = Field(
        1.0,
        le=1,
        description="Silos: factor on both weights after every round; the released code has 0.98.",
    )
    ensemble_every: int = Field(
        0,
        ge=0,
        le=100_000,
        description="FedEnsemble: rounds between evaluations of the ensemble; 0 evaluates the last "
        "only. Each sends every silo every silo's model.",
    )
    evaluate_trained: bool = Field(
        False,
        description="Silos also evaluate and keep the model as they trained it themselves. "
        "fedgenp, fedgen and any `generators` always do.",
    )
    personal: str = Field(
        "",
        description="Layers that never leave a silo: `head` (HCCT-P), or a prefix of array names.",
    )
    personalise: Literal["none", "finetune", "ditto"] = Field(
        "none",
        description="What a silo makes of its group's model for itself: nothing, the model trained "
        "on its own data, or a model of its own that is pulled towards it (Ditto).",
    )
    personal_epochs: int = Field(
        1, ge=1, le=10_000, description="Epochs of fine-tuning, or of Ditto's own model a round."
    )
    personal_lr: NotNegative = Field(
        0.0, le=1000, description="Learning rate of the silo's own model; 0 takes `lr`."
    )
    ditto_lambda: NotNegative = Field(
        1.0, le=1e6, description="λ of Ditto's pull towards the group's model."
    )
    alone: str = Field(
        "",
        description="An independent run to compare with, by name, id or folder: IPR, RSD and mean "
        "accuracy go into the record.",
    )
    tracking: str = Field(
        "",
        description="Where figures go beside the record: `tensorboard`, `mlflow`, or both with a "
        "comma.",
    )
    guard: NotNegative = Field(
        0.0,
        le=0.5,
        description="Share of its training data that a silo keeps out of all training, to compare "
        "its model at the end with one that it trained alone with the same budget: it keeps the "
        "better. 0 turns it off.",
    )
    keep_every: int = Field(
        0,
        ge=0,
        le=100_000,
        description="Silos write their own model to their disks after every so many rounds; 0 only "
        "after the last.",
    )
    name_members: bool = Field(
        False,
        description="Whether silos are told who is in their group by name, not only how many.",
    )
    runs_dir: str = Field(
        "", description="Folder of run records at the coordinator; empty takes its default."
    )
    resume: str = Field(
        "",
        pattern=r"^[A-Za-z0-9._-]*$",
        description="Name of a run's folder in `runs-dir`: go on with that run after its last "
        "checkpoint, with the keys that it had. `coterie run --resume RUN` sets it.",
    )

    @model_validator(mode="after")
    def _parts_fit_together(self) -> RunConfig:
        problems = [*_generator_problems(self), *_strategy_problems(self)]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @field_validator("churn")
    @classmethod
    def _churn_is_readable(cls, text: str) -> str:
        Churn.parse(text)
        return text

    @field_validator("tracking")
    @classmethod
    def _trackers_are_known(cls, text: str) -> str:
        tracker_names(text)
        return text

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> RunConfig:
        """Check a run's keys.

        Raises:
            FederationError: an unknown key or a value out of bounds; every problem is named.
        """
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            problems = "; ".join(_problem(entry) for entry in error.errors())
            raise FederationError(
                f"the run's configuration is wrong: {problems}.",
                phase="configuration",
                exit_code=EXIT_CONFIG,
            ) from None

    @classmethod
    def table(cls) -> str:
        """All keys as a Markdown table, for ``docs/reference/configuration.md``."""
        lines = ["| key | default | bounds | meaning |", "|---|---|---|---|"]
        properties = cls.model_json_schema(by_alias=True)["properties"]
        for key, entry in properties.items():
            default = f"`{entry['default']!r}`".replace("'", '"')
            lines.append(f"| `{key}` | {default} | {_bounds(entry)} | {entry['description']} |")
        return "\n".join(lines) + "\n"

    def plain(self) -> dict[str, Any]:
        """All keys and values, as they are written."""
        return self.model_dump(by_alias=True)


def require_silos(config: RunConfig, names: Sequence[str], *, label_counts: bool) -> None:
    """Refuse a run that cannot go on with its silos, where it is known which there are.

    Args:
        config: of the run.
        names: of all its silos, who stay to its end.
        label_counts: whether they tell their label counts.

    Raises:
        FederationError: every problem is named.
    """
    problems = list(_silo_problems(config, names, label_counts=label_counts))
    if problems:
        raise FederationError(
            f"the run does not go with its silos: {'; '.join(problems)}.",
            phase="configuration",
            exit_code=EXIT_CONFIG,
        )


def _generator_problems(config: RunConfig) -> Iterator[str]:
    within = config.generators != "off"
    if config.personal and (within or config.strategy in ("fedgenp", "fedgen")):
        yield "generators need the predictors, so personal must be empty"
    if within and config.strategy not in AROUND:
        yield (
            f"generators cannot be combined with strategy {config.strategy}, only with "
            f"{', '.join(AROUND)}"
        )
    turning = config.reversal != "none" and config.reversal_weight > 0
    if (within or config.strategy == "fedgenp") and turning and config.generator_steps < 2:
        yield (
            f"every second step of a generator is reversal = {config.reversal}, so "
            f"generator-steps must be at least 2. Got {config.generator_steps}. Or take "
            "reversal=none"
        )
    if config.generators == "groups" and config.strategy in ("fedgenp", "fedavg"):
        yield (
            f"{config.strategy} has one group, so no other to learn from; take generators=silos, "
            "or another strategy"
        )


def _strategy_problems(config: RunConfig) -> Iterator[str]:
    """Rules of the strategies themselves, in the words of the keys; a test compares the two."""
    if config.strategy in NUMBERED and config.num_groups == "auto":
        yield (
            f"num-groups must be a number with strategy {config.strategy}; only fedgroup finds it. "
            "Got 'auto'"
        )
    match config.strategy:
        case "hcct":
            yield from _hcct_problems(config)
        case "fedgroup":
            yield from _fedgroup_problems(config)
        case "pfedme":
            yield from _pfedme_problems(config)
        case "fednova" if config.lr * config.proximal_mu >= 1:
            yield (
                "lr · proximal-mu must be below 1 with fednova, or an update's steps cannot be "
                f"counted. Got {config.lr:g} · {config.proximal_mu:g}"
            )
        case "flsc" if config.num_groups != "auto" and config.soft_groups > config.num_groups:
            yield (
                f"soft-groups must be at most num-groups = {config.num_groups}. "
                f"Got {config.soft_groups}"
            )
        case "flhc" if config.linkage == "ward" and config.metric != "euclidean":
            yield f"linkage = ward needs metric = euclidean. Got {config.metric!r}"
        case "fedensemble" if config.personal:
            yield "fedensemble sends every silo the others' whole models, so personal must be empty"


def _hcct_problems(config: RunConfig) -> Iterator[str]:
    if config.alpha != "auto":
        return
    least = LOOK_ROUNDS + TRIAL_ROUNDS + 1
    if config.rounds < least:
        yield (
            f"alpha = auto finds its groups after {least - 1} rounds, so rounds must be at "
            f"least {least}. Got {config.rounds}. Or give alpha as a number"
        )
    if config.personal:
        yield (
            "alpha = auto trains several models side by side, of layers that stay at a "
            "silo there is one version. Give alpha as a number, or leave personal empty"
        )


def _fedgroup_problems(config: RunConfig) -> Iterator[str]:
    if config.pretrain_epochs and config.pretrain_steps:
        yield (
            "a cold start has pretrain-epochs or pretrain-steps, not both: one of them must be 0. "
            f"Got {config.pretrain_epochs} and {config.pretrain_steps}"
        )
    if config.num_groups != "auto" and 0 < config.pretrain_silos < config.num_groups:
        yield (
            f"pretrain-silos must be 0, for all, or at least num-groups = {config.num_groups}. "
            f"Got {config.pretrain_silos}"
        )


def _pfedme_problems(config: RunConfig) -> Iterator[str]:
    if config.moreau_lr * config.moreau_lambda > 1:
        yield (
            "moreau-lr · moreau-lambda must be at most 1. "
            f"Got {config.moreau_lr:g} · {config.moreau_lambda:g}"
        )
    if config.lr * config.moreau_lambda >= 2:
        yield (
            "lr · moreau-lambda must be below 2, or the steps towards a personal model diverge. "
            f"Got {config.lr:g} · {config.moreau_lambda:g}"
        )


def _silo_problems(config: RunConfig, names: Sequence[str], *, label_counts: bool) -> Iterator[str]:
    churn = Churn.parse(config.churn)
    first = [name for name in names if churn.joins.get(name, 0) <= 1]
    here = f"{len(first)}, the silos of round 1" + (
        "" if len(first) == len(names) else " (churn lets the others in later)"
    )
    if config.min_silos > len(first):
        yield f"min-silos must be at most {here}. Got {config.min_silos}"
    numbered = config.strategy == "fedgroup" and config.num_groups != "auto"
    if numbered and int(config.num_groups) > len(first):
        yield f"num-groups must be at most {here}. Got {config.num_groups}"
    unknown = [n for n, at in churn.joins.items() if n not in names and at <= config.rounds]
    if unknown:
        yield f"churn waits for {', '.join(unknown)} to join, but there is no such silo"
    leaving = [
        name
        for name, at in churn.leaves.items()
        if name in names and max(at, churn.joins.get(name, 0)) <= config.rounds
    ]
    if leaving:
        yield f"churn waits for {', '.join(leaving)} to leave, but silos stay to the end here"
    if config.strategy == "fedgen" and not label_counts:
        yield (
            "fedgen needs the label counts of every silo, so the file needs `label-counts = true`; "
            "fedgenp needs none"
        )


def _bounds(entry: Mapping[str, Any]) -> str:
    if "anyOf" in entry:
        return " or ".join(filter(None, (_bounds(one) for one in entry["anyOf"])))
    if "const" in entry:
        return str(entry["const"])
    if "enum" in entry:
        return ", ".join(entry["enum"])
    signs = (
        ("minimum", "≥"),
        ("exclusiveMinimum", ">"),
        ("maximum", "≤"),
        ("exclusiveMaximum", "<"),
    )
    return ", ".join(f"{sign} {entry[name]:g}" for name, sign in signs if name in entry)


def _problem(entry: Any) -> str:
    if not entry["loc"]:  # keys that do not fit together
        return str(entry["msg"]).removeprefix("Value error, ")
    key = str(entry["loc"][0])  # what follows are the members of a union
    if entry["type"] == "extra_forbidden":
        return f"unknown key {key!r} (known: {', '.join(_known())})"
    message = entry["msg"].removeprefix("Value error, ")
    return f"{key}: {message[0].lower()}{message[1:]}. Got {entry['input']!r}"


def _known() -> list[str]:
    return sorted(dashed(name) for name in RunConfig.model_fields)
