"""Digits from five domains: SVHN, USPS, drawn digits, MNIST-M, MNIST (HCCT's task "Digit").

Every image is brought to 3×28×28, grey repeated to three channels. SynthDigits, the paper's third
domain, is read from ``synth.npz`` where the user has it; otherwise digits are drawn from fonts
(``benchmarks.papers.fonts``), and figures with them are not figures with SynthDigits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.papers.fonts import draw_digits, find_fonts
from coterie.tasks.base import Option, SiloData, TaskError
from coterie.tasks.images.datasets import NamedNetwork, cap, check_bounds, finish, join
from coterie.tasks.images.image_files import ImageFiles, Images, RawImages, read_images
from coterie.tasks.images.scale import SYMMETRIC
from coterie.tasks.options import place_of, read_options
from coterie.tasks.splits import Share, make_split, silos_of_domains
from coterie.tasks.splits.options import SPLIT_OPTIONS, silos_asked

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
        seed = chosen["split-seed"]
        config: dict[str, Option] = {"kind": "iid", "silos": num_silos, "seed": seed}
        if chosen["test-share"]:
            if units is not None and test_units is not None:
                # each part numbers its own photographs from 1
                units = np.concatenate([units, test_units + units.max() + 1])
            both = join(raw.train, raw.test)
            raw = RawImages(both, both)
            config["test-share"] = chosen["test-share"]
            shares = make_split(config, both.y, units=units)
        else:
            shares = make_split(
                config, raw.train.y, test_labels=raw.test.y, units=units, test_units=test_units
            )
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
        return finish(
            (to_rgb28(raw.train.x[train]), raw.train.y[train]),
            (to_rgb28(raw.test.x[test]), raw.test.y[test]),
            scale=SYMMETRIC,
            num_classes=self.num_classes,
        )


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
