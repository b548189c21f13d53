"""Secure runs: a coordinator that lies about the other silos gets no sum.

Recovered from the same lies before silos checked each other's signed statements: the sign of every
number of every silo (bounds), the largest silo's model in coarse steps (total), and one silo's
update with a relative error of 8e-7 (optimiser), 9e-2 (personal layers) and 2e-4 (schedule).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import Message

from coterie import wire
from coterie.features.secure.protocol import encode_peers, from_fixed, largest_of, training_digest
from coterie.wire.enrolment import fingerprint_of_key
from coterie.wire.games import Game
from coterie.wire.statements import Statement, decode_statement
from coterie.wire.updates import Limit
from tests.contract.hostile.liars import STEP, Liar, flat
from tests.kit import answer, ask, digits, initial, reason, restart_silos, varied_requests

TRIO = {"a": 120, "b": 87, "c": 70}


def read_stated(reply: Message) -> Statement:
    """Return what a silo states of a training."""
    sent = wire.decode_arrays(reply.content.array_records[wire.SKETCH])
    return decode_statement(sent[wire.STATEMENT].tobytes().decode())


def alone(liar: Liar, found: np.ndarray, name: str = "a") -> float:
    """Return how well one silo's update is known from a mean of all: the correlation."""
    return float(np.corrcoef(found - flat(liar.initial), liar.update(name))[0, 1])


def test_bounds_and_totals_are_nobody_s_to_choose(tmp_path: Path) -> None:
    """They follow from the start model and the statements: the sum is the mean, and no more."""
    liar = Liar(tmp_path, TRIO)
    liar.train("abc")
    asked = liar.describe("abc")
    mean = liar.mean(asked)
    weighted = sum(TRIO[n] * flat(liar.made(n).model) for n in "abc") / sum(TRIO.values())
    np.testing.assert_allclose(mean, weighted, atol=1e-6)
    older = [*("r", 1, "", ["a", "b", "c"], 120.0, 277.0), asked.statements["a"].trained_as]
    older += [3, [1e-30] * 4, 1]
    keys = encode_peers(list(liar.peers("abc").values()))
    reply = liar.ask("a", wire.MASKED_SUM, secure_sum=json.dumps(older), secure_peers=keys)
    assert "a sum's description cannot be read" in reply.error.reason


def test_no_value_is_clipped_whatever_the_start_is(tmp_path: Path) -> None:
    """With a layer of zeros, tiny bounds made signs of the update of it."""
    liar = Liar(tmp_path, TRIO)
    start = {name: array * np.float32(1e-6) for name, array in liar.initial.items()}
    liar.train("abc", start=start)
    mean = liar.mean(liar.describe("abc"), start)
    weighted = sum(TRIO[n] * flat(liar.made(n).model) for n in "abc") / sum(TRIO.values())
    np.testing.assert_allclose(mean, weighted, atol=1e-6)


def test_the_rounding_of_a_sum_hides_nobody(tmp_path: Path) -> None:
    """A weight of a dead channel, so large that in its array small updates are rounded to zero."""
    liar = Liar(tmp_path, {"a": 300, "b": 90, "c": 90})
    start = {name: np.array(array) for name, array in liar.initial.items()}
    start["representation.3.bias"][-1] = -1e6
    start["representation.3.weight"][-1, 0, 0, 0] = -1e8
    liar.train("abc", start=start)
    assert "the sum would show only the longer ones" in liar.refusal(liar.describe("abc"))


