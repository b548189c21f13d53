"""Attacks and accidents against a real SuperLink with TLS. All are refused, none stops the run.

Every test disturbs a run of two honest silos, and the models of that run must be those of a run
that nobody disturbed, bit for bit.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from coterie.client.home.folder import Home
from coterie.server.site.enrolled import names_by_node
from coterie.wire.enrolment import public_pem
from tests.e2e.conftest import coterie, record_of, until
from tests.e2e.organisations import Organisations

pytestmark = pytest.mark.timeout(600)

RUN = ("fedavg", "--rounds", "12", "--min-silos", "2", "--seed", "3", "--set", "local-epochs=2")


@pytest.fixture(scope="module")
def organisations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Organisations]:
    with Organisations(tmp_path_factory.mktemp("organisations")) as made:
        made.start_superlink()
        made.add("a", 0)
        made.add("b", 1)
        made.wait_for(2)
        yield made


@pytest.fixture(scope="module")
def undisturbed(organisations: Organisations) -> dict[str, str]:
    """Hashes of the models of a run that nobody disturbs."""
    return finished(organisations.submit(*RUN))


def finished(folder: Path) -> dict[str, str]:
    """Wait until a run is over; return the hashes of its models."""
    until(lambda: happened(folder, "end"), f"the end of {folder.name}", deadline_s=150)
    record = record_of(folder)
    assert record["status"] == "completed", record.get("error")
    hashes: dict[str, str] = record["model-hashes"]
    return hashes


def happened(folder: Path, event: str) -> bool:
    """Whether a run's record has such an event already."""
    file = folder / "events.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return any(json.loads(line)["event"] == event for line in lines)


def disturbed(organisations: Organisations, attack: Callable[[], Any]) -> tuple[Path, Any]:
    """Start a run, attack when it has begun; return its folder and what the attack returned."""
    folder = organisations.submit(*RUN)
    until(lambda: happened(folder, "round"), "round 1", deadline_s=120)
    return folder, attack()


def stranger(organisations: Organisations, name: str, like: str = "a") -> Path:
    """A silo's folder that knows the coordinator, but whose key nobody enrolled."""
    organisations.make(name, {"train": 40, "test": 30, "skip": 500})
    for file in ("ca.pem", "coordinator.json"):
        shutil.copy(organisations.home_of(like) / file, organisations.home_of(name) / file)
    return organisations.home_of(name)


def start(home: Path, *, patience: float = 2.0) -> subprocess.CompletedProcess[str]:
    """``coterie silo start`` that is expected to end by itself."""
    own = ("--home", str(home), "--patience", str(patience))
    return coterie("silo", "start", *own, deadline_s=120)


def test_an_unknown_key_is_refused(
    organisations: Organisations, undisturbed: dict[str, str]
) -> None:
    home = stranger(organisations, "stranger")
    folder, done = disturbed(organisations, lambda: start(home))
    assert done.returncode == 5
    assert "refuses this silo's key" in done.stderr and "not enrolled" in done.stderr
    assert finished(folder) == undisturbed


def test_an_enrolled_silo_that_claims_another_s_name_is_refused(
    organisations: Organisations, undisturbed: dict[str, str]
) -> None:
    organisations.add("c", 2)
    organisations.wait_for(3)
    assert organisations.end("c") == 0
    text = (organisations.home_of("c") / "silo.toml").read_text()
    (organisations.home_of("c") / "silo.toml").write_text(text.replace('"c"', '"a"'))
    organisations.start_silo("c")
    organisations.wait_for(3)
    folder = organisations.submit(*RUN)
    assert finished(folder) == undisturbed
    refused = record_of(folder)["refused"]
    assert "claims the name 'a', but its key is enrolled as 'c'" in refused["c"]
    organisations.end("c")


