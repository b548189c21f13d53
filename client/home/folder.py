"""A silo's folder: its configuration, its key, and the coordinator's address.

``coterie silo init`` makes it and ``coterie silo join`` completes it:

    silo.toml           the silo's task, data and policy
    key.pem             private key; it never leaves this folder
    coordinator.json    address and CA certificate of the coordinator
    ca.pem              that certificate, for programs that take a file
    models/, personal/  the models and arrays saved from runs
    privacy/            with differential privacy: the budget and the secret of the noise
    contact             its modification time is the last contact with the coordinator
    approvals/          with approve = "ask": runs that are waiting, approved or refused
"""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from coterie.client.home.files import ENVIRONMENT, folder_of
from coterie.client.home.policy import Policy
from coterie.client.home.privacy import Privacy
from coterie.client.home.schema import section_model, settings_of, template
from coterie.client.home.settings import (
    Process,
    SettingsError,
    SiloSettings,
    Study,
    check_name,
    privacy_of,
)
from coterie.system import files, keys
from coterie.tasks.options import as_option, place_of
from coterie.tasks.toml import checked, read_table
from coterie.wire import enrolment, page

OTHER_FILES = 512
"""Files that a process needs open in addition to the locks of its silos' folders."""
MAX_ALSO = 31
"""Additional tasks of a silo; with the first one, ``wire.description.MAX_TASKS``."""

TEMPLATE = """\
# A silo of a coterie federation: its data, and what it allows. The silo refuses what this file does
# not allow, and unknown keys. After a change, run `coterie silo check` and restart the silo.

name = "{name}"

# What is learned: a built-in task ("digits", "mnist", ...), a file that declares one for your data
# ("study.toml", the same at every silo), or your Python class ("module:Class").
task = {task}

# Samples without labels: a file or folder that `coterie silo predict` reads. The silo then does not
# train; it gets the model of the group whose data resemble its own most.
# unlabelled = "new-patients.csv"

# A silo that only tests: it measures the model of the group that suits its data best, and sends no
# update.
# role = "evaluate"

[data]
# Options of the task, such as where the data are; paths are relative to this folder. For a table
# also its format: separator, decimal, missing, [data.columns], [data.codes.COLUMN]. If persons have
# several samples, group identifies the person of each: whole persons are then held out, and
# column_sums_from, statistics_from and min_samples below count persons.
{data}

# Further tasks of this silo, each with its own data. Policy, limits and ledger apply to all.
# [[also]]
# task = "stroke.toml"
# data.data = "/data/stroke"
"""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


SECTIONS: Mapping[str, tuple[type, ...]] = {
    "policy": (Policy, SiloSettings),
    "privacy": (Privacy,),
    "limits": (Policy,),
    "compute": (SiloSettings, Process, Policy),
    "monitoring": (Process,),
}
"""Section of ``silo.toml`` → the classes that declare its settings, in the order of the file."""
OPTIONAL = "privacy"
"""The section that may be missing; without it the silo has no differential privacy."""
PRIVACY_NOTE = f"""\
# Differential privacy: training here adds noise, and its cost is counted over all runs, until the
# budget is spent. See {page("Differential privacy at a silo")}.
# Needs coterie[privacy].
"""


class _Study(_Section):
    task: Annotated[str, Field(min_length=1)]
    data: dict[str, Annotated[str | int | float | bool, BeforeValidator(as_option)]] = {}


class _Own(_Study):
    role: Literal["train", "evaluate"] = "train"


_MODELS = {name: section_model(name, kinds, _Section) for name, kinds in SECTIONS.items()}
_FIELDS: Any = {
    name: (model | None, None) if name == OPTIONAL else (model, Field(default_factory=model))
    for name, model in _MODELS.items()
}
_File: Any = create_model(
    "_File",
    __base__=_Own,
    name=(str, ...),
    unlabelled=(str, ""),
    also=(Annotated[tuple[_Study, ...], Field(max_length=MAX_ALSO)], ()),
    **_FIELDS,
)


