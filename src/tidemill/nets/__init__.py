"""Networks: policies of observations, encoders, distributions and normalisers. Acting
with an MLP needs no torch; training and images do."""
