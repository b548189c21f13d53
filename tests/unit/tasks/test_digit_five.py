"""The benchmarks' digits from five domains."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers import digit_five
from benchmarks.papers.digit_five import (
    DOMAINS,
    DigitFive,
    cut_units,
    silos_of_domains,
    small,
    to_rgb28,
)
from benchmarks.papers.fonts import draw_digits, find_fonts
from coterie.tasks import TaskError
from coterie.tasks.splits.shares import iid_shares
from tests.unit.tasks.test_images import same, some_images

SIDES = {"svhn": (32, 32, 3), "usps": (16, 16), "mnist-m": (32, 32, 3), "mnist": (28, 28)}
FIVE_FILES = {name: files.npz[0] for name, files in DOMAINS.items()}


@pytest.fixture
def five(tmp_path):
    """A folder with the five domains; MNIST-M recolours MNIST's images 0–29 and 0–9."""
    for number, (name, shape) in enumerate(SIDES.items()):
        extra = {}
        if name == "mnist-m":
            extra = {"i_train": np.arange(30), "i_test": np.arange(10)}
        if name == "svhn":
            extra = {"src_train": np.arange(60) // 3, "src_test": np.arange(40) // 2}
        train, test = some_images(60, shape, seed=number), some_images(40, shape, seed=9 + number)
        parts = dict(
            zip(("x_train", "y_train", "x_test", "y_test"), (*train, *test), strict=True), **extra
        )
        np.savez(tmp_path / FIVE_FILES[name], **parts)
    train, test = some_images(60, (28, 28, 3)), some_images(40, (28, 28, 3), seed=1)
    np.savez(
        tmp_path / "synth.npz", x_train=train[0], y_train=train[1], x_test=test[0], y_test=test[1]
    )
    return {"data": str(tmp_path)}


def test_ten_silos_have_two_of_each_domain(five):
    task, options = DigitFive(), {**five, "split": "by-domain", "silos": 10}
    silos = [task.load({**options, "silo": silo}) for silo in range(10)]
    assert all(d.x_train.shape[1:] == d.x_test.shape[1:] == (3, 28, 28) for d in silos)
    assert [len(d.y_train) for d in silos] == [30] * 8 + [15] * 2  # MNIST without MNIST-M's
    assert all(same(a, b) for a, b in zip(silos, task.load_all(options), strict=True))
    for grey in (2, 3, 8, 9):
        assert np.array_equal(silos[grey].x_train[:, 0], silos[grey].x_train[:, 2])


def test_mnist_leaves_out_what_mnist_m_recoloured_and_only_beside_it(five):
    task = DigitFive()
    beside = task.load({**five, "domain": "mnist"})
    assert (len(beside.y_train), len(beside.y_test)) == (30, 30)
    numbers = np.rint((beside.x_train[:, 0, 0, 0] + 1) * 127.5)
    assert numbers.min() == 30
    alone = task.load({**five, "domain": "mnist", "domains": "mnist, usps"})
    assert (len(alone.y_train), len(alone.y_test)) == (60, 40)


@pytest.mark.parametrize("test_share", [0.0, 0.5])
def test_a_photograph_of_svhn_is_never_divided(five, test_share):
    photos = {"train": np.arange(60) // 3, "test": 100 + np.arange(40) // 2}
    content = {}
    for part, numbers in photos.items():  # every pixel says which photograph it is from
        pixels = np.repeat(numbers.astype(np.uint8), 32 * 32 * 3).reshape(-1, 32, 32, 3)
        labels = np.arange(len(numbers)) % 10
        content |= {f"x_{part}": pixels, f"y_{part}": labels, f"src_{part}": numbers % 100}
    np.savez(Path(five["data"]) / "svhn.npz", **content)
    options = {**five, "split": "by-domain", "silos": 4, "domains": "svhn,usps"}
    if test_share:
        options["test-share"] = test_share
    sides = [x for d in DigitFive().load_all(options)[:2] for x in (d.x_train, d.x_test)]
    held = [set(np.rint((x.mean(axis=(1, 2, 3)) + 1) * 127.5)) for x in sides]
    assert sum(len(own) for own in held) == len(set.union(*held)) == 40
    assert sum(len(x) for x in sides) == 100


@settings(max_examples=50, deadline=None)
@given(units=st.lists(st.integers(0, 9), min_size=4, max_size=60), silos=st.integers(1, 4))
def test_samples_of_one_unit_stay_together(units, silos):
    parts = cut_units(np.array(units), iid_shares(silos), np.random.default_rng(0))
    assert sum(len(part) for part in parts) == len(units)
    owners = [np.unique(np.array(units)[part]) for part in parts]
    assert sum(len(own) for own in owners) == len(set(units))


def test_silos_have_one_domain_each_in_order_also_where_they_do_not_divide_evenly():
    assert silos_of_domains(6, 3) == [range(2), range(2, 4), range(4, 6)]
    assert [len(r) for r in silos_of_domains(7, 3)] == [2, 3, 2]
    with pytest.raises(TaskError, match="at least one silo for each of 10 domains"):
        silos_of_domains(4, 10)


def test_a_domain_without_its_file_is_refused(five):
    (Path(five["data"]) / "usps.npz").unlink()
    with pytest.raises(TaskError, match=r"domain usps.*has no such files. Expected: usps\.npz"):
        DigitFive().load({**five, "domain": "usps"})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "give either domain"),
        ({"domain": "usps", "split": "by-domain", "silos": 5}, "give either domain"),
        ({"domain": "kanji"}, "domain must be one of svhn"),
        ({"split": "iid", "silos": 5}, "split must be none or by-domain"),
        ({"split": "by-domain", "silos": 5}, r"silo must be in \[0, 4\]. Got -1"),
        ({"split": "by-domain", "silos": 4, "silo": 0}, "at least one silo for each of 5"),
        ({"split": "by-domain", "silos": 4, "silo": 0, "domains": "usps,usps"}, "domain once"),
        ({"domain": "usps", "test-share": 0.5}, "belong to split=by-domain"),
    ],
)
def test_digit_five_refuses_options_that_make_no_sense(five, options, says):
    with pytest.raises(TaskError, match=says):
        DigitFive().load({**five, **options})


