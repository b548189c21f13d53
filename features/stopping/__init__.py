"""The end of a run that validation data no longer show to improve."""
