"""FedGroup: static groups from one pre-training, by which newcomers are placed too."""
