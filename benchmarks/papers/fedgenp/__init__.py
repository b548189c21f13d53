"""FedGenP's Table 2 and where generators help; ``figure`` draws decision boundaries."""
