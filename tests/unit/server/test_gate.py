"""Operators are let in by their key and role, over TLS, through the gate of the SuperLink."""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto import control_pb2
from flwr.proto.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server
from flwr.supercore.interceptors import RpcErrorTranslationServerInterceptor
from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin
from flwr.superlink.servicer.control.control_account_auth_interceptor import (
    ControlAccountAuthInterceptor,
)

from coterie.engine.control import CONTROL, digest_of
from coterie.server.machine import signing
from coterie.server.machine.link import bundle_of, control
from coterie.server.machine.signing import Identity, SigningError, Verifier
from coterie.server.runs.config import RunConfig
from coterie.server.site import audit, operators
from coterie.server.site.federation import Federation, create, load
from coterie.server.site.gate import Gate, GrpcGate
from coterie.server.site.operators import local_identity, make_identity, own_identity
from coterie.server.site.queue import Queue, enqueue
from coterie.strategies.errors import FederationError
from coterie.system.ports import free_ports
from coterie.system.processes import account
from coterie.wire.enrolment import OPERATOR, make_request, public_pem, read_request
from tests.commands import coterie


class _SuperLink(ControlServicer):  # type: ignore[misc]
    """What is behind the gate."""

    def StartRun(self, request: Any, context: Any) -> Any:
        return control_pb2.StartRunResponse(run_id=7)

    def StopRun(self, request: Any, context: Any) -> Any:
        if request.run_id == 404:
            raise LookupError
        return control_pb2.StopRunResponse(success=True)

    def ListRuns(self, request: Any, context: Any) -> Any:
        return control_pb2.ListRunsResponse()

    def ListNodes(self, request: Any, context: Any) -> Any:
        return control_pb2.ListNodesResponse()

    def RegisterNode(self, request: Any, context: Any) -> Any:
        return control_pb2.RegisterNodeResponse(node_id=9)

    def StreamLogs(self, request: Any, context: Any) -> Any:
        yield control_pb2.StreamLogsResponse(log_output="one\ntwo\n")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A federation whose gate is open to nobody yet."""
    (port,) = free_ports(1)
    folder = tmp_path_factory.mktemp("gate") / "study"
    federation = create(folder, ["127.0.0.1"], control_port=port)
    key, chain = ((federation.tls / f"server.{end}").read_bytes() for end in ("key", "pem"))
    inner = ControlAccountAuthInterceptor(NoOpControlAuthnPlugin())
    server = grpc.server(
        ThreadPoolExecutor(4),
        interceptors=[RpcErrorTranslationServerInterceptor(), GrpcGate(Gate(federation), inner)],
    )
    add_ControlServicer_to_server(_SuperLink(), server)
    credentials = grpc.ssl_server_credentials([(key, chain)])
    server.add_secure_port(federation.control_address, credentials)
    server.start()
    yield federation
    server.stop(None)


def enrolled(made: Federation, name: str, *roles: str) -> Identity:
    key = ec.generate_private_key(ec.SECP384R1())
    request = read_request(make_request(name, key, kind=OPERATOR), kind=OPERATOR)
    operators.enrol(made, request, roles)
    return Identity(name, key)


def calls(made: Federation, identity: Identity | None) -> Any:
    return control(made.control_address, root_certificates=made.ca, identity=identity)


CONFIG = RunConfig.read({"strategy": "hcct", "rounds": 3})


def test_an_operator_does_what_the_roles_allow_and_is_refused_in_words_otherwise(
    made: Federation,
) -> None:
    with calls(made, enrolled(made, "ada", "run")) as ada:
        assert ada.submit(CONFIG) == 7
        ada.stop(7)
        assert ada.runs() == []
        assert list(ada.log_lines(7, deadline_s=5)) == ["one", "two"]
        with pytest.raises(FederationError) as caught:
            ada.act("remove", name="b")
    assert str(caught.value).endswith(
        "PERMISSION_DENIED: operator 'ada' has the roles run; the role 'enrol' is required to "
        "enrol, remove and withdraw silos. The coordinator's operator can give it with `coterie "
        "operator set-roles ada --role enrol`."
    )
    with calls(made, enrolled(made, "bea", "look")) as bea:
        assert bea.runs() == []
        for refused in (lambda: bea.submit(CONFIG), lambda: bea.stop(7)):
            with pytest.raises(
                FederationError, match="the role 'run' is required to start and stop runs"
            ):
                refused()
        with pytest.raises(
            FederationError, match="the call RegisterNode is not available to operators"
        ):
            bea.register(b"key")
    acts = [(act.who, act.act) for act in audit.verify(made).acts]
    assert acts[:4] == [("ada", "run"), ("ada", "run begun"), ("ada", "stop"), ("ada", "refused")]
    assert ("bea", "refused") in acts and ("bea", "run") not in acts
    assert audit.who_started(made, 7) == "ada" and audit.who_started(made, 8) == ""


def test_who_has_the_folder_may_do_everything(made: Federation) -> None:
    with calls(made, local_identity(made)) as own:
        assert (own.submit(CONFIG), own.register(b"key"), own.nodes()) == (7, 9, [])


def test_nobody_else_gets_in(made: Federation, tmp_path: Path) -> None:
    gone = enrolled(made, "carl", "run")
    stranger = Identity("carl", ec.generate_private_key(ec.SECP384R1()))
    forged = Identity("local", stranger.key)
    operators.remove(made, "carl")
    for who in (gone, stranger, forged):
        with (
            calls(made, who) as refused,
            pytest.raises(FederationError, match="no operator with that name and key is enrolled"),
        ):
            refused.runs()
    with calls(made, None) as refused, pytest.raises(FederationError) as caught:
        refused.runs()
    assert "UNAUTHENTICATED: this coordinator requires an operator key" in str(caught.value)
    with pytest.raises(FederationError, match="this key was removed"):
        request = read_request(make_request("carl", gone.key, kind=OPERATOR), kind=OPERATOR)
        operators.enrol(made, request, ["look"])


def test_what_flower_refuses_is_no_act_that_was_done(made: Federation) -> None:
    with calls(made, enrolled(made, "fay", "run")) as fay:
        with pytest.raises(FederationError, match="refuses"):
            fay.stop(404)
        fay.stop(7)
    acts = [act.act for act in audit.verify(made).acts if act.who == "fay"]
    assert acts == ["stop", "stop failed", "stop"]


def test_roles_change_with_the_next_call(made: Federation) -> None:
    dora = enrolled(made, "dora", "look")
    with calls(made, dora) as asked:
        with pytest.raises(FederationError, match="the role 'enrol' is required"):
            asked.act("remove", name="b")
        operators.change_roles(made, "dora", ["enrol", "run"])
        with pytest.raises(FederationError, match="no silo 'b' is enrolled"):
            asked.act("remove", name="b")
        operators.remove(made, "dora")
        with pytest.raises(FederationError, match="no operator with that name"):
            asked.runs()


def test_silos_are_enrolled_and_removed_from_elsewhere(
    made: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTERIE_OPERATOR", str(tmp_path / "eve"))
    asked = coterie("operator", "init", "--name", "eve")
    assert own_identity() is not None and "Its fingerprint: " in asked.stderr
    folder = str(made.folder)
    done = coterie(
        "operator", "enrol", asked.stdout.strip(), "--role", "enrol", "--federation", folder
    )
    assert "Operator eve is enrolled and may enrol, remove and withdraw silos." in done.stdout
    there = ["--superlink", made.control_address, "--root-certificates", str(made.ca)]
    request = coterie("silo", "init", "--name", "b", "--home", str(tmp_path / "b")).stdout
    sent = coterie("members", "enrol", request, *there)
    assert sent.stdout.startswith("coterie-join."), sent.stderr
    assert "b is enrolled. Key fingerprint:" in sent.stderr
    # The SuperLink behind this gate knows no silos, so it replies that it cannot do it.
    gone = coterie("members", "remove", "b", "--yes", *there)
    assert "b is removed" in gone.stdout + gone.stderr
    withdrawn = coterie("members", "erase", "b", "--yes", *there)
    assert "Silo b withdrew." in withdrawn.stdout and "by eve" in withdrawn.stdout
    refused = coterie("run", "hcct", "--detach", *there)
    assert refused.returncode != 0 and "the role 'run' is required" in refused.stderr
    assert "eve" in coterie("operator", "list", "--federation", folder).stdout
    assert (
        coterie("operator", "set-roles", "eve", "--role", "x", "--federation", folder).returncode
        == 2
    )
    coterie("operator", "remove", "eve", "--yes", "--federation", folder)
    acts = [(act.who, act.act) for act in audit.verify(made).acts]
    assert ("eve", "enrol") in acts and ("eve", "remove") in acts
    assert [a for _, a in acts if "operator" in a] == ["enrol operator", "remove operator"]
    assert "change roles failed" in [a for _, a in acts]


def test_an_operator_elsewhere_queues_lists_and_takes_away_runs_with_the_role(
    made: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = ["--superlink", made.control_address, "--root-certificates", str(made.ca)]
    folder = str(made.folder)
    for name, role in (("ida", "run"), ("gil", "look")):
        monkeypatch.setenv("COTERIE_OPERATOR", str(tmp_path / name))
        request = coterie("operator", "init", "--name", name).stdout.strip()
        coterie("operator", "enrol", request, "--role", role, "--federation", folder)
    refused = coterie("run", "hcct", "--queue", "--detach", *there)
    assert (
        refused.returncode != 0
        and "the role 'run' is required to start and stop runs" in refused.stderr
    )
    monkeypatch.setenv("COTERIE_OPERATOR", str(tmp_path / "ida"))
    queued = coterie("run", "hcct", "--queue", "--priority", "3", "--detach", *there)
    assert queued.returncode == 0, queued.stderr
    assert "run q1 is in the queue. `coterie status --superlink" in queued.stdout
    (entry,) = Queue(made.folder).entries()
    assert (entry.by, entry.priority, entry.alone) == ("ida", 3, True)
    assert entry.keys["runs-dir"] == str(made.runs), "not a folder of the operator's machine"
    monkeypatch.setenv("COTERIE_OPERATOR", str(tmp_path / "gil"))
    row = next(line for line in coterie("status", *there).stdout.splitlines() if " q1 " in line)
    assert row.split()[1:4] == ["3", "hcct", "digits"] and "ida" in row
    refused = coterie("runs", "stop", "q1", *there)
    assert refused.returncode != 0 and "the role 'run' is required" in refused.stderr
    monkeypatch.setenv("COTERIE_OPERATOR", str(tmp_path / "ida"))
    wrong = coterie("run", "--resume", "gone", "--queue", "--detach", *there)
    assert wrong.returncode != 0 and "there is no run 'gone'" in wrong.stderr
    assert coterie("runs", "stop", "q1", *there).stdout == "q1 is taken out of the queue.\n"
    again = coterie("runs", "stop", "q1", *there)
    assert again.returncode != 0 and "no run 'q1' is in the queue" in again.stderr
    acts = [(act.who, act.act) for act in audit.verify(made).acts if act.who in ("ida", "gil")]
    assert ("ida", "queue") in acts and ("ida", "unqueue") in acts
    assert [act for who, act in acts if who == "gil"] == ["refused", "refused"]


def test_a_run_that_the_coordinator_takes_from_the_queue_is_who_queued_its(
    made: Federation,
) -> None:
    """Silos are shown who started a run: the operator, not the coordinator's account."""
    entry = enqueue(made, CONFIG.plain(), who="hal")
    bundle = bundle_of(CONFIG, "for this test")
    Queue(made.folder).change(entry, bundle=digest_of(bundle), state="starting")
    with calls(made, local_identity(made)) as own:
        run = own.submit(CONFIG, bundle)
    assert audit.who_started(made, run) == "hal"
    with calls(made, local_identity(made)) as own:
        own.submit(CONFIG)
    assert audit.who_started(made, run) == account()


