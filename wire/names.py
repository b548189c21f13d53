"""Every name on the wire: message types, records, keys, error codes, and the protocol's version."""

from __future__ import annotations

from hashlib import sha256 as _sha256
from typing import Final

PROTOCOL: Final[int] = 1
"""Version of this module's conversation. One more when an earlier release could not follow it."""
OLDEST_PROTOCOL: Final[int] = 1
"""The oldest that is spoken as well: that of the release before. See ``coterie.wire.releases``."""

# Message types. A phase of an algorithm is a type of its own, never a flag in a config.
DESCRIBE: Final = "query.describe"
INITIAL: Final = "query.initial"
LABEL_COUNTS: Final = "evaluate.label_counts"
"""How many training samples of each label (FedGen). Only a silo that consents answers."""
COLUMN_SUMS: Final = "query.column_sums"
"""Count, mean and sum of squared deviations of each numeric column of a table whose task scales by
the federation. Only a silo that consents answers."""
STATISTICS: Final = "query.statistics"
"""Counts of a silo's training samples by column: see ``coterie.wire.statistics``. Only a silo that
consents answers, and only in a run whose ``STRATEGY`` is ``ONLY_STATISTICS``."""
ENSEMBLE: Final = "evaluate.ensemble"
"""Error of the mean logits of the models sent as ``member-<i>`` (FedEnsemble)."""
TRAIN: Final = "train"
EVALUATE: Final = "evaluate"
COLD_START: Final = "train.cold_start"
"""A training from w⁰ whose update says where the silo belongs; nothing of it is kept there."""
EVALUATE_TRAINING: Final = "evaluate.training"
"""Loss and error of a model on the silo's training data: what a strategy may choose by."""
TRAIN_PER_FEDAVG: Final = "train.per_fedavg"
TRAIN_PFEDME: Final = "train.pfedme"
TRAIN_APFL: Final = "train.apfl"
TRAIN_DISCRIMINATOR: Final = "train.discriminator"
EVALUATE_DISCRIMINATOR: Final = "evaluate.discriminator"
TRAIN_PLACING: Final = "train.placing"
EVALUATE_PLACING: Final = "evaluate.placing"
"""The same of features alone: whose data a silo's without labels look like, in a run of any
strategy. Their records are those of discriminators."""

MASKED_SUM: Final = "train.masked_sum"
"""In a secure run: what a silo trained, masked so that only the sum over a group can be read."""
SECURE_KEY: Final = "query.secure_key"
"""The silo's public key of this run, by which silos make masks in pairs."""
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
"""Of a secure run's update: a projection to few numbers that keeps lengths and angles."""
MASKED: Final = "masked"
"""One array, uint32: see ``coterie.features.secure.protocol``."""
HITS: Final = "hits"
"""``hits``, int64 (pairs, 2): right answers of the discriminators received on the two halves of the
silo's held-out samples; ``counts``, int64 (2,): those samples."""
GENERATOR: Final = "generator"
"""Arrays of a generator of latents, beside the model of a train message."""
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
"""Width of the noise beside the one-hot label."""
LABELS: Final = "labels"
"""Label counts by class, an array; in a generator's record: shares by which labels are drawn."""
MAX_LOG_VARIANCE: Final = 4.0
"""Bound on ½-exponent ``h · spread`` of a generator, at both ends of the wire."""
MEMBER: Final = "member-"

