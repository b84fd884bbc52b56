"""The machine as it is: links, exchanges, steps and input, measured."""
