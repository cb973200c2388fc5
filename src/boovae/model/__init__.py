"""One variational autoencoder: networks, likelihood, prior. Nothing here knows of tasks or replicas."""
