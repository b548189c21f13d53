"""What the benchmarks build for themselves."""

from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from PIL import Image

from benchmarks import fedgenp, fedgenp_published
from benchmarks.celeba import CelebA, celeba_data
from benchmarks.fedcollab import published_silos
from coterie import wire
from coterie.tasks import TaskError


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
    assert "identity_CelebA.txt cannot be read" in fedgenp._problem(
        fedgenp.COLUMNS["celeba r=1"], str(tmp_path)
    )
