"""All names on the wire: message types, records, keys, error codes, and the protocol's version."""

from __future__ import annotations

from hashlib import sha256 as _sha256
from typing import Final

PROTOCOL: Final[int] = 1
"""Protocol version of this module; increased when an earlier release could not follow it."""
OLDEST_PROTOCOL: Final[int] = 1
"""The oldest supported version: that of the previous release. See ``coterie.wire.releases``."""

# Message types. A phase of an algorithm is a type of its own, never a flag in a config.
DESCRIBE: Final = "query.describe"
NAME: Final = "query.name"
"""The name of a node that runs an app of somebody's own, in the entry ``SILO`` of its config."""
INITIAL: Final = "query.initial"
LABEL_COUNTS: Final = "evaluate.label_counts"
"""Training samples per label (FedGen). Only a silo that consents answers."""
COLUMN_SUMS: Final = "query.column_sums"
"""Count, mean and sum of squared deviations per numeric column, for tasks that scale by the
federation. Only a silo that consents answers."""
STATISTICS: Final = "query.statistics"
"""Counts of a silo's training samples by column (``coterie.features.statistics.counts``). Only a
silo that consents answers, and only in a run whose ``STRATEGY`` is ``ONLY_STATISTICS``."""
ENSEMBLE: Final = "evaluate.ensemble"
"""Error of the mean logits of the models sent as ``member-<i>`` (FedEnsemble)."""
TRAIN: Final = "train"
EVALUATE: Final = "evaluate"
COLD_START: Final = "train.cold_start"
"""A training from w⁰ whose update shows where the silo belongs; the silo saves nothing of it."""
EVALUATE_TRAINING: Final = "evaluate.training"
"""Loss and error of a model on the silo's training data, by which a strategy may choose."""
EVALUATE_OWN: Final = "evaluate.own"
"""Loss and error, on samples held out of it, of what the silo makes of a model for itself."""
EVALUATE_GIVEN: Final = "evaluate.given"
"""All metrics of the models sent as ``member-<i>`` on the silo's test data, and their differences
(``coterie.features.evaluation.answers``), in a run whose ``STRATEGY`` is ``ONLY_EVALUATION``."""
EVALUATE_GROUP: Final = "evaluate.group"
"""Loss and error of a group's model at a silo that only tests, on the part of its data by which its
group is chosen."""
EVALUATE_HISTOGRAMS: Final = "evaluate.histograms"
"""Sums over the silo's rows in bins of its columns, from which a group's trees grow
(``coterie.features.sums.trees.questions``). ``ARRAYS`` has the question, ``sums`` the answer."""
TRAIN_PER_FEDAVG: Final = "train.per_fedavg"
TRAIN_PFEDME: Final = "train.pfedme"
TRAIN_APFL: Final = "train.apfl"
TRAIN_DISCRIMINATOR: Final = "train.discriminator"
EVALUATE_DISCRIMINATOR: Final = "evaluate.discriminator"
TRAIN_SUMS: Final = "train.sums"
"""Sums over the silo's rows, by which a model is fitted (``coterie.features.sums.contract``). Only
a silo that consents answers."""
TRAIN_PLACING: Final = "train.placing"
EVALUATE_PLACING: Final = "evaluate.placing"
"""Discriminators of features alone, which place silos without labels, in a run of any strategy.
Their records are those of discriminators."""

MASKED_SUM: Final = "train.masked_sum"
"""In a secure run: the silo's trained model, masked so that only the group's sum can be read."""
SECURE_KEY: Final = "query.secure_key"
"""The silo's public key in this run, from which pairs of silos make masks."""
SECURE_SEED: Final = "query.secure_seed"
"""The seed of the run's projection, sealed for silos that do not have it."""

