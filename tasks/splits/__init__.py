"""Splits of one data set into the shares of many silos, as in the papers' experiments.

A split is a matrix of shares: entry (i, c) is the part of the samples of class c that silo i gets;
a single column ignores classes. A kind of split defines how to draw the matrix; ``cut`` turns it
into disjoint index arrays. The training and test parts are cut by the same matrix, so a silo is
tested on its own distribution. Everything is seeded NumPy: every silo process can compute its share
of a common folder, and all agree without communicating.

Sources: HCCT (section 3.2, section 7.1), FedGroup (section V; the generator of FedProx), FedCollab
(section "Setup"; numbers from its published settings), FedGenP (Table 2; the Dirichlet split of
FedGen, after Hsu, Qi, Brown 2019).
"""

from coterie.tasks.splits.config import KINDS, Share, make_split
from coterie.tasks.splits.shares import cut
from coterie.tasks.splits.shifts import permutation, rotate

__all__ = ["KINDS", "Share", "cut", "make_split", "permutation", "rotate"]
