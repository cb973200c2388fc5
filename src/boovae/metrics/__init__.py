"""Numbers about a trained model. Metrics only read."""
