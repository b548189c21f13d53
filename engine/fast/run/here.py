"""A run whose ServerApp is this process, in place of one that an executor starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import grpc
from flwr.common.serde import run_from_proto
from flwr.proto.runtime_pb2 import (
    ClaimTaskRequest,
    PullPendingTasksRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.proto.runtime_pb2_grpc import RuntimeStub
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.superlink.grid.grpc_grid import GrpcGrid

from coterie.engine.fast.run.pulling import fast_engine
from coterie.engine.port import Engine
from coterie.system.calls import open_channel

DEADLINE_S = 10.0
"""Of a call to a SuperLink on this machine."""


@contextmanager
def run_here(address: str, run_id: int) -> Iterator[Engine]:
    """Provide the engine of a run that was submitted to a SuperLink without TLS or an executor.

    The run ends with this block, as failed if the block raises. ``address`` is ``HOST:PORT`` of
    the Runtime API.

    Raises:
        LookupError: the run is not pending: another process has it, or it is over.
        grpc.RpcError: the SuperLink does not answer.
    """
    with closing(open_channel(address, None)) as channel:
        stub = RuntimeStub(channel)
        token = _claimed(stub, run_id)
        own = {"metadata": (("flwr-task-token", token),), "timeout": DEADLINE_S}

        def beat() -> bool:
            try:
                stub.SendTaskHeartbeat(SendTaskHeartbeatRequest(), **own)
            except grpc.RpcError:
                return False
            return True

        run = stub.PullTaskInput(PullTaskInputRequest(), **own).run
        grid = GrpcGrid(address, insecure=True, token=token)
        grid.set_run(run_from_proto(run))
        alive, ended = HeartbeatSender(beat), PushTaskOutputRequest(sub_status="failed")
        alive.start()
        try:
            with closing(grid), closing(fast_engine(grid)) as engine:
                yield engine
            ended.sub_status = "completed"
        except BaseException as error:
            ended.details = f"{type(error).__name__}: {error}"
            raise
        finally:
            alive.stop()
            with suppress(grpc.RpcError):  # the run has its result, or a better reason
                stub.PushTaskOutput(ended, **own)


def _claimed(stub: RuntimeStub, run_id: int) -> str:
    """Return the token of a run's ServerApp, which only one process gets."""
    for task in stub.PullPendingTasks(PullPendingTasksRequest(), timeout=DEADLINE_S).tasks:
        if task.run_id == run_id:
            claim = ClaimTaskRequest(task_id=task.task_id)
            if token := stub.ClaimTask(claim, timeout=DEADLINE_S).token:
                return str(token)
    raise LookupError(f"run {run_id} is not pending at this SuperLink.")
