"""The paper's experiments, cell by cell: a matrix of runs, where it is computed, and the tables and figures from it."""
