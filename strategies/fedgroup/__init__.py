"""FedGroup: static groups from one pre-training, newcomers placed by it."""
