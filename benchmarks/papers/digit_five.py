"""Digits from five domains: SVHN, USPS, drawn digits, MNIST-M, MNIST (HCCT's task "Digit").

Every image is brought to 3×28×28, grey repeated to three channels. SynthDigits, the paper's third
domain, is read from ``synth.npz`` where the user has it; otherwise digits are drawn from fonts
(``benchmarks.papers.fonts``), and figures with them are not figures with SynthDigits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.papers.fonts import draw_digits, find_fonts
from coterie.tasks.base import Option, SiloData, TaskError
from coterie.tasks.images.datasets import NamedNetwork, cap, check_bounds, join, scaled
from coterie.tasks.images.image_files import ImageFiles, Images, RawImages, read_images
from coterie.tasks.images.scale import SYMMETRIC
from coterie.tasks.options import place_of, read_options
from coterie.tasks.splits import Share, make_split
from coterie.tasks.splits.options import SPLIT_OPTIONS, silos_asked
from coterie.tasks.splits.shares import Indices, Matrix, ends, iid_shares

DOMAINS: dict[str, ImageFiles] = {
    "svhn": ImageFiles(("svhn.npz", "svhn_small.npz"), None),
    "usps": ImageFiles(("usps.npz",), None),
    "synth": ImageFiles(("synth.npz",), None),
    "mnist-m": ImageFiles(("mnist_m.npz",), None),
    "mnist": ImageFiles(("mnist.npz",), (28, 28), "MNIST/raw"),
}
"""Name → files, in the order of the paper."""

OPTIONS: dict[str, Option] = {
    "data": "",
    "domain": "",
    "domains": ",".join(DOMAINS),
    "split-seed": 0,
    "train": 0,
    "test": 0,
    "fonts": "",
    **SPLIT_OPTIONS,
}

SIDE = 28
NUM_DRAWN = (2000, 1000)  # training and test digits drawn where there is no synth.npz
DRAWN_SEED = 5  # the same for every silo and split: the drawn set is one data set


class DigitFive(NamedNetwork):
    """Ten classes, images of 3×28×28, FedBN's DigitModel or a smaller network.

    Options:
        data: folder with ``svhn.npz`` (or ``svhn_small.npz``), ``usps.npz``, ``mnist_m.npz``,
            ``MNIST/raw`` (or ``mnist.npz``) and perhaps ``synth.npz``. A silo needs its own
            domain's file only. Required.
        domain: this silo's domain, all of it; or
        split: ``by-domain`` with ``silos`` and ``silo``: the silos are dealt to the domains in
            order (ten silos: two each), and those of one domain share it evenly.
        domains: which take part, comma-separated.
        split-seed: seed of the cut.
        test-share: 0 = test on a share of the domain's test part; otherwise both parts are joined
            and each silo keeps this share of its samples for testing, as in the paper.
        train, test: at most so many samples, taken at random; 0 = all.
        fonts: folder of fonts for the drawn digits; by default what the machine has.

    FedBN's network has 14.2 million parameters.

    Digits of one SVHN photograph (``src_train``, ``src_test`` in the file) are never divided.
    Where MNIST-M takes part, MNIST leaves out the images that MNIST-M recoloured (its ``i_train``
    and ``i_test``): else two domains would share samples, and test images would be trained on.
    """

    name = "digit-five"
    num_classes = 10
    models = ("cnn-fedbn", "mlp-128", "mclr")
    shape = (3, SIDE, SIDE)

    def load(self, options: Mapping[str, Option]) -> SiloData:
        """Load this silo's data.

        Raises:
            TaskError: a file is missing or unreadable, or an option is wrong.
        """
        chosen = self._options(options)
        if chosen["split"] == "none":
            return self._domain(chosen, _known(chosen["domain"]), num_silos=1)[0]
        (data,) = self.load_all(options, [chosen["silo"]])
        return data

    def load_all(
        self, options: Mapping[str, Option], silos: Sequence[int] | None = None
    ) -> list[SiloData]:
        """Load silos of ``split=by-domain``, every domain read once. See ``Task.load_all``."""
        chosen = self._options(options)
        if chosen["split"] == "none":
            raise TaskError("several silos need split=by-domain.")
        wanted = silos_asked(silos, chosen["silos"])
        loaded = {
            silo: data
            for domain, members in _members(chosen)
            if set(members) & set(wanted)
            for silo, data in zip(
                members, self._domain(chosen, domain, num_silos=len(members)), strict=True
            )
        }
        return [loaded[silo] for silo in wanted]

    def _options(self, options: Mapping[str, Option]) -> dict[str, Any]:
        chosen = read_options(self.name, options, OPTIONS)
        check_bounds(chosen, ("train", "test", "split-seed"))
        if chosen["split"] not in ("none", "by-domain"):
            raise TaskError(f"split must be none or by-domain. Got {chosen['split']!r}.")
        if (chosen["split"] == "none") != bool(chosen["domain"]):
            raise TaskError(
                "give either domain (this silo has all of it) or split=by-domain with silos and "
                f"silo. Got domain {chosen['domain']!r} and split {chosen['split']!r}."
            )
        if chosen["split"] == "none" and (chosen["silos"] or chosen["test-share"]):
            raise TaskError("silos and test-share belong to split=by-domain. Leave them out.")
        return chosen

    def _domain(self, chosen: Mapping[str, Any], domain: str, *, num_silos: int) -> list[SiloData]:
        """The data of all silos of one domain."""
        raw = _read(self.name, chosen, domain)
        units, test_units = raw.extra.get("src_train"), raw.extra.get("src_test")
        seed, share = chosen["split-seed"], chosen["test-share"]
        config: dict[str, Option] = {"kind": "iid", "silos": num_silos, "seed": seed}
        if share:
            both = join(raw.train, raw.test)
            raw = RawImages(both, both)
            config["test-share"] = share
        if units is not None and test_units is not None:
            rng = np.random.default_rng([seed, 0])
            shares = _in_units(units, test_units, num_silos, share, rng)
        else:
            tests = None if share else raw.test.y
            shares = make_split(config, raw.train.y, test_labels=tests)
        number = list(DOMAINS).index(domain)
        return [
            self._silo(raw, share, chosen, np.random.default_rng([seed, 2, number, place]))
            for place, share in enumerate(shares)
        ]

    def _silo(
        self, raw: RawImages, share: Share, chosen: Mapping[str, Any], rng: np.random.Generator
    ) -> SiloData:
        train = cap(share.train, chosen["train"], rng)
        test = cap(share.test, chosen["test"], rng)
        x_train, x_test = to_rgb28(raw.train.x[train]), to_rgb28(raw.test.x[test])
        return SiloData(
            *(scaled(x_train, SYMMETRIC), raw.train.y[train]),
            *(scaled(x_test, SYMMETRIC), raw.test.y[test]),
            self.num_classes,
        )


def _in_units(
    units: Indices, test_units: Indices, silos: int, share: float, rng: np.random.Generator
) -> list[Share]:
    """Return even shares of a data set in which samples of one unit stay together.

    With ``share``, both parts are joined, and each silo keeps this share of its samples for
    testing.
    """
    if not share:
        trains, tests = (cut_units(own, iid_shares(silos), rng) for own in (units, test_units))
        return [Share(*pair) for pair in zip(trains, tests, strict=True)]
    # Each part numbers its own photographs from 1.
    units = np.concatenate([units, test_units + units.max() + 1])
    shares = []
    for part in cut_units(units, iid_shares(silos), rng):
        least = 1 / len(part) if len(part) > 1 else 0.0
        kept = min(max(share, least), 1 - least)
        test, train = cut_units(units[part], np.array([[kept], [1 - kept]]), rng)
        shares.append(Share(part[train], part[test]))
    return shares


def cut_units(units: Indices, shares: Matrix, rng: np.random.Generator) -> list[Indices]:
    """Cut samples (n,) by shares (silos, 1), met to within one unit; none is divided."""
    _, unit = np.unique(units, return_inverse=True)
    rank = rng.permutation(unit.max() + 1 if len(unit) else 0)[unit]
    order = np.argsort(rank, kind="stable")
    allowed = np.concatenate([[0], np.flatnonzero(np.diff(rank[order])) + 1, [len(order)]])
    wanted = ends(shares[:, 0], len(order))
    after = np.searchsorted(allowed, wanted)
    before = np.maximum(after - 1, 0)
    nearer = np.where(wanted - allowed[before] < allowed[after] - wanted, before, after)
    return [np.sort(order[start:end]) for start, end in pairwise(allowed[nearer])]


def silos_of_domains(silos: int, num_domains: int) -> list[range]:
    """Divide silos over domains, consecutive and even; raise ``TaskError`` if there are too few."""
    if silos < num_domains:
        raise TaskError(
            f"a split by domain needs at least one silo for each of {num_domains} domains. "
            f"Got {silos} silos."
        )
    bounds = [round(i * silos / num_domains) for i in range(num_domains + 1)]
    return [range(start, end) for start, end in pairwise(bounds)]


def small() -> DigitFive:
    """Return the task with a network of one hidden layer."""
    task = DigitFive(model="mlp-128")
    task.name = f"{__name__}:small"
    return task


def to_rgb28(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Bring images to 28×28 with three channels.

    Shrinking averages over the covered pixels (a triangle filter, as Pillow's bilinear does),
    enlarging interpolates.

    Args:
        images: shape (n, H, W), (n, H, W, 1) or (n, H, W, 3).

    Returns:
        Shape (n, 28, 28, 3), values 0–255.
    """
    x = images.astype(np.float32)
    if x.ndim == 3:
        x = x[..., None]
    if x.shape[1:3] != (SIDE, SIDE):
        rows, columns = _weights(x.shape[1]), _weights(x.shape[2])
        x = np.einsum("ah,nhwc,bw->nabc", rows, x, columns, optimize=True)
    return np.ascontiguousarray(np.broadcast_to(x, (*x.shape[:3], 3)), dtype=np.float32)


