"""Person keys of samples: those that ``group`` names, and likely keys if it is not set.

No key or other value of the data leaves this module as readable text: even a file name may be a
person's key.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path, PurePath

import numpy as np

from coterie.tasks.base import TaskError
from coterie.tasks.own import files
from coterie.tasks.own.declared import in_nfc
from coterie.tasks.own.dialect import EVERY, Dialect
from coterie.tasks.own.values import SHOWN

# ---------------------------------------------------------------- keys


def checked_keys(keys: Sequence[str], where: str, option: str = "group") -> Sequence[str]:
    """Return the keys, or raise ``TaskError`` if a sample has none."""
    if missing := keys.count(""):
        whose = "person" if option == "group" else "block"
        raise TaskError(
            f"{where} ({option}) has no value in {missing} of {len(keys)} rows; the first is row "
            f"{keys.index('') + 1}. Such a row could belong to a {whose} on the other side of a "
            "split. Leave it out of the file, or give it a unique value."
        )
    return keys


def column_in(place: Path, group: str, written: Dialect) -> str:
    """Return the name in the file of the column that ``group`` names; empty if it is missing."""
    column = written.columns.get(in_nfc(group), in_nfc(group))
    names = {in_nfc(name).strip() for name in files.names_of(place, written)}
    return column if column.strip() in names else ""


def keys_in_column(
    place: Path, group: str, written: Dialect, option: str = "group"
) -> Sequence[str]:
    """Return each row's value in a column, which need not be declared.

    ``group`` is its name, in the file or declared, and ``option`` what names it. Raises
    ``TaskError`` if it or a value is missing.
    """
    import pyarrow.csv

    column = column_in(place, group, written)
    if not column:
        found = files.names_of(place, written)
        has = ", ".join(map(repr, found[:SHOWN])) + (", …" * (len(found) > SHOWN))
        column = written.columns.get(in_nfc(group), in_nfc(group))
        raise TaskError(
            f"{str(place)!r} has no column {column!r}, which {option} names in silo.toml. Its "
            f"columns: {has}."
        )
    texts = files.raw_texts(place, column, written, f"a column {column!r}")
    missing = {*pyarrow.csv.ConvertOptions().null_values, *written.missing.get(EVERY, ())}
    means = {text: written.code(text or "") for text in set(texts)}
    keys = ["" if means[text] in missing else means[text] for text in texts]
    return checked_keys(keys, f"column {column!r} of {str(place)!r}", option)


def keys_in_paths(paths: Sequence[PurePath], depth: int, pattern: str) -> Sequence[str]:
    """Return what a pattern finds in each image's path: its first group, or the whole match.

    The regular expression is searched in the path below the class folder, then in the file name,
    then in the whole path; the first of these with a match for all images is used. ``paths`` are
    below the data folder; ``depth`` is their number of folders down to the class folder, inclusive.
    Raises ``TaskError`` if the pattern is invalid, or finds nothing in some paths.
    """
    try:
        sought = re.compile(in_nfc(pattern))
    except re.error as error:
        raise TaskError(
            f"group must be a regular expression, such as '^(P[0-9]+)_'. Got {pattern!r}: {error}."
        ) from None
    forms: tuple[Callable[[PurePath], str], ...] = (
        lambda path: PurePath(*path.parts[depth:]).as_posix(),
        lambda path: path.name,
        lambda path: path.as_posix(),
    )
    fewest = len(paths)
    for form in forms:
        found = [sought.search(in_nfc(form(path))) for path in paths]
        keys = [(one[1 if sought.groups else 0] or "") if one else "" for one in found]
        if "" not in keys:
            return keys
        fewest = min(fewest, keys.count(""))
    raise TaskError(
        f"group = {pattern!r} finds no person in the paths of {fewest} of {len(paths)} images. "
        "The search covers each path below the folder of its class, such as "
        "ward7/patient12/1.png, and the file's name; the match of its first (group) is the "
        "person."
    )


# ---------------------------------------------------------------- what looks like keys

FEWEST, OFTEN = 3, 50
"""Fewest distinct values that can be persons, and most rows per value that can be one person's."""
MANY, TWICE = 10, 1.5
"""Fewest distinct values, and fewest rows of each, of a column whose name does not suggest
persons."""
EVEN, TOGETHER = 0.5, 1.2
"""Largest variance-to-mean ratio of the values' counts if a design fixed them, and most runs of
equal rows per value if one person's rows are adjacent."""

