"""The silo's process: ``python -m client``, also ``coterie silo``."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

COMMANDS = ("init", "join", "check", "start", "ledger", "predict")

EXIT_CONFIG, EXIT_LINK = 2, 5

EXAMPLE = """\
In a federation of several organisations, with TLS and a key of its own:
  coterie silo init --name hospital-b     make the silo's folder and an enrolment request
  coterie silo join LINE                  take the operator's answer
  coterie silo check                      load the data, train one epoch, say what would leave
  coterie silo start                      serve
With what it keeps in its folder:
  coterie silo ledger                     what left it
  coterie silo predict                    ask a model that it kept
Each of them has --help.

examples:
  coterie silo --name hospital-b --task digits --set train=120
  coterie silo report --home /data/coterie
  coterie silo --name north --task my_task:Task --set data=/data/north --superlink fl.example:9092
  coterie silo --simulation hundred.toml --partitions 0-49
  coterie silo --partitions 0-249/1000 --task mnist/mclr --set data=/data \
      --set split=power-law --set test-share=0.1
"""


def parser() -> argparse.ArgumentParser:
    """The command line of a silo."""
    own = argparse.ArgumentParser(
        prog="coterie silo",
        description="Serve a federation from this machine: one long-lived process that trains on "
        "its own data and talks gRPC to the SuperLink. End it with SIGTERM or Ctrl-C.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    own.add_argument("--name", help="the silo's name, unique in the federation")
    own.add_argument(
        "--partitions",
        metavar="FIRST-LAST/TOTAL",
        help="be these silos of a simulation, in one process, instead of one with a name",
    )
    own.add_argument(
        "--simulation",
        type=Path,
        metavar="FILE",
        help="simulation file (docs/how-to/simulate.md): task, options and number of silos",
    )
    own.add_argument(
        "--parallel",
        type=int,
        default=4,
        metavar="N",
        help="with --partitions: messages in hand at once; training is one at a time",
    )
    own.add_argument("--task", default="digits", help="built-in name, or module:attribute")
    own.add_argument(
        "--set",
        dest="options",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the task, e.g. data=/folder; may be given several times",
    )
    own.add_argument(
        "--superlink", default="127.0.0.1:9092", metavar="HOST:PORT", help="its Fleet API"
    )
    own.add_argument("--root-certificates", type=Path, help="PEM file of the CA; without: no TLS")
    own.add_argument("--alpha", type=float, help="this silo's own hunger for data (HCCT)")
    own.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    own.add_argument("--threads", type=int, default=1, help="CPU threads; 0 is torch's choice")
    own.add_argument("--home", default="", help="folder for the silo's own models, for one process")
    own.add_argument(
        "--share-label-counts",
        action="store_true",
        help="consent to tell the server how many training samples of each label there are; every "
        "silo is told their sum over all silos, as shares (FedGen asks; nothing else does)",
    )
    own.add_argument(
        "--patience",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="give up after so long without a SuperLink",
    )
    own.add_argument("--verbose", action="store_true", help="log every message")
    return own


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a silo, or one of its commands; return its exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments and arguments[0] == "report":
        from coterie.client.cli.report import main as report

        return report(arguments[1:])
    if arguments and arguments[0] in COMMANDS:
        from coterie.client.cli.commands import run

        return _reported(lambda: run(arguments))
    given = parser().parse_args(arguments)
    log_to_stderr(verbose=given.verbose)
    return _reported(lambda: _serve(given))


def log_to_stderr(*, verbose: bool) -> None:
    """Log what the silo does; what Flower and gRPC do only if it is a warning."""
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    for noisy in ("asyncio", "flwr", "grpc"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _reported(work: Callable[[], int]) -> int:
    """Errors that a person can mend are one line and an exit status."""
    from coterie.client.home.settings import SettingsError
    from coterie.tasks.base import TaskError

    try:
        return work()
    except (SettingsError, TaskError, OSError) as error:
        from coterie.client.resident.link import LinkError

        print(f"coterie silo: {error}", file=sys.stderr)
        return EXIT_LINK if isinstance(error, LinkError) else EXIT_CONFIG


def _serve(given: argparse.Namespace) -> int:
    from coterie.client.home.lock import locked_all
    from coterie.client.home.policy import Policy
    from coterie.client.home.settings import SettingsError, SiloSettings, options_of

    if given.partitions or given.simulation:
        return _serve_partitions(given)
    if given.name is None:
        raise SettingsError("a silo needs --name, or --partitions to be several of a simulation.")
    settings = SiloSettings(
        name=given.name,
        task=given.task,
        options=options_of(given.options),
        alpha=given.alpha,
        device=given.device,
        threads=given.threads,
        home=given.home,
        policy=Policy(label_counts=given.share_label_counts),
    )
    from coterie.client.resident.host import Connection
    from coterie.client.resident.serve import serve

    connection = Connection(given.superlink, given.root_certificates, patience_s=given.patience)
    with locked_all([settings.home]):
        serve([settings], connection)
    return 0


def _serve_partitions(given: argparse.Namespace) -> int:
    from coterie.client.home.lock import locked_all
    from coterie.client.home.settings import options_of
    from coterie.client.resident.host import Connection
    from coterie.client.resident.serve import serve
    from coterie.client.resident.virtual import settings_of

    settings = settings_of(given, options_of(given.options))
    connection = Connection(given.superlink, given.root_certificates, patience_s=given.patience)
    with locked_all([one.home for one in settings]):
        serve(settings, connection, parallel=given.parallel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
