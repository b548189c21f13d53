"""The papers' tables and figures with the papers' settings, ours beside the published figures."""
