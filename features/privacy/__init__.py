"""Differential privacy: a silo's trainings have noise, and its budget counts them."""
