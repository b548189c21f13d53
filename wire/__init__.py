"""The conversation between coordinator and silo: message types, keys, encodings, version.

Both sides import this package and nothing else of each other. The basic conversation is Flower's
(``arrays`` and ``config`` in; ``arrays`` and ``metrics`` with ``num-examples`` out), so that any
Flower ClientApp can take part; a coterie silo's answer to ``query.describe`` states what else it
can do.
"""

from coterie.wire.arrays import (
    Model,
    Tensor,
    array_records,
    config_records,
    decode_arrays,
    encode_arrays,
    is_packed,
    metric_records,
    model_hash,
    tensors_of,
)
from coterie.wire.buffers import empty, reuse_blocks
from coterie.wire.description import (
    IN_ORDER,
    Description,
    Layers,
    Parts,
    decode_description,
    decode_parts,
    differences,
    encode_description,
    encode_parts,
    is_silo_name,
)
from coterie.wire.errors import WireError
from coterie.wire.formats import (
    FLOAT32,
    WIRE_FORMATS,
    WireFormat,
    num_rounded_bytes,
    restore_model,
    restore_update,
    round_model,
    round_update,
)
from coterie.wire.half_precision import largest_of, narrow, widened
from coterie.wire.keys import (
    LOOP,
    Entry,
    NotNegative,
    Positive,
    Scalar,
    SiloKeys,
    entries,
    evaluation_entries,
    loop_entries,
    personal_layers,
    terms,
    training_entries,
)
from coterie.wire.kinds import KINDS, Kind, kind_of
from coterie.wire.limits import (
    FLOOR_BYTES,
    MAX_MODEL_BYTES,
    MAX_OBJECT_BYTES,
    MAX_OBJECTS,
    MAX_WORD,
    OVER_ALLOWANCE,
    TIMES_SENT,
    content_objection,
    is_plain_name,
    most_bytes,
    num_array_bytes,
    plain_text,
    sentence,
)
from coterie.wire.metrics import CALIBRATION, HIGH, KNOWN_METRICS, LOW, OF_NUMBERS, Metric
from coterie.wire.names import *
from coterie.wire.releases import agreed, is_spoken, offer, talk
from coterie.wire.replies import (
    Value,
    content_of,
    failure,
    read_figures,
    read_metrics,
    refusal,
    whole,
)
from coterie.wire.spellings import ACCURACY, METRIC_SPELLINGS, spelled, strategy_of, understood
from coterie.wire.words import asked_sums, by_reason, counted, page, readable, reasons, some
