"""The numerics of every partition algorithm: which silos should train together.

Works on small N x N matrices of N silos and needs numpy only (FedGroup's clustering imports
scikit-learn when called). Row i of a matrix is silo i throughout.
"""
