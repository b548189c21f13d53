"""A silo's privacy budget: a record, on its disk, of every training on its data.

A training is charged before it begins, so that nothing is lost if the process ends. Every training
is charged: a repeated request gets the stored reply instead (``coterie.features.privacy.replies``).

    privacy/budget.json   the charges

Opacus' accountant of Rényi differential privacy computes ε over all charges. Its sums hold even if
the coordinator chooses each training by the outcomes of earlier ones (Feldman, Zrnic: "Individual
Privacy Accounting via a Rényi Filter", NeurIPS 2021, https://arxiv.org/abs/2008.11193). A silo
without a folder is simulated: its budget is in memory and covers one run, and a training that the
same request asks for again is not charged again.
"""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from coterie.client.home.privacy import Privacy
from coterie.client.home.settings import SettingsError, SiloSettings
from coterie.system.files import LockedError, locked, make_folder, write_atomically

log = logging.getLogger("coterie.silo")

FOLDER, BUDGET, LOCK = "privacy", "budget.json", "lock"
LOCK_DEADLINE_S = 30.0
NEIGHBOURS = "if one row is added or removed"
"""What ε compares: two data sets that differ by one training sample. Stands next to every ε."""
MOST_TIGHTENED = 100.0
"""Largest ε of which the tighter figure is computed: above, it means nothing and takes minutes."""

History = tuple[tuple[float, float, int], ...]
"""(noise, share of the samples in a step, steps), sorted: an accountant's input."""
_memory: dict[tuple[str, str], tuple[Charge, ...]] = {}
"""(silo, run) → charges, for silos without a folder."""
_warned: set[str] = set()


class BudgetError(SettingsError):
    """A silo's budget file cannot be used."""


class SpentError(Exception):
    """The budget does not allow a training. The text reveals nothing about the data."""


@dataclass(frozen=True)
class Charge:
    """One training.

    Attributes:
        key: digest of the request that asked for it, and the training's number in it.
        noise: σ.
        rate: q, the probability that a sample is in a step.
    """

    key: str
    noise: float
    rate: float
    steps: int
    run: str
    round: int
    purpose: str


@dataclass(frozen=True)
class Spent:
    """The privacy spent by a silo: ``epsilon`` of the budget's ``of``, at ``delta``.

    ``epsilon`` is 0 without trainings; ``charges`` is the number of trainings.
    """

    epsilon: float
    of: float
    delta: float
    charges: int

    def text(self) -> str:
        """Return a text for people: ``ε 0.81 of 2 at δ 0.0001 (if one row is …)``."""
        return f"ε {self.epsilon:.3g} of {self.of:g} at δ {self.delta:.3g} ({NEIGHBOURS})"


def require_opacus() -> None:
    """Check that Opacus, whose accountant is used, is installed.

    Raises:
        SettingsError: it is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import opacus.accountants  # noqa: F401
    except ImportError:
        raise SettingsError(
            "[privacy] in silo.toml needs Opacus, which is not installed here: "
            "pip install 'coterie[privacy]'."
        ) from None


def history_of(charges: Iterable[Charge]) -> History:
    """Return the accountant's input for these trainings."""
    steps: Counter[tuple[float, float]] = Counter()
    for charge in charges:
        steps[charge.noise, charge.rate] += charge.steps
    return tuple((noise, rate, count) for (noise, rate), count in sorted(steps.items()) if count)


def epsilon_of(history: History, delta: float) -> float:
    """Return ε as Opacus' ``RDPAccountant`` computes it; 0 for an empty history."""
    if not history:
        return 0.0
    require_opacus()
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis import rdp

    spent = sum(count * _of_a_step(noise, rate) for noise, rate, count in history)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the best order is the largest or the smallest one
        epsilon, _ = rdp.get_privacy_spent(
            orders=RDPAccountant.DEFAULT_ALPHAS, rdp=spent, delta=delta
        )
    return float(epsilon)