IDS = (
    "ids?|nrs?|no|num|number|nummer|numm?ero|número|nro|key|uid|guid|uuid|code|ref|name|n|hash"
    "|identifi(er|ant)|identificativo|kennung|schl(ü|ue)ssel|pseudonyme?|index|idx"
)
ALONE = (
    "pat|patients?|patient(e|en|in|ë|ën|inn?en)|pacientes?|pazient[ei]|pasient|pacjent|pacient"
    "|potilas|hasta|患者|病人|환자|subj|subjects?|sujets?|sujetos?|soggett[oi]|persons?|personnes?"
    "|personas?|individuals?|individu[os]?|proband(en|in)?|teilnehmer(in)?|participants?"
    "|participantes?|partecipant[ei]|respondents?|customers?|cust|clients?|clientes?|client[ei]"
    "|klient(en)?|kunden?|klant(en)?|顧客|客户|고객|machines?|maschinen?|macchin[ae]|m[aá]quinas?"
    "|mrn|ssn|pid|ipp"
)
WITH_AN_ID = (
    "case|fall|cas|caso|user|usuario|utente|member|mitglied|membre|household|haushalt|account"
    "|konto|compte|cuenta|device|ger(ä|ae)t|engine|vehicle|fahrzeug|asset|equipment|turbine|unit"
    "|versicherten?|insured|admission|hadm|encounter|episode|stay|animal|tier|specimen|donor"
    "|spender"
)
NAMED = re.compile(rf"({ALONE})|({ALONE}|{WITH_AN_ID})(n|s|en|es)?[ ]?({IDS})|({IDS}) ({ALONE})")
CALLED_ID = re.compile(
    r"(.* )?(ids?|nrs?|nummer|number|key|uid|guid|uuid|hash|pseudonyme?|identifi(er|ant)|kennung)"
    r"|.*[a-z](id|nr)"
)
ELSE = re.compile(
    r"\b(age|alter|edad|[âa]ge|date|datum|fecha|data|time|zeit|year|jahr|ann[ée]e|año|anno|month"
    r"|monat|week|day|tag|hour|zip|plz|cap|postcode|postal|postleitzahl|icd|ops|diagnos\w*|ward"
    r"|station|hospital|klinik|center|site|city|ort|country|land|region|department)\b"
)
"""Column names that do not denote persons: age, dates, places, diagnoses."""
CODE = re.compile(
    r"[^\W\d_]{2,6}[-_ ]?\d{2,}|[^\W\d_][-_ ]?\d{3,}|(?=.*\d)(?=.*[a-f])[0-9a-f-]{8,}"
)
"""A letter and some digits, such as P001; an ICD code has only two digits."""
NUMBERED = re.compile(r"[^\s.,]*\d[^\s.,]*")
"""Sufficient form of a value if the column's name ends like that of a key."""
DATE = re.compile(r"(19|20)\d\d([-./]?(0[1-9]|1[0-2])([-./]?[0-3]\d)?)?")