class Home:
    """A silo's folder."""

    def __init__(self, folder: Path | None = None) -> None:
        """Open a folder; None means ``$COTERIE_SILO``, else the current folder.

        Raises:
            SettingsError: it is not a silo's folder, or its ``silo.toml`` is invalid.
            TaskError: the path names the home directory of an unknown user.
        """
        self.folder = place_of(str(folder_of(folder))).resolve()
        self.config = _read(self.folder / "silo.toml")

    def settings(self) -> SiloSettings:
        """Return the settings of the silo.

        Raises:
            SettingsError: a value cannot be used.
        """
        config, own = self.config, self._study(self.config)
        return SiloSettings(
            name=config.name,
            task=own.task,
            options=own.options,
            home=str(self.folder),
            policy=Policy(**self._values(Policy)),
            privacy=None if config.privacy is None else privacy_of(self._values(Privacy)),
            also=tuple(map(self._study, config.also)),
            unlabelled=self._path(config.unlabelled) if config.unlabelled else "",
            role=config.role,
            **self._values(SiloSettings),
        )

    @property
    def process(self) -> Process:
        return Process(**self._values(Process))

    def _values(self, kind: type) -> dict[str, Any]:
        return {
            one.name: getattr(getattr(self.config, one.place.section), one.name)
            for one in settings_of(kind)
            if one.place.section
        }

    def _study(self, one: _Study) -> Study:
        paths = {
            key: self._path(value)
            for key, value in one.data.items()
            if isinstance(value, str) and key in ("data", "test-data")
        }
        task = self._path(one.task) if one.task.endswith(".toml") else one.task
        return Study(task, one.data | paths)

    @property
    def key_file(self) -> Path:
        return self.folder / "key.pem"

    def key(self) -> ec.EllipticCurvePrivateKey:
        """Return the private key.

        Raises:
            SettingsError: it is missing, damaged, or readable by others.
        """
        try:
            return keys.read_key(self.key_file)
        except FileNotFoundError:
            raise SettingsError(
                f"there is no key in {self.folder}. Run `coterie silo init`."
            ) from None
        except OSError as error:
            raise SettingsError(f"{self.key_file} cannot be read: {error.strerror}.") from None
        except keys.KeyFileError as error:
            raise SettingsError(str(error)) from None

    def fingerprint(self) -> str:
        return enrolment.fingerprint_of_key(enrolment.public_pem(self.key().public_key()))

    def request(self) -> str:
        """Return the enrolment request, one line."""
        return enrolment.make_request(self.config.name, self.key())

    def new_key(self) -> None:
        """Replace the key: after a removal, or if somebody else may have seen it."""
        for file in ("coordinator.json", "ca.pem"):  # first: they are of no use to another key
            (self.folder / file).unlink(missing_ok=True)
        _write_key(self.folder)

    def join(self, text: str) -> enrolment.Bundle:
        """Save the coordinator's address and CA certificate from a join bundle.

        Raises:
            EnrolmentError: it is incomplete.
            SettingsError: it was made for another silo or another key.
        """
        bundle = enrolment.read_bundle(text)
        if bundle.name != self.config.name or bundle.silo != self.fingerprint():
            raise SettingsError(
                f"this bundle was made for silo {bundle.name!r} with key {bundle.silo}; this "
                f"silo is {self.config.name!r} with key {self.fingerprint()}."
            )
        joined = {"address": bundle.address, "ca": bundle.ca.decode()}
        files.write_atomically(self.folder / "coordinator.json", json.dumps(joined).encode())
        self.coordinator()
        return bundle

    def coordinator(self) -> tuple[str, Path]:
        """Return the address and the CA file of the coordinator.

        Raises:
            SettingsError: the silo has not joined.
        """
        file = self.folder / "ca.pem"
        try:
            joined = json.loads((self.folder / "coordinator.json").read_text(encoding="utf-8"))
            ca = str(joined["ca"]).encode()
            if not file.exists() or file.read_bytes() != ca:
                files.write_atomically(file, ca)  # a crash came between the two files
            return str(joined["address"]), file
        except FileNotFoundError:
            raise SettingsError(
                f"silo {self.config.name!r} has not joined a federation. Give the operator the "
                "line that `coterie silo init` printed, then run `coterie silo join` with the "
                "answer."
            ) from None
        except OSError as error:
            raise SettingsError(f"coordinator.json cannot be read: {error.strerror}.") from None
        except (ValueError, KeyError, TypeError):
            raise SettingsError(
                f"{self.folder / 'coordinator.json'} is damaged. Run `coterie silo join` again "
                "with the operator's answer."
            ) from None

    def recipient(self) -> str:
        """Return who receives what leaves, for a sentence."""
        try:
            return f"the coordinator at {self.coordinator()[0]}"
        except SettingsError:
            return "a coordinator that this silo has not joined"

    def _path(self, text: str) -> str:
        return str(self.folder / place_of(text))


