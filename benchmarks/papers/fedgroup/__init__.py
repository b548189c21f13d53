"""FedGroup's Table III, its Fig. 5 (``measures``) and its options on the demo's silos."""
