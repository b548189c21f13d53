"""What the command line makes of its arguments before anything is submitted."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest
from typer.testing import CliRunner

import coterie.server.cli.commands
import coterie.server.cli.submitting
import coterie.server.machine.link
import coterie.server.report.final
import coterie.server.site.coordinator
import coterie.server.study.simulate
from benchmarks.engine.synthetic import write_run
from coterie.engine.control import RunInfo
from coterie.server.cli.main import app, main
from coterie.server.cli.operator import NOT_WITH_FEDERATION, superlink
from coterie.server.machine.link import bundle_of
from coterie.server.runs.config import RunConfig
from coterie.server.runs.record import Event, Round
from coterie.server.site.federation import Federation, create


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keys of runs that would have been submitted or simulated."""
    seen: list[dict[str, Any]] = []

    def submit(keys: dict[str, Any], *_: Any, **__: Any) -> int:
        seen.append(keys)
        return 0

    def simulate(file: Path, *, progress: Any, **changes: Any) -> Any:
        seen.append(changes)
        return SimpleNamespace(folder=file)

    monkeypatch.setattr(coterie.server.cli.submitting, "submit_and_follow", submit)
    monkeypatch.setattr(coterie.server.study.simulate, "simulate", simulate)
    monkeypatch.setattr(coterie.server.report.final, "print_final", lambda *_: None)
    return seen


