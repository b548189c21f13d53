"""Twenty deliberate defects, each in a copy of the repository, and whether the tests find it.

    python -m tests.mutations [--only 3 --only 7] [--root FOLDER]

A defect is a text of the source that is replaced by another. Tests that name what they guard are
given with it, so that the whole takes minutes. The exit status is 1 if a defect is not found, or
if its text is in the source no more.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = (
    *("client", "engine", "features", "pictures", "server", "strategies", "system", "tasks"),
    "wire",
)
DEADLINE_S = 600.0
NOT_EDITABLE = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "__editable__" not in getattr(f, "__module__", "")]
"""
"""Python reads it when it starts: ``coterie`` is the copy, not the checkout that is installed."""


@dataclass(frozen=True)
class Mutation:
    """A defect.

    Attributes:
        title: what is wrong then.
        where: file or folder whose source holds ``old``, as often as it likes; if the text has
            moved it is looked for everywhere.
        old: text of the source.
        new: text in its place.
        tests: files or folders of tests, of which one has to fail.
    """

    title: str
    where: str
    old: str
    new: str
    tests: str


MUTATIONS = (
    Mutation(
        "a model with NaN is averaged",
        "strategies/rounds",
        "not math.isfinite(largest)",
        "False",
        "tests/contract/test_fuzz.py tests/unit/strategies/test_hcct.py",
    ),
    Mutation(
        "a mean does not weigh silos by their samples",
        "strategies/rounds/models.py",
        "[w / total for w in weights]",
        "[1 / len(weights) for w in weights]",
        "tests/unit/strategies/test_models.py tests/unit/strategies/test_loop.py",
    ),
    Mutation(
        "a file is renamed before it is on the disk",
        "system/files.py",
        "        sync(unfinished)\n",
        "",
        "tests/unit/system",
    ),
    Mutation(
        "the shuffling is the same in every round",
        "client/work",
        "{run_seed}/{silo}/{round_number}/{purpose}",
        "{run_seed}/{silo}/{purpose}",
        "tests/unit/client",
    ),
    Mutation(
        "the samples are not shuffled",
        "client/work",
        "return torch.randperm(len(part), generator=shuffle)",
        "return torch.arange(len(part))",
        "tests/unit/client/test_sgd.py tests/unit/client/test_fast_sgd.py",
    ),
    Mutation(
        "silos are evaluated on what they were trained on",
        "client/work",
        "part(data.x_test, data.y_test, of_test)",
        "part(data.x_train, data.y_train, of_train)",
        "tests/unit/client/test_sgd.py tests/unit/client/test_app.py",
    ),
    Mutation(
        "the proximal term is left out",
        "client/work",
        "                if plan.proximal_mu > 0:",
        "                if False:",
        "tests/unit/client",
    ),
    Mutation(
        "personal layers leave the silo",
        "client/work/train.py",
        "personal.without(work.trained, work.staying)",
        "work.trained",
        "tests/unit/client tests/unit/strategies/test_hcct_family.py",
    ),
    Mutation(
        "a reply leaves although the ledger cannot be written",
        "client/ledger.py",
        "        return _failure(name, error, message)\n    return reply",
        "        log.error(error)\n    return reply",
        "tests/unit/client",
    ),
    Mutation(
        "an error tells the server what the exception says",
        "wire/replies.py",
        "kind = type(error).__name__",
        "kind = repr(error)",
        "tests/unit/client tests/unit/wire/test_wire.py",
    ),
    Mutation(
        "a name is let in whatever key claims it",
        "strategies/rounds/roster.py",
        "if bound != described.name:",
        "if False:",
        "tests/unit/strategies/test_loop.py",
    ),
    Mutation(
        "a second silo of a name is let in",
        "strategies/rounds/roster.py",
        "if any(silo.name == described.name for silo in self._by_node.values()):",
        "if False:",
        "tests/unit/strategies tests/unit/server",
    ),
    Mutation(
        "a silo of another task is let in",
        "strategies/rounds/admission.py",
        "if described.task != task:",
        "if False:",
        "tests/unit/strategies tests/unit/server",
    ),
    Mutation(
        "a removed key is enrolled again",
        "server/site/enrolled.py",
        "if entry.key == new.key and entry.removed:",
        "if False:",
        "tests/unit/server/test_enrolled.py tests/unit/server/test_federation.py",
    ),
    Mutation(
        "an unknown key of a run is ignored",
        "strategies/rounds/options.py",
        'extra="forbid"',
        'extra="ignore"',
        "tests/unit/server/test_config.py tests/unit/strategies",
    ),
    Mutation(
        "a damaged checkpoint is taken",
        "server/runs/checkpoint.py",
        "if _name_of(array) != name:",
        "if False:",
        "tests/unit/server/test_resume.py tests/unit/server/test_checkpoint.py",
    ),
    Mutation(
        "a name of a silo is markup in the report",
        "pictures/page.py",
        "autoescape=True",
        "autoescape=False",
        "tests/unit/server/test_report.py tests/unit/pictures",
    ),
    Mutation(
        "a silo's group may be one smaller than it accepts",
        "strategies/rounds",
        "minimums.get(name, 1) > len(stay)",
        "minimums.get(name, 1) > len(stay) + 1",
        "tests/unit/strategies/test_smallest_groups.py",
    ),
    Mutation(
        "a newcomer begins from the first model",
        "strategies/hcct",
        "return mean_of_all(state.members)",
        "return state.members.initial",
        "tests/unit/strategies/test_hcct.py tests/contract/test_properties.py",
    ),
    Mutation(
        "HCCT forms the groups of a round from the updates of the round before",
        "strategies/hcct",
        "accumulate(memory.get(name), delta, decay=decay)",
        "memory.get(name, delta)",
        "tests/unit/strategies/test_hcct.py tests/unit/strategies/test_hcct_family.py",
    ),
)


