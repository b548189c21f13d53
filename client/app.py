"""The silo's ClientApp: which function answers which message.

The same object runs under the resident silo (``coterie silo``), a stock ``flower-supernode`` and
Flower's simulation engine. It refuses what it cannot do with a reason, and takes no code from
the server: a message is data.
"""

from __future__ import annotations

from dataclasses import replace

from flwr.app import RecordDict
from flwr.clientapp import ClientApp

from coterie import wire
from coterie.client.ledger import outbound
from coterie.client.work import discriminate, evaluate, meta_sgd, personal, train
from coterie.client.work.request import Request, answering
from coterie.client.work.weights import read_weights
from coterie.features.compression.silo import Compression
from coterie.features.consensus.silo import Consensus
from coterie.features.evaluation.silo import evaluate_given
from coterie.features.families.silo import Families
from coterie.features.personal.silo import Personal, evaluate_own, train_model_apfl
from coterie.features.privacy.silo import DifferentialPrivacy
from coterie.features.secure import silo as secure
from coterie.features.secure.masking import Masking
from coterie.features.statistics import silo as statistics
from coterie.features.sums.regression.silo import Regressing
from coterie.features.sums.silo import answer_sums
from coterie.features.sums.trees.silo import Growing, answer_histograms, in_bins
from coterie.features.unlabelled.silo import Testing, measure_group
from coterie.features.validation.silo import Validation
from coterie.features.watching.silo import Watching


def describe(request: Request) -> RecordDict:
    """Describe this silo to a run whose terms it accepts."""
    described = replace(request.session.describe(), protocol=wire.agreed(request.config))
    return wire.encode_description(described)


def initialise(request: Request) -> RecordDict:
    """Return the model initialised with the run's seed: the server needs no torch."""
    model = request.session.fresh_model(request.integer(wire.SEED, minimum=0))
    shared = personal.without(read_weights(model), request.personal())
    return RecordDict({wire.ARRAYS: wire.encode_arrays(shared, packed=True)})


STAGES = (
    *(Families(), Testing(), Validation(), DifferentialPrivacy(), statistics.Scaled()),
    *(secure.Secure(), Masking(), Personal(), Consensus(), Compression(), Watching(), Growing()),
)
"""The stages, in the order in which they are called."""

ANSWERS = {
    wire.DESCRIBE: describe,
    wire.INITIAL: initialise,
    wire.COLUMN_SUMS: statistics.report_column_sums,
    wire.STATISTICS: statistics.report_statistics,
    wire.SECURE_KEY: secure.send_key,
    wire.SECURE_SEED: secure.seal_seed,
    wire.TRAIN: train.train_model,
    wire.TRAIN_PER_FEDAVG: meta_sgd.train_model_per_fedavg,
    wire.TRAIN_PFEDME: meta_sgd.train_model_pfedme,
    wire.TRAIN_APFL: train_model_apfl,
    # w⁰ trained on this silo's data: the update tells the server which group is this silo's.
    wire.COLD_START: train.train_model,
    wire.MASKED_SUM: secure.sum_masked,
    wire.TRAIN_SUMS: answer_sums({wire.REGRESSION: Regressing()}),
    wire.TRAIN_DISCRIMINATOR: in_bins(discriminate.train, labelled=True),
    wire.EVALUATE: evaluate.evaluate_model,
    wire.EVALUATE_GROUP: measure_group,
    wire.EVALUATE_GIVEN: evaluate_given,
    wire.EVALUATE_TRAINING: evaluate.evaluate_model_on_training_data,
    wire.EVALUATE_OWN: evaluate_own,
    wire.EVALUATE_HISTOGRAMS: answer_histograms,
    wire.ENSEMBLE: evaluate.evaluate_ensemble,
    wire.LABEL_COUNTS: evaluate.count_labels,
    wire.EVALUATE_DISCRIMINATOR: in_bins(discriminate.evaluate, labelled=True),
    # Of features alone: where a silo without labels belongs, in a run of any strategy.
    wire.TRAIN_PLACING: in_bins(discriminate.train, labelled=False),
    wire.EVALUATE_PLACING: in_bins(discriminate.evaluate, labelled=False),
}

app = ClientApp(mods=[outbound])
for _kind, _work in ANSWERS.items():
    _category, _, _action = _kind.partition(".")
    _register = getattr(app, _category)(_action) if _action else getattr(app, _category)()
    _register(answering(_work, STAGES))
