"""A silo's folder: settings, policy, keys, and the models that it keeps."""
