"""Forecasts the time, memory and cost of a training on a described cluster; starts no process."""
