"""What the benchmarks build for themselves, and that the stored tables are those of the figures."""

import functools
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from PIL import Image

from benchmarks.engine import backdoor, poison, small
from benchmarks.kit import UNBOUNDED, Sampled, Strategy, command, nodes, train
from benchmarks.kit.__main__ import stores
from benchmarks.kit.runs import DEVICE
from benchmarks.kit.store import RESULTS, Store, select
from benchmarks.kit.tables import spread, table, unfinished
from benchmarks.papers import auto
from benchmarks.papers.fedcollab.data import published_silos
from benchmarks.papers.fedcollab.distances import measure_distances
from benchmarks.papers.fedgenp import __main__ as fedgenp
from benchmarks.papers.fedgenp import published as fedgenp_published
from benchmarks.papers.fedgenp.celeba import CelebA, celeba_data
from benchmarks.papers.fedgroup import __main__ as fedgroup
from benchmarks.papers.fedgroup.tables import longest
from benchmarks.papers.hcct import digits
from benchmarks.privacy import attacks, histograms, inversion, noise, projection
from coterie import wire
from coterie.server.runs.record.metrics import Lead
from coterie.server.study import demo
from coterie.server.study.comparison import Row, markdown
from coterie.strategies import FedEnsemble
from coterie.strategies.fedcollab.discriminators import Discriminators
from coterie.tasks import TaskError, load_task
from tests.unit.strategies.test_grown_trees import fewest_summed


@pytest.fixture(autouse=True)
def _level() -> Iterator[None]:
    """A benchmark's command line quietens the log; the tests after these read it."""
    logger = logging.getLogger("coterie")
    before = logger.level
    yield
    logger.setLevel(before)


def test_the_silos_of_fedcollab_s_scripts_are_cut_as_the_paper_says():
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 7000))
    silos = published_silos(labels, 0)
    assert [len(train) for train, _ in silos] == [2100] * 10 + [14] * 10
    assert {len(test) for _, test in silos} == {350}
    held = np.concatenate([part for silo in silos for part in silo])
    assert len(np.unique(held)) == len(held)
    counts = [np.bincount(labels[train], minlength=10).tolist() for train, _ in silos]
    assert counts[0] == [300, 600, 600, 600] + [0] * 6
    assert counts[5] == [0, 600, 600, 600, 300] + [0] * 5
    assert counts[10] == [0] * 5 + [2, 4, 4, 4, 0]
    assert counts[19] == [0] * 6 + [4, 4, 4, 2]
    again, other = published_silos(labels, 0), published_silos(labels, 1)
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(silos, again, strict=True))
    assert not any(np.array_equal(a[0], b[0]) for a, b in zip(silos, other, strict=True))


def test_the_silos_of_fedgenp_s_scripts_are_cut_as_they_cut():
    train = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 600))
    test = np.random.default_rng(1).permutation(np.repeat(np.arange(10), 100))
    few = fedgenp_published.published_silos(train, test, alpha=10, ratio=0.1)
    assert sum(len(rows) for rows, _ in few) == 300, "a label gives what one silo may have: 30"
    skewed = fedgenp_published.published_silos(train, test, alpha=0.1, ratio=1.0)
    assert sum(len(rows) for rows, _ in skewed) == 6000
    for silos in (few, skewed):
        assert len(silos) == 20
        assert min(len(rows) for rows, _ in silos) >= 10
        for part in (0, 1):
            rows = np.concatenate([silo[part] for silo in silos])
            assert len(np.unique(rows)) == len(rows), "two silos share a sample"
        for own, held in silos:
            assert set(train[own]) == set(test[held]), "tested on the labels it trains on"
            assert set(np.bincount(test[held])) <= {0, 5}, "a twentieth of each"
    with pytest.raises(TaskError, match="fewer than 10 samples"):
        fedgenp_published.published_silos(train[:100], test, alpha=1, ratio=1.0)
    again = fedgenp_published.published_silos(train, test, alpha=10, ratio=0.1)
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(few, again, strict=True))


