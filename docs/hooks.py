"""What ``make docs`` adds to the pages in this folder: everything that the code itself knows.

Reference pages are made from the command line, the options and the docstrings, so none of them can
be out of date. Notebooks are stored without outputs and run here, so the site shows what they print
today.
"""

from __future__ import annotations

import base64
import inspect
import re
import tempfile
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NOTEBOOK_DEADLINE_S = 300


# --- the command line ---


def command_tree() -> Any:
    """The click command of ``coterie``, with all commands below it."""
    import typer

    from coterie.server.cli.main import app

    return typer.main.get_command(app)


def walk(command: Any, path: str = "coterie") -> Iterator[tuple[str, Any]]:
    """Every command with the words that call it, parents first."""
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        if not below.hidden:
            yield from walk(below, f"{path} {name}")


def commands_page() -> str:
    """All commands with arguments and options."""
    first = "# Commands\n\nEvery command has `--help`; this page is made from the same texts."
    parts = [_command(path, command) for path, command in walk(command_tree())]
    return "\n\n".join([first, *parts]) + "\n"


def _command(path: str, command: Any) -> str:
    import click

    context = click.Context(command, info_name=path)
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    rows = [_parameter(one, context) for one in command.params if not getattr(one, "hidden", False)]
    head = ["| option | meaning | default |", "|---|---|---|"]
    table = "\n".join([*head, *rows]) if rows else ""
    example = f"```text\n{command.epilog}\n```" if command.epilog else ""
    text = [f"## {path}", f"```text\n{usage}\n```", command.help or "", table, example]
    return "\n\n".join(part for part in text if part)


def _parameter(one: Any, context: Any) -> str:
    names = ", ".join(f"`{name}`" for name in [*one.opts, *one.secondary_opts])
    if one.param_type_name == "argument":
        names = f"`{one.make_metavar(context)}`"
    elif not one.is_flag:
        names += f" `{one.make_metavar(context).removesuffix(' RANGE')}`"
    text = str(getattr(one, "help", None) or "").replace("|", "\\|").replace("<", "&lt;")
    none = one.default is None or one.default is False or one.default == ""
    default = "" if none or callable(one.default) else f"`{one.default}`"
    return f"| {names.replace('|', chr(92) + '|')} | {text} | {default} |"


# --- the API ---

PACKAGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "tasks": (
        "A task says what is learned. [Write one](../how-to/own-task.md), or "
        "[declare one](../how-to/own-data.md) without any code.",
        ("coterie.tasks.models.SplitModel",),
    ),
    "wire": (
        "Everything that server and silo say to each other: message types, keys and encodings. "
        "[The engine](../explanation/engine.md) explains the conversation.",
        (),
    ),
}
"""Public package → what its page says first, and names to show beside those it exports."""


def api_page(package: str) -> str:
    """Everything that a public package exports, from its docstrings."""
    text, more = PACKAGES[package]
    name = f"coterie.{package}"
    exported = getattr(import_module(name), "__all__", None)
    shown = [f"{name}.{one}" for one in exported] if exported else _modules(package)
    entries = "\n\n".join(f"::: {one}" for one in [*shown, *more])
    return f"# API: {name}\n\n{text}\n\n{entries}\n"


def strategies_page() -> str:
    """Every strategy with its arguments, then what all of them share."""
    from coterie.strategies.registry import ROWS

    public: dict[str, list[str]] = {}
    for row in ROWS:
        public.setdefault(row.module, []).append(row.public)
    parts = [STRATEGIES_FIRST]
    for row in ROWS:
        parts += [f"## {row.public}", *_strategy(row)]
        sharing = public[row.module]  # several small strategies share a file
        if row.public == sharing[-1]:
            parts += [f"### Background of {', '.join(sharing)}"] if sharing[1:] else []
            parts.append(str(import_module(f"coterie.strategies.{row.module}").__doc__))
    return "\n\n".join([*parts, STRATEGIES_LAST])


STRATEGIES_FIRST = """\
# API: coterie.strategies

Every strategy is a Flower strategy, for example `from coterie.strategies import HCCT`. It works
with any `ClientApp` unless
[its table](strategy-costs.md#what-each-assumes-and-what-it-costs) says otherwise.
[Use them in your own app](../how-to/flower-app.md). The same options as keys of files and of the
command line are in the [configuration](configuration.md)."""

STRATEGIES_LAST = """\
## What all of them share

::: coterie.strategies.strategy.GroupStrategy
    options:
      members: [start]

::: coterie.strategies.rounds.result.RunResult
    options:
      filters: ["!^stand$", "!^_"]

::: coterie.strategies.errors.FederationError
"""


