"""Import a Caffe solver or net: write a folder with a recipe and a report of what was converted."""
