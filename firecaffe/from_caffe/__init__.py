"""Import of a Caffe solver or net: a folder with a recipe and a report of the conversion."""