# Keys of a config, server to silo.
ROUND: Final = "server-round"
PROTOCOL_KEY: Final = "protocol"
NEWEST_PROTOCOL: Final = "newest-protocol"
"""In ``query.describe``, beside the oldest that the coordinator speaks."""
TASK: Final = "task"
TASK_KEYS: Final = "task."
"""Beginning of keys that are for the task at the silo: ``task.dropout``."""
SCHEMA: Final = "schema"
"""Of the run's model, and ``SCHEMA_PARTS`` of it: told to a silo whose own is another one."""
SCHEMA_PARTS: Final = "schema-parts"
SEED: Final = "seed"
LOCAL_EPOCHS: Final = "local-epochs"
LOCAL_STEPS: Final = "local-steps"
"""Mini-batches of a training, however many epochs that takes; 0 or missing: whole epochs."""
BATCH_SIZE: Final = "batch-size"
LR: Final = "lr"
LR_DECAY: Final = "lr-decay"
MOMENTUM: Final = "momentum"
PROXIMAL_MU: Final = "proximal-mu"
COSINE_LAMBDA: Final = "cosine-lambda"
"""λ of −λ·cos(w, w received) in the local objective; 0 or missing: none (pFedGraph)."""
PRECISION: Final = "precision"
WIRE_FORMAT: Final = "wire-format"
"""Of the update that is sent back, see ``coterie.wire.formats``; missing: the model as it is."""
OPTIMISER: Final = "optimiser"
"""Of local training: ``sgd``, or another name in ``torch.optim``."""
KEEP_OPTIMISER: Final = "keep-optimiser"
"""Whether the optimiser's state stays at the silo from round to round."""
SCHEDULE: Final = "schedule"
WARM_UP: Final = "lr-warm-up"
"""Share of the run in which the learning rate rises."""
BALANCE: Final = "balance"
METRIC: Final = "leading-metric"
"""The leading metric, in place of the task's."""
PLAIN_STEPS: Final = "plain-steps"
"""The strategy counts on steps of SGD with the run's learning rate: FedNova counts them, others
make their own of them."""
META_LR: Final = "meta-lr"
MOREAU_LAMBDA: Final = "moreau-lambda"
MOREAU_LR: Final = "moreau-lr"
INNER_STEPS: Final = "inner-steps"
ADAPT_STEPS: Final = "adapt-steps"
"""Steps along the gradient of all training data that a silo takes before it tests a model."""
ADAPT_LR: Final = "adapt-lr"
ADAPT_MU: Final = "adapt-mu"
EVALUATE_RECEIVED: Final = "evaluate-received"
"""Ask a train message to be answered with the error of the model it brought as well."""
HOLDOUT: Final = "holdout"
"""Share of the training data to keep out of this training, and to measure the received model on."""
EVALUATE_TRAINED: Final = "evaluate-trained"
"""The model as this silo trained it is of use by itself: it is evaluated, and kept by the silo."""
GENERATED_WEIGHT: Final = "generated-weight"
"""Weight of the loss on generated latents."""
DISTIL_WEIGHT: Final = "distil-weight"
"""Weight of the divergence from the head's answers on latents generated for the own labels."""
PURPOSE: Final = "purpose"
"""Distinguishes messages of one type to one silo in one round; part of the silo's seed."""
KEEP: Final = "keep"
"""The evaluated model is the silo's own from now on: it writes it to its disk."""
KEEP_BEST: Final = "keep-best"
"""After the last round the silo keeps the model of the round that was best on ``VALIDATION``."""
ENDED_EARLY: Final = "ended-early"
"""This is the end of the run, although it has fewer rounds than were planned."""
VALIDATION: Final = "validation"
"""Share of the training data kept out of all training, to choose by; 0 is none."""
PERSONAL: Final = "personal"
"""Layers that stay at the silo: ``head``, or a prefix of array names. Never sent either way."""
PAIR_LABELS: Final = "pair-labels"
"""One character per discriminator: the label, 1 or 0, of this silo's samples in its pair."""
STEPS: Final = "steps"
SAMPLES: Final = "samples"
"""At most so many samples train discriminators; at least half of a silo's are held out."""
MOST_BYTES: Final = "most-bytes"
"""Of one discriminator on its way; silos make it smaller, if they can. 0: as it is."""
PERSONALISE: Final = "personalise"
"""What a silo makes of its group's model for itself: one of the next three."""
FINETUNE: Final = "finetune"
DITTO: Final = "ditto"
APFL: Final = "apfl"
PERSONAL_EPOCHS: Final = "personal-epochs"
PERSONAL_LR: Final = "personal-lr"
DITTO_LAMBDA: Final = "ditto-lambda"
MIXTURE: Final = "mixture"
"""α of APFL before a silo's first round: the share of its own model in the mixture."""
MIXTURE_LR: Final = "mixture-lr"
"""Learning rate of α; 0 leaves it as it is."""
SCALE: Final = "scale"
"""Mean and deviation of each numeric column in turn, by which all silos of the run standardise."""
STRATEGY: Final = "strategy"
"""The run's strategy, by name: a silo may take part in some only."""
ONLY_STATISTICS: Final = "statistics"
"""In place of a strategy's name: the run trains nothing, and asks for statistics alone."""
ROUNDS: Final = "rounds"
"""How many rounds the run has."""
GROUP: Final = "group"
"""Number of the silo's group, from 1."""
GROUP_SIZE: Final = "group-size"
"""Silos whose updates will be averaged with the one asked for, that one included."""
MEMBERS: Final = "members"
"""Their names, where the run tells them."""
PLACED: Final = "placed"
"""With a model for a silo without labels: how it was found, in words."""
APART: Final = "apart"
"""Why the silo was moved out of its group and trains alone for now, in words."""
LEFT_OUT: Final = "left-out"
"""Why what the silo sent last did not count, in words, where it cannot know."""
PRETRAIN_EPOCHS: Final = "pretrain-epochs"
PRETRAIN_STEPS: Final = "pretrain-steps"
"""Length of a run's cold starts, where it has one of its own; told before a silo joins."""
ASKS_LABEL_COUNTS: Final = "label-counts"
"""Whether the run asks for ``LABEL_COUNTS``; told before a silo joins."""
RUN: Final = "run"
"""The run's name, for the files that the silo keeps."""
ASKED_BY: Final = "asked-by"
"""The operator who started the run, as the coordinator knows them."""
OF_RUN: Final = "of-run"
"""The same, told before a silo joins: it may have been in the run before."""

