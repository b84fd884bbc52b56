"""Inspects a network and its loss before training.

The promise that the number of workers changes no bit covers parameters, buffers and extra state.
State outside the promise is refused or reported as a doubt, in one line that names it.
"""
