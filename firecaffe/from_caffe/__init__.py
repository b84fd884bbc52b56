"""A solver or a net of Caffe's becomes a folder with a recipe, and a report of what it came to."""