# Records of a message, named as in Flower's examples.
ARRAYS: Final = "arrays"
CONFIG: Final = "config"
METRICS: Final = "metrics"
DISCRIMINATORS: Final = "discriminators"
"""A silo's discriminators, stacked: every array has a first axis of pairs. Without this record a
silo starts from the run's initial one."""
SKETCH: Final = "sketch"
"""A secure run's update, projected to few numbers such that lengths and angles are kept."""
MASKED: Final = "masked"
"""One array, uint32: see ``coterie.features.secure.protocol`` and ``coterie.wire.fixed``."""
BINS: Final = "bins"
"""The bins that a run's silos agreed on, with which discriminators see the rows of trees
(``coterie.features.sums.trees.seen``)."""
HITS: Final = "hits"
"""``hits``, int64 (pairs, 2): correct answers of the received discriminators on the two halves of
the silo's held-out samples; ``counts``, int64 (2,): the sizes of the halves."""
GENERATOR: Final = "generator"
"""Arrays of a generator of latents, sent with the model in a train message."""
GENERATOR_ARRAYS: Final = (
    "hidden.weight",
    "hidden.bias",
    "mean.weight",
    "mean.bias",
    "spread.weight",
    "spread.bias",
)
"""h = relu([one-hot label, noise U[0,1)] · hidden), z = (h · mean) + exp(½ h · spread) · N(0,1).

Weights are (inputs, outputs), unlike torch's Linear."""
NOISE: Final = 32
"""Width of the noise that is appended to the one-hot label."""
LABELS: Final = "labels"
"""Label counts by class, an array; in a generator's record: shares by which labels are drawn."""
MAX_LOG_VARIANCE: Final = 4.0
"""Bound on the ½-exponent ``h · spread`` of a generator, at both ends of the wire."""
MEMBER: Final = "member-"