def test_a_server_whose_certificate_is_of_another_ca_is_not_trusted(
    organisations: Organisations, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    home = stranger(organisations, "careful")
    with Organisations(tmp_path) as other:
        joined = json.loads((home / "coordinator.json").read_text())
        joined["ca"] = other.federation.ca.read_text()
        (home / "coordinator.json").write_text(json.dumps(joined))
    folder, done = disturbed(organisations, lambda: start(home, patience=60))
    assert done.returncode == 5
    assert "TLS with the SuperLink" in done.stderr and "CERTIFICATE_VERIFY_FAILED" in done.stderr
    assert finished(folder) == undisturbed


def test_plain_text_against_tls_is_refused(
    organisations: Organisations, undisturbed: dict[str, str]
) -> None:
    address = f"127.0.0.1:{organisations.ports.fleet}"
    folder, done = disturbed(
        organisations,
        lambda: coterie(
            "silo", "--name", "a", "--superlink", address, "--patience", "2", deadline_s=120
        ),
    )
    assert done.returncode == 5
    assert "without TLS" in done.stderr
    assert finished(folder) == undisturbed


def test_operators_without_tls_are_refused_and_the_api_is_not_open_to_other_machines(
    organisations: Organisations,
) -> None:
    done = coterie("status", "--superlink", f"127.0.0.1:{organisations.ports.control}")
    assert done.returncode != 0
    assert organisations.federation.config.listen.operators.startswith("127.0.0.1:")


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


def test_a_recorded_connection_that_is_played_again_has_no_effect(
    organisations: Organisations, undisturbed: dict[str, str]
) -> None:
    recorder = Recorder(organisations.ports.fleet)
    file = organisations.home_of("a") / "coordinator.json"
    before = file.read_text()
    try:
        organisations.end("a")
        file.write_text(before.replace(str(organisations.ports.fleet), str(recorder.port)))
        organisations.start_silo("a")
        organisations.wait_for(2)
        assert finished(organisations.submit(*RUN)) == undisturbed
        assert sum(map(len, recorder.sent)) > 12 * 24_000, "every round's model went through it"

        def replay() -> list[bytes]:
            answers = []
            for kept in list(recorder.sent):
                with socket.create_connection(("127.0.0.1", organisations.ports.fleet)) as line:
                    line.settimeout(5)
                    answer = b""
                    try:
                        line.sendall(bytes(kept))
                        while data := line.recv(65536):
                            answer += data
                    except OSError:
                        pass
                    answers.append(answer)
            return answers

        folder, answers = disturbed(organisations, replay)
        assert finished(folder) == undisturbed
        # The server's part of a handshake that cannot be completed, and nothing of a conversation.
        assert all(len(answer) < 5_000 for answer in answers)
    finally:
        organisations.end("a")
        file.write_text(before)
        recorder.close()
        organisations.start_silo("a")
        organisations.wait_for(2)


TWICE = """
import sys
import coterie.client.resident.link as link
once = link.FleetLink.send
def twice(self, reply, *, seconds):
    once(self, reply, seconds=seconds)
    once(self, reply, seconds=seconds)
link.FleetLink.send = twice
from coterie.client.cli.main import app
app(prog_name="coterie silo")
"""


def test_a_reply_that_is_sent_twice_counts_once(
    organisations: Organisations, undisturbed: dict[str, str]
) -> None:
    organisations.end("b")
    log = organisations.folder / "twice.log"
    with log.open("wb") as out:
        home = str(organisations.home_of("b"))
        twice = subprocess.Popen(
            [sys.executable, "-c", TWICE, "start", "--home", home, "--verbose"],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        organisations.wait_for(2)
        assert finished(organisations.submit(*RUN)) == undisturbed
        assert "Traceback" not in log.read_text()
    finally:
        twice.terminate()
        twice.wait(20)
        organisations.start_silo("b")
        organisations.wait_for(2)


def signed_headers(home: Home, when: datetime) -> list[tuple[str, str | bytes]]:
    """Headers as the silo would have signed them at some time."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from flwr.common.constant import PUBLIC_KEY_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER

    key, stamp = home.key(), when.isoformat()
    signature = key.sign(stamp.encode("ascii"), ec.ECDSA(hashes.SHA256()))
    public = public_pem(key.public_key())
    return [(PUBLIC_KEY_HEADER, public), (TIMESTAMP_HEADER, stamp), (SIGNATURE_HEADER, signature)]


def test_recorded_headers_are_refused_when_they_are_old_or_for_another_node(
    organisations: Organisations,
) -> None:
    """Inside the TLS connection, as somebody would who has seen a silo's headers elsewhere."""
    from flwr.proto.fleet_pb2 import PullMessagesRequest
    from flwr.proto.fleet_pb2_grpc import FleetStub
    from flwr.proto.node_pb2 import Node

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


SKEWED = """
import sys
from datetime import timedelta
import flwr.client.grpc_rere_client.node_auth_client_interceptor as inside
right = inside.now
inside.now = lambda: right() + timedelta(seconds={seconds})
from coterie.client.cli.main import app
app(prog_name="coterie silo")
"""


@pytest.mark.parametrize("seconds", [60, -400])
def test_a_clock_that_is_wrong_is_named(
    organisations: Organisations, undisturbed: dict[str, str], seconds: int
) -> None:
    organisations.add("skewed", 3)
    organisations.wait_for(3)
    organisations.end("skewed")
    home = organisations.home_of("skewed")

    def attack() -> subprocess.CompletedProcess[str]:
        code = SKEWED.format(seconds=seconds)
        return subprocess.run(
            [sys.executable, "-c", code, "start", "--home", str(home), "--patience", "2"],
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )

    folder, done = disturbed(organisations, attack)
    assert done.returncode == 5
    assert "the clock of this machine" in done.stderr and "UTC" in done.stderr
    assert finished(folder) == undisturbed


def test_a_second_process_with_the_same_key_is_refused(
    organisations: Organisations, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    copied = tmp_path / "copy"
    shutil.copytree(organisations.home_of("a"), copied)

    def attack() -> tuple[Any, Any]:
        return start(copied), start(organisations.home_of("a"))

    folder, (elsewhere, same) = disturbed(organisations, attack)
    assert elsewhere.returncode == 5
    assert "another process uses it" in elsewhere.stderr
    assert same.returncode == 2
    assert "already running from" in same.stderr
    assert finished(folder) == undisturbed


def test_a_removed_silo_is_out_at_once_and_for_good(organisations: Organisations) -> None:
    organisations.add("gone", 4)
    organisations.wait_for(3)
    keys = ("fedavg", "--rounds", "12", "--min-silos", "3", "--set", "local-epochs=10")
    folder = organisations.submit(*keys)
    until(lambda: happened(folder, "round"), "round 1", deadline_s=120)
    assert "is removed" in organisations.command("remove", "gone")
    finished(folder)
    record = record_of(folder)
    assert set(record["final-evaluation"]) == {"a", "b"}
    assert "removed" in organisations.command("roster")
    until(
        lambda: "not enrolled" in organisations.said("gone"), "the silo to say so", deadline_s=120
    )
    organisations.end("gone")
    home = organisations.home_of("gone")
    again = coterie("silo", "init", "--name", "gone", "--home", str(home)).stdout.strip()
    refused = coterie("enrol", again, "--federation", str(organisations.coordinator))
    assert refused.returncode == 2 and "never let in again" in refused.stderr
    done = start(home)
    assert done.returncode == 5 and "not enrolled" in done.stderr
    anew = coterie("silo", "init", "--name", "gone", "--home", str(home), "--new-key")
    organisations.join("gone", organisations.enrol(anew.stdout.strip()))
    organisations.start_silo("gone")
    organisations.wait_for(3)
    organisations.end("gone")