def test_a_sum_is_not_solved_for_integers(tmp_path: Path) -> None:
    """Numbers so large that every update is -1, 0 or 1 of their steps, in a sum of known weights.

    Without noise 99% of the steps of each silo were found, with correlations of 0.89 to 0.96.
    """
    liar, steps = Liar(tmp_path, TRIO), np.array(list(itertools.product((-1, 0, 1), repeat=3)))
    start = liar.initial | {"head.weight": liar.initial["head.weight"] + np.float32(1000)}
    liar.train("abc", start=start, lr=3e-3)
    step, asked = float(np.spacing(np.float32(1000))), liar.describe("abc")
    wide = {name: array.astype(np.float64) for name, array in start.items()}
    numbers, refused = liar.sum(asked)
    assert numbers is not None, refused
    found = from_fixed(numbers, wide, asked.bounds(largest_of(start), start))["head.weight"]
    shares = [asked.share(name) for name in "abc"]
    moved = (found - wide["head.weight"]).reshape(-1, 1) / step
    guess = steps[np.abs(moved - steps @ shares).argmin(axis=1)]
    for i, name in enumerate("abc"):
        truth = (liar.made(name).model["head.weight"] - wide["head.weight"]) / step
        assert np.count_nonzero(truth) > 5 and np.abs(truth).max() <= 3
        assert abs(np.corrcoef(guess[:, i], truth.reshape(-1))[0, 1]) < 0.3


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ({"a": 120.0, "b": 1e-3, "c": 70.0}, "a share of less than 2^-14"),
        ({"a": 120.0, "b": 3.0, "c": 3.0}, "would be nearly the update of silo 'a'"),
        ({"a": 120.0, "b": 87.0, "c": 71.0}, "counts for more than its samples"),
        # Of 0.8 of the weight, the sum has a correlation of 0.98 with the update.
        ({"a": 10.0, "b": 80.0, "c": 10.0}, "all silos count by their samples"),
        ({"a": 80.0, "b": 87.0, "c": 70.0}, "all silos count by their samples"),
    ],
)
def test_counts_leave_no_silo_alone(counts: dict[str, float], says: str, tmp_path: Path) -> None:
    liar = Liar(tmp_path, TRIO)
    liar.train("abc")
    asked = replace(liar.describe("abc"), blocks=(tuple(sorted(counts.items())),))
    assert says in liar.refusal(asked)


def test_counts_have_one_cap(tmp_path: Path) -> None:
    liar = Liar(tmp_path, TRIO)
    liar.train("abc")
    capped = (("a", 80.0), ("b", 80.0), ("c", 70.0))
    assert liar.refusal(replace(liar.describe("abc"), blocks=(capped,))) == ""


def test_who_has_nearly_all_samples_is_in_no_sum(tmp_path: Path) -> None:
    liar = Liar(tmp_path, {"a": 1000, "b": 32, "c": 32})  # stated lengths vary by a tenth
    liar.train("abc")
    assert "would be nearly the update of silo 'a'" in liar.refusal(liar.describe("abc"))


@pytest.mark.parametrize(
    ("before", "then"),
    [
        # The squares that Adagrad sums grow so large that it makes no steps any more.
        ({"weight_decay": 1e8}, {"optimiser": "adagrad", "keep_optimiser": True}),
        # Heads of zeros, through which no gradient comes to the layers that are shared.
        ({"weight_decay": 10.0}, {"personal": "head"}),
    ],
    ids=["optimiser", "personal layers"],
)
def test_a_state_with_which_the_others_learn_nothing_is_noticed(
    before: dict[str, Any], then: dict[str, Any], tmp_path: Path
) -> None:
    liar = Liar(tmp_path, TRIO)
    start = dict(liar.initial)
    if "personal" in then:
        start = {n: a for n, a in start.items() if not n.startswith("head")}
    liar.train("a", start=start, **then)
    liar.train("bc", start=start, **then, **before)
    liar.train("abc", 2, start=start, **then)
    assert "trained differently before" in liar.refusal(liar.describe("abc", 2))
    # Those who were treated alike are summed.
    liar.train("abc", start=start, run="honest", **then)
    liar.train("abc", 2, start=start, run="honest", **then)
    assert liar.refusal(liar.describe("abc", 2, run="honest")) == ""


def test_a_training_that_is_not_secure_counts_for_the_state_that_it_leaves(tmp_path: Path) -> None:
    liar = Liar(tmp_path, TRIO)
    kept = {"optimiser": "adagrad", "keep_optimiser": True}
    for name in "bc":
        liar.nodes[name]["secure"] = ""
        reply = liar.ask(
            name, wire.TRAIN, 1, liar.initial, **STEP, **kept, weight_decay=1e8, group_size=6
        )
        assert not reply.has_error()
    liar.train("abc", 2, **kept)
    assert "trained differently before" in liar.refusal(liar.describe("abc", 2))