def test_nobody_goes_past_a_queue_in_which_all_wait(made: Federation, tmp_path: Path) -> None:
    file = made.folder / "coterie.toml"
    limited = replace(made, config=type(made.config).model_validate(
        {**tomllib.loads(file.read_text()), "runs": {"at_once": 2}}))  # fmt: skip
    passing, request = Gate(limited), control_pb2.StartRunRequest()
    passing.noted(CONTROL + "StartRun", operators.LOCAL, request)
    passing.noted(CONTROL + "StopRun", "ada", control_pb2.StopRunRequest())
    with pytest.raises(FederationError, match=r"at most 2 runs may be active here.*use --queue"):
        passing.noted(CONTROL + "StartRun", "ada", request)


# ---------------------------------------------------------------- the signature


def verifier(key: ec.EllipticCurvePrivateKey, **more: Any) -> Verifier:
    public = public_pem(key.public_key())
    return Verifier(b"CA", lambda name: public if name == "ada" else None, **more)


def test_a_signature_is_for_one_federation_method_request_and_time() -> None:
    ada = Identity("ada", ec.generate_private_key(ec.SECP384R1()))
    signed = signing.metadata(ada, b"CA", "/x/Start", b"body")
    asked = verifier(ada.key)
    assert asked.caller(signed, "/x/Start", b"body") == "ada"
    with pytest.raises(SigningError, match="request rejected as a replay"):
        asked.caller(signed, "/x/Start", b"body")
    for method, body in (("/x/Stop", b"body"), ("/x/Start", b"else")):
        with pytest.raises(SigningError, match="no operator with that name and key"):
            verifier(ada.key).caller(signed, method, body)
    with pytest.raises(SigningError, match="no operator"):
        replace(verifier(ada.key), ca=b"another").caller(signed, "/x/Start", b"body")
    late = verifier(ada.key, clock=lambda: time.time() + 500)
    with pytest.raises(SigningError, match="the clock of this machine is -500 s off"):
        late.caller(signed, "/x/Start", b"body")
    odd = [(key, "nan" if key == signing.WHEN else value) for key, value in signed]
    with pytest.raises(SigningError, match="no operator"):
        verifier(ada.key).caller(odd, "/x/Start", b"body")
    assert signing.metadata(None, b"CA", "/x/Start", b"") == ()