def _strategy(row: Any) -> list[str]:
    from coterie.strategies.registry import strategy_class
    from coterie.strategies.strategy import GroupStrategy

    common = inspect.signature(GroupStrategy).parameters
    fields = row.load().model_fields
    own = [n for n in inspect.signature(strategy_class(row.public)).parameters if n not in common]
    rows = [_argument(name, fields[name]) for name in own]
    table = "\n".join(["| argument | default | meaning |", "|---|---|---|", *rows])
    name = f"In files and on the command line: `{row.name}`."
    return [str(inspect.getdoc(row.load())), name, *([table] if rows else [])]


def _argument(name: str, info: Any) -> str:
    from coterie.strategies.rounds.options import Options

    default, meaning = (
        info.get_default(call_default_factory=True),
        info.description or info.title or "",
    )
    shown = repr(default)
    if isinstance(default, Options):
        shown = f"{type(default).__name__}()"
        meaning = meaning or str(inspect.getdoc(type(default))).partition("\n")[0]
    return f"| `{name}` | {'' if info.is_required() else f'`{shown}`'} | {meaning} |"


def _modules(package: str) -> list[str]:
    files = sorted((ROOT / package).glob("*.py"))
    return [f"coterie.{package}.{file.stem}" for file in files if file.stem != "__init__"]


# --- notebooks ---


def executed(file: Path, folder: Path) -> Any:
    """A notebook with its outputs, run in this folder by the Python that runs this.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
        nbclient.exceptions.CellTimeoutError: a cell took longer than NOTEBOOK_DEADLINE_S.
    """
    import nbformat
    from nbclient import NotebookClient
    from traitlets.config import Config

    notebook = nbformat.read(file, as_version=4)
    with tempfile.TemporaryDirectory() as sockets:  # local sockets, which nobody else can reach
        link = {"transport": "ipc", "ip": str(Path(sockets) / "kernel")}
        NotebookClient(
            notebook,
            config=Config(KernelManager=link),
            kernel_name="python3",
            timeout=NOTEBOOK_DEADLINE_S,
            resources={"metadata": {"path": str(folder)}},
        ).execute()
    return notebook


def notebook_page(notebook: Any, name: str) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by file name."""
    parts, pictures = [], {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(_code(cell.source))
        if cell.source.startswith("%%writefile"):
            continue  # it prints that it writes the file
        if text := "".join(_text(output) for output in cell.outputs).rstrip():
            parts.append(f"```text\n{text}\n```")
        for output in cell.outputs:
            if png := output.get("data", {}).get("image/png"):
                picture = f"{name}-{len(pictures)}.png"
                pictures[picture] = base64.b64decode(png)
                parts.append(f"![what the cell draws]({picture})")
    return "\n\n".join(parts) + "\n", pictures


def _code(source: str) -> str:
    """A cell as a block of what it holds: commands, a file, or Python."""
    first, _, rest = source.partition("\n")
    if first == "%%sh":
        return f"```sh\n{rest}\n```"
    if first.startswith("%%writefile"):
        name = first.split()[1]
        return f'```{name.rpartition(".")[2]} title="{name}"\n{rest}\n```'
    return f"```python\n{source}\n```"


def _text(output: Any) -> str:
    data = output.get("data", {})
    if "image/png" in data or "text/html" in data:  # a picture, or a bar that shows progress
        return ""
    return re.sub(r"\x1b\[[0-9;]*m", "", output.get("text") or data.get("text/plain", ""))


# --- what MkDocs calls ---


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made."""
    from mkdocs.structure.files import File

    made: dict[str, str | bytes] = {
        "reference/commands.md": commands_page(),
        "reference/strategies.md": strategies_page(),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
    }
    made |= {f"reference/{package}.md": api_page(package) for package in PACKAGES}
    for notebook in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            page, pictures = notebook_page(executed(notebook, Path(folder)), notebook.stem)
        made[f"notebooks/{notebook.stem}.md"] = page
        made |= {f"notebooks/{name}": picture for name, picture in pictures.items()}
    for place, content in made.items():
        if (stub := files.get_file_from_path(place)) is not None:  # for readers of the repository
            files.remove(stub)
        files.append(File.generated(config, place, content=content))
    return files


SEARCH: Mapping[str, dict[str, Any]] = {
    "index.md": {"boost": 1.5},  # its headings are questions that people ask
    "reference/wire.md": {"exclude": True},  # it has an entry for almost any word
}
"""Page → how the search treats it."""


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """A notebook's page ends in .md here."""
    page.meta.setdefault("search", SEARCH.get(page.file.src_uri, {}))
    return markdown.replace(".ipynb)", ".md)")