def test_a_record_of_arrays_hides_no_entry_of_its_name(tmp_path: Path) -> None:
    """Two silos shrink their weights by a twentieth, which the coordinator knows.

    The rest of the sum was the third one's update, with a relative error of 7e-4.
    """
    liar = Liar(tmp_path, TRIO)
    hidden = {"lr": {"x": np.zeros(1)}, "weight-decay": {"x": np.zeros(1)}}
    liar.train("a", beside=hidden)
    liar.train("bc", beside=hidden, lr=5e-8, weight_decay=1e6)
    assert "different training settings" in liar.refusal(liar.describe("abc"))


LINEAR: dict[str, Any] = {"name": "a", "task": "tests.unit.client.test_consensus:Rows"}
LINEAR |= {"device": "cpu", "threads": 1, "data.silo": "a"}


def test_a_linear_model_of_a_silo_alone_is_another_training() -> None:
    """A silo whose group has one member goes to its own minimum, and others hardly move.

    The sum's correlation with its model was 0.84; rates and penalties had been chosen for that.
    """
    how = {"task": LINEAR["task"], "run": "r", "server_round": 2, "lr": 1e-3, "secure": True}
    stated = [
        read_stated(
            answer(
                wire.TRAIN, LINEAR, model=initial(1, LINEAR), game=Game(), group_size=size, **how
            )
        )
        for size in (3, 1)
    ]
    assert stated[0].made != stated[1].made and stated[0].trained_as != stated[1].trained_as


def test_a_secure_training_reads_no_state_that_is_in_no_digest() -> None:
    how = {"task": LINEAR["task"], "run": "r", "server_round": 2, "group_size": 3, "consensus": 1.0}
    reply = ask(wire.TRAIN, LINEAR, model=initial(1, LINEAR), game=Game(), secure=True, **how)
    assert "corrects no mean in a secure run" in reason(reply)


def test_a_schedule_is_at_the_same_round_for_all(tmp_path: Path) -> None:
    """In round 1,001 of 1,000 the rate is 0."""
    liar = Liar(tmp_path, TRIO)
    cosine = {"schedule": "cosine", "rounds": 1000}
    liar.train("a", 1, **cosine)
    liar.train("bc", 1001, **cosine)
    liar.train("a", 1002, own_round=1, **cosine)
    liar.train("bc", 1002, own_round=1001, **cosine)
    assert "different training settings" in liar.refusal(liar.describe("abc", 1002))


def test_statements_are_the_silos_own(tmp_path: Path) -> None:
    """The coordinator forwards them; it can change, repeat or leave out none."""
    liar = Liar(tmp_path, TRIO)
    liar.train("abc")
    asked = liar.describe("abc")
    good = dict(asked.statements)
    for changes in ({"length": 50.0, "reach": 50.0}, {"samples": 10**6}, {"made": "0" * 32}):
        forged = {**good, "b": replace(good["b"], **changes)}
        assert "not signed by that silo" in liar.refusal(replace(asked, statements=forged))
    swapped = {**good, "b": good["c"], "c": good["b"]}
    assert "not signed by that silo" in liar.refusal(replace(asked, statements=swapped))
    mine = {**good, "a": replace(good["a"], length=9.0)}
    _, refused = liar.sum(replace(asked, statements=mine))
    assert "its statement was changed" in refused["a"] and "not signed" in refused["b"]
    missing = {name: one for name, one in good.items() if name != "c"}
    assert "its own statement" in liar.refusal(replace(asked, statements=missing))
    # Another round's, as if it had trained in this one.
    liar.train("ab", 2)
    liar.stated["r", "c", 2, ""] = good["c"]
    assert "not signed by that silo" in liar.refusal(liar.describe("abc", 2))
    assert liar.refusal(asked) == ""


