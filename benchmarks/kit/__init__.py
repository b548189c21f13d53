"""What every benchmark shares: a store of results, runs in this process, tables, a command line."""