def test_silos_that_keep_their_statistics_train_and_test_with_them():
    seen, trained = [], {"w": np.ones(2), "norm.running_mean": np.full(2, 7.0)}

    def app(message: Message, context: Context) -> Message:
        seen.append(wire.decode_arrays(message.content.array_records[wire.ARRAYS]))
        answer = RecordDict({wire.ARRAYS: wire.encode_arrays(trained, packed=True)})
        return Message(answer, reply_to=message)

    def send(kind: str, node: int) -> float:
        given = {"w": np.zeros(2), "norm.running_mean": np.zeros(2)}
        content = RecordDict({wire.ARRAYS: wire.encode_arrays(given, packed=False)})
        context = Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={})
        silos(Message(content, node, kind), context)
        assert (seen[-1]["w"] == 0).all()
        return float(seen[-1]["norm.running_mean"][0])

    silos = fedgenp_published.OwnStatistics(app)
    assert [send(wire.TRAIN, 1), send(wire.TRAIN, 1), send(wire.EVALUATE, 1)] == [0, 7, 7]
    assert send(wire.TRAIN, 2) == 0, "another silo has none of them"


def test_every_column_of_fedgenp_can_be_named_on_the_command_line(monkeypatch):
    for columns in (["rotated", "5 % α=10 30 steps"], list(fedgenp.COLUMNS)):
        parts = ["--parts", ",".join(columns)] if len(columns) == 2 else []
        monkeypatch.setattr(sys, "argv", ["fedgenp", *parts])
        assert command.read(None, "Doc.", parts=fedgenp.COLUMNS).parts == columns


def celeba(folder: Path, *, people: int = 7, images: int = 5, names: str = "Male Smiling") -> None:
    """A folder in the layout of CelebA: who has an even number smiles, and is bright."""
    root = folder / "celeba"
    (root / "img_align_celeba").mkdir(parents=True)
    rows = [(f"{i:06d}.jpg", i % people) for i in range(people * images)]
    for file, who in rows:
        Image.new("RGB", (20, 24), (255, 255, 255) if who % 2 == 0 else (0, 0, 0)).save(
            root / "img_align_celeba" / file
        )
    (root / "identity_CelebA.txt").write_text("".join(f"{f} {who}\n" for f, who in rows))
    marks = "".join(f"{f} -1 {1 if who % 2 == 0 else -1}\n" for f, who in rows)
    (root / "list_attr_celeba.txt").write_text(f"{len(rows)}\n{names}\n{marks}")


def test_celeba_is_read_where_it_is_there_and_cut_by_celebrity(tmp_path):
    celeba(tmp_path)
    silos = celeba_data(str(tmp_path), 3, 2)
    assert [(len(s.x_train), len(s.x_test)) for s in silos] == [(8, 2)] * 3
    assert silos[0].x_train.shape[1:] == (3, 84, 84)
    for silo in silos:
        for x, y in ((silo.x_train, silo.y_train), (silo.x_test, silo.y_test)):
            assert np.array_equal(y, x.mean(axis=(1, 2, 3)) > 0), "labels go with their images"
    model = CelebA().model()
    assert model(torch.from_numpy(silos[0].x_test)).shape == (2, 2)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"people": 5}, "need 6 with 5 images or more each. There are 5"),
        ({"images": 4}, "There are 0"),
        ({"names": "Male Young"}, "no attribute Smiling"),
    ],
)
def test_a_celeba_that_does_not_do_is_refused(tmp_path, given, found):
    celeba(tmp_path, **given)
    with pytest.raises(TaskError, match=found):
        celeba_data(str(tmp_path), 3, 2)


def test_a_column_whose_data_is_missing_is_named_and_the_others_run(tmp_path):
    assert "identity_CelebA.txt cannot be read" in fedgenp.problem(
        fedgenp.COLUMNS["celeba r=1"], str(tmp_path)
    )


def test_the_papers_silos_beside_auto_are_the_papers_fewer():
    numbers = {
        on: [node["data.silo"] for node in own.nodes("folder", 7)]
        for on, own in auto.PAPERS.items()
    }
    assert numbers["fashion"] == [0, 1, 5, 6, 10, 11, 15, 16], "two of every kind"
    assert numbers["digit"] == list(range(10))
    assert numbers["power-law"] == list(range(20))
    for own in auto.PAPERS.values():
        (first, *_) = own.nodes("folder", 7)
        assert (first["data.data"], first["data.split-seed"]) == ("folder", 7)
        assert sum(p.numel() for p in load_task(str(first["task"])).model().parameters()) < 400_000