def test_an_operators_key_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    first = make_identity("ada", tmp_path / "op")
    assert public_pem(make_identity("ada", tmp_path / "op").key.public_key()) == public_pem(
        first.key.public_key()
    )
    assert (tmp_path / "op" / "key.pem").stat().st_mode & 0o077 == 0
    with pytest.raises(FederationError, match="contains the key of 'ada'"):
        make_identity("bea", tmp_path / "op")
    with pytest.raises(FederationError, match="and not be 'local'"):
        make_identity("local", tmp_path / "other")
    (tmp_path / "op" / "operator.json").write_text("{}")
    with pytest.raises(FederationError, match="cannot be read"):
        own_identity(tmp_path / "op")


def test_a_damaged_list_of_operators_lets_nobody_in(made: Federation) -> None:
    file = made.folder / operators.LIST
    kept = file.read_bytes() if file.exists() else b"[]"
    file.write_text(json.dumps([{"name": "mallory"}]))
    with pytest.raises(FederationError, match="Restore it from a backup"):
        operators.find(load(made.folder), "mallory")
    file.write_bytes(kept)


def test_too_many_requests_are_not_called_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signing, "MAX_CALLS", 2)
    ada = Identity("ada", ec.generate_private_key(ec.SECP384R1()))
    asked = verifier(ada.key)
    for _ in range(2):
        asked.caller(signing.metadata(ada, b"CA", "/x/Start", b""), "/x/Start", b"")
    with pytest.raises(SigningError, match="more than 2 requests in 240 s"):
        asked.caller(signing.metadata(ada, b"CA", "/x/Start", b""), "/x/Start", b"")