def test_shrinking_and_enlarging_keep_brightness_and_position():
    images = np.full((2, 32, 32, 3), 77, np.uint8)
    assert np.allclose(to_rgb28(images), 77, atol=1e-3)
    ramp = np.tile(np.arange(16, dtype=np.uint8) * 16, (1, 16, 1))
    turned = to_rgb28(ramp)[0, 14, :, 0]
    assert (np.diff(turned) >= 0).all()
    assert turned[13:15].mean() == pytest.approx(120, abs=1)


def test_resizing_is_what_pillow_does():
    from PIL import Image

    for shape in ((32, 32), (16, 16)):
        image = some_images(1, shape)[0][0]
        theirs = np.asarray(Image.fromarray(image).resize((28, 28), Image.Resampling.BILINEAR))
        assert np.abs(to_rgb28(image[None])[0, :, :, 0] - theirs).max() <= 1.0


def test_digits_are_drawn_from_fonts_the_same_way_each_time():
    fonts = find_fonts()
    one, again = (draw_digits(40, fonts=fonts, rng=np.random.default_rng(3)) for _ in range(2))
    assert one.x.shape == (40, 28, 28, 3)
    assert np.array_equal(one.x, again.x)
    assert set(one.y) <= set(range(10))
    assert (one.x.astype(float).std(axis=(1, 2)).max(axis=1) > 10).all()  # something is on them


def test_digits_are_drawn_even_on_a_machine_without_fonts():
    drawn = draw_digits(200, fonts=[], rng=np.random.default_rng(0))
    assert np.bincount(drawn.y, minlength=10).min() > 0


def test_a_folder_without_fonts_is_refused(tmp_path):
    with pytest.raises(TaskError, match="fonts must be a folder with"):
        find_fonts(str(tmp_path))


def test_the_drawn_domain_needs_no_file(five, monkeypatch):
    monkeypatch.setattr(digit_five, "NUM_DRAWN", (30, 20))
    (Path(five["data"]) / "synth.npz").unlink()
    digit_five._drawn.cache_clear()
    try:
        data = DigitFive().load({**five, "domain": "synth"})
    finally:
        digit_five._drawn.cache_clear()
    assert (len(data.y_train), len(data.y_test)) == (30, 20)


def test_the_models_are_the_papers() -> None:
    assert sum(p.numel() for p in DigitFive().model().parameters()) == 14_219_210
    assert small().name == "benchmarks.papers.digit_five:small"
    assert sum(p.numel() for p in small().model().parameters()) < 400_000


def test_labels_and_images_of_real_digits_still_belong_together(real):
    """After reading, resizing and cutting, the nearest training image has the right label."""
    needed = ["MNIST/raw", "usps.npz"]
    absent = [name for name in needed if not (Path(real) / name).exists()]
    if absent:
        pytest.skip(f"COTERIE_DATA has no {', '.join(absent)}.")
    for domain in ("mnist", "usps"):
        data = DigitFive().load({"data": real, "domain": domain, "train": 2000, "test": 300})
        train, test = (x[:, 0].reshape(len(x), -1) for x in (data.x_train, data.x_test))
        distance = (test**2).sum(1)[:, None] - 2 * test @ train.T + (train**2).sum(1)[None]
        assert (data.y_train[distance.argmin(axis=1)] == data.y_test).mean() > 0.85
