"""Caffe's files (prototxt, caffemodel, binaryproto), and the networks that they describe."""
