"""Attacks and accidents against a real SuperLink with TLS. All are refused, none stops the run.

All disturb one run of two honest silos, which goes on round by round meanwhile. Its models must
be those of a run that nobody disturbed, bit for bit.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest

from coterie.client.home.folder import Home
from coterie.server.site.enrolled import names_by_node
from coterie.wire.enrolment import public_pem
from tests.commands import Done, coterie
from tests.e2e import warm
from tests.e2e.gated import ONE_BATCH, TASK
from tests.e2e.organisations import NAMES, SETTINGS, Organisations
from tests.e2e.runs import (
    COMMAND_S,
    COTERIE,
    finished,
    happened,
    in_process,
    record_of,
    until,
    until_happened,
)

pytestmark = pytest.mark.timeout(600)

ROUNDS = 24
KEYS = {
    **{"task": TASK, "strategy": "fedavg", "rounds": ROUNDS},
    **{"min-silos": 2, "seed": 3, **ONE_BATCH},
}
TWICE = """
import runpy
import coterie.engine.fast.silo.link as link
once = link.FleetLink.send
def twice(self, unsent):
    once(self, unsent)
    once(self, unsent)
link.FleetLink.send = twice
runpy.run_module("coterie.client", run_name="__main__")
"""

SKEWED = """
import runpy
from datetime import timedelta
import coterie.engine.fast.silo.calls as inside
right = inside.now
inside.now = lambda: right() + timedelta(seconds=60)
runpy.run_module("coterie.client", run_name="__main__")
"""


class Recorder:
    """A proxy that remembers what a silo sent."""

    def __init__(self, target: int) -> None:
        self.sent: list[bytearray] = []
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            kept = bytearray()
            self.sent.append(kept)
            threading.Thread(target=self._pump, args=(near, far, kept), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, None), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket, kept: bytearray | None) -> None:
        try:
            while data := source.recv(65536):
                if kept is not None:
                    kept += data
                sink.sendall(data)
        except OSError:
            pass
        finally:
            for end in (source, sink):
                end.close()

    def close(self) -> None:
        self._listener.close()


@dataclass
class Attacked:
    """A run that goes on while its federation is attacked."""

    organisations: Organisations
    recorder: Recorder
    folder: Path

    @property
    def num_rounds(self) -> int:
        """Rounds that are over."""
        return len(record_of(self.folder)["rounds"])

    def go_on(self) -> None:
        """Let a round pass; then both silos are held in their training again."""
        assert not happened(self.folder, "end"), "the run was over before the attack"
        self.organisations.gate.hold(len(NAMES), rounds=1)

    def during(self, attacks: Mapping[str, Sequence[str]]) -> dict[str, Done]:
        """Run programs while the run goes on; rounds pass before and after their ends."""
        with ExitStack() as ending:
            processes = {}
            for name, line in attacks.items():
                log = self.organisations.log_of(f"attack-{name}")
                with log.open("wb") as file:
                    processes[name] = warm.popen(line, env=os.environ, stdout=file)
                ending.callback(processes[name].kill)
            self.go_on()
            status = {name: one.wait(COMMAND_S) for name, one in processes.items()}
        self.go_on()
        said = {name: self.organisations.said(f"attack-{name}") for name in status}
        return {name: Done(status[name], "", said[name]) for name in status}


@pytest.fixture(scope="module")
def attacked(resident_pair: Organisations) -> Iterator[Attacked]:
    """a's connection is recorded, b sends every reply twice, c claims the name of a."""
    made = resident_pair
    made.mend()
    made.add("c", 2)
    made.add("away", 3)
    made.wait_for(4)
    recorder = Recorder(made.ports.fleet)
    for name in ("a", "b", "c", "away"):
        assert made.end(name) == 0
    file = made.home_of("a") / "coordinator.json"
    before = file.read_text()
    file.write_text(before.replace(str(made.ports.fleet), str(recorder.port)))
    made.start_silo("a")
    home = str(made.home_of("b"))
    made.start_program("b", sys.executable, "-c", TWICE, "serve", "--home", home, "--verbose")
    claim = made.home_of("c") / "silo.toml"
    claim.write_text(claim.read_text().replace('"c"', '"a"'))
    made.start_silo("c")
    made.wait_for(3)
    made.gate.close()
    rest = ("--min-silos", "2", "--seed", "3", "--task", TASK, *SETTINGS)
    folder = made.submit("fedavg", "--rounds", str(ROUNDS), *rest)
    made.gate.hold(len(NAMES), rounds=1)
    try:
        yield Attacked(made, recorder, folder)
    finally:
        made.gate.open()
        for name in NAMES:
            assert made.end(name) == 0
        file.write_text(before)
        recorder.close()


