"""Linear, logistic and Poisson regression with standard errors, by sums over silos."""
