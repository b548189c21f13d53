"""Files that survive a crash, and the processes of this machine."""