def tighter_epsilon_of(history: History, delta: float) -> float | None:
    """Return ε by Opacus' ``PRVAccountant``, from the distribution of the privacy loss; or None.

    It is usually a tenth smaller (Gopi, Lee, Wutschitz: "Numerical Composition of Differential
    Privacy", NeurIPS 2021, https://arxiv.org/abs/2106.02848), and holds for trainings that do not
    depend on the outcomes of earlier ones, so that no budget is counted by it. None: without
    trainings, and where it is not defined or takes long.
    """
    if not 0 < epsilon_of(history, delta) <= MOST_TIGHTENED:
        return None
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = list(history)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = float(accountant.get_epsilon(delta))
        except (RuntimeError, ValueError):  # numbers that its grid does not hold
            return None
    return found if math.isfinite(found) else None


@lru_cache(maxsize=1024)
def _of_a_step(noise: float, rate: float) -> Any:
    """Return the Rényi divergences of one step, one per order, in half a second; steps add up."""
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis import rdp

    orders = RDPAccountant.DEFAULT_ALPHAS
    return rdp.compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=orders)


@dataclass(frozen=True)
class Budget:
    """A silo's budget, created for each use; it reads the charges from the disk.

    ``settings`` must have ``privacy``. ``run`` is the run whose charges count without a folder.
    """

    settings: SiloSettings
    num_examples: int
    run: str = ""

    @property
    def terms(self) -> Privacy:
        """The silo's privacy settings."""
        assert self.settings.privacy is not None
        return self.settings.privacy

    @property
    def delta(self) -> float:
        """The δ in use.

        Raises:
            SettingsError: the δ in silo.toml is too large for the number of samples.
        """
        try:
            return self.terms.delta_of(self.num_examples)
        except ValueError as error:
            raise SettingsError(f"silo.toml: in [privacy], {error}") from None

    def spent(self) -> Spent:
        """Return the privacy spent by all trainings so far.

        Raises:
            BudgetError: the file is damaged.
        """
        charges = self._read()
        epsilon = epsilon_of(history_of(charges), self.delta)
        return Spent(epsilon, self.terms.epsilon, self.delta, len(charges))

    def tighter(self) -> float | None:
        """Return the smaller ε of all trainings so far, see ``tighter_epsilon_of``."""
        return tighter_epsilon_of(history_of(self._read()), self.delta)

    def epsilon_with(self, more: Charge) -> float:
        """Return ε of all trainings so far and one more."""
        return self._epsilon([*self._read(), more])

    def charge(self, one: Charge) -> None:
        """Write a training's charge to disk before it begins; in a simulation, one key costs once.

        Raises:
            SpentError: it would exceed the budget, and is not charged.
            BudgetError: the file is damaged, or another process holds it.
            OSError: it cannot be written.
        """
        with self._held():
            charges = self._read()
            if not self.settings.home and any(known.key == one.key for known in charges):
                return
            after = self._epsilon([*charges, one])
            if after > self.terms.epsilon:
                now = self.spent().text()
                raise SpentError(
                    f"has used up its privacy budget: {now}, and this training would make it "
                    f"{after:.3g}. It stops training and keeps the last model it received."
                )
            self._write([*charges, one], after)

    def objection(self, planned: Iterable[Charge], run: str) -> str:
        """Return why a run's planned trainings are refused at the join; empty if they are accepted.

        Earlier charges of this run are assumed to be part of the plan.
        """
        charges = self._read()
        others = [charge for charge in charges if charge.run != run or not run]
        own = {(n, q): s for n, q, s in history_of(c for c in charges if c not in others)}
        asked = {(n, q): s for n, q, s in history_of(planned)}
        needed = {key: max(own.get(key, 0), asked.get(key, 0)) for key in own.keys() | asked}
        before = {(n, q): s for n, q, s in history_of(others)}
        total = {key: before.get(key, 0) + needed.get(key, 0) for key in before.keys() | needed}
        history = tuple((n, q, s) for (n, q), s in sorted(total.items()) if s)
        epsilon = epsilon_of(history, self.delta)
        if epsilon <= self.terms.epsilon:
            return ""
        return (
            f"has a privacy budget of ε {self.terms.epsilon:g} at δ {self.delta:.3g}, "
            f"{NEIGHBOURS}, of which {self._epsilon(others):.3g} is spent by other runs; with this "
            f"run it would be {epsilon:.3g}. Fewer rounds or epochs, or more noise at the silo, "
            "cost less."
        )

    def rounds_left(self, a_round: Charge, *, most: int = 1_000_000) -> int:
        """Return how many such rounds the budget still allows, at most ``most``."""
        charges = self._read()

        def fits(count: int) -> bool:
            more = replace(a_round, steps=count * a_round.steps)
            return self._epsilon([*charges, more]) <= self.terms.epsilon

        if not fits(1):
            return 0
        low, high = 1, 2
        while high <= most and fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    # ---------------------------------------------------------------- files

    @property
    def _folder(self) -> Path:
        return Path(self.settings.home) / FOLDER

    def _epsilon(self, charges: Iterable[Charge]) -> float:
        return epsilon_of(history_of(charges), self.delta)

    @contextmanager
    def _held(self) -> Iterator[None]:
        if not self.settings.home:
            yield
            return
        make_folder(self._folder, private=True)
        try:
            with locked(self._folder, name=LOCK, deadline_s=LOCK_DEADLINE_S):
                yield
        except LockedError as error:
            raise BudgetError(
                f"the privacy budget is in use by another process: {error}."
            ) from None

    def _read(self) -> tuple[Charge, ...]:
        if not self.settings.home:
            return _memory.get((self.settings.name, self.run), ())
        return read_charges(self.settings.home)

    def _write(self, charges: list[Charge], epsilon: float) -> None:
        if not self.settings.home:
            _memory[self.settings.name, self.run] = tuple(charges)
            return
        kept = {
            "epsilon": epsilon,
            "of": self.terms.epsilon,
            "delta": self.delta,
            "charges": [asdict(charge) for charge in charges],
        }
        write_atomically(self._folder / BUDGET, json.dumps(kept).encode(), private=True)