def test_who_loses_beside_alone_is_told_from_who_is_unlucky():
    def run(seed, **right):
        packed = {n: auto.packed("1" * r + "0" * (50 - r)) for n, r in right.items()}
        return {"seed": seed, "right": packed}

    rng = np.random.default_rng(1)
    alone = [run(seed, loses=40, lucky=40, wins=30) for seed in range(12)]
    luck = rng.integers(-6, 7, size=12).tolist()
    mine = [run(s, loses=36 - s % 2, lucky=40 + luck[s], wins=40) for s in range(12)]
    mine.append(run(99, loses=0, lucky=0, wins=0))  # alone has no such seed
    found = auto.paired(mine, alone)
    assert found["loses"] == {s: (4 + s % 2, 0) for s in range(12)}
    assert auto.mean_loss(found["loses"].values()) == 4.5
    assert auto.mean_loss(found["wins"].values()) == -10
    assert auto.num_worse({name: found[name] for name in ("loses", "wins")}) == 1
    assert auto.chance_of([(3, 1)]) == 5 / 16, "McNemar: 3 or 4 of 4"
    assert auto.left_out(found) == [4 + s % 2 for s in range(12)]
    once = {"once": {0: (40, 0), 1: (0, 0), 2: (0, 0)}, "always": dict.fromkeys(range(3), (2, 0))}
    assert auto.left_out(once) == [2, 0, 0], "a seed does not choose the silo that it tells of"
    by_chance = auto.largest_by_chance([found])
    assert np.quantile(by_chance, 0.95) < 4.5, "no accident"
    unlucky = dict.fromkeys(map(str, range(20)), found["lucky"])
    spread_of_luck = np.std(luck, ddof=1) / np.sqrt(12)
    assert np.std(auto.largest_by_chance([unlucky])) == pytest.approx(spread_of_luck, rel=0.1), (
        "silos of one run have one luck"
    )


def test_every_test_sample_has_a_bit_also_where_the_first_were_wrong():
    def one(digits):
        return [{"seed": 0, "right": {"a": auto.packed(digits)}}]

    assert len(auto.packed("0" * 400)) == 101
    assert [auto.error_of(auto.packed(d)) for d in ("0001", "1", "00", "10")] == [0.75, 0, 1, 0.5]
    assert auto.paired(one("000110"), one("001010")) == {"a": {0: (1, 1)}}
    with pytest.raises(ValueError, match="a: of two numbers of test samples in seed 0"):
        auto.paired(one("0110"), one("00110"))


@functools.cache
def all_stores():
    """All stores; to find them imports all benchmarks."""
    return {store.name: store for store in stores()}


@functools.cache
def table_of(name):
    return all_stores()[name].text()


@pytest.mark.parametrize("name", sorted({file.stem for file in RESULTS.glob("*.*")}))
def test_a_stored_table_is_what_the_stored_figures_give(name):
    if (RESULTS / f"{name}.png").exists() and name not in all_stores():
        assert name == "fedgenp_figure" or any(
            f"({name}.png)" in table_of(one) for one in all_stores()
        )
        return
    store = all_stores()[name]
    assert (RESULTS / f"{name}.md").read_text("utf-8") == table_of(name)
    entries = store.entries
    cells = [[entry.get(key) for key in store.keys] for entry in entries]
    assert all(cell not in cells[:i] for i, cell in enumerate(cells)), "measured twice"
    assert store.file.read_text("utf-8") == store.json(), "a line per measurement"


@pytest.mark.parametrize("file", sorted((RESULTS / "compare").glob("*.json")), ids=lambda f: f.stem)
def test_a_stored_comparison_is_what_its_figures_give(file):
    stored = json.loads(file.read_text("utf-8"))["table"]
    rows = [
        Row(**{k.replace("-", "_"): np.nan if v is None else v for k, v in row.items()})
        for row in stored
    ]
    assert markdown(rows, Lead()) in file.with_suffix(".md").read_text("utf-8")


def test_what_is_not_finished_is_named_by_how_much_of_it_there_is():
    done = {"FedAvg": 3, "IFCA": 0, "{1,2}, {3}": 1, "FLSC": 0, "HCCT": 5}
    assert unfinished(done) == (
        "**Not finished**, runs of full length: 1 of 3: {1,2}, {3}. 0 of 3: IFCA; FLSC."
    )
    assert not unfinished({"FedAvg": 3, "HCCT": 5})


