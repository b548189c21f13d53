"""The silo's ClientApp: which message is answered by what.

The same object runs under the resident silo (``coterie silo``), a stock ``flower-supernode`` and
Flower's simulation engine. It refuses what it cannot do with a reason, and takes no code from
the server: a message is data.
"""

from __future__ import annotations

from flwr.app import RecordDict
from flwr.clientapp import ClientApp

from coterie import wire
from coterie.client.home import personal
from coterie.client.resident.ledger import outbound
from coterie.client.work.discriminator_phase import evaluate_discriminators, train_discriminators
from coterie.client.work.evaluate_phase import (
    count_labels,
    evaluate_ensemble,
    evaluate_model,
    evaluate_model_on_training_data,
)
from coterie.client.work.request import Request, answering
from coterie.client.work.train_phase import train_model, train_model_per_fedavg, train_model_pfedme
from coterie.client.work.training import read_weights

app = ClientApp(mods=[outbound])


@app.query("describe")
@answering
def describe(request: Request) -> RecordDict:
    """Say who this silo is. Refuses a run of another task or protocol."""
    request.personal()
    return wire.encode_description(request.bench.describe())


@app.query("initial")
@answering
def initial(request: Request) -> RecordDict:
    """Give the freshly initialised model of the run's seed: the server needs no torch."""
    model = request.bench.fresh_model(request.integer(wire.SEED, minimum=0))
    shared = personal.without(read_weights(model), request.personal())
    return RecordDict({wire.ARRAYS: wire.encode_arrays(shared, packed=True)})


app.train()(answering(train_model))
app.train("per_fedavg")(answering(train_model_per_fedavg))
app.train("pfedme")(answering(train_model_pfedme))
# w⁰ trained on this silo's data: the update tells the server which group is this silo's.
app.train("cold_start")(answering(train_model))
app.train("discriminator")(answering(train_discriminators))

app.evaluate()(answering(evaluate_model))
app.evaluate("training")(answering(evaluate_model_on_training_data))
app.evaluate("ensemble")(answering(evaluate_ensemble))
app.evaluate("label_counts")(answering(count_labels))
app.evaluate("discriminator")(answering(evaluate_discriminators))
