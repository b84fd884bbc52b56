"""Learning rates and optimizers, which turn a gradient into an update, with Caffe's names."""
