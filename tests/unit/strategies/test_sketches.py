"""The rules of sketches: their noise, the updates that have none, norms in three digits."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.client.home.settings import SiloSettings
from coterie.features.secure import sketches
from coterie.features.secure.secrets import secrets_of
from coterie.features.secure.sketches import (
    MOST_UPDATES,
    Sketch,
    Sketched,
    mark_of,
    measure,
    normals,
    remember,
    stated_norm,
    too_few,
)
from coterie.wire.updates import sketch_noise

SIZE = 1024


def sketched(update: np.ndarray, key: bytes = b"key", size: int = SIZE) -> Sketch:
    sketch = Sketch(key, size)
    measure({"w": np.zeros_like(update)}, {"w": update}, {"sketch": sketch})
    return sketch


@given(st.floats(1e-12, 1e12))
def test_a_stated_norm_is_not_below_the_norm(norm: float) -> None:
    """The coordinator computes from it how far a model can have moved."""
    stated = stated_norm(norm, b"a")
    assert norm <= stated <= norm * 1.2 * 1.0101
    assert float(f"{stated:.3g}") == stated == stated_norm(norm, b"a")


def test_no_change_has_no_norm() -> None:
    assert stated_norm(0.0, b"a") == 0.0


def test_every_silo_and_update_overstates_its_norm_by_another_share() -> None:
    shares = [stated_norm(1 + n * 1e-9, bytes([n])) for n in range(200)]
    assert np.mean(shares) == pytest.approx(1.1, abs=0.02)
    assert np.std(shares) == pytest.approx(0.2 / np.sqrt(12), rel=0.2)


def test_normal_numbers_are_normal_and_those_of_their_key() -> None:
    one, again, other = (
        normals(b"a" * 32, 20_001),
        normals(b"a" * 32, 20_001),
        normals(b"b" * 32, 9),
    )
    np.testing.assert_array_equal(one, again)
    assert len(one) == 20_001 and not np.isclose(one[:9], other).any()
    assert abs(one.mean()) < 0.03 and one.std() == pytest.approx(1, abs=0.02)
    assert np.mean(one**4) == pytest.approx(3, abs=0.2)
    assert abs(np.corrcoef(one[:10_000], one[10_000:20_000])[0, 1]) < 0.04


def test_noise_is_as_long_as_the_sketch_and_comes_off_its_length() -> None:
    rng = np.random.default_rng(0)
    common = rng.normal(size=20_000)
    one, two = (sketched(common + rng.normal(size=20_000)) for _ in range(2))
    sent = [sketch.noisy(name) for sketch, name in ((one, b"a"), (two, b"b"))]
    for sketch, numbers in zip((one, two), sent, strict=True):
        length = np.linalg.norm(sketch.exact)
        assert np.linalg.norm(numbers - sketch.exact) == pytest.approx(length, rel=0.1)
        noise = sketch_noise({"sketch": numbers})
        assert np.sqrt((numbers.astype(float) ** 2).sum() - noise) == pytest.approx(length, rel=0.1)
    lengths = [np.sqrt((n.astype(float) ** 2).sum() - sketch_noise({"": n})) for n in sent]
    cosine = float(sent[0].astype(float) @ sent[1].astype(float)) / np.prod(lengths)
    assert cosine == pytest.approx(0.5, abs=4 * np.sqrt(5 / SIZE))


def test_another_update_or_silo_has_other_noise() -> None:
    update = np.random.default_rng(0).normal(size=20_000)
    first, nearly = sketched(update), sketched(update * 1.000001)
    noises = [
        first.noisy(b"a") - first.exact,
        first.noisy(b"b") - first.exact,
        nearly.noisy(b"a") - nearly.exact,
    ]
    for i in range(3):
        for j in range(i):
            assert abs(np.corrcoef(noises[i], noises[j])[0, 1]) < 0.15
    np.testing.assert_array_equal(first.noisy(b"a"), sketched(update).noisy(b"a"))


@pytest.mark.parametrize(
    ("live", "refused"), [(1, True), (SIZE - 1, True), (SIZE, False), (20_000, False), (0, False)]
)
def test_an_update_needs_as_many_live_parameters_as_its_sketch_has_numbers(
    live: int, refused: bool
) -> None:
    update = np.zeros(20_000)
    update[:live] = 0.5
    sketch = sketched(update)
    assert sketch.live == pytest.approx(live or np.inf)
    assert bool(too_few({"sketch": sketch})) is refused


def test_one_large_parameter_among_small_ones_lives_alone() -> None:
    update = np.full(20_000, 1e-6)
    update[7] = 1.0
    assert sketched(update).live < 2


def test_what_was_sketched_is_remembered_by_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SiloSettings("a", home=str(tmp_path))
    rows = [Sketched("r", "seed", "1 ", "parameters all", str(n)) for n in range(MOST_UPDATES + 1)]
    with monkeypatch.context() as full:
        full.setattr(sketches, "append_line", Mock(side_effect=OSError))
        with pytest.raises(OSError):
            remember(settings, rows[0])
    for row in rows[:-1]:
        assert remember(settings, row) == ""
    for _ in range(2):
        assert "different updates by this projection" in remember(settings, rows[-1])
        assert remember(settings, rows[0]) == "", "the same once more tells nothing new"
        assert remember(settings, Sketched("r", "seed", "2 ", "parameters all", "9")) == ""
        assert "the first one stays" in remember(settings, Sketched("r", "x", "3 ", "all", "9"))
        assert remember(settings, Sketched("s", "x", "1 ", "parameters all", "9")) == ""
        sketches._memory.clear()
    with (tmp_path / "secure" / sketches.FILE).open("ab") as torn:
        torn.write(b'{"run": "r", "se')
    sketches._memory.clear()
    assert remember(settings, rows[-1]), "a line that a crash cut off loses no other"


def test_only_the_silo_knows_the_marks_of_its_updates() -> None:
    own, other = (secrets_of(SiloSettings(name), "run") for name in "ab")
    parts = {"sketch": sketched(np.arange(20_000.0))}
    marks = {mark_of(one.lasting("mark"), parts) for one in (own, own, other)}
    assert len(marks) == 2


def test_every_round_and_run_has_its_own_projection(tmp_path: Path) -> None:
    """Of enrolled silos; the seed of others is known to all, and the same in every run."""
    (tmp_path / "key.pem").write_bytes(b"-----")
    settings = SiloSettings("a", home=str(tmp_path))
    one, two = (secrets_of(settings, run).made_seed(1) for run in ("r", "s"))
    assert one.seed != two.seed
    assert len({one.projection(name) for name in ("1 ", "2 ", "1 race-1")}) == 3
    free = [secrets_of(SiloSettings(name), "r").made_seed(1).seed for name in "bc"]
    assert free[0] == free[1]