def test_a_run_that_was_made_again_with_more_rounds_replaces_the_shorter_one():
    short, other, long = (
        {"row": "a", "method": "IFCA", "seed": seed, "pretrain_epochs": 1, "rounds": rounds}
        for seed, rounds in ((0, 150), (1, 150), (0, 300))
    )
    assert longest([short, other, long]) == [other, long]


def tiny(folder: Path) -> Store:
    """A store of squares."""

    def document(entries):
        return "".join(f"{entry['number']}: {entry['square']}\n" for entry in entries)

    return Store("squares", document, keys=("number",), folder=folder)


def test_a_benchmark_that_was_interrupted_goes_on_where_it_stood(tmp_path):
    asked = []

    def square(number):
        asked.append(number)
        if number == 2 and asked.count(2) == 1:
            raise KeyboardInterrupt
        return {"square": number**2} if number != 1 else None

    cells = [{"number": n} for n in range(4)]
    with pytest.raises(KeyboardInterrupt):
        tiny(tmp_path).fill(cells, square)
    assert tiny(tmp_path).entries == [{"number": 0, "square": 0}]
    tiny(tmp_path).fill(cells, square)
    assert asked == [0, 1, 2, 1, 2, 3], "1 has no result and is asked for again; 0 is not"
    assert (tmp_path / "squares.md").read_text() == "0: 0\n2: 4\n3: 9\n"
    store = tiny(tmp_path)
    store.put({"number": 0, "square": 100})
    assert [e["square"] for e in tiny(tmp_path).entries] == [100, 4, 9], "in place of the old"


def test_several_processes_measure_what_lacks_and_what_holds_no_more_is_forgotten(tmp_path):
    cells = [{"number": n, "square": n**2} for n in range(4)]
    store = tiny(tmp_path)
    store.put({"number": 1, "square": 100})
    store.fill(cells, dict, workers=2)
    assert sorted(e["square"] for e in tiny(tmp_path).entries) == [0, 4, 9, 100]
    store.keep(lambda entry: entry["square"] < 10)
    assert sorted(e["number"] for e in tiny(tmp_path).entries) == [0, 2, 3]


def test_a_run_of_fewer_rounds_than_asked_for_is_not_enough(tmp_path):
    store = tiny(tmp_path)
    store.put({"number": 1, "square": 1, "rounds": 10})
    assert store.has({"number": 1, "rounds": 10})
    assert not store.has({"number": 1, "rounds": 11})
    assert not store.has({"number": 2, "rounds": 1})
    assert not store.has({"number": 1, "rounds": 10, "rules": "of today"}), "made by earlier rules"


