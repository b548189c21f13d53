"""Personalisation: fine-tuning, Ditto and APFL."""
