"""`python -m firecaffe`: the command line."""

import sys

from firecaffe.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
