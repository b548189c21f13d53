"""The commands of a silo: ``coterie silo init``, ``join``, ``check``, ``start``, and its tools."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from coterie.client.cli.tools import add_commands
from coterie.client.home.folder import Home, add_home, create
from coterie.client.home.settings import SettingsError


def run(arguments: Sequence[str]) -> int:
    """Run the command that the first argument names; return the exit status.

    Raises:
        SettingsError, TaskError, OSError: what a person at the silo can mend.
    """
    given = _parser().parse_args(arguments)
    status: int = given.work(given)
    return status


def _parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="coterie silo")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    formatting = argparse.RawDescriptionHelpFormatter

    init = commands.add_parser(
        "init",
        help="make the silo's folder, with a key and a commented silo.toml",
        description="Make the silo's folder, with a key and a commented silo.toml, and print the "
        "enrolment request for the operator. The private key never leaves the folder.",
        epilog="example:  coterie silo init --name hospital-b --task study.toml --data /data/study",
        formatter_class=formatting,
    )
    init.add_argument("--name", required=True, help="unique in the federation, e.g. hospital-b")
    init.add_argument("--home", type=Path, help="the folder [default: the name]")
    init.add_argument(
        "--task", default="", help="for silo.toml: a name, or a .toml file [default: digits]"
    )
    init.add_argument("--data", type=Path, help="for silo.toml: where the data is")
    init.add_argument(
        "--new-key", action="store_true", help="replace the key; the silo must be enrolled again"
    )
    init.set_defaults(work=_init)

    join = commands.add_parser(
        "join",
        help="take the operator's answer, the join bundle",
        description="Take the operator's answer: where the coordinator is, and by which "
        "certificate it is known.",
        epilog="example:  coterie silo join coterie-join.…  --home hospital-b",
        formatter_class=formatting,
    )
    join.add_argument("bundle", nargs="+", help="the line that `coterie enrol` printed")
    add_home(join)
    join.set_defaults(work=_join)

    check = commands.add_parser(
        "check",
        help="load the data, train one epoch, say what would leave",
        description="Load the data, show counts and schema, train one local epoch on the "
        "device, and say what would leave the silo. Nothing is sent.",
        epilog="example:  coterie silo check --home hospital-b",
        formatter_class=formatting,
    )
    add_home(check)
    check.set_defaults(work=_check)

    start = commands.add_parser(
        "start",
        help="serve the federation until told to end",
        description="Serve the federation with this silo's data, in the foreground. End it with "
        "SIGTERM or Ctrl-C.",
        epilog="example:  coterie silo start --home hospital-b",
        formatter_class=formatting,
    )
    add_home(start)
    start.add_argument(
        "--patience",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="give up after so long without a SuperLink [default: 600]",
    )
    start.add_argument("--verbose", action="store_true", help="log every message")
    start.set_defaults(work=_start)
    add_commands(commands)
    return top


def _init(given: argparse.Namespace) -> int:
    folder = given.home or Path(given.name)
    home = create(folder, given.name, task=given.task, data=given.data)
    if given.new_key:
        with home.locked():
            home.new_key()
    say(f"Silo {given.name} is in {home.folder}. Its key fingerprint: {home.fingerprint()}")
    say("1. Give the operator this line, and compare the fingerprint with them by telephone:")
    print(home.request(), flush=True)
    say("2. Say in silo.toml where your data is, and look at it with `coterie silo check`.")
    say("3. Run `coterie silo join` with the operator's answer, then `coterie silo start`.")
    return 0


def _join(given: argparse.Namespace) -> int:
    from coterie.wire.enrolment import fingerprint_of_certificate

    home = Home(given.home)
    bundle = home.join("".join(given.bundle))
    say(f"Silo {bundle.name} will connect to {bundle.address}.")
    say(f"CA fingerprint: {fingerprint_of_certificate(bundle.ca)}. The operator must see the same.")
    say("Next: coterie silo start")
    return 0


def _check(given: argparse.Namespace) -> int:
    from coterie.client.cli.check import check

    for line in check(Home(given.home).settings()):
        print(line)
    return 0


def _start(given: argparse.Namespace) -> int:
    from coterie.client.__main__ import log_to_stderr
    from coterie.client.resident.host import Connection
    from coterie.client.resident.serve import serve

    log_to_stderr(verbose=given.verbose)
    home = Home(given.home)
    settings = home.settings()
    address, ca = home.coordinator()
    key = home.key()
    with home.locked():
        _stand_back(home)
        keys = (key, key.public_key())
        serve([settings], Connection(address, ca, keys, patience_s=given.patience))
    return 0


def _stand_back(home: Home) -> None:
    """Limits of the process itself."""
    compute = home.config.compute
    if compute.nice:
        os.nice(compute.nice)
    if compute.gpu_memory < 1:
        import torch

        if torch.cuda.is_available():
            for device in range(torch.cuda.device_count()):
                torch.cuda.set_per_process_memory_fraction(compute.gpu_memory, device)
        elif compute.device.startswith("cuda"):
            raise SettingsError("gpu_memory is set, but torch finds no CUDA device.")


def say(text: str) -> None:
    """To the person, beside what is meant to be copied or piped."""
    print(text, file=sys.stderr, flush=True)
