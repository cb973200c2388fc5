"""One variational autoencoder: networks, likelihood, prior. Nothing here depends on tasks or replicas."""