def repeated_in_columns(
    place: Path, written: Dialect, declared: Collection[str], numeric: Collection[str]
) -> list[str]:
    """Return hints on columns whose repeated values may be person keys, showing only names.

    ``declared`` columns are not such keys; ``numeric`` ones only if their name suggests it.
    """
    skipped = {written.columns.get(name, name) for name in declared}
    inputs = {written.columns.get(name, name) for name in numeric}
    times = Counter(files.names_of(place, written))
    names = [name for name, n in times.items() if n == 1 and in_nfc(name) not in skipped]
    plain = written.bare()
    names = [name for name in names if in_nfc(name) not in inputs or _is_named(name)]
    # Texts of all rows take much more memory than the file, so most columns are ruled out first.
    starts = files.beginnings(place, [in_nfc(name) for name in names], plain) if names else []
    names = [
        name
        for name, values in zip(names, starts, strict=True)
        if values is not None and (_is_named(name) or _form_of(_words(name), values))
    ]
    if not names:
        return []
    table = files.read_columns(place, [in_nfc(name) for name in names], plain, "its columns")
    return [
        f"column {name!r} has {known} different values in {rows} rows. If it identifies the "
        f'person of a row, set group = "{name}" under [data] in silo.toml: no person is then '
        "in both training and test data"
        for name in names
        for known, rows in _repeats(name, table.texts(in_nfc(name)))
    ]


def _is_named(name: str) -> bool:
    return bool(NAMED.fullmatch(_words(name)))


def _words(name: str) -> str:
    """Return ``PatNr`` and ``pat-nr`` as ``pat nr``."""
    apart = re.sub(r"(?<=[^\W\d_A-Z])(?=[A-Z])", " ", in_nfc(name))
    return " ".join(re.split(r"[\W_]+", apart.casefold())).strip()


def _repeats(name: str, texts: Sequence[str | None]) -> Iterator[tuple[int, int]]:
    """Yield the numbers of values and rows if the column may hold person keys."""
    values: dict[str, int] = {}
    places = [values.setdefault(text, len(values)) for text in texts if text and text.strip()]
    known, rows = len(values), len(places)
    if not FEWEST <= known < rows:
        return
    if _is_named(name) or (known >= MANY and _look_like_keys(_words(name), [*values], places)):
        yield known, rows


def _look_like_keys(words: str, values: Sequence[str], places: Sequence[int]) -> bool:
    """Return whether values look like keys if the column's name does not settle it.

    Diagnoses, ages and dates repeat as well.
    """
    form = _form_of(words, values)
    if not form or not TWICE <= len(places) / len(values) <= OFTEN:
        return False
    if all(DATE.match(value) for value in values):
        return False
    often = np.bincount(places)
    stretches = 1 + np.count_nonzero(np.diff(places))
    fixed = bool(often.var() <= EVEN * often.mean() or stretches <= TOGETHER * len(values))
    return form == "code" or fixed


def _form_of(words: str, values: Iterable[str]) -> str:
    """Return whether all values are a ``code`` or ``number`` that may be a key; else empty."""
    code = NUMBERED if CALLED_ID.fullmatch(words) else CODE
    if ELSE.search(words):
        return ""
    if all(code.fullmatch(value.lower()) for value in values):
        return "code"
    return "number" if all(value.isdecimal() for value in values) else ""


def repeated_in_paths(paths: Sequence[PurePath], depth: int) -> list[str]:
    """Return hints on images with similar name beginnings or folders; see ``keys_in_paths``."""
    beginnings = [re.match(r"(?=[^\W_]*\d)([^\W_]+)[\W_]", path.stem) for path in paths]
    num_classes = len({path.parts[depth - 1] for path in paths})
    for what, pattern, keys in (
        ("folders inside the class folders", "([^/]+)/[^/]+$",
         [path.parts[-2] if len(path.parts) > depth + 1 else "" for path in paths]),
        ("name prefixes", "^([^\\W_]+)[\\W_]",
         [one[1] if one else "" for one in beginnings]),
    ):  # fmt: skip
        known = len({*keys})
        if "" in keys or all(DATE.fullmatch(key) for key in keys):
            continue
        if known >= FEWEST and known > num_classes and TWICE <= len(paths) / known <= OFTEN:
            return [
                f"the {len(paths)} images have {known} different {what}. If these identify the "
                f"person of an image, set group = '{pattern}' under [data] in silo.toml: no "
                "person is then in both training and test data"
            ]
    return []
