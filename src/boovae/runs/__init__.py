"""Runs: train, extend, evaluate, inspect, tune and export them, and the folder that holds one."""
