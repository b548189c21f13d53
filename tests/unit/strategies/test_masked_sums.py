"""Exact sums in secure runs: equal to plain ones, and nobody's own numbers can be computed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from flwr.app import Error, Message

from coterie import wire
from coterie.client.ledger import read
from coterie.features.secure import memory
from coterie.features.secure.protocol import decode_peers, encode_peers
from coterie.features.secure.together import Member, Together, decode_together, planned
from coterie.features.sums.contract import (
    Answer,
    Masked,
    Question,
    State,
    added,
    encode_question,
    settings_text,
    unmasked,
)
from coterie.features.sums.regression.silo import Regressing
from coterie.features.sums.regression.survival import family_of
from coterie.features.sums.rows import Rows
from coterie.server.report.regression import again
from coterie.server.runs.contribution import SUMS as FILE
from coterie.server.runs.fitted import Fitted
from coterie.strategies.errors import FederationError
from coterie.wire.fixed import HISTOGRAMS, SUMS, Fixed, subtract, total_of
from tests.kit import CutGrid, Node, Tap, ask, interrupted, reason, restart_silos
from tests.unit.server import test_cox, test_regression
from tests.unit.server.test_regression import TABLE, anyway, regress, sites

ALL = "abcd"


@pytest.mark.parametrize("how", [SUMS, HISTOGRAMS])
def test_masked_numbers_add_up_exactly_and_what_would_overflow_is_refused(how: Fixed) -> None:
    draw = np.random.default_rng(0)
    sizes = 10.0 ** draw.uniform(-12, math.log10(how.largest), (5, 400))
    numbers = draw.choice([-1, 1], sizes.shape) * sizes
    numbers[:, 0], numbers[:, 1] = how.largest, -how.largest
    numbers[:, 2] = 1, -1, 2**-12, -3, 3
    parts = [how.encode(own) for own in numbers]
    mask = draw.integers(0, 2**64, parts[0].shape, np.uint64)
    hidden = [total_of([parts[0], mask]), *parts[1:]]
    total = total_of(hidden)
    subtract(total, mask)
    exact = np.array([math.fsum(own) for own in numbers.T])
    np.testing.assert_allclose(how.decode(total), exact, rtol=1e-15, atol=5 * 2.0**-how.places)
    assert how.decode(total)[2] == 2**-12, "counts and halves are exact"
    for wrong in (np.nan, np.inf, -1.01 * how.largest):
        with pytest.raises(ValueError, match="not finite, or above"):
            how.encode(np.array([0.0, wrong]))


def steps(silos: Mapping[str, Rows], settings: dict[str, Any], *, masked: bool) -> State:
    """Fit a model, with sums of numbers as they are or as they are when masks have cancelled."""
    family, side, state = family_of(settings), Regressing(), State()
    while not state.done:
        question = Question("regression", settings, family.asked(settings, state))
        answers = {n: side.answer(question, rows, 5, anyway) for n, rows in silos.items()}
        words = answers[min(answers)].words
        total = added(answers)
        if masked:
            parts = [Masked(SUMS.encode(in_one_row(one)), words) for one in answers.values()]
            total = unmasked(family, question, parts, sum(map(len, silos.values())))
        state = family.next(settings, replace(state, words=words), total)
    return state


def in_one_row(answer: Answer) -> Any:
    return np.concatenate([array.reshape(-1) for _, array in sorted(answer.arrays.items())])


@pytest.mark.parametrize("model", ["linear", "logistic", "poisson", "cox", "survival"])
def test_every_model_is_the_same_to_many_digits(model: str) -> None:
    timed = model in ("cox", "survival")
    settings: dict[str, Any] = {"model": model, "columns": [], "target": "", "at": [20]}
    silos = {
        f"s{seed}": test_cox.rows_of(seed, unit=1e-7)
        if timed
        else test_regression.rows_of(seed, model, unit=1e-7)
        for seed in range(3)
    }
    plain, secure = (steps(silos, settings, masked=how).arrays for how in (False, True))
    assert plain.keys() == secure.keys()
    for name, array in plain.items():
        if model == "survival":
            assert (secure[name] == array).all()
        else:
            np.testing.assert_allclose(secure[name], array, rtol=1e-8, atol=1e-12, err_msg=name)


# ---------------------------------------------------------------- who is summed together


def members(**minimums: int) -> dict[str, Member]:
    return {
        n: Member(least, {"heavy": 10**9, "large": 450, "small": 20}.get(n, 100))
        for n, least in minimums.items()
    }


PLANS: dict[str, tuple[dict[str, int], dict[str, str], str]] = {
    "all are free": ({"a": 2, "b": 2, "c": 2, "d": 2, "e": 2}, {}, "ab cde"),
    "one wants more": ({"a": 2, "b": 2, "c": 3, "d": 2}, {}, "abcd"),
    "one wants too many": ({"a": 2, "b": 2, "c": 9}, {}, "ab"),
    "one is alone": ({"a": 2}, {}, ""),
    "blocks stay": ({"a": 2, "b": 2, "c": 2, "d": 2}, dict.fromkeys("ad", "ad"), "ad bc"),
    "one of a block is away": ({"a": 2, "b": 2, "c": 2}, dict.fromkeys("cd", "cd"), "ab"),
    "a newcomer waits": ({"a": 2, "b": 2, "c": 2}, dict.fromkeys("ab", "ab"), "ab"),
    "a lie about another": ({"a": 2, "b": 2, "c": 2}, {"a": "ab", "b": "ab", "c": "bc"}, "ab"),
    "a lie about a free one": ({"a": 3, "b": 3, "c": 3, "d": 2}, {"d": "ad"}, "abc"),
    "a lie that would bind another": ({"a": 2, "b": 2, "c": 2, "d": 2}, {"d": "ad"}, "abc"),
    "after a crash only one knows": ({"a": 2, "b": 2, "c": 2}, {"b": "abc"}, "abc"),
    "after a crash most know": (
        {"a": 2, "b": 2, "c": 2, "d": 2, "e": 2},
        dict.fromkeys("ab", "abc"),
        "abc de",
    ),
    "two blocks share a silo": (
        {"a": 2, "b": 2, "c": 2, "d": 2, "e": 2},
        {"a": "abc", "b": "abc", "d": "cde", "e": "cde"},
        "abc",
    ),
    "a large silo's block is larger": (
        {"a": 2, "b": 2, "c": 2, "large": 2, "x": 2},
        {},
        "a/b/large c/x",
    ),
    "a small silo's block is larger": ({"a": 2, "b": 2, "c": 2, "small": 2}, {}, "a/b/c/small"),
    "a small silo joins one block": (
        {"a": 2, "b": 2, "c": 2, "d": 2, "e": 2, "small": 2},
        {},
        "a/b c/d/e/small",
    ),
    "one states far too many rows": ({"a": 2, "b": 2, "heavy": 2}, {}, "ab"),
}


@pytest.mark.parametrize("what", PLANS)
def test_silos_are_summed_in_whole_blocks(what: str) -> None:
    minimums, bound, blocks = PLANS[what]
    found = planned(members(**minimums), {name: tuple(block) for name, block in bound.items()})
    assert found.blocks == tuple(
        tuple(block.split("/") if "/" in block else block) for block in blocks.split()
    )
    assert not found.members or not found.objection()
    assert not found.members or decode_together(found.encode()) == found


@pytest.mark.parametrize(
    "text",
    [
        *(None, "", "[", "3", "[]", "[[]]", '[[["a",2,9]]]', '[[["a",2,9],["a",2,9]]]'),
        *('[[["b",2,9],["a",2,9]]]', '[[["a",0,9],["b",2,9]]]', '[[["a",2.5,9],["b",2,9]]]'),
        *('[[["a",2,9],["b",2]]]', '[[["a",2,9],["../b",2,9]]]', "[" * 100_000),
    ],
)
def test_a_description_that_is_none_is_refused(text: object) -> None:
    with pytest.raises(wire.WireError):
        decode_together(text)


# ---------------------------------------------------------------- runs


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    restart_silos()
    yield sites(tmp_path / "sites", a={"secure": "required"})
    restart_silos()


def coefficients(found: Fitted) -> Any:
    return found.groups[0].state.arrays["coefficients"]


def test_a_secure_regression_is_the_plain_one_and_goes_on_after_a_crash(
    nodes: list[Node], tmp_path: Path
) -> None:
    grid = Tap(nodes)
    found = regress(tmp_path / "secure", grid, secure=True)
    assert found.groups[0].members == tuple(ALL) and not found.groups[0].left_out
    assert again(found) == "coterie regress logistic --task heart --secure"
    sums = [m for m in grid.got if m.metadata.message_type == wire.TRAIN_SUMS]
    assert {name for m in sums for name in m.content.array_records} == {wire.MASKED}
    numbers = [wire.decode_arrays(m.content[wire.MASKED])[wire.MASKED] for m in sums]
    assert min(float(np.log2(own.mean())) for own in numbers) > 30, "they look drawn evenly"
    plain = [node | {"secure": ""} for node in nodes]
    restart_silos()
    np.testing.assert_allclose(
        coefficients(regress(tmp_path / "plain", plain)), coefficients(found), rtol=1e-9
    )
    entry = next(one for one in read(tmp_path / "sites" / "b") if "summed" in one)
    assert entry["summed"]["blocks"] == [["a", "b"], ["c", "d"]]
    restart_silos()
    cut = CutGrid(nodes, at=(wire.TRAIN_SUMS, 4), answered=3)
    interrupted(tmp_path / "cut", cut, play=regress, secure=True)
    regress(tmp_path / "cut", nodes, secure=True, resume="cut", runs_dir=str(tmp_path), run_id=2)
    assert (tmp_path / "cut" / FILE).read_bytes() == (tmp_path / "secure" / FILE).read_bytes()


def test_without_a_lost_silo_and_its_block_the_fit_is_that_of_the_others(
    nodes: list[Node], tmp_path: Path
) -> None:
    asked = {"count": 0}

    def change(silo: str, reply: Message) -> Message:
        if silo == "d" and wire.MASKED in reply.content:
            asked["count"] += 1
            if asked["count"] > 2:
                short = {wire.MASKED: np.zeros(3, np.uint32)}
                reply.content[wire.MASKED] = wire.encode_arrays(short, packed=True)
        return reply

    found = regress(tmp_path / "lost", Tap(nodes, change=change), secure=True)
    assert found.groups[0].members == ("a", "b") and set(found.groups[0].left_out) == {"c", "d"}
    assert "uint32" in found.groups[0].left_out["d"]
    assert "it waits for d: " in found.groups[0].left_out["c"]
    restart_silos()
    again = regress(tmp_path / "again", nodes[:3], secure=True)  # c is bound to d in all runs
    assert again.groups[0].members == ("a", "b")
    restart_silos()
    plain = regress(tmp_path / "plain", [node | {"secure": ""} for node in nodes[:2]])
    np.testing.assert_allclose(coefficients(plain), coefficients(found), rtol=1e-9)


def test_after_half_a_step_all_silos_are_asked_again_under_other_masks(
    nodes: list[Node], tmp_path: Path
) -> None:
    asked = {"count": 0}

    def change(silo: str, reply: Message) -> Message:
        if silo == "d" and wire.MASKED in reply.content:
            asked["count"] += 1
            if asked["count"] == 4:  # after the first step
                reply.__dict__["_error"] = Error(wire.TOO_FAR, "few rows would outweigh")
                reply.__dict__["_content"] = None
        return reply

    found = regress(tmp_path / "half", Tap(nodes, change=change), secure=True)
    assert found.groups[0].members == tuple(ALL) and not found.groups[0].left_out
    restart_silos()
    whole = regress(tmp_path / "whole", nodes, secure=True)
    assert found.fits.exchanges > whole.fits.exchanges
    np.testing.assert_allclose(coefficients(found), coefficients(whole), rtol=1e-6)


def test_a_silo_that_lies_ends_only_the_fit_of_its_group(nodes: list[Node], tmp_path: Path) -> None:
    def change(silo: str, reply: Message) -> Message:
        if silo == "d" and wire.MASKED in reply.content:
            sent = wire.decode_arrays(reply.content[wire.MASKED])[wire.MASKED]
            reply.content[wire.MASKED] = wire.encode_arrays({wire.MASKED: sent + 7}, packed=True)
        return reply

    with pytest.raises(FederationError, match="the sum over its silos cannot be"):
        regress(tmp_path / "lie", Tap(nodes, change=change), secure=True)
    with pytest.raises(FederationError, match="each-alone = true fits every silo alone"):
        regress(tmp_path / "alone", nodes, secure=True, each_alone=True)


# ---------------------------------------------------------------- a hostile coordinator


class Liar:
    """Asks silos by hand, with any description of a sum."""

    rows = 120
    """Training rows of each silo: the others are for tests."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = {str(node["name"]): node for node in nodes}

    def peers(self, names: str, run: str) -> str:
        found = []
        for name in names:
            reply = ask(wire.SECURE_KEY, self.nodes[name], strategy="regression", task="heart",
                        run=run)  # fmt: skip
            found += decode_peers(reply.content[wire.CONFIG][wire.PEERS]).values()
        return encode_peers(found)

    def ask(
        self, name: str, *blocks: str, run: str = "r", keys: str = "", samples: int = 0,
        own: int = 0, columns: tuple[str, ...] = ("age",), **more: Any,
    ) -> Message:  # fmt: skip
        names = "".join(blocks)
        settings = {"model": "logistic", "columns": list(columns), "target": ""}
        stated = {n: Member(2, samples or self.rows) for n in sorted(names)} | {
            n: Member(2, own or self.rows) for n in name if n in names
        }
        entries = {
            **{"kind": wire.TRAIN_SUMS, "strategy": "regression", "task": "heart"},
            **{"run": run, "secure": True},
            **{wire.SUMS_OF: settings_text(settings), "purpose": "all", "server-round": 1},
            wire.GROUP_SIZE: len(names),
            wire.SUM: Together(stated, tuple(tuple(block) for block in blocks)).encode(),
            wire.PEERS: self.peers(keys or names, run),
        }
        entries["records"] = encode_question(Question("regression", settings))
        return ask(node=self.nodes[name], **{**entries, **more})


