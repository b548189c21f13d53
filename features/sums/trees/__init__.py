"""Boosted trees by summed histograms: a group's trees are those of one trainer with all its rows.

XGBoost's algorithm (Chen and Guestrin: "XGBoost: A Scalable Tree Boosting System", KDD 2016,
https://arxiv.org/abs/1603.02754, §2 and §3.4): a split is chosen by sums of gradients, second
derivatives and rows over bins of a column. These are sums over silos, so only sums are asked for.
"""
