"""What the benchmarks build for themselves."""

import numpy as np

from benchmarks.fedcollab import published_silos


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
