"""Learning rates and optimizers, which make an update of a gradient, with Caffe's words."""