# Keys of a config, server to silo.
ROUND: Final = "server-round"
PROTOCOL_KEY: Final = "protocol"
NEWEST_PROTOCOL: Final = "newest-protocol"
"""In ``query.describe``, in addition to the oldest protocol that the coordinator speaks."""
TASK: Final = "task"
TASK_KEYS: Final = "task."
"""Prefix of keys for the task at the silo: ``task.dropout``."""
FAMILY: Final = "family"
"""Which of a task's families of models a message is about, one of ``FAMILIES``."""
NETWORK, TREES = "network", "trees"
FAMILIES = NETWORK, TREES
EACH_ALONE: Final = "each"
"""In the place of groups that are given: every silo is alone."""
SCHEMA: Final = "schema"
"""The schema of the run's model, sent with ``SCHEMA_PARTS`` to a silo whose schema differs."""
SCHEMA_PARTS: Final = "schema-parts"
SEED: Final = "seed"
LOCAL_EPOCHS: Final = "local-epochs"
LOCAL_STEPS: Final = "local-steps"
"""Mini-batches of a training, across epochs if necessary; 0 or missing: whole epochs."""
BATCH_SIZE: Final = "batch-size"
LR: Final = "lr"
LR_DECAY: Final = "lr-decay"
MOMENTUM: Final = "momentum"
PROXIMAL_MU: Final = "proximal-mu"
COSINE_LAMBDA: Final = "cosine-lambda"
"""λ of −λ·cos(w, w received) in the local objective; 0 or missing disables it (pFedGraph)."""
PENALTY: Final = "penalty"
"""λ of λ/2·|w − centre|² in local training, without the last bias; 0 or missing: none."""
PRECISION: Final = "precision"
WIRE_FORMAT: Final = "wire-format"
"""Format of the returned update, see ``coterie.wire.formats``; missing: the unrounded model."""
OPTIMISER: Final = "optimiser"
"""Optimiser of local training: ``sgd``, or another name in ``torch.optim``."""
KEEP_OPTIMISER: Final = "keep-optimiser"
"""Whether the optimiser's state stays at the silo from round to round."""
SCHEDULE: Final = "schedule"
WARM_UP: Final = "lr-warm-up"
"""Share of the run in which the learning rate rises."""
BALANCE: Final = "balance"
METRIC: Final = "primary-metric"
"""The primary metric, in place of the task's: the key ``primary-metric`` of a run."""
PLAIN_STEPS: Final = "plain-steps"
"""The strategy needs plain SGD steps with the run's learning rate, to count or replace them."""
META_LR: Final = "meta-lr"
MOREAU_LAMBDA: Final = "moreau-lambda"
MOREAU_LR: Final = "moreau-lr"
INNER_STEPS: Final = "inner-steps"
ADAPT_STEPS: Final = "adapt-steps"
"""Steps along the gradient of all training data that a silo takes before it tests a model."""
ADAPT_LR: Final = "adapt-lr"
ADAPT_MU: Final = "adapt-mu"
EVALUATE_RECEIVED: Final = "evaluate-received"
"""Request that the reply to a train message also has the error of the received model."""
HOLDOUT: Final = "holdout"
"""Share of the training data held out of this training, to evaluate the received model on."""
CONSENSUS: Final = "consensus"
"""Request that averaged linear models reach the minimum over all rows (``features.consensus``): a
factor on the length of the silos' steps; 0: no request."""
PART: Final = "part"
"""Part of a table's network that is trained (``coterie.tasks.models.TableNetwork``): one of the
next three; empty: the whole network, by gradient steps."""
LINEAR_PART: Final = "linear"
HIDDEN_PART: Final = "hidden"
BOTH_PARTS: Final = "both"
HIDDEN_SHARE: Final = "hidden-share"
"""Factor on the effect of the hidden layers of a table's network, before it is evaluated."""
LINEAR_LAYER: Final = "linear_part."
"""Prefix of the names of the arrays of such a network's linear part."""
EVALUATE_TRAINED: Final = "evaluate-trained"
"""The model as this silo trained it is useful by itself: the silo evaluates and saves it."""
GENERATED_WEIGHT: Final = "generated-weight"
"""Weight of the loss on generated latents."""
DISTIL_WEIGHT: Final = "distil-weight"
"""Weight of the divergence from the head's answers on latents generated for the silo's own
labels."""
PURPOSE: Final = "purpose"
"""Distinguishes messages of one type to one silo in one round; part of the silo's seed."""
KEEP: Final = "keep"
"""The evaluated model becomes the silo's model: the silo writes it to its disk."""
KEEP_BEST: Final = "keep-best"
"""After the last round the silo saves the model of the round that was best on ``VALIDATION``."""
ENDED_EARLY: Final = "ended-early"
"""The run ends here, before the planned number of rounds."""
VALIDATION: Final = "validation"
"""Share of the training data held out of all training, for model selection; 0 disables it."""
PERSONAL: Final = "personal"
"""Layers that stay at the silo: ``head``, or a prefix of array names. Never sent either way."""
HEAD_FIRST: Final = "head-first"
"""The head stays, and is trained alone before the rest is (FedRep)."""
PAIR_LABELS: Final = "pair-labels"
"""One character per discriminator: the label, 1 or 0, of this silo's samples in its pair."""
STEPS: Final = "steps"
SAMPLES: Final = "samples"
"""The most samples that train discriminators; at least half of a silo's samples are held out."""
MOST_BYTES: Final = "most-bytes"
"""Largest size of a discriminator on the wire; silos shrink it if they can. 0 sets no limit."""
PERSONALISE: Final = "personalise"
"""How a silo personalises its group's model: one of the next four."""
PARTIAL: Final = "partial"
FINETUNE: Final = "finetune"
DITTO: Final = "ditto"
APFL: Final = "apfl"
PERSONAL_EPOCHS: Final = "personal-epochs"
PERSONAL_LR: Final = "personal-lr"
DITTO_LAMBDA: Final = "ditto-lambda"
OWN_PENALTY: Final = "own-penalty"
"""λ of partial pooling, beside the sum of the silo's losses; 0: the group's model is unchanged."""
MIXTURE: Final = "mixture"
"""α of APFL before a silo's first round: the share of its own model in the mixture."""
MIXTURE_LR: Final = "mixture-lr"
"""Learning rate of α; 0 keeps α constant."""
SCALE: Final = "scale"
"""Mean and deviation of each numeric column in turn, by which all silos of the run standardise."""
STRATEGY: Final = "strategy"
"""Name of the run's strategy: a silo may accept only some."""
ONLY_STATISTICS: Final = "statistics"
"""In place of a strategy's name: the run trains nothing, and only asks for statistics."""
ONLY_EVALUATION: Final = "evaluation"
"""The same of a run that only asks how good given models are."""
REGRESSION: Final = "regression"
"""In place of a strategy's name: a regression, fitted by sums over silos."""
BY_SUMS: Final = (REGRESSION,)
"""Families of models that are fitted by sums, named in place of a strategy."""
SUMMED: Final = ("regression", "trees", "alone")
"""What a silo can allow of models that are fitted by sums; "alone": regressions of it alone."""
SUMS_OF: Final = "sums-of"
"""The settings of a fit by sums, as JSON."""
ALSO_ALONE: Final = "each-alone"
"""Whether such a run also fits every silo alone."""
UNTRAINED: Final = {
    **{ONLY_STATISTICS: STATISTICS, ONLY_EVALUATION: EVALUATE_GIVEN},
    **dict.fromkeys(BY_SUMS, TRAIN_SUMS),
}
"""Names in place of a strategy's, and the type of message that such a run asks for."""
CONTRIBUTION: Final = "contribution"
"""In place of a strategy's name: groups are trained again, without each silo in turn, and the
models are then evaluated as given ones."""
GROWING: Final = "growing"
"""How trees grow, as JSON, so that a silo can grow its own to compare."""
AT_HOME: Final = "at-home"
"""The same, for a silo that is alone: it uses trees of its rows, which it does not send."""
GIVEN: Final = "given"
"""With ``EVALUATE_GIVEN``: the names of the models, in order."""
GIVEN_HASH: Final = "model."
"""Begins the entry with the hash of each model that a run of ``ONLY_EVALUATION`` sends."""
ROUNDS: Final = "rounds"
GROUP: Final = "group"
"""Number of the silo's group, from 1."""
GROUP_SIZE: Final = "group-size"
"""Number of silos whose updates will be averaged with this one, this silo included."""
MEMBERS: Final = "members"
"""The names of the group's silos, if the run discloses them."""
PARENT: Final = "parent"
"""The run or the model's file from which a run began."""
PLACED: Final = "placed"
"""With a model for a silo without labels: a text on how it was chosen."""
APART: Final = "apart"
"""A text on why the silo was quarantined and trains alone for now."""
LEFT_OUT: Final = "left-out"
"""A text on why the silo's last update did not count, if the silo cannot know."""
COLD_START_EPOCHS: Final = "cold-start-epochs"
COLD_START_STEPS: Final = "cold-start-steps"
"""Length of a run's cold starts, if set separately; sent before a silo joins."""
ASKS_LABEL_COUNTS: Final = "label-counts"
"""Whether the run asks for ``LABEL_COUNTS``; sent before a silo joins."""
RUN: Final = "run"
"""The run's name, for the files that the silo saves."""
ASKED_BY: Final = "asked-by"
"""The operator who started the run, as known to the coordinator."""
OF_RUN: Final = "of-run"
"""The run's name, sent before a silo joins: it may have been in the run before."""