def stranger(made: Organisations, name: str) -> Path:
    """A silo's folder that knows the coordinator, but whose key nobody enrolled."""
    made.make(name, {"train": 40, "test": 30, "skip": 500})
    shutil.copy(made.home_of("b") / "ca.pem", made.home_of(name))
    shutil.copy(made.home_of("b") / "coordinator.json", made.home_of(name))
    return made.home_of(name)


@pytest.fixture(scope="module")
def done(attacked: Attacked, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    """What silos say that must not get in; all try at the same time."""
    made, folder = attacked.organisations, tmp_path_factory.mktemp("attacks")
    careful = stranger(made, "careful")
    joined = json.loads((careful / "coordinator.json").read_text())
    with Organisations(folder / "other") as other:
        joined["ca"] = other.federation.ca.read_text()
    (careful / "coordinator.json").write_text(json.dumps(joined))
    shutil.copytree(made.home_of("a"), folder / "copy")

    def serve(*words: object, patience: float = 2.0) -> list[str]:
        return [*COTERIE, "silo", "serve", *map(str, words), "--retry-for", str(patience)]

    away = ("serve", "--home", str(made.home_of("away")), "--retry-for", "2")
    return attacked.during(
        {
            "stranger": serve("--home", stranger(made, "stranger")),
            "careful": serve("--home", careful, patience=60),
            "plain": serve("--name", "a", "--superlink", f"127.0.0.1:{made.ports.fleet}"),
            "late": (sys.executable, "-c", SKEWED, *away),
            "copy": serve("--home", folder / "copy"),
            "same": serve("--home", made.home_of("a")),
        }
    )


def test_an_unknown_key_is_refused(done: dict[str, Done]) -> None:
    assert done["stranger"].returncode == 5
    said = done["stranger"].stderr
    assert "refuses this silo's key" in said and "not enrolled" in said


def test_a_server_whose_certificate_is_of_another_ca_is_not_trusted(done: dict[str, Done]) -> None:
    assert done["careful"].returncode == 5
    assert "presents a certificate that this silo does not trust" in done["careful"].stderr
    assert "CERTIFICATE_VERIFY_FAILED" in done["careful"].stderr


def test_plain_text_against_tls_is_refused(done: dict[str, Done]) -> None:
    assert done["plain"].returncode == 5
    assert "without TLS" in done["plain"].stderr


def test_a_clock_that_is_wrong_is_named(done: dict[str, Done]) -> None:
    """Of a silo that is enrolled and was connected."""
    assert done["late"].returncode == 5
    assert "the clock of this machine" in done["late"].stderr and "UTC" in done["late"].stderr


def test_a_second_process_with_the_same_key_is_refused(done: dict[str, Done]) -> None:
    assert done["copy"].returncode == 5
    assert "another process uses it" in done["copy"].stderr
    assert done["same"].returncode == 2
    assert "already running from" in done["same"].stderr


def test_operators_without_tls_are_refused_and_the_api_is_not_open_to_other_machines(
    attacked: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.server.machine.link.CONNECT_DEADLINE_S", 2.0)
    made = attacked.organisations
    done = coterie("status", "--superlink", f"127.0.0.1:{made.ports.control}")
    assert done.returncode != 0
    assert made.federation.config.listen.operators.startswith("127.0.0.1:")


def test_a_recorded_connection_that_is_played_again_has_no_effect(attacked: Attacked) -> None:
    recorder, fleet = attacked.recorder, attacked.organisations.ports.fleet
    assert sum(map(len, recorder.sent)) > attacked.num_rounds * 24_000, "every round's model"
    answers = []
    for kept in list(recorder.sent):
        with socket.create_connection(("127.0.0.1", fleet)) as line:
            line.settimeout(5)
            answer = b""
            try:
                line.sendall(bytes(kept))
                while data := line.recv(65536):
                    answer += data
            except OSError:
                pass
            answers.append(answer)
        attacked.go_on()
    # The server's part of a handshake that cannot be completed, and nothing of a conversation.
    assert answers and all(len(answer) < 5_000 for answer in answers)


def signed_headers(home: Home, when: datetime) -> list[tuple[str, str | bytes]]:
    """Headers as the silo would have signed them at some time."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    key, stamp = home.key(), when.isoformat()
    signature = key.sign(stamp.encode("ascii"), ec.ECDSA(hashes.SHA256()))
    public = public_pem(key.public_key())
    return [
        ("flwr-public-key-bin", public),
        ("flwr-timestamp", stamp),
        ("flwr-signature-bin", signature),
    ]


def test_recorded_headers_are_refused_when_they_are_old_or_for_another_node(
    attacked: Attacked,
) -> None:
    """Inside the TLS connection, as somebody would who has seen a silo's headers elsewhere."""
    from flwr.proto.fleet_pb2 import PullMessagesRequest
    from flwr.proto.fleet_pb2_grpc import FleetStub
    from flwr.proto.node_pb2 import Node

    organisations = attacked.organisations
    made = organisations.federation
    nodes = {name: node for node, name in names_by_node(made.roster).items()}
    credentials = grpc.ssl_channel_credentials(made.ca.read_bytes())
    home = Home(organisations.home_of("a"))
    now = datetime.now(UTC)
    old = signed_headers(home, now - timedelta(seconds=310))
    fresh = signed_headers(home, now)
    changed = [*fresh[:1], (fresh[1][0], (now + timedelta(seconds=1)).isoformat()), fresh[2]]
    with grpc.secure_channel(f"127.0.0.1:{organisations.ports.fleet}", credentials) as channel:
        stub = FleetStub(channel)
        for headers, node, said in (
            (old, "a", "timestamp"),
            (changed, "a", "signature"),
            (fresh, "b", "node"),
            ([], "a", "metadata"),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                stub.PullMessages(
                    PullMessagesRequest(node=Node(node_id=nodes[node])),
                    metadata=headers,
                    timeout=60,
                )
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED, caught.value.details()
            assert said in caught.value.details().lower()


def test_the_run_that_was_attacked_gives_the_models_of_one_that_nobody_disturbed(
    attacked: Attacked, tmp_path: Path
) -> None:
    """With it: replies that were sent twice count once, and a name goes with its key."""
    assert attacked.organisations.num_online() == 3, "a, b, and who claims a's name"
    attacked.organisations.gate.open()
    undisturbed = in_process(tmp_path / "run", *NAMES, **KEYS)
    assert finished(attacked.folder) == undisturbed["model-hashes"]
    record = record_of(attacked.folder)
    assert "claims the name 'a', but its key is enrolled as 'c'" in record["refused"]["c"]
    assert all(set(entry["silos"]) == {"a", "b"} for entry in record["rounds"])
    assert "Traceback" not in attacked.organisations.said("b")


@pytest.mark.nightly
def test_a_removed_silo_is_out_at_once_and_for_good(pair: Organisations) -> None:
    pair.add("gone", 4)
    pair.wait_for(3)
    pair.gate.close()
    keys = ("--rounds", "6", "--min-silos", "3", "--task", TASK, *SETTINGS)
    folder = pair.submit("fedavg", *keys)
    until_happened(folder, "here", 1)
    pair.gate.hold(3, rounds=1)
    assert "is removed" in pair.command("members", "remove", "gone", "--yes")
    pair.gate.open()
    finished(folder)
    assert set(record_of(folder)["final-evaluation"]) == {"a", "b"}
    assert "removed" in pair.command("members", "list")
    until(lambda: "not enrolled" in pair.said("gone"), "the silo to say so", deadline_s=120)
    pair.end("gone")
    home = str(pair.home_of("gone"))
    again = pair.done("silo", "init", "--name", "gone", "--home", home).strip()
    refused = coterie("members", "enrol", again, "--federation", str(pair.coordinator))
    assert refused.returncode == 2 and "never accepted again" in refused.stderr
    done = coterie("silo", "serve", "--home", home, "--retry-for", "2")
    assert done.returncode == 5 and "not enrolled" in done.stderr
    anew = pair.done("silo", "init", "--name", "gone", "--home", home, "--new-key", "--yes")
    pair.join("gone", pair.enrol(anew.strip()))
    pair.start_silo("gone")
    pair.wait_for(3)
