"""A Flower strategy of any kind inside each group, on the group's nodes only."""
