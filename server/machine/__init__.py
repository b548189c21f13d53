"""What runs on this machine: the SuperLink, the connection to it, local federations."""
