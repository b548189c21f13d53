"""FedCollab: measured distances between silos, and an optimised structure of coalitions."""
