"""Logs as text and as JSON, with one schema for every part."""

from __future__ import annotations

import io
import json
import logging
import re
import sys

import pytest

from coterie.system import logs


def record(message: str, *, error: bool = False, **extra: object) -> logging.LogRecord:
    info = None
    if error:
        try:
            raise ValueError("no")
        except ValueError:
            info = sys.exc_info()
    made = logging.LogRecord("coterie.silo", logging.WARNING, "", 0, message, None, info)
    vars(made).update(extra)
    return made


def test_a_json_line_has_the_schema_and_what_it_is_about() -> None:
    lines = logs.formatter("silo", "json", silo="north")
    entry = json.loads(lines.format(record("a\nb", run="r", round="3", secret="x", seconds=0.5)))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", entry.pop("at"))
    assert entry == {
        "level": "warning", "part": "silo", "message": "a\nb", "silo": "north",
        "run": "r", "round": "3", "seconds": 0.5,
    }  # fmt: skip
    entry = json.loads(lines.format(record("x", error=True)))
    assert "ValueError: no" in entry["error"]


def test_a_name_that_is_not_utf_8_stays_legible_in_json() -> None:
    line = logs.formatter("silo", "json").format(record("M\udcfcller.png: lost", error=True))
    assert json.loads(line)["message"] == "M\\xfcller.png: lost"


def test_text_is_as_it_was() -> None:
    assert logs.formatter("run", "text", text="%(levelname)s %(message)s").format(record("x")) == (
        "WARNING x"
    )


def test_the_format_is_the_commands_then_the_environments_then_the_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(logs.ENVIRONMENT, raising=False)
    assert logs.chosen() == "text" and logs.chosen("", "json") == "json"
    monkeypatch.setenv(logs.ENVIRONMENT, "json")
    assert logs.chosen("", "text") == "json" and logs.chosen("text", "json") == "text"
    with pytest.raises(ValueError, match=r"must be text or json\. Got 'xml'"):
        logs.chosen("xml")


@pytest.mark.parametrize(("text", "level"), [("ready", "info"), ("WARNING: open", "warning")])
def test_what_the_coordinator_says_is_a_line_of_either_format(text: str, level: str) -> None:
    out = io.StringIO()
    logs.saying("coordinator", "text", out)(text)
    logs.saying("coordinator", "json", out)(text)
    plain, as_json = out.getvalue().splitlines()
    assert plain == text
    assert json.loads(as_json) | {"at": ""} == {
        "at": "", "level": level, "part": "coordinator", "message": text
    }  # fmt: skip
