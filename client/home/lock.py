"""One process at a time serves a silo from its folder."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from coterie.client.home.settings import SettingsError
from coterie.system import files

OTHER_FILES = 512
"""Files that a process needs open besides the locks of its silos' folders."""


@contextmanager
def locked(home: Path) -> Iterator[None]:
    """Hold a silo's folder, made if it is not there.

    Two processes would overwrite their models, and push each other out with their one key.

    Raises:
        SettingsError: a process holds it already, or nothing can be written there.
    """
    with ExitStack() as held:
        try:
            files.make_folder(home)
            held.enter_context(files.locked(home))
        except FileExistsError:
            raise SettingsError(
                f"{home} is a file. A silo keeps its models in a folder: name one with --home."
            ) from None
        except OSError as error:
            raise SettingsError(
                f"a silo cannot keep its models in {home}: {error.strerror}. With --home, name a "
                "folder on a disk of this machine that it may write to."
            ) from None
        except files.LockedError:
            raise SettingsError(
                f"a silo is already running from {home}. End that process first, or give this silo "
                "a folder of its own (--home)."
            ) from None
        yield


@contextmanager
def locked_all(homes: Sequence[str]) -> Iterator[None]:
    """Hold the folders of several silos in this process; empty ones keep nothing.

    Raises:
        SettingsError: as ``locked``.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(homes) + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    with ExitStack() as held:
        for home in filter(None, homes):
            held.enter_context(locked(Path(home)))
        yield
