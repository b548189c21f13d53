"""Updates in fewer bytes: whose models go out rounded."""
