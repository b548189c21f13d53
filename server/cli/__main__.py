"""``python -m coterie.server.cli``: the ``coterie`` command."""

from coterie.server.cli.main import main

main()
