"""Validation: how good models are on samples of a silo that its trainings leave out."""