SECURE: Final = "secure"
"""The silo keeps what it trains; a sketch of it leaves, and later a masked sum."""
SKETCH_OF: Final = "sketch-of"
"""What of an update is sketched: ``parameters``, or with its statistics ``parameters+buffers``;
missing: nothing."""
SKETCH_LAYERS: Final = "sketch-layers"
"""``all`` in one sketch, ``each`` module by itself, or a prefix of array names."""
OWN_ROUND: Final = "own-round"
OWN_PURPOSE: Final = "own-purpose"
OWN_LONGEST: Final = "own-longest"
OWN_LONGEST_OF: Final = "own-longest-of"
"""In place of arrays: the model is the one that this silo trained then."""
PEERS: Final = "secure-peers"
SEALED: Final = "secure-seed"
"""Text of ``coterie.features.secure.protocol``: public keys of silos, and a sealed seed."""
TRAINED_AS: Final = "trained-as"
"""Beside sketches, 32 bytes: digest of the model that the silo was sent, and of how it was told to
train. An array, for a record of its own would cost each reply a further call."""
SEED_ID: Final = "secure-seed-id"
"""With a key: by which two silos know that they have the same seed; empty without one."""
SUM: Final = "secure-sum"
"""Text: whose sum it is, and how each silo counts in it."""