SECURE: Final = "secure"
"""The silo keeps its trained model; a sketch of the update leaves, and later a masked sum."""
SKETCH_OF: Final = "sketch-of"
"""Sketched part of an update: ``parameters`` or ``parameters+buffers``; missing: nothing."""
SKETCH_LAYERS: Final = "sketch-layers"
"""``all`` in one sketch, ``each`` module separately, or a prefix of array names."""
SKETCH_AS: Final = "sketch-as"
"""Name of the projection: round and purpose of the training with which this one is compared.
Missing: its own."""
OWN_ROUND: Final = "own-round"
OWN_PURPOSE: Final = "own-purpose"
OWN_LONGEST: Final = "own-longest"
OWN_LONGEST_OF: Final = "own-longest-of"
"""In place of arrays: the model is the one that this silo trained at that time."""
PEERS: Final = "secure-peers"
SEALED: Final = "secure-seed"
"""Text of ``coterie.features.secure.protocol``: public keys of silos, and a sealed seed."""
STATEMENT: Final = "statement"
"""With sketches: a text of ``coterie.wire.statements`` as bytes, what the silo states of its
training. An array, because a separate record would cost each reply a further call."""
SEED_ID: Final = "secure-seed-id"
"""With a key: lets two silos check that they have the same seed; empty without one."""
SUM: Final = "secure-sum"
"""Text: the silos of the sum, and the weight of each."""
BLOCK: Final = "secure-block"
"""With a key: the silos with which this one is in exact sums over its rows, as JSON."""
MASKED_AS: Final = "masked-as"
"""With a masked answer: a digest of what decided the mask, and a mark of what it hides."""

BUNDLES: Final = "bundles-and-contents"
"""Added to ``DESCRIBE`` in transit: messages may come as bundles (``engine.fast.bundles``)."""
HOSTED: Final = "hosted"
"""Also added: a process may have several silos and one connection."""
WAIT: Final = "/coterie.Silos/Wait"
"""A silo's call, with Flower's heartbeat, that ends when a message arrives for it."""
WAIT_S: Final = 20.0
"""It also ends after this many seconds, before a proxy may consider the connection dead."""

SILO: Final = "name"
"""In the answer to ``NAME``: what the node is called."""