def copy_of(root: Path, into: Path) -> Path:
    """A copy of the repository whose parts are importable as ``coterie``."""
    copy = into / "copy"
    skipped = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info")
    shutil.copytree(root, copy, ignore=skipped)
    links = copy / ".links" / "coterie"
    links.mkdir(parents=True)
    for part in PARTS:
        (links / part).symlink_to(copy / part)
    (links / "__init__.py").symlink_to(copy / "api" / "__init__.py")
    (links.parent / "sitecustomize.py").write_text(NOT_EDITABLE)
    return copy


def files_with(mutation: Mutation, copy: Path) -> list[Path]:
    """The files that hold the text to replace: where it is expected, else anywhere."""
    for places in ([copy / mutation.where], [copy / part for part in PARTS]):
        files = [f for place in places for f in (place, *place.rglob("*.py")) if f.is_file()]
        holding = [f for f in files if mutation.old in f.read_text(encoding="utf-8")]
        if holding:
            return holding
    return []


def find(mutation: Mutation, root: Path) -> str:
    """What the tests make of a defect: the first test that found it, or what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of(root, Path(folder))
        files = files_with(mutation, copy)
        if not files:
            return "GONE: this text is in the source no more; update the mutation"
        for file in files:
            text = file.read_text(encoding="utf-8")
            file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
        return _first_failure(copy, [t for t in mutation.tests.split() if (copy / t).exists()])


def _first_failure(copy: Path, tests: Sequence[str]) -> str:
    line = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-p", "no:cacheprovider"]
    chosen = ["-m", "not e2e and not nightly", *tests]
    done = subprocess.run(
        [*line, *chosen],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy / ".links")},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if done.returncode == 0:
        return "NOT FOUND"
    failed = [text for text in done.stdout.splitlines() if text.startswith(("FAILED", "ERROR"))]
    if done.returncode != 1 or not failed:
        return f"BROKEN: pytest ended with {done.returncode}: {done.stdout[-300:]}{done.stderr}"
    return f"found by {failed[0].split(' ', 1)[1].split(' - ')[0]}"


def main() -> int:
    """Try the defects and print a table; 0 if all are found."""
    own = argparse.ArgumentParser(description="Deliberate defects, and which the tests find.")
    own.add_argument("--only", type=int, action="append", help="number of a defect, from 1")
    own.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    given = own.parse_args()
    results = []
    for number, mutation in enumerate(MUTATIONS, start=1):
        if given.only and number not in given.only:
            continue
        started = time.monotonic()
        results.append(find(mutation, given.root.resolve()))
        seconds = time.monotonic() - started
        print(f"{number:2}  {mutation.title}: {results[-1]}  ({seconds:.0f} s)", flush=True)
    found = sum(result.startswith("found") for result in results)
    print(f"{found} of {len(results)} defects are found.")
    return 0 if found == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
