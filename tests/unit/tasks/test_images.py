"""Image tasks: reading folders, shares of silos, normalisation, the papers' networks."""

from __future__ import annotations

import gzip
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from coterie.tasks import TaskError, load_task
from coterie.tasks.images.image_files import read_npz

SHAPES = {
    "mnist": (28, 28),
    "fashion-mnist": (28, 28),
    "emnist-letters": (28, 28),
    "cifar10": (32, 32, 3),
}
NPZ = {
    "mnist": "mnist.npz",
    "fashion-mnist": "fashion_mnist.npz",
    "emnist-letters": "emnist_letters.npz",
    "cifar10": "cifar10.npz",
}
IDX = {
    "mnist": ("MNIST/raw", "train", "t10k"),
    "fashion-mnist": ("FashionMNIST/raw", "train", "t10k"),
    "emnist-letters": ("EMNIST/raw", "emnist-letters-train", "emnist-letters-test"),
}


def some_images(count, shape, *, num_classes=10, first=0, seed=0):
    """Images whose first pixel is their number, and labels in turn."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 256, size=(count, *shape)).astype(np.uint8)
    x.reshape(count, -1)[:, 0] = np.arange(count) % 256
    return x, np.arange(count, dtype=np.int64) % num_classes + first


def arrays(task, *, train=200, test=100):
    letters = {"num_classes": 26, "first": 1} if task == "emnist-letters" else {}
    x_train, y_train = some_images(train, SHAPES[task], **letters)
    x_test, y_test = some_images(test, SHAPES[task], seed=1, **letters)
    return {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}


def write_npz(folder, task="mnist", **changes):
    np.savez(folder / NPZ[task], **(arrays(task) | changes))
    return {"data": str(folder)}


def idx(array):
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    return head + array.astype(np.uint8).tobytes()


def write_idx(folder, task="mnist", *, packed=True):
    place, *names = IDX[task]
    (folder / place).mkdir(parents=True)
    data = arrays(task)
    for name, part in zip(names, ("train", "test"), strict=True):
        images = data[f"x_{part}"]
        if task == "emnist-letters":
            images = images.transpose(0, 2, 1)
        for kind, array in (("images-idx3", images), ("labels-idx1", data[f"y_{part}"])):
            content, file = idx(array), folder / place / f"{name}-{kind}-ubyte"
            if packed:
                file.with_name(file.name + ".gz").write_bytes(gzip.compress(content, 1))
            else:
                file.write_bytes(content)
    return {"data": str(folder)}


def write_batches(folder, task="cifar10"):
    place = folder / "cifar-10-batches-py"
    place.mkdir()
    data = arrays(task)
    for number in range(6):
        part, rows = ("test", slice(None)) if number == 0 else ("train", slice(number - 1, None, 5))
        images = data[f"x_{part}"][rows].transpose(0, 3, 1, 2).reshape(-1, 3072)
        batch = {b"data": images, b"labels": data[f"y_{part}"][rows].tolist()}
        name = "test_batch" if number == 0 else f"data_batch_{number}"
        (place / name).write_bytes(pickle.dumps(batch, protocol=2))
    return {"data": str(folder)}


def same(one, other):
    return all(
        np.array_equal(getattr(one, key), getattr(other, key))
        for key in ("x_train", "y_train", "x_test", "y_test")
    )


# --- reading folders


@pytest.mark.parametrize("task", SHAPES)
def test_a_folder_is_this_silos_data(tmp_path, task):
    data = load_task(task).load(write_npz(tmp_path, task))
    shape = (1, 28, 28) if task != "cifar10" else (3, 32, 32)
    assert data.x_train.shape == (200, *shape)
    assert data.x_test.shape == (100, *shape)
    assert data.x_train.dtype == np.float32
    assert data.y_train.dtype == np.int64
    assert data.y_train.min() == 0
    assert data.num_classes == load_task(task).num_classes


@pytest.mark.parametrize("normalise", ["symmetric", "unit", "standard", "0.4/0.3", "per-pixel"])
@pytest.mark.parametrize("task", ["mnist", "cifar10"])
def test_images_to_ask_about_are_scaled_as_those_that_were_learnt_from(tmp_path, task, normalise):
    options = write_npz(tmp_path, task) | {"normalise": normalise}
    np.savez(tmp_path / "new.npz", x=arrays(task)["x_test"])
    expected = load_task(task).load(options).x_test
    if normalise != "per-pixel":
        options["data"] = str(tmp_path / "gone since")
    np.testing.assert_array_equal(load_task(task).inputs(tmp_path / "new.npz", options).x, expected)
    np.save(tmp_path / "ready.npy", expected)
    ready = load_task(task).inputs(tmp_path / "ready.npy", options).x
    np.testing.assert_array_equal(ready, expected)
    np.save(tmp_path / "odd.npy", np.zeros((3, 5, 5), np.uint8))
    with pytest.raises(TaskError, match=r"must be uint8 of shape \('n', "):
        load_task(task).inputs(tmp_path / "odd.npy", options)


@pytest.mark.parametrize("task", IDX)
@pytest.mark.parametrize("packed", [True, False])
def test_idx_files_hold_the_same_as_npz(tmp_path, task, packed):
    (tmp_path / "npz").mkdir()
    from_npz = load_task(task).load(write_npz(tmp_path / "npz", task))
    from_idx = load_task(task).load(write_idx(tmp_path / "idx", task, packed=packed))
    assert same(from_npz, from_idx)


def test_cifar_batches_hold_the_same_as_npz(tmp_path):
    data = load_task("cifar10").load(write_batches(tmp_path))
    whole = arrays("cifar10")
    order = np.concatenate([np.arange(n, 200, 5) for n in range(5)])
    pixels = np.rint((data.x_train + 1) * 127.5).astype(np.uint8).transpose(0, 2, 3, 1)
    assert np.array_equal(pixels, whole["x_train"][order])
    assert np.array_equal(data.y_train, whole["y_train"][order])


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    options = write_batches(tmp_path)

    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    batch = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    batch.write_bytes(pickle.dumps({b"data": Evil(), b"labels": []}, protocol=2))
    with pytest.raises(TaskError, match=r"data_batch_3 cannot be read: it contains a .*mkdir"):
        load_task("cifar10").load(options)
    assert not (tmp_path / "ran").exists()


def test_an_npz_may_be_named_itself_and_may_have_a_channel_axis(tmp_path):
    write_npz(tmp_path, x_train=arrays("mnist")["x_train"][..., None])
    data = load_task("mnist").load({"data": str(tmp_path / "mnist.npz")})
    assert data.x_train.shape == (200, 1, 28, 28)


def test_the_folder_must_be_named():
    with pytest.raises(TaskError, match=r"needs option 'data': a folder with mnist\.npz"):
        load_task("mnist").load({})


def test_a_folder_that_is_not_there_or_empty_or_holds_something_else_is_refused(tmp_path):
    task = load_task("fashion-mnist")
    with pytest.raises(TaskError, match=r"does not exist.*FashionMNIST/raw.*download=true"):
        task.load({"data": str(tmp_path / "nowhere")})
    with pytest.raises(TaskError, match="is empty"):
        task.load({"data": str(tmp_path)})
    (tmp_path / "notes.txt").touch()
    with pytest.raises(TaskError, match="has no such files"):
        task.load({"data": str(tmp_path)})


def test_a_missing_idx_file_is_named(tmp_path):
    options = write_idx(tmp_path)
    (tmp_path / "MNIST/raw/t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(TaskError, match="has no t10k-labels-idx1-ubyte"):
        load_task("mnist").load(options)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not gzip",
        gzip.compress(b"no idx", mtime=0),  # the test's name holds it, in every worker the same
        gzip.compress(idx(np.zeros((5, 28, 28)))[:-9], mtime=0),
    ],
)
def test_a_broken_idx_file_is_named(tmp_path, content):
    options = write_idx(tmp_path)
    (tmp_path / "MNIST/raw/train-images-idx3-ubyte.gz").write_bytes(content)
    with pytest.raises(TaskError, match=r"train-images-idx3-ubyte\.gz cannot be read"):
        load_task("mnist").load(options)


def test_a_broken_npz_is_named(tmp_path):
    (tmp_path / "mnist.npz").write_bytes(b"PK\x03\x04 not really")
    with pytest.raises(TaskError, match=r"mnist\.npz cannot be read"):
        load_task("mnist").load({"data": str(tmp_path)})


def test_an_npz_whose_headers_are_damaged_is_named(tmp_path):
    x = np.zeros((9000, 3))  # larger than what is read, and checked, with the header
    np.savez(tmp_path / "mnist.npz", x_train=x, y_train=x, x_test=x, y_test=x)
    whole = (tmp_path / "mnist.npz").read_bytes()
    (tmp_path / "mnist.npz").write_bytes(whole.replace(b"False,", b"(((((("))
    with pytest.raises(TaskError, match=r"mnist\.npz cannot be read"):
        load_task("mnist").load({"data": str(tmp_path)})


def test_an_npz_of_pickles_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", **(arrays("mnist") | {"x_test": np.array([{}], dtype=object)}))
    with pytest.raises(TaskError, match="cannot be read"):
        read_npz(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"x_train": np.zeros((200, 28, 28))}, "x_train in .* must be uint8 of shape"),
        ({"x_test": np.zeros((100, 8, 8), np.uint8)}, "x_test in .* must be uint8 of shape"),
        ({"y_train": np.zeros(199, int)}, "y_train in .* one label per image"),
        ({"y_train": np.zeros(200)}, "y_train in .* must be integers"),
        ({"y_train": np.arange(200)}, r"must be in \[0, 9\]. Got 0 to 199"),
        ({"x_test": np.zeros((0, 28, 28), np.uint8), "y_test": np.zeros(0, int)}, "empty"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path, changes, says):
    with pytest.raises(TaskError, match=says):
        load_task("mnist").load(write_npz(tmp_path, **changes))


def test_missing_arrays_are_named(tmp_path):
    np.savez(tmp_path / "mnist.npz", x_train=np.zeros(1), y_train=np.zeros(1))
    with pytest.raises(TaskError, match="Missing: x_test, y_test"):
        load_task("mnist").load({"data": str(tmp_path)})


def test_letters_that_count_from_zero_need_first_label(tmp_path):
    options = write_npz(tmp_path, "emnist-letters", y_train=np.arange(200) % 26)
    with pytest.raises(TaskError, match=r"in \[1, 26\]. Got 0 to 25.*set first-label"):
        load_task("emnist-letters").load(options)


def test_nothing_is_downloaded_unless_asked(tmp_path, monkeypatch):
    import torchvision

    asked = []

    def fake(*, root, download, **more):
        asked.append((root, download, more))
        write_idx(Path(root), "emnist-letters")

    monkeypatch.setattr(torchvision.datasets, "EMNIST", fake)
    task, options = load_task("emnist-letters"), {"data": str(tmp_path)}
    with pytest.raises(TaskError):
        task.load({**options, "download": "false"})
    assert asked == []
    task.load({**options, "download": "true"})
    assert asked == [(str(tmp_path), True, {"split": "letters"})]
    task.load({**options, "download": True})
    assert len(asked) == 1


def test_a_failed_download_says_what_to_do(tmp_path, monkeypatch):
    import torchvision

    def fake(**_):
        raise RuntimeError("no image classification network")

    monkeypatch.setattr(torchvision.datasets, "MNIST", fake)
    with pytest.raises(
        TaskError,
        match=r"could not be downloaded .* no image classification network.*Copy it there",
    ):
        load_task("mnist").load({"data": str(tmp_path), "download": True})


@pytest.mark.parametrize("task", ["mnist", "digits"])
def test_loading_data_imports_neither_torch_nor_scikit_learn(tmp_path, task):
    options = write_npz(tmp_path) if task == "mnist" else {}
    code = (
        "import sys; from coterie.tasks import load_task\n"
        f"print(load_task({task!r}).load({options!r}).num_classes,"
        " {'torch', 'sklearn', 'scipy', 'torchvision'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "10 set()", done.stderr


# --- options


def test_each_silo_loads_its_own_share_of_a_common_folder(tmp_path):
    task, options = load_task("mnist"), write_npz(tmp_path)
    options |= {"split": "dirichlet", "silos": 4, "split-dirichlet-alpha": 0.5, "split-min": 10}
    options["split-min-samples"] = options.pop("split-min")
    silos = [task.load({**options, "silo": silo}) for silo in range(4)]
    numbers = np.concatenate([np.rint((d.x_train[:, 0, 0, 0] + 1) * 127.5) for d in silos])
    assert sorted(numbers) == list(range(200))
    assert same(silos[2], task.load({**options, "silo": 2}))
    assert all(same(a, b) for a, b in zip(silos, task.load_all(options), strict=True))
    other = task.load({**options, "silo": 2, "split-seed": 1})
    assert not same(silos[2], other)


def test_test_share_cuts_both_parts_as_one(tmp_path):
    options = write_npz(tmp_path) | {"split": "iid", "silos": 3, "test-share": 0.25}
    silos = load_task("mnist").load_all(options)
    assert [(len(d.y_train), len(d.y_test)) for d in silos] == [(75, 25)] * 3


def test_caps_take_at_most_so_many_at_random(tmp_path):
    task, options = load_task("mnist"), write_npz(tmp_path)
    data = task.load({**options, "train": 30, "test": 1000})
    assert (len(data.y_train), len(data.y_test)) == (30, 100)
    assert same(data, task.load({**options, "train": 30, "test": 1000}))
    assert not same(data, task.load({**options, "train": 30, "split-seed": 1}))


def test_colours_are_scaled_one_by_one(tmp_path):
    task, options = load_task("cifar10"), write_npz(tmp_path, "cifar10")
    pixels = arrays("cifar10")["x_train"].astype(np.float64) / 255
    means, deviations = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]
    expected = ((pixels - means) / deviations).transpose(0, 3, 1, 2)
    given = task.load({**options, "normalise": "0.1,0.2,0.3/0.4,0.5,0.6"}).x_train
    assert np.allclose(given, expected, atol=1e-6)
    standard = task.load({**options, "normalise": "standard"}).x_train
    expected = (pixels - [0.4914, 0.4822, 0.4465]) / [0.2470, 0.2435, 0.2616]
    assert np.allclose(standard, expected.transpose(0, 3, 1, 2), atol=1e-6)


def test_normalisations(tmp_path):
    task, options = load_task("mnist"), write_npz(tmp_path)
    raw = arrays("mnist")
    pixels = raw["x_train"][:, None].astype(np.float64)
    unit = task.load({**options, "normalise": "unit"}).x_train
    assert np.allclose(unit, pixels / 255)
    assert np.allclose(task.load(options).x_train, pixels / 127.5 - 1, atol=1e-6)
    standard = task.load({**options, "normalise": "standard"}).x_train
    assert np.allclose(standard, (pixels / 255 - 0.1307) / 0.3081, atol=1e-6)
    given = task.load({**options, "normalise": "0.5/0.25"}).x_train
    assert np.allclose(given, (pixels / 255 - 0.5) / 0.25, atol=1e-6)
    whole = np.concatenate([raw["x_train"], raw["x_test"]]).astype(np.float64)
    expected = (pixels - whole.mean(0)) / (whole.std(0) + 0.001)
    assert np.allclose(
        task.load({**options, "normalise": "per-pixel"}).x_train, expected, atol=1e-4
    )


def test_rotation_and_label_permutation_shift_train_and_test_alike(tmp_path):
    task, options = load_task("cifar10"), write_npz(tmp_path, "cifar10")
    plain, turned = task.load(options), task.load({**options, "rotation": 90})
    assert np.array_equal(turned.x_test, np.rot90(plain.x_test, 1, axes=(2, 3)))
    named = task.load({**options, "label-permutation": 3})
    for part in ("y_train", "y_test"):
        pairs = set(zip(getattr(plain, part), getattr(named, part), strict=True))
        assert len(pairs) == 10
    assert not same(plain, named)


def test_a_splits_shifts_reach_the_silo(tmp_path):
    task, options = load_task("mnist"), write_npz(tmp_path)
    options |= {"split": "iid", "silos": 2}
    plain = task.load_all(options)
    shifted = task.load_all({**options, "split-rotations": "0,180", "split-permutations": 2})
    assert same(plain[0], shifted[0])
    assert np.array_equal(plain[1].x_train[:, :, ::-1, ::-1], shifted[1].x_train)
    assert not np.array_equal(plain[1].y_train, shifted[1].y_train)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"colour": 1}, "has no option 'colour'"),
        ({"download": "maybe"}, "'download' .* must be true or false"),
        ({"normalise": "hard"}, "normalise must be symmetric, unit, standard, per-pixel, or means"),
        ({"normalise": "0.5"}, "normalise must be"),
        ({"normalise": "0.1,0.2/0.3"}, "has 2 means and 1 deviations"),
        ({"normalise": "0.5/0"}, "deviations above 0"),
        ({"normalise": "nan/0.5"}, "must be finite"),
        ({"normalise": "0.5/1e-50"}, "normalise=0.5/1e-50: .* of float32."),
        ({"normalise": "1e300/0.5"}, "normalise=1e300/0.5: .* of float32."),
        ({"split-seed": "-1"}, "split-seed must be at least 0. Got -1"),
        ({"split-seed": float("inf")}, "'split-seed' .* must be of type int. Got inf"),
        ({"data": "~nobody-here/mnist"}, "there is no home folder ~nobody-here"),
        ({"train": -1}, "train must be at least 0"),
        ({"rotation": "left"}, "'rotation' of task 'mnist' must be of type float"),
        ({"silo": 1}, "'silo' belongs to a split"),
        ({"split-dirichlet-alpha": 1.0}, "'split-dirichlet-alpha' belongs to a split"),
        ({"test-share": 0.5}, "'test-share' belongs to a split"),
        ({"split": "fair", "silos": 2, "silo": 0}, "split must be none or one of iid"),
        ({"split": "by-domain", "silos": 2, "silo": 0}, "split must be none or one of iid"),
        ({"split": "iid", "silos": 2}, "option 'silo' must give the silo's number,"),
        ({"split": "iid", "silos": 2, "silo": 2}, r"silo must be in \[0, 1\]. Got 2"),
        ({"split": "iid", "silo": 0}, "needs silos"),
        (
            {"split": "iid", "silos": 2, "silo": 0, "split-dirichlet-alpha": 1},
            "has no key 'dirichlet-alpha'",
        ),
        ({"split": "iid", "silos": 2, "silo": 0, "test-share": 1}, r"test-share must be in \[0, 1"),
        ({"split": "iid", "silos": 101, "silo": 0}, "without test samples"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path, options, says):
    with pytest.raises(TaskError, match=says):
        load_task("mnist").load(write_npz(tmp_path) | options)


# --- models


def test_the_papers_networks_have_the_papers_sizes():
    import torch

    from coterie.tasks.models import SplitModel

    sizes = {
        "mnist/mclr": 7_850,
        "mnist/mlp-128": 101_770,
        "emnist-letters/mlp-512": 415_258,
        "fashion-mnist": 784 * 64 + 64 + 640 + 10,
        "fashion-mnist/mlp-200": 157_000 + 40_200 + 2_010,
        "mnist": 60 + 880 + 784 * 785 + 785 * 32 + 330,
        "cifar10": 448 + 4_640 + 18_496 + 73_856 + 2_049 * 500 + 5_010,
        "cifar10/cnn-fedcollab": 896 + 18_496 + 36_928 + 65_600 + 650,
    }
    for name, size in sizes.items():
        task = load_task(name)
        model = task.model()
        assert isinstance(model, SplitModel)
        assert sum(p.numel() for p in model.parameters()) == size, name
        assert model(torch.zeros(2, *task.shape)).shape == (2, task.num_classes), name
        assert any(key.startswith(task.head) for key in model.state_dict()), name


def test_every_offered_model_can_be_made():
    import torch

    for base in SHAPES:
        for model in load_task(base).models:
            task = load_task(f"{base}/{model}")
            assert task.name == f"{base}/{model}"
            assert task.model()(torch.zeros(2, *task.shape)).shape == (2, task.num_classes)


def test_the_latent_space_of_fedgenp_has_32_dimensions():
    import torch

    latent = load_task("emnist-letters").model().representation(torch.zeros(2, 1, 28, 28))
    assert latent.shape == (2, 32)


# --- the real data sets, where the machine has them


@pytest.mark.parametrize(
    ("task", "files", "train", "test"),
    [
        ("mnist", "MNIST/raw", 60_000, 10_000),
        ("fashion-mnist", "FashionMNIST/raw", 60_000, 10_000),
    ],
)
def test_the_real_archives_are_read(real, task, files, train, test):
    if not (Path(real) / files).is_dir():
        pytest.skip(f"COTERIE_DATA has no {files}.")
    options = {"data": real, "split": "iid", "silos": 100, "silo": 0}
    data = load_task(task).load(options)
    assert (len(data.y_train), len(data.y_test)) == (train // 100, test // 100)
    assert set(data.y_train) == set(range(10))


def test_fedgroups_mnist_split_on_the_real_labels(real):
    if not (Path(real) / "MNIST/raw").is_dir():
        pytest.skip("COTERIE_DATA has no MNIST/raw.")
    options = {"data": real, "split": "power-law", "silos": 1000, "test-share": 0.1}
    silos = load_task("mnist/mclr").load_all(options)
    assert sum(len(d.y_train) + len(d.y_test) for d in silos) == 70_000
    assert set(silos[9].y_train) | set(silos[9].y_test) == {0, 9}
