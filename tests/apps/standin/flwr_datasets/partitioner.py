"""Stands in for ``flwr_datasets.partitioner``."""


class IidPartitioner:
    """Has no effect."""

    def __init__(self, num_partitions: int) -> None:
        self.num_partitions = num_partitions