def read_charges(home: str) -> tuple[Charge, ...]:
    """Return the charges of a silo with a folder, oldest first.

    Raises:
        BudgetError: the file is damaged, so that the spent privacy is unknown.
    """
    return tuple(_checked(one, home) for one in _kept(home).get("charges", ()))


def read_spent(home: str) -> Spent | None:
    """Return the privacy that a silo with a folder had spent after its last training, or None.

    Raises:
        BudgetError: the file is damaged.
    """
    kept = _kept(home)
    if not kept:
        return None
    try:
        charges = len(kept["charges"])
        return Spent(float(kept["epsilon"]), float(kept["of"]), float(kept["delta"]), charges)
    except (KeyError, TypeError, ValueError):
        raise _damaged(home) from None


def _kept(home: str) -> Mapping[str, Any]:
    try:
        kept = json.loads((Path(home) / FOLDER / BUDGET).read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        raise _damaged(home) from None
    if not isinstance(kept, dict) or not isinstance(kept.get("charges"), list):
        raise _damaged(home)
    return kept


def _checked(one: Any, home: str) -> Charge:
    try:
        charge = Charge(**one)
        if charge.noise > 0 and 0 < charge.rate <= 1 and type(charge.steps) is int:
            return charge
    except TypeError:
        pass
    raise _damaged(home)


def _damaged(home: str) -> BudgetError:
    return BudgetError(
        f"{Path(home) / FOLDER / BUDGET} is damaged, so the spent part of the privacy budget is "
        "unknown. Restore it from a copy; without one, the silo's data must not be used for "
        "further training."
    )


def warn_of_a_simulation(name: str) -> None:
    """Log, once a process, that the noise of a silo without a folder is known."""
    if not _warned:
        _warned.add(name)
        log.warning(
            "silo %s has no folder, so its privacy is only simulated: its name and the run's "
            "seed determine the noise, and its budget ends with this process. The same holds "
            "for every silo without a folder.",
            name,
        )
