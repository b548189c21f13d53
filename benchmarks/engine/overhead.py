"""Round overhead of a deployment: stock SuperNodes beside resident silos, in one run.

    python -m benchmarks.engine.overhead                  # everything; some minutes
    python -m benchmarks.engine.overhead --parts rounds   # or one of the others

Parts: training, rounds, apps, start, idle, sizes.

The training step is empty, so a round's time is overhead.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import tomli_w
from flwr.clientapp import ClientApp

from benchmarks.engine.overhead_app import NUM_LAYERS
from benchmarks.engine.scale import cpu_seconds
from benchmarks.kit import Entry, Store, columns, page, read, select
from coterie.server.machine.link import control
from coterie.server.machine.local import LocalFederation, SiloSpec
from coterie.server.machine.superlink import Ports, SuperLink
from coterie.system.processes import family

APP = Path(__file__).with_name("overhead_app.py")
NODES = 4
SMALL_MB = 0.4


# ---------------------------------------------------------------- a run of one of the two loops


def submit(superlink: SuperLink, component: str, out: Path, *, app: Path = APP, **keys: Any) -> int:
    """Ship a module with a ServerApp and a ClientApp as a Flower app and start it."""
    from flwr.cli.build import build_fab_from_files
    from flwr.common.serde import fab_to_proto
    from flwr.supercore.fab import Fab

    manifest = {
        "project": {
            "name": "overhead",
            "version": "1.0.0",
            "license": "Apache-2.0",
            "dependencies": ["flwr>=1.34,<1.35"],
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "coterie",
                    "components": {
                        "serverapp": f"{app.stem}:{component}",
                        "clientapp": f"{app.stem}:client_app",
                    },
                    "config": {"out": str(out), **keys},
                }
            }
        },
    }
    files: dict[str, bytes | Path] = {
        "pyproject.toml": tomli_w.dumps(manifest).encode(),
        app.name: app,
    }
    content, _ = build_fab_from_files(files)
    fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
    with control(superlink.control_address) as calls:
        reply = calls._call("StartRun", fab=fab_to_proto(fab))
    return int(reply.run_id)


def round_times(
    superlink: SuperLink, component: str, *, deadline_s: float, app: Path = APP, **keys: Any
) -> list[float]:
    """Run one of the loops; return its round times in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.json"
        run_id = submit(superlink, component, out, app=app, **keys)
        deadline = time.monotonic() + deadline_s
        while not out.exists():
            with control(superlink.control_address) as calls:
                (info,) = calls.runs(run_id)
            if info.ended and not out.exists():
                raise RuntimeError(f"the {component} run ended without a result: {info.details}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"the {component} run took longer than {deadline_s:.0f} s")
            time.sleep(0.5)
        time.sleep(0.2)
        seconds: list[float] = json.loads(out.read_text())
    return seconds


@contextmanager
def processes(commands: Sequence[Sequence[str]], folder: Path) -> Iterator[None]:
    """Start programs and end them afterwards."""
    environment = {
        **os.environ,
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_HOME": str(folder / "flwr"),
        "PATH": str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(
            [str(APP.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    }
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "nodes.log").open("wb") as log:
        running = [
            subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            for command in commands
        ]
        try:
            yield
        finally:
            for process in running:
                process.terminate()
            for process in running:
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()


def stock_nodes(superlink: SuperLink, count: int) -> list[list[str]]:
    """Command lines of Flower's own SuperNodes."""
    return [
        [
            "flower-supernode",
            "--insecure",
            "--superlink",
            superlink.fleet_address,
            "--clientappio-api-address",
            f"127.0.0.1:{Ports.free().fleet}",
        ]
        for _ in range(count)
    ]


def resident_nodes(superlink: SuperLink, count: int) -> list[list[str]]:
    """Command lines of resident silos with the same empty app."""
    own = [sys.executable, "-m", "benchmarks.engine.overhead", "--silo", superlink.fleet_address]
    return [[*own, f"silo-{i}"] for i in range(count)]


def app_nodes(superlink: SuperLink, count: int) -> list[list[str]]:
    """Command lines of resident silos that serve the empty app as one of a stranger's."""
    own = [sys.executable, "-m", "coterie.client", "serve", "--superlink", superlink.fleet_address]
    own += ["--app", "benchmarks.engine.overhead_app:client_app"]
    return [[*own, "--name", f"silo-{i}", "--set", f"name=silo-{i}"] for i in range(count)]


def rounds_of_app(
    nodes: Callable[[SuperLink, int], list[list[str]]], count: int, rounds: int, folder: Path
) -> list[float]:
    """Round times of coterie's loop with any nodes, without the first round."""
    with (
        SuperLink(folder / "superlink") as superlink,
        processes(nodes(superlink, count), folder),
    ):
        wait_online(superlink, count)
        keys: dict[str, Any] = {"nodes": count, "megabytes": SMALL_MB, "rounds": rounds + 1}
        return round_times(superlink, "resident_app", deadline_s=900, **keys)[1:]


def serve(app: ClientApp, address: str, name: str) -> None:
    """One resident silo with an empty app. torch is loaded, as a real silo has it."""
    import torch

    from coterie.client.home.settings import SiloSettings
    from coterie.client.resident.host import Host
    from coterie.engine.fast.silo.process import FastSilos
    from coterie.engine.port import Connection

    torch.set_num_threads(1)
    way = Connection(address)
    host = Host(app, [SiloSettings(name=name)], way, FastSilos(way, several=False))
    host.stop_on_signals()
    host.run()


def resident_rounds(count: int, megabytes: float, rounds: int, folder: Path) -> list[float]:
    """Round times with resident silos."""
    with residents(count, folder) as run:
        return run(megabytes, rounds)


UNCOUNTED = 3
"""First rounds of a run that are not counted: in the first the silos are met, then the coordinator
rounds models if silos have shown that they know how, and memory is what it is in later rounds."""


@contextmanager
def residents(count: int, folder: Path) -> Iterator[Callable[..., list[float]]]:
    """What gives that for a model of so many MB and so many rounds, as often as it is called."""

    def run(megabytes: float, rounds: int, **how: str) -> list[float]:
        sizes = {"nodes": count, "megabytes": megabytes, "rounds": rounds + UNCOUNTED}
        keys: dict[str, Any] = {**sizes, **how}
        return round_times(superlink, "resident_app", deadline_s=900, **keys)[UNCOUNTED:]

    with (
        SuperLink(folder / "superlink") as superlink,
        processes(resident_nodes(superlink, count), folder),
    ):
        wait_online(superlink, count)
        yield run


def stock_rounds(count: int, megabytes: float, rounds: int, folder: Path) -> list[float]:
    """Round times with stock SuperNodes and Flower's loop, without the first round."""
    with (
        SuperLink(folder / "superlink") as superlink,
        processes(stock_nodes(superlink, count), folder),
    ):
        wait_online(superlink, count)
        keys: dict[str, Any] = {"nodes": count, "megabytes": megabytes, "rounds": rounds + 1}
        return round_times(superlink, "stock_app", deadline_s=900, **keys)[1:]


def wait_online(superlink: SuperLink, count: int) -> None:
    """Wait until so many nodes are connected, 240 s at most."""
    deadline = time.monotonic() + 240
    with control(superlink.control_address) as calls:
        while calls.num_online() < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{calls.num_online()} of {count} nodes connected in 240 s")
            time.sleep(0.1)


# ---------------------------------------------------------------- the floor: a bare gRPC stream

CHUNK = 5 * 1024 * 1024


class _Stream(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Sends ``size`` bytes down, takes what comes up; no serialisation at all."""

    def __init__(self, size: int) -> None:
        self.size = size

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        def down(request: bytes, context: object) -> Iterator[bytes]:
            yield from _chunks(self.size)

        def up(requests: Iterator[bytes], context: object) -> bytes:
            return str(sum(len(part) for part in requests)).encode()

        if details.method.endswith("down"):
            return grpc.unary_stream_rpc_method_handler(down)
        return grpc.stream_unary_rpc_method_handler(up)


def _chunks(size: int) -> Iterator[bytes]:
    whole, rest = divmod(size, CHUNK)
    block = os.urandom(min(size, CHUNK))
    for _ in range(whole):
        yield block
    if rest:
        yield block[:rest]


OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@contextmanager
def bare_streams(
    count: int, megabytes: float, repeats: int, folder: Path
) -> Iterator[Callable[[], float]]:
    """What gives the seconds in which ``count`` processes each fetch a model and send one, over
    plain gRPC, up to ``repeats`` times."""
    size = int(megabytes * 1e6)
    server = grpc.server(futures.ThreadPoolExecutor(16), options=OPTIONS)
    server.add_generic_rpc_handlers([_Stream(size)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    gates = [folder / f"go-{i}" for i in range(repeats)]
    folder.mkdir(parents=True, exist_ok=True)
    own = [
        sys.executable,
        "-m",
        "benchmarks.engine.overhead",
        "--stream",
        f"127.0.0.1:{port}",
        str(size),
    ]
    left = iter(range(repeats))

    def once() -> float:
        r = next(left)
        _until([folder / f"ready-{i}-{r}" for i in range(count)])
        started = time.perf_counter()
        gates[r].touch()
        _until([folder / f"done-{i}-{r}" for i in range(count)])
        return time.perf_counter() - started

    with processes([[*own, str(folder), str(i), str(repeats)] for i in range(count)], folder / "p"):
        yield once
    server.stop(None)


def stream(address: str, size: int, folder: Path, index: int, repeats: int) -> None:
    """The other end of ``bare_streams``."""
    channel = grpc.insecure_channel(address, options=OPTIONS)
    down, up = channel.unary_stream("/bare/down"), channel.stream_unary("/bare/up")
    for r in range(repeats):
        (folder / f"ready-{index}-{r}").touch()
        _until([folder / f"go-{r}"])
        assert sum(len(part) for part in down(b"")) == size
        assert int(up(_chunks(size))) == size
        (folder / f"done-{index}-{r}").touch()


def _until(files: Sequence[Path]) -> None:
    deadline = time.monotonic() + 300
    while not all(file.exists() for file in files):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited 300 s for {files[0].name}")
        time.sleep(0.001)


# ---------------------------------------------------------------- the start of a run


BARE = "import numpy, pydantic, flwr.app"
"""What every command that talks to Flower's SuperLink loads before it can."""


def start_of_run(
    repeats: int, folder: Path, *, silos: int = NODES, idle_s: float = 4.0
) -> list[tuple[float, float]]:
    """Seconds from typing ``coterie run`` to the first training message, and of a Python that only
    imports ``BARE``, in turn, after so many seconds without work each time. Modules are compiled,
    as they are after the first run."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(folder / "compiled")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    seconds = []
    with (
        mock.patch.dict(os.environ, environment, clear=True),
        LocalFederation(folder) as federation,
    ):
        for i in range(silos):
            options = {"train": 20, "test": 15, "skip": 35 * i}
            federation.start_silo(SiloSpec(f"silo-{i}", options=options))
        federation.wait_for_silos(silos)
        for i in range(repeats + 1):
            time.sleep(idle_s if i else 4.0)
            before = set(federation.runs_dir.iterdir()) if i else set()
            bare = _timed(lambda: subprocess.run([sys.executable, "-c", BARE], check=True))
            started = time.time()
            subprocess.run(
                [
                    *(sys.executable, "-m", "coterie.server.cli", "run", "fedavg", "--rounds", "1"),
                    *("--min-silos", str(silos), "--superlink"),
                    *(federation.superlink.control_address, "--runs-dir"),
                    str(federation.runs_dir),
                ],
                check=True,
                capture_output=True,
            )
            (folder_of_run,) = set(federation.runs_dir.iterdir()) - before
            events = (folder_of_run / "events.jsonl").read_text().splitlines()
            ready = next(e for e in map(json.loads, events) if e["event"] == "ready")
            seconds.append((ready["at"] - started, bare))
    return seconds[1:]  # now everything is warm


# ---------------------------------------------------------------- local training


class _Pictures:
    """JPEGs of 224×224 in memory, decoded when asked for; a map-style dataset."""

    def __init__(self, count: int) -> None:
        import io

        import numpy as np
        from PIL import Image

        draw = np.random.default_rng(0)
        self.targets = draw.integers(0, 2, count)
        self.files = []
        for _ in range(count):
            made = io.BytesIO()
            coarse = Image.fromarray(draw.integers(0, 256, (14, 14, 3), np.uint8))
            coarse.resize((224, 224)).save(made, "JPEG")
            self.files.append(made.getvalue())

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        import io

        import numpy as np
        import torch
        from PIL import Image

        pixels = np.asarray(Image.open(io.BytesIO(self.files[row])), np.float32)
        x = torch.from_numpy(pixels).permute(2, 0, 1) / 255
        return x, torch.tensor(self.targets[row])


def loaded_training(repeats: int) -> list[tuple[float, float]]:
    """(ours, plain) seconds of an epoch over JPEGs read by a DataLoader, in turn."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    from coterie.client.work.data import to_device
    from coterie.client.work.sgd import TrainPlan, train
    from coterie.tasks import load_task
    from coterie.tasks.base import StreamedData

    torch.set_num_threads(1)
    pictures: Any = _Pictures(192)
    part = to_device(StreamedData(pictures, pictures), torch.device("cpu")).train
    task = load_task("digits")
    pooled = nn.Sequential(nn.Conv2d(3, 8, 7, stride=8), nn.ReLU(), nn.AdaptiveAvgPool2d(4))
    model = nn.Sequential(pooled, nn.Flatten(), nn.Linear(128, 2))
    plan = TrainPlan(epochs=1, batch_size=16, lr=0.01)

    def ours() -> None:
        train(task, model, part, plan, seed=1)

    def plain() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=plan.lr)
        for x, y in DataLoader(pictures, batch_size=plan.batch_size, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    ours()
    plain()
    return [(_timed(ours), _timed(plain)) for _ in range(repeats)]


def local_training(repeats: int) -> list[tuple[float, float]]:
    """(ours, bare) seconds of the same epochs on the same tensors, in turn."""
    import torch

    from coterie.client.work.data import to_device
    from coterie.client.work.sgd import TrainPlan, train
    from coterie.tasks import load_task

    torch.set_num_threads(1)
    task = load_task("digits")
    data = task.load({"train": 1000, "test": 70})
    part = to_device(data, torch.device("cpu")).train
    plan = TrainPlan(epochs=4, batch_size=16, lr=0.1)
    model = task.model()

    def ours() -> None:
        train(task, model, part, plan, seed=1)

    def bare() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=plan.lr)
        x, y = part.at(torch.arange(len(part)))
        for _ in range(plan.epochs):
            order = torch.randperm(len(x))
            for start in range(0, len(x), plan.batch_size):
                batch = order[start : start + plan.batch_size]
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(x[batch]), y[batch])
                loss.backward()
                optimizer.step()

    ours()
    bare()
    return [(_timed(ours), _timed(bare)) for _ in range(repeats)]


def _timed(work: Any) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


# ---------------------------------------------------------------- all together


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median, 90th percentile, number."""
    ordered = sorted(seconds)
    return {
        "median": statistics.median(ordered),
        "p90": ordered[min(len(ordered) - 1, round(0.9 * (len(ordered) - 1)))],
        "rounds": len(ordered),
    }


def measure_rounds(folder: Path, rounds: int) -> Iterator[Entry]:
    """Four stock nodes, four and ten resident ones, with the small model."""
    stock = stock_rounds(NODES, SMALL_MB, 6, folder / "stock")
    yield {"what": "stock, 4 nodes", **spread(stock)}
    for count in (NODES, 10):
        own = resident_rounds(count, SMALL_MB, rounds, folder / f"resident-{count}")
        yield {"what": f"resident, {count} silos", **spread(own)}


FORMS: dict[str, dict[str, str]] = {
    "float32": {},
    "16-bit arrays": {"kind": "float16"},
    "`wire-format = delta-fp16`": {"format": "delta-fp16"},
}
"""How a model of as many numbers travels. numpy has no bfloat16; float16 has as many bytes."""
PASSES = 3


def measure_sizes(folder: Path, sizes: Sequence[float]) -> Iterator[Entry]:
    """Models of growing size with four silos, in each form in turn on one SuperLink.

    A round is compared with the mean of the bare streams of float32's bytes before and after its
    run, so that what else the machine does slows both.
    """
    for megabytes in sizes:
        rounds = 5 if megabytes < 200 else 3
        seconds: dict[str, list[float]] = {form: [] for form in FORMS}
        beside: dict[str, list[float]] = {form: [] for form in FORMS}
        at, streams = folder / f"{megabytes:g}-MB", 1 + PASSES * len(FORMS)
        with (
            residents(NODES, at / "ours") as run,
            bare_streams(NODES, megabytes, streams, at / "bare") as bare,
        ):
            before = bare()
            for form, how in [*FORMS.items()] * PASSES:
                own = run(megabytes, rounds, **how)
                after = bare()
                seconds[form] += own
                beside[form] += [(before + after) / 2] * len(own)
                before = after
        whole = statistics.median(seconds["float32"])
        for form, own in seconds.items():
            ratios = [a / b for a, b in zip(own, beside[form], strict=True)]
            yield {
                "what": f"{megabytes:g} MB, {form}",
                **spread(own),
                "bare gRPC": statistics.median(beside[form]),
                "ratio": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
                "of float32": statistics.median(own) / whole,
            }


def measure_idle(folder: Path, count: int = 50, seconds: float = 30.0) -> Entry:
    """Shares of a core that connected silos, which wait for work, cost: theirs, and all of them the
    SuperLink's."""
    with (
        SuperLink(folder / "superlink") as superlink,
        processes(resident_nodes(superlink, count), folder),
    ):
        wait_online(superlink, count)
        time.sleep(40)  # the pauses between two looks grow with the time since the last work
        coordinator = {superlink.program.process.pid}
        silos = family([os.getpid()]) - {os.getpid()} - family(superlink.pids)
        before = [sum(map(cpu_seconds, pids)) for pids in (coordinator, silos)]
        time.sleep(seconds)
        after = [sum(map(cpu_seconds, pids)) for pids in (coordinator, silos)]
    own, theirs = ((b - a) / seconds for a, b in zip(before, after, strict=True))
    return {"what": f"{count} silos", "coordinator": own, "silo": theirs / count}


def measure(part: str, folder: Path, *, rounds: int, sizes: Sequence[float]) -> Iterator[Entry]:
    """What is found of a part."""
    if part == "training":
        yield {
            "ratio": statistics.median(a / b for a, b in local_training(9)),
            "loaded": statistics.median(a / b for a, b in loaded_training(15)),
        }
    elif part == "idle":
        yield measure_idle(folder / "idle")
    elif part == "start":
        found = start_of_run(8, folder / "start")
        ratios = [own / bare for own, bare in found]
        yield {**spread([own for own, _ in found]), "ratio": statistics.median(ratios)}
        found = start_of_run(5, folder / "idle", silos=50, idle_s=30.0)
        ratios = [own / bare for own, bare in found]
        seconds = [own for own, _ in found]
        yield {
            "what": "50 silos that had no work for 30 s",
            **spread(seconds),
            "least": min(seconds),
            "ratio": statistics.median(ratios),
        }
    elif part == "rounds":
        yield from measure_rounds(folder, rounds)
    elif part == "apps":
        stock = rounds_of_app(stock_nodes, NODES, 6, folder / "apps-stock")
        yield {"what": "stock SuperNode", **spread(stock)}
        own = rounds_of_app(app_nodes, NODES, rounds, folder / "apps-resident")
        yield {"what": "resident silo (`--app`)", **spread(own)}
    else:
        yield from measure_sizes(folder, sizes)


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    rounds, sizes = select(entries, part="rounds"), select(entries, part="sizes")
    apps = select(entries, part="apps")
    medians = [row["median"] for row in rounds]
    machines = dict.fromkeys(entry["machine"] for entry in entries)
    return page(
        "# Overhead of a deployment",
        "Made by `make bench-overhead`.",
        f"Machine: {'; '.join(machines)}. Model of {NUM_LAYERS} arrays.",
        columns(
            rounds,
            {
                "0.4 MB, empty training step": "{what}",
                "median s": "{median:.3f}",
                "90 % s": "{p90:.3f}",
                "rounds": "{rounds}",
            },
        ),
        f"Stock / resident: {medians[0] / medians[1]:.0f} ×." if medians else "",
        columns(
            apps,
            {
                "the same ClientApp and round loop, 4 nodes": "{what}",
                "median s": "{median:.3f}",
                "90 % s": "{p90:.3f}",
                "rounds": "{rounds}",
            },
        ),
        f"Resident / stock: {apps[1]['median'] / apps[0]['median']:.3f}." if len(apps) == 2 else "",
        columns(
            sizes,
            {
                "model in float32, 4 silos, how it travels": "{what}",
                "round s": "{median:.2f}",
                "90 % s": "{p90:.2f}",
                "bare gRPC stream of float32 s": "{bare gRPC:.2f}",
                "ratio": "{ratio:.1f}",
                "least to most": "{least:.1f} to {most:.1f}",
                "of float32": "{of float32:.2f}",
            },
        ),
        *(
            "From `coterie run` to the first training message, "
            f"{row.get('what', f'{NODES} silos')}, warm SuperLink: median "
            f"{row['median']:.2f} s, 90 % {row['p90']:.2f} s"
            + (f"; {row['ratio']:.1f} times a bare `{BARE}`." if "ratio" in row else ".")
            for row in select(entries, part="start")
        ),
        *(
            f"{row['what']} that wait for work: the SuperLink uses "
            f"{100 * row['coordinator']:.1f} % of a core, each silo {100 * row['silo']:.2f} %."
            for row in select(entries, part="idle")
        ),
        *(
            f"Local training / bare PyTorch loop: {row['ratio']:.3f} (median of pairs)"
            + (
                f"; of JPEGs / plain DataLoader loop: {row['loaded']:.3f}."
                if "loaded" in row
                else "."
            )
            for row in select(entries, part="training")
        ),
    )


STORE = Store("overhead", document, keys=("part", "what"))


def main() -> None:
    """Measure, print, store."""
    if sys.argv[1:2] == ["--silo"]:
        from benchmarks.engine.overhead_app import client_app

        return serve(client_app, *sys.argv[2:])
    if sys.argv[1:2] == ["--stream"]:
        address, size, folder, index, repeats = sys.argv[2:]
        return stream(address, int(size), Path(folder), int(index), int(repeats))
    given = read(
        STORE,
        __doc__,
        parts=("training", "rounds", "apps", "start", "idle", "sizes"),
        rounds=60,
        sizes={"default": "0.4,50,500", "help": "MB, of the part sizes"},
    )
    sizes = [float(size) for size in given.sizes.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        for part in given.parts:
            for found in measure(part, Path(folder), rounds=given.rounds, sizes=sizes):
                given.store.put({"part": part, "machine": f"{os.cpu_count()} cores", **found})
    print(given.store.text())
    return None


if __name__ == "__main__":
    main()
