"""Models trained by sums over silos: the contract, and its families."""