def _weights(side: int) -> NDArray[np.float32]:
    """How each of 28 pixels is made of ``side``: shape (28, side), rows sum to 1."""
    scale = side / SIDE
    reach = max(scale, 1.0)
    centres = (np.arange(SIDE) + 0.5) * scale
    distance = np.abs(np.arange(side)[None, :] + 0.5 - centres[:, None]) / reach
    weights = np.maximum(1.0 - distance, 0.0)
    normalised: NDArray[np.float32] = (weights / weights.sum(axis=1, keepdims=True)).astype(
        np.float32
    )
    return normalised


def _members(chosen: Mapping[str, Any]) -> list[tuple[str, range]]:
    """The silos of each domain that takes part."""
    names = [_known(name) for name in _names(chosen)]
    if len(set(names)) != len(names):
        raise TaskError(f"domains must name each domain once. Got {chosen['domains']!r}.")
    return list(zip(names, silos_of_domains(chosen["silos"], len(names)), strict=True))


def _names(chosen: Mapping[str, Any]) -> list[str]:
    return [name.strip() for name in chosen["domains"].split(",")]


def _known(domain: str) -> str:
    if domain not in DOMAINS:
        raise TaskError(f"domain must be one of {', '.join(DOMAINS)}. Got {domain!r}.")
    return domain


