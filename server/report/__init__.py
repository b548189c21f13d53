"""Reports on runs: pictures and figures from their records."""