def test_a_silo_that_trained_again_is_in_no_sum_of_what_it_stated_before(tmp_path: Path) -> None:
    """With one mask over two models, their difference would be plain to see."""
    liar = Liar(tmp_path, TRIO)
    liar.train("abc")
    before = liar.describe("abc")
    assert liar.refusal(before) == ""
    liar.train("a", lr=0.2)
    assert "has trained for that round again since" in liar.sum(before)[1]["a"]
    liar.train("a")
    assert liar.refusal(liar.describe("abc")) == "", "the first outcome once more"


def test_keys_of_others_are_refused(tmp_path: Path) -> None:
    liar = Liar(tmp_path, TRIO)
    liar.train("abc")
    asked = liar.describe("abc").encode()
    good = liar.peers("abc")
    foreign = X25519PrivateKey.generate().public_key().public_bytes_raw()
    for wrong, says in (
        ({"b": replace(good["b"], public=foreign)}, "not signed by that silo for this run"),
        ({"b": replace(good["c"], name="b")}, "is enrolled"),
        ({"b": replace(good["b"], voucher=b"")}, "not signed by the coordinator's CA"),
        ({"b": liar.peers("b", run="other")["b"]}, "not signed by that silo for this run"),
        ({"b": replace(good["b"], identity=b"", signature=b"", voucher=b"")}, "is enrolled"),
        ({"a": replace(good["a"], public=foreign)}, "different key under its own name"),
    ):
        keys = encode_peers(list((good | wrong).values()))
        reply = liar.ask("a", wire.MASKED_SUM, secure_sum=asked, secure_peers=keys)
        assert says in reply.error.reason
    pins = str(liar.nodes["a"]["peers"])
    (other,) = (pin for pin in pins.split(",") if pin.startswith("c "))
    liar.nodes["a"]["peers"] = pins.replace(other, f"c {fingerprint_of_key(good['b'].identity)}")
    assert "only with the silos in its peers" in liar.refusal(liar.describe("abc"))


def test_a_limit_shortens_a_whole_block(tmp_path: Path) -> None:
    """If it shortened one silo alone, two limits would show that silo's update."""
    liar = Liar(tmp_path, TRIO)
    liar.train("abc")
    start = flat(liar.initial)
    asked = liar.describe("abc")
    longest = max(one.length for one in asked.statements.values())
    full = liar.mean(asked) - start
    half = liar.mean(replace(asked, limit=Limit(longest / 2, 1e9))) - start
    np.testing.assert_allclose(half, full / 2, atol=1e-6)


# ---------------------------------------------------------------- what decides a training


@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.nightly)])
def test_two_requests_with_different_outcomes_have_different_digests(count: int) -> None:
    """Over all entries that a silo reads, and some that it does not know; pair by pair."""
    (node,), game = digits("a", **{"min-samples": 1}), Game()
    model = initial(1, node)
    differ, names = 0, set()

    def stated(config: Mapping[str, Any]) -> Statement | None:
        reply = ask(wire.TRAIN, node, model=model, game=game, secure=True, **config)
        return None if reply.has_error() else read_stated(reply)

    for name, *pair in varied_requests(count, seed=count):
        restart_silos()
        one, two = map(stated, pair)
        if one is None or two is None:
            continue
        names.add(name)
        differ += one.made != two.made
        assert one.trained_as != two.trained_as or one.made == two.made, (name, pair)
    assert differ > count / 5 and len(names) > 30


def test_every_entry_is_in_the_digest_but_those_of_one_silo() -> None:
    config: dict[str, Any] = {wire.LR: 0.1, "task.dropout": 0.5, wire.PURPOSE: "x", "new": 1}
    first = training_digest("train", "ab", config, {})
    for key in config:
        assert training_digest("train", "ab", {**config, key: 2}, {}) != first, key
    assert training_digest("train", "ab", {**config, "newer": b""}, {}) != first
    assert training_digest("train", "cd", config, {}) != first
    assert training_digest("train.pfedme", "ab", config, {}) != first
    for name in ("more", *config):
        assert training_digest("train", "ab", config, {name: "ef"}) != first, name
    assert training_digest("train", "ab", config, {}, behind="00") != first
    own = {**config, wire.SEALED: "00", wire.GROUP: 3}
    assert training_digest("train", "ab", own, {}) == first
