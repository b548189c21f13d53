"""FedCollab's accuracy tables, and its discriminators beside known distances."""
