"""A matrix of datasets and methods, each cell a run, with tables beside published numbers."""
