"""What algorithms are written with, under one name: ``kit.Round``, ``kit.weighted_mean``."""

import logging

from coterie.strategies.rounds.algorithm import *
from coterie.strategies.rounds.members import *
from coterie.strategies.rounds.models import *
from coterie.strategies.rounds.options import *
from coterie.strategies.rounds.policy import *
from coterie.strategies.rounds.replies import *
from coterie.strategies.rounds.reports import *
from coterie.strategies.rounds.roster import *

log = logging.getLogger("coterie.run")
