"""Building blocks of other strategies: plain averaging, and what trains inside any group."""
