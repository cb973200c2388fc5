"""Experiments with a figure of their own, one file each."""
