"""Training as a service: models of many clients on one base, trained and sampled call by call."""
