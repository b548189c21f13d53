"""``python -m coterie.client`` is ``coterie silo``, without the server's code."""

from coterie.client.cli.main import app

app(prog_name="coterie silo")
