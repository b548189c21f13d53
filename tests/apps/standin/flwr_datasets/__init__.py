"""Stands in for ``flwr_datasets``: partitions of different sizes, of two kinds by turns."""

from collections.abc import Mapping

from datasets import Dataset, made

from flwr_datasets.partitioner import IidPartitioner


class FederatedDataset:
    """Made-up partitions under the name of a data set."""

    def __init__(self, *, dataset: str, partitioners: Mapping[str, IidPartitioner]) -> None:
        self.name = dataset

    def load_partition(self, partition_id: int, split: str = "train") -> Dataset:
        """Return a partition; its number of rows says which one it is."""
        count = 100 + 10 * partition_id
        return made(self.name, seed=partition_id, count=count, kind=partition_id % 2)