def test_tables_only_are_made_without_measuring(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["digits", "--table-only", "--results", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        command.read(all_stores()["hcct_digits"], "Doc.", data=True)
    assert end.value.code == 0
    assert (tmp_path / "hcct_digits.md").exists()
    monkeypatch.setattr(sys, "argv", ["digits", "--parts", "b,c"])
    with pytest.raises(SystemExit):
        command.read(all_stores()["hcct_digits"], "Doc.", parts=("a", "b"))
    assert "there is no 'c'. There are: a, b." in capsys.readouterr().err


def test_silos_train_on_the_device_named_and_what_is_stored_names_the_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"the GPU of {device}")
    store = Store("made", lambda entries: "", keys=("seed",), folder=tmp_path)
    for chosen, stored in [("cuda:0", {"device": "the GPU of cuda:0"}), ("cpu", {})]:
        monkeypatch.setattr(sys, "argv", ["benchmark", "--data", str(tmp_path), "--device", chosen])
        monkeypatch.setenv(DEVICE, "")
        command.read(None, None, data=True)
        assert {node["device"] for node in nodes("digits", ["a", "b"], {})} == {chosen}
        store.put({"seed": 1})
        assert store.entries == [{"seed": 1, **stored}]


@pytest.mark.parametrize(
    ("gpus", "written"),
    [("--", "`"), ("HH", " --device cuda` (H)"), ("H-", " --device cuda` (1 of 2 runs: H)")],
)
def test_what_to_type_names_the_gpu_that_runs_were_made_on(gpus, written):
    runs = [{"seed": 0, "rounds": 9} | ({"device": "H"} if gpu == "H" else {}) for gpu in gpus]
    start = '`python -m benchmarks.papers.hcct --data FOLDER --parts "a" --seeds 1'
    assert command.typed("hcct", "a", runs, rounds=9) == start + written


def test_cells_and_spreads_are_written_in_one_way():
    assert table(("", "a"), [["x", "1"]]) == ["| | a |", "|---|---|", "| x | 1 |"]
    assert spread([1.0, 3.0]) == "2.00 ± 1.41"
    assert spread([1.0, np.nan], 1, sign="+") == "+1.0"
    assert spread([np.nan]) == "–"


@pytest.mark.nightly
def test_a_stored_figure_is_computed_again():
    found = digits.measure("alone", 0)
    (stored,) = select(all_stores()["hcct_digits"].entries, setting="alone", seed=0)
    assert found["error"] == pytest.approx(stored["error"], abs=0.02), "but for other rounding"
    assert found["changes"] == stored["changes"] == 0


def test_fedcollab_s_benchmark_measures_the_distances_of_silos():
    nodes = [digits.node(spec) for spec in demo.silos(0)[:3]]
    found = measure_distances(nodes, Discriminators(rounds=1), seed=0)
    assert (found.rounds, len(found.sizes)) == (1, 3)
    assert (found.distances[np.triu_indices(3, 1)] >= 0).all() and found.num_bytes > 0


def test_a_strategy_that_a_benchmark_builds_names_itself_and_has_the_keys_bounds():
    made: list[Strategy] = []

    def build(config, options):
        base = Strategy(Sampled(active=3, draw=0, factor=lambda number: 1.0))
        made.append(FedEnsemble(base=base, **options))
        return made[0]

    keys = {**UNBOUNDED, "rounds": 1}
    done = train([digits.node(spec) for spec in demo.silos(0)[:3]], keys, build=build)
    answered = [r.details.get("ensemble", {}).get("evaluation", {}) for r in done.result.rounds]
    assert max(map(len, answered)) == 3, "silos answer FedEnsemble's messages only in its runs"
    assert (made[0].influence.max_share, made[0].influence.clip_updates) == (1, 0)


@pytest.mark.nightly
def test_fedgroup_s_benchmark_trains_silos_that_need_no_files():
    measured = fedgroup.measure("")
    row = {"row": "synthetic-mclr", "seed": 0, "rounds": 1, "pretrain_epochs": 1}
    found = measured(method="FG-EDC", **row)
    assert len(found["groups"]) == 5 and found["best so far"][-1][1] > 50


@pytest.mark.parametrize("local", [inversion.Local(4, 4, 1), inversion.Local(8, 4, 2)])
def test_the_attacker_s_training_is_the_product_s(local):
    now = inversion.observe("digits", local, silos=2, model="")
    x = torch.from_numpy(now.true).float()[:, :, None].split(local.samples, dim=1)
    with torch.no_grad():
        pairs = zip(now.trainings, x, strict=True)
        again = torch.stack([training.update(part) for training, part in pairs]).mean(0)
    torch.testing.assert_close(again, now.seen, rtol=1e-3, atol=1e-5)


def test_the_sample_of_a_linear_layer_s_update_is_read_from_it_and_with_noise_it_is_not():
    local = inversion.Local(1, 1, 1)
    now = inversion.observe("mclr", local, silos=1, model="")
    (rows, *_) = attacks.rows_of(now.seen, now.net, pixels=64)
    np.testing.assert_allclose(rows, np.tile(now.true[0], (len(rows), 1, 1)), atol=1e-2)
    noisy = inversion._private(now, local, epsilon=8.0)
    found = attacks.rows_of(noisy.seen, now.net, pixels=64)
    rest = now.rest.x[:199, 0].double().numpy()
    pairs = zip(now.true, found, strict=True)
    hits = [attacks.judge(true, images, rest[None]).recognised[0] for true, images in pairs]
    assert np.mean(hits) < 0.1


def test_a_model_made_for_it_keeps_samples_apart_that_an_ordinary_one_mixes():
    entry = inversion.measure("plain, hostile model", "mlp-128", 32, 32, 1)
    assert entry["recognised"] > 50


def test_recognising_is_no_better_than_chance_where_nothing_is_known():
    rng = np.random.default_rng(0)
    hits = []
    for _ in range(100):
        true, found, others = rng.random((4, 8, 8)), rng.random((9, 8, 8)), rng.random((4, 9, 8, 8))
        hits.append(attacks.judge(true, found, others).recognised.mean())
        assert attacks.judge(true, true[::-1], others).recognised.all()
    assert np.mean(hits) == pytest.approx(0.1, abs=0.05)


def test_the_noise_of_a_budget_is_that_of_the_gaussian_mechanism():
    """δ = 1e-5 at ε = 1 takes σ = 3.730 (Balle and Wang 2018, Fig. 1's analytic mechanism)."""
    assert noise.sigma_for(1.0, delta=1e-5, steps=1) == pytest.approx(3.730, abs=2e-3)
    assert noise.sigma_for(1.0, delta=1e-5, steps=4) == pytest.approx(7.461, abs=4e-3)


def test_a_projection_follows_from_few_random_sums_and_their_sketches():
    seen = np.random.default_rng(0).normal(size=(120, 400))
    view = attacks.sketch_of(400, 40, seed=0)
    true = view(torch.eye(400, dtype=torch.float64)).numpy()
    np.testing.assert_allclose(projection.solve(seen, seen @ true), true, atol=1e-6)
    assert not np.allclose(projection.solve(seen[:10], seen[:10] @ true), true, atol=0.5)


def test_no_histogram_is_over_few_rows_and_differences_of_them_show_one(monkeypatch):
    x, seen, ask = histograms.patients()[:80, :4], [], histograms.asked

    def asked(*about):
        seen.append(ask(*about))
        return seen[-1]

    monkeypatch.setattr(histograms, "asked", asked)
    monkeypatch.setattr(histograms, "TARGETS", 3)
    monkeypatch.setattr(histograms, "DEPTH", 5)
    assert histograms.one_by_one(x, 5).mean() < 0.5
    assert histograms.by_differences(x, 5).all(axis=1).mean() > 0.3
    columns = [one.reshape(len(one) * 4, -1, 3) for one in seen]
    assert 5 - 1e-9 < min(map(fewest_summed, columns)) < 10


def test_every_attack_that_costs_more_than_a_point_is_named_with_its_reason():
    """In docs/evidence/attacks.md: strategies have rows, with the figures that are stored."""
    text = (Path(__file__).parents[2] / "docs/evidence/attacks.md").read_text("utf-8")
    (part,) = (p for p in text.split("\n## ") if p.startswith("What one attacker still achieves"))
    rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| `")]
    named = {
        (own.strip("`"), kinds, attack): figures
        for own, kinds, cell, _ in rows
        for attack, figures in (one.split(": ") for one in cell.split("; "))
    }
    assert named == {
        key: f"{before:.1f} → {after:.1f}"
        for key, (before, after) in poison.above(poison.STORE.entries).items()
    }
    assert all(len(reason) > 20 for *_, reason in rows)


