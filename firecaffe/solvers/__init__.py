"""From a gradient to an update: learning rates and optimizers, with Caffe's words."""