def _read(task: str, chosen: Mapping[str, Any], domain: str) -> RawImages:
    folder = place_of(chosen["data"])
    if chosen["data"] and folder.is_file():
        raise TaskError(f"data of task {task!r} must be a folder. Got the file {str(folder)!r}.")
    files = DOMAINS[domain]
    empty_handed = domain == "synth" and not (folder / files.npz[0]).is_file()
    if empty_handed and chosen["data"] and folder.is_dir():
        return _drawn(chosen["fonts"])
    raw = read_images(f"{task}, domain {domain}", chosen["data"], files)
    if domain == "mnist" and "mnist-m" in _names(chosen):
        raw = _without_recoloured(raw, folder / DOMAINS["mnist-m"].npz[0])
    for y in (raw.train.y, raw.test.y):
        if len(y) and not 0 <= y.min() <= y.max() <= 9:
            raise TaskError(
                f"labels of domain {domain} must be in [0, 9]. Got {y.min()} to {y.max()}."
            )
    return raw


@lru_cache(maxsize=2)
def _drawn(fonts: str) -> RawImages:
    """The drawn domain, one data set for all silos of a machine."""
    files = find_fonts(fonts)
    rng = np.random.default_rng(DRAWN_SEED)
    train, test = (draw_digits(count, fonts=files, rng=rng) for count in NUM_DRAWN)
    return RawImages(train, test)


def _without_recoloured(raw: RawImages, recoloured: Path) -> RawImages:
    if not recoloured.is_file():
        return raw
    parts = []
    with np.load(recoloured, allow_pickle=False) as archive:
        for (x, y), name in ((raw.train, "i_train"), (raw.test, "i_test")):
            gone = archive[name] if name in archive.files else []
            keep = ~np.isin(np.arange(len(y)), gone)
            parts.append(Images(x[keep], y[keep]))
    return RawImages(parts[0], parts[1])
