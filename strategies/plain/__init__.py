"""What other strategies are made of: plain averaging, and what trains inside any group."""
