"""``coterie silo check --app``: checks of a ClientApp that need no run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from coterie.client.home.settings import SiloSettings
from coterie.client.resident.foreign import check_policy, conditions, load_app, load_mod


def check_app(settings: SiloSettings, reference: str, mods: Sequence[str]) -> Iterator[str]:
    """Load an app and its mods, and report which conditions hold for it, line by line.

    The app is not run: without a run there is no model to train, and it loads its own data.

    Raises:
        SettingsError: an app or mod cannot be loaded, or a condition cannot be enforced.
    """
    check_policy(settings)
    app = load_app(reference)
    for mod in mods:
        load_mod(mod)
    yield f"silo      {settings.name}"
    # Flower offers no way to ask.
    known = getattr(app, "_registered_funcs", {})
    answers = ", ".join(name.removesuffix(".default") for name in known)
    yield f"app       {reference}{f', answers {answers}' if answers else ''}"
    for mod in mods:
        yield f"mod       {mod}"
    yield "It was loaded, but not run: it trains when a run sends it a model."
    yield ""
    yield from conditions(settings)