def test_an_attack_is_compared_with_runs_of_the_same_seeds():
    own = {"strategy": "hcct", "kinds": 2, "bounded": True}
    found = [
        {**own, "attack": attack, "seed": seed, "error": error}
        for attack, errors in (
            ("none", (5.0, 9.0)),
            ("random", (5.5, 10.9)),
            ("labels moved", (6,)),
        )
        for seed, error in enumerate(errors)
    ]
    assert poison.above(found) == {("hcct", "two kinds", "random"): (7.0, 8.2)}


def test_half_of_one_silo_s_images_are_marked_and_the_others_are_as_they_were() -> None:
    bad, good = (backdoor.silos(3, attack, 0)[-1] for attack in ("marked", "none"))
    options = [
        {k.removeprefix("data."): v for k, v in node.items() if k.startswith("data.")}
        for node in (bad, good)
    ]
    one, other = (backdoor.Marked().load(own) for own in options)
    assert (one.y_train[:50] == backdoor.TARGET).all() and (
        one.x_train[:50, 0, -2:, -2:] == 1
    ).all()
    np.testing.assert_array_equal(one.x_train[50:], other.x_train[50:])
    np.testing.assert_array_equal(one.x_train[:50, :, :-2], other.x_train[:50, :, :-2])
    np.testing.assert_array_equal(one.x_test, other.x_test)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", small.MEASURES)
def test_no_ratio_is_a_third_worse_than_the_stored_one(what: str) -> None:
    (stored,) = select(small.STORE.entries, what=what)
    (found,) = small.measure([what])
    assert found["ratio"] <= 4 / 3 * stored["ratio"]