# Keys of metrics, silo to server.
NUM_EXAMPLES: Final = "num-examples"
TRAIN_LOSS: Final = "train-loss"
LOSS: Final = "loss"
ERROR: Final = "error"
SECONDS: Final = "seconds"
"""The silo's own time for the work, in seconds, without transport."""
HELD_OUT: Final = "held-out"
"""Samples that a silo can hold out of discriminators' training."""
DISCRIMINATOR_BYTES: Final = "discriminator-bytes"
HOLDOUT_ERROR: Final = "holdout-error"
HOLDOUT_EXAMPLES: Final = "holdout-num-examples"
HOLDOUT_LOSS: Final = "holdout-loss"
HOLDOUT_LOSS_ERROR: Final = "holdout-loss-error"
"""Standard error of ``HOLDOUT_LOSS`` over the samples that were held out; only of trees."""
HOLDOUT_LOSSES: Final = (HOLDOUT_LOSS, HOLDOUT_LOSS_ERROR)
RECEIVED_LOSS: Final = "received-loss"
RECEIVED_ERROR: Final = "received-error"
RECEIVED_EXAMPLES: Final = "received-num-examples"
RECEIVED_VALIDATION_ERROR: Final = "received-validation-error"
"""Error of the received model on the silo's validation data."""
UPDATE_NORM: Final = "update-norm"
"""Euclidean norm of the update in a smaller format; in a secure run with noise, never too short."""
UPDATE_LOST: Final = "update-lost"
"""Rounding loss of an update in a smaller format, as a share of its norm."""
CONSENSUS_BALANCE: Final = "consensus-balance"
"""Dual residual over primal residual of a silo's training by consensus."""
TRIVIAL: Final = "trivial"
"""The primary metric's shortfall for the best constant answer."""
MIN_GROUP_SIZE: Final = "min-group-size"
"""With an update: the fewest silos, this one included, with which it may be averaged. Sent, if more
than 1, by silos that do not describe themselves."""
TRAINED_LOSS: Final = "trained-loss"
TRAINED_ERROR: Final = "trained-error"
UPDATE_NOISE: Final = "update-noise"
"""Expected squared norm of the noise in the update, from silos with differential privacy."""
COLUMN_COUNTS: Final = "column-counts"
COLUMN_MEANS: Final = "column-means"
COLUMN_SQUARES: Final = "column-squares"
"""Sums of squared deviations from the silo's own mean; all three are lists, one item per column."""
OWN_METRICS: Final = frozenset(
    {
        *(NUM_EXAMPLES, TRAIN_LOSS, LOSS, ERROR, SECONDS, HELD_OUT, DISCRIMINATOR_BYTES),
        *(HOLDOUT_ERROR, *HOLDOUT_LOSSES, HOLDOUT_EXAMPLES, RECEIVED_LOSS, RECEIVED_ERROR),
        *(RECEIVED_EXAMPLES, RECEIVED_VALIDATION_ERROR, TRAINED_LOSS, TRAINED_ERROR),
        *(MIN_GROUP_SIZE, UPDATE_NORM, UPDATE_NOISE, UPDATE_LOST),
        CONSENSUS_BALANCE,
    }
)
"""The metrics above; any other key of a reply is a metric of the silo's app."""

PACKED_NAME: Final = "safetensors"
"""Name of the one array, and its ``stype``, in a packed ArrayRecord."""

OTHER_TASK: Final = "the run is of task"
"""In the reason of a silo that refuses because it serves another task of the federation."""
REFUSED: Final = 200
"""Error code of a silo that refuses to take part, with the reason."""
FAILED: Final = 201
"""Error code of a silo whose app raised."""
SPENT: Final = 203
"""Error code of a silo whose privacy budget does not allow the request, with the reason."""
UNAPPROVED: Final = 204
"""Error code of a silo whose approvers have not yet approved the run, with the reason."""
CLOSED: Final = 205
"""Error code of a silo that does not work at this hour, with its hours."""
NOT_NOW: Final = frozenset({UNAPPROVED, CLOSED})
"""A silo with one of these codes is asked again, as it may take part later."""
DIVERGED: Final = 207
"""Error code of a silo whose training ended in NaN or infinity in a secure run, with the array."""
TOO_FAR: Final = 208
"""Error code of a silo in whose sums, after a step of a fit, few rows would outweigh all others, or
numbers be too large. It is asked again after a smaller step."""
HOSTS: Final = 206
"""Error code of a process of several silos that was asked to describe itself; the reason is their
number. Each silo is then asked separately, all in one bundle."""
UNREADABLE: Final = 202
"""Error code that the coordinator gives a reply that cannot be read, or is too large."""

# In the metadata of a call, not in a message.
PATIENCE: Final = "coterie-patience"
"""Milliseconds that coterie's SuperLink may hold a call until its result is there; Flower's
SuperLink answers immediately."""
MOST_PATIENCE_MS: Final = 1_000

WAITING: Final = _sha256(b"coterie: nodes that wait").hexdigest()
"""Requested by a ServerApp like an object: JSON, the nodes that hold a call ``WAIT``; they read
bundles."""

ALONG: Final = "coterie-along"
"""In a call for messages: "1" allows small objects in the answer (``wire.inline_objects``)."""
