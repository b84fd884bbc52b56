"""Forecasts what a training takes on a cluster, from descriptions; starts no process."""
