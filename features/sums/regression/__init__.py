"""Linear, logistic, Poisson and Cox regression with standard errors, by sums over silos."""