def create(folder: Path, name: str, *, task: str = "", data: Path | None = None) -> Home:
    """Make a silo's folder with a key and a commented ``silo.toml``; keep existing files.

    ``task`` (by default the digits) and ``data`` are for a new ``silo.toml``; their paths are
    relative to the current folder.

    Raises:
        TaskError: the folder or the data path names the home directory of an unknown user.
        SettingsError: the name is invalid, the folder belongs to another silo, or its ``silo.toml``
            names another task or other data.
    """
    check_name(name)
    folder = place_of(str(folder))
    files.make_folder(folder, private=True)
    file = folder / "silo.toml"
    if task.endswith(".toml"):
        task = str(place_of(task).resolve())
    where = "" if data is None else str(place_of(str(data)).resolve())
    if not file.exists():
        line = f"data = {_toml(where)}" if where else f'# data = "/data/{name}"'
        text = TEMPLATE.format(name=name, task=_toml(task or "digits"), data=line)
        text += "".join(map(_written, SECTIONS))
        files.write_atomically(file, text.encode())
    home = Home(folder)
    if home.config.name != name:
        raise SettingsError(f"{folder} is the folder of silo {home.config.name!r}, not {name!r}.")
    settings = home.settings()
    for key, asked, has in (
        ("task", task, settings.task),
        ("data", where, str(settings.options.get("data", home.folder))),
    ):
        if asked and asked != has and Path(asked) != Path(has).resolve():
            raise SettingsError(
                f"{file} already exists with {key} {has!r}, not {asked!r}. Change it there, or "
                "create the silo in another folder (--home)."
            )
    if not (folder / "key.pem").exists():
        _write_key(folder)
    return home


def _written(name: str) -> str:
    note, optional = (PRIVACY_NOTE, True) if name == OPTIONAL else ("", False)
    return f"\n{note}{template(name, SECTIONS[name], commented=optional)}"


def _toml(text: str) -> str:
    """Return a TOML string: JSON, except for DEL and characters beyond 16 bits."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SettingsError(
            f"{text!r} cannot be written into silo.toml: the name is not UTF-8. Rename it."
        ) from None
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _write_key(folder: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    files.write_atomically(folder / "key.pem", keys.private_pem(key), private=True)


def _read(file: Path) -> Any:
    absent = (
        f"{file.parent} is not a silo's folder (no silo.toml). Create one with `coterie silo "
        f"init --name NAME`, or name it with --home or {ENVIRONMENT}."
    )
    table = read_table(file, SettingsError, absent=absent)
    return checked(_File, table, file, SettingsError)


@contextmanager
def locked(home: Path) -> Iterator[None]:
    """Lock a silo's folder; create it if it is missing.

    Two processes would overwrite each other's models, and, sharing a key, disconnect each other.

    Raises:
        SettingsError: another process holds the lock, or the folder cannot be written.
    """
    with ExitStack() as held:
        try:
            files.make_folder(home)
            held.enter_context(files.locked(home))
        except FileExistsError:
            raise SettingsError(
                f"{home} is a file. A silo saves its models in a folder: name one with --home."
            ) from None
        except OSError as error:
            raise SettingsError(
                f"a silo cannot save its models in {home}: {error.strerror}. With --home, name "
                "a writable folder on a local disk."
            ) from None
        except files.LockedError:
            raise SettingsError(
                f"a silo is already running from {home}. Stop that process, or use a different "
                "folder (--home)."
            ) from None
        yield


@contextmanager
def locked_all(homes: Sequence[str]) -> Iterator[None]:
    """Lock the folders of several silos in this process, as ``locked``; empty names are skipped."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(homes) + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    with ExitStack() as held:
        for home in filter(None, homes):
            held.enter_context(locked(Path(home)))
        yield