@pytest.mark.parametrize(
    "line",
    [
        ["run", "fedcollab", "--baseline-run", "runs/independent-1"],
        ["run", "fedcollab", "--set", "baseline-run=runs/independent-1"],
        ["simulate", "sim.toml", "--set", "baseline-run=runs/independent-1"],
    ],
)
def test_a_folder_of_a_run_alone_that_is_here_is_made_absolute(
    line: list[str],
    submitted: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "independent-1"
    folder.mkdir(parents=True)
    CliRunner().invoke(app, line)
    assert submitted[-1]["baseline-run"] == "runs/independent-1", "no run is there: a name, perhaps"
    (folder / "run.json").write_text("{}")
    CliRunner().invoke(app, line)
    assert submitted[-1]["baseline-run"] == str(folder.resolve())


@pytest.mark.parametrize("named", [".", "../fedavg-1", "../newest", "../../runs/fedavg-1/"])
def test_a_folder_to_resume_is_known_by_its_own_name_however_it_is_written(
    named: str, submitted: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs" / "fedavg-1"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    (folder.parent / "newest").symlink_to(folder)
    monkeypatch.chdir(folder)
    assert CliRunner().invoke(app, ["run", "--resume", named]).exit_code == 0
    assert submitted == [{"resume": "fedavg-1", "runs-dir": str(folder.parent.resolve())}]


@pytest.mark.parametrize("named", [".", "", "/"])
def test_a_resumption_of_nothing_starts_no_other_run(
    named: str, submitted: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not named:
        (tmp_path / "run.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["run", "--resume", named])
    assert (result.exit_code, submitted) == (2, [])
    assert "--resume takes the folder" in result.stderr


def test_a_run_without_a_name_finds_out_by_itself(submitted: list[dict[str, Any]]) -> None:
    CliRunner().invoke(app, ["run", "--rounds", "9"])
    CliRunner().invoke(app, ["run", "--set", "strategy=fedavg"])
    CliRunner().invoke(app, ["run", "hcct"])
    assert [one["strategy"] for one in submitted] == ["auto", "fedavg", "hcct"]


def test_a_run_that_is_not_here_is_resumed_by_its_name(submitted: list[dict[str, Any]]) -> None:
    CliRunner().invoke(app, ["run", "--resume", "fedavg-1"])
    assert submitted == [{"resume": "fedavg-1"}]


@pytest.mark.parametrize("start", [["run", "hcct"], ["simulate", "sim.toml"]])
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("baseline-run=1795304029227496", "1795304029227496"),
        ("label=2024", "2024"),
        ("label=1e5", "1e5"),
        ("label=true", "true"),
        ("label=2024-01-01", "2024-01-01"),
        ('label="in quotes"', "in quotes"),
        ("label=", ""),
        ("rounds=7", 7),
        ("alpha=auto", "auto"),
        ("alpha=5", 5),
        ("name-members=true", True),
    ],
)
def test_a_text_stays_as_it_was_typed_and_numbers_are_numbers(
    setting: str, value: Any, start: list[str], submitted: list[dict[str, Any]]
) -> None:
    assert CliRunner().invoke(app, [*start, "--set", setting]).exit_code == 0
    key = setting.partition("=")[0]
    assert submitted[-1][key] == value and type(submitted[-1][key]) is type(value)
    RunConfig.read({"strategy": "hcct", key: submitted[-1][key]})


def refused_in_one_line(said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main()
    err = capsys.readouterr().err
    assert ended.value.code == 2 and err.count("\n") == 1
    assert err.startswith("coterie") and said in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["status", "--root-certificates", "nosuch.pem"], "'nosuch.pem' cannot be read"),
        (
            ["federation", "init", "taken/study", "--address", "localhost"],
            "taken/study: Not a directory. A file is",
        ),
        (["runs", "report", "fedavg-1", "--runs-dir", ".", "-o", "taken/x.html"], "taken"),
        (
            ["members", "list", "--federation", "latin"],
            "toml is not UTF-8: byte 2 is 0xfc. Save it",
        ),
    ],
)
def test_what_a_person_can_mend_is_one_line(
    line: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("")
    (tmp_path / "latin").mkdir()
    (tmp_path / "latin" / "coterie.toml").write_bytes("# ü".encode("latin-1"))
    write_run(tmp_path / "fedavg-1", num_silos=2, num_rounds=2, strategy="fedavg")
    monkeypatch.setattr(sys, "argv", ["coterie", *line])
    refused_in_one_line(said, capsys)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["members", "list", "--federation", "~typo/f"], "'~typo/f' does not exist: there is no"),
        (["runs", "--runs-dir", "~typo/f"], "'~typo/f' does not exist: there is no"),
        (["run", "hcct", "--baseline-run", "~typo/f"], "'~typo/f' does not exist: there is no"),
        (["run", "--resume", "~typo/f"], "'~typo/f' does not exist: there is no"),
        (["runs", "report", "~typo/f"], "'~typo/f' does not exist: there is no"),
        (["simulate", "~typo/f.toml"], "'~typo/f.toml' does not exist: there is no"),
        (["runs"], "'~typo' does not exist: there is no"),
    ],
)
def test_a_home_folder_that_nobody_has_is_one_line(
    line: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COTERIE_RUNS", raising=False)
    monkeypatch.setenv("COTERIE_HOME", "~typo")
    monkeypatch.setattr(sys, "argv", ["coterie", *line])
    refused_in_one_line(said, capsys)


def test_an_account_without_a_home_folder_is_told_what_to_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("COTERIE_HOME")
    monkeypatch.setattr(Path, "home", nobody)
    monkeypatch.setattr(sys, "argv", ["coterie", "runs"])
    refused_in_one_line("Set COTERIE_HOME to a writable folder.", capsys)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("run --priority 3", "coterie: --priority needs --queue."),
        ("runs watch --port 9000", "coterie: --host, --port and --new-token are for the page"),
        ("run --set lr", "coterie: --set takes KEY=VALUE. Got 'lr'."),
        ("run --task.smooth", "coterie: --task.smooth needs a value: --task.smooth VALUE."),
        ("run resume first hcct", "coterie: --resume continues first with"),
        ("runs stop x --federation a --superlink b", "coterie: --federation and --superlink"),
        ("simulate x.toml --workdir y", "coterie: --workdir is the folder for the processes' logs"),
        ("federation init made", "coterie: say where silos reach this"),
        ("federation init made --renew --address x", "and leave out --address."),
        ("members erase", "coterie: name either a silo, or a statement with --verify."),
        (
            "superlink --metrics-address 127.0.0.1:1",
            "coterie: --metrics-address serves the numbers of a fed",
        ),
        ("runs --runs-dir x watch", "coterie: --runs-dir stands before a command"),
        ("silo serve --threads 2", "coterie: --threads replaces a setting of a silo's folder"),
        ("silo serve --mod x:y", "coterie: --mod requires --app."),
        ("silo calibrate --sensitivity 2", "coterie: --sensitivity must be above 0 and at"),
    ],
)
def test_what_cannot_be_done_as_it_was_typed_is_one_line_with_what_to_type(
    line: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the same style as every other error; click's own usage errors keep theirs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["coterie", *line.split()])
    refused_in_one_line(said, capsys)


def test_a_path_may_begin_with_the_user_s_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    done = CliRunner().invoke(app, ["runs", "--runs-dir", "~/records"])
    assert f"no runs are recorded in {tmp_path}/records" in done.stdout.replace("\n", "")


class Calls:
    """A SuperLink that takes every run, and knows run 7, which is over, and run 8."""

    def __init__(self) -> None:
        self.submitted: list[RunConfig] = []
        self.stopped: list[int] = []
        self.ends_first = self.over = False

    def submit(self, config: RunConfig) -> int:
        self.submitted.append(config)
        return 8

    def runs(self, run_id: int | None = None) -> list[RunInfo]:
        known = [
            RunInfo(7, "finished", "completed", "", ""),
            RunInfo(8, "finished", "completed", "", "")
            if self.over
            else RunInfo(8, "running", "", "", ""),
        ]
        return [run for run in known if run_id in (None, run.run_id)]

    def stop(self, run_id: int) -> bool:
        self.over = self.ends_first
        if not self.over:
            self.stopped.append(run_id)
        return not self.over


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made = Calls()
    monkeypatch.setattr(coterie.server.machine.link, "control", lambda *_, **__: nullcontext(made))
    monkeypatch.setattr(coterie.server.cli.commands, "BEGINNING_S", 0.0)
    return made


@pytest.mark.parametrize(
    ("events", "status", "said"),
    [
        ([{"event": "end", "status": "failed", "error": "Did you mean --task heart?"}], 3,
         "run fedavg-8 failed: Did you mean --task heart?"),
        ([{"event": "look"}, {"event": "here", "silos": ["a"]}], 0, ""),
        ([{"event": "look"}], 0, "run fedavg-8 waits for silos."),
    ],
)  # fmt: skip
def test_a_run_that_is_not_followed_is_seen_to_begin(
    events: list[dict[str, Any]], status: int, said: str, calls: Calls, tmp_path: Path
) -> None:
    before = [{"event": "start", "run_id": "5"}, {"event": "here"}, {"event": "end"}]
    lines = [*before, {"event": "resume", "run_id": "8"}, *events]
    (tmp_path / "fedavg-8").mkdir()
    (tmp_path / "fedavg-8" / "events.jsonl").write_text(
        "".join(json.dumps(x) + "\n" for x in lines)
    )
    done = CliRunner().invoke(app, ["run", "fedavg", "--detach", "--runs-dir", str(tmp_path)])
    assert done.exit_code == status and done.stdout.strip().endswith(said or "fedavg-8")


def test_why_a_run_failed_is_cut_in_the_table_of_the_status(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "ServerApp failed with exception: [/b] no silo" + " sends sums" * 500
    monkeypatch.setattr(calls, "num_online", lambda: 2, raising=False)
    monkeypatch.setattr(calls, "runs", lambda: [RunInfo(8, "finished", "failed", why, "")])
    done = CliRunner().invoke(app, ["status"])
    assert "[/b] no silo sends sums" in done.stdout and "ServerApp" not in done.stdout
    assert "characters more)" in done.stdout and max(map(len, done.stdout.splitlines())) < 200


@pytest.mark.parametrize(
    ("variable", "line", "meant"),
    [
        ("", ["--set", "runs-dir=rel"], "rel"),
        ("", ["--runs-dir", "rel"], "rel"),
        ("COTERIE_RUNS", [], "rel"),
        ("COTERIE_RUNS", ["--superlink", "fl.example.org:9093"], "rel"),
        ("COTERIE_HOME", [], "rel/runs"),
    ],
)
def test_a_superlink_is_told_a_folder_that_means_the_same_where_it_runs(
    variable: str,
    line: list[str],
    meant: str,
    calls: Calls,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if variable:
        monkeypatch.setenv(variable, "rel")
    assert CliRunner().invoke(app, ["run", "fedavg", "--detach", *line]).exit_code == 0
    assert calls.submitted[0].runs_dir == str(tmp_path / meant)


def test_a_folder_that_cannot_hold_records_is_told_before_the_run_begins(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    line = ["run", "fedavg", "--detach", "--runs-dir"]
    done = CliRunner().invoke(app, [*line, str(tmp_path / "file" / "runs")])
    assert (done.exit_code, calls.submitted) == (2, [])
    assert f"{tmp_path / 'file'} is not a folder" in done.stderr
    monkeypatch.setattr(os, "access", lambda *_: False)
    done = CliRunner().invoke(app, [*line, str(tmp_path / "runs")])
    assert f"warning: you may not write in {tmp_path}" in done.stdout


def test_a_folder_for_a_superlink_elsewhere_stays_as_it_was_set_or_is_the_one_there(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COTERIE_RUNS", raising=False)
    there = ["run", "fedavg", "--detach", "--superlink", "fl.example.org:9093"]
    assert CliRunner().invoke(app, [*there, "--set", "runs-dir=rel"]).exit_code == 0
    done = CliRunner().invoke(app, there)
    assert [one.runs_dir for one in calls.submitted] == ["rel", ""]
    assert done.stdout.strip() == "run 8 is submitted; its record: fedavg-8, at the coordinator"


def test_a_run_that_failed_tells_its_reason_once(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = Event("end", status="failed", error="the disk is full", seconds=1.0)

    def follow(_: Any, __: int, ___: Path, take: Callable[[Event], None], **____: Any) -> Event:
        take(last)
        return last

    monkeypatch.setattr(coterie.server.cli.commands, "follow_run", follow)
    done = CliRunner().invoke(app, ["run", "fedavg", "--runs-dir", str(tmp_path)])
    assert (done.exit_code, done.stdout.count("the disk is full")) == (3, 1)


@pytest.mark.parametrize(
    ("options", "look", "end"),
    [
        ([], "runs watch fedavg-8", "runs stop fedavg-8"),
        (
            ["--federation", "my study"],
            "runs watch fedavg-8 --federation 'my study'",
            "runs stop fedavg-8 --federation 'my study'",
        ),
        (
            ["--superlink", "127.0.0.1:7", "--runs-dir", "rel"],
            "runs watch fedavg-8 --runs-dir rel",
            "runs stop fedavg-8 --runs-dir rel --superlink 127.0.0.1:7",
        ),
        (
            ["--superlink", "fl.example.org:7"],
            "status --superlink fl.example.org:7",
            "runs stop 8 --superlink fl.example.org:7",
        ),
    ],
)
def test_ctrl_c_says_that_the_run_goes_on_and_how_to_end_it(
    options: list[str],
    look: str,
    end: str,
    calls: Calls,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: Any, **__: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(coterie.server.cli.commands, "follow_run", interrupted)
    monkeypatch.setattr(coterie.server.cli.commands, "_follow_log", interrupted)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my study").mkdir()
    write_federation(tmp_path / "my study")
    done = CliRunner().invoke(app, ["run", "fedavg", *options])
    assert done.exit_code == 130
    assert f"Check on it with `coterie {look}`, stop it with `coterie {end}`." in done.stdout


def test_how_to_go_on_names_the_options_that_were_given(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Event] = []

    def follow(*given: Any, **_: Any) -> Event:
        for event in events:
            given[-1](event)
        return Event("end", status="failed", error="no silos")

    monkeypatch.setattr(coterie.server.cli.commands, "follow_run", follow)
    write_federation(tmp_path)
    done = CliRunner().invoke(app, ["run", "fedavg", "--federation", str(tmp_path)])
    assert (done.exit_code, "run resume" in done.stdout) == (3, False), (
        "no round, nothing to resume"
    )
    events = [Event("round", report=Round(1))]
    done = CliRunner().invoke(app, ["run", "fedavg", "--federation", str(tmp_path)])
    assert done.exit_code == 3
    assert f"coterie run resume fedavg-8 --federation {tmp_path}\n" in done.stdout


def test_a_run_that_ends_by_itself_while_it_is_stopped_is_no_error(
    calls: Calls, tmp_path: Path
) -> None:
    calls.ends_first = True
    done = CliRunner().invoke(app, ["runs", "stop", "8", "--runs-dir", str(tmp_path)])
    assert (done.exit_code, done.stdout) == (0, "run 8 has already ended: completed.\n")


@pytest.mark.parametrize("named", ["8", "fedavg-8", "recorded-2", "./recorded-2"])
def test_a_run_is_stopped_by_its_name_or_id_with_or_without_a_record_here(
    named: str, calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was resumed has the id of its resumption, and the name that it began with."""
    folder = write_run(tmp_path / "recorded-2", num_silos=2, num_rounds=2, strategy="fedavg")
    file = folder / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"run-id": "8"}))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["runs", "stop", named, "--runs-dir", str(tmp_path)])
    assert (done.exit_code, calls.stopped) == (0, [8])
    recorded = "recorded" in named
    assert ("is stopped after round 2 of 2" in done.stdout) == recorded
    assert (f"run resume {named} --runs-dir {tmp_path}" in done.stdout) == recorded


def test_a_run_that_is_over_or_unknown_is_not_stopped(calls: Calls, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["runs", "stop", "7", "--runs-dir", str(tmp_path)])
    assert (done.exit_code, done.stdout) == (0, "run 7 has already ended: completed.\n")
    unknown = CliRunner().invoke(app, ["runs", "stop", "fedavg-9", "--runs-dir", str(tmp_path)])
    assert (unknown.exit_code, "does not know run 9" in unknown.stderr) == (2, True)
    nameless = CliRunner().invoke(app, ["runs", "stop", "fedavg", "--runs-dir", str(tmp_path)])
    assert "there is no run" in nameless.stderr
    assert not calls.stopped


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders of federations whose SuperLink would have been run."""
    folders: list[Path] = []

    def serve(federation: Federation, say: Any) -> int:
        folders.append(federation.folder)
        return 0

    monkeypatch.setattr(coterie.server.site.coordinator, "serve", serve)
    return folders


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        (["--host", "0.0.0.0"], "[listen] silos in its coterie.toml"),
        (["--fleet-port", "9092"], "[listen] silos in its coterie.toml"),
        (["--control-port", "7"], "[listen] operators in its coterie.toml"),
        (["--runtime-port", "7"], "[listen] serverapp in its coterie.toml"),
        (["--operators", "127.0.0.1"], "[listen] operators in its coterie.toml"),
        (["--database", "state.db"], "[state] database in its coterie.toml"),
        (["--no-executor"], "its SuperLink always starts ServerApps itself"),
        (["--runs-dir", "runs"], "its runs are recorded in its folder runs/"),
    ],
)
@pytest.mark.parametrize("by_environment", [False, True])
def test_options_without_effect_on_a_federation_are_refused_with_what_has_it(
    option: list[str],
    instead: str,
    by_environment: bool,
    served: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_federation(tmp_path)
    line = ["superlink"] if by_environment else ["superlink", "--federation", str(tmp_path)]
    if by_environment:
        monkeypatch.setenv("COTERIE_FEDERATION", str(tmp_path))
    done = CliRunner().invoke(app, [*line, *option])
    said = " ".join(done.stderr.split())
    assert done.exit_code == 2 and not served
    assert option[0] in said and instead in said and str(tmp_path) in said
    assert CliRunner().invoke(app, line).exit_code == 0
    assert served == [tmp_path]


def test_every_option_of_the_superlink_is_for_a_federation_or_refused() -> None:
    both = {"context", "federation", "metrics", "log_format"}
    options = set(inspect.signature(superlink).parameters) - both
    assert options == set(NOT_WITH_FEDERATION)


@pytest.mark.parametrize(
    "option",
    [
        ["--address", "new.example"], ["--fleet-port", "5"], ["--control-port", "5"],
        ["--runtime-port", "5"], ["--operators", "0.0.0.0"],
    ],
)  # fmt: skip
def test_options_that_a_renewal_ignores_are_refused(option: list[str], tmp_path: Path) -> None:
    study = create(tmp_path / "study", ["fl.example.org"])
    before = (study.tls / "server.pem").read_bytes()
    done = CliRunner().invoke(app, ["federation", "init", str(study.folder), "--renew", *option])
    said = "".join(done.stderr.split())
    assert done.exit_code == 2 and option[0] in said and "study/coterie.toml" in said
    assert (study.tls / "server.pem").read_bytes() == before
    assert (
        CliRunner().invoke(app, ["federation", "init", str(study.folder), "--renew"]).exit_code == 0
    )
    assert (study.tls / "server.pem").read_bytes() != before


@pytest.mark.parametrize("command", [["run", "hcct"], ["status"]])
def test_a_federation_and_another_superlink_are_not_taken_together(
    command: list[str], submitted: list[dict[str, Any]], tmp_path: Path
) -> None:
    write_federation(tmp_path)
    for folder in (tmp_path, tmp_path / "typo"):
        line = [*command, "--federation", str(folder), "--superlink", "10.0.0.5:9093"]
        done = CliRunner().invoke(app, line)
        said = " ".join(done.stderr.split())
        assert (done.exit_code, submitted) == (2, [])
        assert "--federation and --superlink" in said and "10.0.0.5:9093" in said


@pytest.mark.parametrize("command", ["federation init", "superlink"])
@pytest.mark.parametrize("port", ["--fleet-port", "--control-port", "--runtime-port"])
def test_a_port_that_there_is_not_is_refused(command: str, port: str) -> None:
    done = CliRunner().invoke(app, [*command.split(), port, "0"])
    assert done.exit_code == 2
    assert "0 is not in the range 1<=x<=65535" in " ".join(done.stderr.split())


def write_federation(folder: Path) -> None:
    (folder / "coterie.toml").write_text('addresses = ["localhost:9092"]\n', encoding="utf-8")


def test_what_is_submitted_is_what_flower_would_pack() -> None:
    from flwr.cli.build import build_fab_from_files

    ours = bundle_of(RunConfig.read({"strategy": "hcct"}), "of this test")
    with ZipFile(BytesIO(ours)) as bundle:
        manifest = bundle.read("pyproject.toml")
    theirs, _ = build_fab_from_files({"pyproject.toml": manifest})
    assert ours == theirs
