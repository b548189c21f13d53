"""The resident process: the link to the SuperLink, one or many silos, the outbound ledger."""