BUNDLES: Final = "bundles"
"""Added to ``DESCRIBE`` on its way: messages may come as bundles (``coterie.wire.bundles``)."""
HOSTED: Final = "hosted"
"""Likewise: a process may have several silos and one connection."""
WAIT: Final = "/coterie.Silos/Wait"
"""Call of a silo, with Flower's heartbeat: ends when a message comes for it."""
WAIT_S: Final = 20.0
"""Or after so many seconds: less than what stands between may take for a dead connection."""

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
RECEIVED_LOSS: Final = "received-loss"
RECEIVED_ERROR: Final = "received-error"
RECEIVED_EXAMPLES: Final = "received-num-examples"
RECEIVED_VALIDATION_ERROR: Final = "received-validation-error"
"""Of the model received, on the silo's validation data."""
UPDATE_NORM: Final = "update-norm"
"""Euclidean norm of what a training changed, in a secure run or in a smaller format."""
UPDATE_LOST: Final = "update-lost"
"""Of an update in a smaller format: what was rounded away, as a share of its norm."""
TRIVIAL: Final = "trivial"
"""What is missing to the leading metric's best value if the best single answer is always given."""
MIN_GROUP_SIZE: Final = "min-group-size"
"""With an update: the fewest silos, this one included, with which it may be averaged. Of silos that
do not describe themselves, where it is more than 1."""
TRAINED_LOSS: Final = "trained-loss"
TRAINED_ERROR: Final = "trained-error"
UPDATE_NOISE: Final = "update-noise"
"""Expected squared norm of the noise in the update, of silos with differential privacy."""
COLUMN_COUNTS: Final = "column-counts"
COLUMN_MEANS: Final = "column-means"
COLUMN_SQUARES: Final = "column-squares"
"""Sums of squared deviations from the silo's own mean; all three are lists, an item a column."""
OWN_METRICS: Final = frozenset(
    {
        *(NUM_EXAMPLES, TRAIN_LOSS, LOSS, ERROR, SECONDS, HELD_OUT, DISCRIMINATOR_BYTES),
        *(HOLDOUT_ERROR, HOLDOUT_LOSS, HOLDOUT_EXAMPLES, RECEIVED_LOSS, RECEIVED_ERROR),
        *(RECEIVED_EXAMPLES, RECEIVED_VALIDATION_ERROR, TRAINED_LOSS, TRAINED_ERROR),
        *(MIN_GROUP_SIZE, UPDATE_NORM, UPDATE_NOISE, UPDATE_LOST),
    }
)
"""These; any other key of a reply is a metric of the silo's app."""

PACKED_NAME: Final = "safetensors"
"""Name of the one array, and its ``stype``, in a packed ArrayRecord."""

OTHER_TASK: Final = "the run is of task"
"""In the reason of who refuses because it serves another: a federation may have several studies."""
REFUSED: Final = 200
"""Error code of a silo that will not take part, with the reason in words."""
FAILED: Final = 201
"""Error code of a silo whose app raised."""
SPENT: Final = 203
"""Error code of a silo whose privacy budget does not allow what was asked, with the reason."""
UNAPPROVED: Final = 204
"""Error code of a silo whose people have not yet approved the run, with the reason."""
CLOSED: Final = 205
"""Error code of a silo that does not work at this hour, with its hours."""
NOT_NOW: Final = frozenset({UNAPPROVED, CLOSED})
"""Who answers so may take part later: it is asked again."""
DIVERGED: Final = 207
"""Error code of a silo whose training ended in NaN or infinity in a secure run, with the array."""
HOSTS: Final = 206
"""Error code of a process of several silos that was asked who it is; the reason is their number.
Each is then asked by itself, all in one bundle."""
UNREADABLE: Final = 202
"""Error code that the coordinator gives a reply which cannot be read, or holds too much."""

# In the metadata of a call, not in a message.
PATIENCE: Final = "coterie-patience"
"""For how many milliseconds coterie's SuperLink may hold a call that asks for what is not there
yet. Flower's answers at once."""
MOST_PATIENCE_MS: Final = 1_000

WAITING: Final = _sha256(b"coterie: nodes that wait").hexdigest()
"""Asked for like an object by a ServerApp: JSON, the nodes that hold a call ``WAIT``. Whoever knows
that call reads bundles."""

IN_FILE: Final = "coterie-in-file"
"""In the metadata of a ServerApp's call for an object: "1": without its content if that lies in a
file that both can see."""

ALONG: Final = "coterie-along"
"""In the metadata of a call that asks for messages: "1": the answer may have small objects of them
in it (``coterie.wire.along``)."""
