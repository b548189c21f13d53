"""The silo: its ClientApp, local training, and the resident process that keeps both warm."""
