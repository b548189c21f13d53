"""The model in use: whether new samples still look like those that it was taken into use with."""
