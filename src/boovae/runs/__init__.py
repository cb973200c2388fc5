"""A run: train, extend, inspect, tune, export; and the one class that owns its folder."""
