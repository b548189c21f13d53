"""Cutting one data set into the shares of many silos, as the papers' experiments do.

A split is a matrix of shares: row i is silo i, column c a class (one column: classes do not
matter), and an entry is the part of that class's samples which the silo gets. A kind of split is a
way to draw that matrix; ``cut`` turns any of them into disjoint index arrays. The training and
the test part of a data set are cut by the same matrix, so a silo is tested on its own distribution.

Everything is numpy and seeded: every silo process can compute its own share of a common folder,
and all of them agree on it without talking.

Sources: HCCT (section 3.2, section 7.1), FedGroup (section V; the generator of FedProx), FedCollab
(section "Setup"; numbers from its published settings), FedGenP (Table 2; the Dirichlet split of
FedGen, after Hsu, Qi, Brown 2019).
"""

from coterie.tasks.splits.config import KINDS, Share, make_split
from coterie.tasks.splits.shares import cut, silos_of_domains
from coterie.tasks.splits.shifts import permutation, rotate

__all__ = ["KINDS", "Share", "cut", "make_split", "permutation", "rotate", "silos_of_domains"]