ATTACKS: dict[str, tuple[tuple[str, ...], dict[str, Any], str]] = {
    "one silo less": (("bc",), {}, "only together with all of b, c, d"),
    "one silo less in another run": (("bc",), {"run": "s", "columns": ("dose",)}, "only together"),
    "one silo instead": (("abc",), {}, "only together with all of b, c, d"),
    "a smaller block": (("bc", "ad"), {}, "only together with all of b, c, d"),
    "a block of one": (("b", "cd"), {}, "a block of 1"),
    "without it": (("acd",), {}, "does not include it"),
    "keys of others": (("bcd",), {"keys": "abc"}, "keys of exactly the silos"),
    "another size": (("bcd",), {"group_size": 9}, "keys of exactly the silos"),
    "hardly any others": (("bcd",), {"samples": 1}, "more than 4 times as many rows"),
    "itself with other rows": (("bcd",), {"own": 99}, "samples=99); it is Member"),
    "no description": (("bcd",), {wire.SUM: None}, "cannot be read"),
    "no masks": (("bcd",), {"secure": None}, "only in secure runs"),
}


@pytest.mark.parametrize("what", ATTACKS)
def test_what_would_show_one_silos_sums_is_refused(what: str, tmp_path: Path) -> None:
    restart_silos()
    liar = Liar(sites(tmp_path / "sites", b={"secure": "required"}))
    assert not liar.ask("b", "bcd").has_error()
    blocks, entries, why = ATTACKS[what]
    if "run" in entries:
        restart_silos()
    assert why in reason(liar.ask("b", *blocks, **entries))
    assert not liar.ask("b", "bcd", run="s").has_error(), "with its block it goes on"


