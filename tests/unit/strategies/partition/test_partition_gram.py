"""Inner products: exact enough, from every layout, within their memory, and refusing bad input."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from coterie.strategies.partition.gram import _WIDTH, cross, gram


def random_updates(num_silos=7, num_parameters=50_000, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((num_silos, num_parameters)).astype(dtype)


def exact(updates, others=None):
    wide = np.asarray(updates, dtype=np.float64)
    return wide @ (wide if others is None else np.asarray(others, dtype=np.float64)).T


def assert_close(result, updates, tolerance=7e-7):
    """Errors are measured against |u_i||u_j|: what they do to a cosine."""
    truth = exact(updates)
    norms = np.sqrt(np.outer(truth.diagonal(), truth.diagonal()))
    assert result.dtype == np.float64
    assert (result == result.T).all()
    assert np.abs(result - truth).max() <= tolerance * norms.max()


@pytest.mark.parametrize("num_silos", [1, 2, 7, 40])
@pytest.mark.parametrize("num_parameters", [1, 100, _WIDTH, _WIDTH + 1, 3 * _WIDTH - 5])
def test_equals_float64_product(num_silos, num_parameters):
    updates = random_updates(num_silos, num_parameters)
    assert_close(gram(updates), updates)


def test_long_equal_updates_have_cosine_one():
    """A plain float32 sum over 2 million numbers of one sign would be off by far more."""
    update = np.abs(random_updates(1, 2_000_000)) + 1.0
    result = gram([update[0], update[0].copy()])
    truth = float(np.square(update, dtype=np.float64).sum())
    assert result == pytest.approx(np.full((2, 2), truth), rel=5e-7)
    assert result[0, 1] / result[0, 0] == pytest.approx(1.0, abs=1e-7)


def test_float64_updates_keep_float64_precision():
    updates = random_updates(dtype=np.float64)
    assert_close(gram(updates), updates, tolerance=1e-14)


def layouts(updates, folder):
    """The same updates in every form that is accepted."""
    cut = [(0, 7), (7, 10), (10, len(updates[0]))]
    mapped = np.memmap(folder / "updates", np.float32, "w+", shape=updates.shape)
    mapped[:] = updates
    mapped.flush()
    read = np.memmap(folder / "updates", np.float32, "r", shape=updates.shape)
    matrices = updates[:, 10:].reshape(len(updates), -1, 10)
    return {
        "matrix": updates,
        "Fortran matrix": np.asfortranarray(updates),
        "rows": list(updates),
        "memory map": read,
        "memory-mapped rows": list(read),
        "lists of layers": [[row[a:b] for a, b in cut] for row in updates],
        "mappings": [{str(a): row[a:b] for a, b in cut} for row in updates],
        "mappings in another order": [
            {str(a): row[a:b] for a, b in (cut if k else cut[::-1])}
            for k, row in enumerate(updates)
        ],
        "shaped layers": [
            (row[:7], row[7:10], layer) for row, layer in zip(updates, matrices, strict=True)
        ],
        "layers not contiguous": [
            (row[:7], row[7:10], layer.T) for row, layer in zip(updates, matrices, strict=True)
        ],
        "float64 bias among float32": [(row[:10].astype(np.float64), row[10:]) for row in updates],
    }


LAYOUTS = [
    "matrix",
    "Fortran matrix",
    "rows",
    "memory map",
    "memory-mapped rows",
    "lists of layers",
    "mappings",
    "mappings in another order",
    "shaped layers",
    "layers not contiguous",
    "float64 bias among float32",
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same(layout, tmp_path):
    updates = random_updates(num_parameters=20_010)
    before = updates.copy()
    assert_close(gram(layouts(updates, tmp_path)[layout]), updates)
    assert (updates == before).all()


@pytest.mark.parametrize("dtype", [np.float16, np.int32, np.int64])
def test_other_precisions(dtype):
    updates = (random_updates(num_parameters=3000) * 5).astype(dtype)
    assert_close(gram(updates), updates)


def test_nested_lists_are_updates():
    assert gram([[1.0, 0.0], [3.0, 4.0]]).tolist() == [[1, 3], [3, 25]]


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_float32_squares_out_of_range(size):
    updates = random_updates(num_parameters=40_000) * np.float32(size)
    updates[0] /= np.float32(size)
    truth = exact(updates)
    norms = np.sqrt(np.outer(truth.diagonal(), truth.diagonal()))
    assert (np.abs(gram(updates) - truth) <= 1e-6 * norms).all()
    assert (np.abs(cross(updates, updates[:2]) - truth[:, :2]) <= 1e-6 * norms[:, :2]).all()


def test_zero_update_has_zero_row():
    updates = random_updates()
    updates[3] = 0
    result = gram(updates)
    assert not result[3].any()
    assert not result[:, 3].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cross_equals_float64_product(layout, tmp_path):
    updates = random_updates(num_parameters=20_010)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    others = random_updates(3, 20_010, seed=1)
    result = cross(
        layouts(updates, tmp_path / "a")[layout], layouts(others, tmp_path / "b")[layout]
    )
    assert result == pytest.approx(exact(updates, others), abs=1e-6 * 20_010)


@pytest.mark.parametrize("form", ["matrix", "rows", "layers"])
def test_extra_memory(form):
    """At most 2 updates and N^2 numbers, the result not counted."""
    num_silos, num_parameters = 100, 100_000
    updates = random_updates(num_silos, num_parameters)
    given = {
        "matrix": updates,
        "rows": list(updates),
        "layers": [[row[:1000], row[1000:].reshape(-1, 100).T] for row in updates],
    }[form]
    gram(updates[:2])
    tracemalloc.start()
    result = gram(given)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    bookkeeping = 300 * num_silos * 4  # the array objects of N silos' layers
    assert peak - result.nbytes <= 2 * updates[0].nbytes + 8 * num_silos**2 + bookkeeping
    assert_close(result, updates)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 20_000, 49_999])
def test_non_finite_is_refused_by_silo_and_layer(value, where):
    updates = random_updates()
    updates[4, where] = value
    layers = [{"first": row[:10_000], "last": row[10_000:]} for row in updates]
    name = "first" if where < 10_000 else "last"
    with pytest.raises(ValueError, match=rf"must be finite. Silo 4, layer {name} has"):
        gram(layers)
    with pytest.raises(ValueError, match=r"must be finite. Silo 4"):
        gram(updates)
    with pytest.raises(ValueError, match=r"must be finite. Silo 5"):
        cross(updates[:1], updates)


def test_norm_beyond_float64_is_refused():
    with pytest.raises(ValueError, match="Silo 1: too large a norm"):
        gram(np.array([[1.0, 1.0], [1e200, 1.0]]))


@pytest.mark.parametrize("updates", [[], np.empty((0, 5)), ()])
def test_no_silo_is_refused(updates):
    with pytest.raises(ValueError, match="at least one silo"):
        gram(updates)


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        ([np.ones(3), np.ones(4)], r"Silo 1, its only layer has \(4,\) instead of \(3,\)"),
        ([{"w": np.ones((2, 2))}, {"w": np.ones(4)}], r"Silo 1, layer w has \(4,\)"),
        ([{"w": np.ones(2)}, {"v": np.ones(2)}], r"Silo 1 differs in \['v', 'w'\]"),
        ([[np.ones(2)], [np.ones(2), np.ones(1)]], "Silo 1 has 2"),
        ([[1.0, 2.0], [1.0]], r"equally long. Got lengths \[2, 1\]"),
        (np.ones(3), r"\(N, P\). Got shape \(3,\)"),
        ({"w": np.ones(3)}, "one per silo. Got dict"),
        ([np.ones(2), np.ones(2, dtype=complex)], "Silo 1, its only layer is complex128"),
        ([np.array(["a"])], "real numbers. Silo 0"),
    ],
)
def test_bad_shapes_are_refused_by_silo_and_layer(updates, message):
    with pytest.raises(ValueError, match=message):
        gram(updates)


def test_cross_refuses_other_shapes():
    updates = random_updates(3, 10)
    with pytest.raises(ValueError, match=r"its only layer has \(9,\), not \(10,\)"):
        cross(updates, updates[:, :9])
    with pytest.raises(ValueError, match="Got 2 layers instead of 1"):
        cross(list(updates), [[row, row] for row in updates])


# --- known noise ----------------------------------------------------------------------------------


def two_kinds(levels, *, num_parameters=60_000, seed=0):
    """Two kinds of silos with orthogonal signals of length 1, and noise of these squared norms."""
    rng = np.random.default_rng(seed)
    signals = np.linalg.qr(rng.standard_normal((num_parameters, 2)))[0].T
    noise = rng.standard_normal((len(levels), num_parameters))
    noise *= np.sqrt(np.asarray(levels, dtype=np.float64) / num_parameters)[:, None]
    return signals[[i % 2 for i in range(len(levels))]] + noise


def cosines(matrix):
    lengths = np.sqrt(matrix.diagonal())
    return matrix / np.outer(lengths, lengths)


@pytest.mark.parametrize("levels", [[1.0] * 4, [4.0] * 6, [0.5, 8.0, 3.0, 0.0, 1.0, 0.0]])
def test_known_noise_is_taken_off_the_diagonal(levels):
    updates = two_kinds(levels)
    plain, corrected = cosines(gram(updates)), cosines(gram(updates, noise=levels))
    kinds = np.arange(len(levels)) % 2
    same = (kinds[:, None] == kinds) & ~np.eye(len(levels), dtype=bool)
    assert np.median(plain[same]) < 0.6, "noise makes everybody look alone"
    assert corrected[same].min() > 0.9
    assert np.abs(corrected[kinds[:, None] != kinds]).max() < 0.15
    assert np.linalg.eigvalsh(gram(updates, noise=levels))[0] > -1e-7


def test_without_noise_nothing_changes():
    updates = random_updates(5, 1000)
    np.testing.assert_array_equal(gram(updates, noise=np.zeros(5)), gram(updates))


def test_who_claims_more_noise_than_it_has_comes_no_nearer_to_anybody():
    """Of the others nothing changes but what they have themselves."""
    updates = two_kinds([0.0, 0.0, 0.0, 1.0])
    for claim in (1.0, 5.0, 1e12):
        matrix = gram(updates, noise=[0.0, 0.0, 0.0, claim])
        np.testing.assert_array_equal(matrix[:3, :3], gram(updates)[:3, :3])
        found = cosines(matrix)
        assert np.abs(found).max() <= 1 + 1e-6
        assert np.abs(found[3, [0, 2]]).max() < 0.2, "of the other kind it still is"
    alone = np.eye(3, 40_000)
    found = cosines(gram(alone, noise=[1e9, 0.0, 0.0]))
    np.testing.assert_allclose(found, np.eye(3), atol=1e-12)


def test_a_false_claim_leaves_the_others_some_of_their_correction():
    updates = two_kinds([2.0, 2.0, 2.0, 2.0, 0.0])
    found = cosines(gram(updates, noise=[2.0, 2.0, 2.0, 2.0, 1e9]))
    assert found[0, 2] > 0.5 > 0.35 > cosines(gram(updates))[0, 2]
    assert found[1, 3] > 0.5, "of the kind that it is not of as well"


def test_an_update_that_may_be_nothing_but_noise_is_not_made_one_of_signal():
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((6, 2000)) / np.sqrt(2000)
    found = cosines(gram(noise, noise=[1.0] * 6))
    assert np.abs(found - np.eye(6)).max() < 0.75
    few = rng.standard_normal((3, 10)) / np.sqrt(10)
    np.testing.assert_array_equal(gram(few, noise=[1.0] * 3), gram(few))


@pytest.mark.parametrize("noise", [[1.0], [1.0, -1.0], [1.0, float("nan")]])
def test_noise_must_be_one_number_per_silo(noise):
    with pytest.raises(ValueError, match="noise must be"):
        gram(random_updates(2, 100), noise=noise)
