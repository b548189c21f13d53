"""All that a strategy of your own is made of, in one import; the how-to page leads through one.

from coterie.strategies.own import Algorithm, Order, Round, Updates
"""

from coterie.strategies.partition.clustering import hierarchical, k_means
from coterie.strategies.partition.gram import gram
from coterie.strategies.rounds.algorithm import (
    Algorithm,
    Answers,
    Exchanges,
    Order,
    Round,
    Update,
    Updates,
    orders_from,
)
from coterie.strategies.rounds.handles import Arrays, Model, arrays_of
from coterie.strategies.rounds.members import Members, Plain, present_groups
from coterie.strategies.rounds.minimum_sizes import average_groups, form
from coterie.strategies.rounds.models import comparable, difference, plain_mean, weighted_mean
from coterie.strategies.rounds.options import (
    Config,
    Count,
    CountOrNone,
    NotNegative,
    Positive,
    Seed,
)
from coterie.strategies.rounds.reports import Group
from coterie.strategies.rounds.roster import Silo

__all__ = [
    "Algorithm",
    "Answers",
    "Arrays",
    "Config",
    "Count",
    "CountOrNone",
    "Exchanges",
    "Group",
    "Members",
    "Model",
    "NotNegative",
    "Order",
    "Plain",
    "Positive",
    "Round",
    "Seed",
    "Silo",
    "Update",
    "Updates",
    "arrays_of",
    "average_groups",
    "comparable",
    "difference",
    "form",
    "gram",
    "hierarchical",
    "k_means",
    "orders_from",
    "plain_mean",
    "present_groups",
    "weighted_mean",
]