def test_a_column_that_few_rows_have_is_in_no_sum(tmp_path: Path) -> None:
    restart_silos()
    nodes = sites(tmp_path / "sites")
    file = Path(str(nodes[1]["data.data"]))
    head, *rows = [line.split(",") for line in file.read_text().splitlines()]
    rare = [[age, dose if n < 45 else "", sex, ill] for n, (age, dose, sex, ill) in enumerate(rows)]
    file.write_text("\n".join(",".join(row) for row in [head, *rare]))
    liar = Liar(nodes)
    assert "fewer than 1 in 4" in reason(liar.ask("b", "bcd", columns=("dose",)))
    assert "only together with all of b, c, d" in reason(liar.ask("b", "abc")), "as the others are"
    assert not liar.ask("b", "bcd").has_error()
    assert len(list((tmp_path / "sites" / "b" / "answered").glob("sums-*/*.npy"))) == 1


def test_a_mask_hides_one_answer_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    restart_silos()
    nodes = sites(tmp_path / "sites")
    file = Path(str(nodes[1]["data.data"]))
    nodes[1]["data.test-data"] = str(nodes[0]["data.data"])
    liar, lines = Liar(nodes), file.read_text().splitlines()
    liar.rows = 150
    with monkeypatch.context() as full:
        full.setattr(memory, "append_line", Mock(side_effect=OSError(28, "no room", "/of/b")))
        said = reason(liar.ask("b", "bcd"))
        assert "part in the sum: no room." in said and "/of/b" not in said
    first, again = (sent_by(liar.ask("b", "bcd")) for _ in "12")
    other = sent_by(liar.ask("b", "bcd", columns=("dose",)))
    assert (first == again).all() and not (first[: len(other)] == other).any()
    restart_silos()
    file.write_text("\n".join([*lines[:-40], *lines[1:41]]))
    assert not (sent_by(liar.ask("b", "bcd", run="s")) == first).any()
    with monkeypatch.context() as broken:
        broken.setattr(memory, "json_lines", Mock(side_effect=OSError))
        assert "OSError" in reason(liar.ask("b", "bcd"), wire.FAILED)
    assert "under the same mask" in reason(liar.ask("b", "bcd"))


def sent_by(reply: Message) -> Any:
    assert not reply.has_error(), reply.error.reason
    json.loads(str(reply.content[wire.CONFIG]["words"]))
    return wire.decode_arrays(reply.content[wire.MASKED])[wire.MASKED]


AGE = TABLE.replace('"ill"', '{kind = "number", columns = ["age"]}').replace('"age", ', "")
AGE = AGE.replace('classes = ["no", "yes"]', "").replace('"mclr"', '"trees-2x2"')


def test_numbers_too_large_for_the_format_are_refused_by_name(tmp_path: Path) -> None:
    restart_silos()
    liar = Liar([node | {"sums": "trees"} for node in sites(tmp_path / "sites")])
    (tmp_path / "sites" / "heart.toml").write_text(AGE)
    far = wire.encode_arrays({"base": np.full(1, 1e20, np.float32)}, packed=True)
    more = {"kind": wire.EVALUATE_HISTOGRAMS, "strategy": "trees", "records": {wire.ARRAYS: far}}
    why = "array 'sums' has numbers that are not finite, or above 1e+15"
    assert why in reason(liar.ask("b", "bcd", **more))
