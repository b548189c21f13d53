"""Networks for tables: the linear part first, then hidden layers, as far as these help."""
